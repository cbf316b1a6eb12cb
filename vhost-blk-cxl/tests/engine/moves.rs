//! Volumes that move from one device to another under a guest that notices nothing.

use cxl_pool::simulated::check_seeds;

use crate::TARGET;
use crate::pod::history::History;
use crate::pod::mirror::{MIRROR_BYTES, MirrorPod};
use crate::pod::*;

/// Moves a volume about while its guest writes and reads, with devices that are slow and hosts that die at moments that the
/// seed chooses. Returns how often it arrived.
fn run(seed: u64) -> Result<u64, String> {
    const HOSTS: usize = 3;
    let mut pod = MirrorPod::alone(seed, HOSTS as u16);
    let mut history = History::new(pod.driver(), seed);
    let mut arrived = 0;
    for control in &pod.controls {
        control.finish_backwards();
    }
    for _ in 0..4 {
        history.work(8);
        let from = pod.places()[0];
        let to = (from + 1 + history.below(HOSTS as u64 - 1) as usize) % HOSTS;
        pod.add(to, Some(from));
        let interrupted = history.below(3);
        for turn in 0..6 {
            pod.stir(&mut history, 300);
            if turn == 3 && pod.present[to] && interrupted == 0 {
                // Either host dies in the middle, and comes back.
                let victim = if history.below(2) == 0 { from } else { to };
                if pod.backends[victim].is_some() {
                    let finishes = history.below(2) == 0;
                    pod.kill(victim, || finishes);
                    if pod.present[victim] {
                        pod.notice(victim);
                    }
                    history.work(4);
                    pod.revive(victim);
                }
            }
        }
        pod.controls.iter().for_each(|control| control.hold(false));
        pod.work_until(&mut history, "it never arrived", |pod, _| pod.places() == [to]);
        arrived += 1;
        history.work(8);
    }
    pod.until_idle(&mut history);
    history.read_all();
    history.check()?;
    Ok(arrived)
}

#[test]
fn one_order_explains_what_the_guest_sees_while_its_volume_moves() {
    check_seeds(TARGET, 8, |seed| {
        assert_eq!(run(seed + 1)?, 4);
        Ok(())
    });
}

#[test]
fn a_volume_moves_and_nothing_of_it_is_used_where_it_was() {
    let mut pod = MirrorPod::alone(21, 2);
    let mut driver = pod.driver();
    let places = [0, 600, 1300, MIRROR_BYTES / SECTOR - 8];
    for (seed, sector) in (1..).zip(places) {
        assert_eq!(driver.write_sectors(sector, &pattern(seed, 4096)), OK);
    }
    pod.add(1, Some(0));
    pod.until(|pod| pod.places() == [1]);
    for (seed, sector) in (1..).zip(places) {
        assert_eq!(driver.read_sectors(sector, 4096), pattern(seed, 4096));
        assert_eq!(pod.controls[1].bytes(VOLUME_START + sector * SECTOR, 4096), pattern(seed, 4096));
    }
    // It is an ordinary disk again: each request goes to one device, without a copy.
    eventually(|| pod.dirty_bytes() == 0);
    let before = pod.controls[0].log().len();
    for round in 0..20 {
        assert_eq!(driver.write_sectors(8 * round, &pattern(round, 4096)), OK);
        assert_eq!(driver.read_sectors(8 * round, 4096), pattern(round, 4096));
    }
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    assert_eq!(pod.controls[0].log().len(), before);
    // And back.
    pod.add(0, Some(1));
    pod.until(|pod| pod.places() == [0]);
    assert_eq!(driver.read_sectors(8 * 19, 4096), pattern(19, 4096));
}

#[test]
fn what_was_lost_without_a_flush_is_told_also_after_a_move() {
    let mut pod = MirrorPod::alone(22, 2);
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    // Its power fails between two requests, and what is copied then is not what was acknowledged.
    pod.controls[0].lose();
    pod.add(1, Some(0));
    pod.until(|pod| pod.places() == [1]);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
}

#[test]
fn requests_wait_for_the_device_while_a_move_begins() {
    let mut pod = MirrorPod::alone(23, 2);
    let mut driver = pod.driver();
    pod.controls[0].hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let write = driver.offer(0, 0, T_OUT, 8, 4096);
    eventually(|| pod.controls[0].waiting() == 1);
    pod.add(1, Some(0));
    let read = driver.offer(1, 1, T_IN, 8, 4096);
    assert!(driver.guest.wait_used(1, QUIET).is_none());
    // The backend dies meanwhile: what is in flight is done by the next one, and then the move begins.
    pod.kill(0, || false);
    pod.controls[0].hold(false);
    pod.revive(0);
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
    assert_eq!(driver.answer(1, 1, read), (OK, 4097));
    pod.until(|pod| pod.places() == [1]);
    assert_eq!(driver.read_sectors(8, 4096), pattern(1, 4096));
}

#[test]
fn a_disk_gets_a_mirror_and_loses_it_again() {
    let mut pod = MirrorPod::alone(24, 3);
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.add(1, None);
    pod.until(|pod| pod.synced == 1);
    pod.add(2, None);
    pod.until(|pod| pod.synced == 2);
    for index in 0..3 {
        assert_eq!(pod.controls[index].bytes(VOLUME_START + 4096, 4096), pattern(1, 4096));
    }
    for (index, left) in [(1, vec![0, 2]), (0, vec![2])] {
        pod.disk.replicas[index].leaving = true;
        pod.disk.epoch += 1;
        pod.apply_disk();
        pod.until(|pod| pod.places() == left);
        assert_eq!(driver.read_sectors(8, 4096), pattern(1, 4096));
    }
    assert_eq!(driver.write_sectors(8, &pattern(2, 4096)), OK);
    assert_eq!(pod.controls[2].bytes(VOLUME_START + 4096, 4096), pattern(2, 4096));
}
