//! Mirrored disks whose SSDs lose what was not flushed.

use pod_protocol::endpoint::Handler;
use pod_protocol::reports::Report;

use crate::pod::mirror::MirrorPod;
use crate::pod::*;

/// How often a device was seen to have lost something.
fn losses(pod: &mut MirrorPod) -> u64 {
    let telemetry = pod.frontend.as_mut().unwrap().telemetry();
    telemetry.leases[0].drops.get("lost-writes").copied().unwrap_or(0)
}

/// A disk of which the second replica has been brought in line. The controller has not heard of it.
fn told(seed: u64) -> (MirrorPod, Driver) {
    let mut pod = MirrorPod::started(seed, 2);
    let mut driver = pod.driver();
    pod.in_line();
    pod.kill(1, || false);
    pod.notice(1);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.revive(1);
    let epoch_now = pod.disk.epoch;
    let told = |it: &Report| matches!(it, Report::ReplicaSynced { epoch, .. } if *epoch == epoch_now);
    eventually(|| {
        // That is when the frontend says again what was not heard, as it will once more.
        pod.dirty_bytes();
        pod.reports().iter().any(told)
    });
    (pod, driver)
}

/// What the second replica has and the only one in sync does not any more: a write that both got, and what was copied of the
/// other's cache.
#[test]
fn what_the_only_one_in_sync_lost_is_not_left_on_one_that_comes_in_line() {
    let mut pod = MirrorPod::started(31, 2);
    let mut driver = pod.driver();
    pod.in_line();
    pod.kill(1, || false);
    pod.notice(1);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    // The copy stays, while what the guest writes and other copies pass.
    pod.controls[1].keep_writes_at(Some(VOLUME_START));
    pod.revive(1);
    eventually(|| pod.controls[1].keeps_any());
    assert_eq!(driver.write_sectors(4000, &pattern(2, 4096)), OK);
    pod.controls[0].lose();
    // The answer tells.
    assert_eq!(driver.write_sectors(2000, &pattern(3, 4096)), OK);
    pod.controls[1].keep_writes_at(None);
    pod.in_line();
    assert_eq!(driver.read_sectors(4000, 4096), [0; 4096]);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
    assert_eq!((pod.dropped, pod.synced), (1, 1));
}

#[test]
fn what_the_only_one_in_sync_lost_is_not_left_on_one_that_the_controller_was_told_of() {
    let (mut pod, mut driver) = told(32);
    assert_eq!(driver.write_sectors(4000, &pattern(2, 4096)), OK);
    pod.controls[0].lose();
    assert_eq!(driver.write_sectors(2000, &pattern(3, 4096)), OK);
    pod.in_line();
    let seen = driver.read_sectors(4000, 4096);
    assert_eq!(driver.read_sectors(4000, 4096), seen);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
}

/// The controller hears that it has everything when it knows already that its backend is dead.
#[test]
fn a_replica_that_dies_before_it_is_taken_for_in_sync_is_not_waited_for() {
    let (mut pod, mut driver) = told(33);
    pod.kill(1, || false);
    pod.notice(1);
    pod.until(|pod| pod.synced == 1);
    assert_eq!(driver.write_sectors(8, &pattern(2, 4096)), OK);
    pod.revive(1);
    pod.in_line();
    assert_eq!((pod.dropped, pod.synced), (2, 2));
    pod.kill(0, || false);
    pod.notice(0);
    assert_eq!(driver.read_sectors(8, 4096), pattern(2, 4096), "it has what it missed");
}

/// What they had not flushed when an earlier frontend ended, the next one does not know.
#[test]
fn a_replica_that_lost_what_an_earlier_frontend_wrote_is_not_believed() {
    let mut pod = MirrorPod::started(38, 2);
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    driver.guest.disconnect();
    pod.restart_frontend();
    driver.guest.connect(&pod.run.sockets().join(&pod.disk.socket), ALL_FEATURES);
    // By this answer it knows the first one.
    assert_eq!(driver.read_sectors(8, 4096), pattern(1, 4096));
    pod.controls[0].lose();
    driver.write(driver.place(0).data, &pattern(3, 4096));
    let head = driver.offer(0, 0, T_OUT, 2008, 4096);
    pod.until(|pod| pod.dropped == 1);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
    pod.in_line();
    for _ in 0..4 {
        assert!(driver.read_sectors(8, 4096) == pattern(1, 4096), "the other one has it");
    }
}

#[test]
fn reads_that_show_a_loss_are_not_believed() {
    let mut pod = MirrorPod::started(33, 2);
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    // Half of them go to each.
    pod.controls.iter().for_each(|control| control.hold(true));
    let reads: Vec<u16> = (0..8).map(|index| driver.offer(0, index, T_IN, 8, 4096)).collect();
    eventually(|| pod.controls.iter().all(|control| control.waiting() == 4));
    pod.controls[0].lose();
    pod.controls.iter().for_each(|control| control.hold(false));
    let mut answered = 0;
    pod.until(|_| {
        answered += usize::from(driver.guest.used(0).is_some());
        answered == reads.len()
    });
    for index in 0..reads.len() as u64 {
        assert_eq!(driver.status(index), OK);
        assert!(driver.read(driver.place(index).data, 4096) == pattern(1, 4096), "the other one has it");
    }
    pod.until(|pod| pod.dropped == 1);
    pod.in_line();
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the other one lost nothing");
}

