//! Mirrored disks whose volumes are held to rates.

use std::time::Duration;

use pod_protocol::endpoint::Handler;
use pod_protocol::objects::Qos;
use pod_protocol::reports::Report;

use crate::pod::mirror::MirrorPod;
use crate::pod::*;

/// In sectors.
const MIB: u32 = (1 << 20) / SECTOR as u32;

fn at_most(bytes_per_second: u64) -> Qos {
    Qos { bytes_per_second: Some(bytes_per_second), burst_ms: 0, ..Qos::default() }
}

/// A pod with a larger volume, whose replicas are in line.
fn pod(seed: u64) -> (MirrorPod, Driver) {
    let mut pod = MirrorPod::new(seed, 2);
    pod.disk.size_bytes = VOLUME_BYTES;
    pod.start_all();
    let driver = pod.driver();
    pod.until(|pod| pod.dirty_bytes() == 0);
    (pod, driver)
}

fn has_failed(reports: &[Report]) -> bool {
    reports.iter().any(|report| matches!(report, Report::ReplicaFailed { .. }))
}

#[test]
fn a_replica_that_waits_for_the_volumes_rates_does_not_hang() {
    let (mut pod, mut driver) = pod(51);
    pod.frontend.as_mut().unwrap().set_replica_timeout(Some(Duration::from_secs(1)));
    pod.set_qos(at_most(1 << 20));
    assert_eq!(driver.range_request(T_WRITE_ZEROES, 0, 4 * MIB, 0), OK);
    let mut reports = Vec::new();
    driver.write(driver.place(0).data, &pattern(1, 4096));
    driver.offer(0, 0, T_OUT, 8, 4096);
    eventually(|| {
        pod.dirty_bytes();
        reports.extend(pod.reports());
        driver.guest.used(0).is_some()
    });
    assert_eq!(driver.status(0), OK);
    assert!(!has_failed(&reports), "{reports:?}");
    for backend in pod.backends.iter_mut().flatten() {
        assert!(backend.telemetry().leases[0].throttled > 0, "nothing had to wait");
    }
    // One that hangs is told from that.
    pod.controls[1].hold(true);
    driver.offer(0, 0, T_OUT, 8, 4096);
    eventually(|| {
        pod.dirty_bytes();
        has_failed(&pod.reports())
    });
    pod.controls[1].hold(false);
}

#[test]
fn a_discard_of_a_mirrored_volume_counts_as_a_discard() {
    let (mut pod, mut driver) = pod(52);
    pod.set_qos(at_most(64 << 10));
    assert_eq!(driver.range_request(T_DISCARD, 0, 8 * MIB, 0), OK);
    // Long before as much could have been written.
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
}

#[test]
fn a_discard_of_a_mirrored_volume_counts_whole_where_zeroes_are_written() {
    let (mut pod, mut driver) = pod(54);
    pod.controls[0].write_zeroes();
    // Four seconds of it. As a discard it would be over before anybody looks.
    pod.set_qos(at_most(2 << 20));
    assert_eq!(driver.range_request(T_DISCARD, 0, 8 * MIB, 0), OK);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let write = driver.offer(0, 0, T_OUT, 8, 4096);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "it has had more than its share");
    pod.set_qos(Qos::default());
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
}

#[test]
fn copies_neither_count_for_the_volumes_rates_nor_wait_for_them() {
    let mut pod = MirrorPod::started(53, 2);
    let mut driver = pod.driver();
    pod.in_line();
    pod.kill(1, || false);
    pod.notice(1);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.set_qos(at_most(1));
    assert_eq!(driver.read_sectors(8, 512), pattern(1, 4096)[..512], "nothing was used of it yet");
    let head = driver.offer(0, 0, T_IN, 8, 512);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "the guest has had its share");
    assert!(pod.dirty_bytes() > 0);
    pod.revive(1);
    pod.in_line();
    assert_eq!(pod.synced, 1);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "the guest has had its share");
    pod.set_qos(Qos::default());
    assert_eq!(driver.answer(0, 0, head), (OK, 513));
}
