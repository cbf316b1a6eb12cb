//! NICs that leases are moved between, by order or by policy.

use super::*;

fn migrate(to: Option<(u16, &str)>) -> Command {
    let to = to.map(|(host, name)| DeviceId { host: HostId::new(host), name: name.into() });
    Command::MigrateNic { instance: "vm1".to_owned(), device: "net0".to_owned(), to }
}

fn state_at(state: &State, id: EndpointId) -> Option<(RegistrationState, u16)> {
    state.desired(id).into_values().find_map(|object| match object {
        Object::Registration(it) => Some((it.state, it.generation.get())),
        _ => None,
    })
}

#[test]
fn a_lease_is_moved_in_order_and_drains_where_it_was() {
    let mut state = pod_with_vm();
    let before = port(&state);
    let effects = must(&mut state, &migrate(None));
    assert_eq!(kinds(&effects), [EventKind::Migrated]);
    let after = port(&state);
    assert_eq!(after.draining, Some(before.active), "with the generation that it had");
    assert_eq!(after.active.generation.get(), before.active.generation.get() + 1);
    assert_eq!(state_at(&state, BACKUP_BACKEND), Some((RegistrationState::Active, 2)));
    assert_eq!(state_at(&state, NET_BACKEND), Some((RegistrationState::Draining, 1)));
    assert_eq!(refused(&mut state, &migrate(None)).kind, RefusalKind::Busy);

    let drained = state.drains().next().expect("a drain");
    must(&mut state, &Command::DrainExpired { lease: drained.0, generation: drained.1 });
    assert_eq!(port(&state).draining, None);
    assert_eq!(state_at(&state, NET_BACKEND), Some((RegistrationState::Standby, 2)));
    let there = nic_lease(&state);
    must(&mut state, &Command::DrainExpired { lease: drained.0, generation: drained.1 });
    assert_eq!(nic_lease(&state), there, "told twice");

    // And back again.
    must(&mut state, &migrate(Some((2, "nic0"))));
    assert_eq!(state_at(&state, NET_BACKEND), Some((RegistrationState::Active, 3)));
    assert_eq!(state.failovers, 0);
}

#[test]
fn a_move_is_refused_where_it_cannot_go() {
    let mut state = pod_with_vm();
    assert_eq!(
        refused(&mut state, &migrate(Some((2, "nic0")))).kind,
        RefusalKind::InvalidValue,
        "it is there"
    );
    assert_eq!(refused(&mut state, &migrate(Some((3, "nic1")))).kind, RefusalKind::NoDevice, "no link");
    assert_eq!(refused(&mut state, &migrate(Some((2, "ssd0")))).kind, RefusalKind::NotFound);
    let other = Command::MigrateNic { instance: "vm1".to_owned(), device: "vol0".to_owned(), to: None };
    assert_eq!(refused(&mut state, &other).kind, RefusalKind::NotFound);
    let small = DeviceReport::Nic {
        name: "nic2".to_owned(),
        driver: "null".to_owned(),
        mac: None,
        up: true,
        speed_mbps: 1,
        mtu: 1400,
        features: 0,
        backup: false,
        lag: None,
    };
    let join = join(3, vec![nic("nic0", true, true), small]);
    must(&mut state, &Command::Join { endpoint: BACKUP_BACKEND, incarnation: 2, join });
    assert_eq!(
        refused(&mut state, &migrate(Some((3, "nic2")))).kind,
        RefusalKind::InvalidValue,
        "a small MTU"
    );
}

#[test]
fn a_nic_that_is_lost_while_it_drains_is_given_up() {
    for lost in [2, 3] {
        let mut state = pod_with_vm();
        must(&mut state, &migrate(None));
        let device = DeviceId { host: HostId::new(lost), name: "nic0".into() };
        must(&mut state, &Command::Link { device, up: false, reason: "no cable".to_owned() });
        assert_eq!(port(&state).draining, None);
        let on = nic_lease(&state).active_nic().map(|nic| nic.host.get());
        assert_eq!(on, Some(if lost == 2 { 3 } else { 2 }), "it goes back if the new one is lost");
    }
    // A frontend that is restarted knows nothing of it.
    let mut state = pod_with_vm();
    must(&mut state, &migrate(None));
    join_as(&mut state, NET_FRONTEND, 2);
    assert_eq!(state.drains().count(), 0);
}

