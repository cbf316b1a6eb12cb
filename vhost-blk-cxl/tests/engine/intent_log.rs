//! The log of what is being written to a mirrored volume: whoever serves it next compares that, and nothing else.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use cxl_pool::simulated::{check_seeds, seeds};
use pod_protocol::ids::VolumeId;
use pod_protocol::objects::Qos;
use vhost_blk_cxl::intent_log::IntentLog;
use vhost_blk_cxl::message::Operation;

use crate::TARGET;
use crate::pod::history::History;
use crate::pod::mirror::{MIRROR_BYTES, MirrorPod};
use crate::pod::*;

const REGION_BYTES: u64 = 256 << 10;
const REGION_SECTORS: u64 = REGION_BYTES / SECTOR;
/// So that marks go while a test looks.
const SWEEPS: Duration = Duration::from_millis(10);

/// A pod of two whose replicas are alike, and whose logs say so.
fn unmarked(seed: u64) -> (MirrorPod, Driver) {
    let mut pod = MirrorPod::logging(seed, 2);
    pod.frontend.as_mut().unwrap().set_sweep_interval(SWEEPS);
    let driver = pod.driver();
    pod.in_line();
    pod.until(|pod| pod.is_unmarked());
    (pod, driver)
}

/// The regions of the volume that commands of a kind touched, on a replica's device.
fn touched(pod: &MirrorPod, index: usize, from: usize, operation: Operation) -> BTreeSet<u64> {
    pod.controls[index].log()[from..]
        .iter()
        .filter(|command| command.operation == operation && command.offset_bytes >= VOLUME_START)
        .map(|command| (command.offset_bytes - VOLUME_START) / REGION_BYTES)
        .collect()
}

fn writes(pod: &MirrorPod, index: usize, from: usize) -> BTreeSet<u64> {
    &touched(pod, index, from, Operation::Write) | &touched(pod, index, from, Operation::WriteZeroes)
}

fn marked(log: Option<IntentLog>) -> Vec<u64> {
    log.expect("a log").marked.iter().collect()
}

#[test]
fn what_a_dead_frontend_was_writing_is_compared_and_nothing_else() {
    let (mut pod, mut driver) = unmarked(1);
    assert_eq!(driver.write_sectors(3 * REGION_SECTORS, &pattern(1, 4096)), OK);
    assert_eq!([0, 1].map(|index| marked(pod.intent_log(index))), [[3], [3]]);
    drop(driver);
    // A write that had reached one replica when the frontend died.
    let at = VOLUME_START + 3 * REGION_BYTES;
    pod.controls[0].set_bytes(at, &pattern(2, 4096));
    let before = [0, 1].map(|index| pod.controls[index].log().len());
    pod.restart_frontend();
    let mut driver = pod.driver();
    assert_eq!(driver.read_sectors(3 * REGION_SECTORS, 4096), pattern(2, 4096));
    assert_eq!(pod.controls[1].bytes(at, 4096), pattern(2, 4096), "what was read must stay");
    pod.in_line();
    let read = touched(&pod, 0, before[0], Operation::Read);
    let written = [0, 1].map(|index| writes(&pod, index, before[index]));
    assert_eq!((read, written), ([3].into(), [[].into(), [3].into()]));
}

