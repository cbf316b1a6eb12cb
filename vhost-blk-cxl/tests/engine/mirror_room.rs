//! Mirrored disks with long requests, in areas that also hold what is kept for bad days and what is being copied.

use crate::pod::mirror::MirrorPod;
use crate::pod::*;

/// The longest request of a guest that keeps to the limits it is shown.
const LONGEST: u32 = 126 * (32 << 10);

/// A pod with a volume in so many places, of which some come later, and an area of so many MiB.
fn pod(seed: u64, (places, later): (u16, u16), area_mib: u64) -> MirrorPod {
    let mut pod = MirrorPod::new(seed, places);
    pod.set_data_area(area_mib << 20);
    pod.disk.size_bytes = VOLUME_BYTES;
    for index in usize::from(places - later)..usize::from(places) {
        pod.present[index] = false;
        pod.disk.replicas[index].in_sync = false;
    }
    for control in &pod.controls[..usize::from(places - later)] {
        control.set_bytes(VOLUME_START, &pattern(seed, VOLUME_BYTES as usize));
    }
    pod
}

fn read_longest(driver: &mut Driver, seed: u64) {
    let read = driver.read_sectors(8, LONGEST);
    assert!(
        read == pattern(seed, VOLUME_BYTES as usize)[4096..4096 + LONGEST as usize],
        "it read something else"
    );
}

#[test]
fn a_long_request_does_not_wait_for_a_place_that_comes() {
    let mut pod = pod(41, (4, 1), 16);
    pod.start_all();
    pod.until(|pod| pod.dirty_bytes() == 0);
    let mut driver = pod.driver();
    pod.controls[3].keep_writes_at(Some(VOLUME_START));
    pod.add(3, None);
    eventually(|| pod.controls[3].keeps_any());
    read_longest(&mut driver, 41);
    assert!(pod.dirty_bytes() > 0, "the place is complete already");
    pod.controls[3].keep_writes_at(None);
    pod.until(|pod| pod.dirty_bytes() == 0);
}

#[test]
fn a_long_request_that_came_while_replicas_were_compared_is_answered() {
    let mut pod = pod(42, (3, 0), 8);
    pod.start_all();
    pod.until(|pod| pod.dirty_bytes() == 0);
    let mut driver = pod.driver();
    driver.guest.disconnect();
    pod.controls[1..].iter().for_each(|control| control.hold(true));
    pod.restart_frontend();
    driver.guest.connect(&pod.run.sockets().join(&pod.disk.socket), ALL_FEATURES);
    eventually(|| pod.controls[1..].iter().any(|control| control.waiting() > 0));
    let head = driver.offer(0, 0, T_IN, 0, LONGEST);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "nobody knows yet what it is to read");
    pod.controls[1..].iter().for_each(|control| control.hold(false));
    // Nobody tells the frontend anything meanwhile.
    assert_eq!(driver.answer(0, 0, head), (OK, LONGEST + 1));
}

#[test]
fn a_request_that_is_longer_than_what_is_left_of_the_area_is_carried_out() {
    for replicas in [2, 4] {
        let mut pod = pod(43, (replicas, 0), 4);
        pod.start_all();
        let mut driver = pod.driver();
        read_longest(&mut driver, 43);
        let data = pattern(1, LONGEST as usize);
        assert_eq!(driver.write_sectors(8, &data), OK);
        assert!(driver.read_sectors(8, LONGEST) == data, "it reads something else than was written");
        // One dies, and what it had to read is read by another one.
        pod.controls[0].hold(true);
        let head = driver.offer(0, 0, T_IN, 8, LONGEST);
        eventually(|| pod.controls[0].waiting() > 0);
        pod.kill(0, || false);
        pod.notice(0);
        assert_eq!(driver.answer(0, 0, head), (OK, LONGEST + 1));
        assert!(driver.read(driver.place(0).data, LONGEST as usize) == data, "it reads something else");
    }
}

/// Before anything could be compared, the guest had asked for as much as the area holds.
#[test]
fn what_is_compared_does_not_wait_for_reads_that_wait_for_it() {
    const REQUESTS: u64 = 24;
    let mut pod = pod(44, (2, 0), 4);
    pod.start_frontend();
    pod.start_backend(0);
    pod.apply_disk();
    let mut driver = pod.driver();
    for index in 0..REQUESTS {
        driver.offer(0, index, T_IN, index * 512, 256 << 10);
    }
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "nobody knows yet what it is to read");
    pod.start_backend(1);
    for _ in 0..REQUESTS {
        assert!(driver.guest.wait_used(0, PATIENCE).is_some(), "it is never answered");
    }
    assert!((0..REQUESTS).all(|index| driver.status(index) == OK));
}

/// What was with a replica that died may still be filled by it, also after the controller has taken the replica away.
#[test]
fn a_read_does_not_go_on_in_a_buffer_that_a_replica_which_is_gone_may_fill() {
    const READS: usize = 9;
    let mut pod = pod(45, (2, 0), 4);
    pod.start_all();
    let mut driver = pod.driver();
    pod.in_line();
    pod.controls.iter().for_each(|control| control.hold(true));
    for index in 0..READS as u64 {
        driver.offer(0, index, T_IN, index * 512, 256 << 10);
    }
    eventually(|| pod.controls.iter().map(|control| control.waiting()).sum::<usize>() == READS);
    // The spare has room for four of those that are asked for again.
    let (had, others) = (pod.controls[0].waiting(), pod.controls[1].waiting());
    assert!(had > 4, "{had} reads are with it");
    pod.kill(0, || false);
    pod.notice(0);
    eventually(|| pod.controls[1].waiting() == others + 4);
    pod.present[0] = false;
    pod.disk.epoch += 1;
    pod.apply_disk();
    assert!(driver.guest.wait_used(0, QUIET).is_none());
    assert_eq!(pod.controls[1].waiting(), others + 4, "no more have a buffer");
    pod.controls[1].hold(false);
    for _ in 0..READS {
        assert!(driver.guest.wait_used(0, PATIENCE).is_some(), "it is never answered");
    }
    assert!((0..READS as u64).all(|index| driver.status(index) == OK));
}
