//! Mirrored disks: replicas that die, come back and are brought in line under a guest that notices nothing.

use std::panic::{self, AssertUnwindSafe};
use std::thread;
use std::time::{Duration, Instant};

use cxl_pool::simulated::{check_seeds, seeds};
use vhost_blk_cxl::ssd::Command;

use crate::TARGET;
use crate::pod::history::History;
use crate::pod::mirror::{MIRROR_BYTES, MirrorPod};
use crate::pod::*;

/// Lets guest and controller work until nothing is in flight.
fn settle(pod: &mut MirrorPod, history: &mut History) {
    let began = Instant::now();
    while !history.is_idle() {
        assert!(began.elapsed() < PATIENCE, "requests are never answered");
        history.collect();
        pod.control();
        thread::yield_now();
    }
}

/// Kills and revives replicas at moments that the seed chooses.
fn run(seed: u64, replicas: u16) -> Result<(u64, u64), String> {
    let mut pod = MirrorPod::started(seed, replicas);
    let mut history = History::new(pod.driver(), seed);
    history.discards = true;
    pod.controls[1].keep_discarded();
    let count = usize::from(replicas);
    for control in &pod.controls {
        // What came last is done first, so that a read overtakes a write on one replica and not on the other.
        control.finish_backwards();
    }
    for _ in 0..12 {
        for _ in 0..8 {
            history.work(1 + history_below(seed, 8));
            // Replicas are slow by turns.
            let (slow, held) = (history.below(count as u64) as usize, history.below(2) == 0);
            pod.controls[slow].hold(held);
            thread::sleep(Duration::from_micros(history.below(300)));
            history.collect();
            pod.control();
        }
        let there: Vec<usize> = (0..count).filter(|&index| pod.backends[index].is_some()).collect();
        let victim = history.below(count as u64) as usize;
        match history.below(6) {
            // The last one with everything stays: without it the guest waits.
            0..=2 if there.contains(&victim) => {
                let good = |index: &usize| *index != victim && pod.disk.replicas[*index].in_sync;
                if !there.iter().any(good) {
                    continue;
                }
                let finishes = history.below(2) == 0;
                pod.kill(victim, || finishes);
                history.work(4);
                // Either it comes back before anybody has noticed, or not.
                if history.below(3) == 0 {
                    pod.revive(victim);
                } else {
                    pod.notice(victim);
                }
            }
            3..=4 => {
                if let Some(gone) = (0..count).find(|index| !there.contains(index)) {
                    pod.revive(gone);
                }
            }
            _ => {}
        }
        history.collect();
    }
    pod.controls.iter().for_each(|control| control.hold(false));
    for index in 0..count {
        if pod.backends[index].is_none() {
            pod.revive(index);
        }
    }
    settle(&mut pod, &mut history);
    pod.in_line();
    history.read_all();
    history.check()?;
    Ok((pod.dropped, pod.synced))
}

fn history_below(seed: u64, limit: u64) -> u64 {
    seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33 & (limit - 1)
}

#[test]
fn one_order_explains_what_the_guest_sees_while_replicas_die_and_return() {
    const COUNT: u64 = 12;
    let (mut dropped, mut synced) = (0, 0);
    check_seeds(TARGET, COUNT, |seed| {
        let (down, up) = run(seed + 1, 2 + (seed % 2) as u16)?;
        dropped += down;
        synced += up;
        Ok(())
    });
    let both = dropped > 0 && synced > 0 || seeds(COUNT).count() == 1;
    assert!(both, "nothing was tried: {dropped} dropped, {synced} back");
}

#[test]
fn a_write_waits_until_the_controller_has_dropped_the_replica_that_lacks_it() {
    let mut pod = MirrorPod::started(3, 2);
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.kill(1, || false);
    driver.write(driver.place(0).data, &pattern(2, 4096));
    let head = driver.offer(0, 0, T_OUT, 8, 4096);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "the other one could be taken for good");
    pod.notice(1);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
    assert!(!pod.disk.replicas[1].in_sync && pod.disk.epoch == 2);
    assert_eq!(driver.read_sectors(8, 4096), pattern(2, 4096));
    pod.revive(1);
    pod.in_line();
    assert_eq!((pod.dropped, pod.synced), (1, 1));
    // Now the other one alone.
    pod.kill(0, || false);
    pod.notice(0);
    assert_eq!(driver.read_sectors(8, 4096), pattern(2, 4096));
}

