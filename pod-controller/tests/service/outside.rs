//! A controller replica outside of the pod, which does not reach the pool: it votes and never leads, so that a pod of two hosts survives
//! the loss of either.

use std::net::SocketAddr;

use crate::support::authority::Authority;
use crate::support::description::Description;
use crate::support::network::addresses;
use crate::support::replicas::{Replicas, create, names, tcp_section, volume};
use crate::support::{Pod, until};

const OUTSIDE: u16 = 2;
const ALL: [u16; 3] = [0, 1, OUTSIDE];

/// Two replicas in a pod, and one outside.
struct Three {
    replicas: Replicas,
    authority: Authority,
    listen: Vec<SocketAddr>,
}

impl Three {
    fn new(pod: &Pod) -> Self {
        let directory = pod.directory.path();
        let authority = Authority::new(directory, "replicas");
        let mut three = Self { replicas: Replicas::new(directory), authority, listen: addresses(3) };
        for replica in ALL {
            three.configure(pod, replica, replica == OUTSIDE);
        }
        three
    }

    /// What stands in the file of one of them. One outside does not find the pool where the others have it.
    fn configure(&mut self, pod: &Pod, replica: u16, outside: bool) {
        let directory = pod.directory.path();
        let listen = self.listen[usize::from(replica)];
        let host = listen.ip().to_string();
        let pair = self.authority.issue(directory, &format!("replica{replica}"), &[&host], false);
        let section = tcp_section(listen, &self.listen, &pair, &self.authority.file);
        self.replicas.sections.insert(replica, section);
        if outside {
            self.replicas.outside.insert(replica);
        } else {
            self.replicas.outside.remove(&replica);
        }
    }

    fn start(&mut self) {
        self.replicas.start(0, &["--bootstrap"]);
        self.replicas.leader(&[0]);
        self.replicas.start(OUTSIDE, &[]);
        self.replicas.leader(&[0, OUTSIDE]);
        self.replicas.start(1, &[]);
        self.replicas.leader(&ALL);
    }

    fn everywhere(&self, wanted: &[&str]) {
        for replica in self.replicas.running.keys() {
            until("what was answered", || {
                let names = names(&self.replicas.client(*replica))?;
                wanted.iter().all(|name| names.iter().any(|it| it == name)).then_some(())
            });
        }
    }
}

#[test]
fn two_hosts_and_a_machine_outside_survive_the_loss_of_either_host() {
    let mut pod = Pod::demo_in_file();
    create(&pod.client(), "before");
    pod.stop_controller();
    let mut three = Three::new(&pod);

    // It cannot begin a pod.
    three.replicas.start(OUTSIDE, &["--bootstrap"]);
    let said = three.replicas.ended(OUTSIDE);
    assert!(said.contains("outside of the pod cannot begin"), "{said}");

    three.start();
    let known = three.replicas.controllers(0).expect("a list");
    let outside: Vec<bool> = known.iter().map(|one| one.outside).collect();
    assert_eq!(outside, [false, false, true], "{known:?}");
    assert!(known.iter().all(|one| one.protocol.is_some()), "{known:?}");

    // Whoever asks it gets answers, also of what is measured, and has changes made.
    let client = three.replicas.client(OUTSIDE);
    create(&client, "by-the-one-outside");
    three.everywhere(&["before", "by-the-one-outside"]);
    let uuid = |replica: u16| three.replicas.client(replica).pool().expect("a pool").uuid;
    assert_eq!(uuid(OUTSIDE), uuid(0));
    until("rates", || client.balance().ok().filter(|it| it.unknown_here.is_none() && !it.nics.is_empty()));

    // Whichever host is lost, the other one leads, with its vote.
    let mut wanted = vec!["before", "by-the-one-outside"];
    for name in ["first", "second", "third"] {
        let leader = three.replicas.leader(&ALL);
        assert_ne!(leader, OUTSIDE);
        // What was answered just before may be on its disk and that of the one outside only.
        create(&three.replicas.client(leader), name);
        three.replicas.kill(leader);
        wanted.push(name);
        assert_eq!(three.replicas.leader(&ALL), 1 - leader);
        three.everywhere(&wanted);
        three.replicas.start(leader, &[]);
    }
    three.replicas.leader(&ALL);
    three.everywhere(&wanted);

    // What was answered is on the disk of the one outside only, of those that are left: the other host has it from there.
    let leader = three.replicas.leader(&ALL);
    // Not paused: what is on its way to one that stands still it may read when it goes on.
    three.replicas.kill(1 - leader);
    create(&three.replicas.client(leader), "unheard-of");
    wanted.push("unheard-of");
    three.replicas.kill(leader);
    three.replicas.start(1 - leader, &[]);
    assert_eq!(three.replicas.leader(&ALL), 1 - leader);
    three.everywhere(&wanted);
    let said = three.replicas.said(OUTSIDE);
    assert!(said.contains("it lacks what may be committed"), "{said}");
    three.replicas.start(leader, &[]);
    three.replicas.leader(&ALL);

    // Without it the pod goes on; with it alone nobody leads, and it says why.
    three.replicas.kill(OUTSIDE);
    let leader = three.replicas.leader(&ALL);
    create(&three.replicas.client(leader), "without");
    wanted.push("without");
    three.replicas.start(OUTSIDE, &[]);
    three.everywhere(&wanted);
    for replica in [0, 1] {
        three.replicas.kill(replica);
    }
    let client = three.replicas.client(OUTSIDE);
    let error = client.create_volume(&volume("never")).expect_err("nobody leads");
    assert_eq!(error.status(), Some(503), "{error}");
    let said = error.to_string();
    assert!(said.contains("outside of the pod") && said.contains("replica 0, replica 1"), "{said}");
    Description::checked_in().assert_has("POST", "/v1/volumes", 503);
    three.everywhere(&wanted);
    assert!(client.controllers().expect("a list").iter().all(|one| !one.leads));
    let said = three.replicas.said(OUTSIDE);
    assert!(!said.contains("this replica leads"), "{said}");
}

#[test]
fn members_may_move_out_of_the_pod_and_into_it() {
    let mut pod = Pod::demo_in_file();
    pod.stop_controller();
    let mut three = Three::new(&pod);
    three.start();
    create(&three.replicas.client(1), "vol0");
    let outside = |three: &Three| {
        let known = three.replicas.controllers(0)?;
        Some(known.iter().filter(|one| one.outside).map(|one| one.replica).collect::<Vec<_>>())
    };

    // It gets a host of the pod.
    three.replicas.kill(OUTSIDE);
    three.configure(&pod, OUTSIDE, false);
    three.replicas.start(OUTSIDE, &[]);
    until("a third one in the pod", || (outside(&three)?.is_empty()).then_some(()));
    three.replicas.leader(&ALL);

    // Both others leave it, one after the other; who is left in it cannot be let go.
    for replica in [1, OUTSIDE] {
        three.replicas.kill(replica);
        three.configure(&pod, replica, true);
        three.replicas.start(replica, &[]);
        until("one more outside", || outside(&three)?.contains(&replica).then_some(()));
        assert_ne!(three.replicas.leader(&ALL), replica);
    }
    assert_eq!(outside(&three), Some(vec![1, OUTSIDE]));
    let error = three.replicas.client(1).remove_controller(0).expect_err("nobody could lead");
    assert_eq!(error.status(), Some(409), "{error}");
    assert!(error.to_string().contains("reaches the pool"), "{error}");
    three.replicas.client(1).remove_controller(OUTSIDE).expect("it is not needed");
    three.everywhere(&["vol0"]);
}
