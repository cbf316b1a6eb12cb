//! NICs on which as many leases lean as their backends have room for.

use super::*;

/// As [`pod`], where two leases may lean on each NIC.
fn small_pod() -> State {
    let mut state = pod();
    let options = Options { nic_leases_max: 2, ..state.options.clone() };
    must(&mut state, &Command::Configure { options });
    state
}

pub(super) fn nics_of(state: &State, instance: &str) -> [Option<String>; 2] {
    let id = state.instance_named(instance).expect("an instance").nics[0];
    let lease = &state.leases[&id];
    [lease.active_nic(), lease.standby_nic()].map(|nic| nic.map(|nic| state.device_name(nic)))
}

pub(super) fn named(names: [&str; 2]) -> [Option<String>; 2] {
    names.map(|name| Some(name.to_owned()).filter(|name| !name.is_empty()))
}

#[test]
fn a_crowded_nic_takes_no_more_and_its_leases_go_on() {
    let mut state = small_pod();
    for name in ["a", "b"] {
        must(&mut state, &instance(name, 1, &[]));
        assert_eq!(nics_of(&state, name), named(["h2/nic0", "h3/nic0"]));
    }
    let refusal = refused(&mut state, &instance("c", 1, &[]));
    assert!(refusal.kind == RefusalKind::NoRoom && refusal.detail.contains("add a NIC"), "{refusal}");

    // Another NIC, which has no backup until one of those that lean on it goes.
    let nic1 = DeviceId { host: HostId::new(3), name: "nic1".into() };
    must(&mut state, &Command::Link { device: nic1.clone(), up: true, reason: "a cable".to_owned() });
    must(&mut state, &instance("c", 1, &[]));
    assert_eq!(nics_of(&state, "c"), named(["h3/nic1", ""]));
    let migrate = Command::MigrateNic {
        instance: "c".to_owned(),
        device: "net0".to_owned(),
        to: Some(DeviceId { host: HostId::new(2), name: "nic0".into() }),
    };
    let refusal = refused(&mut state, &migrate);
    assert!(refusal.detail.contains("as many instances as it can be"), "{refusal}");
    must(&mut state, &Command::DeleteInstance { name: "a".to_owned(), force: true });
    assert_eq!(nics_of(&state, "c"), named(["h3/nic1", "h3/nic0"]));

    // Who leans on a crowded NIC already moves to it, in need and in order.
    let nic0 = DeviceId { host: HostId::new(2), name: "nic0".into() };
    must(&mut state, &Command::Link { device: nic0.clone(), up: false, reason: "its cable".to_owned() });
    assert_eq!(nics_of(&state, "b")[0].as_deref(), Some("h3/nic0"));
    let drain = Command::Drain { host: HostId::new(3), device: Some("nic1".to_owned()), on: true };
    must(&mut state, &drain);
    assert_eq!(nics_of(&state, "c")[0].as_deref(), Some("h3/nic0"));
}
