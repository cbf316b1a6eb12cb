//! Striped disks: a volume that lies on several devices, unit by unit.

use std::thread;
use std::time::{Duration, Instant};

use cxl_pool::simulated::{check_seeds, seeds};
use vhost_blk_cxl::message::Operation;

use crate::TARGET;
use crate::pod::history::History;
use crate::pod::mirror::{MIRROR_BYTES, MirrorPod};
use crate::pod::*;

const UNIT: u64 = 64 << 10;

#[test]
fn every_byte_is_where_it_belongs() {
    for (seed, hosts) in [(31, 2), (32, 4)] {
        let mut pod = MirrorPod::striped(seed, hosts, UNIT);
        let mut driver = pod.driver();
        let mut model = vec![0; MIRROR_BYTES as usize];
        let mut random = seed;
        let mut below = |limit: u64| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (random >> 33) % limit
        };
        for round in 0..60 {
            let sectors = 1 + below(if round % 4 == 0 { 2000 } else { 300 });
            let sector = below(MIRROR_BYTES / SECTOR - sectors + 1);
            let (from, to) = ((sector * SECTOR) as usize, ((sector + sectors) * SECTOR) as usize);
            match below(8) {
                0 => {
                    assert_eq!(driver.range_request(T_WRITE_ZEROES, sector, sectors as u32, 0), OK);
                    model[from..to].fill(0);
                }
                1 => {
                    assert_eq!(driver.range_request(T_DISCARD, sector, sectors as u32, 0), OK);
                    model[from..to].fill(0);
                }
                2..=4 => assert_eq!(driver.read_sectors(sector, (to - from) as u32), model[from..to]),
                _ => {
                    let data = pattern(round, to - from);
                    assert_eq!(driver.write_sectors(sector, &data), OK);
                    model[from..to].copy_from_slice(&data);
                }
            }
        }
        assert!(pod.striped_bytes() == model);
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
        for control in &pod.controls {
            assert_eq!(control.log().last().unwrap().operation, Operation::Flush, "it goes to all of them");
        }
        // Beyond the end.
        assert_eq!(driver.request(T_IN, MIRROR_BYTES / SECTOR - 1, 1024).0, IOERR);
        pod.control();
    }
}

/// Kills and revives backends under a guest that waits for them.
fn run(seed: u64) -> Result<u64, String> {
    let hosts = 2 + (seed % 2) as u16;
    let mut pod = MirrorPod::striped(seed, hosts, UNIT);
    let mut history = History::new(pod.driver(), seed);
    let mut killed = 0;
    for control in &pod.controls {
        control.finish_backwards();
    }
    for _ in 0..30 {
        let requests = 1 + history.below(8);
        history.work(requests);
        let (slow, held) = (history.below(hosts.into()) as usize, history.below(2) == 0);
        pod.controls[slow].hold(held);
        thread::sleep(Duration::from_micros(history.below(300)));
        history.collect();
        if history.below(5) == 0 {
            let victim = history.below(hosts.into()) as usize;
            let finishes = history.below(2) == 0;
            pod.kill(victim, || finishes);
            history.work(3);
            pod.start_backend(victim);
            killed += 1;
        }
    }
    pod.controls.iter().for_each(|control| control.hold(false));
    let began = Instant::now();
    while !history.is_idle() {
        assert!(began.elapsed() < PATIENCE, "requests are never answered");
        history.collect();
        thread::yield_now();
    }
    history.read_all();
    history.check()?;
    Ok(killed)
}

#[test]
fn one_order_explains_what_the_guest_sees_while_backends_die() {
    const COUNT: u64 = 8;
    let mut killed = 0;
    check_seeds(TARGET, COUNT, |seed| {
        killed += run(seed + 1)?;
        Ok(())
    });
    assert!(killed > 0 || seeds(COUNT).count() == 1, "nothing was tried");
}

