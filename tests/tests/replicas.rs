//! Three controllers over real engines and a guest: grown from a single one while the guest works, and the leader is killed
//! when a cable is pulled.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use pod_controller::api::{Controller, DeviceHealth};
use pod_controller::client::Client;
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::Pod;
use wadi_tests::process::Daemon;
use wadi_tests::stage::{Stage, rounds};

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);

/// Looks until there is something, and panics when there is nothing for too long.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The controllers of a pod, by their numbers.
struct Replicas {
    binary: PathBuf,
    directory: PathBuf,
    processes: Vec<Daemon>,
}

impl Replicas {
    /// In the place of the pod's single controller, with its state.
    fn instead_of_the_controller(pod: &mut Pod) -> Self {
        pod.controller().unwrap().stop().unwrap();
        let single = fs::read_to_string(pod.controller_config_path()).unwrap();
        let directory = pod.directory().to_owned();
        let mut replicas = Self {
            binary: pod.binary("pod-controller"),
            directory: directory.clone(),
            processes: Vec::new(),
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
            fs::write(directory.join(format!("replica{replica}.toml")), text + &section).unwrap();
            let bootstrap: &[&str] = if replica == 0 { &["--bootstrap"] } else { &[] };
            let name = format!("replica{replica}");
            let log = directory.join("log").join(format!("{name}.log"));
            let command = replicas.command(replica, bootstrap);
            replicas.processes.push(Daemon::start(&name, command, &log).unwrap());
            replicas.leader(replica + 1);
        }
        replicas
    }

    fn command(&self, replica: usize, more: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("--config").arg(self.directory.join(format!("replica{replica}.toml"))).args(more);
        command
    }

    fn client(&self, replica: usize) -> Client {
        Client::unix(&self.directory.join(format!("run/replica{replica}.sock"))).unwrap()
    }

    /// Waits until all that run say the same of who leads among so many members.
    fn leader(&mut self, members: usize) -> usize {
        until("a leader that all know", || {
            let running: Vec<usize> =
                (0..self.processes.len()).filter(|replica| self.processes[*replica].running()).collect();
            let mut leaders = Vec::new();
            for replica in &running {
                let known: Vec<Controller> = self.client(*replica).controllers().ok()?;
                leaders.push(usize::from(known.iter().find(|one| one.leads)?.replica));
                if known.len() != members {
                    return None;
                }
            }
            leaders.dedup();
            (leaders.len() == 1 && running.contains(&leaders[0])).then(|| leaders[0])
        })
    }

    fn kill(&mut self, replica: usize) {
        self.processes[replica].kill().unwrap();
    }

    fn start_again(&mut self, replica: usize) {
        let command = self.command(replica, &[]);
        self.processes[replica].start_again(command).unwrap();
    }
}

#[test]
fn leader_dies_while_a_cable_is_pulled_and_the_guest_goes_on() {
    let mut stage = Stage::set_up().unwrap();
    let engines: Vec<_> = stage.pod.processes().skip(1).map(|daemon| daemon.pid()).collect();
    let job =
        |offset_mib, pattern| Job { disk: "vda".into(), offset_mib, size_mib: 128, pattern, flush_every: 64 };
    let disk = stage.vm.start(&job(0, Pattern::Random4K).command()).unwrap();
    let mut replicas = Replicas::instead_of_the_controller(&mut stage.pod);
    Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

    let nics = [("h2", "nic0"), ("h3", "nic1")];
    for round in 0..=rounds() {
        let (from, to) =
            (nics[usize::try_from(round).unwrap() % 2], nics[usize::try_from(round + 1).unwrap() % 2]);
        let disk = stage.vm.start(&job(128, Pattern::Random4K).command()).unwrap();
        let stream = stage.vm.start(&iperf::command(Way::Out, 4)).unwrap();
        stage.vm.wait_for_stream().unwrap();
        let leader = replicas.leader(3);
        replicas.kill(leader);
        stage.pod.pull_cable(from.0, from.1).unwrap();
        let killed = Instant::now();
        let other = replicas.client((leader + 1) % 3);
        until("the failover", || {
            let instance = other.instance("vm1").ok()?;
            (instance.nics.first()?.nic == format!("{}/{}", to.0, to.1)).then_some(())
        });
        eprintln!("round {round}: moved {:?} after the leader's death", killed.elapsed());
        // Its traffic goes on, and every byte on the disk is what was written.
        iperf::Report::parse(&stream.finish(Duration::from_mins(1)).unwrap()).unwrap();
        Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

        replicas.start_again(leader);
        let next = replicas.leader(3);
        stage.pod.plug_cable(from.0, from.1).unwrap();
        until("the NIC", || {
            let device = replicas.client(next).device(from.0, from.1).ok()?;
            (device.health == DeviceHealth::Up).then_some(())
        });
        iperf::run(&stage.vm, Way::In, 1).unwrap();
    }
    let now: Vec<_> = stage.pod.processes().skip(1).map(|daemon| daemon.pid()).collect();
    assert_eq!(now, engines, "engines were not disturbed");
}
