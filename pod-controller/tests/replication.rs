//! Several controllers: a single one grows to three, leaders die, and what was answered is there.

mod support;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cxl_pool::Role;
use pod_controller::api::{ByteSize, Controller, CreateVolume, DeviceHealth};
use pod_controller::client::Client;
use pod_protocol::objects::Object;
use pod_protocol::reports::Report;
use rustix::process::{Pid, Signal, kill_process};
use support::{Pod, until, vm};

/// Controllers as processes, which can be killed.
struct Replicas {
    root: PathBuf,
    running: BTreeMap<u16, Child>,
}

impl Replicas {
    fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), running: BTreeMap::new() }
    }

    fn socket(&self, replica: u16) -> PathBuf {
        self.root.join(format!("run/replica{replica}.sock"))
    }

    fn log_file(&self, replica: u16) -> PathBuf {
        self.root.join(format!("replica{replica}.redb.replica"))
    }

    /// The first one goes on with the state of the single controller.
    fn command(&self, replica: u16) -> Command {
        let root = self.root.display();
        let state = if replica == 0 { "state".to_owned() } else { format!("replica{replica}") };
        let path = self.root.join(format!("replica{replica}.toml"));
        let time = |name: &str, default| std::env::var(name).unwrap_or_else(|_| String::from(default));
        // Calm enough for a machine with much else to do.
        let (heartbeat, election) = (time("WADI_HEARTBEAT_MS", "100"), time("WADI_ELECTION_MS", "400"));
        let text = format!(
            "[controller]\nstate = '{root}/{state}.redb'\nlisten = '{root}/run/replica{replica}.sock'\n\
             detect-ms = 5000\ntx-area = '4M'\nrx-area = '4M'\ndata-area = '4M'\n\
             [replication]\nreplica = {replica}\nlog = '{root}/replica{replica}.redb.replica'\n\
             heartbeat-ms = {heartbeat}\nelection-ms = {election}\n\
             [pool]\npath = '{root}/pool'\n[run]\ndirectory = '{root}/run'\n"
        );
        std::fs::write(&path, text).expect("a configuration");
        let log =
            File::options().create(true).append(true).open(self.root.join(format!("replica{replica}.log")));
        let mut command = Command::new(env!("CARGO_BIN_EXE_pod-controller"));
        command.arg("--config").arg(path).stdin(Stdio::null()).stderr(log.expect("a file"));
        command
    }

    fn start(&mut self, replica: u16, arguments: &[&str]) {
        let child = self.command(replica).args(arguments).spawn().expect("the controller starts");
        self.running.insert(replica, child);
    }

    /// As if its host had died.
    fn kill(&mut self, replica: u16) {
        let mut child = self.running.remove(&replica).expect("it runs");
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
    }

    /// As if its host stood still: it lives, and knows of nothing.
    fn pause(&mut self, replica: u16) -> Child {
        let child = self.running.remove(&replica).expect("it runs");
        kill_process(Pid::from_child(&child), Signal::STOP).expect("it can be stopped");
        child
    }

    fn go_on(&mut self, replica: u16, child: Child) {
        kill_process(Pid::from_child(&child), Signal::CONT).expect("it is there");
        self.running.insert(replica, child);
    }

    fn client(&self, replica: u16) -> Client {
        Client::unix(&self.socket(replica)).expect("a client")
    }

    fn controllers(&self, replica: u16) -> Option<Vec<Controller>> {
        self.client(replica).controllers().ok()
    }

    /// Waits until all that run say the same of who there is and who leads.
    fn leader(&self, members: &[u16]) -> u16 {
        until("a leader that all know", || {
            let mut leaders = Vec::new();
            for replica in self.running.keys() {
                let known = self.controllers(*replica)?;
                if known.iter().map(|one| one.replica).ne(members.iter().copied()) {
                    return None;
                }
                leaders.push(known.iter().find(|one| one.leads)?.replica);
            }
            leaders.dedup();
            (leaders.len() == 1 && self.running.contains_key(&leaders[0])).then(|| leaders[0])
        })
    }

    fn said(&self, replica: u16) -> String {
        std::fs::read_to_string(self.root.join(format!("replica{replica}.log"))).unwrap_or_default()
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for replica in 0..3 {
                eprintln!("--- replica {replica}\n{}", self.said(replica));
            }
        }
        for child in self.running.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn volume(name: &str) -> CreateVolume {
    CreateVolume {
        name: name.to_owned(),
        size: ByteSize::new(1 << 20),
        device: None,
        replicas: 1,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        stripes: None,
        labels: BTreeMap::new(),
    }
}

