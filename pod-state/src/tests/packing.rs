//! Where devices are filled one after the other.

use super::*;

fn packed(protocol_minor: u16) -> State {
    let placement = PlacementPolicy {
        prove_failover: false,
        nics: Filling::Pack,
        ssds: Filling::Pack,
        ..PlacementPolicy::default()
    };
    State::new(Options { placement, protocol_minor, ..options(2048) })
}

/// Host 1 has frontends, 2 to 4 a NIC and an SSD each.
fn pod_of_four(protocol_minor: u16) -> State {
    let mut state = packed(protocol_minor);
    join_as(&mut state, endpoint(1, Role::NetFrontend), 1);
    join_as(&mut state, endpoint(1, Role::BlkFrontend), 1);
    for host in 2..=4 {
        let ssds = devices_of(endpoint(2, Role::BlkBackend), true);
        for (role, devices) in [(Role::NetBackend, vec![nic("nic0", true, false)]), (Role::BlkBackend, ssds)]
        {
            let id = endpoint(host, role);
            must(&mut state, &Command::Join { endpoint: id, incarnation: 1, join: join(host, devices) });
        }
    }
    state
}

fn place(state: &mut State, name: &str, mbps: u64) -> String {
    let nics = vec![NicWish { reserved_mbps: mbps, ..NicWish::default() }];
    must(state, &create_instance(name, 1, nics, &[]));
    let id = state.instance_named(name).expect("an instance").nics[0];
    state.device_name(state.leases[&id].active_nic().expect("a NIC"))
}

fn host_of(state: &State, volume: &str) -> u16 {
    state.volume_named(volume).expect("a volume").replicas[0].device.host.get()
}

#[test]
fn a_nic_is_filled_before_the_next_one_is_begun() {
    let mut state = pod_of_four(1);
    let wanted = [("a", 4000), ("b", 3000), ("c", 4000), ("d", 2500), ("e", 6000)];
    let nics = wanted.map(|(name, mbps)| place(&mut state, name, mbps));
    assert_eq!(nics, ["h2/nic0", "h2/nic0", "h3/nic0", "h2/nic0", "h3/nic0"], "the fullest that has room");
    assert_eq!(place(&mut state, "large", 10_000), "h4/nic0");
}

#[test]
fn what_reserves_nothing_fills_a_nic_as_well() {
    let mut state = pod_of_four(1);
    let names: Vec<String> = (0..250).map(|number| place(&mut state, &format!("vm{number}"), 0)).collect();
    let on = |nic: &str| names.iter().filter(|it| *it == nic).count();
    assert_eq!(
        [on("h2/nic0"), on("h3/nic0"), on("h4/nic0")],
        [100, 100, 50],
        "each counts for 100 of 10 000 Mbit/s"
    );
    for number in 250..303 {
        place(&mut state, &format!("vm{number}"), 0);
    }
    let loads = state.loads();
    let leases: Vec<u32> = loads.nics().map(|(_, nic)| nic.leases).collect();
    assert_eq!(leases, [101, 101, 101], "beyond that they are spread");
}

#[test]
fn an_ssd_is_filled_before_the_next_one_is_begun() {
    let mut state = pod_of_four(1);
    let whole = match &state.devices.values().find(|it| !it.is_nic()).expect("an SSD").kind {
        Kind::Ssd { size_bytes, reserved_bytes, .. } => (size_bytes - reserved_bytes) / MIB,
        Kind::Nic { .. } => unreachable!(),
    };
    let quarter = whole / 4;
    for (number, mib) in [quarter, quarter, whole / 2 + quarter, quarter].into_iter().enumerate() {
        must(&mut state, &volume(&format!("vol{number}"), mib));
    }
    let hosts = ["vol0", "vol1", "vol2", "vol3"].map(|name| host_of(&state, name));
    assert_eq!((hosts[0], hosts[2]), (hosts[1], hosts[3]), "{hosts:?}: the fullest that has room");
    assert_ne!(hosts[0], hosts[2]);
    must(&mut state, &volume("large", whole));
}

#[test]
fn a_pod_of_the_version_before_spreads() {
    let mut state = pod_of_four(0);
    assert_ne!(place(&mut state, "vm1", 1000), place(&mut state, "vm2", 1000));
    must(&mut state, &volume("vol1", 1));
    must(&mut state, &volume("vol2", 1));
    assert_ne!(host_of(&state, "vol1"), host_of(&state, "vol2"));
    // Once all of it speaks the next one, what is wanted holds.
    let speaks = state.speaking(1);
    must(&mut state, &speaks);
    assert_eq!(place(&mut state, "vm3", 1000), place(&mut state, "vm4", 1000));
}
