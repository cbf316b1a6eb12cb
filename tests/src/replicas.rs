//! Three controllers in the place of a pod's single one.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use pod_api::Controller;
use pod_api::client::Client;

use crate::pod::{Pod, Release};
use crate::process::Daemon;
use crate::waiting::until;

/// The controllers of a pod, by their numbers.
#[derive(Debug)]
pub struct Replicas {
    binary: PathBuf,
    release: Release,
    directory: PathBuf,
    processes: Vec<Daemon>,
    /// Those that stand still.
    frozen: BTreeSet<usize>,
}

impl Replicas {
    /// In the place of the pod's single controller, with its state. The pod asks the first of them from now on.
    pub fn instead_of_the_controller(pod: &mut Pod) -> Result<Self> {
        pod.controller()?.stop()?;
        let single = fs::read_to_string(pod.controller_config_path())?;
        let directory = pod.directory().to_owned();
        let mut replicas = Self {
            binary: pod.release_binary("pod-controller"),
            release: pod.release(),
            directory: directory.clone(),
            processes: Vec::new(),
            frozen: BTreeSet::new(),
        };
        for replica in 0..3 {
            let root = directory.display();
            let listen = format!("[controller]\nlisten = \"{root}/run/replica{replica}.sock\"");
            // The others have no state file to begin with.
            let state = if replica == 0 { "controller".to_owned() } else { format!("controller{replica}") };
            // Calm enough for a machine with a guest that is emulated.
            let section = format!(
                "[replication]\nreplica = {replica}\nlog = \"{root}/replica{replica}.redb\"\nheartbeat-ms = 100\n\
                 election-ms = 400\n"
            );
            let text = single
                .replacen("[controller]", &listen, 1)
                .replace("/controller.redb", &format!("/{state}.redb"));
            fs::write(directory.join(format!("replica{replica}.toml")), text + &section)?;
            let bootstrap: &[&str] = if replica == 0 { &["--bootstrap"] } else { &[] };
            let name = format!("replica{replica}");
            let log = directory.join("log").join(format!("{name}.log"));
            let command = replicas.command(replica, bootstrap);
            replicas.processes.push(Daemon::start(&name, command, &log)?);
            replicas.leader(replica + 1);
        }
        pod.ask(replicas.client(0)?);
        Ok(replicas)
    }

    fn command(&self, replica: usize, more: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("--config").arg(self.directory.join(format!("replica{replica}.toml"))).args(more);
        self.release.tell(&mut command);
        command
    }

    /// Asks this replica.
    pub fn client(&self, replica: usize) -> Result<Client> {
        Ok(Client::unix(&self.directory.join(format!("run/replica{replica}.sock")))?)
    }

    /// Waits until all that run, and do not stand still, say the same of who of them leads among so many members.
    pub fn leader(&mut self, members: usize) -> usize {
        until("a leader that all know", || {
            let mut running: Vec<usize> = (0..self.processes.len()).collect();
            running.retain(|replica| self.processes[*replica].running() && !self.frozen.contains(replica));
            let mut leaders = Vec::new();
            for replica in &running {
                let known: Vec<Controller> = self.client(*replica).ok()?.controllers().ok()?;
                leaders.push(usize::from(known.iter().find(|one| one.leads)?.replica));
                if known.len() != members {
                    return None;
                }
            }
            leaders.dedup();
            (leaders.len() == 1 && running.contains(&leaders[0])).then(|| leaders[0])
        })
    }

    /// Kills one of them as `kill -9` does.
    pub fn kill(&mut self, replica: usize) -> Result<()> {
        self.processes[replica].kill()
    }

    /// Has one of them stand still.
    pub fn freeze(&mut self, replica: usize) -> Result<()> {
        self.frozen.insert(replica);
        self.processes[replica].freeze()
    }

    /// Lets it go on.
    pub fn thaw(&mut self, replica: usize) -> Result<()> {
        self.frozen.remove(&replica);
        self.processes[replica].thaw()
    }

    /// Starts it again.
    pub fn start_again(&mut self, replica: usize) -> Result<()> {
        let command = self.command(replica, &[]);
        self.processes[replica].start_again(command)
    }

    /// Stops one in good order, and starts the one of the pod's release in its place.
    pub fn replace(&mut self, replica: usize, pod: &Pod) -> Result<()> {
        self.processes[replica].stop()?;
        (self.binary, self.release) = (pod.release_binary("pod-controller"), pod.release());
        self.start_again(replica)
    }
}