#[test]
fn a_replica_that_fails_a_write_is_dropped_and_comes_back() {
    let mut pod = MirrorPod::started(4, 3);
    let mut driver = pod.driver();
    pod.in_line();
    pod.controls[0].fail(true);
    driver.write(driver.place(0).data, &pattern(2, 4096));
    let head = driver.offer(0, 0, T_OUT, 8, 4096);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "the controller has said nothing yet");
    pod.until(|pod| pod.dropped == 1);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
    assert!(!pod.disk.replicas[0].in_sync);
    assert_eq!(driver.read_sectors(8, 4096), pattern(2, 4096));
    pod.controls[0].fail(false);
    pod.in_line();
    assert_eq!(pod.synced, 1);
    assert_eq!(pod.controls[0].bytes(VOLUME_START + 4096, 4096), pattern(2, 4096));
}

#[test]
fn a_read_that_one_replica_fails_is_served_by_another() {
    let mut pod = MirrorPod::started(5, 2);
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.in_line();
    pod.controls[0].fail(true);
    assert_eq!(driver.read_sectors(8, 4096), pattern(1, 4096));
    pod.controls[1].fail(true);
    assert_eq!(driver.request(T_IN, 8, 4096).0, IOERR);
    assert_eq!(pod.dropped, 0);
    // Nobody waits for those that are over.
    pod.controls.iter().for_each(|control| control.fail(false));
    assert_eq!(driver.write_sectors(8, &pattern(2, 4096)), OK);
    assert_eq!(driver.read_sectors(8, 4096), pattern(2, 4096));
}

#[test]
fn the_last_replica_fails_at_once() {
    let mut pod = MirrorPod::started(6, 2);
    let mut driver = pod.driver();
    pod.in_line();
    pod.kill(1, || false);
    pod.notice(1);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.controls[0].fail(true);
    assert_eq!(driver.write_sectors(8, &pattern(2, 4096)), IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.request(T_IN, 8, 4096).0, IOERR);
    pod.control();
    assert!(pod.disk.replicas[0].in_sync, "it is never dropped");
    // A stale replica is no way out, even if it is there.
    pod.revive(1);
    assert_eq!(driver.request(T_IN, 8, 4096).0, IOERR);
}

#[test]
fn a_replica_that_lost_what_was_not_flushed_is_copied_as_a_whole() {
    let mut pod = MirrorPod::started(7, 2);
    let mut driver = pod.driver();
    pod.in_line();
    let sectors = [0, 600, 1300, 4000];
    for (seed, sector) in (1..).zip(sectors) {
        assert_eq!(driver.write_sectors(sector, &pattern(seed, 4096)), OK);
    }
    pod.controls[1].lose();
    // The next answer tells.
    driver.write(driver.place(0).data, &pattern(9, 4096));
    let head = driver.offer(0, 0, T_OUT, 2000, 4096);
    pod.until(|pod| pod.dropped == 1);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the other one lost nothing");
    pod.until(|pod| pod.synced == 1);
    pod.in_line();
    for (seed, sector) in (1..).zip(sectors) {
        assert_eq!(pod.controls[1].bytes(VOLUME_START + sector * SECTOR, 4096), pattern(seed, 4096));
    }
}

#[test]
fn a_loss_of_what_nobody_else_had_is_told_although_another_one_is_in_line_by_then() {
    let mut pod = MirrorPod::started(16, 2);
    let mut driver = pod.driver();
    pod.in_line();
    pod.kill(1, || false);
    pod.notice(1);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.controls[0].lose();
    pod.revive(1);
    pod.until(|pod| pod.synced == 1);
    pod.in_line();
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
    assert_eq!(pod.dropped, 1);
}

#[test]
fn a_stale_replica_gets_what_it_missed_and_no_more() {
    let mut pod = MirrorPod::started(8, 2);
    let mut driver = pod.driver();
    pod.in_line();
    pod.kill(1, || false);
    pod.notice(1);
    assert_eq!(driver.write_sectors(600, &pattern(1, 4096)), OK);
    let before = pod.controls[1].log().len();
    pod.revive(1);
    pod.in_line();
    let written: Vec<u64> = pod.controls[1].log()[before..]
        .iter()
        .filter(|command| command.operation.writes())
        .map(|command| command.offset_bytes - VOLUME_START)
        .collect();
    assert_eq!(written, [256 << 10], "one region");
}

