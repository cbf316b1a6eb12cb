//! A target of the `vhost-user` driver that is away for longer than it is waited for, and comes back after all.

use std::time::Duration;

use cxl_pool::HardwareMemory;
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::reports::{DeviceReport, Report};
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::ssd::{Outcome, Ssd};

use crate::pod::*;
use crate::vhost_user_ssd::{Bench, Target, connect, pool};

const MIB: u64 = 1 << 20;
const WRITABLE: &str = ",writable=on";

/// Reaps until the driver says of itself what is wanted.
fn until_it_says(bench: &mut Bench, wanted: impl Fn(Option<&str>) -> bool) {
    let mut finished = Vec::new();
    eventually(|| {
        bench.ssd.reap(&mut finished);
        wanted(bench.ssd.failure())
    });
    assert!(finished.is_empty(), "{finished:?}");
}

#[test]
fn a_target_that_comes_back_late_is_used_again_if_it_is_the_same_disk() {
    let mut target = Target::start(8 * MIB, WRITABLE);
    let mut bench = Bench::connect(&target);
    bench.ssd = bench.ssd.waiting_for(Duration::ZERO);
    let verifier = bench.ssd.write_verifier();
    let read = bench.command(0, Operation::Read, 0, 4096);
    target.kill();
    until_it_says(&mut bench, |failure| failure.is_some());
    assert_eq!(bench.run(read), Outcome::Failed);
    // A smaller one is another one. That one is there is seen by whoever connects next.
    target.file.set_len(MIB).unwrap();
    target.restart(WRITABLE);
    drop(connect(&target, &pool()));
    assert!(bench.ssd.failure().is_some());
    target.kill();
    target.file.set_len(8 * MIB).unwrap();
    target.restart(WRITABLE);
    until_it_says(&mut bench, |failure| failure.is_none());
    assert_eq!(bench.run(read), Outcome::Done);
    assert_ne!(bench.ssd.write_verifier(), verifier, "what was not flushed before may be lost");
    // And so on.
    target.kill();
    until_it_says(&mut bench, |failure| failure.is_some());
    assert_eq!(bench.run(read), Outcome::Failed);
    target.restart(WRITABLE);
    until_it_says(&mut bench, |failure| failure.is_none());
    assert_eq!(bench.run(read), Outcome::Done);
}

#[test]
fn the_pod_hears_of_a_target_that_comes_back_late_and_guests_go_on() {
    let mut target = Target::start(VOLUME_START + VOLUME_BYTES, WRITABLE);
    let pool = pool();
    let mut pod: Pod<HardwareMemory> = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    let reporter = Reporter::new().unwrap();
    pod.reporter = Some(reporter.clone());
    pod.start(Box::new(connect(&target, &pool).waiting_for(Duration::from_millis(50))));
    let mut driver = Driver::connected(&pod);
    let (kept, unflushed) = (pattern(1, 64 << 10), pattern(2, 64 << 10));
    assert_eq!(driver.write_sectors(8, &kept), OK);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    assert_eq!(driver.write_sectors(2048, &unflushed), OK);
    let works = |pod: &mut Pod<HardwareMemory>| {
        let telemetry = pod.backend.as_mut().unwrap().telemetry();
        telemetry.devices.iter().any(|device| device.up)
    };
    assert!(works(&mut pod));
    for round in 0..2 {
        target.kill();
        // It does not wait for ever.
        let mut answered = driver.request(T_IN, 8, 4096).0;
        assert_eq!(answered, IOERR, "round {round}");
        let mut reports = Vec::new();
        eventually(|| {
            reports.extend(reporter.take());
            !reports.is_empty()
        });
        assert!(
            matches!(&reports[..], [Report::DeviceFailed { device, .. }] if device == "ssd0"),
            "{reports:?}"
        );
        assert!(!works(&mut pod));
        pod.disk.failed = true;
        pod.apply_disk();
        answered = driver.request(T_IN, 8, 4096).0;
        assert_eq!(answered, IOERR);
        target.restart(WRITABLE);
        reports.clear();
        eventually(|| {
            reports.extend(reporter.take());
            !reports.is_empty()
        });
        assert!(
            matches!(&reports[..], [Report::DeviceBack { device: DeviceReport::Ssd { name, .. } }] if name == "ssd0"),
            "{reports:?}"
        );
        assert!(works(&mut pod));
        pod.disk.failed = false;
        pod.apply_disk();
        assert!(driver.read_sectors(8, 64 << 10) == kept);
        if round == 0 {
            assert_eq!(driver.request(T_FLUSH, 0, 0).0, IOERR, "what was not flushed may be lost with it");
        }
        assert_eq!(driver.write_sectors(2048, &unflushed), OK);
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    }
}
