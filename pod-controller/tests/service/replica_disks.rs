//! Controller replicas whose disks are full, slow or damaged: the others go on, what was answered is there, and the replica says
//! what to do.

use crate::support::replicas::{Replicas, create, names};
use crate::support::{Pod, until};

const ALL: [u16; 3] = [0, 1, 2];

fn three() -> (Pod, Replicas) {
    let mut pod = Pod::demo_in_file();
    pod.stop_controller();
    let mut replicas = Replicas::with_faults(pod.directory.path());
    replicas.start_first(3);
    (pod, replicas)
}

/// All that run know of all of these.
fn everywhere(replicas: &Replicas, wanted: &[String]) {
    for replica in replicas.running.keys() {
        until("what was answered", || {
            let known = names(&replicas.client(*replica))?;
            wanted.iter().all(|name| known.contains(name)).then_some(())
        });
    }
}

/// Has one of the others carry out changes, which must be answered.
fn change(replicas: &Replicas, victim: u16, what: &str, answered: &mut Vec<String>) {
    for number in 0..3 {
        let name = format!("{what}-{number}");
        create(&replicas.client((victim + 1) % 3), &name);
        answered.push(name);
    }
}

#[test]
fn a_full_disk_ends_its_replica_and_nothing_else() {
    let (_pod, mut replicas) = three();
    let mut answered = Vec::new();
    for what in ["follower", "leader"] {
        let leader = replicas.leader(&ALL);
        let victim = if what == "leader" { leader } else { (leader + 1) % 3 };
        replicas.fault(victim, Some("full"));
        change(&replicas, victim, what, &mut answered);
        let said = replicas.ended(victim);
        let log = replicas.log_file(victim);
        assert!(said.contains("No space left") && said.contains(log.to_str().unwrap()), "{said}");
        assert!(said.contains("check the directory, the permissions and the free space"), "{said}");
        everywhere(&replicas, &answered);
        // It cannot begin before there is room, and then catches up.
        replicas.start(victim, &[]);
        let said = replicas.ended(victim);
        assert!(said.contains("free space"), "{said}");
        replicas.fault(victim, None);
        replicas.start(victim, &[]);
        replicas.leader(&ALL);
        everywhere(&replicas, &answered);
    }
}

#[test]
fn a_slow_disk_holds_nobody_up() {
    let (_pod, replicas) = three();
    let mut answered = Vec::new();
    for what in ["follower", "leader"] {
        let leader = replicas.leader(&ALL);
        let victim = if what == "leader" { leader } else { (leader + 1) % 3 };
        // Far longer than anybody waits before an election.
        replicas.fault(victim, Some("slow 3000"));
        change(&replicas, victim, what, &mut answered);
        until("it to say so", || {
            let said = replicas.said(victim);
            (said.contains("the disk is slow") && said.contains("election-ms")).then_some(())
        });
        replicas.fault(victim, None);
        replicas.leader(&ALL);
        everywhere(&replicas, &answered);
    }
}

#[test]
fn a_damaged_log_is_not_used_and_its_replica_begins_anew() {
    let (_pod, mut replicas) = three();
    let mut answered = Vec::new();
    let leader = replicas.leader(&ALL);
    let victim = (leader + 1) % 3;
    change(&replicas, victim, "before", &mut answered);
    everywhere(&replicas, &answered);
    replicas.kill(victim);
    change(&replicas, victim, "meanwhile", &mut answered);

    // What it wrote last, wherever that is in its file.
    let log = replicas.log_file(victim);
    let mut bytes = std::fs::read(&log).unwrap();
    let newest = b"before-2";
    let places: Vec<usize> =
        (0..bytes.len() - newest.len()).filter(|at| bytes[*at..].starts_with(newest)).collect();
    assert!(!places.is_empty(), "it is in the file");
    for at in places {
        bytes[at] = b'B';
    }
    std::fs::write(&log, &bytes).unwrap();
    replicas.start(victim, &[]);
    let said = replicas.ended(victim);
    assert!(said.contains("damaged") && said.contains("move it away"), "{said}");
    assert!(std::fs::read(&log).unwrap() == bytes, "nobody touched it");

    std::fs::rename(&log, log.with_extension("aside")).unwrap();
    replicas.start(victim, &[]);
    replicas.leader(&ALL);
    everywhere(&replicas, &answered);
}
