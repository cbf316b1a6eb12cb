//! How a volume moves between two SSDs of its host, one promise each.

use std::collections::BTreeMap;

use cxl_pool::{EndpointId, Role};
use pod_protocol::ids::{LeaseGeneration, LeaseId, PlaceId};
use pod_protocol::objects::{DiskObject, Object, VolumeObject};
use pod_protocol::reports::DeviceReport;

use super::super::model::{MIB, check, endpoint, guest, join, options, scrub_all, ssd};
use super::super::{Command, Groups, Options};
use super::*;

const FRONTEND: EndpointId = EndpointId::new(HostId::new(1), Role::BlkFrontend);
const BACKEND: EndpointId = EndpointId::new(HostId::new(2), Role::BlkBackend);

fn must(state: &mut State, command: &Command) {
    state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
    check(state);
}

fn on(host: u16, name: &str) -> DeviceId {
    DeviceId { host: HostId::new(host), name: name.into() }
}

fn scrub(state: &mut State) {
    for command in scrub_all(state) {
        must(state, &command);
    }
}

/// A backend comes, with two SSDs that keep tables.
fn comes(state: &mut State, host: u16, incarnation: u64) {
    let mut devices = vec![ssd("ssd0", 64), ssd("ssd1", 64)];
    for device in &mut devices {
        if let DeviceReport::Ssd { table, name, .. } = device {
            *table = Some(state.volume_table(&on(host, name)));
        }
    }
    let id = endpoint(host, Role::BlkBackend);
    must(state, &Command::Join { endpoint: id, incarnation, join: join(host, devices) });
    scrub(state);
}

/// A VM on h1, and h2 with two SSDs.
fn pod() -> State {
    let mut state = State::new(Options { protocol_minor: Protocol::MOVES_WITHIN_HOSTS, ..options(256) });
    must(&mut state, &Command::Join { endpoint: FRONTEND, incarnation: 1, join: join(1, Vec::new()) });
    comes(&mut state, 2, 1);
    state
}

