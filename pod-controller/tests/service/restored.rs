//! Controllers that go on with what was restored from a backup: daemons obey them, although they have seen later terms of office.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::etcd_server::Etcd;
use crate::support::replicas::{Replicas, create};
use crate::support::{Pod, RunningController, until, vm};
use cxl_pool::Role;
use pod_api::EndpointHealth;
use pod_api::client::Client;
use pod_protocol::objects::Object;
use pod_protocol::reports::Report;

/// Waits until a controller knows all that are there, and they do what it says.
fn obeyed(client: &Client, name: &str) {
    until("all daemons", || {
        let hosts = client.hosts().ok()?;
        let joined = hosts
            .iter()
            .flat_map(|host| &host.endpoints)
            .filter(|it| it.health == EndpointHealth::Joined)
            .count();
        (joined == 5).then_some(())
    });
    until("an instance that is ready", || match client.create_instance(&vm(name, &[]), Duration::ZERO) {
        // Nobody leads yet.
        Err(error) if error.status() != Some(409) => None,
        _ => client.instance(name).ok()?.ready.then_some(()),
    });
}

/// The first NIC's link fails, and what uses it moves away.
fn fails_over(pod: &Pod) {
    let ports = || {
        let objects = pod.endpoint(1, Role::NetFrontend).objects();
        objects.into_iter().filter(|(_, object)| matches!(object, Object::Port(_))).collect::<Vec<_>>()
    };
    let before = until("ports", || Some(ports()).filter(|ports| !ports.is_empty()));
    let down = Report::Link { device: "nic0".into(), up: false, reason: "carrier".into() };
    pod.endpoint(2, Role::NetBackend).reporter.report(down);
    until("the failover", || {
        let now = ports();
        (now.len() == before.len() && now.iter().all(|port| !before.contains(port))).then_some(())
    });
}

/// A pod whose daemons have obeyed three lives of the controller since the state that it has now. Its controller is stopped.
fn with_an_older_state() -> Pod {
    let mut pod = Pod::demo_in_file();
    obeyed(&pod.client(), "vm1");
    pod.stop_controller();
    let (file, backup) = (pod.path("state.redb"), pod.path("backup"));
    std::fs::copy(&file, &backup).expect("a copy");
    for _ in 0..3 {
        pod.start_controller();
        obeyed(&pod.client(), "vm1");
        pod.stop_controller();
    }
    std::fs::copy(&backup, &file).expect("restored");
    pod
}

#[test]
fn a_state_file_from_a_backup_is_gone_on_with() {
    let mut pod = with_an_older_state();
    pod.start_controller();
    obeyed(&pod.client(), "vm2");
    let path = pod.path("pool");
    let newest = || {
        let pool = cxl_pool::Pool::open(&path).expect("the pool");
        cxl_pool::regions::read(&pool.hardware(), pool.layout()).map(|table| table.version.term)
    };
    let term = newest();
    pod.stop_controller();
    pod.start_controller();
    obeyed(&pod.client(), "vm3");
    assert!(newest() > term, "what comes next is above that: {:?} after {term:?}", newest());
    fails_over(&pod);
}

