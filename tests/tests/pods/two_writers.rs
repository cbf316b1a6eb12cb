//! A storage daemon stands still with requests in its hands, somebody else goes on in its place, and then it runs again: nothing of what
//! it held reaches an SSD any more.

use std::collections::BTreeSet;
use std::path::Path;

use pod_api::{ByteSize, CreateInstance, CreateVolume, EndpointHealth, Instance, ReplicaState};
use wadi_tests::disk_guest::{Answers, BLOCK_BYTES, BLOCKS, DiskGuest, block, version_of};
use wadi_tests::looks::{in_pool, volume_on};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, Role};
use wadi_tests::stage::rounds;
use wadi_tests::waiting::until;

const ALL_DONE: Answers = Answers { done: BLOCKS, failed: 0 };
const ALL_FAILED: Answers = Answers { done: 0, failed: BLOCKS };

/// An instance on `h1` with a volume of so many replicas and nothing else.
fn create(pod: &Pod, name: &str, volume: &str, replicas: u8) -> Instance {
    let wish = CreateVolume { replicas, ..CreateVolume::new(volume, ByteSize::new(16 << 20)) };
    pod.api().create_volume(&wish).unwrap();
    let (name, host) = (name.to_owned(), "h1".to_owned());
    let request = CreateInstance { name, host, volumes: vec![volume.to_owned()], ..Default::default() };
    pod.create_instance_as(&request).unwrap()
}

/// Waits until all requests of a version lie in the pool's memory, where the frontend puts what it sends.
fn wait_until_sent(pod: &Pod, version: u64) {
    let wanted = &block(0, version)[..16];
    until("the guest's requests in the pool", || {
        let mut found: Vec<Vec<u8>> = in_pool(pod, wanted, BLOCK_BYTES).unwrap();
        found.retain(|bytes| (0..BLOCKS).any(|number| *bytes == block(number, version)));
        found.sort_unstable();
        found.dedup();
        (found.len() == BLOCKS).then_some(())
    });
}

/// Which version of each block an SSD has.
fn versions_on(pod: &Pod, host: &str, ssd: &str) -> Vec<u64> {
    let bytes = volume_on(pod, "vol0", host, ssd).unwrap();
    let blocks = bytes.chunks(BLOCK_BYTES).take(BLOCKS);
    blocks.enumerate().map(|(number, bytes)| version_of(number, bytes)).collect()
}

fn state_of(pod: &Pod, device: &str) -> ReplicaState {
    let volume = pod.api().volume("vol0").unwrap();
    volume.replicas.iter().find(|it| it.device == device).unwrap().state
}

/// Every other time the clock that shows the time of day goes back while a storage backend stands still, so that by it no time has passed.
fn jump_back(pod: &Pod, host: &str, round: u64) {
    if round % 2 == 1 {
        pod.set_clock(&format!("{host}-blk-backend"), "-1d").unwrap();
    }
}

#[test]
fn what_a_guest_was_told_has_failed_is_not_written_afterwards() {
    let mut pod = PodBuilder::new()
        .blk_grace_ms(200)
        .own_clocks()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").ssd("ssd0", "64M"))
        .start()
        .unwrap();
    let instance = create(&pod, "vm1", "vol0", 1);
    let mut guest = DiskGuest::connect(&instance.disks[0].socket);
    for round in 0..2 * u64::from(rounds()) {
        let [first, held, last] = [1, 2, 3].map(|version| 3 * round + version);
        guest.begin_to_write(first);
        assert_eq!(guest.finish(), ALL_DONE);
        pod.daemon("h2", Role::BlkBackend).unwrap().freeze().unwrap();
        jump_back(&pod, "h2", round);
        guest.begin_to_write(held);
        wait_until_sent(&pod, held);
        // The controller waits for the backend no longer.
        assert_eq!(guest.finish(), ALL_FAILED);
        pod.wait_for_health("h2", Role::BlkBackend, EndpointHealth::Fenced);
        assert_eq!(versions_on(&pod, "h2", "ssd0"), [first; BLOCKS]);
        pod.wake_up_to_the_end("h2", Role::BlkBackend).unwrap();
        assert_eq!(versions_on(&pod, "h2", "ssd0"), [first; BLOCKS], "it wrote when it woke up");
        pod.start_daemon("h2", Role::BlkBackend).unwrap();
        pod.wait_until_joined().unwrap();
        // The disk is back a moment later.
        until("the disk", || {
            guest.begin_to_write(last);
            (guest.finish() == ALL_DONE).then_some(())
        });
        assert_eq!(guest.versions(), [last; BLOCKS]);
    }
}

