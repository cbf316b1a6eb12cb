//! A disk whose guest is still on another host, and arrives.

use std::sync::Arc;

use cxl_pool::simulated::SimulatedMemory;

use crate::pod::ram::{Control, idle_pod};
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
