//! How a column moves, one promise each.

use cxl_pool::{HostId, Role};
use pod_protocol::objects::{DiskObject, Object, ObjectId};
use pod_protocol::reports::DeviceReport;
use pod_protocol::volume_table::{VolumeEntry, VolumeTable};

use super::super::model::{MIB, check, endpoint, guest, join, options, scrub_all, ssd};
use super::super::{Command, Groups, Options};
use super::*;

fn must(state: &mut State, command: &Command) {
    state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
    check(state);
}

fn on(host: u16) -> DeviceId {
    DeviceId { host: HostId::new(host), name: "ssd0".into() }
}

fn scrub(state: &mut State) {
    for command in scrub_all(state) {
        must(state, &command);
    }
}

/// A daemon comes; a backend with an SSD that keeps a table.
fn comes(state: &mut State, host: u16, role: Role, incarnation: u64) {
    let id = endpoint(host, role);
    let mut devices = Vec::new();
    if role == Role::BlkBackend {
        let mut report = ssd("ssd0", 64);
        if let DeviceReport::Ssd { table, .. } = &mut report {
            let known = state.devices.contains_key(&on(host));
            *table = Some(if known { state.volume_table(&on(host)) } else { VolumeTable::default() });
        }
        devices.push(report);
    }
    must(state, &Command::Join { endpoint: id, incarnation, join: join(host, devices) });
    scrub(state);
}

/// A VM on h1 with a volume striped over h2 and h3; h4 has an SSD too.
fn pod() -> State {
    let mut state = State::new(Options { protocol_minor: Protocol::MOVES_COLUMNS, ..options(256) });
    comes(&mut state, 1, Role::BlkFrontend, 1);
    for host in [2, 3] {
        comes(&mut state, host, Role::BlkBackend, 1);
    }
    let name = "vol".to_owned();
    must(
        &mut state,
        &Command::CreateStriped {
            name,
            size_bytes: 48 * MIB,
            columns: 2,
            stripe_bytes: 64 << 10,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        },
    );
    comes(&mut state, 4, Role::BlkBackend, 1);
    must(&mut state, &guest("vm", &["vol"]));
    scrub(&mut state);
    state
}

fn volume(state: &State) -> &Volume {
    state.volume_named("vol").unwrap()
}

/// On which hosts the columns lie, and what is beside one: where, and whether that is leaving.
fn lies(state: &State) -> (Vec<u16>, Option<(u16, bool)>) {
    let volume = volume(state);
    let columns = volume.replicas.iter().map(|column| column.device.host.get()).collect();
    (columns, volume.beside.as_ref().map(|it| (it.device.host.get(), it.leaving)))
}

fn disk(state: &State) -> DiskObject {
    let mut objects = state.desired(endpoint(1, Role::BlkFrontend)).into_values();
    let disk = objects.find_map(|object| if let Object::Disk(disk) = object { Some(disk) } else { None });
    disk.expect("the frontend has a disk")
}

fn moves(from: u16, to: Option<u16>) -> Command {
    Command::AddReplica { name: "vol".to_owned(), device: to.map(on), replaces: Some(on(from)) }
}

fn refused(state: &mut State, command: &Command) -> RefusalKind {
    let before = state.clone();
    let refusal = state.apply(command).expect_err("it cannot be");
    assert_eq!(*state, before, "a refused command changed something");
    refusal.kind
}

fn copied(state: &State) -> Command {
    let disk = disk(state);
    let (endpoint, lease, epoch) = (endpoint(1, Role::BlkFrontend), disk.lease, disk.epoch);
    Command::ReplicaSynced { endpoint, lease, replica: disk.beside.expect("a place").number, epoch }
}

fn failed(state: &State) -> Command {
    let disk = disk(state);
    let (endpoint, lease, epoch) = (endpoint(1, Role::BlkFrontend), disk.lease, disk.epoch);
    let (replica, reason) = (disk.beside.expect("a place").number, "it failed a write".to_owned());
    Command::ReplicaFailed { endpoint, lease, replica, epoch, reason }
}

