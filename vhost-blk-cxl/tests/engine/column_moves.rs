//! Columns of a striped volume that move from one device to another under a guest that notices nothing.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cxl_pool::simulated::{check_seeds, seeds};
use vhost_blk_cxl::message::Operation;

use crate::TARGET;
use crate::pod::history::History;
use crate::pod::mirror::{MIRROR_BYTES, MirrorPod};
use crate::pod::ram::Control;
use crate::pod::*;

pub(super) const UNIT: u64 = 64 << 10;

/// A volume over two of three devices, full of what it should hold.
pub(super) fn full(seed: u64) -> (MirrorPod, Driver, Vec<u8>) {
    let pod = MirrorPod::striped_over(seed, (2, 3), UNIT);
    let mut driver = pod.driver();
    let model = pattern(seed, MIRROR_BYTES as usize);
    for (sector, part) in (0..).step_by(1024).zip(model.chunks(512 << 10)) {
        assert_eq!(driver.write_sectors(sector, part), OK);
    }
    (pod, driver, model)
}

/// Waits until the frontend has said that the place on this device has everything. Nobody has heard it yet.
pub(super) fn wait_until_told(pod: &mut MirrorPod, place: usize) {
    eventually(|| pod.dirty_bytes() == 0);
    eventually(|| pod.controls[place].log().iter().any(|it| it.operation == Operation::Flush));
    // The device has got the flush, and is to have answered it.
    thread::sleep(QUIET);
}

pub(super) fn settled(pod: &MirrorPod) -> bool {
    pod.columns().beside.is_none()
}

#[test]
fn a_column_moves_and_nothing_of_it_is_used_where_it_was() {
    let (mut pod, mut driver, mut model) = full(41);
    for (round, (column, to, left)) in [(0, 2, 0), (1, 0, 1), (0, 1, 2)].into_iter().enumerate() {
        pod.move_column(column, to);
        let mut number = 0;
        let began = Instant::now();
        while !settled(&pod) {
            assert!(began.elapsed() < PATIENCE, "it never arrived");
            pod.control();
            number += 1;
            let sector = number * 37 % (MIRROR_BYTES / SECTOR - 300);
            let (from, to) = ((sector * SECTOR) as usize, ((sector + 300) * SECTOR) as usize);
            match number % 5 {
                0 => {
                    assert_eq!(driver.range_request(T_WRITE_ZEROES, sector, 300, 0), OK);
                    model[from..to].fill(0);
                }
                1 => assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK),
                2 => assert!(driver.read_sectors(sector, 300 * SECTOR as u32) == model[from..to]),
                _ => {
                    let data = pattern(number << 8 | round as u64, to - from);
                    assert_eq!(driver.write_sectors(sector, &data), OK);
                    model[from..to].copy_from_slice(&data);
                }
            }
        }
        assert_eq!((pod.columns().at[column], pod.columns().arrived), (to, round as u64 + 1));
        assert!(pod.striped_bytes() == model);
        eventually(|| pod.dirty_bytes() == 0);
        let before = pod.controls[left].log().len();
        for sector in (0..MIRROR_BYTES / SECTOR).step_by(1024) {
            let at = (sector * SECTOR) as usize;
            assert!(driver.read_sectors(sector, 512 << 10) == model[at..at + (512 << 10)]);
        }
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
        assert_eq!(pod.controls[left].log().len(), before);
    }
}

#[test]
fn what_is_acknowledged_is_in_both_places_before_the_column_changes_its_own() {
    let (mut pod, mut driver, _) = full(42);
    pod.move_column(0, 2);
    wait_until_told(&mut pod, 2);
    pod.controls[2].hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let write = driver.offer(0, 0, T_OUT, 0, 4096);
    eventually(|| pod.controls[2].waiting() == 1);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "half of it is done");
    // A read that meets it waits: what it would see might be gone again.
    let read = driver.offer(1, 1, T_IN, 0, 4096);
    assert!(driver.guest.wait_used(1, QUIET).is_none());
    pod.controls[2].hold(false);
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
    assert_eq!(driver.answer(1, 1, read), (OK, 4097));
    assert_eq!(driver.read(driver.place(1).data, 4096), pattern(1, 4096));
    pod.until(|pod| settled(pod));
    assert_eq!(pod.columns().arrived, 1);
    assert_eq!(driver.read_sectors(0, 4096), pattern(1, 4096));
}

