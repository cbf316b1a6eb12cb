//! Every daemon is killed under traffic and started again: the guest waits, and then goes on with the right data.

use std::thread;
use std::time::Duration;

use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{CLIENT_ADDRESS, PodBuilder, Role, VmShape};
use wadi_tests::stage::{Stage, rounds};

/// How long a daemon stays away.
const AWAY: Duration = Duration::from_millis(500);

fn kill_and_restart(stage: &mut Stage, host: &str, role: Role) {
    stage.pod.daemon(host, role).unwrap().kill().unwrap();
    thread::sleep(AWAY);
    stage.pod.start_daemon(host, role).unwrap();
    stage.pod.wait_until_joined().unwrap();
}

/// The guest writes by all of so many queues.
fn disk_survives(host: &str, role: Role, queues: u16) {
    let shape = VmShape { cpus: VmShape::default().cpus.max(queues.into()), ..VmShape::default() };
    let mut stage = Stage::set_up_as(PodBuilder::three_hosts().disk_queues(queues), shape).unwrap();
    assert_eq!(stage.vm.exec("ls /sys/block/vda/mq | wc -l").unwrap().trim(), queues.to_string());
    for _ in 0..rounds() {
        let command = Job {
            disk: "vda".into(),
            offset_mib: 0,
            size_mib: 128 / u32::from(queues),
            pattern: Pattern::Random4K,
            flush_every: 64,
        }
        .command_of(queues);
        thread::scope(|scope| {
            let vm = &stage.vm;
            let traffic = scope.spawn(move || vm.exec_within(&command, Duration::from_mins(2)));
            thread::sleep(Duration::from_millis(700));
            stage.pod.daemon(host, role).unwrap().kill().unwrap();
            thread::sleep(AWAY);
            assert!(!traffic.is_finished(), "nothing was under way");
            stage.pod.start_daemon(host, role).unwrap();
            stage.pod.wait_until_joined().unwrap();
            Report::parse(&traffic.join().unwrap().unwrap()).unwrap();
        });
        let log = stage.vm.exec("dmesg").unwrap();
        assert!(!log.contains("I/O error"), "{log}");
    }
}

#[test]
fn disk_survives_its_frontend() {
    disk_survives("h1", Role::BlkFrontend, 4);
}

#[test]
fn disk_survives_its_backend() {
    disk_survives("h2", Role::BlkBackend, 1);
}

fn network_survives(host: &str, role: Role) {
    let mut stage = Stage::set_up().unwrap();
    for _ in 0..rounds() {
        for way in [Way::Out, Way::In] {
            let stream = iperf::Stream::begin(&stage.vm, way, 5).unwrap();
            stage.pod.daemon(host, role).unwrap().kill().unwrap();
            thread::sleep(AWAY);
            stage.pod.start_daemon(host, role).unwrap();
            stage.pod.wait_until_joined().unwrap();
            stream.finish().unwrap();
        }
        let said = stage.vm.exec(&format!("ping -c 10 -i 0.05 -q {CLIENT_ADDRESS}")).unwrap();
        assert!(said.contains("10 packets received"), "{said}");
    }
}

#[test]
fn network_survives_its_frontend() {
    network_survives("h1", Role::NetFrontend);
}

#[test]
fn network_survives_its_backend() {
    network_survives("h2", Role::NetBackend);
}

#[test]
fn idle_guest_survives_all_daemons_one_after_another() {
    let mut stage = Stage::set_up().unwrap();
    let all = [
        ("h1", Role::NetFrontend),
        ("h1", Role::BlkFrontend),
        ("h2", Role::NetBackend),
        ("h2", Role::BlkBackend),
        ("h3", Role::NetBackend),
        ("h3", Role::BlkBackend),
    ];
    for (host, role) in all {
        kill_and_restart(&mut stage, host, role);
    }
    iperf::run(&stage.vm, Way::Out, 2).unwrap();
    Job { disk: "vda".into(), offset_mib: 0, size_mib: 16, pattern: Pattern::Random4K, flush_every: 16 }
        .run(&stage.vm, Duration::from_mins(2))
        .unwrap();
}
