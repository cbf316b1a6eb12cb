//! Backends and frontends that go away and come back under a guest that notices nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::Memory;
use cxl_pool::simulated::SimulatedMemory;
use pod_protocol::endpoint::Handler;

use crate::pod::ram::{Control, RamSsd, pod};
use crate::pod::*;

/// How long rings wait for one of which a predecessor owes something.
const OWED_PATIENCE: Duration = Duration::from_secs(1);

/// Offers writes that the device holds back.
fn offer_writes(driver: &mut Driver, control: &Control, count: u64) {
    control.hold(true);
    for index in 0..count {
        driver.write(driver.place(index).data, &pattern(index, 4096));
        driver.offer((index % 2) as usize, index, T_OUT, index * 8, 4096);
    }
    eventually(|| control.waiting() as u64 == count);
}

/// The frontend dies, and with it the connection to the VMM; its successor has yet to be told of anything.
fn frontend_starts_anew<M: Memory>(pod: &mut Pod<M>, driver: &mut Driver) {
    pod.crash_frontend();
    driver.guest.disconnect();
    pod.start_frontend();
    pod.new_lease_generation();
}

fn collect(driver: &mut Driver, control: &Control, count: u64) {
    for index in 0..count {
        assert!(driver.guest.wait_used((index % 2) as usize, PATIENCE).is_some(), "answer {index}");
    }
    for index in 0..count {
        assert_eq!(driver.status(index), OK);
        assert_eq!(control.bytes(VOLUME_START + index * 4096, 4096), pattern(index, 4096));
        assert_eq!(driver.read_sectors(index * 8, 4096), pattern(index, 4096));
    }
    // Each was answered once.
    assert_eq!((driver.guest.used(0), driver.guest.used(1)), (None, None));
}

#[test]
fn requests_outlive_a_backend() {
    let (mut pod, control) = pod(21);
    let mut driver = Driver::connected(&pod);
    offer_writes(&mut driver, &control, 12);
    pod.backend = None;
    // A device that the dead backend's commands never reached.
    let second = Control::new();
    pod.start_backend(Box::new(RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&second) }));
    pod.apply_volume();
    pod.new_channel();
    collect(&mut driver, &second, 12);
}

#[test]
fn a_new_generation_waits_for_the_old_ones_commands() {
    let (mut pod, control) = pod(22);
    let mut driver = Driver::connected(&pod);
    offer_writes(&mut driver, &control, 4);
    let release = Arc::clone(&control);
    let releaser = std::thread::spawn(move || {
        std::thread::sleep(QUIET);
        assert_eq!(release.log().len(), 4, "nothing was begun twice before the old commands ended");
        release.hold(false);
    });
    pod.new_channel();
    releaser.join().unwrap();
    collect(&mut driver, &control, 4);
    assert_eq!(control.log().iter().filter(|command| command.operation.writes()).count(), 8);
}

#[test]
fn a_device_that_hangs_keeps_nobody_waiting() {
    let (mut pod, control) = pod(26);
    let mut driver = Driver::connected(&pod);
    offer_writes(&mut driver, &control, 4);
    pod.next_channel();
    for _ in 0..2 {
        pod.apply_channel().unwrap();
        pod.apply_volume();
    }
    std::thread::sleep(QUIET);
    assert_eq!(control.log().len(), 4, "nothing was begun twice before the old commands ended");
    control.hold(false);
    collect(&mut driver, &control, 4);
}

#[test]
fn telemetry_says_whether_a_device_works() {
    let (mut pod, control) = pod(27);
    let mut up = || pod.backend.as_mut().unwrap().telemetry().devices[0].up;
    assert!(up());
    control.break_down();
    eventually(|| !up());
}

#[test]
fn a_frontend_resumes_from_the_in_flight_region() {
    let (mut pod, control) = pod(23);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(4096, &pattern(99, 512)), OK);
    offer_writes(&mut driver, &control, 10);
    frontend_starts_anew(&mut pod, &mut driver);
    control.hold(false);
    pod.apply_volume();
    pod.new_channel();
    pod.apply_disk();
    driver.guest.connect(&pod.socket(), ALL_FEATURES);
    collect(&mut driver, &control, 10);
}