#[test]
fn a_column_that_fails_or_forgets_is_not_covered_up() {
    let pod = MirrorPod::striped(33, 2, UNIT);
    let mut driver = pod.driver();
    let both = pattern(1, 2 * UNIT as usize);
    assert_eq!(driver.write_sectors(0, &both), OK);
    pod.controls[1].fail(true);
    assert_eq!(driver.request(T_IN, 0, 2 * UNIT as u32).0, IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.read_sectors(0, UNIT as u32), both[..UNIT as usize], "it lies on the other one");
    pod.controls[1].fail(false);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    assert_eq!(driver.write_sectors(0, &both), OK);
    pod.controls[0].lose();
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
}

#[test]
fn no_flush_is_done_that_was_made_before_the_guest_could_know_of_a_loss() {
    let pod = MirrorPod::striped(35, 2, UNIT);
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(0, &pattern(1, 2 * UNIT as usize)), OK);
    pod.controls[0].lose();
    pod.controls[1].hold(true);
    // One column has told of the loss, the guest hears of it when the other one has flushed.
    driver.offer(0, 1, T_FLUSH, 0, 0);
    eventually(|| pod.controls[1].waiting() == 1);
    thread::sleep(QUIET);
    driver.offer(0, 2, T_FLUSH, 0, 0);
    eventually(|| pod.controls[1].waiting() == 2);
    thread::sleep(QUIET);
    pod.controls[1].hold(false);
    for _ in 0..2 {
        assert!(driver.guest.wait_used(0, PATIENCE).is_some(), "an answer");
    }
    assert_eq!((driver.status(1), driver.status(2)), (IOERR, IOERR));
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
}

#[test]
fn a_read_that_is_given_up_while_its_channel_begins_anew_spoils_no_later_write() {
    let mut pod = MirrorPod::striped(36, 2, UNIT);
    let mut driver = pod.driver();
    pod.controls[1].hold(true);
    let read = driver.offer(0, 0, T_IN, UNIT / SECTOR, UNIT as u32);
    eventually(|| pod.controls[1].waiting() == 1);
    pod.renew_channel_at_frontend(1);
    pod.disk.failed = true;
    pod.apply_disk();
    assert_eq!(driver.answer(0, 0, read), (IOERR, 1));
    pod.disk.failed = false;
    pod.apply_disk();
    // The other column is there. Had the write the buffer that the read had, the device would now fill it.
    pod.controls[0].hold(true);
    let data = pattern(3, UNIT as usize);
    driver.write(driver.place(1).data, &data);
    let write = driver.offer(1, 1, T_OUT, 0, UNIT as u32);
    thread::sleep(QUIET);
    pod.controls[1].hold(false);
    thread::sleep(QUIET);
    pod.controls[0].hold(false);
    pod.renew_channel_at_backend(1);
    assert_eq!(driver.answer(1, 1, write), (OK, 1));
    assert_eq!(driver.read_sectors(0, UNIT as u32), data);
    let reads = pod.controls[1].log().iter().filter(|it| it.operation == Operation::Read).count();
    assert_eq!(reads, 1, "nobody waits for it");
}

#[test]
fn a_disk_that_is_given_up_answers_and_comes_back() {
    let mut pod = MirrorPod::striped(34, 2, UNIT);
    let mut driver = pod.driver();
    let both = pattern(1, 2 * UNIT as usize);
    pod.controls[1].hold(true);
    driver.write(driver.place(0).data, &both);
    let head = driver.offer(0, 0, T_OUT, 0, 2 * UNIT as u32);
    eventually(|| pod.controls[1].waiting() == 1);
    pod.kill(1, || true);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "it may come back");
    pod.disk.failed = true;
    pod.apply_disk();
    assert_eq!(driver.answer(0, 0, head), (IOERR, 1));
    assert_eq!(driver.request(T_IN, 0, 4096).0, IOERR);
    pod.controls[1].hold(false);
    pod.start_backend(1);
    pod.disk.failed = false;
    pod.apply_disk();
    let newer = pattern(2, 2 * UNIT as usize);
    assert_eq!(driver.write_sectors(0, &newer), OK);
    assert_eq!(driver.read_sectors(0, 2 * UNIT as u32), newer);
    let written = pod.controls[1].log().iter().filter(|it| it.operation == Operation::Write).count();
    assert_eq!(written, 2, "what the guest was told has failed is not done again");
}