#[test]
fn a_write_is_not_waited_for_where_its_column_was() {
    let (mut pod, mut driver, _) = full(47);
    pod.move_column(0, 2);
    wait_until_told(&mut pod, 2);
    pod.controls[0].hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let write = driver.offer(0, 0, T_OUT, 0, 4096);
    eventually(|| pod.controls[0].waiting() == 1);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "the column may be there yet");
    pod.until(|pod| pod.columns().arrived == 1);
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
    for round in 2..20 {
        assert_eq!(driver.write_sectors(0, &pattern(round, 4096)), OK);
        assert_eq!(driver.read_sectors(0, 4096), pattern(round, 4096));
    }
    assert!(!settled(&pod), "it has yet to let go of what it has");
    pod.controls[0].hold(false);
    pod.until(|pod| settled(pod));
    assert_eq!(driver.read_sectors(0, 4096), pattern(19, 4096));
}

#[test]
fn a_write_waits_for_a_read_that_it_meets_and_is_not_passed_by_others() {
    let (mut pod, mut driver, model) = full(48);
    pod.move_column(0, 2);
    wait_until_told(&mut pod, 2);
    pod.controls[0].hold(true);
    let read = driver.offer(0, 0, T_IN, 0, 4096);
    eventually(|| pod.controls[0].waiting() == 1);
    let elsewhere = driver.offer(1, 3, T_IN, 2 * UNIT / SECTOR, 4096);
    eventually(|| pod.controls[0].waiting() == 2);
    driver.write(driver.place(1).data, &pattern(1, 4096));
    let write = driver.offer(1, 1, T_OUT, 0, 4096);
    let later = driver.offer(1, 2, T_IN, 0, 4096);
    assert!(driver.guest.wait_used(1, QUIET).is_none());
    assert_eq!(pod.controls[0].waiting(), 2, "the first read, and the one elsewhere");
    pod.controls[0].hold(false);
    assert_eq!(driver.answer(0, 0, read), (OK, 4097));
    assert_eq!(driver.read(driver.place(0).data, 4096), model[..4096]);
    let answers = [(); 3].map(|()| driver.guest.wait_used(1, PATIENCE).map(|used| used.head));
    assert_eq!(answers, [elsewhere, write, later].map(Some));
    assert_eq!(driver.read(driver.place(2).data, 4096), pattern(1, 4096));
    pod.until(|pod| settled(pod));
    assert_eq!(driver.read_sectors(0, 4096), pattern(1, 4096));
}

/// A frontend dies when its column has moved. What the old place has done of a write that was never acknowledged, the new one has
/// not: a read must not have seen it.
#[test]
fn what_was_read_where_a_column_was_is_read_by_the_next_frontend() {
    let (mut pod, mut driver, model) = full(51);
    pod.move_column(0, 2);
    wait_until_told(&mut pod, 2);
    pod.kill(2, || false);
    pod.controls[0].finish_backwards();
    pod.controls[0].hold(true);
    let read = driver.offer(0, 0, T_IN, 0, 4096);
    eventually(|| pod.controls[0].waiting() == 1);
    driver.write(driver.place(1).data, &pattern(1, 4096));
    let write = driver.offer(1, 1, T_OUT, 0, 4096);
    assert!(driver.guest.wait_used(1, QUIET).is_none(), "the other place does not have it");
    pod.controls[0].hold(false);
    assert_eq!(driver.answer(0, 0, read), (OK, 4097));
    assert!(driver.read(driver.place(0).data, 4096) == model[..4096]);
    while pod.columns().arrived == 0 {
        pod.control();
    }
    driver.guest.disconnect();
    pod.disk.epoch += 1;
    pod.restart_frontend();
    pod.start_backend(2);
    pod.controls[2].hold(true);
    driver.guest.connect(&pod.run.sockets().join(&pod.disk.socket), ALL_FEATURES);
    // The write is repeated as soon as its queue is there, which may be after the other one.
    eventually(|| pod.controls[2].waiting() == 1);
    // The read that is new waits for it.
    let again = driver.offer(0, 0, T_IN, 0, 4096);
    assert!(driver.guest.wait_used(0, QUIET).is_none());
    assert_eq!(pod.controls[2].waiting(), 1);
    pod.controls[2].hold(false);
    assert_eq!(driver.answer(1, 1, write), (OK, 1));
    assert_eq!(driver.answer(0, 0, again), (OK, 4097));
    assert!(driver.read(driver.place(0).data, 4096) == pattern(1, 4096));
}

