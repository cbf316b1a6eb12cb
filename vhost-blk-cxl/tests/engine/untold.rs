//! Losses that no flush tells of, for the guest has no write cache any more: a write does.

use std::thread;

use vhost_blk_cxl::message::Operation;

use crate::pod::mirror::MirrorPod;
use crate::pod::ram::{Control, pod};
use crate::pod::*;

/// The driver switches the write cache off, which is answered when what it wrote before was flushed, or was not.
fn switch_off(driver: &mut Driver) {
    driver.guest.set_config(32, &[0]);
    assert_eq!(driver.guest.config(60)[32], 0);
}

/// One write fails, and by that the guest knows.
fn hears(driver: &mut Driver) {
    assert_eq!(driver.write_sectors(16, &pattern(2, 4096)), IOERR, "nobody has told the guest of the loss");
    assert_eq!(driver.write_sectors(16, &pattern(3, 4096)), OK, "the guest knows");
    assert_eq!(driver.read_sectors(16, 4096), pattern(3, 4096));
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
}

fn flushes(control: &Control) -> usize {
    control.log().iter().filter(|command| command.operation == Operation::Flush).count()
}

#[test]
fn a_flush_that_fails_when_the_cache_is_switched_off_fails_the_next_write() {
    let (pod, control) = pod(81);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    control.fail_flushes(true);
    switch_off(&mut driver);
    control.fail_flushes(false);
    // Reads say nothing of it.
    assert_eq!(driver.read_sectors(0, 512).len(), 512);
    hears(&mut driver);
}

#[test]
fn so_does_a_drive_that_lost_its_power_before() {
    let (pod, control) = pod(82);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    control.lose();
    switch_off(&mut driver);
    hears(&mut driver);
}

#[test]
fn a_guest_that_has_a_cache_again_hears_by_a_flush() {
    let (pod, control) = pod(83);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    control.lose();
    switch_off(&mut driver);
    driver.guest.set_config(32, &[1]);
    assert_eq!(driver.write_sectors(8, &pattern(2, 4096)), OK);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
}

/// A frontend that takes rings over flushes what its predecessor did not, and nobody waits for that.
#[test]
fn a_flush_that_fails_of_what_a_predecessor_wrote_fails_the_next_write() {
    let (mut pod, control) = pod(84);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    // The driver chose so, and the predecessor has ended before it flushed.
    pod.disk.write_through = true;
    control.fail_flushes(true);
    pod.restart_frontend(&mut driver.guest);
    eventually(|| flushes(&control) > 0);
    // It is sent after them.
    driver.read_sectors(0, 512);
    control.fail_flushes(false);
    hears(&mut driver);
}

#[test]
fn a_flush_that_is_given_up_fails_the_next_write() {
    let (mut pod, control) = pod(85);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    control.hold(true);
    thread::scope(|scope| {
        let off = scope.spawn(|| switch_off(&mut driver));
        eventually(|| control.waiting() == 1);
        pod.disk.failed = true;
        pod.apply_disk();
        off.join().unwrap();
    });
    control.hold(false);
    pod.disk.failed = false;
    pod.apply_disk();
    hears(&mut driver);
}

/// Has something written to a volume in several places, and the cache switched off when something has happened to them.
fn in_several_places(mut pod: MirrorPod, happens: impl Fn(&Control), ends: impl Fn(&Control)) {
    let mut driver = pod.driver();
    if pod.disk.stripe_bytes.is_none() {
        pod.in_line();
    }
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.controls.iter().for_each(|control| happens(control));
    thread::scope(|scope| {
        let off = scope.spawn(|| switch_off(&mut driver));
        pod.until(|_| off.is_finished());
        off.join().unwrap();
    });
    pod.controls.iter().for_each(|control| ends(control));
    thread::scope(|scope| {
        let heard = scope.spawn(|| hears(&mut driver));
        pod.until(|_| heard.is_finished());
        heard.join().unwrap();
    });
}

#[test]
fn replicas_that_all_lost_it_fail_the_next_write() {
    in_several_places(MirrorPod::started(86, 2), Control::lose, |_| {});
    let fail = |control: &Control| control.fail_flushes(true);
    in_several_places(MirrorPod::started(87, 2), fail, |control| control.fail_flushes(false));
}

#[test]
fn columns_that_lost_it_fail_the_next_write() {
    in_several_places(MirrorPod::striped(88, 2, 4096), Control::lose, |_| {});
    let fail = |control: &Control| control.fail_flushes(true);
    in_several_places(MirrorPod::striped(89, 2, 4096), fail, |control| control.fail_flushes(false));
}
