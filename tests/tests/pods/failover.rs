//! The cable of the NIC in use is pulled while traffic runs: the backup NIC takes over.

use std::thread;
use std::time::{Duration, Instant};

use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{GUEST_ADDRESS, Pod};
use wadi_tests::probe::Probe;
use wadi_tests::stage::{Stage, rounds};

fn wait_until_up(pod: &Pod, host: &str, nic: &str) {
    let started = Instant::now();
    while pod.api().device(host, nic).unwrap().health != pod_api::DeviceHealth::Up {
        assert!(started.elapsed() < Duration::from_secs(10), "{host}/{nic} does not come up");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn traffic_moves_to_the_backup_nic_and_back() {
    let stage = Stage::set_up().unwrap();
    let mac = stage.instance.nics[0].mac.clone();
    let nics = [("h2", "nic0"), ("h3", "nic1")];
    for round in 0..=rounds() {
        let (from, to) =
            (nics[usize::try_from(round).unwrap() % 2], nics[usize::try_from(round + 1).unwrap() % 2]);
        let stream = iperf::Stream::begin(&stage.vm, Way::Out, 4).unwrap();
        let probe = Probe::start(stage.pod.client_namespace(), GUEST_ADDRESS).unwrap();
        stage.pod.pull_cable(from.0, from.1).unwrap();
        stage.pod.wait_for_nic("vm1", &format!("{}/{}", to.0, to.1)).unwrap();
        thread::sleep(Duration::from_secs(1));
        let loss = probe.finish().unwrap();
        eprintln!("packets were lost for {:?} ({} of {})", loss.longest_gap, loss.lost, loss.sent);
        assert!(loss.lost < loss.sent / 2, "{loss:?}");
        stream.finish().unwrap();
        // The guest has noticed nothing.
        assert_eq!(stage.vm.exec("cat /sys/class/net/eth0/address").unwrap().trim(), mac);

        stage.pod.plug_cable(from.0, from.1).unwrap();
        wait_until_up(&stage.pod, from.0, from.1);
        iperf::run(&stage.vm, Way::In, 1).unwrap();
    }
    let kinds: Vec<_> =
        stage.pod.api().events(0).unwrap().events.into_iter().map(|event| event.kind.word()).collect();
    assert!(kinds.contains(&"link-down") && kinds.contains(&"failover"), "{kinds:?}");
}
