//! Moves in order, after which what is reserved is as sure as it was when it was accepted.

use super::crowded::{named, nics_of};
use super::reservations::{create, reserve};
use super::*;
use crate::model::{check_reservations, relieve};

/// Hosts 1 to 6 with net daemons, and these NICs: of which host, and whether it is a backup.
pub(super) fn pod_of(nics: &[(u16, &str, bool)]) -> State {
    let mut state = State::new(Options { protocol_minor: Protocol::PROVES_MOVES, ..options(2048) });
    for host in 1..=6 {
        let own = nics.iter().filter(|it| it.0 == host);
        let devices = own.map(|(_, name, backup)| nic(name, true, *backup)).collect();
        for (role, devices) in [(Role::NetFrontend, Vec::new()), (Role::NetBackend, devices)] {
            let id = endpoint(host, role);
            must(&mut state, &Command::Join { endpoint: id, incarnation: 1, join: join(host, devices) });
        }
    }
    state
}

fn id(host: u16, name: &str) -> DeviceId {
    DeviceId { host: HostId::new(host), name: name.into() }
}

fn migrate(instance: &str, to: Option<DeviceId>) -> Command {
    Command::MigrateNic { instance: instance.to_owned(), device: "net0".to_owned(), to }
}

fn drain(host: u16, name: &str) -> Command {
    Command::Drain { host: HostId::new(host), device: Some(name.to_owned()), on: true }
}

fn end_drains(state: &mut State) {
    let drains: Vec<_> = state.drains().collect();
    for (lease, generation) in drains {
        must(state, &Command::DrainExpired { lease, generation });
    }
}

#[test]
fn a_lease_that_moves_to_the_host_of_its_backup_gets_another_one() {
    for reserved in [0, 6000] {
        let mut state =
            pod_of(&[(2, "nic0", false), (5, "nic0", false), (5, "nic1", true), (6, "nic0", true)]);
        must(&mut state, &create("a", 2, reserve(reserved)));
        assert_eq!(nics_of(&state, "a"), named(["h2/nic0", "h5/nic1"]));
        must(&mut state, &drain(2, "nic0"));
        assert_eq!(nics_of(&state, "a"), named(["h5/nic0", "h6/nic0"]));
        check_reservations(&state, "a");
    }
}

#[test]
fn what_has_no_backup_of_another_host_there_stays() {
    let mut state = pod_of(&[(2, "nic0", false), (5, "nic0", false), (5, "nic1", true)]);
    must(&mut state, &create("a", 2, reserve(6000)));
    must(&mut state, &create("b", 2, reserve(0)));
    let refusal = refused(&mut state, &migrate("a", Some(id(5, "nic0"))));
    assert!(refusal.kind == RefusalKind::NoRoom && refusal.detail.contains("no backup NIC"), "{refusal}");
    must(&mut state, &drain(2, "nic0"));
    assert_eq!(nics_of(&state, "a"), named(["h2/nic0", "h5/nic1"]));
    // What reserves nothing is promised nothing, and finds a place.
    assert_eq!(nics_of(&state, "b"), named(["h5/nic0", "h5/nic1"]));
    // It leaves as soon as it can.
    let another = Command::Join {
        endpoint: endpoint(6, Role::NetBackend),
        incarnation: 1,
        join: join(6, vec![nic("nic0", true, true)]),
    };
    must(&mut state, &another);
    assert_eq!(nics_of(&state, "a"), named(["h5/nic0", "h6/nic0"]));
    check_reservations(&state, "a");
}

/// Two instances of 8 Gbit/s on two hosts, and one backup of 10, which stands for either.
fn pod_with_one_backup() -> State {
    let mut state = pod_of(&[(2, "nic0", false), (3, "nic0", false), (3, "nic1", false), (6, "nic0", true)]);
    for (name, host) in [("a", 2), ("b", 3)] {
        must(&mut state, &create(name, host, reserve(8000)));
        check_reservations(&state, name);
    }
    assert_eq!(nics_of(&state, "b"), named(["h3/nic0", "h6/nic0"]));
    state
}