#[test]
fn a_place_that_fails_costs_the_guest_nothing() {
    let (mut pod, mut driver, model) = full(43);
    pod.controls[2].fail(true);
    pod.move_column(1, 2);
    pod.until(|pod| settled(pod));
    assert_eq!((pod.columns().arrived, pod.columns().failed), (0, 1));
    pod.controls[2].fail(false);
    // It dies while the guest writes to both.
    pod.controls[2].hold(true);
    pod.move_column(1, 2);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let write = driver.offer(0, 0, T_OUT, UNIT / SECTOR, 4096);
    eventually(|| pod.controls[2].waiting() > 0);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "it may answer yet");
    pod.kill(2, || true);
    pod.end_place();
    pod.apply_disk();
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
    pod.controls[2].hold(false);
    pod.start_backend(2);
    assert_eq!(driver.read_sectors(UNIT / SECTOR, 4096), pattern(1, 4096));
    assert_eq!(driver.read_sectors(UNIT / SECTOR + 8, 4096), model[UNIT as usize + 4096..][..4096]);
    // Once it has everything, its failures wait for the controller's word.
    pod.move_column(1, 2);
    wait_until_told(&mut pod, 2);
    pod.controls[2].fail(true);
    driver.write(driver.place(0).data, &pattern(2, 4096));
    let write = driver.offer(0, 0, T_OUT, UNIT / SECTOR, 4096);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "the column may be there by now");
    pod.until(|pod| settled(pod));
    // What was said first counts: the column has moved, and it failed.
    assert_eq!(pod.columns().arrived, 1);
    assert_eq!(driver.answer(0, 0, write).0, IOERR);
}

#[test]
fn a_column_that_dies_when_everything_is_copied_is_not_missed() {
    let (mut pod, mut driver, model) = full(44);
    pod.move_column(0, 2);
    wait_until_told(&mut pod, 2);
    // It keeps a read, and is gone when the controller hears that nothing is missing elsewhere.
    pod.controls[0].hold(true);
    let read = driver.offer(0, 0, T_IN, 0, 4096);
    eventually(|| pod.controls[0].waiting() == 1);
    pod.kill(0, || false);
    assert!(driver.guest.wait_used(0, QUIET).is_none());
    while pod.columns().arrived == 0 {
        pod.control();
    }
    pod.end_place();
    pod.apply_disk();
    assert_eq!(driver.answer(0, 0, read), (OK, 4097));
    assert_eq!(driver.read(driver.place(0).data, 4096), model[..4096]);
    assert_eq!(driver.write_sectors(0, &pattern(1, 4096)), OK);
    assert_eq!(driver.read_sectors(0, 4096), pattern(1, 4096));
    pod.controls[0].hold(false);
    pod.start_backend(0);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
}

#[test]
fn what_either_device_forgets_is_copied_again() {
    let (mut pod, mut driver, _) = full(45);
    pod.controls[2].let_pass(3);
    pod.move_column(0, 2);
    eventually(|| pod.controls[2].waiting() > 0);
    pod.controls[2].lose();
    pod.controls[2].hold(false);
    pod.until(|pod| settled(pod));
    assert_eq!(pod.columns().arrived, 1);
    let mut whole = pod.striped_bytes();
    assert!(whole == driver_bytes(&mut driver));
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the column had it");
    // The column itself: the guest is told, and both places hold the same nevertheless.
    assert_eq!(driver.write_sectors(0, &pattern(7, 4096)), OK);
    pod.controls[0].let_pass(1);
    pod.move_column(0, 0);
    eventually(|| pod.controls[0].waiting() > 0);
    pod.controls[2].lose();
    pod.controls[0].hold(false);
    pod.until(|pod| settled(pod));
    whole = pod.striped_bytes();
    assert!(whole[..UNIT as usize].iter().all(|&byte| byte == 0), "what was lost is lost");
    assert!(whole == driver_bytes(&mut driver));
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
}