/// The device carried out what the frontend that died had it do, and does so once more when that is resumed. What came by another ring
/// and was seen or written before would be undone by that.
/// A frontend whose predecessor took a write from the second ring, which was carried out, and of which nobody has heard. Its number is the last.
fn owes_on_the_second_ring(seed: u64) -> (Pod<SimulatedMemory>, Driver, Arc<Control>, u16) {
    let (mut pod, control) = pod(seed);
    let mut driver = Driver::connected(&pod);
    control.hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let owed = driver.offer(1, 0, T_OUT, 8, 4096);
    eventually(|| control.waiting() == 1);
    frontend_starts_anew(&mut pod, &mut driver);
    pod.apply_volume();
    pod.new_channel();
    pod.apply_disk();
    control.hold(false);
    eventually(|| control.bytes(VOLUME_START + 4096, 4096) == pattern(1, 4096));
    (pod, driver, control, owed)
}

#[test]
fn what_a_predecessor_owes_on_one_ring_begins_before_what_is_new_on_others() {
    let (pod, mut driver, _control, owed) = owes_on_the_second_ring(30);
    driver.guest.negotiate(&pod.socket(), ALL_FEATURES);
    driver.guest.describe_rings();
    driver.guest.enable_ring(0, true);
    let read = driver.offer(0, 1, T_IN, 8, 4096);
    assert!(
        driver.guest.wait_used(0, QUIET).is_none(),
        "the write that it would see has yet to be carried out again"
    );
    driver.guest.enable_ring(1, true);
    assert_eq!(driver.answer(0, 1, read), (OK, 4097));
    assert_eq!(driver.read(driver.place(1).data, 4096), pattern(1, 4096));
    assert_eq!(driver.answer(1, 0, owed), (OK, 1));
    assert_eq!(driver.write_sectors(8, &pattern(2, 4096)), OK);
    assert_eq!(driver.read_sectors(8, 4096), pattern(2, 4096));
}

/// A frontend that was given what of its predecessor's is under way on the second ring by the record only, and the first ring by a VMM
/// that has yet to describe the second, with a new read there of what is under way.
fn first_ring_comes_alone(seed: u64) -> (Pod<SimulatedMemory>, Driver, Arc<Control>, u16) {
    let (pod, mut driver, control, _) = owes_on_the_second_ring(seed);
    driver.guest.negotiate(&pod.socket(), ALL_FEATURES);
    driver.guest.describe_ring(0);
    driver.guest.enable_ring(0, true);
    let read = driver.offer(0, 1, T_IN, 8, 4096);
    (pod, driver, control, read)
}

/// A VMM may start each ring before it says anything of the next one.
#[test]
fn what_a_predecessor_owes_on_a_ring_that_is_described_late_begins_first_too() {
    let began = Instant::now();
    let (_pod, mut driver, control, read) = first_ring_comes_alone(32);
    let before = control.log().len();
    let early = driver.guest.wait_used(0, QUIET).is_some();
    driver.guest.describe_ring(1);
    driver.guest.enable_ring(1, true);
    if began.elapsed() > OWED_PATIENCE / 2 {
        // A machine that is so slow looks like a VMM that does not come.
        return;
    }
    assert!(!early, "the write that it would see has yet to be carried out again");
    assert_eq!(driver.answer(0, 1, read), (OK, 4097));
    assert!(control.log()[before].operation.writes(), "a read of what it writes came first");
    assert!(driver.guest.wait_used(1, PATIENCE).is_some());
    assert_eq!(driver.status(0), OK);
}

/// As firmware may do, or a kernel with fewer processors.
#[test]
fn a_ring_that_never_comes_holds_others_for_a_moment_only() {
    let (_pod, mut driver, _control, read) = first_ring_comes_alone(33);
    assert_eq!(driver.answer(0, 1, read), (OK, 4097));
    assert_eq!(driver.read_sectors(8, 4096), pattern(1, 4096));
}

