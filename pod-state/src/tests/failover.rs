//! What dies, and what becomes of it.

use super::*;

#[test]
fn lost_link_moves_the_lease_to_the_backup() {
    let mut state = pod_with_vm();
    let before = port(&state);
    let device = DeviceId { host: HostId::new(2), name: "nic0".into() };
    let effects =
        must(&mut state, &Command::Link { device: device.clone(), up: false, reason: "carrier".to_owned() });
    assert_eq!(kinds(&effects), [EventKind::LinkDown, EventKind::Failover]);
    let after = port(&state);
    assert_eq!(after.active.channel, before.standby.expect("a backup").channel);
    assert_ne!(after.active.generation, before.active.generation);
    assert_eq!(after.tx_area, before.tx_area, "what was not sent yet stays where it is");
    assert_eq!(registration(&state, NET_BACKEND), Some(RegistrationState::Standby));
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Active));
    assert_eq!(state.failovers, 1);

    // It is not moved back by itself.
    must(&mut state, &Command::Link { device, up: true, reason: "carrier".to_owned() });
    assert_eq!(port(&state), after);
}

#[test]
fn lease_moves_once_a_backup_appears() {
    let mut state = pod_with_vm();
    must(&mut state, &Command::Gone { endpoint: BACKUP_BACKEND });
    let device = DeviceId { host: HostId::new(2), name: "nic0".into() };
    let effects = must(&mut state, &Command::Link { device, up: false, reason: "carrier".to_owned() });
    assert_eq!(kinds(&effects), [EventKind::LinkDown, EventKind::Degraded]);
    let effects = join_as(&mut state, BACKUP_BACKEND, 2);
    assert!(kinds(&effects).contains(&EventKind::Failover));
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Active));
}

#[test]
fn a_lease_has_a_link_while_something_carries_its_packets() {
    let mut state = pod_with_vm();
    let has_link = |state: &State| {
        let lease = state.leases.values().find(|lease| lease.active_nic().is_some()).expect("a NIC's lease");
        state.has_link(lease)
    };
    let link = |state: &mut State, host: u16, name: &str, up: bool| {
        let device = DeviceId { host: HostId::new(host), name: name.into() };
        must(state, &Command::Link { device, up, reason: "carrier".to_owned() });
    };
    assert!(has_link(&state));
    link(&mut state, 2, "nic0", false);
    assert!(has_link(&state), "the backup has taken over");
    must(&mut state, &Command::Gone { endpoint: BACKUP_BACKEND });
    assert!(!has_link(&state));
    link(&mut state, 2, "nic0", true);
    assert!(has_link(&state));
    must(&mut state, &Command::Silent { endpoint: NET_BACKEND });
    assert!(!has_link(&state), "it may be at work, but nobody knows");
    must(&mut state, &Command::Back { endpoint: NET_BACKEND });
    assert!(has_link(&state));
}

#[test]
fn lease_that_never_had_a_backup_moves_to_a_new_one() {
    let mut state = State::new(options(256));
    for id in [NET_FRONTEND, NET_BACKEND] {
        join_as(&mut state, id, 1);
    }
    must(&mut state, &instance("vm1", 1, &[]));
    let device = DeviceId { host: HostId::new(2), name: "nic0".into() };
    must(&mut state, &Command::Link { device, up: false, reason: "carrier".to_owned() });
    let effects = join_as(&mut state, BACKUP_BACKEND, 1);
    assert!(kinds(&effects).contains(&EventKind::Failover));
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Active));
}

#[test]
fn silent_backend_is_fenced_and_waited_for_before_its_leases_move() {
    let mut state = pod_with_vm();
    let effects = must(&mut state, &Command::Silent { endpoint: NET_BACKEND });
    assert!(effects.iter().any(|it| it.fenced() == Some(NET_BACKEND)));
    assert_eq!(
        registration(&state, BACKUP_BACKEND),
        Some(RegistrationState::Standby),
        "not before the fence is seen"
    );
    // A heartbeat that comes too late changes nothing: the fence is up.
    must(&mut state, &Command::Back { endpoint: NET_BACKEND });
    must(&mut state, &Command::FenceExpired { endpoint: NET_BACKEND, incarnation: 99 });
    assert_eq!(state.failovers, 0);
    let effects = must(&mut state, &Command::FenceExpired { endpoint: NET_BACKEND, incarnation: 1 });
    assert_eq!(kinds(&effects), [EventKind::Failover]);
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Active));
}

#[test]
fn a_fenced_life_never_joins_again() {
    let mut state = pod_with_vm();
    silent(&mut state, NET_BACKEND);
    let again = join_command(NET_BACKEND, 1);
    refused(&mut state, &again);
    must(&mut state, &Command::FenceExpired { endpoint: NET_BACKEND, incarnation: 1 });
    refused(&mut state, &again);
    join_as(&mut state, NET_BACKEND, 2);
    assert_eq!(state.endpoints[&NET_BACKEND].presence, Presence::Joined);
}