#[test]
fn what_is_read_of_one_that_lost_writes_is_not_copied() {
    let mut pod = MirrorPod::started(34, 3);
    let mut driver = pod.driver();
    pod.in_line();
    pod.kill(2, || false);
    pod.notice(2);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.controls[0].hold(true);
    pod.revive(2);
    // Of the copy.
    eventually(|| pod.controls[0].waiting() == 1);
    pod.controls[0].lose();
    pod.controls[0].hold(false);
    pod.until(|pod| pod.dropped == 2);
    pod.in_line();
    assert_eq!(driver.read_sectors(8, 4096), pattern(1, 4096));
}

/// Both hosts lost their power. The controller drops one because its host does not come back, before it hears that the other one has
/// lost writes: that is the last one then.
#[test]
fn one_that_lost_writes_goes_on_when_it_is_the_last() {
    let mut pod = MirrorPod::started(35, 2);
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.controls[0].hold(true);
    let read = driver.offer(0, 2, T_IN, 8, 4096);
    eventually(|| pod.controls[0].waiting() == 1);
    pod.controls[0].lose();
    pod.controls[0].hold(false);
    eventually(|| losses(&mut pod) == 1);
    // From here on the first one gets nothing.
    driver.write(driver.place(0).data, &pattern(3, 4096));
    let write = driver.offer(0, 0, T_OUT, 600, 4096);
    let flush = driver.offer(1, 1, T_FLUSH, 0, 0);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "the controller has said nothing yet");
    pod.disk.replicas[1].in_sync = false;
    pod.disk.replicas[1].away = true;
    pod.disk.epoch += 1;
    pod.apply_disk();
    let answers = [(); 2].map(|()| driver.guest.wait_used(0, PATIENCE).map(|used| used.head));
    assert!(answers.contains(&Some(write)) && answers.contains(&Some(read)), "{answers:?}");
    assert_eq!((driver.status(0), driver.status(2)), (OK, OK));
    assert_eq!(driver.read(driver.place(2).data, 4096), [0; 4096], "nobody else has it");
    assert_eq!(driver.answer(1, 1, flush).0, IOERR);
    assert_eq!(driver.read_sectors(600, 4096), pattern(3, 4096));
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
    pod.disk.replicas[1].away = false;
    pod.apply_disk();
    pod.in_line();
    assert_eq!(pod.controls[1].bytes(VOLUME_START + 600 * SECTOR, 4096), pattern(3, 4096));
}

/// The controller says both at once: one has come in line, and the one that the others were brought in line with is dropped.
#[test]
fn one_that_is_in_sync_takes_over_from_one_that_is_dropped_at_the_same_time() {
    let (mut pod, mut driver) = told(36);
    pod.disk.replicas[1].in_sync = true;
    pod.disk.replicas[0].in_sync = false;
    pod.disk.epoch += 2;
    pod.apply_disk();
    assert_eq!(driver.write_sectors(600, &pattern(2, 4096)), OK);
    pod.in_line();
}

/// What a device may have lost that fails to flush and goes on as if nothing had happened, with the verifier of before: the kernel
/// forgets what it could not write.
fn loses_in_a_flush(mut pod: MirrorPod, index: usize) {
    let mut driver = pod.driver();
    pod.in_line();
    let data = pattern(1, 4096);
    assert_eq!(driver.write_sectors(8, &data), OK);
    pod.controls[index].fail(true);
    let flush = driver.offer(0, 0, T_FLUSH, 0, 0);
    pod.until(|pod| pod.dropped == 1);
    assert_eq!(driver.answer(0, 0, flush), (OK, 1), "the other one has it");
    let place = VOLUME_START + 8 * SECTOR;
    pod.controls[index].set_bytes(place, &[0; 4096]);
    pod.controls[index].fail(false);
    pod.in_line();
    assert_eq!(pod.controls[index].bytes(place, 4096), data);
    assert_eq!(driver.read_sectors(8, 4096), data);
}

#[test]
fn what_one_may_have_lost_in_a_flush_that_failed_is_copied() {
    loses_in_a_flush(MirrorPod::started(37, 2), 1);
    loses_in_a_flush(MirrorPod::logging(38, 2), 1);
}

#[test]
fn so_it_is_where_the_others_were_brought_in_line_with_that_one() {
    loses_in_a_flush(MirrorPod::started(39, 2), 0);
    loses_in_a_flush(MirrorPod::logging(40, 3), 0);
}

/// Nobody but the frontend flushes, to take marks away.
#[test]
fn a_flush_of_our_own_that_fails_is_no_less_a_loss() {
    let mut pod = MirrorPod::logging(41, 2);
    let mut driver = pod.driver();
    pod.in_line();
    let data = pattern(1, 4096);
    assert_eq!(driver.write_sectors(8, &data), OK);
    pod.controls[1].fail(true);
    pod.until(|pod| pod.dropped == 1);
    let place = VOLUME_START + 8 * SECTOR;
    pod.controls[1].set_bytes(place, &[0; 4096]);
    pod.controls[1].fail(false);
    pod.in_line();
    assert_eq!(pod.controls[1].bytes(place, 4096), data);
}

/// All of them failed to flush, and the guest knows. Whichever of them lost what, they hold the same in the end.
#[test]
fn a_flush_that_nobody_carried_out_leaves_replicas_alike() {
    for lost in 0..2 {
        let mut pod = MirrorPod::logging(42, 2);
        let mut driver = pod.driver();
        pod.in_line();
        assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
        pod.controls[lost].set_bytes(VOLUME_START + 8 * SECTOR, &[0; 4096]);
        pod.controls.iter().for_each(|control| control.fail_flushes(true));
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
        pod.controls.iter().for_each(|control| control.fail_flushes(false));
        pod.in_line();
        let seen = driver.read_sectors(8, 4096);
        for _ in 0..4 {
            assert_eq!(driver.read_sectors(8, 4096), seen);
        }
    }
}