fn driver_bytes(driver: &mut Driver) -> Vec<u8> {
    (0..MIRROR_BYTES / SECTOR).step_by(1024).flat_map(|at| driver.read_sectors(at, 512 << 10)).collect()
}

#[test]
fn a_place_that_hangs_is_given_up() {
    let (mut pod, mut driver, _) = full(46);
    pod.frontend.as_mut().unwrap().set_replica_timeout(Some(Duration::from_millis(300)));
    pod.controls[2].hold(true);
    pod.move_column(0, 2);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let write = driver.offer(0, 0, T_OUT, 0, 4096);
    pod.until(|pod| pod.columns().failed == 1);
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
    assert!(!settled(&pod), "it has yet to let go of what it has");
    pod.controls[2].hold(false);
    pod.until(|pod| settled(pod));
    assert_eq!(driver.read_sectors(0, 4096), pattern(1, 4096));
}

const LAST_UNIT_SECTOR: u64 = (MIRROR_BYTES - 2 * UNIT) / SECTOR;

/// A place that kept a write, was given up for that, and is used once more, since the controller says something new before it hears of
/// it. The place still has the write, whose buffer is another's by now. The guest writes there again.
fn used_again(seed: u64, timeout: Option<Duration>) -> (MirrorPod, Driver, Vec<u8>, u16) {
    let (mut pod, mut driver, mut model) = full(seed);
    pod.frontend.as_mut().unwrap().set_replica_timeout(Some(Duration::from_millis(300)));
    pod.controls[2].hold(true);
    pod.controls[2].finish_backwards();
    pod.move_column(0, 2);
    eventually(|| pod.controls[2].waiting() == 2);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let write = driver.offer(0, 0, T_OUT, LAST_UNIT_SECTOR, 4096);
    eventually(|| pod.controls[2].waiting() == 3);
    wait_for(&mut pod, &mut driver, write);
    pod.frontend.as_mut().unwrap().set_replica_timeout(timeout);
    pod.disk.epoch += 1;
    pod.apply_disk();
    driver.write(driver.place(0).data, &pattern(2, 4096));
    let write = driver.offer(0, 0, T_OUT, LAST_UNIT_SECTOR, 4096);
    model[(LAST_UNIT_SECTOR * SECTOR) as usize..][..4096].copy_from_slice(&pattern(2, 4096));
    (pod, driver, model, write)
}

/// Waits for a write, while the frontend looks how long things take. The controller hears nothing.
fn wait_for(pod: &mut MirrorPod, driver: &mut Driver, write: u16) {
    eventually(|| {
        pod.dirty_bytes();
        pass_newer(pod);
        driver.guest.used(0).is_some_and(|used| used.head == write)
    });
    assert_eq!(driver.status(0), OK, "the column has it");
}

/// What the place gets passes the three that it keeps.
fn pass_newer(pod: &MirrorPod) {
    if pod.controls[2].waiting() > 3 {
        pod.controls[2].let_pass(1);
    }
}

#[test]
fn what_a_place_still_does_of_before_it_was_given_up_is_waited_for() {
    let (mut pod, mut driver, model, write) = used_again(49, None);
    let began = Instant::now();
    while began.elapsed() < 4 * QUIET {
        pass_newer(&pod);
        assert!(driver.guest.used(0).is_none(), "it may be undone yet");
        thread::yield_now();
    }
    pod.controls[2].hold(false);
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
    pod.until(|pod| settled(pod));
    assert_eq!(pod.columns().arrived, 1);
    assert!(pod.striped_bytes() == model);
}

#[test]
fn what_a_place_still_does_of_before_it_was_given_up_is_not_waited_for_for_ever() {
    let (mut pod, mut driver, model, write) = used_again(50, Some(Duration::from_millis(300)));
    wait_for(&mut pod, &mut driver, write);
    pod.until(|pod| pod.columns().failed == 1);
    pod.controls[2].hold(false);
    pod.until(|pod| settled(pod));
    assert_eq!(pod.columns().arrived, 0);
    assert!(pod.striped_bytes() == model);
}

/// Has a device carry out what it gets, but for the first of it, which it keeps.
struct AllButFirst<'a> {
    control: &'a Control,
    passed: usize,
}