#[test]
fn who_follows_events_is_told_that_those_it_saw_have_not_happened() {
    let mut pod = Pod::demo_in_file();
    pod.stop_controller();
    let (file, backup) = (pod.path("state.redb"), pod.path("backup"));
    std::fs::copy(&file, &backup).expect("a copy");
    pod.start_controller();
    for on in [true, false].repeat(20) {
        pod.client().drain_host("h3", on).expect("it is there");
    }
    let client = pod.client();
    let before = client.events(0).expect("a list").events;
    let seen = before.last().expect("some").sequence;
    let mut follower = client.follow_events(seen - 1).expect("a stream");
    assert_eq!(follower.next().expect("an event").expect("whole").sequence, seen);
    drop(follower);
    pod.stop_controller();
    std::fs::copy(&backup, &file).expect("restored");
    pod.start_controller();

    let client = pod.client();
    let last = || client.events(0).expect("a list").events.last().map_or(0, |it| it.sequence);
    assert!(last() < seen, "{} events are no older state's", last());
    let error = client.follow_events(seen).expect_err("it has not happened");
    assert_eq!(error.status(), Some(410), "{error}");
    assert!(error.to_string().contains(&format!("there is no event {seen}")), "{error}");
    assert_eq!(client.events(seen).expect_err("it has not happened").status(), Some(410));

    // Whoever goes on with podctl hears so, and sees all that there is and comes.
    let mut podctl = Command::new(env!("CARGO_BIN_EXE_podctl"))
        .arg("--server")
        .arg(format!("unix:{}", pod.socket().display()))
        .args(["events", "--follow", "--after", &seen.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("podctl starts");
    let mut said = String::new();
    BufReader::new(podctl.stderr.take().expect("piped")).read_line(&mut said).expect("a line");
    let mut lines = BufReader::new(podctl.stdout.take().expect("piped")).lines();
    let mut next = || {
        let line = lines.next().expect("a line").expect("text");
        line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).expect("a number")
    };
    assert!(said.contains(&format!("there is no event {seen}")), "{said}");
    let first = next();
    assert!(first < seen, "{first}");
    let known = last();
    client.drain_host("h3", true).expect("it is there");
    while next() <= known {}
    podctl.kill().expect("it runs");
    podctl.wait().expect("it ends");
}

/// From now on an etcd has in the one place what it has in the other. Nobody writes meanwhile.
fn copy_etcd(etcd: &mut Etcd, from: &str, to: &str) {
    etcd.kill();
    let [from, to] = [from, to].map(|name| etcd.directory.path().join(name));
    // Nothing is there before the first time.
    let _ = std::fs::remove_dir_all(&to);
    let copied = Command::new("cp").arg("-a").args([&from, &to]).status().expect("cp is there");
    assert!(copied.success(), "{} is copied", from.display());
    assert!(etcd.go_on(), "it runs again");
}

#[test]
fn an_etcd_from_a_backup_is_gone_on_with() {
    let mut etcd = Etcd::start();
    let mut pod = Pod::demo_in_file();
    pod.stop_controller();
    let config = pod.config_with(&format!("store = '{}'\n", etcd.address("wadi/restored")));
    let start =
        |pod: &mut Pod| pod.controller = Some(RunningController::start(&config).expect("a controller"));
    start(&mut pod);
    obeyed(&pod.client(), "vm1");
    pod.stop_controller();
    copy_etcd(&mut etcd, "data", "backup");
    for _ in 0..3 {
        start(&mut pod);
        obeyed(&pod.client(), "vm1");
        pod.stop_controller();
    }
    copy_etcd(&mut etcd, "backup", "data");
    start(&mut pod);
    obeyed(&pod.client(), "vm2");
    fails_over(&pod);
}

#[test]
fn logs_of_replicas_from_backups_are_gone_on_with() {
    let mut pod = Pod::demo_in_file();
    obeyed(&pod.client(), "vm1");
    pod.stop_controller();
    let state = pod.path("state.redb");
    std::fs::copy(&state, pod.path("backup")).expect("a copy");
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(3);
    obeyed(&replicas.client(0), "vm1");
    let all = [0, 1, 2];
    for replica in all {
        replicas.kill(replica);
    }
    let log_and_backup = |replicas: &Replicas, replica: u16| {
        (replicas.log_file(replica), pod.directory.path().join(format!("backup{replica}")))
    };
    for replica in all {
        let (log, backup) = log_and_backup(&replicas, replica);
        std::fs::copy(log, backup).expect("a copy");
    }
    // Each election is a term more.
    for replica in all {
        replicas.start(replica, &[]);
    }
    for round in 0..3 {
        let leader = replicas.leader(&all);
        replicas.kill(leader);
        let next = replicas.leader(&all);
        create(&replicas.client(next), &format!("round{round}"));
        replicas.start(leader, &[]);
    }
    let leader = replicas.leader(&all);
    obeyed(&replicas.client(leader), "vm1");
    for replica in all {
        replicas.kill(replica);
    }
    for replica in all {
        let (log, backup) = log_and_backup(&replicas, replica);
        std::fs::copy(backup, log).expect("restored");
    }
    for replica in all {
        replicas.start(replica, &[]);
    }
    let leader = replicas.leader(&all);
    obeyed(&replicas.client(leader), "vm2");
    fails_over(&pod);
}

#[test]
fn a_group_begun_anew_from_an_old_file_is_obeyed() {
    let pod = with_an_older_state();
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(1);
    obeyed(&replicas.client(0), "vm2");
    fails_over(&pod);
}
