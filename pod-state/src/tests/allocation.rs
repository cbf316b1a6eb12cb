//! What an instance gets, and where.

use super::*;

#[test]
fn instance_gets_a_remote_nic_and_its_backup() {
    let state = pod_with_vm();
    let lease = nic_lease(&state);
    assert_eq!(state.device_name(lease.active_nic().expect("active")), "h2/nic0");
    assert_eq!(state.device_name(lease.standby_nic().expect("standby")), "h3/nic0");
    assert_eq!(registration(&state, NET_BACKEND), Some(RegistrationState::Active));
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Standby));
    let port = port(&state);
    assert_eq!((port.socket.as_str(), port.device.as_str(), port.mtu), ("vm1-net0.sock", "net0", 1500));
    assert_ne!(port.active.channel, port.standby.expect("a backup").channel);
    assert!(port.mac.is_local() && !port.mac.is_multicast());
}

#[test]
fn own_host_comes_first_and_then_the_least_loaded() {
    let mut state = pod();
    let up = DeviceId { host: HostId::new(3), name: "nic1".into() };
    must(&mut state, &Command::Link { device: up, up: true, reason: "cable".to_owned() });
    must(&mut state, &instance("vm1", 1, &[]));
    must(&mut state, &instance("vm2", 1, &[]));
    let used: Vec<String> = state
        .leases
        .values()
        .filter_map(|lease| lease.active_nic().map(|nic| state.device_name(nic)))
        .collect();
    assert_eq!(used, ["h2/nic0", "h3/nic1"], "spread over the pod, and not on the backup");

    join_as(&mut state, endpoint(2, Role::NetFrontend), 1);
    let local = create_instance("vm3", 2, vec![NicWish::default()], &[]);
    must(&mut state, &local);
    let lease = state.leases.values().last().expect("a lease");
    assert_eq!(state.device_name(lease.active_nic().expect("active")), "h2/nic0");
}

#[test]
fn among_equals_the_backend_that_is_known_already() {
    let mut state = State::new(options(256));
    let backend = |host, nics: Vec<DeviceReport>| Command::Join {
        endpoint: endpoint(host, Role::NetBackend),
        incarnation: 1,
        join: join(host, nics),
    };
    join_as(&mut state, NET_FRONTEND, 1);
    must(&mut state, &backend(3, vec![nic("nic0", true, false)]));
    must(&mut state, &backend(4, vec![nic("nic0", true, true)]));
    must(&mut state, &instance("vm1", 1, &[]));
    must(&mut state, &backend(2, vec![nic("nic0", true, false), nic("nic1", true, true)]));
    must(&mut state, &backend(3, vec![nic("nic0", true, false), nic("nic1", true, false)]));
    must(&mut state, &backend(4, vec![nic("nic0", true, true), nic("nic1", true, true)]));
    let nics = |state: &State| {
        let lease = state.leases.values().last().expect("a lease");
        [lease.active_nic(), lease.standby_nic()].map(|nic| state.device_name(nic.expect("a NIC")))
    };
    must(&mut state, &instance("vm2", 1, &[]));
    assert_eq!(nics(&state), ["h3/nic1", "h4/nic1"], "h2's are as free, but h1 has no channel to it");
    assert_eq!(state.channels.len(), 2);
    must(&mut state, &instance("vm3", 1, &[]));
    assert_eq!(nics(&state)[0], "h2/nic0", "one that is loaded less comes first, known or not");
}

#[test]
fn leased_volume_is_not_deleted() {
    let mut state = pod_with_vm();
    let refusal = refused(&mut state, &Command::DeleteVolume { name: "vol0".to_owned() });
    assert_eq!(refusal.kind, RefusalKind::Leased);
    assert!(refusal.detail.contains("vm1"), "{refusal}");
    assert_eq!(refused(&mut state, &instance("vm2", 0, &["vol0"])).kind, RefusalKind::Leased);
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: false });
    must(&mut state, &Command::DeleteVolume { name: "vol0".to_owned() });
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut state = pod_with_vm();
    let on = |host: u16, nics: Vec<NicWish>| create_instance("vm2", host, nics, &[]);
    let wish = NicWish::default;
    for (command, kind) in [
        (volume("vol0", 1), RefusalKind::Exists),
        (volume("../etc", 1), RefusalKind::InvalidName),
        (volume("vol1", 0), RefusalKind::InvalidValue),
        (volume("vol1", 1 << 30), RefusalKind::NoRoom),
        (instance("vm1", 0, &[]), RefusalKind::Exists),
        (instance("VM", 0, &[]), RefusalKind::InvalidName),
        (instance("vm2", 0, &["nothing"]), RefusalKind::NotFound),
        (instance("vm2", 9, &[]), RefusalKind::InvalidValue),
        (on(9, vec![wish()]), RefusalKind::HostNotReady),
        (on(1, vec![NicWish { mtu: Some(9000), ..wish() }]), RefusalKind::NoDevice),
        (on(1, vec![NicWish { mtu: Some(1), ..wish() }]), RefusalKind::InvalidValue),
        (on(1, vec![NicWish { queue_pairs: Some(0), ..wish() }]), RefusalKind::InvalidValue),
        (on(1, vec![NicWish { mac: "01:00:00:00:00:01".parse().ok(), ..wish() }]), RefusalKind::InvalidValue),
        (on(1, vec![NicWish { mac: Some(port(&state).mac), ..wish() }]), RefusalKind::Exists),
        (Command::DeleteInstance { name: "vm9".to_owned(), force: false }, RefusalKind::NotFound),
        (Command::DeleteVolume { name: "vol9".to_owned() }, RefusalKind::NotFound),
    ] {
        assert_eq!(refused(&mut state, &command).kind, kind, "{command:?}");
    }
}