#[test]
fn no_move_brings_more_to_a_backup_than_it_carries() {
    let mut state = pod_with_one_backup();
    let refusal = refused(&mut state, &migrate("a", Some(id(3, "nic1"))));
    assert!(refusal.detail.contains("h3 failed") && refusal.detail.contains("prove-failover"), "{refusal}");
    assert_eq!(refused(&mut state, &migrate("a", None)).kind, RefusalKind::NoDevice);
    // Of a NIC that has too much to do, another one leaves.
    must(&mut state, &create("c", 2, reserve(0)));
    let overloaded = relieve(&state, id(2, "nic0"), 9000);
    must(&mut state, &overloaded);
    assert_eq!(nics_of(&state, "c"), named(["h3/nic0", "h6/nic0"]));
    must(&mut state, &drain(2, "nic0"));
    assert_eq!(nics_of(&state, "a"), named(["h2/nic0", "h6/nic0"]));

    let placement = PlacementPolicy { prove_failover: false, ..PlacementPolicy::default() };
    let options = Options { placement, ..state.options.clone() };
    must(&mut state, &Command::Configure { options });
    assert_eq!(nics_of(&state, "a"), named(["h3/nic1", "h6/nic0"]));
}

#[test]
fn a_lease_may_take_the_place_of_its_backup() {
    let mut state = pod_of(&[(2, "nic0", false), (6, "nic0", true)]);
    must(&mut state, &create("a", 2, reserve(8000)));
    for (to, nics) in [(id(6, "nic0"), ["h6/nic0", "h2/nic0"]), (id(2, "nic0"), ["h2/nic0", "h6/nic0"])] {
        must(&mut state, &migrate("a", Some(to)));
        assert_eq!(nics_of(&state, "a"), named(nics));
        check_reservations(&state, "a");
        end_drains(&mut state);
    }
}

#[test]
fn nothing_goes_home_to_where_others_have_its_room() {
    let mut state = pod_of(&[(2, "nic0", false), (5, "nic1", true), (6, "nic0", true)]);
    must(&mut state, &create("a", 2, reserve(6000)));
    let link = |up| Command::Link { device: id(2, "nic0"), up, reason: "a cable".to_owned() };
    must(&mut state, &link(false));
    must(&mut state, &Command::nothing());
    must(&mut state, &link(true));
    must(&mut state, &create("b", 2, reserve(6000)));
    assert_eq!(nics_of(&state, "b")[0].as_deref(), Some("h2/nic0"));
    let home = Command::FailBack { device: id(2, "nic0") };
    must(&mut state, &home);
    assert_eq!(nics_of(&state, "a"), named(["h5/nic1", "h6/nic0"]));
    let nic = id(2, "nic0");
    let stay = |state: &State| -> Vec<String> {
        let stay = state.that_stay_away(&nic);
        stay.map(|lease| state.instances[&lease.instance].name.clone()).collect()
    };
    assert_eq!(
        (stay(&state), stay(&state.clone())),
        (vec!["a".to_owned()], vec!["a".to_owned()]),
        "also of a copy"
    );
    must(&mut state, &Command::DeleteInstance { name: "b".to_owned(), force: true });
    must(&mut state, &home);
    assert_eq!(nics_of(&state, "a")[0].as_deref(), Some("h2/nic0"));
    assert!(stay(&state).is_empty());
    check_reservations(&state, "a");
}

#[test]
fn a_pod_of_the_version_before_moves_leases_as_that_does() {
    let mut state = pod_with_one_backup();
    speak(&mut state, 0);
    must(&mut state, &migrate("a", Some(id(3, "nic1"))));
    assert_eq!(nics_of(&state, "a"), named(["h3/nic1", "h6/nic0"]));
}