impl<'a> AllButFirst<'a> {
    fn new(control: &'a Control) -> Self {
        Self { passed: Self::done(control), control }
    }

    fn done(control: &Control) -> usize {
        control.log().len().saturating_sub(control.waiting())
    }

    /// Lets the next one pass, once the one before has.
    fn pass(&mut self) {
        if self.control.waiting() > 1 && Self::done(self.control) == self.passed {
            self.passed += 1;
            self.control.let_pass(1);
        }
    }
}

/// The read of a copy that was given up is with the column still when that has moved, and ends where it was.
#[test]
fn a_copy_that_was_given_up_costs_later_moves_nothing() {
    let (mut pod, _driver, model) = full(52);
    // Each time one of the two copies that there may be at a time.
    for (arrived, (from, to)) in (1..).zip([(0, 2), (2, 0)]) {
        let control = Arc::clone(&pod.controls[from]);
        control.finish_backwards();
        control.hold(true);
        pod.move_column(0, to);
        eventually(|| control.waiting() == 2);
        pod.end_place();
        pod.apply_disk();
        let mut others = AllButFirst::new(&control);
        eventually(|| {
            others.pass();
            control.waiting() == 1
        });
        let before = pod.controls[to].log().len();
        pod.move_column(0, to);
        let flushed = |pod: &MirrorPod| {
            pod.controls[to].log()[before..].iter().any(|it| it.operation == Operation::Flush)
        };
        eventually(|| {
            others.pass();
            flushed(&pod)
        });
        pod.until(|pod| pod.columns().arrived == arrived);
        assert!(!settled(&pod), "it has a read");
        control.hold(false);
        pod.until(|pod| settled(pod));
    }
    pod.move_column(0, 2);
    pod.until(|pod| settled(pod));
    assert_eq!(pod.columns().arrived, 3);
    assert!(pod.striped_bytes() == model);
}

/// Moves columns about while the guest writes and reads, with devices that are slow, and hosts and frontends that die at moments
/// that the seed chooses. Returns how often one arrived, and how often a frontend died meanwhile.
fn run(seed: u64) -> Result<(u64, u64), String> {
    const HOSTS: usize = 3;
    let mut pod = MirrorPod::striped_over(seed, (2, HOSTS as u16), UNIT);
    let mut history = History::new(pod.driver(), seed);
    let mut replaced = 0;
    pod.controls.iter().for_each(|control| control.finish_backwards());
    for _ in 0..4 {
        history.work(8);
        let free = (0..HOSTS).find(|index| !pod.columns().at.contains(index)).unwrap();
        pod.move_column(history.below(2) as usize, free);
        let happens = history.below(4);
        for turn in 0..6 {
            pod.stir(&mut history, 500);
            if turn == 3 && happens == 0 {
                pod.controls.iter().for_each(|control| control.hold(false));
                history.driver.guest.disconnect();
                pod.disk.epoch += 1;
                pod.restart_frontend();
                let socket = pod.run.sockets().join(&pod.disk.socket);
                history.driver.guest.connect(&socket, ALL_FEATURES);
                replaced += 1;
            } else if turn == 3 && happens == 1 {
                let victim = history.below(HOSTS as u64) as usize;
                let finishes = history.below(2) == 0;
                pod.kill(victim, || finishes);
                if pod.columns().beside.as_ref().is_some_and(|place| place.at == victim) {
                    pod.end_place();
                    pod.apply_disk();
                }
                history.work(4);
                pod.start_backend(victim);
            }
        }
        pod.controls.iter().for_each(|control| control.hold(false));
        pod.work_until(&mut history, "it neither arrives nor stays", |pod, _| settled(pod));
    }
    pod.until_idle(&mut history);
    history.read_all();
    history.check()?;
    Ok((pod.columns().arrived, replaced))
}

#[test]
fn one_order_explains_what_the_guest_sees_while_columns_move() {
    const COUNT: u64 = 12;
    let (mut arrived, mut replaced) = (0, 0);
    check_seeds(TARGET, COUNT, |seed| {
        let (more, deaths) = run(seed + 1)?;
        (arrived, replaced) = (arrived + more, replaced + deaths);
        Ok(())
    });
    assert!(arrived > 0 && replaced > 0 || seeds(COUNT).count() == 1, "nothing was tried");
}
