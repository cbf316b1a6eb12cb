//! How a volume moves, one promise each.

use cxl_pool::{HostId, Role};
use pod_protocol::objects::{DiskObject, Object};
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::DeviceReport;
use pod_protocol::volume_table::VolumeTable;

use super::super::model::{MIB, check, devices_of, endpoint, guest, join, options, scrub_all};
use super::super::{Command, Groups, RefusalKind};
use super::*;

fn must(state: &mut State, command: &Command) {
    state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
    check(state);
}

fn ssd(host: u16) -> DeviceId {
    DeviceId { host: HostId::new(host), name: "ssd0".into() }
}

/// A backend comes, with an SSD that keeps a table.
fn join_as(state: &mut State, host: u16, role: Role, incarnation: u64) {
    let id = endpoint(host, role);
    let mut devices = devices_of(id, true);
    let kept = state.devices.contains_key(&ssd(host)).then(|| state.volume_table(&ssd(host)));
    for device in &mut devices {
        if let DeviceReport::Ssd { table, .. } = device {
            *table = Some(kept.clone().unwrap_or_default());
        }
    }
    must(state, &Command::Join { endpoint: id, incarnation, join: join(host, devices) });
    scrub(state);
}

fn scrub(state: &mut State) {
    for command in scrub_all(state) {
        must(state, &command);
    }
}

/// A volume on h2.
fn create(name: &str) -> Command {
    Command::CreateVolume {
        name: name.to_owned(),
        size_bytes: 8 * MIB,
        device: Some(ssd(2)),
        replicas: 1,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    }
}

/// A VM on h1 with a volume on h2; h3 has an SSD too.
fn pod(in_use: bool) -> State {
    let mut state = State::new(options(256));
    join_as(&mut state, 1, Role::BlkFrontend, 1);
    join_as(&mut state, 2, Role::BlkBackend, 1);
    join_as(&mut state, 3, Role::BlkBackend, 1);
    must(&mut state, &create("vol"));
    if in_use {
        must(&mut state, &guest("vm", &["vol"]));
    }
    state
}

fn volume(state: &State) -> &Volume {
    state.volume_named("vol").unwrap()
}

fn disk(state: &State) -> DiskObject {
    let objects = state.desired(endpoint(1, Role::BlkFrontend)).into_values();
    let disk = objects.into_iter().find_map(|object| match object {
        Object::Disk(disk) => Some(disk),
        _ => None,
    });
    disk.expect("the frontend has a disk")
}

fn add(device: Option<u16>, replaces: Option<u16>) -> Command {
    Command::AddReplica { name: "vol".to_owned(), device: device.map(ssd), replaces: replaces.map(ssd) }
}

fn remove(host: u16) -> Command {
    Command::RemoveReplica { name: "vol".to_owned(), device: ssd(host) }
}

fn synced(state: &State, replica: u32) -> Command {
    let (endpoint, lease, epoch) = (endpoint(1, Role::BlkFrontend), disk(state).lease, volume(state).epoch);
    Command::ReplicaSynced { endpoint, lease, replica, epoch }
}

fn left(state: &State, replica: u32) -> Command {
    let (endpoint, lease, epoch) = (endpoint(1, Role::BlkFrontend), disk(state).lease, volume(state).epoch);
    Command::ReplicaLeft { endpoint, lease, replica, epoch }
}

/// Of the replicas by their numbers: number, in sync, leaving.
fn seen(state: &State) -> Vec<(u32, bool, bool)> {
    let mut replicas = disk(state).replicas;
    replicas.sort_by_key(|replica| replica.number);
    replicas.into_iter().map(|it| (it.number, it.in_sync, it.leaving)).collect()
}

fn kept(state: &State, host: u16) -> VolumeTable {
    state.volume_table(&ssd(host))
}

#[test]
fn another_ssd_of_a_host_with_a_fitting_one_is_no_place() {
    let mut state = pod(true);
    let id = endpoint(4, Role::BlkBackend);
    let mut other = super::super::model::ssd("large", 4096);
    if let DeviceReport::Ssd { block_bytes, .. } = &mut other {
        *block_bytes = 4096;
    }
    // One that fits, and so has its host looked at. What is on it makes it less free than the other.
    let devices = vec![super::super::model::ssd("fits", 64), other];
    must(&mut state, &Command::Join { endpoint: id, incarnation: 1, join: join(4, devices) });
    let fits = DeviceId { host: HostId::new(4), name: "fits".into() };
    must(
        &mut state,
        &Command::CreateVolume {
            name: "other".to_owned(),
            size_bytes: MIB,
            device: Some(fits),
            replicas: 1,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        },
    );
    must(&mut state, &Command::Drain { host: HostId::new(3), device: None, on: true });
    must(&mut state, &add(None, None));
    let names: Vec<&str> = volume(&state).devices().map(|ssd| ssd.name.as_str()).collect();
    assert_eq!(names, ["ssd0", "fits"]);
}

