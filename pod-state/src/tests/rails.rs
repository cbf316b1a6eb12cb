//! Leases on several NICs at the same time, which are a link aggregation group.

use pod_protocol::objects::RailState::{self, Down, Gone, Up};
use pod_protocol::objects::{NicPolicy, RateLimit};

use super::*;

fn device(host: u16, name: &str) -> DeviceId {
    DeviceId { host: HostId::new(host), name: name.into() }
}

/// The devices of a host whose ordinary NIC is in the group.
fn grouped(id: EndpointId) -> Vec<DeviceReport> {
    let mut devices = devices_of(id, true);
    for device in &mut devices {
        if let DeviceReport::Nic { lag, backup: false, .. } = device {
            *lag = Some("group".to_owned());
        }
    }
    devices
}

/// h2/nic0 and h3/nic1 are a group, h3/nic0 is kept for failover.
fn pod_with_group() -> State {
    let mut state = State::new(options(256));
    for id in [NET_FRONTEND, NET_BACKEND, BACKUP_BACKEND] {
        must(
            &mut state,
            &Command::Join { endpoint: id, incarnation: 1, join: join(id.host.get(), grouped(id)) },
        );
    }
    state
}

fn with_rails(name: &str, rails: u8) -> Command {
    let Command::CreateInstance { name, host, volumes, instance_type, vmm_listens, .. } =
        instance(name, 1, &[])
    else {
        unreachable!()
    };
    let nics = vec![NicWish { rails: Some(rails), ..NicWish::default() }];
    Command::CreateInstance {
        name,
        host,
        nics,
        volumes,
        instance_type,
        vmm_listens,
        ram_bytes: None,
        priority: None,
    }
}

fn states(state: &State) -> Vec<RailState> {
    port(state).rails.iter().map(|rail| rail.state).collect()
}

fn link(state: &mut State, device: DeviceId, up: bool) -> Vec<EventKind> {
    kinds(&must(state, &Command::Link { device, up, reason: "carrier".to_owned() }))
}

/// Of each NIC that has the lease: its host, its name, what it may do, and whether others do it too.
fn registrations(state: &State) -> Vec<(u16, String, RegistrationState, bool)> {
    let of = |backend: EndpointId| {
        state.desired(backend).into_values().filter_map(move |object| match object {
            Object::Registration(it) => Some((backend.host.get(), it.nic, it.state, it.has_other_rails)),
            _ => None,
        })
    };
    of(NET_BACKEND).chain(of(BACKUP_BACKEND)).collect()
}

#[test]
fn a_lease_on_a_group_is_on_all_of_its_nics() {
    let mut state = pod_with_group();
    must(&mut state, &with_rails("vm1", 2));
    let port = port(&state);
    assert_eq!(states(&state), [Up, Up]);
    assert!(port.rails.iter().all(|rail| rail.route.generation == port.active.generation));
    assert_ne!(port.rails[0].route.channel, port.rails[1].route.channel);
    let wanted = [
        (2, "nic0", RegistrationState::Active, true),
        (3, "nic0", RegistrationState::Standby, false),
        (3, "nic1", RegistrationState::Active, true),
    ];
    assert_eq!(registrations(&state), wanted.map(|(host, nic, it, other)| (host, nic.to_owned(), it, other)));
    let leases = state.leases_by_device();
    assert_eq!(leases, [(device(2, "nic0"), 1), (device(3, "nic1"), 1)].into());
    assert!(state.devices.keys().all(|id| state.leases_on(id) == leases.get(id).copied().unwrap_or(0)));
}

#[test]
fn who_does_not_ask_for_several_nics_gets_one_that_stands_alone_if_there_is_one() {
    let mut state = pod_with_group();
    must(&mut state, &instance("vm1", 1, &[]));
    assert_eq!(nic_lease(&state).active_nic(), Some(&device(3, "nic0")), "be it the backup");
    assert!(states(&state).is_empty());
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    link(&mut state, device(3, "nic0"), false);
    must(&mut state, &instance("vm2", 1, &[]));
    assert_eq!(states(&state), [Up, Up], "a NIC of a group is never used alone");
}

#[test]
fn more_nics_than_work_are_refused() {
    let mut state = pod_with_group();
    assert_eq!(refused(&mut state, &with_rails("vm1", 3)).kind, RefusalKind::NoDevice);
    assert_eq!(refused(&mut state, &with_rails("vm1", 0)).kind, RefusalKind::InvalidValue);
    assert_eq!(refused(&mut state, &with_rails("vm1", 5)).kind, RefusalKind::InvalidValue);
    link(&mut state, device(2, "nic0"), false);
    let refusal = refused(&mut state, &with_rails("vm1", 2));
    assert_eq!(refusal.kind, RefusalKind::NoDevice);
    assert!(refusal.detail.contains("lag"), "{refusal:?}");
}