#[test]
fn sockets_of_two_instances_never_collide() {
    let mut state = pod();
    must(&mut state, &volume("b-c", 1));
    must(&mut state, &volume("c", 1));
    must(&mut state, &instance("a", 0, &["b-c"]));
    assert_eq!(refused(&mut state, &instance("a-b", 0, &["c"])).kind, RefusalKind::Exists);
}

#[test]
fn pool_without_room_refuses_and_keeps_nothing() {
    let few_regions = Options { regions_max: 16, ..options(1000) };
    for (options, why) in
        [(options(24), "largest free range"), (few_regions, "room for 16 regions, and is full")]
    {
        let mut state = State::new(options);
        for id in [NET_FRONTEND, NET_BACKEND, BACKUP_BACKEND] {
            join_as(&mut state, id, 1);
        }
        let mut created = 0;
        let refusal = loop {
            let command = instance(&format!("vm{created}"), 1, &[]);
            match state.apply(&command) {
                Ok(_) => created += 1,
                Err(refusal) => break refusal,
            }
            check(&state);
        };
        assert!(created > 0);
        assert_eq!(refusal.kind, RefusalKind::NoRoom);
        assert!(refusal.detail.contains(why), "{refusal}");
        assert_eq!(state.instances.len(), created);
    }
}

#[test]
fn hosts_cannot_take_each_others_names() {
    let mut state = pod();
    let mut stranger = join(4, Vec::new());
    stranger.host_name = "h1".to_owned();
    let id = endpoint(4, Role::NetFrontend);
    let command = Command::Join { endpoint: id, incarnation: 1, join: stranger };
    assert_eq!(refused(&mut state, &command).kind, RefusalKind::JoinConflict);
    let mut renamed = join(1, Vec::new());
    renamed.host_name = "other".to_owned();
    let command = Command::Join { endpoint: NET_FRONTEND, incarnation: 2, join: renamed };
    assert_eq!(refused(&mut state, &command).kind, RefusalKind::JoinConflict);
    let wrong_owner = join(1, vec![ssd("ssd0", 1)]);
    let command = Command::Join { endpoint: NET_FRONTEND, incarnation: 2, join: wrong_owner };
    assert_eq!(refused(&mut state, &command).kind, RefusalKind::JoinConflict);
}

#[test]
fn ssd_that_shrank_is_not_used() {
    let mut state = pod_with_vm();
    let command =
        Command::Join { endpoint: BLK_BACKEND, incarnation: 2, join: join(2, vec![ssd("ssd0", 8)]) };
    let effects = must(&mut state, &command);
    assert!(kinds(&effects).contains(&EventKind::DeviceFailed));
    let disk = state
        .desired(BLK_FRONTEND)
        .into_values()
        .find_map(|it| if let Object::Disk(it) = it { Some(it) } else { None });
    assert!(disk.expect("a disk").failed);
}

#[test]
fn connected_instance_is_deleted_only_by_force() {
    let mut state = pod_with_vm();
    let lease = nic_lease(&state).id;
    must(&mut state, &attached(NET_FRONTEND, lease, true));
    let delete = |force| Command::DeleteInstance { name: "vm1".to_owned(), force };
    assert_eq!(refused(&mut state, &delete(false)).kind, RefusalKind::Connected);
    must(&mut state, &delete(true));
    assert!(state.instances.is_empty());
}

#[test]
fn a_guest_is_offered_what_its_nic_can_do_whatever_its_backup_cannot() {
    let mut state = pod();
    let lesser = |name: &str| {
        let mut report = nic(name, true, true);
        if let DeviceReport::Nic { features, .. } = &mut report {
            *features = 0;
        }
        report
    };
    let join = join(3, vec![lesser("nic0"), nic("nic2", true, true)]);
    must(&mut state, &Command::Join { endpoint: BACKUP_BACKEND, incarnation: 2, join });
    must(&mut state, &instance("vm1", 1, &[]));
    // Rather the able one of two backups; the lesser one rather than none.
    let standby = |state: &State| nic_lease(state).standby_nic().map(|nic| nic.name.clone());
    assert_eq!((port(&state).features, standby(&state).as_deref()), (0b1011, Some("nic2")));
    let able = DeviceId { host: HostId::new(3), name: "nic2".into() };
    must(&mut state, &Command::Link { device: able, up: false, reason: "no cable".to_owned() });
    assert_eq!((port(&state).features, standby(&state).as_deref()), (0b1011, Some("nic0")));
    let active = DeviceId { host: HostId::new(2), name: "nic0".into() };
    must(&mut state, &Command::Link { device: active, up: false, reason: "no cable".to_owned() });
    assert_eq!(nic_lease(&state).active_nic().map(|nic| nic.name.as_str()), Some("nic0"));
    assert_eq!(port(&state).features, 0b1011, "what was offered cannot be taken back");
}

