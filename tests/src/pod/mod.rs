//! A pod on one machine: every host is a network namespace with its own daemons, a bridge in a namespace of its own is
//! the top-of-rack switch, and behind it is a client.

mod aggregation;
mod clocks;
mod plan;
mod release;
mod role;
mod standing_still;
mod topology;
mod vm;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use pod_api::client::Client;
use pod_api::{
    ByteSize, CreateInstance, CreateVolume, Device, DeviceHealth, EndpointHealth, Instance, NicRequest,
};
use pod_protocol::protocol::Protocol;

use crate::namespace::Namespace;
use crate::process::Daemon;
use crate::runner;

pub use plan::{HostPlan, NicDriver, PodBuilder};
pub use release::Release;
pub use role::Role;
use topology::Topology;
pub use vm::{GuestJob, PodVm, RAM_BYTES, VmShape, WaitingVm};

/// The client's address.
pub const CLIENT_ADDRESS: &str = "10.77.0.1";
/// The guest's address.
pub const GUEST_ADDRESS: &str = "10.77.0.2";

/// How long the pod may take for one step of getting ready.
const READY_DEADLINE: Duration = Duration::from_secs(20);

static PODS: AtomicU32 = AtomicU32::new(0);

/// How many pods with daemons may run at a time in this process: a pod and its VM wait for about half of the time, and more of them would be
/// too much for a small machine.
const PODS_AT_A_TIME: usize = 2;
/// How many run.
static RUNNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// The right to run a pod.
#[derive(Debug)]
struct Turn;

impl Turn {
    fn wait() -> Self {
        let (running, changed) = &RUNNING;
        let guard = running.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = changed.wait_while(guard, |running| *running >= PODS_AT_A_TIME);
        *waited.unwrap_or_else(PoisonError::into_inner) += 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (running, changed) = &RUNNING;
        *running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        changed.notify_one();
    }
}

/// A pod that runs. Dropping it removes everything that belongs to it.
#[derive(Debug)]
pub struct Pod {
    // Dropped in this order: what uses something goes before it.
    daemons: Vec<(String, Role, Daemon)>,
    controller: Option<Daemon>,
    client: Client,
    topology: Topology,
    tag: String,
    plan: PodBuilder,
    binaries: PathBuf,
    directory: PathBuf,
    memory: PathBuf,
    turn: Option<Turn>,
}

impl PodBuilder {
    /// Builds the pod: network, pool, controller, daemons. Returns once all have joined and their devices are up. Waits
    /// for its turn while two other pods of this process run.
    pub fn start(self) -> Result<Pod> {
        let turn = Turn::wait();
        let mut pod = self.lay_out()?;
        pod.turn = Some(turn);
        for name in ["wadi-pool", "pod-controller", "vhost-net-cxl", "vhost-blk-cxl"] {
            if !pod.binary(name).exists() {
                bail!("{} is not built: cargo build --workspace --bins", pod.binary(name).display());
            }
        }
        pod.create_pool()?;
        pod.start_controller()?;
        for host in pod.plan.hosts.clone() {
            for role in Role::of(&host) {
                pod.start_daemon(&host.name, role)?;
            }
        }
        pod.wait_until_joined()?;
        Ok(pod)
    }

    /// Builds the pod's network and files, and starts nothing.
    pub fn lay_out(self) -> Result<Pod> {
        let tag = match PODS.fetch_add(1, Ordering::Relaxed) {
            0 => runner::prefix(),
            number => format!("{}-{number}", runner::prefix()),
        };
        let directory = runner::state_directory(&tag)?;
        let memory = runner::memory_directory(&tag)?;
        let topology = Topology::build(&tag, &self.hosts, self.nic_driver)?;
        fs::create_dir(directory.join("log"))?;
        let pool = memory.join("pool");
        for (index, host) in self.hosts.iter().enumerate() {
            let text = host.config(index + 1, &pool, &directory, self.nic_driver);
            fs::write(directory.join(format!("{}.toml", host.name)), text)?;
        }
        let controller = controller_config(&pool, &directory, &self) + self.controller_sections;
        fs::write(directory.join("controller.toml"), controller)?;
        let client = Client::unix(&directory.join("run/controller.sock"))?;
        Ok(Pod {
            daemons: Vec::new(),
            controller: None,
            client,
            topology,
            tag,
            plan: self,
            binaries: binaries()?,
            directory,
            memory,
            turn: None,
        })
    }
}