#[test]
fn a_volume_in_use_moves_in_steps_and_its_old_place_is_wiped() {
    let mut state = pod(true);
    assert!(seen(&state).is_empty());
    must(&mut state, &add(None, Some(2)));
    scrub(&mut state);
    assert_eq!(seen(&state), [(0, true, false), (1, false, false)]);
    // Too early.
    let early = left(&state, 0);
    must(&mut state, &early);
    assert_eq!(seen(&state), [(0, true, false), (1, false, false)]);
    let done = synced(&state, 1);
    must(&mut state, &done);
    assert_eq!(seen(&state), [(0, true, true), (1, true, false)]);
    assert!(kept(&state, 2).volumes[0].mirror.as_ref().unwrap().replicas.iter().all(|member| !member.stale));
    let outdated = Command::ReplicaLeft {
        endpoint: endpoint(1, Role::BlkFrontend),
        lease: disk(&state).lease,
        replica: 0,
        epoch: 0,
    };
    must(&mut state, &outdated);
    assert_eq!(seen(&state), [(0, true, true), (1, true, false)], "it spoke of an older epoch");
    let heard = left(&state, 0);
    must(&mut state, &heard);
    assert_eq!(seen(&state), [(0, false, true), (1, true, false)]);
    let late = synced(&state, 0);
    must(&mut state, &late);
    assert_eq!(seen(&state), [(0, false, true), (1, true, false)], "it does not come back");
    let gone = left(&state, 0);
    must(&mut state, &gone);
    assert!(seen(&state).is_empty());
    assert_eq!(volume(&state).devices().collect::<Vec<_>>(), [&ssd(3)]);
    assert!(kept(&state, 2).volumes[0].deleted && !kept(&state, 3).volumes[0].deleted);
    // Its place is nobody's until it was wiped, also after a restart.
    join_as(&mut state, 2, Role::BlkBackend, 2);
    assert_eq!(state.used_bytes(&ssd(2)), 8 * MIB);
    assert_eq!(state.apply(&add(Some(2), None)).unwrap_err().kind, RefusalKind::InvalidValue);
    let id = volume(&state).id;
    must(&mut state, &Command::VolumeWiped { device: ssd(2), volume: id });
    assert_eq!(state.used_bytes(&ssd(2)), 0);
    // And back, under another number.
    must(&mut state, &add(Some(2), Some(3)));
    assert_eq!(seen(&state), [(1, true, false), (2, false, false)]);
}

/// The place is wiped as far as the volume reaches.
#[test]
fn a_volume_does_not_grow_before_the_place_that_it_left_was_wiped() {
    let mut state = pod(true);
    state.options.protocol_minor = Protocol::DECIDES_BY_MORE;
    must(&mut state, &create("behind"));
    must(&mut state, &add(None, Some(2)));
    scrub(&mut state);
    let done = synced(&state, 1);
    must(&mut state, &done);
    for _ in 0..2 {
        let heard = left(&state, 0);
        must(&mut state, &heard);
    }
    let grow = Command::ChangeVolume {
        name: "vol".to_owned(),
        size_bytes: Some(32 * MIB),
        qos: None,
        groups: None,
        read_only: None,
    };
    assert_eq!(state.apply(&grow).unwrap_err().kind, RefusalKind::Busy);
    let id = volume(&state).id;
    must(&mut state, &Command::VolumeWiped { device: ssd(2), volume: id });
    must(&mut state, &grow);
}

#[test]
fn a_move_can_be_called_off() {
    let mut state = pod(true);
    must(&mut state, &add(Some(3), Some(2)));
    assert_eq!(state.apply(&add(None, None)).unwrap_err().kind, RefusalKind::Busy);
    assert_eq!(state.apply(&remove(2)).unwrap_err().kind, RefusalKind::InvalidValue, "nobody else has it");
    must(&mut state, &remove(3));
    let late = synced(&state, 1);
    must(&mut state, &late);
    assert_eq!(seen(&state), [(0, true, false), (1, false, true)]);
    let gone = left(&state, 1);
    must(&mut state, &gone);
    assert_eq!(volume(&state).devices().collect::<Vec<_>>(), [&ssd(2)]);
}

/// What is told of a command.
fn told(state: &mut State, command: &Command) -> Vec<EventKind> {
    let effects = state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
    check(state);
    let kind = |effect: Effect| match effect {
        Effect::Event { kind, .. } => Some(kind),
        _ => None,
    };
    effects.into_iter().filter_map(kind).collect()
}

