//! A fabric as large as is asked for: 64 hosts with 256 VMs each, over two levels of switches.

use std::collections::{BTreeMap, BTreeSet};

use pod_protocol::objects::{FabricObject, MchannelObject};

use super::*;

const HOSTS: u16 = 64;
const VMS: u16 = 256;
const HOSTS_AT_LEAF: u16 = 8;
const DEVICES: u16 = 16;
const TENANTS: u16 = 8;

fn wish() -> FabricWish {
    let ports = (1..=HOSTS).map(|host| (port(host), 22_000_000_000));
    let uplinks = (1..=HOSTS).map(|host| (uplink(host), 88_000_000_000));
    let devices = (0..DEVICES).map(|device| (format!("device{device}"), 44_000_000_000));
    FabricWish {
        window_us: 1000,
        sample_us: 10_000,
        elements: ports.chain(uplinks).chain(devices).collect(),
        tenants: (0..TENANTS).map(|tenant| (format!("tenant{tenant}"), u32::from(tenant) + 1)).collect(),
        signals: BTreeMap::new(),
    }
}

fn port(host: u16) -> String {
    format!("port{host}")
}

fn uplink(host: u16) -> String {
    format!("uplink{}", (host - 1) / HOSTS_AT_LEAF)
}

fn share(host: u16, vm: u16) -> Command {
    let path = vec![port(host), uplink(host), format!("device{}", vm % DEVICES)];
    let tenant = format!("tenant{}", vm / DEVICES % TENANTS);
    let mchannel = Mchannel { weight: u32::from(vm % 3) + 1, tenant, path };
    Command::SetMchannel { instance: format!("h{host}-vm{vm}"), mchannel }
}

/// Commands of a pod that is too large to look at all of it after each of them.
fn apply(state: &mut State, command: &Command) {
    state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
}

fn told(state: &State, id: EndpointId) -> (FabricObject, Vec<MchannelObject>) {
    let (mut fabric, mut mchannels) = (None, Vec::new());
    for object in state.desired(id).into_values() {
        match object {
            Object::Fabric(object) => fabric = Some(object),
            Object::Mchannel(object) => mchannels.push(object),
            _ => {}
        }
    }
    (fabric.expect("it is shared"), mchannels)
}

#[test]
fn a_pod_of_64_hosts_with_256_vms_each_shares_a_fabric_of_two_levels() {
    let mut state = State::new(options(1024));
    for id in [NET_BACKEND, BACKUP_BACKEND] {
        join_as(&mut state, id, 1);
    }
    let refusal = refused(&mut state, &Command::SetFabric { fabric: wish() });
    assert_eq!(refusal.kind, RefusalKind::InvalidValue, "replicas of the version before refuse it");
    speak(&mut state, Protocol::SHARES_LARGE_FABRICS);
    must(&mut state, &Command::SetFabric { fabric: wish() });
    assert_eq!(state.fabric.elements.len(), 88);
    for host in 1..=HOSTS {
        for role in [Role::NetFrontend, Role::BlkFrontend] {
            apply(&mut state, &join_command(endpoint(host, role), 1));
        }
        for vm in 0..VMS {
            // Those of one host have a device each: others' would only take time here.
            let nics = usize::from(host == 1);
            let nics = vec![NicWish::default(); nics];
            apply(&mut state, &create_instance(&format!("h{host}-vm{vm}"), host, nics, &[]));
            apply(&mut state, &share(host, vm));
        }
    }
    check(&state);
    assert_eq!(state.fabric.mchannels.len(), usize::from(HOSTS * VMS));

    // What each of the frontends of that host tells the others has room on its board.
    let (fabric, mchannels) = told(&state, NET_FRONTEND);
    assert_eq!((fabric.peers.len(), mchannels.len()), (2 * usize::from(HOSTS) - 1, usize::from(VMS)));
    let mut used: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for mchannel in &mchannels {
        for element in &mchannel.path {
            used.entry(*element).or_default().insert(mchannel.tenant);
        }
    }
    let records: usize = used.values().map(|tenants| 1 + tenants.len()).sum();
    assert_eq!((used.len(), records), (18, 162));
    assert!((records as u64) < fabric.sums.lines.get() && u64::from(VMS) < fabric.vms.lines.get());
    // And all boards together are little of a pool.
    let boards = 2 * u64::from(HOSTS) * (fabric.sums.bytes() + fabric.vms.bytes());
    assert!(boards <= 8 * MIB, "{boards} bytes");
}

#[test]
fn shares_that_a_hosts_board_has_no_room_for_are_refused_there() {
    let mut state = pod();
    join_as(&mut state, endpoint(4, Role::NetFrontend), 1);
    speak(&mut state, Protocol::SHARES_LARGE_FABRICS);
    let fabric = FabricWish { tenants: (0..64).map(|it| (format!("t{it}"), 1)).collect(), ..wish() };
    must(&mut state, &Command::SetFabric { fabric });
    let mut give = |vm: u16, host: u16, elements: u16| {
        let instance = format!("vm{host}-{vm}");
        must(&mut state, &create_instance(&instance, host, Vec::new(), &[]));
        let path = (0..elements).map(|device| format!("device{device}")).collect();
        let mchannel = Mchannel { weight: 1, tenant: format!("t{vm}"), path };
        state.apply(&Command::SetMchannel { instance, mchannel }).map_err(|refusal| refusal.kind)
    };
    // Of each of 16 devices one line, and one for each of 30 tenants: 496. With those of another one it would be 512.
    for vm in 0..30 {
        assert!(give(vm, 1, 16).is_ok(), "{vm}");
    }
    assert!(give(30, 1, 16) == Err(RefusalKind::NoRoom));
    assert!(give(31, 1, 15).is_ok(), "511 is what there is");
    assert!(give(32, 1, 1) == Err(RefusalKind::NoRoom));
    assert!(give(30, 4, 16).is_ok(), "another host has a board of its own");
}