impl Pod {
    /// The controller's API.
    pub fn api(&self) -> &Client {
        &self.client
    }

    /// The pod's pool.
    pub fn pool_path(&self) -> PathBuf {
        self.memory.join("pool")
    }

    /// Where the pod's files are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where the program that has a foreign SSD of a host is to serve it.
    pub fn ssd_socket(&self, host: &str, ssd: &str) -> PathBuf {
        plan::foreign_socket(&self.directory, host, ssd)
    }

    /// The start of every name that belongs to this pod.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The configuration of a host.
    pub fn config_path(&self, host: &str) -> PathBuf {
        self.directory.join(format!("{host}.toml"))
    }

    /// The controller's configuration.
    pub fn controller_config_path(&self) -> PathBuf {
        self.directory.join("controller.toml")
    }

    /// A program of ours.
    pub fn binary(&self, name: &str) -> PathBuf {
        self.binaries.join(name)
    }

    /// What `podctl` says to these words, or how it complains.
    pub fn podctl(&self, words: &[&str]) -> Result<String, String> {
        let server = format!("unix:{}", self.directory().join("run/controller.sock").display());
        let output = Command::new(self.binary("podctl")).arg("--server").arg(server).args(words).output();
        let output = output.map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// The release of which daemons are that are started from now on.
    pub fn release(&self) -> Release {
        self.plan.release
    }

    /// Has daemons that are started from now on be of this release.
    pub fn set_release(&mut self, release: Release) {
        self.plan.release = release;
    }

    /// A daemon's program, of the release that is started now.
    pub fn release_binary(&self, name: &str) -> PathBuf {
        self.plan.release.binaries().unwrap_or_else(|| self.binaries.clone()).join(name)
    }

    /// Others have taken the controller's place: this one of them is asked.
    pub fn ask(&mut self, controller: Client) {
        self.controller = None;
        self.client = controller;
    }

    /// The process ids of all daemons but controllers.
    pub fn engines(&self) -> Vec<Option<u32>> {
        self.daemons.iter().map(|(_, _, daemon)| daemon.pid()).collect()
    }

    /// The namespace of a host.
    pub fn host(&self, name: &str) -> Result<&Namespace> {
        self.topology.host(name)
    }

    /// The client behind the switch.
    pub fn client_namespace(&self) -> &Namespace {
        self.topology.client()
    }

    /// The namespace of the controller.
    pub fn control_namespace(&self) -> &Namespace {
        self.topology.control()
    }

    /// Pulls the cable of a host's NIC out of the switch.
    pub fn pull_cable(&self, host: &str, nic: &str) -> Result<()> {
        self.topology.set_cable(host, nic, false)
    }

    /// Plugs it in again.
    pub fn plug_cable(&self, host: &str, nic: &str) -> Result<()> {
        self.topology.set_cable(host, nic, true)
    }

    /// The host and the NIC whose cable the switch has learnt an address to be at.
    pub fn cable_towards(&self, mac: &str) -> Result<(String, String)> {
        self.topology.cable_towards(mac)
    }

    /// Makes the pool, with a program of its own as an operator would.
    pub fn create_pool(&self) -> Result<()> {
        let output = Command::new(self.binary("wadi-pool"))
            .arg("create")
            .arg(self.pool_path())
            .args(["--size", self.plan.pool_size, "--coherence", self.plan.coherence])
            // Of several pods at once, and each uses little.
            .arg("--sparse")
            .output()
            .context("cannot run wadi-pool")?;
        if !output.status.success() {
            bail!("wadi-pool failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Starts the controller, or starts it again, and waits until it answers.
    pub fn start_controller(&mut self) -> Result<()> {
        self.start_controller_with(&[])
    }

    /// As [`Pod::start_controller`], with more arguments.
    pub fn start_controller_with(&mut self, arguments: &[&str]) -> Result<()> {
        let mut command = self.command_in(self.topology.control(), None, "pod-controller")?;
        command.arg("--config").arg(self.controller_config_path()).args(arguments);
        self.give_clock("controller", &mut command)?;
        self.plan.release.tell(&mut command);
        let log = self.log("controller");
        match &mut self.controller {
            Some(daemon) => daemon.start_again(command)?,
            empty => *empty = Some(Daemon::start("controller", command, &log)?),
        }
        let started = Instant::now();
        while let Err(error) = self.client.ready() {
            self.controller()?.check()?;
            if started.elapsed() > READY_DEADLINE {
                return Err(error).context("the controller does not get ready");
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The controller's process.
    pub fn controller(&mut self) -> Result<&mut Daemon> {
        self.controller.as_mut().context("the controller was never started")
    }

    /// The command line of a daemon.
    pub fn daemon_command(&self, host: &str, role: Role) -> Result<Command> {
        let mut command = self.command_in(self.topology.host(host)?, Some(host), role.binary())?;
        command.arg(role.side()).arg("--config").arg(self.config_path(host));
        self.plan.release.tell(&mut command);
        Ok(command)
    }

    /// Starts a daemon, or starts it again.
    pub fn start_daemon(&mut self, host: &str, role: Role) -> Result<()> {
        let mut command = self.daemon_command(host, role)?;
        let name = format!("{host}-{role}");
        self.give_clock(&name, &mut command)?;
        let log = self.log(&name);
        if let Ok(daemon) = self.daemon(host, role) {
            return daemon.start_again(command);
        }
        self.daemons.push((host.to_owned(), role, Daemon::start(&name, command, &log)?));
        Ok(())
    }

    /// A daemon's process.
    pub fn daemon(&mut self, host: &str, role: Role) -> Result<&mut Daemon> {
        self.daemons
            .iter_mut()
            .find(|(of, is, _)| of == host && *is == role)
            .map(|(_, _, daemon)| daemon)
            .with_context(|| format!("{host} has no {role}"))
    }

    /// All processes of the pod, the controller first.
    pub fn processes(&mut self) -> impl Iterator<Item = &mut Daemon> {
        self.controller.iter_mut().chain(self.daemons.iter_mut().map(|(_, _, daemon)| daemon))
    }

    /// Waits until every daemon has joined under its present process id and every device is up.
    pub fn wait_until_joined(&mut self) -> Result<()> {
        let started = Instant::now();
        loop {
            let missing = self.missing()?;
            if missing.is_empty() {
                return Ok(());
            }
            for daemon in self.processes() {
                daemon.check()?;
            }
            if started.elapsed() > READY_DEADLINE {
                bail!("still missing after {} s: {}", READY_DEADLINE.as_secs(), missing.join(", "));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the pod speaks the newest version, as it does once all of it has said that it knows that.
    pub fn wait_for_protocol(&self) -> Result<()> {
        let started = Instant::now();
        while self.api().pool()?.protocol != Protocol::CURRENT.to_string() {
            if started.elapsed() > READY_DEADLINE {
                bail!("the pod does not speak what all of it knows");
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits until the first NIC of an instance is this one, such as `h3/nic1`.
    pub fn wait_for_nic(&self, instance: &str, nic: &str) -> Result<()> {
        let started = Instant::now();
        loop {
            let instance = self.client.instance(instance)?;
            let now = instance.nics.first().map(|nic| nic.nic.as_str());
            if now == Some(nic) {
                return Ok(());
            }
            if started.elapsed() > READY_DEADLINE {
                bail!("the NIC of {} is still {now:?}, not {nic}", instance.name);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn missing(&self) -> Result<Vec<String>> {
        let hosts = self.client.hosts()?;
        let devices = self.client.devices()?;
        let mut missing = Vec::new();
        for (name, role, daemon) in &self.daemons {
            let joined = hosts.iter().filter(|host| host.name == *name).any(|host| {
                host.endpoints.iter().any(|endpoint| {
                    endpoint.role == role.to_string()
                        && endpoint.health == EndpointHealth::Joined
                        && Some(endpoint.pid) == daemon.pid()
                })
            });
            if !joined {
                missing.push(format!("{name}/{role}"));
            }
        }
        for host in &self.plan.hosts {
            let names = host.nics.iter().map(|nic| &nic.name).chain(host.ssds.iter().map(|ssd| &ssd.name));
            for name in names.map(|name| format!("{}/{name}", host.name)) {
                let up = |device: &Device| device.name == name && device.health == DeviceHealth::Up;
                if !devices.iter().any(up) {
                    missing.push(name);
                }
            }
        }
        Ok(missing)
    }

    /// Creates an instance on `host` with one NIC and these volumes (name and size), and waits until a VM can start.
    pub fn create_instance(
        &self,
        name: &str,
        host: &str,
        volumes: &[(&str, u64, Option<&str>)],
    ) -> Result<Instance> {
        for (volume, size_bytes, device) in volumes {
            self.client.create_volume(&CreateVolume {
                device: device.map(str::to_owned),
                ..CreateVolume::new(*volume, ByteSize::new(*size_bytes))
            })?;
        }
        let request = CreateInstance {
            name: name.to_owned(),
            host: host.to_owned(),
            nics: vec![NicRequest::default()],
            volumes: volumes.iter().map(|(volume, ..)| (*volume).to_owned()).collect(),
            ..CreateInstance::default()
        };
        self.create_instance_as(&request)
    }

    /// Creates an instance as the request says, and waits until a VM can start. With `WADI_RAM=pool` in the environment its memory lies in the
    /// pool, so that tests can be run both ways.
    pub fn create_instance_as(&self, request: &CreateInstance) -> Result<Instance> {
        let mut request = request.clone();
        if env::var_os("WADI_RAM").is_some_and(|ram| ram == "pool") {
            request.ram_bytes.get_or_insert(RAM_BYTES);
        }
        let instance = self.client.create_instance(&request, READY_DEADLINE)?;
        if !instance.ready {
            bail!("{} is not ready: it waits for {}", request.name, instance.waiting_for.join(", "));
        }
        Ok(instance)
    }

    /// Leaves the pod and the VM as they are when this process ends. For pods that were told so from the beginning.
    pub fn leave(self, vm: PodVm) -> Result<()> {
        runner::keep_everything(&self.tag)?;
        // Their ends are what would remove them.
        std::mem::forget(vm);
        std::mem::forget(self);
        Ok(())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.directory.join("log").join(format!("{name}.log"))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // All at once: each takes a moment to leave in good order.
        for daemon in self.processes() {
            daemon.ask_to_stop();
        }
        self.daemons.clear();
        self.controller = None;
        let _ = fs::remove_dir_all(&self.directory);
        let _ = fs::remove_dir_all(&self.memory);
        self.remove_clocks();
    }
}

/// All hosts of the pod share the cores of this machine, often with emulated guests: what stands still for a moment is not dead.
fn controller_config(pool: &Path, directory: &Path, plan: &PodBuilder) -> String {
    let PodBuilder { blk_grace_ms, disk_queues, release, controller_settings, .. } = plan;
    // Controllers of a release before know no other way to say so than to say nothing.
    let listen_tcp = if release.binaries().is_some() { "" } else { "listen-tcp = \"none\"\n" };
    format!(
        "[controller]\nstate = \"{}\"\n{listen_tcp}detect-ms = 1000\nblk-grace-ms = {blk_grace_ms}\ndisk-queues = {disk_queues}\n{controller_settings}\n[pool]\npath = \"{}\"\n\n[run]\ndirectory = \"{}\"\nwakeup = \"socket\"\n",
        directory.join("controller.redb").display(),
        pool.display(),
        directory.join("run").display(),
    )
}

/// Where cargo put the daemons: beside this program, or above it if this is a test.
fn binaries() -> Result<PathBuf> {
    let this = std::env::current_exe()?;
    let directory = this.parent().context("this program lies nowhere")?;
    let directory =
        if directory.ends_with("deps") { directory.parent().unwrap_or(directory) } else { directory };
    Ok(directory.to_owned())
}