#[test]
fn for_how_long_a_daemon_may_act_unseen_is_kept_for_each_life() {
    let mut state = pod_with_vm();
    let says = |incarnation: u64, fence_ms: Option<u64>| {
        let devices = devices_of(NET_BACKEND, true);
        Command::Join { endpoint: NET_BACKEND, incarnation, join: Join { fence_ms, ..join(2, devices) } }
    };
    for (incarnation, fence_ms) in [(2, Some(1000)), (3, None), (4, Some(20))] {
        must(&mut state, &says(incarnation, fence_ms));
        assert_eq!(state.endpoints[&NET_BACKEND].fence_ms, fence_ms);
    }
    for fence_ms in [19, 60_001] {
        let refusal = refused(&mut state, &says(5, Some(fence_ms)));
        assert!(
            refusal.kind == RefusalKind::JoinConflict && refusal.detail.contains("fence-ms"),
            "{refusal}"
        );
    }
}

#[test]
fn silence_alone_takes_nothing_from_who_has_no_substitute() {
    let mut state = pod_with_vm();
    for id in [NET_FRONTEND, BLK_FRONTEND, BLK_BACKEND] {
        let before = state.desired(id);
        let effects = must(&mut state, &Command::Silent { endpoint: id });
        assert_eq!(kinds(&effects), [EventKind::EndpointSilent]);
        assert_eq!(state.desired(id), before);
        must(&mut state, &Command::Back { endpoint: id });
    }
}

fn silent(state: &mut State, endpoint: EndpointId) {
    must(state, &Command::Silent { endpoint });
}

#[test]
fn silent_host_loses_its_nic_at_once_and_its_disks_after_the_grace() {
    let mut state = pod_with_vm();
    let expired = Command::GraceExpired { endpoint: BLK_BACKEND, incarnation: 1 };
    silent(&mut state, NET_BACKEND);
    silent(&mut state, BLK_BACKEND);
    let moved = must(&mut state, &Command::FenceExpired { endpoint: NET_BACKEND, incarnation: 1 });
    assert!(kinds(&moved).contains(&EventKind::Failover));
    assert!(!disk_failed(&state), "guests wait");
    must(&mut state, &Command::Back { endpoint: BLK_BACKEND });
    must(&mut state, &expired);
    assert!(!disk_failed(&state) && state.endpoints[&BLK_BACKEND].presence == Presence::Joined);
    silent(&mut state, BLK_BACKEND);
    let fenced = must(&mut state, &expired);
    assert!(fenced.iter().any(|it| it.fenced() == Some(BLK_BACKEND)));
    assert!(!disk_failed(&state), "it may still write");
    let failed = must(&mut state, &Command::FenceExpired { endpoint: BLK_BACKEND, incarnation: 1 });
    assert!(kinds(&failed).contains(&EventKind::DiskFailed) && disk_failed(&state));
    let back = join_as(&mut state, BLK_BACKEND, 2);
    assert!(kinds(&back).contains(&EventKind::DiskBack) && !disk_failed(&state));
}

#[test]
fn reset_host_holds_nothing_and_can_be_deleted() {
    let mut state = pod_with_vm();
    let reset = Command::ResetHost { name: "h3".to_owned() };
    let delete = Command::DeleteHost { name: "h3".to_owned() };
    assert_eq!(refused(&mut state, &reset).kind, RefusalKind::HostAlive);
    assert_eq!(refused(&mut state, &delete).kind, RefusalKind::HostAlive);
    silent(&mut state, BACKUP_BACKEND);
    assert_eq!(refused(&mut state, &delete).kind, RefusalKind::NotReset);
    let effects = must(&mut state, &reset);
    assert!(effects.iter().any(|it| it.fenced() == Some(BACKUP_BACKEND)), "it may be frozen");
    must(&mut state, &delete);
    assert!(state.host_named("h3").is_none());
    assert!(state.devices.keys().all(|device| device.host.get() != 3));
    must(&mut state, &Command::Gone { endpoint: NET_BACKEND });
    must(&mut state, &Command::Gone { endpoint: BLK_BACKEND });
    let refusal = refused(&mut state, &Command::DeleteHost { name: "h2".to_owned() });
    assert_eq!(refusal.kind, RefusalKind::Leased);
}

#[test]
fn a_backup_that_comes_back_with_a_smaller_mtu_is_none_for_long_frames() {
    let mut state = State::new(options(256));
    speak(&mut state, Protocol::DECIDES_BY_MORE);
    let with_mtu = |mtu: u16, backup: bool| {
        let mut report = nic("nic0", true, backup);
        if let DeviceReport::Nic { mtu: known, .. } = &mut report {
            *known = mtu;
        }
        report
    };
    let joins = |state: &mut State, host: u16, incarnation: u64, device: DeviceReport| {
        let endpoint = EndpointId::new(HostId::new(host), Role::NetBackend);
        must(state, &Command::Join { endpoint, incarnation, join: join(host, vec![device]) });
    };
    join_as(&mut state, NET_FRONTEND, 1);
    joins(&mut state, 2, 1, with_mtu(9000, false));
    joins(&mut state, 3, 1, with_mtu(9000, true));
    joins(&mut state, 4, 1, with_mtu(9000, true));
    let wish = NicWish { mtu: Some(9000), ..NicWish::default() };
    must(&mut state, &create_instance("vm1", 1, vec![wish], &[]));
    let standby = |state: &State| nic_lease(state).standby_nic().expect("a backup").host.get();
    let first = standby(&state);
    joins(&mut state, first, 2, with_mtu(1500, true));
    assert_eq!(standby(&state), 7 - first);
}
