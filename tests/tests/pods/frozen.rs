//! A daemon that stands still for so long (`SIGSTOP`, a paused machine) that its leases are given to others is over: what it served goes
//! on without it, and when it runs again (`SIGCONT`) it ends, and nothing of it reaches a device any more. One of which only the worker stands
//! still ends by itself.

use std::collections::BTreeSet;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use pod_api::EndpointHealth;
use wadi_tests::conversation::Conversation;
use wadi_tests::fio::{Job, Pattern};
use wadi_tests::looks::in_pool;
use wadi_tests::pod::{CLIENT_ADDRESS, HostPlan, Pod, PodBuilder, Role};
use wadi_tests::stage::{Stage, rounds};
use wadi_tests::stuck_thread::StuckThread;
use wadi_tests::waiting::until;

/// Of a daemon that was fenced.
const FENCED: i32 = 75;
/// Longer than a daemon takes that finds out that it is over.
const PATIENCE: Duration = Duration::from_secs(30);
/// After how long a test pod's controller takes a daemon for silent.
const NOTICED: Duration = Duration::from_secs(1);
/// Much shorter.
const MOMENT: Duration = Duration::from_millis(100);

/// How many frames a host's backend has given to its TAP device.
fn given(pod: &Pod, host: &str) -> u64 {
    let table = pod.host(host).unwrap().inside(|| fs::read_to_string("/proc/thread-self/net/dev")).unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix("tap0:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// How many pings have come to the client, whichever way.
fn arrived(pod: &Pod) -> u64 {
    let table = pod.client_namespace().inside(|| fs::read_to_string("/proc/thread-self/net/snmp")).unwrap();
    let mut icmp = table.lines().filter_map(|line| line.strip_prefix("Icmp:")).map(str::split_whitespace);
    let (names, mut counts) = (icmp.next().unwrap(), icmp.next().unwrap());
    let place = names.into_iter().position(|name| name == "InEchos").unwrap();
    counts.nth(place).unwrap().parse().unwrap()
}

/// How many pings a guest sends that nobody answers.
const PINGS: usize = 20;
const PING_BYTES: usize = 600;

/// The pings of so many bytes, all the same, that the guest's frontend has put into the pool, where a backend finds them: their sequence
/// numbers.
fn pings_in_pool(pod: &Pod, filler: u8) -> BTreeSet<u16> {
    // From the guest's address to the client's, and an ICMP echo request. What follows are code, checksum, id and sequence number, and
    // behind the guest's time, which has eight bytes at most, what it was told to send.
    const START: [u8; 9] = [10, 77, 0, 2, 10, 77, 0, 1, 8];
    const SEQUENCE: usize = START.len() + 5;
    const FILLED: usize = SEQUENCE + 2 + 8;
    let places = in_pool(pod, &START, FILLED + PING_BYTES / 2).unwrap();
    let ours = places.iter().filter(|place| place[FILLED..].iter().all(|byte| *byte == filler));
    ours.map(|place| u16::from_be_bytes([place[SEQUENCE], place[SEQUENCE + 1]])).collect()
}

#[test]
fn a_nics_backend_that_wakes_up_too_late_sends_nothing() {
    let mut stage = Stage::set_up().unwrap();
    let conversation = Conversation::begin(&stage.pod, &stage.vm).unwrap();
    for round in 0..3 * rounds() {
        conversation.check("at home").unwrap();
        let nic = || stage.pod.api().instance("vm1").unwrap().nics[0].nic.clone();
        let home = nic();
        let host = home.split('/').next().unwrap().to_owned();
        // It loses its leases only when enough is waiting for it.
        stage.pod.controller().unwrap().freeze().unwrap();
        stage.pod.daemon(&host, Role::NetBackend).unwrap().freeze().unwrap();
        let asleep = given(&stage.pod, &host);
        let filler = 0xa0 + u8::try_from(round % 0x50).unwrap();
        let ping =
            format!("ping -c {PINGS} -i 0.02 -s {PING_BYTES} -p {filler:02x} -W 1 -q {CLIENT_ADDRESS}");
        let answered = stage.vm.run(&ping, PATIENCE).unwrap();
        assert!(!answered.success(), "somebody carried them: {}", answered.text());
        until("the guest's frames in the pool", || {
            (pings_in_pool(&stage.pod, filler).len() == PINGS).then_some(())
        });
        stage.pod.controller().unwrap().thaw().unwrap();
        until("another NIC", || (stage.pod.api().instance("vm1").unwrap().nics[0].nic != home).then_some(()));
        conversation.check("while its backend stands still").unwrap();
        assert_eq!(given(&stage.pod, &host), asleep, "the frames were still to be sent");
        // The frontend has sent them another way.
        let before = arrived(&stage.pod);
        assert!(before >= PINGS as u64, "{before} pings arrived");
        let daemon = stage.pod.daemon(&host, Role::NetBackend).unwrap();
        daemon.thaw().unwrap();
        let status = daemon.wait(PATIENCE).unwrap();
        assert_eq!(status.code(), Some(FENCED), "{status}");
        conversation.check("after its backend woke up").unwrap();
        // Of a frame that it had in its very hands when it was stopped, nothing can be said: it had looked at its fence before.
        assert_eq!(arrived(&stage.pod), before, "it sent something when it woke up");
        stage.pod.start_daemon(&host, Role::NetBackend).unwrap();
        stage.pod.wait_until_joined().unwrap();
    }
}

/// How a daemon looks from the controller.
fn health(pod: &Pod, host: &str, role: Role) -> EndpointHealth {
    let hosts = pod.api().hosts().unwrap();
    let endpoints = hosts.iter().filter(|it| it.name == host).flat_map(|it| &it.endpoints);
    let mut its = endpoints.filter(|it| it.role == role.to_string());
    its.next().unwrap().health
}

/// Has a daemon stand still for a moment that nobody notices: it is not over.
fn stand_still_briefly(pod: &mut Pod, host: &str, role: Role) {
    let before = pod.engines();
    loop {
        let began = Instant::now();
        let daemon = pod.daemon(host, role).unwrap();
        daemon.freeze().unwrap();
        thread::sleep(MOMENT);
        daemon.thaw().unwrap();
        if began.elapsed() < NOTICED / 2 {
            break;
        }
        // The machine made that a longer one, and what comes of it is another question.
        goes_on(pod, host, role);
    }
    goes_on(pod, host, role);
    assert_eq!(pod.engines(), before);
}

/// Has a daemon stand still until the controller takes it for that: `Silent` where nothing is taken from it, since nobody could do what
/// it does, and `Fenced` where others go on in its place. One that was fenced ends when it runs again, and any other one does not.
fn stand_still_until(pod: &mut Pod, host: &str, role: Role, taken_for: EndpointHealth) {
    let before = pod.engines();
    pod.daemon(host, role).unwrap().freeze().unwrap();
    until(&format!("{host} {role} to be {taken_for:?}"), || {
        (health(pod, host, role) == taken_for).then_some(())
    });
    let daemon = pod.daemon(host, role).unwrap();
    daemon.thaw().unwrap();
    if taken_for == EndpointHealth::Fenced {
        let status = daemon.wait(PATIENCE).unwrap();
        assert_eq!(status.code(), Some(FENCED), "{status}");
        pod.start_daemon(host, role).unwrap();
        pod.wait_until_joined().unwrap();
    } else {
        goes_on(pod, host, role);
        assert_eq!(pod.engines(), before);
    }
}

/// Waits until a daemon has been heard of again that lives.
fn goes_on(pod: &mut Pod, host: &str, role: Role) {
    until(&format!("the heartbeat of {host} {role}"), || {
        let daemon = pod.daemon(host, role).unwrap();
        daemon.check().unwrap();
        (health(pod, host, role) == EndpointHealth::Joined).then_some(())
    });
}

#[test]
fn guests_go_on_whoever_stands_still() {
    let mut stage = Stage::set_up().unwrap();
    let conversation = Conversation::begin(&stage.pod, &stage.vm).unwrap();
    // There is another NIC for the guest. For what is on the SSD it waits, much longer than this takes (and what becomes of a storage
    // backend that was waited for in vain is in `two_writers.rs`); and no frontend has a substitute.
    let daemons = [
        ("h1", Role::BlkFrontend, EndpointHealth::Silent),
        ("h2", Role::BlkBackend, EndpointHealth::Silent),
        ("h1", Role::NetFrontend, EndpointHealth::Silent),
        ("h2", Role::NetBackend, EndpointHealth::Fenced),
    ];
    for (host, role, taken_for) in daemons {
        for is_brief in [true, false] {
            let pattern = Pattern::Random4K;
            let job = Job { disk: "vda".into(), offset_mib: 0, size_mib: 32, pattern, flush_every: 64 };
            thread::scope(|scope| {
                let vm = &stage.vm;
                let verified = scope.spawn(move || job.run(vm, Duration::from_mins(2)));
                thread::sleep(Duration::from_millis(500));
                if is_brief {
                    stand_still_briefly(&mut stage.pod, host, role);
                } else {
                    stand_still_until(&mut stage.pod, host, role, taken_for);
                }
                verified.join().unwrap().unwrap();
            });
            let length = if is_brief { "a moment" } else { "too long" };
            conversation.check(&format!("after {role} stood still for {length}")).unwrap();
        }
    }
    let log = stage.vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
}

#[test]
fn a_nics_backend_whose_worker_hangs_ends_and_its_guest_goes_on_elsewhere() {
    // A worker with a core of its own never sleeps, so wherever it is held it is in the middle of a turn.
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0").ssd("ssd0", "2G").sections("[net]\nbackend-cpu = 0\n"))
        .host(HostPlan::new("h3").backup_nic("nic1"));
    let mut stage = Stage::set_up_in(pod).unwrap();
    let conversation = Conversation::begin(&stage.pod, &stage.vm).unwrap();
    conversation.check("at home").unwrap();
    let nic = |pod: &Pod| pod.api().instance("vm1").unwrap().nics[0].nic.clone();
    assert_eq!(nic(&stage.pod), "h2/nic0");
    let daemon = stage.pod.daemon("h2", Role::NetBackend).unwrap();
    let held = StuckThread::hold(daemon, "net-backend").unwrap();
    // It is the other threads that notice, and end all of it: the one that is held cannot be joined.
    let status = daemon.wait(PATIENCE).unwrap();
    assert_eq!(status.code(), Some(FENCED), "{status}");
    assert!(daemon.said().contains("worker-timeout-ms"), "{}", daemon.said());
    drop(held);
    until("another NIC", || (nic(&stage.pod) == "h3/nic1").then_some(()));
    conversation.check("after its backend's worker was stuck").unwrap();
    stage.pod.start_daemon("h2", Role::NetBackend).unwrap();
    stage.pod.wait_until_joined().unwrap();
    conversation.check("after its backend was started again").unwrap();
}
