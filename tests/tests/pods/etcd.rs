//! A pod whose state is in etcd: its controller is not missed while it is away, as with a file, and finds everything there.

use pod_api::DeviceHealth;
use wadi_tests::disk_guest::{Answers, BLOCKS, DiskGuest};
use wadi_tests::etcd::Etcd;
use wadi_tests::pod::PodBuilder;
use wadi_tests::stage::rounds;
use wadi_tests::waiting::until;

const VOLUME_BYTES: u64 = 64 << 20;

#[test]
fn killed_controller_finds_everything_in_etcd_while_guests_go_on() {
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[("vol0", VOLUME_BYTES, Some("h2/ssd0"))]).unwrap();
    let engines = pod.engines();
    let mut guest = DiskGuest::connect(&instance.disks[0].socket);
    let mut version = 0;
    let mut works = |what: &str| {
        version += 1;
        guest.begin_to_write(version);
        assert_eq!(guest.finish(), Answers { done: BLOCKS, failed: 0 }, "{what}");
        assert_eq!(guest.versions(), [version; BLOCKS], "{what}");
    };
    works("with a file");
    let _etcd = Etcd::instead_of_the_file(&mut pod).unwrap();
    pod.wait_until_joined().unwrap();
    works("with etcd");
    let disks = until("the guest to be known", || {
        let disks = pod.api().instance("vm1").ok()?.disks;
        disks[0].connected.then_some(disks)
    });

    let nics = [("h2", "nic0"), ("h3", "nic1")];
    for round in 0..=rounds() {
        let place = usize::try_from(round).unwrap();
        let (from, to) = (nics[place % 2], nics[(place + 1) % 2]);
        let to = format!("{}/{}", to.0, to.1);
        pod.controller().unwrap().kill().unwrap();
        works("without a controller");
        pod.pull_cable(from.0, from.1).unwrap();
        // It is in office only once the one that was killed counts as gone.
        pod.start_controller().unwrap();
        assert_eq!(pod.api().instance("vm1").unwrap().disks, disks, "nothing was made anew");
        pod.wait_for_nic("vm1", &to).unwrap();
        works("after the failover");
        pod.plug_cable(from.0, from.1).unwrap();
        until("the NIC", || {
            let device = pod.api().device(from.0, from.1).ok()?;
            (device.health == DeviceHealth::Up).then_some(())
        });
    }
    assert_eq!(pod.engines(), engines, "engines were not disturbed");
}
