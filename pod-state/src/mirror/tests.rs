//! What a mirrored volume goes through, one promise each.

use cxl_pool::Role;
use pod_protocol::objects::{DiskObject, Object};

use super::super::model::{MIB, check, devices_of, endpoint, guest, join, options, scrub_all};
use super::super::{Command, Groups, RefusalKind};
use super::*;

fn must(state: &mut State, command: &Command) -> Vec<Effect> {
    let effects = state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
    check(state);
    effects
}

fn join_as(state: &mut State, host: u16, role: Role, incarnation: u64) {
    let id = endpoint(host, role);
    let join = join(host, devices_of(id, true));
    must(state, &Command::Join { endpoint: id, incarnation, join });
    for command in scrub_all(state) {
        must(state, &command);
    }
}

fn create(replicas: u8) -> Command {
    Command::CreateVolume {
        name: "vol".to_owned(),
        size_bytes: 8 * MIB,
        device: None,
        replicas,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    }
}

/// A VM on h1 with a volume on h2 and h3.
fn pod() -> State {
    let mut state = State::new(options(256));
    join_as(&mut state, 1, Role::BlkFrontend, 1);
    join_as(&mut state, 2, Role::BlkBackend, 1);
    join_as(&mut state, 3, Role::BlkBackend, 1);
    must(&mut state, &create(2));
    must(&mut state, &guest("vm", &["vol"]));
    state
}

fn disk(state: &State) -> DiskObject {
    let objects = state.desired(endpoint(1, Role::BlkFrontend)).into_values();
    let disk = objects.into_iter().find_map(|object| match object {
        Object::Disk(disk) => Some(disk),
        _ => None,
    });
    disk.expect("the frontend has a disk")
}

/// Of the replicas by their numbers: in sync, away.
fn seen(state: &State) -> Vec<(bool, bool)> {
    let mut replicas = disk(state).replicas;
    replicas.sort_by_key(|replica| replica.number);
    replicas.into_iter().map(|replica| (replica.in_sync, replica.away)).collect()
}

fn on(state: &State, number: usize) -> u16 {
    state.volume_named("vol").unwrap().replicas[number].device.host.get()
}

fn gone(state: &mut State, number: usize) -> Vec<Effect> {
    let endpoint = endpoint(on(state, number), Role::BlkBackend);
    must(state, &Command::Gone { endpoint })
}

fn failed(state: &State, replica: u32, epoch: u64) -> Command {
    let (endpoint, lease) = (endpoint(1, Role::BlkFrontend), disk(state).lease);
    Command::ReplicaFailed { endpoint, lease, replica, epoch, reason: "it failed a write".to_owned() }
}

fn synced(state: &State, replica: u32, epoch: u64) -> Command {
    let (endpoint, lease) = (endpoint(1, Role::BlkFrontend), disk(state).lease);
    Command::ReplicaSynced { endpoint, lease, replica, epoch }
}

fn kinds(effects: &[Effect]) -> Vec<EventKind> {
    let kind = |effect: &Effect| match effect {
        Effect::Event { kind, .. } => Some(*kind),
        _ => None,
    };
    effects.iter().filter_map(kind).collect()
}

#[test]
fn replicas_lie_on_different_hosts_or_nowhere() {
    let mut state = pod();
    let hosts: BTreeSet<u16> = (0..2).map(|number| on(&state, number)).collect();
    assert_eq!(hosts, [2, 3].into());
    for (replicas, kind) in
        [(0, RefusalKind::InvalidValue), (4, RefusalKind::InvalidValue), (3, RefusalKind::NoRoom)]
    {
        let before = state.clone();
        let command = Command::CreateVolume {
            name: "more".to_owned(),
            size_bytes: 8 * MIB,
            device: None,
            replicas,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        };
        assert_eq!(state.apply(&command).unwrap_err().kind, kind);
        assert_eq!(state, before);
    }
    assert_eq!(seen(&state), [(true, false), (true, false)]);
    let services = state.services(disk(&state).lease);
    assert_eq!(services.len(), 4, "each backend serves the volume and keeps the table: {services:?}");
}

