//! Devices and hosts that are to be empty.

use super::*;
use crate::model::{self, guest_with_volume, pod_with_ssds};

fn drain(host: u16, device: Option<&str>, on: bool) -> Command {
    Command::Drain { host: HostId::new(host), device: device.map(str::to_owned), on }
}

fn active(state: &State) -> DeviceId {
    nic_lease(state).active_nic().expect("a NIC").clone()
}

fn link(host: u16, name: &str, up: bool) -> Command {
    let device = DeviceId { host: HostId::new(host), name: name.into() };
    Command::Link { device, up, reason: "its cable".to_owned() }
}

#[test]
fn leases_leave_a_drained_nic_in_order_and_go_home_afterwards() {
    let mut state = pod_with_vm();
    let before = active(&state);
    let effects = must(&mut state, &drain(2, Some("nic0"), true));
    assert_eq!(kinds(&effects), [EventKind::DrainBegun, EventKind::Drained]);
    assert_ne!(active(&state), before);
    assert_eq!(nic_lease(&state).draining_nic(), Some(&before), "nothing is lost");
    assert_eq!(must(&mut state, &drain(2, Some("nic0"), true)), [], "twice is once");
    let refusal = refused(&mut state, &Command::FailBack { device: before.clone() });
    assert_eq!(refusal.kind, RefusalKind::NoDevice);

    let (lease, generation) = state.drains().next().expect("a drain");
    must(&mut state, &Command::DrainExpired { lease, generation });
    assert_eq!(state.leases_on(&before), 0);
    must(&mut state, &drain(2, Some("nic0"), false));
    must(&mut state, &Command::FailBack { device: before.clone() });
    assert_eq!(active(&state), before);
}

#[test]
fn a_lease_stays_on_a_drained_nic_until_there_is_another_and_flees_to_it_in_need() {
    let mut state = pod_with_vm();
    must(&mut state, &link(3, "nic0", false));
    let before = active(&state);
    let effects = must(&mut state, &drain(2, None, true));
    assert_eq!(kinds(&effects), [EventKind::DrainBegun]);
    assert_eq!(active(&state), before, "there is nowhere to go");
    let effects = must(&mut state, &link(3, "nic0", true));
    assert!(kinds(&effects).contains(&EventKind::Drained));
    assert_ne!(active(&state), before);
    // A NIC that is to be empty and works is better than none.
    must(&mut state, &link(3, "nic0", false));
    assert_eq!(active(&state), before);
}

#[test]
fn nothing_new_comes_to_a_drained_host_whatever_it_reports() {
    let mut state = pod();
    must(&mut state, &drain(2, None, true));
    join_as(&mut state, NET_BACKEND, 2);
    join_as(&mut state, BLK_BACKEND, 2);
    assert_eq!(refused(&mut state, &volume("vol0", 16)).kind, RefusalKind::NoRoom);
    must(&mut state, &instance("vm1", 1, &[]));
    assert_eq!(active(&state).host, HostId::new(3));
    must(&mut state, &drain(2, None, false));
    must(&mut state, &volume("vol0", 16));
    assert_eq!(refused(&mut state, &drain(9, None, true)).kind, RefusalKind::NotFound);
    assert_eq!(refused(&mut state, &drain(2, Some("nic7"), true)).kind, RefusalKind::NotFound);
}

#[test]
fn volumes_in_use_leave_a_drained_ssd() {
    let mut state = pod_with_vm();
    join_as(&mut state, EndpointId::new(HostId::new(3), Role::BlkBackend), 1);
    let volume = disk_lease(&state).volume().expect("a volume");
    let from = state.volumes[&volume].replicas[0].device.clone();
    must(&mut state, &drain(from.host.get(), Some(&from.name), true));
    let replicas = &state.volumes[&volume].replicas;
    assert_eq!(replicas.len(), 2, "it is being copied");
    assert!(replicas[1].stale && replicas[1].replaces == Some(replicas[0].number));
    let epoch = state.volumes[&volume].epoch;
    must(&mut state, &link(3, "nic1", true));
    assert_eq!(state.volumes[&volume].epoch, epoch, "once");
}

