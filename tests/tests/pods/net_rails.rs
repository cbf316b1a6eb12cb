//! A guest that uses two NICs of a link aggregation group at the same time: cables are pulled, a NIC is emptied and a backend
//! killed, and its flows go on.

use std::io::Read as _;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, EventKind, Nic, NicRequest};
use wadi_tests::iperf;
use wadi_tests::pod::{CLIENT_ADDRESS, HostPlan, Pod, PodBuilder, PodVm, Role, VmShape};

/// Longer than anything takes, retransmission timers and late telemetry included; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);
const RAILS: [&str; 2] = ["h2/nic0", "h3/nic0"];
const BACKUP: &str = "h4/nic0";
/// Of the first flow; each has its own.
const PORT: u16 = 9000;
/// Frames that show that a NIC carries flows, and not what its host says by itself.
const FRAMES: u64 = 100;
/// More than anybody holds of a flow, so it shows that the flow goes on.
const FLOW_BYTES: u64 = 4 << 20;

fn pod() -> Pod {
    // Before there are daemons, whose disk it would keep busy.
    Guest::ensure(&mut Silent).unwrap();
    PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0").in_group("rack1"))
        .host(HostPlan::new("h3").nic("nic0").in_group("rack1"))
        .host(HostPlan::new("h4").backup_nic("nic0"))
        .start()
        .unwrap()
}

/// A booted guest whose device is on both NICs.
fn guest_with_rails(pod: &Pod, queue_pairs: u16) -> PodVm {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest { rails: Some(2), queue_pairs: Some(queue_pairs), ..NicRequest::default() }],
        ..CreateInstance::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    assert_eq!(in_use(&instance.nics[0]), RAILS, "{instance:?}");
    pod.boot(&instance, &guest, VmShape::default()).unwrap()
}

fn nic(pod: &Pod) -> Nic {
    pod.api().instance("vm1").unwrap().nics[0].clone()
}

fn in_use(nic: &Nic) -> Vec<&str> {
    nic.rails.iter().filter(|rail| rail.in_use).map(|rail| rail.nic.as_str()).collect()
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "still not so: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn wait_for_rails(pod: &Pod, expected: &[&str]) {
    eventually(&format!("{expected:?} are in use"), || in_use(&nic(pod)) == expected);
}

/// Frames that a NIC has sent, as its last telemetry tells.
fn sent(pod: &Pod, nic: &str) -> u64 {
    let page = pod.api().metrics().unwrap();
    let of = format!("wadi_device_packets_total{{device=\"{nic}\",direction=\"transmit\"}} ");
    page.lines().find_map(|line| line.strip_prefix(&of)?.parse().ok()).unwrap_or(0)
}

/// From now on, each of these NICs sends.
fn all_carry(pod: &Pod, nics: &[&str]) {
    for nic in nics {
        let before = sent(pod, nic);
        // A backend that was started again counts from 0.
        eventually(&format!("{nic} carries flows"), || {
            let now = sent(pod, nic);
            now >= before + FRAMES || now < before && now >= FRAMES
        });
    }
}

/// Sooner or later, only the second one of these NICs sends.
fn rests_while(pod: &Pod, idle: &str, busy: &str) {
    eventually(&format!("{idle} rests, {busy} carries the flows"), || {
        let before = sent(pod, idle);
        all_carry(pod, &[busy]);
        sent(pod, idle) == before
    });
}

/// Streams from the guest to the client, which takes them slowly.
struct Flows {
    received: Vec<Arc<AtomicU64>>,
}

impl Flows {
    /// Begins as many, on the guest's CPUs by turns.
    fn start(pod: &Pod, vm: &PodVm, count: u16) -> Self {
        // As if each queue had an interrupt of its own, which this QEMU does not survive: what arrives in a queue is seen to by its
        // CPU, which then sends what that calls for.
        vm.exec("cd /sys/class/net/eth0/queues && echo 1 > rx-0/rps_cpus && echo 2 > rx-1/rps_cpus").unwrap();
        let mut received = Vec::new();
        for number in 0..count {
            let port = PORT + number;
            let listener =
                pod.client_namespace().inside(|| TcpListener::bind((CLIENT_ADDRESS, port))).unwrap();
            let bytes = Arc::new(AtomicU64::new(0));
            received.push(Arc::clone(&bytes));
            // It ends with the guest, whose end resets the connection or leaves it silent.
            thread::spawn(move || take_slowly(&listener, &bytes));
            // A driver with as many queue pairs as CPUs gives each CPU its own one.
            let cpu = 1 << (number % 2);
            vm.exec(&format!("taskset {cpu} nc {CLIENT_ADDRESS} {port} < /dev/zero > /dev/null 2>&1 &"))
                .unwrap();
        }
        Self { received }
    }

    /// Each of them goes on.
    fn go_on(&self, when: &str) {
        let until: Vec<u64> =
            self.received.iter().map(|received| received.load(Ordering::Relaxed) + FLOW_BYTES).collect();
        for (number, (received, until)) in self.received.iter().zip(until).enumerate() {
            let goes_on = || received.load(Ordering::Relaxed) >= until;
            eventually(&format!("{when}, flow {number} goes on"), goes_on);
        }
    }
}