#[test]
fn leases_go_home_when_told_and_only_those_that_moved_by_themselves() {
    let mut state = pod_with_vm();
    let home = DeviceId { host: HostId::new(2), name: "nic0".into() };
    let link = |up| Command::Link { device: home.clone(), up, reason: "cable".to_owned() };
    assert_eq!(state.missed_homes().count(), 0);
    must(&mut state, &link(false));
    assert_eq!(state.missed_homes().count(), 0, "it does not work yet");
    assert_eq!(refused(&mut state, &Command::FailBack { device: home.clone() }).kind, RefusalKind::NoDevice);
    must(&mut state, &link(true));
    assert_eq!(state.missed_homes().collect::<Vec<_>>(), [&home]);
    let effects = must(&mut state, &Command::FailBack { device: home.clone() });
    assert_eq!(kinds(&effects), [EventKind::FailedBack]);
    assert_eq!(nic_lease(&state).active_nic(), Some(&home));
    assert_eq!(state_at(&state, BACKUP_BACKEND), Some((RegistrationState::Draining, 2)));
    let drained = state.drains().next().expect("a drain");
    must(&mut state, &Command::DrainExpired { lease: drained.0, generation: drained.1 });

    // Where somebody puts it, there it stays.
    must(&mut state, &migrate(None));
    assert_eq!(state.missed_homes().count(), 0);
}

#[test]
fn nothing_moves_to_a_nic_that_is_held_unless_there_is_no_other() {
    let mut state = pod_with_vm();
    let backup = DeviceId { host: HostId::new(3), name: "nic0".into() };
    let hold = Command::HoldLink { device: backup.clone(), reason: "flaps".to_owned() };
    assert_eq!(kinds(&must(&mut state, &hold)), [EventKind::LinkHeld]);
    assert_eq!(kinds(&must(&mut state, &hold)), [], "once");
    assert_eq!(refused(&mut state, &migrate(None)).kind, RefusalKind::NoDevice);
    let report = nic("nic2", true, true);
    let join = join(3, vec![nic("nic0", true, true), report]);
    must(&mut state, &Command::Join { endpoint: BACKUP_BACKEND, incarnation: 1, join });
    let standby = |state: &State| nic_lease(state).standby_nic().map(|nic| nic.name.clone());
    assert_eq!(standby(&state).as_deref(), Some("nic2"), "rather one that is trusted");
    for name in ["nic2", "nic0"] {
        let device = DeviceId { host: HostId::new(if name == "nic2" { 3 } else { 2 }), name: name.into() };
        must(&mut state, &Command::Link { device, up: false, reason: "no cable".to_owned() });
    }
    let release = Command::ReleaseLink { device: backup.clone(), reason: "calm".to_owned() };
    assert_eq!(kinds(&must(&mut state, &release)).first(), Some(&EventKind::LinkReleased));
    assert_eq!(nic_lease(&state).active_nic(), Some(&backup));
}

#[test]
fn a_failed_nic_that_is_back_is_used_again() {
    let mut state = pod_with_vm();
    let device = DeviceId { host: HostId::new(2), name: "nic0".into() };
    let failed = Command::DeviceFailed { device: device.clone(), reason: "it was deleted".to_owned() };
    must(&mut state, &failed);
    assert_eq!(nic_lease(&state).active_nic().map(|nic| nic.host.get()), Some(3));
    must(&mut state, &Command::Link { device: device.clone(), up: true, reason: "carrier".to_owned() });
    assert!(matches!(state.devices[&device].health, Health::Failed(_)), "a link is not enough");
    let back = |up| Command::DeviceBack { device: device.clone(), report: nic("nic0", up, false) };
    assert_eq!(kinds(&must(&mut state, &back(false))), [EventKind::DeviceBack]);
    assert!(matches!(state.devices[&device].health, Health::Down(_)));
    must(&mut state, &Command::Link { device: device.clone(), up: true, reason: "carrier".to_owned() });
    must(&mut state, &migrate(Some((2, "nic0"))));
    assert_eq!(nic_lease(&state).active_nic(), Some(&device));
}