#[test]
fn a_log_is_not_believed_of_what_a_frontend_wrote_that_marks_nothing() {
    let (mut pod, mut driver) = unmarked(15);
    assert_eq!(driver.write_sectors(REGION_SECTORS, &pattern(1, 4096)), OK);
    pod.until(|pod| pod.is_unmarked());
    drop(driver);
    // One that knows of no mirror, let alone of a log, has the first replica for a while.
    pod.present[1] = false;
    pod.restart_frontend();
    let mut driver = pod.driver();
    assert_eq!(driver.read_sectors(REGION_SECTORS, 4096), pattern(1, 4096));
    assert!(pod.intent_log(0).is_some(), "reads do it no harm");
    assert_eq!(driver.write_sectors(3 * REGION_SECTORS, &pattern(2, 4096)), OK);
    assert_eq!(pod.intent_log(0), None, "what was written is not in it");
    assert_eq!(driver.write_sectors(4 * REGION_SECTORS, &pattern(3, 4096)), OK);
    drop(driver);
    let zeroes = |pod: &MirrorPod| {
        let commands = pod.controls[0].log();
        commands.iter().filter(|command| command.operation == Operation::WriteZeroes).count()
    };
    assert_eq!(zeroes(&pod), 1, "once");
    pod.present[1] = true;
    pod.restart_frontend();
    let mut driver = pod.driver();
    assert_eq!(driver.read_sectors(3 * REGION_SECTORS, 4096), pattern(2, 4096));
    pod.in_line();
    for (region, seed) in [(1, 1), (3, 2), (4, 3)] {
        assert_eq!(pod.controls[1].bytes(VOLUME_START + region * REGION_BYTES, 4096), pattern(seed, 4096));
    }
    // And whoever marks is believed again.
    pod.frontend.as_mut().unwrap().set_sweep_interval(SWEEPS);
    pod.until(|pod| pod.is_unmarked());
    assert_eq!(driver.write_sectors(5 * REGION_SECTORS, &pattern(4, 4096)), OK);
    assert_eq!([0, 1].map(|index| marked(pod.intent_log(index))), [[5], [5]]);
    assert_eq!(zeroes(&pod), 1);
}

#[test]
fn what_is_not_marked_is_not_written_beside_a_log_that_cannot_be_cleared() {
    let (mut pod, driver) = unmarked(16);
    drop(driver);
    pod.present[1] = false;
    pod.restart_frontend();
    let mut driver = pod.driver();
    pod.controls[0].fail(true);
    assert_eq!(driver.write_sectors(0, &pattern(1, 4096)), IOERR);
    pod.controls[0].fail(false);
    assert!(pod.intent_log(0).is_some());
    let before = pod.controls[0].log().len();
    assert_eq!(driver.write_sectors(0, &pattern(2, 4096)), OK);
    let commands: Vec<_> = pod.controls[0].log()[before..].iter().map(|it| it.operation).collect();
    assert_eq!(commands, [Operation::WriteZeroes, Operation::Write]);
    assert_eq!(pod.intent_log(0), None);
}

#[test]
fn a_stale_replica_gets_what_it_missed_although_the_frontend_died() {
    let (mut pod, mut driver) = unmarked(2);
    pod.kill(1, || false);
    pod.notice(1);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    assert_eq!(driver.write_sectors(5 * REGION_SECTORS - 4, &pattern(2, 4096)), OK);
    // However long it is away: what it misses stays marked.
    let began = Instant::now();
    while began.elapsed() < 20 * SWEEPS {
        pod.control();
        thread::sleep(Duration::from_millis(1));
    }
    drop(driver);
    pod.restart_frontend();
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(7 * REGION_SECTORS, &pattern(3, 4096)), OK);
    let before = pod.controls[1].log().len();
    pod.revive(1);
    pod.in_line();
    assert_eq!(writes(&pod, 1, before), [0, 4, 5, 7].into());
    // By now it has a log of its own that may be relied on.
    pod.frontend.as_mut().unwrap().set_sweep_interval(SWEEPS);
    pod.until(|pod| pod.is_unmarked());
    assert_eq!(driver.write_sectors(6 * REGION_SECTORS, &pattern(4, 4096)), OK);
    pod.kill(0, || false);
    pod.notice(0);
    assert_eq!(driver.write_sectors(2 * REGION_SECTORS, &pattern(5, 4096)), OK);
    drop(driver);
    pod.restart_frontend();
    let mut driver = pod.driver();
    assert_eq!(driver.read_sectors(2 * REGION_SECTORS, 4096), pattern(5, 4096));
    let before = pod.controls[0].log().len();
    pod.revive(0);
    pod.in_line();
    assert_eq!(writes(&pod, 0, before), [2, 6].into());
}