#[test]
fn a_dropped_replica_that_wakes_up_writes_nothing_and_is_brought_in_line() {
    const SSDS: [(&str, &str); 2] = [("h2", "ssd0"), ("h3", "ssd1")];
    let mut pod = PodBuilder::new()
        .own_clocks()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").ssd("ssd0", "64M"))
        .host(HostPlan::new("h3").ssd("ssd1", "64M"))
        .start()
        .unwrap();
    let instance = create(&pod, "vm1", "vol0", 2);
    let mut guest = DiskGuest::connect(&instance.disks[0].socket);
    for round in 0..4 * rounds() as usize {
        let [(host, ssd), (other, _)] = [SSDS[round % 2], SSDS[(round + 1) % 2]];
        let device = format!("{host}/{ssd}");
        let before = guest.newest().to_vec();
        until("some work", || {
            guest.work();
            guest.newest().iter().zip(&before).all(|(now, before)| *now > before + 4).then_some(())
        });
        assert_eq!(guest.finish().failed, 0);

        let held = guest.newest().iter().max().unwrap() + 1;
        pod.daemon(host, Role::BlkBackend).unwrap().freeze().unwrap();
        jump_back(&pod, host, round as u64 / 2);
        guest.begin_to_write(held);
        wait_until_sent(&pod, held);
        until("the replica to be dropped", || {
            (state_of(&pod, &device) == ReplicaState::StaleAway).then_some(())
        });
        assert_eq!(guest.finish(), ALL_DONE);
        // What it holds is older than what the other one has.
        guest.begin_to_write(held + 1);
        assert_eq!(guest.finish(), ALL_DONE);
        let asleep = volume_on(&pod, "vol0", host, ssd).unwrap();
        assert!(versions_on(&pod, host, ssd).iter().all(|version| *version < held), "it held nothing");
        pod.wake_up_to_the_end(host, Role::BlkBackend).unwrap();
        assert!(volume_on(&pod, "vol0", host, ssd).unwrap() == asleep, "it wrote when it woke up");

        // Its next life is brought in line while the guest goes on.
        pod.start_daemon(host, Role::BlkBackend).unwrap();
        until("the replica to be in sync", || {
            guest.work();
            (state_of(&pod, &device) == ReplicaState::InSync).then_some(())
        });
        guest.work();
        assert_eq!(guest.finish().failed, 0);
        let newest = guest.newest().to_vec();
        assert_eq!(SSDS.map(|(host, ssd)| versions_on(&pod, host, ssd)), [newest.clone(), newest.clone()]);
        assert!(
            volume_on(&pod, "vol0", "h2", "ssd0").unwrap() == volume_on(&pod, "vol0", "h3", "ssd1").unwrap(),
            "the replicas hold different data"
        );
        assert_eq!(guest.versions(), newest);
        // It has all of it by itself.
        pod.daemon(other, Role::BlkBackend).unwrap().kill().unwrap();
        assert_eq!(guest.versions(), newest);
        pod.start_daemon(other, Role::BlkBackend).unwrap();
        pod.wait_until_joined().unwrap();
        until("both to be in sync", || {
            SSDS.iter()
                .all(|(host, ssd)| state_of(&pod, &format!("{host}/{ssd}")) == ReplicaState::InSync)
                .then_some(())
        });
    }
}

