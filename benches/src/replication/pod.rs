//! Three controllers as processes, and endpoints that note when they are told something.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cxl_pool::{Area, CoherenceMode, CreateOptions, Pool, Role};
use pod_api::client::Client;
use pod_protocol::config::HostConfig;
use pod_protocol::daemon::StopSignal;
use pod_protocol::endpoint::{Endpoint, Handler, Reporter};
use pod_protocol::ids::RegionId;
use pod_protocol::objects::{Object, ObjectId};
use pod_protocol::reports::{DeviceReport, Join};
use pod_protocol::telemetry::{DeviceTelemetry, Telemetry};
use wadi_tests::runner::{self, memory_tempdir};

use super::host::Host;

/// How many controllers there are.
pub(super) const REPLICAS: u16 = 3;
/// Longer than anything takes; only what is broken waits for it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Looks until there is something.
pub(super) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        if began.elapsed() > PATIENCE {
            bail!("waited in vain for {what}");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The pod.
pub(super) struct Pod {
    // What uses the directories goes before them.
    endpoints: Vec<FakeDaemon>,
    controllers: BTreeMap<u16, Child>,
    /// Logs and state files, on a disk.
    disk: tempfile::TempDir,
    /// Pool and sockets.
    memory: tempfile::TempDir,
    binary: PathBuf,
    times: (u64, u64),
}

impl Pod {
    /// A frontend on `h1`, a NIC on `h2` and one on `h3`.
    pub(super) fn start(heartbeat_ms: u64, election_ms: u64, directory: &Path) -> Result<Self> {
        let binary = std::env::current_exe()?.with_file_name("pod-controller");
        if !binary.exists() {
            bail!("{} is not built: make build", binary.display());
        }
        fs::create_dir_all(directory)?;
        let disk = tempfile::tempdir_in(directory)?;
        let memory = memory_tempdir()?;
        let options = CreateOptions {
            size_bytes: Some(256 << 20),
            mode: CoherenceMode::Hardware,
            host_slots: 5,
            ..CreateOptions::default()
        };
        Pool::create(&memory.path().join("pool"), &options)?;
        let mut pod = Self {
            endpoints: Vec::new(),
            controllers: BTreeMap::new(),
            disk,
            memory,
            binary,
            times: (heartbeat_ms, election_ms),
        };
        fs::create_dir(pod.memory.path().join("run"))?;
        for replica in 0..REPLICAS {
            pod.start_controller(replica, replica == 0)?;
            pod.leader(usize::from(replica) + 1)?;
        }
        for (host, role, nic) in [
            (1, Role::NetFrontend, None),
            (2, Role::NetBackend, Some("nic0")),
            (3, Role::NetBackend, Some("nic0")),
        ] {
            pod.endpoints.push(FakeDaemon::start(pod.memory.path(), host, role, nic)?);
        }
        let client = pod.client(0)?;
        until("the endpoints", || {
            let hosts = client.hosts().ok()?;
            (hosts.iter().map(|host| host.endpoints.len()).sum::<usize>() == 3).then_some(())
        })?;
        Ok(pod)
    }

    pub(super) fn start_controller(&mut self, replica: u16, first: bool) -> Result<()> {
        let (disk, memory) = (self.disk.path().display(), self.memory.path().display());
        let (heartbeat, election) = self.times;
        let text = format!(
            "[controller]\nstate = '{disk}/state{replica}.redb'\nlisten = '{memory}/run/replica{replica}.sock'\nlisten-tcp = 'none'\n\
             flaps-max = 0\ntx-area = '4M'\nrx-area = '4M'\n\
             [replication]\nreplica = {replica}\nheartbeat-ms = {heartbeat}\nelection-ms = {election}\n\
             [pool]\npath = '{memory}/pool'\n[run]\ndirectory = '{memory}/run'\n"
        );
        let config = self.disk.path().join(format!("replica{replica}.toml"));
        fs::write(&config, text)?;
        let log = self.disk.path().join(format!("replica{replica}.log"));
        let log = File::options().create(true).append(true).open(log)?;
        let [setpriv, words @ ..] = runner::tether();
        let mut command = Command::new(setpriv);
        command.args(words).arg(&self.binary).arg("--config").arg(config).stdin(Stdio::null()).stderr(log);
        if first {
            command.arg("--bootstrap");
        }
        let child = runner::spawn(command).context("cannot start a controller")?;
        self.controllers.insert(replica, child);
        Ok(())
    }

    /// As if its host had died. Returns when that was.
    pub(super) fn kill(&mut self, replica: u16) -> Result<Instant> {
        let mut child = self.controllers.remove(&replica).context("it does not run")?;
        let killed = Instant::now();
        child.kill()?;
        child.wait()?;
        Ok(killed)
    }

    pub(super) fn client(&self, replica: u16) -> Result<Client> {
        Ok(Client::unix(&self.memory.path().join(format!("run/replica{replica}.sock")))?)
    }

    /// Waits until all that run say the same of who leads among so many members, and lack nothing.
    pub(super) fn leader(&self, members: usize) -> Result<u16> {
        until("a leader that all know", || {
            let mut leaders = Vec::new();
            for replica in self.controllers.keys() {
                let known = self.client(*replica).ok()?.controllers().ok()?;
                let behind = known.iter().any(|one| one.behind_changes.is_some_and(|behind| behind > 0));
                if known.len() != members || behind {
                    return None;
                }
                leaders.push(known.iter().find(|one| one.leads)?.replica);
            }
            leaders.dedup();
            (leaders.len() == 1 && self.controllers.contains_key(&leaders[0])).then(|| leaders[0])
        })
    }

    /// A host that is killed later.
    pub(super) fn start_host(&self) -> Result<Host> {
        Host::start(self.memory.path(), self.disk.path())
    }

    /// The frontend's daemon.
    pub(super) fn frontend(&self) -> &FakeDaemon {
        &self.endpoints[0]
    }

    /// The daemon of a host's NIC.
    pub(super) fn nic(&self, host: &str) -> &FakeDaemon {
        &self.endpoints[if host == "h2" { 1 } else { 2 }]
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.endpoints.clear();
        for child in self.controllers.values_mut() {
            // One that has ended needs no killing.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A daemon without an engine.
pub(super) struct FakeDaemon {
    /// What it was told, and when.
    pub(super) told: Receiver<(Instant, Object)>,
    pub(super) reporter: Reporter,
    stop: StopSignal,
    thread: Option<JoinHandle<()>>,
}

impl FakeDaemon {
    fn start(root: &Path, host: u16, role: Role, nic: Option<&str>) -> Result<Self> {
        let text = format!(
            "[host]\nid = {host}\nname = 'h{host}'\n[pool]\npath = '{root}/pool'\n[run]\ndirectory = '{root}/run'\n",
            root = root.display()
        );
        let config = HostConfig::parse(&text, Path::new("host.toml"))?;
        let pool = Pool::open(&root.join("pool"))?;
        let devices: Vec<DeviceReport> = nic
            .map(|name| DeviceReport::Nic {
                name: name.to_owned(),
                driver: "null".to_owned(),
                mac: None,
                up: true,
                speed_mbps: 10_000,
                mtu: 1500,
                features: 0,
                backup: false,
                lag: None,
            })
            .into_iter()
            .collect();
        let join = Join {
            host_name: format!("h{host}"),
            software: "benchmark".to_owned(),
            pid: std::process::id(),
            devices,
            memory_failures: Vec::new(),
            fence_ms: None,
        };
        let (sender, told) = mpsc::channel();
        let handler = Noting { sender, nic: nic.map(str::to_owned) };
        let mut reporter = None;
        let endpoint = Endpoint::join(&pool, pool.hardware(), &config, role, join, |it, _| {
            reporter = Some(it);
            Box::new(handler)
        })?;
        let reporter = reporter.context("it was not asked for a handler")?;
        let stop = StopSignal::manual()?;
        let thread = thread::spawn({
            let stop = stop.clone();
            move || {
                if let Err(error) = endpoint.run_until(&stop) {
                    eprintln!("h{host}: {error}");
                }
            }
        });
        Ok(Self { told, reporter, stop, thread: Some(thread) })
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            // It has said what went wrong.
            let _ = thread.join();
        }
    }
}

struct Noting {
    sender: Sender<(Instant, Object)>,
    nic: Option<String>,
}

impl Handler for Noting {
    fn apply(&mut self, object: Object) -> Result<(), String> {
        // Nobody may want to know any more.
        let _ = self.sender.send((Instant::now(), object));
        Ok(())
    }

    fn remove(&mut self, _: ObjectId) -> Result<(), String> {
        Ok(())
    }

    fn scrub(&mut self, _: RegionId, _: Area) -> Result<(), String> {
        Ok(())
    }

    fn telemetry(&mut self) -> Telemetry {
        let device =
            |name: &String| DeviceTelemetry { name: name.clone(), up: true, ..DeviceTelemetry::default() };
        Telemetry { devices: self.nic.iter().map(device).collect(), ..Telemetry::default() }
    }

    fn fenced(&mut self) {}
}