#[test]
fn a_write_begins_when_every_replica_has_its_mark_on_the_medium() {
    let (mut pod, mut driver) = unmarked(3);
    let before = [0, 1].map(|index| pod.controls[index].log().len());
    pod.controls[1].hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let head = driver.offer(0, 0, T_OUT, 4 * REGION_SECTORS, 4096);
    eventually(|| pod.controls[1].waiting() == 1);
    thread::sleep(QUIET);
    for index in [0, 1] {
        let log = &pod.controls[index].log()[before[index]..];
        let marks = |it: &&vhost_blk_cxl::ssd::Command| it.operation == Operation::Write;
        let written: Vec<_> = log.iter().filter(marks).collect();
        assert_eq!(written.len(), 1, "{log:?}");
        assert!(written[0].force_unit_access && written[0].offset_bytes < VOLUME_START, "{log:?}");
    }
    pod.controls[1].hold(false);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
    // Once marked, it stays marked for a while.
    pod.frontend.as_mut().unwrap().set_sweep_interval(PATIENCE);
    assert_eq!(driver.write_sectors(4 * REGION_SECTORS + 8, &pattern(2, 4096)), OK);
    let before = pod.controls[0].log().len();
    assert_eq!(driver.write_sectors(4 * REGION_SECTORS + 16, &pattern(3, 4096)), OK);
    assert_eq!(pod.controls[0].log().len(), before + 1);
    // Until nobody has written there for some time, and all was flushed.
    pod.frontend.as_mut().unwrap().set_sweep_interval(SWEEPS);
    pod.until(|pod| pod.is_unmarked());
    let log = &pod.controls[1].log()[before..];
    let flush = log.iter().position(|it| it.operation == Operation::Flush).expect("a flush");
    assert!(log[flush..].iter().any(|it| it.operation == Operation::Write && it.offset_bytes < VOLUME_START));
}

#[test]
fn what_is_noted_does_not_count_against_the_limits_of_the_volume() {
    let (mut pod, mut driver) = unmarked(8);
    pod.frontend.as_mut().unwrap().set_sweep_interval(PATIENCE);
    // One request a second, which is the guest's.
    let qos = Qos { iops: Some(1), burst_ms: 0, ..Qos::default() };
    for index in [0, 1] {
        pod.limit(index, qos);
    }
    assert_eq!(driver.write_sectors(4 * REGION_SECTORS, &pattern(1, 4096)), OK);
    assert_eq!([0, 1].map(|index| marked(pod.intent_log(index))), [[4], [4]]);
    let throttled = [0, 1].map(|index| pod.throttled(index));
    assert_eq!(throttled, [0, 0]);
}

