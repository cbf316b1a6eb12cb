//! Guests with a mirrored disk that move from host to host: what only the frontend knew that they left does not matter.

use std::thread;

use crate::pod::history::History;
use crate::pod::mirror::MirrorPod;
use crate::pod::*;

fn rounds() -> u64 {
    std::env::var("WADI_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1).max(1)
}

/// The guest stops here and goes on there; the VMM there starts the queues before the lease is handed over, or after. In between, when
/// what it wrote is flushed, something happens.
fn move_guest(pod: &mut MirrorPod, driver: &mut Driver, eager: bool, between: impl FnOnce(&MirrorPod)) {
    // All that it asked for was answered.
    for index in 0..2 {
        driver.guest.stop_ring(index);
    }
    between(pod);
    driver.guest.disconnect();
    let socket = pod.incoming_socket();
    driver.guest.negotiate(&socket, ALL_FEATURES);
    if eager {
        driver.guest.start_rings();
    }
    pod.hand_over();
    if !eager {
        driver.guest.start_rings();
    }
}

/// Moves a guest about, with replicas that die and return and devices that are slow at moments that the seed chooses.
/// Returns how often a replica was dropped, and came back.
fn run(seed: u64) -> (u64, u64) {
    let replicas = 2 + (seed % 2) as u16;
    let count = usize::from(replicas);
    let mut pod = MirrorPod::started(seed, replicas);
    let mut history = History::new(pod.driver(), seed);
    for control in &pod.controls {
        control.finish_backwards();
    }
    for _ in 0..5 {
        for turn in 0..6 {
            pod.stir(&mut history, 300);
            if turn == 2 {
                pod.controls.iter().for_each(|control| control.hold(false));
                pod.scrub_left();
                pod.prepare_move();
            }
            if history.below(4) == 0 {
                let victim = history.below(count as u64) as usize;
                let good = |index: &usize| {
                    *index != victim && pod.backends[*index].is_some() && pod.disk.replicas[*index].in_sync
                };
                if pod.backends[victim].is_some() && (0..count).any(|index| good(&index)) {
                    let finishes = history.below(2) == 0;
                    pod.kill(victim, || finishes);
                    pod.notice(victim);
                }
            } else if let Some(gone) = (0..count).find(|&index| pod.backends[index].is_none()) {
                pod.revive(gone);
            }
        }
        pod.controls.iter().for_each(|control| control.hold(false));
        pod.until_idle(&mut history);
        // What is copied when the guest is on its way is late.
        let slow = history.below(count as u64) as usize;
        let eager = history.below(2) == 0;
        move_guest(&mut pod, &mut history.driver, eager, |pod| pod.controls[slow].hold(true));
        history.work(4);
        history.collect();
        pod.controls[slow].hold(false);
    }
    for index in 0..count {
        if pod.backends[index].is_none() {
            pod.revive(index);
        }
    }
    pod.until_idle(&mut history);
    pod.in_line();
    history.read_all();
    if let Err(error) = history.check() {
        panic!("seed {seed}: {error}");
    }
    (pod.dropped, pod.synced)
}

#[test]
fn one_order_explains_what_a_guest_sees_that_moves_while_replicas_die_and_return() {
    let (mut dropped, mut synced) = (0, 0);
    for seed in 1..=8 * rounds() {
        let (down, up) = run(seed);
        dropped += down;
        synced += up;
    }
    assert!(dropped > 0 && synced > 0, "nothing was tried: {dropped} dropped, {synced} back");
}

#[test]
fn what_replicas_differ_in_when_the_guest_arrives_is_read_the_same_by_all() {
    let mut pod = MirrorPod::started(1, 2);
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.prepare_move();
    let before = pod.controls.iter().map(|control| control.log().len()).collect::<Vec<_>>();
    // A write that reached one replica, and was answered with an error.
    pod.controls[0].set_bytes(VOLUME_START + 4096, &pattern(2, 4096));
    thread::sleep(QUIET);
    let after = pod.controls.iter().map(|control| control.log().len()).collect::<Vec<_>>();
    assert_eq!(before, after, "the guest is not there yet");
    move_guest(&mut pod, &mut driver, true, |_| ());
    let read = driver.read_sectors(8, 4096);
    assert_eq!(pod.controls[1].bytes(VOLUME_START + 4096, 4096), read, "what was read must stay");
    pod.kill(0, || false);
    pod.notice(0);
    assert_eq!(driver.read_sectors(8, 4096), read);
}

#[test]
fn a_replica_that_is_dropped_while_the_guest_is_on_its_way_is_not_read() {
    let mut pod = MirrorPod::started(2, 2);
    let mut driver = pod.driver();
    pod.in_line();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.prepare_move();
    // The first one, which others would be brought in line with.
    pod.kill(0, || false);
    pod.notice(0);
    assert_eq!(driver.write_sectors(8, &pattern(2, 4096)), OK);
    move_guest(&mut pod, &mut driver, false, |_| ());
    assert_eq!(driver.read_sectors(8, 4096), pattern(2, 4096));
    pod.revive(0);
    pod.in_line();
    assert_eq!(pod.controls[0].bytes(VOLUME_START + 4096, 4096), pattern(2, 4096));
    assert_eq!((pod.dropped, pod.synced), (1, 1));
}

/// A replica in sync, with the others brought in line after the disk was leased anew: its copies are what the frontend that the
/// guest leaves may have in flight.
#[test]
fn a_copy_that_is_late_when_the_guest_has_gone_undoes_no_write() {
    let mut pod = MirrorPod::new(3, 3);
    pod.controls[0].set_bytes(VOLUME_START + 4096, &pattern(1, 4096));
    pod.controls[2].hold(true);
    pod.controls[2].finish_backwards();
    pod.start_all();
    let mut driver = pod.driver();
    // Copies of the first regions, once the second replica is in line.
    eventually(|| pod.controls[2].waiting() == 2);
    pod.prepare_move();
    for index in 0..2 {
        driver.guest.stop_ring(index);
    }
    driver.guest.disconnect();
    driver.guest.negotiate(&pod.incoming_socket(), ALL_FEATURES);
    driver.guest.start_rings();
    driver.write(driver.place(0).data, &pattern(3, 4096));
    let head = driver.offer(0, 0, T_OUT, 8, 4096);
    pod.hand_over();
    // It has to be noted with the third one first, which works on what is late; the others do not get it before.
    assert!(driver.guest.wait_used(0, QUIET).is_none());
    for control in &pod.controls {
        assert!(control.bytes(VOLUME_START + 4096, 4096) != pattern(3, 4096));
    }
    pod.controls[2].hold(false);
    assert_eq!(driver.answer(0, 0, head), (OK, 1));
    for index in 0..2 {
        pod.kill(index, || false);
        pod.notice(index);
    }
    assert!(driver.read_sectors(8, 4096) == pattern(3, 4096), "an older write landed on it");
}
