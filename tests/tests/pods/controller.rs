//! The controller is never on the data path: killed, it is not missed, and restarted, it finds what it left.

use std::thread;
use std::time::Duration;

use pod_api::{Instance, Region};
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{GUEST_ADDRESS, Pod};
use wadi_tests::probe::Probe;
use wadi_tests::stage::{Stage, rounds};

/// Everything that must be the same after a restart.
fn allocations(pod: &Pod) -> (Vec<Instance>, Vec<Region>) {
    (pod.api().instances().unwrap(), pod.api().pool().unwrap().regions)
}

#[test]
fn traffic_outlives_a_killed_controller_and_nothing_is_reallocated() {
    let mut stage = Stage::set_up().unwrap();
    for round in 0..rounds() {
        let before = allocations(&stage.pod);
        let pids: Vec<_> = stage.pod.processes().skip(1).map(|daemon| daemon.pid()).collect();

        let stream = iperf::Stream::begin(&stage.vm, Way::Out, 6).unwrap();
        let job = Job {
            disk: "vda".into(),
            offset_mib: 0,
            size_mib: 128,
            pattern: if round % 2 == 0 { Pattern::Random4K } else { Pattern::Sequential128K },
            flush_every: 64,
        };
        let disk = stage.vm.start(&job.command()).unwrap();
        let probe = Probe::start(stage.pod.client_namespace(), GUEST_ADDRESS).unwrap();
        stage.pod.controller().unwrap().kill().unwrap();
        assert!(stage.pod.api().hosts().is_err());
        thread::sleep(Duration::from_secs(2));
        stage.pod.start_controller().unwrap();
        stage.pod.wait_until_joined().unwrap();
        let loss = probe.finish().unwrap();
        // There was no controller for most of that time. A guest that is kept busy may drop a packet now and then, but
        // nothing waits for a controller.
        assert!(loss.lost < loss.sent / 3, "{loss:?}");
        stream.finish().unwrap();
        Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

        assert_eq!(allocations(&stage.pod), before);
        assert_eq!(stage.pod.processes().skip(1).map(|daemon| daemon.pid()).collect::<Vec<_>>(), pids);
    }
    // It still does its work.
    stage.pod.pull_cable("h2", "nic0").unwrap();
    stage.pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    iperf::run(&stage.vm, Way::Out, 1).unwrap();
}

#[test]
fn failover_waits_for_a_controller_and_then_happens() {
    let mut stage = Stage::set_up().unwrap();
    stage.pod.controller().unwrap().kill().unwrap();
    stage.pod.pull_cable("h2", "nic0").unwrap();
    thread::sleep(Duration::from_millis(500));
    stage.pod.start_controller().unwrap();
    stage.pod.wait_until_joined().unwrap();
    stage.pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    iperf::run(&stage.vm, Way::Out, 1).unwrap();
}