/// Nobody copies what nobody uses: what waits behind it does not wait for that.
#[test]
fn volumes_that_are_not_used_any_more_keep_no_others_from_leaving() {
    let mut state = pod();
    speak(&mut state, Protocol::DECIDES_BY_MORE);
    join_as(&mut state, EndpointId::new(HostId::new(3), Role::BlkBackend), 1);
    let names = ["v1", "v2", "v3", "v4"];
    let from = DeviceId { host: HostId::new(2), name: "ssd0".into() };
    for name in names {
        must(&mut state, &volume_on(&from, name, 4));
    }
    for (vm, volume) in [("vm1", "v1"), ("vm2", "v2"), ("vm3", "v3"), ("vm4", "v4")] {
        must(&mut state, &instance(vm, 0, &[volume]));
    }
    must(&mut state, &drain(2, Some("ssd0"), true));
    let moving = |state: &State| names.map(|name| state.volume_named(name).expect("it is there").is_moving());
    assert_eq!(moving(&state), [true, true, false, false]);
    for vm in ["vm1", "vm2"] {
        must(&mut state, &Command::DeleteInstance { name: vm.to_owned(), force: true });
    }
    assert_eq!(moving(&state)[2..], [true, true]);
}

/// What is found of all devices at once is what is found of each.
#[test]
fn devices_are_told_apart_alike_one_by_one_and_all_at_once() {
    let mut state = pod_with_ssds(&[(None, None); 3]);
    for (name, host, replicas) in [("one", 2, 2), ("two", 3, 1)] {
        guest_with_volume(&mut state, name, 4, host, replicas).expect("there is room");
    }
    must(&mut state, &model::volume("free", (Some(2), 2), Groups::default()));
    for drained in [None, Some(2), Some(3)] {
        if let Some(host) = drained {
            must(&mut state, &drain(host, None, true));
        }
        let (leases, stay) = (state.leases_by_device(), state.that_stay());
        assert!(leases.values().sum::<u32>() >= 3, "{leases:?}");
        for id in state.devices.keys() {
            assert_eq!(leases.get(id).copied().unwrap_or(0), state.leases_on(id), "{id:?}");
            let stay: Vec<_> = stay.get(id).into_iter().flatten().map(|it| it.id).collect();
            assert_eq!(stay, state.that_stay_on(id).map(|it| it.id).collect::<Vec<_>>(), "{id:?}");
        }
        assert_eq!(stay.is_empty(), drained.is_none(), "{stay:?}");
    }
}

#[test]
fn nothing_comes_to_a_host_that_is_to_be_empty() {
    let mut state = pod_with_vm();
    speak(&mut state, Protocol::DECIDES_BY_MORE);
    for role in [Role::NetFrontend, Role::BlkFrontend] {
        join_as(&mut state, endpoint(3, role), 1);
    }
    must(&mut state, &drain(3, None, true));
    let (create, to) = (create_instance("vm2", 3, vec![NicWish::default()], &[]), HostId::new(3));
    let migrate = Command::PrepareMigration { name: "vm1".to_owned(), to };
    for command in [&create, &migrate] {
        let refusal = refused(&mut state, command);
        assert!(
            refusal.kind == RefusalKind::HostNotReady && refusal.detail.contains("undrain h3"),
            "{refusal}"
        );
    }
    // What is there already stays, and the other way round.
    must(&mut state, &drain(3, None, false));
    must(&mut state, &create);
    must(&mut state, &drain(3, None, true));
    let back = Command::PrepareMigration { name: "vm2".to_owned(), to: HostId::new(1) };
    must(&mut state, &back);
    must(&mut state, &drain(3, None, false));
    must(&mut state, &migrate);
}

#[test]
fn a_pod_of_the_version_before_has_instances_come_to_a_host_that_is_to_be_empty() {
    let mut state = pod_with_vm();
    join_as(&mut state, endpoint(3, Role::NetFrontend), 1);
    must(&mut state, &drain(3, None, true));
    must(&mut state, &create_instance("vm2", 3, vec![NicWish::default()], &[]));
}