fn left(state: &State) -> Command {
    let disk = disk(state);
    let (endpoint, lease, epoch) = (endpoint(1, Role::BlkFrontend), disk.lease, disk.epoch);
    Command::ReplicaLeft { endpoint, lease, replica: disk.beside.expect("a place").number, epoch }
}

fn kept(state: &State, host: u16) -> VolumeEntry {
    let mut table = state.volume_table(&on(host));
    assert_eq!(table.volumes.len(), 1, "{table:?}");
    table.volumes.remove(0)
}

fn columns_in(state: &State, host: u16) -> Vec<String> {
    kept(state, host).stripe.expect("a column").ssds
}

#[test]
fn a_columns_move_is_told_of_as_one() {
    let kind = |state: &mut State, command: &Command| {
        let effects = state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
        match effects.into_iter().next() {
            Some(Effect::Event { kind, .. }) => kind,
            other => panic!("no event: {other:?}"),
        }
    };
    let mut state = pod();
    assert_eq!(kind(&mut state, &moves(2, None)), EventKind::MigrationPrepared);
    scrub(&mut state);
    let mut other = state.clone();
    let cannot = failed(&other);
    assert_eq!(kind(&mut other, &cannot), EventKind::MigrationAborted);
    let done = copied(&state);
    assert_eq!(kind(&mut state, &done), EventKind::Migrated);
}

#[test]
fn a_column_moves_in_steps_and_its_old_place_is_wiped() {
    let mut state = pod();
    assert_eq!(disk(&state).beside, None);
    must(&mut state, &moves(2, None));
    scrub(&mut state);
    assert_eq!(lies(&state), (vec![2, 3], Some((4, false))));
    let told = disk(&state);
    let beside = told.beside.clone().expect("a place");
    assert_eq!((beside.number, beside.in_sync, beside.leaving), (0, false, false));
    assert_eq!(told.replicas.len(), 2);
    // It is served there, as large as a column is, and its table does not take it for the column.
    let served = state.desired(endpoint(4, Role::BlkBackend)).into_values();
    let sizes: Vec<u64> = served
        .filter_map(|it| if let Object::Volume(it) = it { Some(it.size_bytes) } else { None })
        .collect();
    assert_eq!(sizes, [24 * MIB]);
    assert_eq!((kept(&state, 4).size_bytes, kept(&state, 4).stripe.unwrap().number), (24 * MIB, 0));
    assert_eq!(columns_in(&state, 4), ["h2/ssd0", "h3/ssd0"]);
    let early = left(&state);
    must(&mut state, &early);
    assert_eq!(lies(&state), (vec![2, 3], Some((4, false))), "too early");

    let outdated = copied(&state);
    comes(&mut state, 1, Role::BlkFrontend, 2);
    must(&mut state, &outdated);
    assert_eq!(lies(&state), (vec![2, 3], Some((4, false))), "a predecessor of the frontend said so");
    let done = copied(&state);
    must(&mut state, &done);
    assert_eq!(lies(&state), (vec![4, 3], Some((2, true))));
    for host in [2, 3, 4] {
        assert_eq!(columns_in(&state, host), ["h4/ssd0", "h3/ssd0"]);
    }
    // The frontend hears of it when those who stay know it.
    let services = state.services(disk(&state).lease);
    for host in [3, 4] {
        let table = (endpoint(host, Role::BlkBackend), ObjectId::Table("ssd0".to_owned()));
        assert!(services.contains(&table), "{services:?}");
    }
    let told = disk(&state);
    let columns: Vec<(u32, &str)> = told.replicas.iter().map(|it| (it.number, it.ssd.as_str())).collect();
    assert_eq!(columns, [(0, "h4/ssd0"), (1, "h3/ssd0")]);
    let late = failed(&state);
    must(&mut state, &late);
    assert_eq!(lies(&state), (vec![4, 3], Some((2, true))), "it does not go back");
    assert_eq!(refused(&mut state, &moves(3, None)), RefusalKind::Busy);
    let gone = left(&state);
    must(&mut state, &gone);
    assert_eq!(lies(&state), (vec![4, 3], None));
    assert!(kept(&state, 2).deleted && !kept(&state, 4).deleted);
    assert_eq!(state.used_bytes(&on(2)), 24 * MIB, "it has yet to be wiped");
    let id = volume(&state).id;
    must(&mut state, &Command::VolumeWiped { device: on(2), volume: id });
    assert_eq!(state.used_bytes(&on(2)), 0);
    // The other one, and to where the first one was.
    must(&mut state, &moves(3, Some(2)));
    assert_eq!(disk(&state).beside.unwrap().number, 1);
    let done = copied(&state);
    must(&mut state, &done);
    assert_eq!(lies(&state), (vec![4, 2], Some((3, true))));
}