/// The same where both rings run before anything can be asked of the device.
#[test]
fn what_a_predecessor_owes_on_any_ring_is_taken_first() {
    let (mut pod, control) = pod(31);
    let mut driver = Driver::connected(&pod);
    control.hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    driver.offer(1, 0, T_OUT, 8, 4096);
    eventually(|| control.waiting() == 1);
    frontend_starts_anew(&mut pod, &mut driver);
    driver.offer(0, 1, T_IN, 8, 4096);
    pod.apply_volume();
    pod.new_channel();
    pod.apply_disk();
    driver.guest.connect(&pod.socket(), ALL_FEATURES);
    // The new channel waits for what the dead one asked for.
    let before = control.log().len();
    control.hold(false);
    for ring in 0..2 {
        assert!(driver.guest.wait_used(ring, PATIENCE).is_some(), "ring {ring}");
    }
    assert!(control.log()[before].operation.writes(), "a read of what it writes came first");
    assert_eq!((driver.status(0), driver.status(1)), (OK, OK));
}

#[test]
fn a_failed_device_answers_and_comes_back() {
    let (mut pod, control) = pod(24);
    let mut driver = Driver::connected(&pod);
    offer_writes(&mut driver, &control, 4);
    pod.disk.failed = true;
    pod.apply_disk();
    for index in 0..4u64 {
        assert!(driver.guest.wait_used((index % 2) as usize, PATIENCE).is_some());
        assert_eq!(driver.status(index), IOERR);
    }
    assert_eq!(driver.request(T_IN, 0, 512).0, IOERR);
    pod.disk.failed = false;
    pod.apply_disk();
    control.hold(false);
    assert_eq!(driver.write_sectors(0, &pattern(5, 512)), OK);
    assert_eq!(driver.read_sectors(0, 512), pattern(5, 512));
}

#[test]
fn a_ring_that_is_stopped_is_drained() {
    let (pod, control) = pod(25);
    let mut driver = Driver::connected(&pod);
    offer_writes(&mut driver, &control, 6);
    let release = Arc::clone(&control);
    let releaser = std::thread::spawn(move || {
        std::thread::sleep(QUIET);
        release.hold(false);
    });
    assert_eq!((driver.guest.stop_ring(0), driver.guest.stop_ring(1)), (3, 3));
    releaser.join().unwrap();
    driver.guest.start_rings();
    collect(&mut driver, &control, 6);
}

/// The VMM takes what a stopped ring gives as its base for done, and on another host there is no record of requests in flight.
#[test]
fn a_ring_that_is_stopped_gives_what_a_predecessor_owes_first() {
    let (mut pod, control) = pod(29);
    let mut driver = Driver::connected(&pod);
    offer_writes(&mut driver, &control, 10);
    // With its host: what the frontend's threads of before are still about is never answered.
    pod.backend = None;
    frontend_starts_anew(&mut pod, &mut driver);
    pod.apply_disk();
    driver.guest.connect(&pod.socket(), ALL_FEATURES);
    let second = Control::new();
    let ssd = RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&second) };
    std::thread::scope(|scope| {
        let pod = &mut pod;
        scope.spawn(move || {
            // By then the first ring stops.
            std::thread::sleep(QUIET);
            pod.start_backend(Box::new(ssd));
            pod.apply_volume();
            pod.new_channel();
        });
        assert_eq!((driver.guest.stop_ring(0), driver.guest.stop_ring(1)), (5, 5));
    });
    for ring in 0..2 {
        assert_eq!(std::iter::from_fn(|| driver.guest.used(ring)).count(), 5, "ring {ring}");
    }
    for index in 0..10 {
        assert_eq!(driver.status(index), OK);
        assert_eq!(second.bytes(VOLUME_START + index * 4096, 4096), pattern(index, 4096));
    }
}

#[test]
fn requests_that_come_before_their_volume_wait_for_it() {
    let (mut pod, control) = pod(28);
    let mut driver = Driver::connected(&pod);
    offer_writes(&mut driver, &control, 6);
    pod.backend = None;
    let second = Control::new();
    pod.start_backend(Box::new(RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&second) }));
    // The frontend sends at once.
    pod.new_channel();
    std::thread::sleep(QUIET);
    pod.apply_volume();
    collect(&mut driver, &second, 6);
}
