//! Requests that meet, on a disk with one place: what a guest has seen of them stays, whatever has to be repeated.

use std::sync::Arc;

use crate::pod::ram::{RamSsd, pod};
use crate::pod::*;

const SECTOR: u64 = 8;
const AT: u64 = VOLUME_START + SECTOR * 512;

/// The guest has read the older of two writes, though that has not ended, then it has seen the newer one end. The backend dies, and
/// what has not ended is repeated.
#[test]
fn a_write_that_was_seen_does_not_come_back_over_a_newer_one() {
    let (mut pod, control) = pod(61);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(SECTOR, &pattern(0, 4096)), OK);
    control.finish_backwards();
    control.hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let older = driver.offer(0, 0, T_OUT, SECTOR, 4096);
    eventually(|| control.waiting() == 1);
    // The device has carried it out, and has not said so.
    control.set_bytes(AT, &pattern(1, 4096));
    driver.write(driver.place(2).data, &pattern(2, 4096));
    let mut told = 0;
    for (index, kind) in [(1, T_IN), (2, T_OUT)] {
        let head = driver.offer(1, index, kind, SECTOR, 4096);
        assert!(driver.guest.wait_used(1, QUIET).is_none(), "the device does nothing");
        if control.waiting() == 2 {
            control.let_pass(1);
            assert_eq!(driver.guest.wait_used(1, PATIENCE).map(|used| used.head), Some(head));
            told += 1;
        }
    }
    pod.backend = None;
    control.orphaned(&pod.backend_memory, || false);
    control.hold(false);
    pod.start_backend(Box::new(RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&control) }));
    pod.apply_volume();
    pod.new_channel();
    assert_eq!(driver.answer(0, 0, older), (OK, 1));
    for _ in told..2 {
        assert!(driver.guest.wait_used(1, PATIENCE).is_some());
    }
    assert!(driver.read_sectors(SECTOR, 4096) == pattern(2, 4096), "{told} were told before");
}

#[test]
fn requests_begin_in_their_order_when_those_that_they_meet_have_ended() {
    for (seed, first, second) in [(62, T_OUT, T_IN), (63, T_IN, T_OUT), (64, T_OUT, T_OUT)] {
        let (pod, control) = pod(seed);
        let mut driver = Driver::connected(&pod);
        assert_eq!(driver.write_sectors(SECTOR, &pattern(0, 4096)), OK);
        let before = control.log().len();
        control.hold(true);
        driver.write(driver.place(0).data, &pattern(1, 4096));
        driver.write(driver.place(1).data, &pattern(2, 4096));
        let one = driver.offer(0, 0, first, SECTOR, 4096);
        eventually(|| control.waiting() == 1);
        // Its last sector is the other one's first.
        let other = driver.offer(1, 1, second, SECTOR + 7, 512);
        assert!(driver.guest.wait_used(1, QUIET).is_none());
        assert_eq!(control.waiting(), 1);
        control.hold(false);
        let length = |kind, bytes: u32| if kind == T_IN { bytes + 1 } else { 1 };
        assert_eq!(driver.answer(0, 0, one), (OK, length(first, 4096)));
        assert_eq!(driver.answer(1, 1, other), (OK, length(second, 512)));
        assert_eq!(control.log().len(), before + 2);
        let seen = match (first, second) {
            (T_IN, _) => (driver.read(driver.place(0).data, 4096), pattern(0, 4096)),
            (_, T_IN) => (driver.read(driver.place(1).data, 512), pattern(1, 4096)[3584..].to_vec()),
            _ => (control.bytes(AT + 3584, 512), pattern(2, 512)),
        };
        assert!(seen.0 == seen.1, "{first} before {second}");
    }
}

/// Reads do not wait for each other, nor does what meets nobody.
#[test]
fn others_are_under_way_together() {
    let (pod, control) = pod(65);
    let mut driver = Driver::connected(&pod);
    control.hold(true);
    for (index, kind, sector) in [(0, T_IN, 8), (1, T_IN, 8), (2, T_OUT, 16), (3, T_OUT, 17), (4, T_IN, 18)] {
        driver.offer((index % 2) as usize, index, kind, sector, 512);
        eventually(|| control.waiting() as u64 == index + 1);
    }
    control.hold(false);
    for index in 0..5 {
        assert!(driver.guest.wait_used(index % 2, PATIENCE).is_some());
    }
}