#[test]
fn a_move_is_told_of_as_one() {
    let mut state = pod(true);
    assert_eq!(told(&mut state, &add(Some(3), Some(2))), [EventKind::MigrationPrepared]);
    let mut called_off = state.clone();
    assert_eq!(told(&mut called_off, &remove(3)), [EventKind::MigrationAborted]);
    let done = synced(&state, 1);
    assert_eq!(told(&mut state, &done), [EventKind::Migrated]);
    // The new place is lost before the old one has gone.
    let mut lost = state.clone();
    let gone = told(&mut lost, &Command::Gone { endpoint: endpoint(3, Role::BlkBackend) });
    assert!(gone.contains(&EventKind::MigrationAborted), "{gone:?}");
    for expected in [EventKind::ReplicaDropped, EventKind::VolumeChanged] {
        let step = left(&state, 0);
        assert_eq!(told(&mut state, &step), [expected]);
    }
    // A mirror that is made and unmade moves nowhere.
    let mut mirror = pod(true);
    assert_eq!(told(&mut mirror, &add(Some(3), None)), [EventKind::VolumeChanged]);
    let done = synced(&mirror, 1);
    assert_eq!(told(&mut mirror, &done), [EventKind::ReplicaSynced]);
    assert_eq!(told(&mut mirror, &remove(2)), [EventKind::VolumeChanged]);
}

#[test]
fn a_mirror_is_made_and_unmade_while_it_is_used() {
    let mut state = pod(true);
    must(&mut state, &add(None, None));
    let done = synced(&state, 1);
    must(&mut state, &done);
    assert_eq!(seen(&state), [(0, true, false), (1, true, false)]);
    // The one that is to go is the last that works: it stays until the other one has everything.
    must(&mut state, &remove(2));
    must(&mut state, &Command::Gone { endpoint: endpoint(3, Role::BlkBackend) });
    let heard = left(&state, 0);
    must(&mut state, &heard);
    assert_eq!(seen(&state), [(0, true, true), (1, false, false)]);
    join_as(&mut state, 3, Role::BlkBackend, 2);
    let done = synced(&state, 1);
    must(&mut state, &done);
    for _ in 0..2 {
        let step = left(&state, 0);
        must(&mut state, &step);
    }
    assert_eq!(volume(&state).devices().collect::<Vec<_>>(), [&ssd(3)]);
}

#[test]
fn what_nobody_uses_is_not_waited_for() {
    let mut state = pod(false);
    must(&mut state, &add(None, Some(2)));
    assert!(volume(&state).replicas[1].stale);
    must(&mut state, &remove(3));
    assert_eq!(volume(&state).devices().collect::<Vec<_>>(), [&ssd(2)]);
    // A backend that is over has let go of everything.
    let mut state = pod(true);
    must(&mut state, &add(None, Some(2)));
    let done = synced(&state, 1);
    must(&mut state, &done);
    must(&mut state, &Command::Gone { endpoint: endpoint(2, Role::BlkBackend) });
    assert_eq!(volume(&state).devices().collect::<Vec<_>>(), [&ssd(3)]);
    assert_eq!(state.used_bytes(&ssd(2)), 8 * MIB, "it has yet to be wiped");
    // With its volume its place goes, when it was wiped.
    must(&mut state, &Command::DeleteInstance { name: "vm".to_owned(), force: true });
    must(&mut state, &Command::DeleteVolume { name: "vol".to_owned() });
    let id = *state.volumes.keys().next().unwrap();
    must(&mut state, &Command::VolumeWiped { device: ssd(3), volume: id });
    assert_eq!(state.volumes.len(), 1);
    join_as(&mut state, 2, Role::BlkBackend, 2);
    must(&mut state, &Command::VolumeWiped { device: ssd(2), volume: id });
    assert!(state.volumes.is_empty());
}

#[test]
fn a_place_that_does_not_fit_is_refused() {
    let mut state = pod(true);
    for (refused, kind) in [
        (add(Some(2), None), RefusalKind::InvalidValue),
        (add(Some(9), None), RefusalKind::NotFound),
        (add(None, Some(3)), RefusalKind::NotFound),
        (remove(3), RefusalKind::NotFound),
        (remove(2), RefusalKind::InvalidValue),
    ] {
        let before = state.clone();
        assert_eq!(state.apply(&refused).unwrap_err().kind, kind, "{refused:?}");
        assert_eq!(state, before);
    }
    let (name, size_bytes) = ("large".to_owned(), 28 * MIB);
    must(
        &mut state,
        &Command::CreateVolume {
            name,
            size_bytes,
            device: Some(ssd(3)),
            replicas: 1,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        },
    );
    assert_eq!(state.apply(&add(Some(3), None)).unwrap_err().kind, RefusalKind::NoRoom);
    assert_eq!(state.apply(&add(None, None)).unwrap_err().kind, RefusalKind::NoRoom);
}