#[test]
fn what_a_dead_frontend_left_different_is_read_the_same_by_all() {
    let mut pod = MirrorPod::started(9, 2);
    {
        let mut driver = pod.driver();
        pod.in_line();
        assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    }
    // A write that had reached one replica when the frontend died.
    pod.controls[0].set_bytes(VOLUME_START + 4096, &pattern(2, 4096));
    pod.restart_frontend();
    let mut driver = pod.driver();
    let read = driver.read_sectors(8, 4096);
    assert_eq!(read, pattern(2, 4096));
    assert_eq!(pod.controls[1].bytes(VOLUME_START + 4096, 4096), read, "what was read must stay");
    pod.kill(0, || false);
    pod.notice(0);
    assert_eq!(driver.read_sectors(8, 4096), read);
    assert_eq!(driver.read_sectors(MIRROR_BYTES / SECTOR - 8, 4096), vec![0; 4096]);
}

/// Whether one of these uses the buffer of that one.
fn is_given(buffer_of: &Command, commands: &[Command]) -> bool {
    let end = |it: &Command| it.data.get() + it.length_bytes;
    commands
        .iter()
        .any(|it| it.length_bytes > 0 && buffer_of.data.get() < end(it) && it.data.get() < end(buffer_of))
}

/// What is read and written at a time.
const LATE_BYTES: u32 = 256 << 10;
const LATE_SECTORS: u64 = LATE_BYTES as u64 / SECTOR;

/// Two replicas of which the first one keeps a read and is dropped for that; the guest has what it reads from the other one. With the
/// command that the first one may carry out yet.
fn a_read_with_one_that_is_lost(seed: u64) -> (MirrorPod, Driver, Command) {
    let mut pod = MirrorPod::started(seed, 2);
    let mut driver = pod.driver();
    pod.in_line();
    for index in 0..4 {
        let data = pattern(index, LATE_BYTES as usize);
        assert_eq!(driver.write_sectors(index * LATE_SECTORS, &data), OK);
    }
    pod.controls[0].hold(true);
    let head = driver.offer(0, 0, T_IN, 0, LATE_BYTES);
    eventually(|| pod.controls[0].waiting() == 1);
    let late = *pod.controls[0].log().last().unwrap();
    let before = pod.controls[1].log().len();
    pod.notice(0);
    assert_eq!(driver.answer(0, 0, head), (OK, LATE_BYTES + 1));
    assert!(!is_given(&late, &pod.controls[1].log()[before..]), "it was read into the same buffer");
    assert_eq!(driver.read(driver.place(0).data, LATE_BYTES as usize), pattern(0, LATE_BYTES as usize));
    (pod, driver, late)
}

#[test]
fn a_buffer_that_a_lost_replica_may_still_fill_is_kept_aside() {
    let (mut pod, mut driver, late) = a_read_with_one_that_is_lost(13);
    let before = pod.controls[1].log().len();
    // More than the area holds.
    let used = |pod: &MirrorPod, from: usize| is_given(&late, &pod.controls[1].log()[from..]);
    for round in 0..40_u64 {
        let data = pattern(100 + round, LATE_BYTES as usize);
        assert_eq!(driver.write_sectors(round % 8 * LATE_SECTORS, &data), OK);
    }
    assert!(!used(&pod, before), "it was given to another request");
    // The replica answers late; then it may be used again.
    pod.controls[0].hold(false);
    pod.disk.replicas[0].away = false;
    pod.apply_disk();
    pod.in_line();
    let before = pod.controls[1].log().len();
    for round in 0..40_u64 {
        let data = pattern(200 + round, LATE_BYTES as usize);
        assert_eq!(driver.write_sectors(round % 8 * LATE_SECTORS, &data), OK);
    }
    assert!(used(&pod, before), "it was never given back");
}