#[test]
fn a_replica_that_cannot_be_marked_is_dropped_and_the_last_one_fails() {
    let (mut pod, mut driver) = unmarked(4);
    pod.controls[1].fail(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let head = driver.offer(0, 0, T_OUT, 8, 4096);
    pod.until(|pod| pod.dropped == 1);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
    assert!(pod.disk.replicas[0].in_sync && !pod.disk.replicas[1].in_sync);
    for region in 1..MIRROR_BYTES / REGION_BYTES {
        pod.controls[0].fail(true);
        assert_eq!(driver.write_sectors(region * REGION_SECTORS, &pattern(2, 4096)), IOERR);
        pod.controls[0].fail(false);
        assert_eq!(driver.write_sectors(region * REGION_SECTORS, &pattern(3, 4096)), OK);
    }
    pod.controls[1].fail(false);
    pod.in_line();
    assert_eq!(driver.read_sectors(REGION_SECTORS, 4096), pattern(3, 4096));
}

#[test]
fn what_cannot_be_read_is_no_log() {
    let (mut pod, mut driver) = unmarked(5);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    drop(driver);
    pod.tear_log(0);
    let before = pod.controls[0].log().len();
    pod.restart_frontend();
    pod.in_line();
    let all: BTreeSet<u64> = (0..MIRROR_BYTES / REGION_BYTES).collect();
    assert_eq!(touched(&pod, 0, before, Operation::Read), all);
    assert_eq!(pod.intent_log(0).map(|log| log.covered), Some(vec![0, 1]), "there is a new one");
}

#[test]
fn what_another_volume_left_in_the_slot_is_no_log() {
    for bytes in [4096, 1024] {
        let (mut pod, mut driver) = unmarked(7);
        assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
        drop(driver);
        // A write that had reached one replica when the frontend died.
        pod.controls[0].set_bytes(VOLUME_START + 4096, &pattern(2, 4096));
        pod.leave_in_log(0, VolumeId::new(9), bytes);
        pod.restart_frontend();
        pod.in_line();
        let (at, expected) = (VOLUME_START + 4096, pattern(2, 4096));
        assert_eq!([0, 1].map(|index| pod.controls[index].bytes(at, 4096)), [&expected[..]; 2]);
        assert_eq!(pod.intent_log(0).map(|log| log.covered), Some(vec![0, 1]), "there is a new one");
    }
}

/// What the tests above rely on: a log that forgets what was being written is noticed.
#[test]
fn a_log_that_forgets_is_noticed() {
    let (mut pod, mut driver) = unmarked(6);
    pod.kill(1, || false);
    pod.notice(1);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    drop(driver);
    pod.forget_intents(0);
    pod.restart_frontend();
    pod.revive(1);
    pod.until_in_line();
    assert!(!pod.are_alike());
}

/// Kills and revives replicas and the frontend at moments that the seed chooses, while marks come and go. Returns how often
/// a frontend went on with a log that told of some of the volume only.
fn run(seed: u64) -> Result<u64, String> {
    let replicas = 2 + (seed % 2) as u16;
    let count = usize::from(replicas);
    let mut pod = MirrorPod::logging(seed, replicas);
    pod.frontend.as_mut().unwrap().set_sweep_interval(Duration::from_millis(1));
    pod.until_in_line();
    pod.until(|pod| pod.is_unmarked());
    let mut history = History::new(pod.driver(), seed);
    pod.controls.iter().for_each(|control| control.finish_backwards());
    let mut known = 0;
    for _ in 0..8 {
        for _ in 0..6 {
            let requests = 1 + history.below(6);
            history.work(requests);
            let (slow, held) = (history.below(count as u64) as usize, history.below(3) == 0);
            pod.controls[slow].hold(held);
            thread::sleep(Duration::from_micros(history.below(500)));
            history.collect();
            pod.control();
        }
        let there: Vec<usize> = (0..count).filter(|&index| pod.backends[index].is_some()).collect();
        let victim = history.below(count as u64) as usize;
        let good = |index: &usize| *index != victim && pod.disk.replicas[*index].in_sync;
        match history.below(5) {
            0..=1 if there.contains(&victim) && there.iter().any(good) => {
                let finishes = history.below(2) == 0;
                pod.kill(victim, || finishes);
                pod.notice(victim);
            }
            2 => {
                if let Some(gone) = (0..count).find(|index| !there.contains(index)) {
                    pod.revive(gone);
                }
            }
            3..=4 => {
                // The guest's requests in flight are made again.
                pod.controls.iter().for_each(|control| control.hold(false));
                history.driver.guest.disconnect();
                let source = pod.disk.replicas.iter().position(|replica| replica.in_sync).unwrap();
                let units = MIRROR_BYTES / REGION_BYTES;
                known += u64::from(
                    pod.intent_log(source).is_some_and(|log| (log.marked.iter().count() as u64) < units),
                );
                pod.restart_frontend();
                pod.frontend.as_mut().unwrap().set_sweep_interval(Duration::from_millis(1));
                let socket = pod.run.sockets().join(&pod.disk.socket);
                history.driver.guest.connect(&socket, ALL_FEATURES);
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
    pod.until_idle(&mut history);
    pod.until_in_line();
    if !pod.are_alike() {
        return Err("the replicas hold different data".to_owned());
    }
    history.read_all();
    history.check()?;
    Ok(known)
}

#[test]
fn one_order_explains_what_the_guest_sees_while_frontends_and_replicas_die() {
    const COUNT: u64 = 16;
    let mut known = 0;
    check_seeds(TARGET, COUNT, |seed| {
        known += run(seed + 1)?;
        Ok(())
    });
    assert!(known > 0 || seeds(COUNT).count() == 1, "no frontend could rely on a log");
}

/// A guest that writes and flushes at random, and loses its power with everything else. An error if replicas differ when they
/// have been brought in line, or if something is lost that was flushed.
fn power_failures(seed: u64, forgets: bool) -> Result<(), String> {
    const TURNS: u64 = 3;
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |limit: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) % limit
    };
    let mut pod = MirrorPod::on_volatile_drives(seed, 2);
    let places: Vec<u64> = (0..8).map(|region| region * REGION_SECTORS + below(400)).collect();
    // Of each place, the version that was flushed, and the last one that was begun.
    let mut kept = vec![(0_u64, 0_u64); places.len()];
    let mut version = 0;
    for turn in 0..=TURNS {
        pod.frontend.as_mut().unwrap().set_sweep_interval(Duration::from_millis(1));
        let mut driver = pod.driver();
        for (sector, (flushed, begun)) in places.iter().zip(&mut kept) {
            let read = driver.read_sectors(*sector, 4096);
            let found = (*flushed..=*begun).find(|&version| read == content(version));
            let torn = || {
                read.chunks(512).enumerate().all(|(index, part)| {
                    (*flushed..=*begun).any(|version| content(version)[index * 512..][..512] == *part)
                })
            };
            if found.is_none() && !torn() {
                return Err(format!(
                    "turn {turn}: sector {sector} lost version {flushed}, which was flushed"
                ));
            }
        }
        pod.until_in_line();
        if driver.request(T_FLUSH, 0, 0).0 != OK {
            return Err("a flush failed".to_owned());
        }
        if !pod.are_alike() {
            return Err(format!("turn {turn}: the replicas hold different data"));
        }
        if turn == TURNS {
            break;
        }
        pod.until(|pod| pod.is_unmarked());
        // All places hold a version that is known, and what they hold is on the medium.
        for (sector, place) in places.iter().zip(&mut kept) {
            version += 1;
            if driver.write_sectors(*sector, &content(version)) != OK {
                return Err("a write failed".to_owned());
            }
            *place = (0, version);
        }
        if driver.request(T_FLUSH, 0, 0).0 != OK {
            return Err("a flush failed".to_owned());
        }
        for place in &mut kept {
            place.0 = place.1;
        }
        for _ in 0..20 + below(40) {
            let place = below(places.len() as u64) as usize;
            version += 1;
            kept[place].1 = version;
            if driver.write_sectors(places[place], &content(version)) != OK {
                return Err("a write failed".to_owned());
            }
            if below(12) == 0 {
                if driver.request(T_FLUSH, 0, 0).0 != OK {
                    return Err("a flush failed".to_owned());
                }
                for place in &mut kept {
                    place.0 = place.1;
                }
            }
        }
        // Some are under way when it happens.
        for index in 0..below(8) {
            let place = index as usize;
            version += 1;
            kept[place].1 = version;
            driver.write(driver.place(index + 1).data, &content(version));
            driver.offer(0, index + 1, T_OUT, places[place], 4096);
        }
        thread::sleep(Duration::from_micros(below(400)));
        drop(driver);
        pod.cut_power();
        if forgets {
            (0..2).for_each(|index| pod.forget_intents(index));
        }
        pod.restore_power();
    }
    Ok(())
}

fn content(version: u64) -> Vec<u8> {
    if version == 0 { vec![0; 4096] } else { pattern(version, 4096) }
}

#[test]
fn replicas_are_alike_after_everything_lost_its_power_and_what_was_flushed_is_there() {
    check_seeds(TARGET, 30, |seed| power_failures(seed, false));
}

#[test]
fn replicas_differ_after_a_power_failure_if_the_log_forgets() {
    let violations = (0..8).filter(|&seed| power_failures(seed, true).is_err()).count();
    assert!(violations >= 6, "{violations} of 8 runs showed it");
}
