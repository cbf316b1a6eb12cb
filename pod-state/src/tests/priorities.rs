//! Who comes first where devices are short.

use std::collections::BTreeMap;

use super::*;

fn set(name: &str, priority: u16) -> Command {
    Command::SetPriority { name: name.to_owned(), priority: priority_of(priority) }
}

fn priority_of(priority: u16) -> Priority {
    Priority::new(priority).expect("in range")
}

/// The priorities that backends are told.
fn told(state: &State) -> Vec<u16> {
    let objects = [NET_BACKEND, BACKUP_BACKEND, BLK_BACKEND].map(|backend| state.desired(backend));
    let told = objects.into_iter().flat_map(BTreeMap::into_values).filter_map(|object| match object {
        Object::Registration(it) => Some(it.priority.get()),
        Object::Volume(it) => Some(it.priority.get()),
        _ => None,
    });
    told.collect()
}

#[test]
fn backends_are_told_of_another_priority_at_once() {
    let mut state = pod_with_vm();
    assert_eq!(told(&state), [100; 3], "with the NIC, its backup, and the SSD");
    let version = state.instance_version(state.instance_named("vm1").unwrap());
    let effects = must(&mut state, &set("vm1", 300));
    assert_eq!(kinds(&effects), [EventKind::PriorityChanged]);
    assert_eq!(told(&state), [300; 3]);
    assert_ne!(state.instance_version(state.instance_named("vm1").unwrap()), version);
    assert_eq!(must(&mut state, &set("vm1", 300)), [], "it has it");
    assert_eq!(refused(&mut state, &set("vm2", 300)).kind, RefusalKind::NotFound);
}

#[test]
fn a_priority_is_asked_for_or_comes_from_the_type() {
    let mut state = pod();
    let instance_type = InstanceType { priority: Some(Priority::MAX), ..InstanceType::default() };
    must(&mut state, &Command::SetInstanceType { name: "high".to_owned(), instance_type });
    for (name, wanted, kind, expected) in [
        ("a", None, None, 100),
        ("b", Some(7), None, 7),
        ("c", None, Some("high"), 1000),
        ("d", Some(7), Some("high"), 7),
    ] {
        let mut create = instance(name, 1, &[]);
        if let Command::CreateInstance { priority, instance_type, .. } = &mut create {
            *priority = wanted.map(priority_of);
            *instance_type = kind.map(str::to_owned);
        }
        must(&mut state, &create);
        assert_eq!(state.instance_named(name).unwrap().priority.get(), expected, "{name}");
    }
}

#[test]
fn a_drained_nic_is_left_first_by_who_comes_first() {
    let mut state = State::new(options(2048));
    for host in 1..=5 {
        let devices = if host == 1 { Vec::new() } else { vec![nic("nic0", true, host == 5)] };
        for (role, devices) in [(Role::NetFrontend, Vec::new()), (Role::NetBackend, devices)] {
            let id = endpoint(host, role);
            must(&mut state, &Command::Join { endpoint: id, incarnation: 1, join: join(host, devices) });
        }
    }
    // Of 10000 Mbit/s each, h3 has 1000 left and h4 4000: room for one of the three on h2.
    for (name, on, mbps) in [("e", 3, 9000), ("f", 4, 6000), ("a", 2, 3000), ("b", 2, 3000), ("c", 2, 3000)] {
        let mut create = instance(name, 1, &[]);
        if let Command::CreateInstance { host, nics, .. } = &mut create {
            *host = HostId::new(on);
            nics[0].reserved_mbps = mbps;
        }
        must(&mut state, &create);
    }
    must(&mut state, &set("b", 300));
    must(&mut state, &Command::Drain { host: HostId::new(2), device: None, on: true });
    let at = |state: &State| {
        ["a", "b", "c"].map(|name| {
            let lease = state.instance_named(name).unwrap().nics[0];
            state.leases[&lease].active_nic().unwrap().host.get()
        })
    };
    assert_eq!(at(&state), [2, 4, 2]);
    // There is room for one more.
    must(&mut state, &set("c", 101));
    must(&mut state, &Command::DeleteInstance { name: "f".to_owned(), force: true });
    assert_eq!(at(&state), [4, 4, 4]);
}

/// A guest on host 1 with one NIC.
fn guest_with(name: &str, wish: NicWish) -> Command {
    create_instance(name, 1, vec![wish], &[])
}

#[test]
fn who_was_in_the_way_of_another_that_leaves_is_not_any_more() {
    let mut state = State::new(options(2048));
    state.options.protocol_minor = Protocol::DECIDES_BY_MORE;
    let jumbo = |name| {
        let mut report = nic(name, true, false);
        if let DeviceReport::Nic { mtu, .. } = &mut report {
            *mtu = 9000;
        }
        report
    };
    let at = [(2, vec![jumbo("nic0")]), (3, vec![nic("nic0", true, false), jumbo("nic1")]), (4, vec![])];
    for (host, devices) in at.into_iter().chain([(1, vec![])]) {
        for (role, devices) in [(Role::NetFrontend, Vec::new()), (Role::NetBackend, devices)] {
            let id = endpoint(host, role);
            must(&mut state, &Command::Join { endpoint: id, incarnation: 1, join: join(host, devices) });
        }
    }
    // Only h2 and the second NIC of h3 carry what a needs, and b, from which it is to be apart, is at h3.
    let apart = || Some("web".to_owned());
    must(&mut state, &guest_with("a", NicWish { mtu: Some(9000), apart: apart(), ..NicWish::default() }));
    must(&mut state, &guest_with("b", NicWish { apart: apart(), ..NicWish::default() }));
    must(&mut state, &set("a", 300));
    let at = |state: &State| {
        ["a", "b"].map(|name| {
            let lease = state.instance_named(name).unwrap().nics[0];
            state.leases[&lease].active_nic().unwrap().clone()
        })
    };
    let nic_of = |host, name: &str| DeviceId { host: HostId::new(host), name: name.into() };
    let [a, b] = at(&state);
    assert_eq!((a.host.get(), b.host.get()), (2, 3));
    // It is not that b would rather go to the other NIC of its host.
    for name in ["c", "d", "e"] {
        must(&mut state, &guest_with(name, NicWish { mtu: Some(9000), ..NicWish::default() }));
    }
    must(&mut state, &Command::Drain { host: HostId::new(2), device: Some("nic0".to_owned()), on: true });
    assert_eq!(at(&state), [a, b.clone()]);
    let joins = join(4, vec![nic("nic0", true, false)]);
    let joins = Command::Join { endpoint: endpoint(4, Role::NetBackend), incarnation: 2, join: joins };
    must(&mut state, &joins);
    must(&mut state, &Command::Drain { host: HostId::new(3), device: Some(b.name.to_string()), on: true });
    assert_eq!(at(&state), [nic_of(3, "nic1"), nic_of(4, "nic0")]);
}