#[test]
fn a_dead_rail_moves_nothing_and_is_used_again_when_it_is_back() {
    let mut state = pod_with_group();
    must(&mut state, &with_rails("vm1", 2));
    let before = port(&state);
    let active = nic_lease(&state).active_nic().expect("a NIC").clone();
    assert_eq!(link(&mut state, active.clone(), false), [EventKind::LinkDown]);
    let after = port(&state);
    let down = usize::from(active.host.get() == 3);
    assert_eq!((after.rails[down].state, after.rails[1 - down].state), (Down, Up));
    assert_eq!(after.active, before.rails[1 - down].route, "with the generation that it had");
    let routes = |port: &PortObject| port.rails.iter().map(|rail| rail.route).collect::<Vec<_>>();
    assert_eq!(routes(&after), routes(&before));
    let active_ones = registrations(&state).iter().filter(|it| it.2 == RegistrationState::Active).count();
    assert_eq!(active_ones, 2, "the link may come back before anybody hears of it");
    assert_eq!(state.failovers, 0);
    link(&mut state, active, true);
    assert_eq!(states(&state), [Up, Up]);
}

#[test]
fn a_backend_that_is_over_is_gone_and_one_that_is_silent_is_fenced() {
    let mut state = pod_with_group();
    must(&mut state, &with_rails("vm1", 2));
    let effects = must(&mut state, &Command::Silent { endpoint: BACKUP_BACKEND });
    assert!(effects.iter().any(|it| it.fenced() == Some(BACKUP_BACKEND)), "the other NIC carries everything");
    assert_eq!(states(&state), [Up, Up], "it may still be at work");
    must(&mut state, &Command::FenceExpired { endpoint: BACKUP_BACKEND, incarnation: 1 });
    assert_eq!(states(&state), [Up, Gone]);
    assert_eq!(nic_lease(&state).active_nic(), Some(&device(2, "nic0")));
    let join = join(3, grouped(BACKUP_BACKEND));
    must(&mut state, &Command::Join { endpoint: BACKUP_BACKEND, incarnation: 2, join });
    assert_eq!(states(&state), [Up, Up]);
}

#[test]
fn with_all_of_the_group_dead_the_lease_moves_to_its_backup() {
    let mut state = pod_with_group();
    must(&mut state, &with_rails("vm1", 2));
    let before = port(&state);
    link(&mut state, device(2, "nic0"), false);
    let events = link(&mut state, device(3, "nic1"), false);
    assert_eq!(events, [EventKind::LinkDown, EventKind::Failover]);
    assert_eq!(nic_lease(&state).active_nic(), Some(&device(3, "nic0")));
    let after = port(&state);
    assert!(after.rails.is_empty());
    assert_ne!(after.active.generation, before.active.generation);
    assert!(registrations(&state).iter().all(|it| !it.3), "nobody gives anything back now");
    // The operator brings it home, to all of the group.
    link(&mut state, device(2, "nic0"), true);
    link(&mut state, device(3, "nic1"), true);
    let home = match nic_lease(&state).kind {
        LeaseKind::Nic { home, .. } => home.expect("a home"),
        LeaseKind::Disk { .. } => unreachable!(),
    };
    must(&mut state, &Command::FailBack { device: home });
    assert_eq!(states(&state), [Up, Up]);
    assert!(port(&state).draining.is_some());
}

#[test]
fn a_rail_that_is_to_be_empty_is_not_used_and_nothing_is_moved_off_a_group() {
    let mut state = pod_with_group();
    must(&mut state, &with_rails("vm1", 2));
    let drain = |on| Command::Drain { host: HostId::new(2), device: None, on };
    must(&mut state, &drain(true));
    assert_eq!(states(&state), [Down, Up]);
    assert_eq!(nic_lease(&state).active_nic(), Some(&device(3, "nic1")));
    let migrate = |to| Command::MigrateNic { instance: "vm1".to_owned(), device: "net0".to_owned(), to };
    for to in [None, Some(device(2, "nic0")), Some(device(3, "nic0"))] {
        let refusal = refused(&mut state, &migrate(to));
        assert_eq!(refusal.kind, RefusalKind::InvalidValue);
        assert!(refusal.detail.contains("podctl devices drain h3/nic1"), "{refusal:?}");
    }
    must(&mut state, &drain(false));
    assert_eq!(states(&state), [Up, Up]);
    // A rail that is not trusted is better than none.
    let hold = |device| Command::HoldLink { device, reason: "flaps".to_owned() };
    must(&mut state, &hold(device(2, "nic0")));
    assert_eq!(states(&state), [Down, Up]);
    link(&mut state, device(3, "nic1"), false);
    assert_eq!(states(&state), [Up, Down]);
}

