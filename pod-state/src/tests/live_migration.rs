use super::*;

const FRONTENDS_THERE: [EndpointId; 2] =
    [EndpointId::new(HostId::new(3), Role::NetFrontend), EndpointId::new(HostId::new(3), Role::BlkFrontend)];

fn prepare() -> Command {
    Command::PrepareMigration { name: "vm1".to_owned(), to: HostId::new(3) }
}

fn activate(force: bool) -> Command {
    Command::ActivateMigration { name: "vm1".to_owned(), force }
}

fn abort() -> Command {
    Command::AbortMigration { name: "vm1".to_owned() }
}

/// A VM that runs on h1, and frontends on h3.
fn running_vm() -> State {
    let mut state = pod_with_vm();
    for id in FRONTENDS_THERE {
        join_as(&mut state, id, 1);
    }
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    must(&mut state, &attached(NET_FRONTEND, net, true));
    must(&mut state, &attached(BLK_FRONTEND, disk, true));
    state
}

fn released(endpoint: EndpointId, lease: LeaseId) -> Command {
    attached(endpoint, lease, false)
}

/// Of the objects for guests that an endpoint has: whether they are incoming, and with which generation they are used.
fn sides(state: &State, id: EndpointId) -> Vec<(bool, u16)> {
    let side = |object| match object {
        Object::Port(it) => Some((it.incoming, it.active.generation.get())),
        Object::Disk(it) => Some((it.incoming, it.route.generation.get())),
        _ => None,
    };
    state.desired(id).into_values().filter_map(side).collect()
}

#[test]
fn an_instance_moves_when_one_side_has_let_go_and_the_other_runs() {
    let mut state = running_vm();
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    must(&mut state, &prepare());
    assert_eq!(refused(&mut state, &prepare()).kind, RefusalKind::Busy);
    for there in FRONTENDS_THERE {
        assert_eq!(sides(&state, there), [(true, 1)], "it may negotiate, and no more");
    }
    assert_eq!(sides(&state, NET_FRONTEND), [(false, 1)]);
    let incoming = |state: &State| nic_lease(state).incoming.expect("it moves");
    assert_ne!(incoming(&state).socket, nic_lease(&state).socket);

    // The VMM there connects; the one here stops its guest, one device after the other; the one there goes on.
    must(&mut state, &attached(FRONTENDS_THERE[0], net, false));
    must(&mut state, &released(NET_FRONTEND, net));
    must(&mut state, &attached(FRONTENDS_THERE[0], net, true));
    assert_eq!(sides(&state, NET_FRONTEND), [(false, 1)], "the disk is still in use here");
    let areas = (nic_lease(&state).area, incoming(&state).area);
    let effects = must(&mut state, &released(BLK_FRONTEND, disk));
    assert_eq!(kinds(&effects), [EventKind::InstanceMigrated]);
    for (here, there) in [NET_FRONTEND, BLK_FRONTEND].into_iter().zip(FRONTENDS_THERE) {
        assert_eq!(sides(&state, here), []);
        assert_eq!(sides(&state, there), [(false, 2)]);
    }
    let lease = nic_lease(&state);
    assert!(lease.connected && lease.running && lease.area == areas.1 && lease.area != areas.0);
    // Backends accept nothing of what the old side may still send, and know the new one.
    let registered = state.desired(NET_BACKEND).into_values().find_map(|object| match object {
        Object::Registration(it) => Some((it.generation.get(), it.channel)),
        _ => None,
    });
    let channel = state.channel_between(FRONTENDS_THERE[0], NET_BACKEND).map(|channel| channel.id);
    assert_eq!(registered.map(|(generation, channel)| (generation, Some(channel))), Some((2, channel)));
    let served = state
        .desired(BLK_BACKEND)
        .into_values()
        .any(|object| matches!(object, Object::Volume(it) if it.generation.get() == 2 && it.lease == disk));
    assert!(served, "at once: the new area needs no cleaning");
    // What the old side says now is of no interest.
    must(&mut state, &attached(NET_FRONTEND, net, true));
    assert_eq!(state.instance_named("vm1").map(|it| (it.host, it.incoming)), Some((HostId::new(3), None)));
    for command in scrub_all(&state) {
        must(&mut state, &command);
    }
    // And home again.
    let back = Command::PrepareMigration { name: "vm1".to_owned(), to: HostId::new(1) };
    must(&mut state, &back);
    assert_eq!(refused(&mut state, &activate(false)).kind, RefusalKind::Connected);
    must(&mut state, &released(FRONTENDS_THERE[0], net));
    must(&mut state, &attached(BLK_FRONTEND, disk, true));
    assert_eq!(sides(&state, BLK_FRONTEND), [(false, 3)]);
}