fn create(state: &mut State, replicas: u8) {
    let command = Command::CreateVolume {
        name: "vol".to_owned(),
        size_bytes: 8 * MIB,
        device: Some(on(2, "ssd0")),
        replicas,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    must(state, &command);
    must(state, &guest("vm", &["vol"]));
    scrub(state);
}

/// The volume of a VM, on the first SSD of h2.
fn pod_with_volume() -> State {
    let mut state = pod();
    create(&mut state, 1);
    state
}

/// The same, striped over h2 and h3.
fn pod_with_columns() -> State {
    let mut state = pod();
    comes(&mut state, 3, 1);
    let (name, size_bytes) = ("vol".to_owned(), 8 * MIB);
    let groups = Groups::default();
    must(
        &mut state,
        &Command::CreateStriped {
            name,
            size_bytes,
            columns: 2,
            stripe_bytes: 64 << 10,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups,
        },
    );
    must(&mut state, &guest("vm", &["vol"]));
    scrub(&mut state);
    state
}

fn volume(state: &State) -> &Volume {
    state.volume_named("vol").unwrap()
}

fn disk(state: &State) -> DiskObject {
    let mut objects = state.desired(FRONTEND).into_values();
    let disk = objects.find_map(|object| if let Object::Disk(disk) = object { Some(disk) } else { None });
    disk.expect("the frontend has a disk")
}

fn served(state: &State) -> Vec<VolumeObject> {
    let objects = state.desired(BACKEND).into_values();
    objects.filter_map(|it| if let Object::Volume(volume) = it { Some(volume) } else { None }).collect()
}

/// What the backend of h2 serves: by which name, of which generation, where.
fn names(state: &State) -> Vec<(PlaceNumber, u16, String)> {
    served(state).into_iter().map(|it| (it.place, it.generation.get(), it.ssd)).collect()
}

fn name(place: PlaceNumber, generation: u16, ssd: &str) -> (PlaceNumber, u16, String) {
    (place, generation, ssd.to_owned())
}

fn moves(from: DeviceId, to: Option<DeviceId>) -> Command {
    Command::AddReplica { name: "vol".to_owned(), device: to, replaces: Some(from) }
}

fn says(state: &mut State, replica: u32, says: fn(EndpointId, LeaseId, u32, u64) -> Command) {
    let command = says(FRONTEND, disk(state).lease, replica, volume(state).epoch);
    must(state, &command);
}

fn synced(endpoint: EndpointId, lease: LeaseId, replica: u32, epoch: u64) -> Command {
    Command::ReplicaSynced { endpoint, lease, replica, epoch }
}

fn left(endpoint: EndpointId, lease: LeaseId, replica: u32, epoch: u64) -> Command {
    Command::ReplicaLeft { endpoint, lease, replica, epoch }
}

const FIRST: PlaceNumber = PlaceNumber::FIRST;
const SECOND: PlaceNumber = PlaceNumber::SECOND;

#[test]
fn both_places_of_a_move_are_told_apart_and_the_one_that_stays_is_the_first_again() {
    let mut state = pod_with_volume();
    assert_eq!((names(&state), disk(&state).number), (vec![name(FIRST, 1, "ssd0")], Some(0)));
    for (old, (from, to)) in [(0, ("ssd0", "ssd1")), (1, ("ssd1", "ssd0"))] {
        let generation = 1 + u16::try_from(old).unwrap();
        must(&mut state, &moves(on(2, from), Some(on(2, to))));
        let both = vec![name(FIRST, generation, from), name(SECOND, generation, to)];
        assert_eq!(names(&state), both);
        let told: BTreeMap<u32, PlaceNumber> =
            disk(&state).replicas.iter().map(|it| (it.number, it.place)).collect();
        assert_eq!((told, disk(&state).number), (BTreeMap::from([(old, FIRST), (old + 1, SECOND)]), None));
        says(&mut state, old + 1, synced);
        // Both have everything, and both must have heard before the frontend does.
        let services: Vec<PlaceId> =
            state.services(disk(&state).lease).into_iter().filter_map(volume_of).collect();
        assert_eq!(services.iter().map(|it| it.place).collect::<Vec<_>>(), [FIRST, SECOND]);
        says(&mut state, old, left);
        assert_eq!(names(&state), both, "it may be read yet");
        says(&mut state, old, left);
        // What was sent to either of them before is of an older generation.
        assert_eq!(names(&state), [name(FIRST, generation + 1, to)]);
        let alone = disk(&state);
        assert_eq!((alone.replicas.len(), alone.number), (0, Some(old + 1)));
        assert_eq!(alone.route.generation, LeaseGeneration::new(generation + 1));
        let (kept, id) = (state.volume_table(&on(2, from)), volume(&state).id);
        assert!(kept.volumes[0].deleted, "{kept:?}");
        must(&mut state, &Command::VolumeWiped { device: on(2, from), volume: id });
    }
}

fn volume_of((_, id): (EndpointId, pod_protocol::objects::ObjectId)) -> Option<PlaceId> {
    if let pod_protocol::objects::ObjectId::Volume(id) = id { Some(id) } else { None }
}

#[test]
fn a_move_that_is_called_off_leaves_a_name_that_nobody_takes_for_another() {
    let mut state = pod_with_volume();
    for generation in 1..4 {
        must(&mut state, &moves(on(2, "ssd0"), Some(on(2, "ssd1"))));
        assert_eq!(names(&state), [name(FIRST, generation, "ssd0"), name(SECOND, generation, "ssd1")]);
        must(&mut state, &Command::RemoveReplica { name: "vol".to_owned(), device: on(2, "ssd1") });
        let number = volume(&state).next_number - 1;
        says(&mut state, number, left);
        assert_eq!(names(&state), [name(FIRST, generation + 1, "ssd0")]);
        let id = volume(&state).id;
        must(&mut state, &Command::VolumeWiped { device: on(2, "ssd1"), volume: id });
    }
}

#[test]
fn a_column_moves_on_its_host() {
    let mut state = pod_with_columns();
    let start = volume(&state).replicas.iter().find(|it| it.device.host == HostId::new(2)).unwrap().clone();
    let to = on(2, if start.device.name == "ssd0" { "ssd1" } else { "ssd0" });
    must(&mut state, &moves(start.device.clone(), Some(to.clone())));
    let beside = disk(&state).beside.unwrap();
    assert_eq!((beside.place, beside.number, beside.leaving), (SECOND, start.number, false));
    says(&mut state, start.number, synced);
    let now = disk(&state);
    let column = now.replicas.iter().find(|it| it.number == start.number).unwrap();
    assert_eq!((column.place, now.beside.map(|it| (it.place, it.leaving))), (SECOND, Some((FIRST, true))));
    says(&mut state, start.number, left);
    assert_eq!(names(&state), [name(FIRST, 2, &to.name)]);
    let now = disk(&state);
    assert!(now.replicas.iter().all(|it| it.place == FIRST && it.route.generation.get() == 2));
}

#[test]
fn no_two_places_stay_on_one_host() {
    let mut state = pod();
    comes(&mut state, 3, 1);
    create(&mut state, 2);
    let other = volume(&state).replicas[1].device.clone();
    let beside = on(3, if other.name == "ssd0" { "ssd1" } else { "ssd0" });
    let refusals = [
        // One more beside another, or in place of one of another host.
        Command::AddReplica { name: "vol".to_owned(), device: Some(on(2, "ssd1")), replaces: None },
        moves(on(2, "ssd0"), Some(beside.clone())),
        // To where it is.
        moves(on(2, "ssd0"), Some(on(2, "ssd0"))),
    ];
    for refused in refusals {
        let before = state.clone();
        assert_eq!(state.apply(&refused).unwrap_err().kind, RefusalKind::InvalidValue, "{refused:?}");
        assert_eq!(state, before);
    }
    let none = Command::AddReplica { name: "vol".to_owned(), device: None, replaces: None };
    assert_eq!(state.apply(&none).unwrap_err().kind, RefusalKind::NoRoom);
    // In place of the one that is there.
    must(&mut state, &moves(other.clone(), Some(beside.clone())));
    says(&mut state, 2, synced);
    for _ in 0..2 {
        says(&mut state, 1, left);
    }
    let lies: Vec<&DeviceId> = volume(&state).devices().collect();
    assert_eq!(lies, [&on(2, "ssd0"), &beside]);
    // What was left there has yet to be wiped.
    assert_eq!(state.apply(&moves(beside.clone(), Some(other))).unwrap_err().kind, RefusalKind::InvalidValue);
}

#[test]
fn an_ssd_that_is_drained_is_left_for_the_other_of_its_host_and_a_host_is_not() {
    let mut state = pod_with_volume();
    let drain = |device: Option<&str>| Command::Drain {
        host: HostId::new(2),
        device: device.map(str::to_owned),
        on: true,
    };
    must(&mut state, &drain(None));
    assert_eq!(volume(&state).replicas.len(), 1, "there is nowhere to go");
    must(&mut state, &Command::Drain { host: HostId::new(2), device: None, on: false });
    must(&mut state, &drain(Some("ssd0")));
    assert_eq!(volume(&state).devices().collect::<Vec<_>>(), [&on(2, "ssd0"), &on(2, "ssd1")]);
    says(&mut state, 1, synced);
    for _ in 0..2 {
        says(&mut state, 0, left);
    }
    assert_eq!(names(&state), [name(FIRST, 2, "ssd1")]);
}

#[test]
fn moves_end_before_an_older_member_takes_part() {
    let older = |state: &State| state.speaking(0);
    for has_all in [false, true] {
        let mut state = pod_with_volume();
        must(&mut state, &moves(on(2, "ssd0"), Some(on(2, "ssd1"))));
        if has_all {
            says(&mut state, 1, synced);
        }
        let command = older(&state);
        must(&mut state, &command);
        let stays = if has_all { "ssd1" } else { "ssd0" };
        assert_eq!(names(&state), [name(FIRST, 2, stays)]);
        let kept = serde_json::to_string(&state).unwrap();
        assert!(!kept.contains("\"place\""), "an older controller does not know what to make of it: {kept}");
        let refused = state.apply(&moves(on(2, stays), None)).unwrap_err();
        assert_eq!(refused.kind, RefusalKind::NoRoom, "{refused}");
        let other = on(2, if has_all { "ssd0" } else { "ssd1" });
        let id = volume(&state).id;
        must(&mut state, &Command::VolumeWiped { device: other.clone(), volume: id });
        assert_eq!(state.apply(&moves(on(2, stays), Some(other))).unwrap_err().kind, RefusalKind::Busy);
    }
    let mut state = pod_with_columns();
    let from = volume(&state).replicas[0].clone();
    must(
        &mut state,
        &Command::Drain { host: from.device.host, device: Some(from.device.name.to_string()), on: true },
    );
    says(&mut state, from.number, synced);
    let command = older(&state);
    must(&mut state, &command);
    assert!(volume(&state).beside.is_none() && volume(&state).replicas[0].device != from.device);
    assert!(!serde_json::to_string(&state).unwrap().contains("\"place\""));
}

fn failed(endpoint: EndpointId, lease: LeaseId, replica: u32, epoch: u64) -> Command {
    Command::ReplicaFailed { endpoint, lease, replica, epoch, reason: "it failed a write".to_owned() }
}

#[test]
fn of_two_places_of_which_one_may_stay_the_one_goes_that_lacks_something() {
    // The new one has not got it yet. That another host has everything does not make it a replica.
    let mut state = pod();
    comes(&mut state, 3, 1);
    create(&mut state, 2);
    let before: Vec<DeviceId> = volume(&state).devices().cloned().collect();
    must(&mut state, &moves(on(2, "ssd0"), Some(on(2, "ssd1"))));
    let command = state.speaking(0);
    must(&mut state, &command);
    assert!(volume(&state).devices().eq(&before), "{:?}", volume(&state));
    // The new one had it, and has failed since. The old one has it still, and stays.
    for called_off in [false, true] {
        let mut state = pod_with_volume();
        must(&mut state, &moves(on(2, "ssd0"), Some(on(2, "ssd1"))));
        says(&mut state, 1, synced);
        says(&mut state, 1, failed);
        let has_all = |it: &Replica| (it.number, !it.stale, it.leaving);
        let replicas: Vec<_> = volume(&state).replicas.iter().map(has_all).collect();
        assert_eq!(replicas, [(0, true, false), (1, false, false)]);
        if called_off {
            must(&mut state, &Command::RemoveReplica { name: "vol".to_owned(), device: on(2, "ssd1") });
            says(&mut state, 1, left);
        } else {
            let command = state.speaking(0);
            must(&mut state, &command);
        }
        assert_eq!(names(&state), [name(FIRST, 2, "ssd0")]);
        assert!(!volume(&state).is_moving(), "it is where it stays: {:?}", volume(&state));
    }
}

#[test]
fn an_ssd_that_is_lost_in_the_middle_is_not_waited_for() {
    for lost in ["ssd0", "ssd1"] {
        let mut state = pod_with_volume();
        must(&mut state, &moves(on(2, "ssd0"), Some(on(2, "ssd1"))));
        says(&mut state, 1, synced);
        must(&mut state, &Command::DeviceFailed { device: on(2, lost), reason: "broken".to_owned() });
        let works = if lost == "ssd0" { "ssd1" } else { "ssd0" };
        if lost == "ssd0" {
            assert_eq!(names(&state), [name(FIRST, 2, works)]);
        } else {
            // It is to be left, and is all there is now.
            assert_eq!(volume(&state).replicas.iter().filter(|it| !it.stale).count(), 1);
            assert_eq!(names(&state).len(), 2);
        }
    }
}

/// The places of a lease at a frontend, and at the backend of h2, as requests name them: which SSD each means.
fn named(state: &State) -> [BTreeMap<(bool, LeaseGeneration), String>; 2] {
    let mut named = [BTreeMap::new(), BTreeMap::new()];
    for object in state.desired(FRONTEND).into_values().chain(state.desired(BACKEND).into_values()) {
        match object {
            Object::Disk(DiskObject { replicas, .. }) => {
                named[0].extend(
                    replicas
                        .into_iter()
                        .filter(|it| it.ssd.starts_with("h2/"))
                        .map(|it| ((it.place.is_first(), it.route.generation), it.ssd)),
                );
            }
            Object::Volume(it) => {
                named[1].insert((it.place.is_first(), it.generation), format!("h2/{}", it.ssd));
            }
            _ => {}
        }
    }
    named
}

/// Frontend and backend hear of it at different times.
#[test]
fn what_is_sent_to_the_next_place_on_a_host_does_not_land_in_the_one_before() {
    let mut state = pod();
    comes(&mut state, 3, 1);
    // They keep no tables, so nothing is wiped there.
    let devices = vec![ssd("ssd0", 64), ssd("ssd1", 64)];
    must(&mut state, &Command::Join { endpoint: BACKEND, incarnation: 2, join: join(2, devices) });
    scrub(&mut state);
    create(&mut state, 2);
    let [_, served] = named(&state);
    let (name, before) = ("vol".to_owned(), served.into_keys().next().expect("a place"));
    must(&mut state, &Command::RemoveReplica { name: name.clone(), device: on(2, "ssd0") });
    let (volume, lease) = (state.volume_named("vol").expect("it is there"), state.leases.values().next());
    let (number, epoch) = (volume.replica_on(&on(2, "ssd0")).expect("it goes").number, volume.epoch);
    let lease = lease.expect("of the VM").id;
    for _ in 0..2 {
        let epoch = state.volume_named("vol").map_or(epoch, |it| it.epoch);
        must(&mut state, &Command::ReplicaLeft { endpoint: FRONTEND, lease, replica: number, epoch });
    }
    assert!(state.volume_named("vol").expect("it is there").replica_on(&on(2, "ssd0")).is_none());
    must(&mut state, &Command::AddReplica { name, device: Some(on(2, "ssd1")), replaces: None });
    scrub(&mut state);
    let [meant, _] = named(&state);
    assert!(meant.values().any(|ssd| ssd == "h2/ssd1"), "{meant:?}");
    assert_eq!(meant.get(&before), None, "{meant:?}");
}
