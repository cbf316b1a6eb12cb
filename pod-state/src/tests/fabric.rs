use pod_api::DEFAULT_TENANT;
use pod_protocol::objects::{FabricObject, MchannelObject, Signal};
use pod_protocol::protocol::Protocol;

use super::*;
use crate::model::fabric;

fn shared(elements: u8, tenant: bool) -> Command {
    Command::SetFabric { fabric: fabric(elements, tenant, 100_000_000) }
}

fn share(instance: &str, weight: u32, tenant: &str, path: &[&str]) -> Command {
    let path = path.iter().map(|name| (*name).to_owned()).collect();
    let mchannel = Mchannel { weight, tenant: tenant.to_owned(), path };
    Command::SetMchannel { instance: instance.to_owned(), mchannel }
}

fn fabric_at(state: &State, id: EndpointId) -> Option<FabricObject> {
    match state.desired(id).remove(&ObjectId::Fabric) {
        Some(Object::Fabric(fabric)) => Some(fabric),
        _ => None,
    }
}

fn mchannels_at(state: &State, id: EndpointId) -> Vec<MchannelObject> {
    let mchannel = |object| if let Object::Mchannel(it) = object { Some(it) } else { None };
    state.desired(id).into_values().filter_map(mchannel).collect()
}

fn with_vm() -> State {
    let mut state = pod();
    must(&mut state, &volume("vol0", 8));
    must(&mut state, &instance("vm", 1, &["vol0"]));
    state
}

#[test]
fn both_frontends_of_a_host_are_told_and_know_each_other() {
    let mut state = with_vm();
    assert!(fabric_at(&state, NET_FRONTEND).is_none(), "nothing is shared unless it is said");
    must(&mut state, &shared(2, true));
    must(&mut state, &share("vm", 3, "red", &["link1", "link0"]));
    let (net, blk) = (fabric_at(&state, NET_FRONTEND).unwrap(), fabric_at(&state, BLK_FRONTEND).unwrap());
    assert_eq!((net.peers[0].endpoint, net.peers[0].sums), (BLK_FRONTEND, blk.sums));
    assert_eq!((net.sibling, blk.sibling), (Some(blk.vms), Some(net.vms)));
    assert_eq!(net.elements.len(), 2);
    for id in [NET_FRONTEND, BLK_FRONTEND] {
        let [mchannel] = &mchannels_at(&state, id)[..] else { panic!("one device at each") };
        let numbers: Vec<u32> = net.elements.iter().map(|element| element.element).rev().collect();
        assert_eq!((mchannel.weight, &mchannel.path), (3, &numbers));
    }
    assert!(fabric_at(&state, NET_BACKEND).is_none());
    must(&mut state, &Command::ClearMchannel { instance: "vm".to_owned() });
    assert!(mchannels_at(&state, NET_FRONTEND).is_empty());
    let again = Command::ClearMchannel { instance: "vm".to_owned() };
    assert_eq!(refused(&mut state, &again).kind, RefusalKind::NotFound);
}

#[test]
fn each_life_of_a_frontend_has_a_board_of_its_own() {
    let mut state = with_vm();
    must(&mut state, &shared(1, false));
    let before = fabric_at(&state, NET_FRONTEND).unwrap();
    join_as(&mut state, NET_FRONTEND, 2);
    let after = fabric_at(&state, NET_FRONTEND).unwrap();
    assert!(!before.sums.overlaps(&after.sums));
    assert_eq!(fabric_at(&state, BLK_FRONTEND).unwrap().peers[0].sums, after.sums);
    // One that left has none.
    must(&mut state, &Command::Gone { endpoint: NET_FRONTEND });
    assert!(fabric_at(&state, BLK_FRONTEND).unwrap().peers.is_empty());
    must(&mut state, &shared(0, false));
    assert!(fabric_at(&state, BLK_FRONTEND).is_none());
}

