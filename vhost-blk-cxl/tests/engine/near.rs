//! Mirrored disks: reads go to the replica on the guest's own host, as long as others would not be quicker.

use cxl_pool::HostId;
use vhost_blk_cxl::message::Operation;

use crate::pod::mirror::MirrorPod;
use crate::pod::*;

/// The volume lies on the SSDs of some hosts, and its guest is on one of all.
fn pod_near(seed: u64, (places, hosts): (usize, u16), near: u16) -> MirrorPod {
    let mut pod = MirrorPod::new(seed, hosts);
    for index in places..hosts.into() {
        pod.present[index] = false;
        pod.disk.replicas[index].in_sync = false;
    }
    pod.start_frontend();
    pod.frontend.as_mut().unwrap().set_host(HostId::new(near + 2)).unwrap();
    for index in 0..hosts.into() {
        pod.start_backend(index);
    }
    pod.apply_disk();
    pod.until(|pod| pod.dirty_bytes() == 0);
    pod
}

/// The reads that each replica has had since this was asked last.
fn reads(pod: &MirrorPod, before: &mut [usize]) -> Vec<usize> {
    let of =
        |index: usize| pod.controls[index].log().iter().filter(|it| it.operation == Operation::Read).count();
    let since = |(index, before): (usize, &mut usize)| of(index) - std::mem::replace(before, of(index));
    before.iter_mut().enumerate().map(since).collect()
}

#[test]
fn one_read_at_a_time_goes_to_the_replica_that_is_near() {
    let pod = pod_near(61, (2, 2), 1);
    let mut driver = pod.driver();
    let mut before = [0; 2];
    reads(&pod, &mut before);
    for number in 0..100 {
        driver.read_sectors(number * 8, 4096);
    }
    assert_eq!(reads(&pod, &mut before), [0, 100]);
    // Nobody waits for it longer than for the other one.
    pod.controls[1].hold(true);
    for index in 0..24 {
        driver.offer(0, index, T_IN, index * 8, 4096);
    }
    let mut answered = 0;
    eventually(|| {
        answered += usize::from(driver.guest.used(0).is_some());
        answered + pod.controls[1].waiting() == 24
    });
    let shares = reads(&pod, &mut before);
    assert!(shares[0] >= 10 && shares[1] >= 4, "{shares:?}");
    pod.controls[1].hold(false);
    eventually(|| {
        answered += usize::from(driver.guest.used(0).is_some());
        answered == 24
    });
}

#[test]
fn a_replica_that_came_last_is_read_if_it_is_near() {
    let mut pod = pod_near(62, (2, 3), 2);
    let mut driver = pod.driver();
    let mut before = [0; 3];
    reads(&pod, &mut before);
    for number in 0..10 {
        driver.read_sectors(number * 8, 4096);
    }
    assert_eq!(reads(&pod, &mut before), [10, 0, 0]);
    pod.add(2, None);
    pod.in_line();
    reads(&pod, &mut before);
    for number in 0..10 {
        driver.read_sectors(number * 8, 4096);
    }
    assert_eq!(reads(&pod, &mut before), [0, 0, 10]);
    // Its backend begins anew, by another generation of the channel.
    pod.kill(2, || false);
    pod.revive(2);
    pod.in_line();
    eventually(|| {
        reads(&pod, &mut before);
        driver.read_sectors(0, 4096);
        reads(&pod, &mut before) == [0, 0, 1]
    });
}
