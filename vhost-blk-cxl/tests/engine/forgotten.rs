//! Drives that lose their power while the frontend is being restarted: it finds out by what its predecessor has noted that they have
//! forgotten what the guest was told.

use std::thread;

use cxl_pool::simulated::SimulatedMemory;

use crate::pod::mirror::MirrorPod;
use crate::pod::ram::{Control, pod};
use crate::pod::*;

/// The frontend ends, and before the next one begins something happens to the drive.
fn restart(pod: &mut Pod<SimulatedMemory>, driver: &mut Driver, happens: impl FnOnce()) {
    pod.crash_frontend();
    driver.guest.disconnect();
    happens();
    pod.restart_frontend(&mut driver.guest);
}

#[test]
fn a_flush_does_not_vouch_for_what_a_drive_lost_while_there_was_no_frontend() {
    let (mut pod, control) = pod(91);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    restart(&mut pod, &mut driver, || control.lose());
    // Nor does it after the drive has answered.
    driver.read_sectors(0, 512);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
    // And so does whoever comes next.
    restart(&mut pod, &mut driver, || {});
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
}

#[test]
fn nothing_fails_for_a_drive_that_lost_nothing() {
    let (mut pod, control) = pod(92);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    restart(&mut pod, &mut driver, || {});
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    // All of it is flushed.
    restart(&mut pod, &mut driver, || control.lose());
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
}

/// The same of a guest that has no write cache: what it writes is never forgotten.
#[test]
fn a_guest_without_a_write_cache_hears_of_what_it_wrote_before() {
    for cached in [false, true] {
        let (mut pod, control) = pod(93);
        let mut driver = Driver::connected(&pod);
        if cached {
            assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
            // Its flush was not carried out.
            control.fail_flushes(true);
        }
        driver.guest.set_config(32, &[0]);
        assert_eq!(driver.guest.config(60)[32], 0);
        control.fail_flushes(false);
        pod.disk.write_through = true;
        if cached {
            restart(&mut pod, &mut driver, || {});
            assert_eq!(driver.write_sectors(16, &pattern(2, 4096)), IOERR, "the predecessor told nobody");
        } else {
            assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
            restart(&mut pod, &mut driver, || control.lose());
        }
        assert_eq!(driver.write_sectors(16, &pattern(2, 4096)), OK);
    }
}

/// The frontend of a volume in several places ends, and before the next one begins some of the drives lose their power. Returns what the
/// next flush says.
fn restart_spread(pod: &mut MirrorPod, driver: &mut Driver, lost: &[usize], waits: bool) -> u8 {
    driver.guest.disconnect();
    pod.frontend = None;
    for &index in lost {
        Control::lose(&pod.controls[index]);
    }
    pod.restart_frontend();
    if waits {
        // Until drives have answered, and more.
        thread::sleep(QUIET);
    }
    driver.guest.connect(&pod.run.sockets().join(&pod.disk.socket), ALL_FEATURES);
    request(pod, driver, T_FLUSH, 0)
}

/// One request, while the controller does what it is to.
fn request(pod: &mut MirrorPod, driver: &mut Driver, kind: u32, bytes: u32) -> u8 {
    thread::scope(|scope| {
        let answer = scope.spawn(|| driver.request(kind, 8, bytes).0);
        pod.until(|_| answer.is_finished());
        answer.join().unwrap()
    })
}

#[test]
fn so_it_is_with_each_column() {
    for column in 0..2 {
        let mut pod = MirrorPod::striped(94, 2, 4096);
        let mut driver = pod.driver();
        assert_eq!(driver.write_sectors(8, &pattern(1, 8192)), OK);
        assert_eq!(restart_spread(&mut pod, &mut driver, &[column], false), IOERR);
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "the guest knows");
        // The next frontend finds what this one has noted of it in the end.
        assert_eq!(driver.write_sectors(8, &pattern(2, 8192)), OK);
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
        assert_eq!(restart_spread(&mut pod, &mut driver, &[0, 1], false), OK, "all of it was flushed");
    }
}

#[test]
fn so_it_is_with_all_replicas() {
    for waits in [false, true] {
        let mut pod = MirrorPod::logging(95, 2);
        let mut driver = pod.driver();
        pod.in_line();
        assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
        assert_eq!(restart_spread(&mut pod, &mut driver, &[0, 1], waits), IOERR);
        assert_eq!(request(&mut pod, &mut driver, T_FLUSH, 0), OK, "the guest knows");
        pod.in_line();
    }
}

/// What one lost, the other one has; or the guest hears of it, where that was brought in line with the one that lost it before anybody
/// could know.
#[test]
fn what_one_replica_lost_the_other_one_has_or_the_guest_hears_of_it() {
    for (lost, waits) in [(0, false), (0, true), (1, false), (1, true)] {
        let mut pod = MirrorPod::logging(96, 2);
        let mut driver = pod.driver();
        pod.in_line();
        let data = pattern(1, 4096);
        assert_eq!(driver.write_sectors(8, &data), OK);
        let told = restart_spread(&mut pod, &mut driver, &[lost], waits) == IOERR;
        assert!(!told || lost == 0, "the other one has it");
        pod.in_line();
        let status = request(&mut pod, &mut driver, T_IN, 4096);
        let read = driver.read(driver.place(0).data, 4096);
        assert!(status == OK && (told || read == data), "{lost}, {waits}: nobody told the guest");
        assert_eq!(request(&mut pod, &mut driver, T_FLUSH, 0), OK);
    }
}
