//! A disk whose guest is still on another host, and arrives.

use std::sync::Arc;

use cxl_pool::simulated::SimulatedMemory;
use pod_protocol::reports::Report;
use vhost_blk_cxl::message::Operation;

use crate::pod::mirror::MirrorPod;
use crate::pod::ram::{Control, idle_pod, pod};
use crate::pod::*;

/// Where the configuration space says whether writes are kept in a cache.
const WRITEBACK_AT: usize = 32;

fn incoming(seed: u64) -> (Pod<SimulatedMemory>, Arc<Control>) {
    let (mut pod, ssd, control) = idle_pod(seed);
    pod.disk.incoming = true;
    pod.start_backend(ssd);
    pod.start_frontend();
    pod.new_channel();
    // The backend serves the lease over another host's channel for now: it knows nothing of this one.
    pod.apply_disk();
    (pod, control)
}

fn arrives(pod: &mut Pod<SimulatedMemory>) {
    pod.new_lease_generation();
    pod.apply_volume();
    pod.disk.incoming = false;
    pod.apply_disk();
}

#[test]
fn an_incoming_disk_negotiates_and_serves_when_its_guest_is_there() {
    let (mut pod, control) = incoming(1);
    let mut driver = Driver::connected(&pod);
    for index in 0..8 {
        driver.write(driver.place(index).data, &pattern(index, 4096));
        driver.offer((index % 2) as usize, index, T_OUT, index * 8, 4096);
    }
    assert_eq!(driver.guest.wait_used(0, QUIET), None, "another host's frontend may still be writing there");
    assert!(control.log().is_empty());
    assert_eq!(pod.frontend_lease().errors, 0);
    arrives(&mut pod);
    for index in 0..8 {
        assert!(driver.guest.wait_used((index % 2) as usize, PATIENCE).is_some(), "answer {index}");
        assert_eq!(driver.status(index), OK);
        assert_eq!(control.bytes(VOLUME_START + index * 4096, 4096), pattern(index, 4096));
    }
    assert_eq!(driver.read_sectors(0, 4096), pattern(0, 4096));
}

#[test]
fn a_guest_that_does_not_arrive_gets_its_queues_back_as_they_were() {
    let (mut pod, control) = incoming(2);
    let mut driver = Driver::connected(&pod);
    driver.offer(0, 0, T_IN, 0, 4096);
    assert_eq!((driver.guest.stop_ring(0), driver.guest.stop_ring(1)), (0, 0));
    assert!(control.log().is_empty());
    // It comes later.
    driver.guest.start_rings();
    arrives(&mut pod);
    assert!(driver.guest.wait_used(0, PATIENCE).is_some());
    assert_eq!(driver.status(0), OK);
}

#[test]
fn what_the_driver_chose_of_the_cache_on_the_other_host_holds_here() {
    let (mut pod, control) = incoming(3);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.guest.config(60)[WRITEBACK_AT], 1);
    // It chose so while it was being moved.
    pod.disk.write_through = true;
    arrives(&mut pod);
    assert_eq!(driver.guest.config(60)[WRITEBACK_AT], 0);
    assert_eq!(driver.write_sectors(0, &pattern(1, 4096)), OK);
    let writes: Vec<bool> = control
        .log()
        .iter()
        .filter(|command| command.operation.writes())
        .map(|command| command.force_unit_access)
        .collect();
    assert_eq!(writes, [true], "on the medium before it is answered");
}

fn flushes(control: &Control) -> usize {
    control.log().iter().filter(|command| command.operation == Operation::Flush).count()
}

fn stop(driver: &mut Driver) {
    driver.guest.stop_ring(0);
    driver.guest.stop_ring(1);
}

/// The frontend of its next host cannot know what the SSD was to remember.
#[test]
fn what_a_guest_wrote_is_on_the_medium_when_it_may_go_on_elsewhere() {
    let (pod, control) = pod(4);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(0, &pattern(1, 4096)), OK);
    driver.guest.stop_ring(0);
    assert_eq!(flushes(&control), 0, "its other queue runs");
    driver.guest.stop_ring(1);
    assert_eq!(flushes(&control), 1);
    driver.guest.start_rings();
    stop(&mut driver);
    assert_eq!(flushes(&control), 1, "there was nothing to flush");
}

/// Has a guest stop after it wrote something, and something happened to all of its SSDs. Returns whether queues run, and whether it has
/// yet to hear of a loss.
fn stops_after(pod: &mut MirrorPod, happens: impl Fn(&Control)) -> (bool, bool) {
    let mut driver = pod.driver();
    if pod.disk.replicas.len() > 1 && pod.disk.stripe_bytes.is_none() {
        pod.in_line();
    }
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.controls.iter().for_each(|control| happens(control));
    std::thread::scope(|scope| {
        let stopped = scope.spawn(|| stop(&mut driver));
        pod.until(|_| stopped.is_finished());
    });
    pod.control();
    match pod.attached {
        Some(Report::Attachment { running, untold, .. }) => (running, untold),
        _ => panic!("nothing was said of the guest"),
    }
}

#[test]
fn a_loss_that_a_guest_has_yet_to_hear_of_when_it_stops_is_reported() {
    assert_eq!(stops_after(&mut MirrorPod::alone(5, 1), |_| {}), (false, false));
    assert_eq!(stops_after(&mut MirrorPod::alone(6, 1), Control::lose), (false, true));
    assert_eq!(stops_after(&mut MirrorPod::alone(7, 1), |control| control.fail_flushes(true)), (false, true));
    assert_eq!(stops_after(&mut MirrorPod::started(8, 2), |_| {}), (false, false));
    assert_eq!(stops_after(&mut MirrorPod::started(9, 2), Control::lose), (false, true));
    assert_eq!(stops_after(&mut MirrorPod::striped(10, 2, 4096), |_| {}), (false, false));
    assert_eq!(stops_after(&mut MirrorPod::striped(11, 2, 4096), Control::lose), (false, true));
}

#[test]
fn a_guest_hears_where_it_arrives_of_what_was_lost_before() {
    let (mut pod, _control) = incoming(12);
    let mut driver = Driver::connected(&pod);
    driver.offer(0, 0, T_FLUSH, 0, 0);
    pod.disk.untold = true;
    arrives(&mut pod);
    assert!(driver.guest.wait_used(0, PATIENCE).is_some());
    assert_eq!(driver.status(0), IOERR);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK, "it knows");
    // Whatever else is said of the disk.
    pod.disk.failed = true;
    pod.apply_disk();
    pod.disk.failed = false;
    pod.apply_disk();
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
}