#[test]
fn a_place_that_is_lost_is_given_up_and_a_column_that_is_lost_is_waited_for() {
    let mut state = pod();
    must(&mut state, &moves(2, None));
    must(&mut state, &Command::Gone { endpoint: endpoint(4, Role::BlkBackend) });
    assert_eq!(lies(&state), (vec![2, 3], None));
    assert_eq!(state.used_bytes(&on(4)), 24 * MIB, "it has yet to be wiped");
    assert_eq!(refused(&mut state, &moves(2, Some(4))), RefusalKind::InvalidValue);
    comes(&mut state, 4, Role::BlkBackend, 2);
    let id = volume(&state).id;
    must(&mut state, &Command::VolumeWiped { device: on(4), volume: id });
    // What the frontend finds wrong with it.
    must(&mut state, &moves(2, None));
    let wrong = failed(&state);
    must(&mut state, &wrong);
    assert_eq!(lies(&state), (vec![2, 3], Some((4, true))));
    let gone = left(&state);
    must(&mut state, &gone);
    must(&mut state, &Command::VolumeWiped { device: on(4), volume: id });
    // Its column.
    must(&mut state, &moves(2, None));
    must(&mut state, &Command::Gone { endpoint: endpoint(2, Role::BlkBackend) });
    assert_eq!(lies(&state), (vec![2, 3], Some((4, false))), "nobody else has it");
    must(&mut state, &Command::GraceExpired { endpoint: endpoint(2, Role::BlkBackend), incarnation: 1 });
    assert!(disk(&state).failed);
    // If everything was copied nevertheless, nothing is lost.
    let done = copied(&state);
    must(&mut state, &done);
    assert_eq!(lies(&state), (vec![4, 3], None), "nobody has to let go of what does not answer");
    assert!(!disk(&state).failed);
}

#[test]
fn a_silent_place_keeps_nobody_waiting() {
    let mut state = pod();
    must(&mut state, &moves(2, None));
    let target = endpoint(4, Role::BlkBackend);
    let effects = state.apply(&Command::Silent { endpoint: target }).unwrap();
    assert!(effects.iter().any(|it| it.fenced() == Some(target)), "{effects:?}");
    must(&mut state, &Command::FenceExpired { endpoint: target, incarnation: 1 });
    assert_eq!(lies(&state), (vec![2, 3], None));
    // A column that is silent is waited for.
    let effects = state.apply(&Command::Silent { endpoint: endpoint(2, Role::BlkBackend) }).unwrap();
    assert!(!effects.iter().any(|effect| effect.fenced().is_some()), "{effects:?}");
}