#[test]
fn what_an_instance_may_do_with_its_nic_changes_while_it_is_used() {
    let mut state = pod_with_vm();
    let change = |policy: NicPolicy| Command::ChangeNic {
        instance: "vm1".to_owned(),
        device: "net0".to_owned(),
        policy,
    };
    let limit = |packets| RateLimit { packets_per_second: packets, ..RateLimit::default() };
    let addresses = vec!["10.0.0.2".parse().expect("an address")];
    let policy =
        NicPolicy { transmit: limit(Some(1000)), addresses, vlan: Some(4094), ..NicPolicy::default() };
    assert_eq!(kinds(&must(&mut state, &change(policy.clone()))), [EventKind::NicChanged]);
    assert_eq!(kinds(&must(&mut state, &change(policy.clone()))), []);
    assert_eq!(port(&state).policy, policy);
    for backend in [NET_BACKEND, BACKUP_BACKEND] {
        let mut objects = state.desired(backend).into_values();
        assert!(objects.any(|it| matches!(it, Object::Registration(it) if it.policy == policy)), "{backend}");
    }
    for bad in [
        NicPolicy { receive: limit(Some(0)), ..NicPolicy::default() },
        NicPolicy { vlan: Some(0), ..NicPolicy::default() },
        NicPolicy { vlan: Some(4095), ..NicPolicy::default() },
        NicPolicy { receive: RateLimit { burst_ms: 0, ..limit(None) }, ..NicPolicy::default() },
        NicPolicy { addresses: vec!["224.0.0.1".parse().expect("an address")], ..NicPolicy::default() },
        NicPolicy { transmit: promise(0), ..NicPolicy::default() },
        NicPolicy {
            transmit: RateLimit { bytes_per_second: Some(9), ..promise(10) },
            ..NicPolicy::default()
        },
    ] {
        assert_eq!(refused(&mut state, &change(bad)).kind, RefusalKind::InvalidValue);
    }
}

fn promise(bytes_per_second: u64) -> RateLimit {
    RateLimit { minimum_bytes_per_second: Some(bytes_per_second), ..RateLimit::default() }
}

#[test]
fn no_nic_is_promised_twice() {
    let mut state = pod_with_vm();
    let change = |instance: &str, policy: NicPolicy| Command::ChangeNic {
        instance: instance.to_owned(),
        device: "net0".to_owned(),
        policy,
    };
    let sends = |bytes| NicPolicy { transmit: promise(bytes), ..NicPolicy::default() };
    let speed = 10_000 * 125_000;
    assert_eq!(refused(&mut state, &change("vm1", sends(speed + 1))).kind, RefusalKind::NoRoom);
    assert_eq!(kinds(&must(&mut state, &change("vm1", sends(speed)))), [EventKind::NicChanged]);
    // Its own promise is no obstacle to a new one, and the other direction is free.
    must(&mut state, &change("vm1", sends(speed - 1000)));
    must(&mut state, &change("vm1", NicPolicy { receive: promise(speed), ..sends(speed - 1000) }));
    // Another instance there gets what is left, and goes elsewhere, or nowhere, if it wants more.
    let wish = |bytes| NicWish { policy: sends(bytes), ..NicWish::default() };
    let create = |name: &str, wish: NicWish| create_instance(name, 1, vec![wish], &[]);
    must(&mut state, &create("vm2", wish(1000)));
    let on = |state: &State, name: &str| {
        let instance = state.instance_named(name).expect("created");
        state.leases[&instance.nics[0]].active_nic().cloned().expect("a NIC")
    };
    assert_eq!(on(&state, "vm1"), on(&state, "vm2"));
    assert_eq!(refused(&mut state, &change("vm2", sends(1001))).kind, RefusalKind::NoRoom);
    must(&mut state, &create("vm3", wish(1001)));
    assert_ne!(on(&state, "vm1"), on(&state, "vm3"), "only the backup can promise it");
    assert_eq!(refused(&mut state, &create("vm4", wish(speed))).kind, RefusalKind::NoRoom);
}

#[test]
fn nothing_new_lies_on_an_ssd_that_does_not_work() {
    let mut state = pod();
    speak(&mut state, Protocol::DECIDES_BY_MORE);
    let device = DeviceId { host: HostId::new(2), name: "ssd0".into() };
    let reason = "it is broken".to_owned();
    must(&mut state, &Command::DeviceFailed { device: device.clone(), reason });
    assert_eq!(refused(&mut state, &volume_on(&device, "vol0", 16)).kind, RefusalKind::NoRoom);
}
