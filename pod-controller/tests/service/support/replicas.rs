//! Several controllers as processes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use pod_api::client::Client;
use pod_api::{ByteSize, Controller, CreateVolume};
use rustix::process::{Pid, Signal, kill_process};

use super::authority::Pair;
use super::faulty_disk::FaultyDisk;
use super::until;

/// Controllers as processes, which can be killed.
pub(crate) struct Replicas {
    root: PathBuf,
    pub(crate) running: BTreeMap<u16, Child>,
    /// Those that stand still.
    paused: BTreeMap<u16, Child>,
    /// Makes their disks faulty where it is told.
    faults: Option<FaultyDisk>,
    /// More of the configuration of each.
    pub(crate) sections: BTreeMap<u16, String>,
    /// Where each listens besides its socket, and how, as lines of its configuration.
    pub(crate) listen: BTreeMap<u16, String>,
    /// Those that do not find the pool where the others have it.
    pub(crate) outside: BTreeSet<u16>,
    /// How long they wait for a leader that says nothing, in ms.
    pub(crate) election_ms: u32,
}

impl Replicas {
    pub(crate) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            running: BTreeMap::new(),
            paused: BTreeMap::new(),
            faults: None,
            sections: BTreeMap::new(),
            listen: BTreeMap::new(),
            outside: BTreeSet::new(),
            // Calm enough for a machine with much else to do.
            election_ms: 400,
        }
    }

    /// The same, with disks that can be made faulty.
    pub(crate) fn with_faults(root: &Path) -> Self {
        let mut replicas = Self::new(root);
        replicas.faults = Some(FaultyDisk::compile(root));
        replicas
    }

    /// From now on the disk of a replica's log is `full`, `slow` by so many milliseconds, or as it should be.
    pub(crate) fn fault(&self, replica: u16, how: Option<&str>) {
        FaultyDisk::fault(&self.log_file(replica), how);
    }

    /// Waits until one has ended by itself, and returns what it said.
    pub(crate) fn ended(&mut self, replica: u16) -> String {
        // One that does not end is killed with the others.
        let child = self.running.get_mut(&replica).expect("it runs");
        let status = until("a replica to end", || child.try_wait().expect("it is ours"));
        self.running.remove(&replica);
        assert!(!status.success(), "it ended for a reason");
        self.said(replica)
    }

    pub(crate) fn socket(&self, replica: u16) -> PathBuf {
        self.root.join(format!("run/replica{replica}.sock"))
    }

    pub(crate) fn log_file(&self, replica: u16) -> PathBuf {
        self.root.join(format!("replica{replica}.redb.replica"))
    }

    /// The first one goes on with the state of the single controller.
    pub(crate) fn command(&self, replica: u16) -> Command {
        let root = self.root.display();
        let state = if replica == 0 { "state".to_owned() } else { format!("replica{replica}") };
        let path = self.root.join(format!("replica{replica}.toml"));
        let time = |name: &str, default: u32| std::env::var(name).unwrap_or_else(|_| default.to_string());
        let (heartbeat, election) =
            (time("WADI_HEARTBEAT_MS", 100), time("WADI_ELECTION_MS", self.election_ms));
        let (pool, outside) =
            if self.outside.contains(&replica) { ("nowhere/pool", "outside = true\n") } else { ("pool", "") };
        let text = format!(
            "[controller]\nstate = '{root}/{state}.redb'\nlisten = '{root}/run/replica{replica}.sock'\n\
             {}\ndetect-ms = 5000\ntx-area = '4M'\nrx-area = '4M'\ndata-area = '4M'\n\
             [replication]\nreplica = {replica}\nlog = '{root}/replica{replica}.redb.replica'\n\
             heartbeat-ms = {heartbeat}\nelection-ms = {election}\n\
             {outside}[pool]\npath = '{root}/{pool}'\n[run]\ndirectory = '{root}/run'\n{}",
            self.listen.get(&replica).map_or("listen-tcp = 'none'", String::as_str),
            self.sections.get(&replica).map_or("", String::as_str)
        );
        std::fs::write(&path, text).expect("a configuration");
        let log =
            File::options().create(true).append(true).open(self.root.join(format!("replica{replica}.log")));
        let mut command = Command::new(env!("CARGO_BIN_EXE_pod-controller"));
        command.arg("--config").arg(path).stdin(Stdio::null()).stderr(log.expect("a file"));
        if let Some(disk) = &self.faults {
            disk.lie_below(&self.log_file(replica), &mut command);
        }
        command
    }

    pub(crate) fn start(&mut self, replica: u16, arguments: &[&str]) {
        let child = self.command(replica).args(arguments).spawn().expect("the controller starts");
        self.running.insert(replica, child);
    }

    /// Starts the first ones, so many, each of which is a member before the next one comes.
    pub(crate) fn start_first(&mut self, count: u16) {
        let members: Vec<u16> = (0..count).collect();
        for replica in 0..count {
            self.start(replica, if replica == 0 { &["--bootstrap"] } else { &[] });
            self.leader(&members[..=usize::from(replica)]);
        }
    }

    /// As if its host had died.
    pub(crate) fn kill(&mut self, replica: u16) {
        let mut child = self.running.remove(&replica).expect("it runs");
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
    }

    /// As if its host stood still: it lives, and knows of nothing.
    pub(crate) fn pause(&mut self, replica: u16) {
        let child = self.running.remove(&replica).expect("it runs");
        kill_process(Pid::from_child(&child), Signal::STOP).expect("it can be stopped");
        self.paused.insert(replica, child);
    }

    pub(crate) fn go_on(&mut self, replica: u16) {
        let child = self.paused.remove(&replica).expect("it was paused");
        kill_process(Pid::from_child(&child), Signal::CONT).expect("it is there");
        self.running.insert(replica, child);
    }

    pub(crate) fn client(&self, replica: u16) -> Client {
        Client::unix(&self.socket(replica)).expect("a client")
    }

    pub(crate) fn controllers(&self, replica: u16) -> Option<Vec<Controller>> {
        self.client(replica).controllers().ok()
    }

    /// Waits until all that run are members, and say the same of who there is and who leads.
    pub(crate) fn leader(&self, members: &[u16]) -> u16 {
        until("a leader that all know", || {
            let mut leaders = Vec::new();
            for replica in self.running.keys() {
                let known = self.controllers(*replica)?;
                if known.iter().map(|one| one.replica).ne(members.iter().copied()) {
                    return None;
                }
                // The one in its place is another, if its log was lost: its own is no voter yet.
                known.iter().find(|one| one.replica == *replica && one.answers)?;
                leaders.push(known.iter().find(|one| one.leads)?.replica);
            }
            leaders.dedup();
            (leaders.len() == 1 && self.running.contains_key(&leaders[0])).then(|| leaders[0])
        })
    }

    pub(crate) fn said(&self, replica: u16) -> String {
        std::fs::read_to_string(self.root.join(format!("replica{replica}.log"))).unwrap_or_default()
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (replica, said) in (0..7).map(|replica| (replica, self.said(replica))) {
                if !said.is_empty() {
                    eprintln!("--- replica {replica}\n{said}");
                }
            }
        }
        for child in self.running.values_mut().chain(self.paused.values_mut()) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The section of one that listens here, and reaches others there.
pub(crate) fn tcp_section(listen: SocketAddr, reached: &[SocketAddr], pair: &Pair, ca: &Path) -> String {
    let reached: Vec<String> = reached.iter().map(|address| format!("'{address}'")).collect();
    format!(
        "[replication.tcp]\nlisten = '{listen}'\naddresses = [{}]\ncertificate = '{}'\nkey = '{}'\nca = '{}'\n",
        reached.join(", "),
        pair.certificate.display(),
        pair.key.display(),
        ca.display()
    )
}

pub(crate) fn volume(name: &str) -> CreateVolume {
    CreateVolume::new(name, ByteSize::new(1 << 20))
}

/// Asks until somebody leads.
pub(crate) fn create(client: &Client, name: &str) {
    until(name, || match client.create_volume(&volume(name)) {
        Ok(_) => Some(()),
        // Done by the one before, which did not live to say so.
        Err(error) if error.status() == Some(409) => Some(()),
        Err(error) => {
            assert!(error.status().is_none_or(|status| status == 503), "{error}");
            None
        }
    });
}

pub(crate) fn names(client: &Client) -> Option<Vec<String>> {
    Some(client.volumes().ok()?.into_iter().map(|volume| volume.name).collect())
}