/// A mirror on h2 and h3, of which what lies on h2 is to be on h4, and has been brought there.
fn moved_to_h4() -> State {
    let mut state = pod(true);
    let (endpoint, devices) = (endpoint(4, Role::BlkBackend), vec![super::super::model::ssd("ssd0", 64)]);
    must(&mut state, &Command::Join { endpoint, incarnation: 1, join: join(4, devices) });
    must(&mut state, &add(Some(3), None));
    let done = synced(&state, 1);
    must(&mut state, &done);
    must(&mut state, &add(Some(4), Some(2)));
    let done = synced(&state, 2);
    must(&mut state, &done);
    assert_eq!(seen(&state), [(0, true, true), (1, true, false), (2, true, false)]);
    state
}

fn failed(state: &State, replica: u32) -> Command {
    let (endpoint, lease, epoch) = (endpoint(1, Role::BlkFrontend), disk(state).lease, volume(state).epoch);
    Command::ReplicaFailed { endpoint, lease, replica, epoch, reason: "a test".to_owned() }
}

fn lies_on(state: &State) -> Vec<u16> {
    volume(state).devices().map(|ssd| ssd.host.get()).collect()
}

#[test]
fn an_old_place_stays_while_the_new_one_has_failed() {
    // Before and after the frontend has heard that it is to go.
    for heard in [false, true] {
        let mut state = moved_to_h4();
        if heard {
            let heard = left(&state, 0);
            must(&mut state, &heard);
        }
        let late = left(&state, 0);
        let fails = failed(&state, 2);
        must(&mut state, &fails);
        assert_eq!(seen(&state), [(0, !heard, false), (1, true, false), (2, false, false)]);
        must(&mut state, &late);
        assert_eq!(seen(&state), [(0, !heard, false), (1, true, false), (2, false, false)], "an older epoch");
        if heard {
            let back = synced(&state, 0);
            must(&mut state, &back);
        }
        assert_eq!(state.apply(&add(None, Some(3))).unwrap_err().kind, RefusalKind::Busy, "it moves still");
        // Once the new one has everything again, it goes.
        let mut goes_on = state.clone();
        let done = synced(&goes_on, 2);
        must(&mut goes_on, &done);
        assert_eq!(seen(&goes_on), [(0, true, true), (1, true, false), (2, true, false)]);
        for _ in 0..2 {
            let step = left(&goes_on, 0);
            must(&mut goes_on, &step);
        }
        assert_eq!(lies_on(&goes_on), [3, 4]);
        // It moves no more; what it had on h2 is not wiped yet.
        assert_eq!(goes_on.apply(&add(None, Some(3))).unwrap_err().kind, RefusalKind::NoRoom);
        // Called off, it has as many replicas as before.
        must(&mut state, &remove(4));
        let gone = left(&state, 2);
        must(&mut state, &gone);
        assert_eq!(seen(&state), [(0, true, false), (1, true, false)]);
        assert_eq!(lies_on(&state), [2, 3]);
    }
}

#[test]
fn a_new_place_that_dies_has_the_old_one_stay() {
    let mut state = moved_to_h4();
    must(&mut state, &Command::Gone { endpoint: endpoint(4, Role::BlkBackend) });
    assert_eq!(seen(&state), [(0, true, false), (1, true, false), (2, false, false)]);
    must(&mut state, &remove(4));
    assert_eq!(lies_on(&state), [2, 3], "a backend that is over has let go of everything");
}

#[test]
fn a_move_can_be_called_off_as_long_as_the_old_place_is_there() {
    for heard in [false, true] {
        let mut state = moved_to_h4();
        if heard {
            let heard = left(&state, 0);
            must(&mut state, &heard);
        }
        must(&mut state, &remove(4));
        assert_eq!(seen(&state), [(0, !heard, false), (1, true, false), (2, true, true)]);
        for _ in 0..2 {
            let step = left(&state, 2);
            must(&mut state, &step);
        }
        assert_eq!(lies_on(&state), [2, 3]);
    }
    // Also where nobody else has what it has.
    let mut state = pod(true);
    must(&mut state, &add(Some(3), Some(2)));
    let done = synced(&state, 1);
    must(&mut state, &done);
    must(&mut state, &remove(3));
    assert_eq!(seen(&state), [(0, true, false), (1, true, true)]);
    for _ in 0..2 {
        let step = left(&state, 1);
        must(&mut state, &step);
    }
    assert_eq!(lies_on(&state), [2]);
}

#[test]
fn what_is_to_go_in_any_case_does_not_stay() {
    let mut state = moved_to_h4();
    must(&mut state, &remove(2));
    let fails = failed(&state, 2);
    must(&mut state, &fails);
    assert_eq!(seen(&state), [(0, true, true), (1, true, false), (2, false, false)]);
}
