//! Who is without a backup after a failover gets one with the command after it.

use super::crowded::{named, nics_of};
use super::orderly::pod_of;
use super::reservations::{create, reserve};
use super::*;

fn link(host: u16, up: bool) -> Command {
    let device = DeviceId { host: HostId::new(host), name: "nic0".into() };
    Command::Link { device, up, reason: "its cable".to_owned() }
}

/// An instance whose NIC has failed over from h2 to h5, with h6 as the next backup.
fn after_a_failover() -> State {
    let mut state = pod_of(&[(2, "nic0", false), (5, "nic0", true), (6, "nic0", true)]);
    must(&mut state, &create("a", 2, reserve(1000)));
    assert_eq!(nics_of(&state, "a"), named(["h2/nic0", "h5/nic0"]));
    let effects = must(&mut state, &link(2, false));
    assert_eq!(kinds(&effects), [EventKind::LinkDown, EventKind::Failover]);
    assert_eq!(nics_of(&state, "a"), named(["h5/nic0", "h2/nic0"]));
    assert!(state.lacks_backups());
    state
}

#[test]
fn any_command_after_a_failover_chooses_backups() {
    let mut state = after_a_failover();
    // Whoever reads it from a disk knows that too.
    let kept = serde_json::to_string(&state).expect("JSON");
    let mut read: State = serde_json::from_str(&kept).expect("a state");
    for state in [&mut state, &mut read] {
        must(state, &Command::nothing());
        assert_eq!(nics_of(state, "a"), named(["h5/nic0", "h6/nic0"]));
        assert!(!state.lacks_backups());
        assert!(!serde_json::to_string(state).expect("JSON").contains("unbacked"));
        let outcome = state.carry_out(&Command::nothing()).expect("nothing is refused");
        assert!(!outcome.changed, "there was nothing left to do");
    }
    assert_eq!(state, read);

    let mut state = after_a_failover();
    must(&mut state, &create("b", 5, reserve(1000)));
    assert_eq!(nics_of(&state, "a"), named(["h5/nic0", "h6/nic0"]));

    // One that is refused changes nothing, and so chooses none.
    let mut state = after_a_failover();
    refused(&mut state, &create("a", 2, reserve(1000)));
    assert!(state.lacks_backups());
    must(&mut state, &Command::DeleteInstance { name: "a".to_owned(), force: true });
    assert!(!state.lacks_backups());
}

#[test]
fn who_waits_for_a_backup_and_loses_its_nic_moves_at_once() {
    let mut state = after_a_failover();
    let effects = must(&mut state, &link(5, false));
    assert_eq!(kinds(&effects), [EventKind::LinkDown, EventKind::Failover]);
    assert_eq!(nics_of(&state, "a")[0].as_deref(), Some("h6/nic0"));
    must(&mut state, &link(5, true));
    assert_eq!(nics_of(&state, "a"), named(["h6/nic0", "h5/nic0"]));
}

#[test]
fn where_nothing_moves_nobody_waits() {
    let mut state = pod_of(&[(2, "nic0", false), (5, "nic0", true), (6, "nic0", true)]);
    must(&mut state, &create("a", 2, reserve(1000)));
    must(&mut state, &link(5, false));
    assert_eq!(nics_of(&state, "a"), named(["h2/nic0", "h6/nic0"]));
    assert!(!state.lacks_backups());
}

#[test]
fn a_pod_of_the_version_before_chooses_backups_with_the_failover() {
    let mut state = after_a_failover();
    speak(&mut state, Protocol::DEFERS_BACKUPS - 1);
    assert_eq!(nics_of(&state, "a"), named(["h5/nic0", "h6/nic0"]));
    must(&mut state, &Command::DeleteInstance { name: "a".to_owned(), force: true });
    must(&mut state, &link(2, true));

    // As it was before it spoke anything else.
    must(&mut state, &create("a", 2, reserve(1000)));
    must(&mut state, &link(2, false));
    assert_eq!(nics_of(&state, "a"), named(["h5/nic0", "h6/nic0"]));
    assert!(!state.lacks_backups());
}
