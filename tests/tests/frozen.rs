//! A daemon that stands still for longer than its leases hold (`SIGSTOP`, a paused machine) is over: what it served goes on
//! without it, and when it runs again (`SIGCONT`) it ends, and nothing of it reaches a device any more.

use std::fs;
use std::thread;
use std::time::Duration;

use pod_api::EndpointHealth;
use wadi_tests::conversation::Conversation;
use wadi_tests::fio::{Job, Pattern};
use wadi_tests::pod::{Pod, Role};
use wadi_tests::replicas::until;
use wadi_tests::stage::{Stage, rounds};

/// Of a daemon that was fenced.
const FENCED: i32 = 75;
/// Longer than a daemon takes that finds out that it is over.
const PATIENCE: Duration = Duration::from_secs(30);

/// How many frames a host's backend has given to its TAP device.
fn given(pod: &Pod, host: &str) -> u64 {
    let table = pod.host(host).unwrap().inside(|| fs::read_to_string("/proc/thread-self/net/dev")).unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix("tap0:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_nics_backend_that_wakes_up_too_late_sends_nothing() {
    let mut stage = Stage::set_up().unwrap();
    let conversation = Conversation::begin(&stage.pod, &stage.vm).unwrap();
    for _ in 0..3 * rounds() {
        conversation.check("at home").unwrap();
        let nic = || stage.pod.api().instance("vm1").unwrap().nics[0].nic.clone();
        let home = nic();
        let host = home.split('/').next().unwrap().to_owned();
        stage.pod.daemon(&host, Role::NetBackend).unwrap().freeze().unwrap();
        until("another NIC", || (stage.pod.api().instance("vm1").unwrap().nics[0].nic != home).then_some(()));
        conversation.check("while its backend stands still").unwrap();
        let before = given(&stage.pod, &host);
        let daemon = stage.pod.daemon(&host, Role::NetBackend).unwrap();
        daemon.thaw().unwrap();
        let status = daemon.wait(PATIENCE).unwrap();
        assert_eq!(status.code(), Some(FENCED), "{status}");
        assert_eq!(given(&stage.pod, &host), before, "it sent something when it woke up");
        conversation.check("after its backend woke up").unwrap();
        stage.pod.start_daemon(&host, Role::NetBackend).unwrap();
        stage.pod.wait_until_joined().unwrap();
    }
}

/// Has a daemon stand still for so long. If it was fenced meanwhile, it ends, and is started again.
fn stand_still(pod: &mut Pod, host: &str, role: Role, time: Duration) {
    let daemon = pod.daemon(host, role).unwrap();
    daemon.freeze().unwrap();
    thread::sleep(time);
    daemon.thaw().unwrap();
    let fenced = until("its end, or its heartbeat", || {
        if !pod.daemon(host, role).unwrap().running() {
            return Some(true);
        }
        let hosts = pod.api().hosts().unwrap();
        let endpoints = hosts.iter().filter(|it| it.name == host).flat_map(|it| &it.endpoints);
        let mut its = endpoints.filter(|it| it.role == role.to_string());
        its.any(|it| it.health == EndpointHealth::Joined).then_some(false)
    });
    if fenced {
        let status = pod.daemon(host, role).unwrap().wait(PATIENCE).unwrap();
        assert_eq!(status.code(), Some(FENCED), "{status}");
        pod.start_daemon(host, role).unwrap();
    }
    pod.wait_until_joined().unwrap();
}

#[test]
fn guests_go_on_whoever_stands_still() {
    let mut stage = Stage::set_up().unwrap();
    let conversation = Conversation::begin(&stage.pod, &stage.vm).unwrap();
    let daemons = [
        ("h1", Role::BlkFrontend),
        ("h2", Role::BlkBackend),
        ("h1", Role::NetFrontend),
        ("h2", Role::NetBackend),
    ];
    for (host, role) in daemons {
        // One that nobody notices, and one that is over when it ends.
        for time in [Duration::from_millis(100), Duration::from_millis(1500)] {
            let pattern = Pattern::Random4K;
            let job = Job { disk: "vda".into(), offset_mib: 0, size_mib: 32, pattern, flush_every: 64 };
            thread::scope(|scope| {
                let vm = &stage.vm;
                let verified = scope.spawn(move || job.run(vm, Duration::from_mins(2)));
                thread::sleep(Duration::from_millis(500));
                stand_still(&mut stage.pod, host, role, time);
                verified.join().unwrap().unwrap();
            });
            conversation.check(&format!("after {role} stood still for {time:?}")).unwrap();
        }
    }
    let log = stage.vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
}
