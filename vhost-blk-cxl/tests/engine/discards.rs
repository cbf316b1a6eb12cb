//! What a guest is shown of the discards that its disk heeds.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;

use pod_protocol::endpoint::Handler;
use vhost::vhost_user::VhostUserFrontend;
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::ssd::NullSsd;

use crate::column_moves;
use crate::pod::mirror::{MIRROR_BYTES, MirrorPod};
use crate::pod::ram::{idle_pod, pod};
use crate::pod::*;
use crate::requests::grow;

/// What its configuration space says, in bytes.
fn discard_granularity(driver: &mut Driver) -> u32 {
    let config = driver.guest.config(60);
    u32::from_le_bytes(config[44..48].try_into().unwrap()) * SECTOR as u32
}

#[test]
fn a_guest_is_shown_what_discards_its_disk_heeds() {
    let (mut pod, control) = pod(23);
    assert_eq!(discard_granularity(&mut Driver::connected(&pod)), 4096, "what fits most");
    for (said, shown) in [
        (Some(64 << 10), 64 << 10),
        (Some(512), 512),
        (Some(1 << 30), 1 << 30),
        (Some(256), 512),
        // None of it makes sense.
        (Some(1000), 4096),
        (Some(u32::MAX), 4096),
        (Some(0), 512),
    ] {
        pod.disk.discard_granularity_bytes = said;
        pod.apply_disk();
        assert_eq!(discard_granularity(&mut Driver::connected(&pod)), shown, "{said:?}");
    }
    drop(control);
}

/// It moves to another SSD.
#[test]
fn what_a_disk_heeds_may_change_under_its_guest() {
    let (mut pod, control) = pod(29);
    pod.disk.discard_granularity_bytes = Some(4096);
    pod.apply_disk();
    let mut driver = Driver::connected(&pod);
    let (heard, given) = UnixStream::pair().unwrap();
    driver.guest.frontend().set_backend_request_fd(&given).unwrap();
    driver.guest.set_config(32, &[0]);
    assert_eq!(discard_granularity(&mut driver), 4096);
    pod.disk.discard_granularity_bytes = Some(64 << 10);
    pod.apply_disk();
    // Its driver has no use for the news, and goes on as it began.
    heard.set_nonblocking(true).unwrap();
    let told = (&heard).read(&mut [0; 12]).map_err(|error| error.kind());
    assert_eq!(told, Err(ErrorKind::WouldBlock), "nobody is told");
    let before = control.log().len();
    assert_eq!(driver.range_request(T_DISCARD, 8, 8, 0), OK);
    assert!(control.log()[before..].iter().any(|it| it.operation == Operation::Discard));
    assert_eq!((discard_granularity(&mut driver), driver.guest.config(60)[32]), (64 << 10, 0));
    // Neither brings the other back.
    driver.guest.set_config(32, &[1]);
    grow(&mut pod);
    assert_eq!((discard_granularity(&mut driver), driver.guest.config(60)[32]), (64 << 10, 1));
    let sectors = u64::from_le_bytes(driver.guest.config(60)[..8].try_into().unwrap());
    assert_eq!(sectors, VOLUME_BYTES / SECTOR + 2048);
}

/// Devices do with a discard what they like, and each read may be another one's.
#[test]
fn replicas_whose_devices_take_discards_differently_hold_the_same_after_one() {
    let mut pod = MirrorPod::started(30, 2);
    pod.controls[1].keep_discarded();
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    assert_eq!(driver.range_request(T_DISCARD, 9, 4, 0), OK);
    pod.in_line();
    let mut expected = pattern(1, 4096);
    expected[512..5 * 512].fill(0);
    for control in &pod.controls {
        assert!(control.bytes(VOLUME_START + 4096, 4096) == expected);
    }
    // It takes up no room where that can be.
    let log = pod.controls[1].log();
    assert!(log.iter().any(|it| it.operation == Operation::WriteZeroes && it.may_unmap));
}

#[test]
fn a_replica_that_lost_a_discard_which_was_not_flushed_is_not_believed() {
    let mut pod = MirrorPod::started(31, 2);
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    assert_eq!(driver.range_request(T_DISCARD, 8, 8, 0), OK);
    // With its power it loses just that.
    let before = pod.controls[1].bytes(0, (VOLUME_START + MIRROR_BYTES) as usize);
    pod.controls[1].lose();
    pod.controls[1].set_bytes(0, &before);
    pod.controls[1].set_bytes(VOLUME_START + 4096, &pattern(1, 4096));
    let reads: Vec<u16> = (0..8).map(|index| driver.offer(0, index, T_IN, 8, 4096)).collect();
    let mut answered = 0;
    pod.until(|_| {
        answered += usize::from(driver.guest.used(0).is_some());
        answered == reads.len()
    });
    for index in 0..reads.len() as u64 {
        assert_eq!(driver.status(index), OK);
        assert!(driver.read(driver.place(index).data, 4096) == [0; 4096], "the other one has it");
    }
    driver.write(driver.place(0).data, &pattern(2, 4096));
    let head = driver.offer(0, 0, T_OUT, 2008, 4096);
    pod.until(|pod| pod.dropped == 1);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
    pod.in_line();
}

#[test]
fn a_column_that_moves_holds_the_same_after_a_discard_as_where_it_was() {
    let (mut pod, mut driver, mut model) = column_moves::full(54);
    pod.controls[0].keep_discarded();
    pod.move_column(0, 2);
    column_moves::wait_until_told(&mut pod, 2);
    assert_eq!(driver.range_request(T_DISCARD, 9, 16, 0), OK);
    model[9 * 512..25 * 512].fill(0);
    assert!(driver.read_sectors(0, 16384) == model[..16384]);
    pod.until(|pod| column_moves::settled(pod));
    assert!(driver.read_sectors(0, 16384) == model[..16384]);
}

/// On a mirror its devices may have to write zeroes for it, and a request that takes long is taken for one that hangs.
#[test]
fn a_long_discard_is_carried_out_in_steps() {
    const STEP: u64 = 64 << 20;
    let (mut pod, ..) = idle_pod(32);
    (pod.disk.size_bytes, pod.volume.size_bytes) = (3 * STEP, 3 * STEP);
    pod.start(Box::new(NullSsd::new(4 * STEP)));
    let mut driver = Driver::connected(&pod);
    let sectors = (2 * STEP / SECTOR) as u32 + 1;
    assert_eq!(driver.range_request(T_DISCARD, 7, sectors, 0), OK);
    let telemetry = pod.backend.as_mut().unwrap().telemetry();
    assert_eq!(telemetry.devices[0].operations, 3);
    assert_eq!(driver.range_request(T_DISCARD, 0, 2048, 0), OK);
}