#[test]
fn a_move_can_be_called_off_and_what_makes_no_sense_is_refused() {
    let mut state = pod();
    let away = |host| Command::RemoveReplica { name: "vol".to_owned(), device: on(host) };
    let grown = Command::ChangeVolume {
        name: "vol".to_owned(),
        size_bytes: Some(56 * MIB),
        qos: None,
        groups: None,
        read_only: None,
    };
    for (command, kind) in [
        (moves(2, Some(3)), RefusalKind::InvalidValue),
        (moves(4, None), RefusalKind::NotFound),
        (moves(2, Some(9)), RefusalKind::NotFound),
        (away(2), RefusalKind::InvalidValue),
        (away(4), RefusalKind::NotFound),
    ] {
        assert_eq!(refused(&mut state, &command), kind, "{command:?}");
    }
    must(&mut state, &moves(2, Some(4)));
    assert_eq!(refused(&mut state, &moves(3, None)), RefusalKind::Busy);
    assert_eq!(refused(&mut state, &grown), RefusalKind::Busy);
    must(&mut state, &away(4));
    assert_eq!(lies(&state), (vec![2, 3], Some((4, true))));
    let late = copied(&state);
    must(&mut state, &late);
    assert_eq!(lies(&state), (vec![2, 3], Some((4, true))));
    let gone = left(&state);
    must(&mut state, &gone);
    assert_eq!(lies(&state), (vec![2, 3], None));
    assert_eq!(refused(&mut state, &grown), RefusalKind::Busy, "what was there has yet to be wiped");
    let id = volume(&state).id;
    must(&mut state, &Command::VolumeWiped { device: on(4), volume: id });
    must(&mut state, &grown);
}

#[test]
fn what_was_said_of_an_earlier_move_lets_go_of_no_later_one() {
    let mut state = pod();
    let call_off = Command::RemoveReplica { name: "vol".to_owned(), device: on(4) };
    must(&mut state, &moves(2, Some(4)));
    must(&mut state, &call_off);
    let late = left(&state);
    must(&mut state, &late);
    assert_eq!(lies(&state), (vec![2, 3], None));
    let volume = volume(&state).id;
    must(&mut state, &Command::VolumeWiped { device: on(4), volume });
    must(&mut state, &moves(2, Some(4)));
    must(&mut state, &call_off);
    must(&mut state, &late);
    assert_eq!(
        lies(&state),
        (vec![2, 3], Some((4, true))),
        "the frontend may have something under way there"
    );
    let now = left(&state);
    must(&mut state, &now);
    assert_eq!(lies(&state), (vec![2, 3], None));
}

#[test]
fn columns_move_only_where_the_whole_pod_knows_how() {
    let mut state = pod();
    let old = state.speaking(0);
    let new = state.speaking(Protocol::MOVES_COLUMNS);
    must(&mut state, &old);
    assert_eq!(refused(&mut state, &moves(2, None)), RefusalKind::Busy);
    must(&mut state, &new);
    must(&mut state, &moves(2, None));
    must(&mut state, &old);
    assert_eq!(lies(&state), (vec![2, 3], None), "the move ends before an older member takes part");
    assert_eq!(disk(&state).beside, None);
    assert!(!serde_json::to_string(&state).unwrap().contains("beside"));
    assert!(kept(&state, 4).deleted);
}

#[test]
fn a_drained_ssd_is_left_by_its_column() {
    let mut state = pod();
    must(&mut state, &Command::Drain { host: HostId::new(2), device: None, on: true });
    assert_eq!(lies(&state), (vec![2, 3], Some((4, false))));
    let epoch = volume(&state).epoch;
    must(&mut state, &Command::Silent { endpoint: endpoint(1, Role::BlkFrontend) });
    assert_eq!(volume(&state).epoch, epoch, "once");
    must(&mut state, &Command::Back { endpoint: endpoint(1, Role::BlkFrontend) });
    for step in [copied, left] {
        let step = step(&state);
        must(&mut state, &step);
    }
    assert_eq!(lies(&state), (vec![4, 3], None));
}

#[test]
fn a_volume_that_nobody_uses_moves_when_somebody_does_and_goes_as_a_whole() {
    let mut state = pod();
    must(&mut state, &Command::DeleteInstance { name: "vm".to_owned(), force: true });
    must(&mut state, &moves(2, None));
    assert_eq!(lies(&state), (vec![2, 3], Some((4, false))));
    must(&mut state, &Command::DeleteVolume { name: "vol".to_owned() });
    let id = *state.volumes.keys().next().unwrap();
    for host in [2, 3, 4] {
        assert!(kept(&state, host).deleted);
        must(&mut state, &Command::VolumeWiped { device: on(host), volume: id });
    }
    assert!(state.volumes.is_empty());
}
