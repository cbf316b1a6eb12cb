//! Mirrored disks: requests that meet are carried out one after the other.

use std::thread;

use crate::pod::mirror::MirrorPod;
use crate::pod::*;

#[test]
fn a_read_that_meets_a_write_waits_for_it() {
    let mut pod = MirrorPod::started(11, 2);
    let mut driver = pod.driver();
    pod.in_line();
    pod.controls[1].hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let write = driver.offer(0, 0, T_OUT, 8, 4096);
    eventually(|| pod.controls[0].bytes(VOLUME_START + 4096, 4096) == pattern(1, 4096));
    // One replica would show the write, and the other one not any more.
    let read = driver.offer(1, 1, T_IN, 15, 512);
    let elsewhere = driver.offer(1, 2, T_IN, 16, 512);
    assert_eq!(driver.guest.wait_used(1, PATIENCE).map(|used| used.head), Some(elsewhere));
    assert!(driver.guest.wait_used(1, QUIET).is_none());
    pod.controls[1].hold(false);
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
    assert_eq!(driver.answer(1, 1, read), (OK, 513));
    assert_eq!(driver.read(driver.place(1).data, 512), pattern(1, 4096)[3584..]);
}

#[test]
fn a_write_waits_for_a_read_that_it_meets_and_is_not_passed_by_others() {
    let mut pod = MirrorPod::started(18, 2);
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.controls[0].hold(true);
    let read = driver.offer(0, 0, T_IN, 8, 4096);
    eventually(|| pod.controls[0].waiting() == 1);
    let before = pod.controls[1].log().len();
    driver.write(driver.place(1).data, &pattern(2, 4096));
    let write = driver.offer(1, 1, T_OUT, 8, 4096);
    let later = driver.offer(1, 2, T_IN, 8, 4096);
    let elsewhere = driver.offer(1, 3, T_IN, 16, 512);
    assert_eq!(driver.guest.wait_used(1, PATIENCE).map(|used| used.head), Some(elsewhere));
    assert!(driver.guest.wait_used(1, QUIET).is_none());
    assert_eq!((pod.controls[0].waiting(), pod.controls[1].log().len()), (1, before + 1));
    pod.controls[0].hold(false);
    assert_eq!(driver.answer(0, 0, read), (OK, 4097));
    assert_eq!(driver.read(driver.place(0).data, 4096), pattern(1, 4096));
    let answers = [(); 2].map(|()| driver.guest.wait_used(1, PATIENCE).map(|used| used.head));
    assert_eq!(answers, [write, later].map(Some));
    assert_eq!(driver.read(driver.place(2).data, 4096), pattern(2, 4096));
    pod.in_line();
}

/// A frontend and the backend of a replica die, and nobody has dropped that. What another one has done of a write that was never
/// acknowledged, it has not: a read must not have seen it.
#[test]
fn what_was_read_of_one_replica_is_read_by_the_next_frontend_of_another() {
    let mut pod = MirrorPod::started(19, 2);
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.in_line();
    pod.kill(0, || false);
    pod.controls[1].finish_backwards();
    pod.controls[1].hold(true);
    // The first read keeps the dead one busy.
    driver.offer(0, 0, T_IN, 2000, 512);
    let read = driver.offer(0, 1, T_IN, 8, 4096);
    eventually(|| pod.controls[1].waiting() == 1);
    driver.write(driver.place(2).data, &pattern(2, 4096));
    driver.offer(1, 2, T_OUT, 8, 4096);
    assert!(driver.guest.wait_used(1, QUIET).is_none(), "the other one does not have it");
    pod.controls[1].hold(false);
    assert_eq!(driver.answer(0, 1, read), (OK, 4097));
    let seen = driver.read(driver.place(1).data, 4096);
    // The guest resets its disk, so that nothing is repeated.
    drop(driver);
    pod.restart_frontend();
    pod.start_backend(0);
    let mut driver = pod.driver();
    assert!(driver.read_sectors(8, 4096) == seen, "it is what it was before the write");
}

#[test]
fn writes_that_meet_have_the_same_order_everywhere() {
    let mut pod = MirrorPod::started(12, 2);
    let mut driver = pod.driver();
    pod.in_line();
    pod.controls[1].finish_backwards();
    pod.controls[1].hold(true);
    for index in 0..4_u64 {
        driver.write(driver.place(index).data, &pattern(index, 4096));
        driver.offer((index % 2) as usize, index, T_OUT, 8 + index, 4096);
    }
    eventually(|| pod.controls[1].waiting() > 0);
    thread::sleep(QUIET);
    assert_eq!(pod.controls[1].waiting(), 1, "others come when this one is done on both");
    pod.controls[1].hold(false);
    for index in 0..4_usize {
        assert!(driver.guest.wait_used(index % 2, PATIENCE).is_some());
    }
    pod.in_line();
}

/// A long write is carried out step by step, each of which would let those pass that meet another step.
#[test]
fn a_read_that_meets_a_long_write_waits_for_all_of_it() {
    const BYTES: u32 = 5 << 20;
    let mut pod = MirrorPod::new(37, 2);
    pod.disk.size_bytes = VOLUME_BYTES;
    pod.start_all();
    let mut driver = pod.driver();
    pod.until(|pod| pod.dirty_bytes() == 0);
    driver.write_header(driver.place(0), T_OUT, 0);
    driver.write(driver.place(0).data, &pattern(1, BYTES as usize));
    pod.controls.iter().for_each(|control| control.let_pass(1));
    let pieces = Driver::pieces(driver.place(0), T_OUT, BYTES);
    let write = driver.guest.offer(0, &pieces, None);
    eventually(|| pod.controls.iter().all(|control| control.waiting() == 1));
    let before = pod.controls[0].log().len();
    let read = driver.offer(1, 8, T_IN, 0, 4096);
    assert!(driver.guest.wait_used(1, QUIET).is_none(), "the write has not ended");
    assert_eq!(pod.controls[0].log().len(), before, "it would be seen before the write ends");
    pod.controls.iter().for_each(|control| control.hold(false));
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
    assert_eq!(driver.answer(1, 8, read), (OK, 4097));
    assert!(driver.read(driver.place(8).data, 4096) == pattern(1, BYTES as usize)[..4096]);
    // And the other way round.
    pod.controls.iter().for_each(|control| control.hold(true));
    driver.offer(1, 8, T_IN, 0, 4096);
    eventually(|| pod.controls[0].waiting() + pod.controls[1].waiting() == 1);
    let write = driver.guest.offer(0, &pieces, None);
    assert!(driver.guest.wait_used(0, QUIET).is_none());
    assert_eq!(pod.controls[0].waiting() + pod.controls[1].waiting(), 1);
    pod.controls.iter().for_each(|control| control.hold(false));
    assert!(driver.guest.wait_used(1, PATIENCE).is_some());
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
}
