//! NICs that nothing is given to as long as there is another one, and that are better than none.

use super::crowded::{named, nics_of};
use super::*;

fn drain(host: u16, device: Option<&str>, on: bool) -> Command {
    Command::Drain { host: HostId::new(host), device: device.map(str::to_owned), on }
}

fn id(host: u16, name: &str) -> DeviceId {
    DeviceId { host: HostId::new(host), name: name.into() }
}

fn link(host: u16, name: &str, up: bool) -> Command {
    Command::Link { device: id(host, name), up, reason: "its cable".to_owned() }
}

fn hold(host: u16, name: &str) -> Command {
    Command::HoldLink { device: id(host, name), reason: "it flapped".to_owned() }
}

/// As [`pod`], where controllers know what is better than none: an instance on h2's NIC, and before it came each of these.
fn pod_after(commands: &[Command]) -> State {
    let mut state = pod();
    speak(&mut state, Protocol::DECIDES_BY_MORE);
    for command in commands {
        must(&mut state, command);
    }
    must(&mut state, &instance("vm1", 1, &[]));
    assert_eq!(nics_of(&state, "vm1"), named(["h2/nic0", ""]), "it has no backup");
    state
}

#[test]
fn a_lease_without_a_backup_flees_to_a_nic_that_is_to_be_empty_and_leaves_it_in_order() {
    let backup = drain(3, Some("nic0"), true);
    let ordinary = [drain(3, None, true), link(3, "nic0", false), link(3, "nic1", true)];
    let both = [drain(3, Some("nic0"), true), drain(3, None, true)];
    for (before, to) in [(&[backup][..], "h3/nic0"), (&ordinary, "h3/nic1"), (&both, "h3/nic0")] {
        let mut state = pod_after(before);
        let effects = must(&mut state, &link(2, "nic0", false));
        assert_eq!(kinds(&effects), [EventKind::LinkDown, EventKind::Failover]);
        assert_eq!(nics_of(&state, "vm1")[0].as_deref(), Some(to));
        // It is there in need only.
        let effects = must(&mut state, &link(2, "nic0", true));
        assert!(kinds(&effects).contains(&EventKind::Drained));
        assert_eq!(nics_of(&state, "vm1")[0].as_deref(), Some("h2/nic0"));
    }
}

#[test]
fn a_lease_without_a_backup_flees_to_a_nic_that_is_not_trusted() {
    let mut state = pod_after(&[hold(3, "nic0")]);
    must(&mut state, &Command::DeviceFailed { device: id(2, "nic0"), reason: "its driver".to_owned() });
    assert_eq!(nics_of(&state, "vm1")[0].as_deref(), Some("h3/nic0"));
}

#[test]
fn a_silent_backend_is_fenced_if_what_is_to_be_empty_can_take_over() {
    let mut state = pod_after(&[drain(3, None, true)]);
    let effects = must(&mut state, &Command::Silent { endpoint: NET_BACKEND });
    assert!(effects.iter().any(|it| it.fenced() == Some(NET_BACKEND)));
    must(&mut state, &Command::FenceExpired { endpoint: NET_BACKEND, incarnation: 1 });
    assert_eq!(nics_of(&state, "vm1")[0].as_deref(), Some("h3/nic0"));
}

#[test]
fn whatever_works_is_better_than_what_is_to_be_empty() {
    let mut state = pod_after(&[drain(3, Some("nic0"), true)]);
    must(&mut state, &link(3, "nic1", true));
    must(&mut state, &link(2, "nic0", false));
    assert_eq!(nics_of(&state, "vm1")[0].as_deref(), Some("h3/nic1"));
}

#[test]
fn who_has_nothing_waits_for_what_is_to_be_empty_too() {
    // Until it works.
    let mut state = pod_after(&[drain(3, None, true), link(3, "nic0", false)]);
    let effects = must(&mut state, &link(2, "nic0", false));
    assert_eq!(kinds(&effects), [EventKind::LinkDown, EventKind::Degraded]);
    must(&mut state, &link(3, "nic0", true));
    assert_eq!(nics_of(&state, "vm1")[0].as_deref(), Some("h3/nic0"));

    // Until there is room for one more.
    let mut state = pod_after(&[drain(3, None, true)]);
    let options = Options { nic_leases_max: 2, ..state.options.clone() };
    must(&mut state, &Command::Configure { options });
    must(&mut state, &instance("vm2", 1, &[]));
    let fewer = Options { nic_leases_max: 1, ..state.options.clone() };
    must(&mut state, &Command::Configure { options: fewer });
    must(&mut state, &link(2, "nic0", false));
    let places = |state: &State| ["vm1", "vm2"].map(|name| nics_of(state, name)[0].clone());
    assert_eq!(places(&state), named(["h3/nic0", "h2/nic0"]));
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    assert_eq!(nics_of(&state, "vm2")[0].as_deref(), Some("h3/nic0"));
}

#[test]
fn in_a_pod_of_the_version_before_all_replicas_leave_it_where_it_is() {
    let mut state = pod();
    must(&mut state, &drain(3, None, true));
    must(&mut state, &instance("vm1", 1, &[]));
    must(&mut state, &link(2, "nic0", false));
    assert_eq!(nics_of(&state, "vm1")[0].as_deref(), Some("h2/nic0"));
    speak(&mut state, Protocol::DECIDES_BY_MORE);
    assert_eq!(nics_of(&state, "vm1")[0].as_deref(), Some("h3/nic0"), "as soon as all know better");
}