/// Asks until somebody leads.
fn create(client: &Client, name: &str) {
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

fn names(client: &Client) -> Option<Vec<String>> {
    Some(client.volumes().ok()?.into_iter().map(|volume| volume.name).collect())
}

#[test]
fn single_controller_grows_to_three_whose_leaders_may_die() {
    let mut pod = Pod::demo();
    pod.client().create_instance(&vm("vm1", &[]), Duration::ZERO).expect("created");
    create(&pod.client(), "before");
    let frontend = |pod: &Pod| pod.endpoint(1, Role::NetFrontend).objects();
    let port =
        until("its port", || frontend(&pod).into_values().find(|object| matches!(object, Object::Port(_))));
    pod.stop_controller();

    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start(0, &["--bootstrap"]);
    assert_eq!(replicas.leader(&[0]), 0);
    until("what there was before", || {
        (names(&replicas.client(0))? == ["before"] && frontend(&pod).values().any(|it| *it == port))
            .then_some(())
    });
    replicas.start(1, &[]);
    replicas.leader(&[0, 1]);
    replicas.start(2, &[]);
    let first = replicas.leader(&[0, 1, 2]);

    // Every replica answers, and a follower has the leader carry out what it is asked for.
    for replica in 0..3 {
        let name = format!("by-{replica}");
        create(&replicas.client(replica), &name);
        assert!(names(&replicas.client(replica)).is_some_and(|names| names.contains(&name)), "{name}");
    }
    let follower = replicas.client((first + 1) % 3);
    let made = follower.create_instance(&vm("vm2", &[]), Duration::from_secs(30)).expect("created");
    assert!(made.ready, "{made:?}");
    let ports = |pod: &Pod| frontend(pod).values().filter(|object| matches!(object, Object::Port(_))).count();
    assert_eq!(ports(&pod), 2, "what is said to be ready is there");
    let refused = follower.create_volume(&volume("before"));
    assert_eq!(refused.expect_err("there is one").status(), Some(409));

    // The leader dies while a NIC fails: another one has the instance moved.
    let started = frontend(&pod);
    assert!(started.values().any(|object| *object == port), "the instance kept its port");
    let down = Report::Link { device: "nic0".into(), up: false, reason: "carrier".into() };
    replicas.kill(first);
    let killed = Instant::now();
    pod.endpoint(2, Role::NetBackend).reporter.report(down);
    let moved = until("the failover", || frontend(&pod).remove(&port.id()).filter(|now| *now != port));
    println!("failover {} ms after the leader's death", killed.elapsed().as_millis());
    let second = replicas.leader(&[0, 1, 2]);
    assert_ne!(first, second);
    create(&replicas.client(second), "after");
    let failed = replicas.client(second).device("h2", "nic0").expect("known");
    assert_eq!(failed.health, DeviceHealth::Down, "{failed:?}");

    // It comes back, gets what it missed, and the others may die one after the other.
    replicas.start(first, &[]);
    let wanted = ["before", "by-0", "by-1", "by-2", "after"];
    until("what it missed", || (names(&replicas.client(first))?.len() == wanted.len()).then_some(()));
    replicas.leader(&[0, 1, 2]);
    replicas.kill(second);
    let third = replicas.leader(&[0, 1, 2]);
    create(&replicas.client(third), "last");
    assert_eq!(names(&replicas.client(third)).map(|names| names.len()), Some(wanted.len() + 1));
    assert!(frontend(&pod).values().any(|object| *object == moved), "engines were not disturbed");

    // Two are no majority of three without one of them: nothing is promised.
    let last = *replicas.running.keys().find(|replica| **replica != third).expect("two run");
    replicas.kill(third);
    let error = replicas.client(last).create_volume(&volume("never")).expect_err("there is no majority");
    assert_eq!(error.status(), Some(503), "{error}");
    assert_eq!(names(&replicas.client(last)).map(|names| names.len()), Some(wanted.len() + 1));

    // With its log lost, a replica becomes a member anew, in its own place.
    replicas.start(third, &[]);
    replicas.leader(&[0, 1, 2]);
    std::fs::remove_file(replicas.log_file(second)).expect("it was there");
    replicas.start(second, &[]);
    until("all of it once more", || {
        let names = names(&replicas.client(second))?;
        (names.len() == wanted.len() + 1).then_some(())
    });
    let leader = replicas.leader(&[0, 1, 2]);

    // A leader that stood still for a while is not one any more, and learns so.
    let paused = replicas.pause(leader);
    let elected = replicas.leader(&[0, 1, 2]);
    assert_ne!(leader, elected);
    create(&replicas.client(elected), "meanwhile");
    replicas.go_on(leader, paused);
    until("what it missed", || {
        names(&replicas.client(leader))?.contains(&"meanwhile".to_owned()).then_some(())
    });
    let leader = replicas.leader(&[0, 1, 2]);
    assert!(frontend(&pod).values().any(|object| *object == moved), "engines were not disturbed");

    // Those who led, followed, were sent everything and began anew with nothing know the same, to the last region.
    until("the same everywhere", || {
        let known: Option<Vec<_>> = (0..3).map(|replica| replicas.client(replica).pool().ok()).collect();
        let known = known?;
        known.iter().all(|pool| *pool == known[0]).then_some(())
    });

    // A member that is gone for good is let go.
    let gone = (leader + 1) % 3;
    replicas.kill(gone);
    replicas.client((leader + 2) % 3).remove_controller(gone).expect("removed");
    let rest: Vec<u16> = (0..3).filter(|replica| *replica != gone).collect();
    replicas.leader(&rest);
    assert_eq!(replicas.client(leader).remove_controller(gone).expect_err("gone").status(), Some(404));
}