#[test]
fn a_lost_replica_is_dropped_and_the_last_one_is_not() {
    let mut state = pod();
    assert!(kinds(&gone(&mut state, 0)).contains(&EventKind::ReplicaDropped));
    assert_eq!(seen(&state), [(false, true), (true, false)]);
    assert_eq!(disk(&state).epoch, 1);
    let survivor = state.volume_named("vol").unwrap().replicas[1].device.clone();
    let entry = state.volume_table(&survivor).volumes[0].mirror.clone().unwrap();
    assert!(!entry.is_stale() && entry.replicas[0].stale && entry.epoch == 1);
    // What is left of it is waited for, whatever the frontend says.
    gone(&mut state, 1);
    let last = failed(&state, 1, 1);
    must(&mut state, &last);
    assert_eq!(seen(&state), [(false, true), (true, true)]);
    assert!(!disk(&state).failed);
    let host = on(&state, 1);
    let backend = endpoint(host, Role::BlkBackend);
    must(&mut state, &Command::GraceExpired { endpoint: backend, incarnation: 1 });
    assert!(disk(&state).failed);
    // The stale one is no substitute.
    let first = on(&state, 0);
    join_as(&mut state, first, Role::BlkBackend, 2);
    assert_eq!(seen(&state), [(false, false), (true, true)]);
    assert!(disk(&state).failed);
    join_as(&mut state, host, Role::BlkBackend, 2);
    assert!(!disk(&state).failed);
}

#[test]
fn a_silent_replica_is_fenced_before_it_is_dropped() {
    let mut state = pod();
    let backend = endpoint(on(&state, 1), Role::BlkBackend);
    let effects = must(&mut state, &Command::Silent { endpoint: backend });
    assert!(effects.iter().any(|it| it.fenced() == Some(backend)));
    assert_eq!(seen(&state), [(true, false), (true, false)]);
    must(&mut state, &Command::FenceExpired { endpoint: backend, incarnation: 1 });
    assert_eq!(seen(&state), [(true, false), (false, true)]);
}

#[test]
fn what_was_said_of_an_older_epoch_does_not_count() {
    let mut state = pod();
    let command = failed(&state, 1, 0);
    assert_eq!(kinds(&must(&mut state, &command)), [EventKind::ReplicaDropped]);
    assert_eq!((seen(&state), disk(&state).epoch), (vec![(true, false), (false, false)], 1));
    for (replica, epoch) in [(1, 0), (1, 2), (7, 1), (0, 1)] {
        let command = synced(&state, replica, epoch);
        must(&mut state, &command);
        assert_eq!(disk(&state).epoch, 1, "replica {replica} in epoch {epoch}");
    }
    // It says that it is in line, and takes it back: in either order the frontend sees another epoch.
    let (taken_back, late) = (failed(&state, 1, 1), synced(&state, 1, 1));
    let mut other = state.clone();
    must(&mut state, &taken_back);
    must(&mut state, &late);
    assert_eq!((seen(&state)[1], disk(&state).epoch), ((false, false), 2));
    must(&mut other, &late);
    assert_eq!((seen(&other)[1], disk(&other).epoch), ((true, false), 2));
    must(&mut other, &taken_back);
    assert_eq!((seen(&other)[1], disk(&other).epoch), ((false, false), 3));
    // Somebody else's word counts for nothing.
    let lease = disk(&state).lease;
    let stranger = endpoint(2, Role::BlkFrontend);
    let command = Command::ReplicaSynced { endpoint: stranger, lease, replica: 1, epoch: 2 };
    must(&mut state, &command);
    assert_eq!(seen(&state)[1], (false, false));
}

#[test]
fn a_replica_that_is_lost_before_it_is_heard_to_have_everything_is_not_relied_on() {
    let mut state = pod();
    gone(&mut state, 1);
    let host = on(&state, 1);
    join_as(&mut state, host, Role::BlkBackend, 2);
    let late = synced(&state, 1, disk(&state).epoch);
    gone(&mut state, 1);
    let heard = must(&mut state, &late);
    assert_eq!(kinds(&heard), [EventKind::ReplicaSynced, EventKind::ReplicaDropped]);
    assert_eq!((seen(&state), disk(&state).epoch), (vec![(true, false), (false, true)], 3));
}

#[test]
fn a_deleted_mirror_goes_when_all_of_it_is_wiped() {
    let mut state = pod();
    must(&mut state, &Command::DeleteInstance { name: "vm".to_owned(), force: true });
    for device in state.devices.values_mut() {
        if let super::super::Kind::Ssd { keeps_table, .. } = &mut device.kind {
            *keeps_table = true;
        }
    }
    let (id, devices): (VolumeId, Vec<DeviceId>) = {
        let volume = state.volume_named("vol").unwrap();
        (volume.id, volume.devices().cloned().collect())
    };
    must(&mut state, &Command::DeleteVolume { name: "vol".to_owned() });
    for (device, left) in devices.into_iter().zip([1, 0]) {
        assert_eq!(state.volume_table(&device).volumes.len(), 1);
        must(&mut state, &Command::VolumeWiped { device, volume: id });
        assert_eq!(state.volumes.len(), left);
    }
}