#[test]
fn what_makes_no_sense_or_is_needed_is_refused() {
    let mut state = with_vm();
    assert_eq!(refused(&mut state, &share("vm", 1, DEFAULT_TENANT, &["link0"])).kind, RefusalKind::NotFound);
    must(&mut state, &shared(1, true));
    for (command, kind) in [
        (share("vm", 0, DEFAULT_TENANT, &["link0"]), RefusalKind::InvalidValue),
        (share("vm", WEIGHT_MAX + 1, DEFAULT_TENANT, &["link0"]), RefusalKind::InvalidValue),
        (share("vm", 1, DEFAULT_TENANT, &[]), RefusalKind::InvalidValue),
        (share("vm", 1, DEFAULT_TENANT, &["link0", "link0"]), RefusalKind::InvalidValue),
        (share("vm", 1, DEFAULT_TENANT, &["link1"]), RefusalKind::NotFound),
        (share("vm", 1, "blue", &["link0"]), RefusalKind::NotFound),
        (share("nobody", 1, "red", &["link0"]), RefusalKind::NotFound),
    ] {
        assert_eq!(refused(&mut state, &command).kind, kind, "{command:?}");
    }
    must(&mut state, &share("vm", 1, "red", &["link0"]));
    assert_eq!(refused(&mut state, &shared(1, false)).kind, RefusalKind::Busy, "its tenant");
    assert_eq!(refused(&mut state, &shared(0, true)).kind, RefusalKind::Busy, "its path");
    let wish = fabric(1, true, 100_000_000);
    for wrong in [
        FabricWish { window_us: 10, ..wish.clone() },
        FabricWish { sample_us: 999, ..wish.clone() },
        FabricWish { elements: [("link0".to_owned(), 999)].into(), ..wish.clone() },
        FabricWish { tenants: [("red".to_owned(), 0)].into(), ..wish.clone() },
        FabricWish { signals: [("link7".to_owned(), Signal::Probe)].into(), ..wish.clone() },
        fabric(65, true, 100_000_000),
        FabricWish {
            tenants: (0..60).map(|it| (format!("t{it}"), 1)).collect(),
            ..fabric(9, true, 1_000_000)
        },
    ] {
        let refusal = refused(&mut state, &Command::SetFabric { fabric: wrong.clone() });
        assert_eq!(refusal.kind, RefusalKind::InvalidValue, "{wrong:?}");
    }
}

#[test]
fn frontends_hear_what_tells_of_congestion_once_all_of_the_pod_understands_it() {
    let mut state = with_vm();
    let signals = |signal| FabricWish {
        signals: [("link0".to_owned(), signal)].into(),
        ..fabric(2, false, 100_000_000)
    };
    state.options.protocol_minor = Protocol::LOOKS_AT_CONGESTION - 1;
    let wish = Command::SetFabric { fabric: signals(Signal::Probe) };
    assert_eq!(refused(&mut state, &wish).kind, RefusalKind::Busy);
    state.options.protocol_minor = Protocol::LOOKS_AT_CONGESTION;
    must(&mut state, &wish);
    let heard = |state: &State| {
        let elements = fabric_at(state, NET_FRONTEND).unwrap().elements;
        elements.iter().map(|it| it.signal).collect::<Vec<_>>()
    };
    assert_eq!(heard(&state), [Signal::Probe, Signal::Off]);
    must(&mut state, &Command::SetFabric { fabric: signals(Signal::Device) });
    assert_eq!(heard(&state), [Signal::Device, Signal::Off]);
    // The upgrade is taken back.
    let configure = |minor| Options { protocol_minor: minor, ..state.options.clone() };
    let (before, now) =
        (configure(Protocol::LOOKS_AT_CONGESTION - 1), configure(Protocol::LOOKS_AT_CONGESTION));
    must(&mut state, &Command::Configure { options: before });
    assert_eq!(heard(&state), [Signal::Off; 2]);
    must(&mut state, &Command::Configure { options: now });
    must(&mut state, &wish);
    assert_eq!(heard(&state), [Signal::Probe, Signal::Off]);
    must(&mut state, &shared(2, false));
    assert_eq!(heard(&state), [Signal::Off; 2]);
}

#[test]
fn numbers_of_elements_stay_and_are_not_used_again() {
    let mut state = with_vm();
    let number = |state: &State| fabric_at(state, NET_FRONTEND).unwrap().elements[0].element;
    must(&mut state, &shared(1, false));
    let first = number(&state);
    must(&mut state, &shared(2, true));
    assert_eq!(number(&state), first);
    must(&mut state, &shared(0, false));
    must(&mut state, &shared(1, false));
    assert_ne!(number(&state), first, "what a frontend still knows under it is another one");
}

#[test]
fn a_share_ends_with_its_instance() {
    let mut state = with_vm();
    must(&mut state, &shared(1, false));
    must(&mut state, &share("vm", 1, DEFAULT_TENANT, &["link0"]));
    must(&mut state, &Command::DeleteInstance { name: "vm".to_owned(), force: true });
    assert!(state.fabric.mchannels.is_empty());
    must(&mut state, &shared(0, false));
}
