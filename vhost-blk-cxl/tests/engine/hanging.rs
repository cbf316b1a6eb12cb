//! A device that neither answers nor fails, and has no replica.

use std::sync::Arc;
use std::time::Duration;

use cxl_pool::{CreateOptions, Pool};
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::reports::{DeviceReport, Report};

use crate::pod::ram::{Control, RamSsd};
use crate::pod::*;

/// What the backend reports next, when the controller has asked for its counters often enough.
fn next_report(pod: &mut Pod<cxl_pool::HardwareMemory>, reporter: &Reporter) -> Report {
    let mut reports = Vec::new();
    eventually(|| {
        pod.backend.as_mut().unwrap().telemetry();
        reports.extend(reporter.take());
        !reports.is_empty()
    });
    assert_eq!(reports.len(), 1, "{reports:?}");
    reports.remove(0)
}

#[test]
fn a_device_that_hangs_gives_errors_and_is_used_again_when_it_answers() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = CreateOptions { size_bytes: Some(32 << 20), ..CreateOptions::default() };
    let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
    let mut pod = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    let (control, reporter) = (Control::new(), Reporter::new().unwrap());
    pod.reporter = Some(reporter.clone());
    let ram = RamSsd { memory: pool.hardware(), control: Arc::clone(&control) };
    let mut ssd = OpenedSsd::new("ssd0", Box::new(ram));
    ssd.request_timeout = Some(Duration::from_millis(100));
    pod.start_backend_with(vec![ssd]);
    pod.start_frontend();
    pod.new_channel();
    pod.apply_volume();
    pod.apply_disk();
    let mut driver = Driver::new(2, 128);
    driver.guest.connect(&pod.socket(), ALL_FEATURES);
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    control.hold(true);
    driver.write(driver.place(0).data, &pattern(2, 4096));
    let head = driver.offer(0, 0, T_OUT, 8, 4096);
    eventually(|| control.waiting() == 1);
    let report = next_report(&mut pod, &reporter);
    assert!(matches!(&report, Report::DeviceFailed { device, .. } if device == "ssd0"), "{report:?}");
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "the controller has not said what to do");
    pod.disk.failed = true;
    pod.apply_disk();
    assert_eq!(driver.answer(0, 0, head), (IOERR, 1));
    assert_eq!(driver.request(T_IN, 8, 4096).0, IOERR);
    control.hold(false);
    let report = next_report(&mut pod, &reporter);
    assert!(
        matches!(&report, Report::DeviceBack { device: DeviceReport::Ssd { name, .. } } if name == "ssd0"),
        "{report:?}"
    );
    pod.disk.failed = false;
    pod.apply_disk();
    assert_eq!(driver.read_sectors(8, 4096), pattern(2, 4096), "it was carried out late");
    assert_eq!(driver.write_sectors(8, &pattern(3, 4096)), OK);
    assert_eq!(driver.read_sectors(8, 4096), pattern(3, 4096));
}

/// A guest may have so many requests with a device that never answers that there is no place for another one.
#[test]
fn a_failed_disk_answers_however_much_its_device_keeps() {
    const QUEUES: u16 = 4;
    const LENGTH: u32 = 4096;
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = CreateOptions { size_bytes: Some(32 << 20), ..CreateOptions::default() };
    let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
    let mut pod = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    (pod.disk.queues, pod.slots) = (QUEUES, 512);
    let control = Control::new();
    pod.start(Box::new(RamSsd { memory: pool.hardware(), control: Arc::clone(&control) }));
    let mut driver = Driver::new(QUEUES, 512);
    driver.guest.connect(&pod.socket(), ALL_FEATURES);
    control.hold(true);
    // As many as a disk has in flight; eight of them in each place.
    let offered = 512_u64;
    for index in 0..offered {
        let Place { header, data, status } = driver.place(index / 8);
        let more = index % 8 * (16 << 10);
        let place = Place { header: header + more, data: data + more, status: status + more };
        driver.write_header(place, T_OUT, index * 8);
        let pieces = Driver::pieces(place, T_OUT, LENGTH);
        driver.guest.offer((index % u64::from(QUEUES)) as usize, &pieces, None);
    }
    eventually(|| control.waiting() as u64 == offered);
    pod.disk.failed = true;
    pod.apply_disk();
    let mut answered = 0;
    eventually(|| {
        answered += (0..usize::from(QUEUES)).filter(|&queue| driver.guest.used(queue).is_some()).count();
        answered as u64 == offered
    });
    assert_eq!(driver.status(0), IOERR);
    assert_eq!(driver.request(T_IN, 8, LENGTH).0, IOERR);
    assert_eq!(driver.request(T_GET_ID, 0, 20).0, IOERR);
    control.hold(false);
}