#[test]
fn a_backup_that_came_into_the_group_is_a_rail_and_no_backup() {
    let mut state = pod();
    must(&mut state, &instance("vm1", 1, &[]));
    let (own, backup) = (device(2, "nic0"), device(3, "nic0"));
    assert_eq!(nic_lease(&state).standby_nic(), Some(&backup));
    // The operator makes a group of both, and there is no other NIC.
    link(&mut state, device(3, "nic1"), false);
    for (id, device) in [(NET_BACKEND, &own), (BACKUP_BACKEND, &backup)] {
        let mut reports = devices_of(id, true).into_iter();
        let report = reports.find(|it| matches!(it, DeviceReport::Nic { name, .. } if *name == device.name));
        let mut report = report.expect("it has that NIC");
        if let DeviceReport::Nic { lag, .. } = &mut report {
            *lag = Some("group".to_owned());
        }
        must(&mut state, &Command::DeviceBack { device: device.clone(), report });
    }
    link(&mut state, own, false);
    let lease = nic_lease(&state);
    assert_eq!((lease.active_nic(), lease.standby_nic()), (Some(&backup), None));
}

#[test]
fn a_pool_is_not_too_small_for_what_a_fenced_backend_would_have_needed() {
    let mut state = State::new(options(24));
    let here = EndpointId::new(HostId::new(3), Role::NetFrontend);
    for id in [BACKUP_BACKEND, here, NET_BACKEND] {
        let join = join(id.host.get(), grouped(id));
        must(&mut state, &Command::Join { endpoint: id, incarnation: 1, join });
    }
    let mut create = instance("vm", 1, &[]);
    if let Command::CreateInstance { host, .. } = &mut create {
        *host = HostId::new(3);
    }
    must(&mut state, &create);
    let (instance, nic) = ("vm".to_owned(), Some(Box::default()));
    must(&mut state, &Command::AttachDevice { instance, nic, volume: None });
    let join = join(3, devices_of(BACKUP_BACKEND, false));
    must(&mut state, &Command::Join { endpoint: BACKUP_BACKEND, incarnation: 2, join });
    assert!(state.short, "the NICs of the new life have no room");
    let effects = must(&mut state, &Command::Silent { endpoint: BACKUP_BACKEND });
    assert!(effects.iter().any(|it| it.fenced() == Some(BACKUP_BACKEND)), "the lease goes on without it");
    assert!(!state.short, "who is left has all that is needed");
}

#[test]
fn what_is_looked_up_of_one_nic_is_what_leans_on_it_among_all() {
    let mut state = pod_with_group();
    for number in 1..=3 {
        must(&mut state, &with_rails(&format!("vm{number}"), 2));
    }
    let all = state.loads();
    assert!(all.nics().any(|(_, nic)| nic.leases > 1), "some leases are on a group");
    for (id, nic) in all.nics() {
        assert_eq!(state.loads_of(&[id.clone()].into()).get(id), Some(nic), "{id:?}");
    }
}

#[test]
fn what_is_promised_is_promised_by_each_nic_of_the_group() {
    let mut state = pod_with_group();
    must(&mut state, &with_rails("vm1", 2));
    // The one goes on with another of them as its first one.
    let first = nic_lease(&state).active_nic().expect("a NIC").clone();
    link(&mut state, first.clone(), false);
    link(&mut state, first.clone(), true);
    must(&mut state, &with_rails("vm2", 2));
    let actives: BTreeSet<_> = state.leases.values().filter_map(Lease::active_nic).collect();
    assert_eq!(actives.len(), 2, "{actives:?}");
    let speed = state.loads().get(&first).expect("a NIC").speed_mbps;
    let promise = |name: &str, mbps: u64| {
        let minimum_bytes_per_second = Some(mbps * 125_000);
        let limit = RateLimit { minimum_bytes_per_second, ..RateLimit::default() };
        let policy = NicPolicy { transmit: limit, ..NicPolicy::default() };
        Command::ChangeNic { instance: name.to_owned(), device: "net0".to_owned(), policy }
    };
    must(&mut state, &promise("vm1", speed / 2 + 1));
    assert_eq!(refused(&mut state, &promise("vm2", speed / 2)).kind, RefusalKind::NoRoom);
    must(&mut state, &promise("vm2", speed / 4));
    // Whichever of them is its first one: each may have to carry all of it.
    must(&mut state, &with_rails("vm3", 2));
    assert_eq!(refused(&mut state, &promise("vm3", speed / 4)).kind, RefusalKind::NoRoom);
    must(&mut state, &promise("vm3", speed / 4 - 1));
}