#[test]
fn a_move_that_is_given_up_leaves_everything_as_it_was() {
    let mut state = running_vm();
    assert_eq!(refused(&mut state, &abort()).kind, RefusalKind::NotFound);
    let before = (sides(&state, NET_FRONTEND), sides(&state, BLK_FRONTEND), nic_lease(&state));
    must(&mut state, &prepare());
    must(&mut state, &attached(FRONTENDS_THERE[0], before.2.id, false));
    let effects = must(&mut state, &abort());
    assert_eq!(kinds(&effects), [EventKind::MigrationAborted]);
    assert_eq!((sides(&state, NET_FRONTEND), sides(&state, BLK_FRONTEND), nic_lease(&state)), before);
    assert_eq!(FRONTENDS_THERE.map(|there| sides(&state, there).len()), [0, 0]);
    for command in scrub_all(&state) {
        must(&mut state, &command);
    }
    must(&mut state, &prepare());
}

#[test]
fn the_other_side_gets_nothing_while_this_one_is_not_heard_from() {
    let mut state = running_vm();
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    must(&mut state, &prepare());
    must(&mut state, &Command::Silent { endpoint: NET_FRONTEND });
    must(&mut state, &Command::Gone { endpoint: BLK_FRONTEND });
    must(&mut state, &attached(FRONTENDS_THERE[0], net, true));
    must(&mut state, &attached(FRONTENDS_THERE[1], disk, true));
    assert_eq!(sides(&state, FRONTENDS_THERE[0]), [(true, 1)]);
    assert_eq!(refused(&mut state, &activate(false)).kind, RefusalKind::Connected);
    // Somebody knows that it is dead.
    must(&mut state, &activate(true));
    assert_eq!(sides(&state, FRONTENDS_THERE[0]), [(false, 2)]);
    assert_eq!(sides(&state, NET_FRONTEND), [], "should it come back after all");
}

#[test]
fn a_frontend_that_is_started_again_has_no_rings() {
    let mut state = running_vm();
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    must(&mut state, &prepare());
    must(&mut state, &attached(FRONTENDS_THERE[0], net, true));
    must(&mut state, &attached(FRONTENDS_THERE[1], disk, true));
    for there in FRONTENDS_THERE {
        join_as(&mut state, there, 2);
        assert_eq!(sides(&state, there), [(true, 1)]);
    }
    // The guest ran there, and the daemons died: nothing runs anywhere, so nothing moves by itself.
    must(&mut state, &released(NET_FRONTEND, net));
    must(&mut state, &released(BLK_FRONTEND, disk));
    assert_eq!(sides(&state, NET_FRONTEND), [(false, 1)]);
    must(&mut state, &attached(FRONTENDS_THERE[1], disk, true));
    assert_eq!(sides(&state, FRONTENDS_THERE[1]), [(false, 2)]);
}

