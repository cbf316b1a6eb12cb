//! Mirrored disks whose volumes are held to rates.

use pod_protocol::objects::Qos;

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

#[test]
fn a_discard_of_a_mirrored_volume_counts_as_a_discard() {
    let (mut pod, mut driver) = pod(52);
    pod.set_qos(at_most(64 << 10));
    assert_eq!(driver.range_request(T_DISCARD, 0, 8 * MIB, 0), OK);
    // Long before as much could have been written.
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
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