fn what_an_old_frontend_holds(replicas: u8) {
    let mut pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").ssd("ssd0", "64M"))
        .host(HostPlan::new("h3").vms().ssd("ssd1", "64M"))
        .start()
        .unwrap();
    let instance = create(&pod, "vm1", "vol0", replicas);
    let volume = pod.api().volume("vol0").unwrap();
    let devices: BTreeSet<String> =
        volume.replicas.into_iter().map(|it| it.device).chain([volume.device]).collect();
    assert_eq!(devices.len(), usize::from(replicas));
    let all_have = |pod: &Pod, version| {
        for (host, ssd) in devices.iter().map(|device| device.split_once('/').unwrap()) {
            assert_eq!(versions_on(pod, host, ssd), [version; BLOCKS], "{host}/{ssd}");
        }
    };

    // It stays, and so do the channels between its host and the SSDs.
    let neighbour = create(&pod, "vm2", "vol1", replicas);
    let mut neighbour = DiskGuest::connect(&neighbour.disks[0].socket);
    let socket = instance.disks[0].socket.clone();
    let mut old = DiskGuest::connect(&socket);
    old.begin_to_write(1);
    assert_eq!(old.finish(), ALL_DONE);
    let pid = pod.daemon("h1", Role::BlkFrontend).unwrap().pid();
    pod.daemon("h1", Role::BlkFrontend).unwrap().freeze().unwrap();
    // They lie in the guest's queue, and nobody has seen them yet.
    old.begin_to_write(2);
    neighbour.begin_to_write(1);
    pod.wait_for_health("h1", Role::BlkFrontend, EndpointHealth::Silent);

    let mut new = DiskGuest::connect(&pod.move_by_force("vm1", "h3").unwrap().devices[0].socket);
    assert_eq!(new.versions(), [1; BLOCKS]);
    new.begin_to_write(3);
    assert_eq!(new.finish(), ALL_DONE);
    assert_eq!(old.in_flight(), BLOCKS);
    pod.daemon("h1", Role::BlkFrontend).unwrap().thaw().unwrap();
    // It hears of it in the end, and lets go. Nobody took anything from the daemon itself, which goes on.
    until("the old disk to be gone", || (!Path::new(&socket).exists()).then_some(()));
    pod.wait_for_health("h1", Role::BlkFrontend, EndpointHealth::Joined);
    assert_eq!(pod.daemon("h1", Role::BlkFrontend).unwrap().pid(), pid);
    assert!(pod.daemon("h1", Role::BlkFrontend).unwrap().running());
    assert_eq!(neighbour.finish(), ALL_DONE);
    assert_eq!(old.answers().done, 0, "somebody did what the old frontend asked for");
    assert_eq!(new.versions(), [3; BLOCKS], "the old frontend wrote when it woke up");
    all_have(&pod, 3);
    new.begin_to_write(4);
    assert_eq!(new.finish(), ALL_DONE);
    drop(old);
    assert_eq!(neighbour.versions(), [1; BLOCKS]);

    // It may have the disk again, and nothing of before is in its way.
    drop(new);
    until("room where it was", || pod.api().migrate_instance("vm1", "h1").ok());
    pod.api().abort_migration("vm1").unwrap();
    let mut back = DiskGuest::connect(&pod.move_by_force("vm1", "h1").unwrap().devices[0].socket);
    assert_eq!(back.versions(), [4; BLOCKS]);
    back.begin_to_write(5);
    assert_eq!(back.finish(), ALL_DONE);
    all_have(&pod, 5);
}

#[test]
fn what_an_old_frontend_holds_is_not_written_after_its_guest_was_moved_by_force() {
    what_an_old_frontend_holds(1);
}

#[test]
fn nor_to_any_replica_of_a_mirrored_volume() {
    what_an_old_frontend_holds(2);
}