#[test]
fn an_instance_moves_only_where_it_can() {
    let mut state = pod_with_vm();
    assert_eq!(refused(&mut state, &prepare()).kind, RefusalKind::HostNotReady);
    for id in FRONTENDS_THERE {
        join_as(&mut state, id, 1);
    }
    let to = |name: &str, host| Command::PrepareMigration { name: name.to_owned(), to: HostId::new(host) };
    assert_eq!(refused(&mut state, &to("vm1", 1)).kind, RefusalKind::InvalidValue);
    assert_eq!(refused(&mut state, &to("vm2", 3)).kind, RefusalKind::NotFound);
    // What differs between replicas is known to one frontend only: the next one brings all of them in line.
    join_as(&mut state, EndpointId::new(HostId::new(3), Role::BlkBackend), 1);
    let pair = Command::CreateVolume {
        name: "pair".to_owned(),
        size_bytes: MIB,
        device: None,
        replicas: 2,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    must(&mut state, &pair);
    must(&mut state, &instance("vm3", 0, &["pair"]));
    must(&mut state, &to("vm3", 3));
    // From each host the replica of its own comes first.
    let places = |frontend: EndpointId| {
        state.desired(frontend).into_values().find_map(|object| match object {
            Object::Disk(disk) => Some(disk.replicas.into_iter().map(|it| it.ssd).collect::<Vec<_>>()),
            _ => None,
        })
    };
    let at_host_3 = places(FRONTENDS_THERE[1]).unwrap();
    assert!(at_host_3[0].starts_with("h3/") && at_host_3.len() == 2, "{at_host_3:?}");
    // Nor does its volume move meanwhile.
    let more = Command::AddReplica { name: "pair".to_owned(), device: None, replaces: None };
    assert_eq!(refused(&mut state, &more).kind, RefusalKind::Busy);
    // A pool that has room for one side only.
    let mut small = State::new(options(18));
    for id in [NET_FRONTEND, BLK_FRONTEND, NET_BACKEND, BLK_BACKEND].into_iter().chain(FRONTENDS_THERE) {
        join_as(&mut small, id, 1);
    }
    must(&mut small, &instance("vm1", 1, &[]));
    while small.apply(&instance(&format!("more{}", small.instances.len()), 1, &[])).is_ok() {}
    assert_eq!(refused(&mut small, &prepare()).kind, RefusalKind::NoRoom);
}

/// Whether its volume lies there, or will.
fn lies_on(state: &State, host: u16) -> bool {
    let mut devices = state.volume_named("vol0").expect("a volume").devices();
    devices.any(|device| device.host == HostId::new(host))
}

#[test]
fn a_volume_begins_to_move_when_its_instance_does_not_any_more() {
    let drain = |on: bool| Command::Drain { host: HostId::new(2), device: Some("ssd0".to_owned()), on };
    let device = |host: u16| DeviceId { host: HostId::new(host), name: "ssd0".into() };
    let add = |replaces: Option<DeviceId>| Command::AddReplica {
        name: "vol0".to_owned(),
        device: Some(device(3)),
        replaces,
    };
    for aborted in [false, true] {
        let mut state = running_vm();
        join_as(&mut state, EndpointId::new(HostId::new(3), Role::BlkBackend), 1);
        let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
        must(&mut state, &prepare());
        for command in [add(Some(device(2))), add(None)] {
            let refusal = refused(&mut state, &command);
            assert_eq!(refusal.kind, RefusalKind::Busy);
            assert!(refusal.detail.contains("podctl instances abort-migration vm1"), "{refusal}");
        }
        // Who wants the SSD to be empty need not ask again.
        must(&mut state, &drain(true));
        assert!(!lies_on(&state, 3));
        if aborted {
            must(&mut state, &abort());
        } else {
            must(&mut state, &released(NET_FRONTEND, net));
            must(&mut state, &attached(FRONTENDS_THERE[0], net, true));
            assert!(!lies_on(&state, 3));
            must(&mut state, &released(BLK_FRONTEND, disk));
        }
        assert!(lies_on(&state, 3), "aborted: {aborted}");
    }
}

#[test]
fn deleting_an_instance_ends_its_move() {
    let mut state = running_vm();
    must(&mut state, &prepare());
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    assert_eq!(FRONTENDS_THERE.map(|there| sides(&state, there).len()), [0, 0]);
}

#[test]
fn what_the_driver_chose_and_what_it_has_yet_to_hear_moves_along() {
    let mut state = running_vm();
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    let report = |running| Command::Attachment {
        endpoint: BLK_FRONTEND,
        lease: disk,
        connected: true,
        running,
        write_through: true,
        untold: !running,
    };
    must(&mut state, &report(true));
    must(&mut state, &prepare());
    must(&mut state, &report(false));
    must(&mut state, &released(NET_FRONTEND, net));
    must(&mut state, &attached(FRONTENDS_THERE[1], disk, true));
    let moved = state.desired(FRONTENDS_THERE[1]).into_values();
    let told: Vec<(bool, bool)> = moved
        .filter_map(
            |object| if let Object::Disk(it) = object { Some((it.write_through, it.untold)) } else { None },
        )
        .collect();
    assert_eq!(told, [(true, true)]);
}

#[test]
fn who_listens_is_the_instances_on_both_sides_of_a_move() {
    for listens in [false, true] {
        let mut state = pod();
        for id in FRONTENDS_THERE {
            join_as(&mut state, id, 1);
        }
        must(&mut state, &volume("vol0", 16));
        let Command::CreateInstance { name, host, nics, volumes, instance_type, .. } =
            instance("vm1", 1, &["vol0"])
        else {
            unreachable!("it creates an instance")
        };
        let create = Command::CreateInstance {
            name,
            host,
            nics,
            volumes,
            instance_type,
            vmm_listens: listens,
            ram_bytes: None,
            priority: None,
        };
        must(&mut state, &create);
        must(&mut state, &prepare());
        let says = |id| {
            let objects = state.desired(id).into_values();
            objects.filter_map(|object| match object {
                Object::Port(it) => Some(it.vmm_listens),
                Object::Disk(it) => Some(it.vmm_listens),
                _ => None,
            })
        };
        for id in [NET_FRONTEND, BLK_FRONTEND].into_iter().chain(FRONTENDS_THERE) {
            assert_eq!(says(id).collect::<Vec<_>>(), [listens], "{id}");
        }
    }
}

#[test]
fn a_nic_that_is_to_be_empty_is_left_once_the_move_ends_a_drain() {
    let mut state = running_vm();
    let nic = |host: u16| DeviceId { host: HostId::new(host), name: "nic0".into() };
    let to = Some(nic(3));
    must(&mut state, &Command::MigrateNic { instance: "vm1".to_owned(), device: "net0".to_owned(), to });
    assert_eq!(nic_lease(&state).draining_nic(), Some(&nic(2)));
    must(&mut state, &prepare());
    let drain = Command::Drain { host: HostId::new(3), device: Some("nic0".to_owned()), on: true };
    must(&mut state, &drain);
    assert_eq!(nic_lease(&state).active_nic(), Some(&nic(3)), "it has yet to leave the other one");
    // What it sent through the other one is not waited for any more.
    let effects = must(&mut state, &activate(true));
    assert_eq!(kinds(&effects), [EventKind::InstanceMigrated, EventKind::Drained]);
    assert_eq!(nic_lease(&state).active_nic(), Some(&nic(2)));
}

#[test]
fn a_frontend_that_starts_anew_does_not_let_a_guest_be_taken_for_stopped() {
    let mut state = running_vm();
    speak(&mut state, Protocol::REMEMBERS_VMMS);
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    must(&mut state, &prepare());
    must(&mut state, &attached(FRONTENDS_THERE[0], net, false));
    must(&mut state, &attached(FRONTENDS_THERE[1], disk, false));
    must(&mut state, &released(BLK_FRONTEND, disk));
    join_as(&mut state, NET_FRONTEND, 2);
    let refusal = refused(&mut state, &activate(false));
    assert!(refusal.kind == RefusalKind::Connected && refusal.detail.contains("started anew"), "{refusal}");
    // Its VMM is back, and has stopped the guest.
    must(&mut state, &released(NET_FRONTEND, net));
    // The VMMs here go away. The ones there are about to connect again, and the instance is theirs.
    for (endpoint, lease) in [(NET_FRONTEND, net), (BLK_FRONTEND, disk)] {
        must(&mut state, &unattached(endpoint, lease));
    }
    for there in FRONTENDS_THERE {
        join_as(&mut state, there, 2);
    }
    let delete = Command::DeleteInstance { name: "vm1".to_owned(), force: false };
    let refusal = refused(&mut state, &delete);
    assert!(refusal.kind == RefusalKind::Connected && refusal.detail.contains("started anew"), "{refusal}");
    for command in scrub_all(&state) {
        must(&mut state, &command);
    }
    must(&mut state, &activate(false));
    assert_eq!(refused(&mut state, &delete).kind, RefusalKind::Connected);
    for (endpoint, lease) in FRONTENDS_THERE.into_iter().zip([net, disk]) {
        must(&mut state, &unattached(endpoint, lease));
    }
    must(&mut state, &delete);
}

/// Its sockets have other names where it has come to.
#[test]
fn an_instance_that_has_moved_gets_no_second_device_of_a_name() {
    let mut state = running_vm();
    speak(&mut state, Protocol::DECIDES_BY_MORE);
    must(&mut state, &prepare());
    must(&mut state, &activate(true));
    let name = nic_lease(&state).device;
    let nic = Some(Box::new(NicWish { device: Some(name), ..NicWish::default() }));
    let again = Command::AttachDevice { instance: "vm1".to_owned(), nic, volume: None };
    assert_eq!(refused(&mut state, &again).kind, RefusalKind::Exists);
}