/// A channel that begins anew while both its ends live is no sign that the device has ended what it had.
#[test]
fn a_buffer_that_a_living_replica_may_still_fill_is_kept_aside_when_its_channel_begins_anew() {
    let (mut pod, mut driver, late) = a_read_with_one_that_is_lost(20);
    let before = pod.controls[1].log().len();
    pod.renew_lease();
    pod.renew_channel_at_frontend(0);
    pod.renew_channel_at_backend(0);
    // More than the area holds. What is copied to a buffer that the device fills is not what is written.
    for round in 0..40_u64 {
        let data = pattern(100 + round, LATE_BYTES as usize);
        assert_eq!(driver.write_sectors(round % 8 * LATE_SECTORS, &data), OK);
    }
    assert!(!is_given(&late, &pod.controls[1].log()[before..]), "it was given to another request");
    pod.controls[0].hold(false);
    pod.disk.replicas[0].away = false;
    pod.apply_disk();
    pod.in_line();
}

#[test]
fn a_replica_that_hangs_is_dropped_and_comes_back_when_it_answers() {
    let mut pod = MirrorPod::started(14, 2);
    pod.frontend.as_mut().unwrap().set_replica_timeout(Some(Duration::from_secs(1)));
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.controls[1].hold(true);
    driver.write(driver.place(0).data, &pattern(2, 4096));
    let head = driver.offer(0, 0, T_OUT, 8, 4096);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "it may still answer");
    pod.until(|pod| pod.dropped == 1);
    assert!(pod.disk.replicas[0].in_sync && !pod.disk.replicas[1].in_sync);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
    // The guest goes on, over what the other one may still be writing.
    for round in 0..20 {
        assert_eq!(driver.write_sectors(8, &pattern(10 + round, 4096)), OK);
    }
    assert_eq!(pod.synced, 0, "what it has could undo what is copied now");
    pod.controls[1].hold(false);
    pod.until(|pod| pod.synced == 1);
    pod.in_line();
    assert_eq!(pod.controls[1].bytes(VOLUME_START + 4096, 4096), pattern(29, 4096));
    // While it is brought in line it may hang too, and keeps nobody waiting.
    pod.kill(1, || false);
    pod.notice(1);
    assert_eq!(driver.write_sectors(600, &pattern(3, 4096)), OK);
    pod.controls[1].hold(true);
    pod.revive(1);
    eventually(|| pod.controls[1].waiting() > 0);
    let head = {
        driver.write(driver.place(0).data, &pattern(4, 4096));
        driver.offer(0, 0, T_OUT, 600, 4096)
    };
    let mut answer = None;
    pod.until(|_| {
        answer = answer.or_else(|| driver.guest.wait_used(0, Duration::ZERO));
        answer.is_some()
    });
    assert_eq!(answer.map(|used| used.head), Some(head));
    pod.controls[1].hold(false);
    pod.in_line();
    assert_eq!(pod.controls[1].bytes(VOLUME_START + 600 * SECTOR, 4096), pattern(4, 4096));
}

#[test]
fn the_last_replica_is_waited_for() {
    let mut pod = MirrorPod::started(15, 2);
    pod.frontend.as_mut().unwrap().set_replica_timeout(Some(Duration::from_millis(200)));
    let mut driver = pod.driver();
    pod.in_line();
    pod.kill(1, || false);
    pod.notice(1);
    pod.controls[0].hold(true);
    driver.write(driver.place(0).data, &pattern(2, 4096));
    let head = driver.offer(0, 0, T_OUT, 8, 4096);
    for _ in 0..100 {
        pod.control();
        assert!(driver.guest.wait_used(0, Duration::from_millis(5)).is_none());
    }
    assert!(pod.disk.replicas[0].in_sync && pod.dropped == 1);
    pod.controls[0].hold(false);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
}

/// The checker can fail: two registers in place of one do not pass it.
#[test]
fn a_stale_replica_taken_for_good_is_noticed() {
    let mut pod = MirrorPod::started(10, 2);
    let mut history = History::new(pod.driver(), 10);
    pod.in_line();
    pod.kill(1, || false);
    pod.notice(1);
    for _ in 0..40 {
        history.work(8);
        history.collect();
    }
    settle(&mut pod, &mut history);
    // A controller that forgot what it had confirmed.
    pod.revive(1);
    let stale = pod.controls[1].bytes(VOLUME_START, MIRROR_BYTES as usize);
    pod.controls[0].set_bytes(VOLUME_START, &stale);
    history.read_all();
    let seen = panic::catch_unwind(AssertUnwindSafe(|| history.check()));
    assert!(matches!(seen, Ok(Err(_))), "{seen:?}");
}