fn take_slowly(listener: &TcpListener, received: &AtomicU64) {
    let Ok((mut stream, _)) = listener.accept() else { return };
    let mut bytes = vec![0; 32 << 10];
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        received.fetch_add(count as u64, Ordering::Relaxed);
        // It is one machine: who sends as fast as it can leaves nothing to the others.
        thread::sleep(Duration::from_millis(4));
    }
}

#[test]
fn flows_move_when_cables_are_pulled_and_return_with_them() {
    let pod = pod();
    let vm = guest_with_rails(&pod, 2);
    let flows = Flows::start(&pod, &vm, 4);
    flows.go_on("at first");
    all_carry(&pod, &RAILS);
    let generation = nic(&pod).generation;

    // One cable: its flows go over the other NIC, and nothing is moved for that.
    pod.pull_cable("h2", "nic0").unwrap();
    wait_for_rails(&pod, &RAILS[1..]);
    flows.go_on("with one cable pulled");
    rests_while(&pod, RAILS[0], RAILS[1]);
    assert_eq!((nic(&pod).nic.as_str(), nic(&pod).generation), (RAILS[1], generation));
    pod.plug_cable("h2", "nic0").unwrap();
    wait_for_rails(&pod, &RAILS);
    all_carry(&pod, &RAILS);
    flows.go_on("with the cable back");
    assert_eq!(nic(&pod).generation, generation);

    // Both: the backup NIC takes over.
    pod.pull_cable("h3", "nic0").unwrap();
    wait_for_rails(&pod, &RAILS[..1]);
    flows.go_on("with the other cable pulled");
    pod.pull_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", BACKUP).unwrap();
    assert_eq!(nic(&pod).rails, []);
    flows.go_on("on the backup NIC");
    all_carry(&pod, &[BACKUP]);
    let events = pod.api().events(0).unwrap().events;
    assert_eq!(events.iter().filter(|event| event.kind == EventKind::Failover).count(), 1, "{events:?}");

    // Home again, on both of them.
    pod.plug_cable("h2", "nic0").unwrap();
    pod.plug_cable("h3", "nic0").unwrap();
    eventually("it goes home", || {
        for host in ["h2", "h3"] {
            // It may be held since its link flapped.
            let _ = pod.api().release_link(host, "nic0");
        }
        let home = nic(&pod).home.unwrap();
        let (host, name) = home.split_once('/').unwrap();
        pod.api().fail_back(host, name).is_ok() && nic(&pod).nic != BACKUP
    });
    wait_for_rails(&pod, &RAILS);
    flows.go_on("at home again");
    all_carry(&pod, &RAILS);
}

#[test]
fn flows_outlive_a_backend_and_return_with_its_successor() {
    let mut pod = pod();
    let vm = guest_with_rails(&pod, 2);
    let flows = Flows::start(&pod, &vm, 4);
    flows.go_on("at first");
    all_carry(&pod, &RAILS);
    // Its link stays up, so nobody hears of it but by its silence.
    pod.daemon("h3", Role::NetBackend).unwrap().kill().unwrap();
    wait_for_rails(&pod, &RAILS[..1]);
    flows.go_on("with a backend dead");
    all_carry(&pod, &RAILS[..1]);
    pod.start_daemon("h3", Role::NetBackend).unwrap();
    pod.wait_until_joined().unwrap();
    wait_for_rails(&pod, &RAILS);
    all_carry(&pod, &RAILS);
    flows.go_on("with its successor");
    assert_eq!(
        pod.api().events(0).unwrap().events.iter().filter(|it| it.kind == EventKind::Failover).count(),
        0
    );
}

#[test]
fn a_nic_is_emptied_and_used_again_with_no_datagram_lost() {
    let pod = pod();
    // One queue pair, so flows are told apart by their addresses and ports.
    let vm = guest_with_rails(&pod, 1);
    let mut server = iperf::Server::start(&pod).unwrap();
    // So many that both NICs have some, and so slow that no buffer of the client overflows while others have the machine.
    let streams = format!(
        "iperf3 --client {CLIENT_ADDRESS} --udp --bitrate 64K --length 500 --parallel 24 --time 20 --json"
    );
    let job = vm.start(&streams).unwrap();
    all_carry(&pod, &RAILS);

    // An instance is not moved off a group; what is said instead is what helps.
    let refused = pod.api().migrate_nic("vm1", "net0", Some(BACKUP)).unwrap_err().to_string();
    assert!(refused.contains("podctl devices drain"), "{refused}");
    pod.api().drain_device("h2", "nic0", true).unwrap();
    wait_for_rails(&pod, &RAILS[1..]);
    rests_while(&pod, RAILS[0], RAILS[1]);
    pod.api().drain_device("h2", "nic0", false).unwrap();
    wait_for_rails(&pod, &RAILS);
    all_carry(&pod, &RAILS);

    let said = job.finish(PATIENCE).unwrap();
    server.daemon().check().unwrap();
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    let sum = &report["end"]["sum"];
    assert!(sum["packets"].as_u64().unwrap() > 1000, "{said}");
    assert_eq!(sum["lost_packets"].as_u64(), Some(0), "{said}");
}
