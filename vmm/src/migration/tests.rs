use std::os::unix::net::UnixStream;

use super::*;
use crate::fake_controller::Controller;
use crate::monitor::fake::Qemu;
use crate::monitor::open;
use crate::spec::tests::spec;

/// Waits for the end of a move by a QEMU that says these to `query-migrate`, one after the other; it ends the session where it says
/// none, and says nothing where it is busy.
fn wait(answers: &'static [Option<&'static str>], patience: Duration) -> Result<Migrated, VmmError> {
    let mut answers = answers.iter();
    let qemu = Qemu::start(move |name, _| {
        assert_eq!(name, "query-migrate");
        let answer = answers.next().copied().flatten();
        answer.map(|status| match status {
            "busy" => String::new(),
            "" => r#"{"return": {}}"#.to_owned(),
            _ => format!(r#"{{"return": {{"status": "{status}", "total-time": 7}}}}"#),
        })
    });
    let stream = UnixStream::connect(&qemu.path).unwrap();
    let monitor = open(stream, "a QEMU", Duration::from_millis(300)).unwrap();
    wait_for_the_end(monitor, &qemu.path, "tcp:h2:4444", patience)
}

#[test]
fn a_qemu_that_is_silent_for_a_while_is_asked_again_what_became_of_the_guest() {
    let long = Duration::from_mins(1);
    let moved = wait(&[Some("active"), None, Some("device"), None, Some("completed")], long);
    assert_eq!(moved.unwrap().total_ms, 7);
    assert!(wait(&[Some("busy"), Some("completed")], long).is_ok());
    let stays = wait(&[None, Some("failed")], long);
    assert!(matches!(stays, Err(VmmError::Migration { .. })), "{stays:?}");
    let stays = wait(&[None, Some("")], long);
    assert!(stays.unwrap_err().to_string().contains("not begun"));
    let unknown = wait(&[Some("active"), None], Duration::ZERO);
    assert!(matches!(unknown, Err(VmmError::Undecided { .. })), "{unknown:?}");
}

#[test]
fn of_a_qemu_that_is_gone_nobody_knows_where_its_guest_is() {
    let qemu = Qemu::start(|_, _| None);
    let monitor = connect(&qemu.path, || true).unwrap();
    std::fs::remove_file(&qemu.path).unwrap();
    // Long before patience ends.
    let unknown = wait_for_the_end(monitor, &qemu.path, "tcp:h2:4444", Duration::from_hours(1));
    assert!(matches!(unknown, Err(VmmError::Undecided { .. })), "{unknown:?}");
}

#[test]
fn an_emulated_machine_that_we_describe_can_be_moved_and_others_are_refused() {
    let line = spec().arguments(crate::QemuVersion { major: 7, minor: 2 });
    let size = &line[line.iter().position(|word| word == "-m").unwrap() + 1];
    let bytes = size.strip_suffix('k').unwrap().parse::<u64>().unwrap() << 10;
    assert!(keeps_stores(bytes, 0), "{size}");
    assert!(!keeps_stores(512 << 20, 0));
    assert!(!keeps_stores(bytes, 128 << 20));
}

/// An instance, which moves or does not.
fn instance(moves: bool) -> (u16, String) {
    let migration = r#""migration": {"to": "h2", "ready": true, "devices": []}, "#;
    let migration = if moves { migration } else { "" };
    (
        200,
        format!(
            r#"{{"name": "vm1", "id": 1, "host": "h1", "ready": true, {migration}"nics": [], "disks": []}}"#
        ),
    )
}

/// A QEMU whose guest ends up so; it is gone in the midst of it where that is nothing.
fn qemu(end: Option<&'static str>) -> Qemu {
    Qemu::start(move |name, _| {
        Some(match name {
            "query-kvm" => r#"{"return": {"enabled": true, "present": true}}"#.to_owned(),
            "query-migrate" => format!(r#"{{"return": {{"status": "{}", "total-time": 7}}}}"#, end?),
            _ => r#"{"return": {}}"#.to_owned(),
        })
    })
}

const LOOK: &str = "GET /v1/instances/vm1";
const ABORT: &str = "DELETE /v1/instances/vm1/migration";

#[test]
fn a_move_that_succeeded_is_none_that_failed_while_the_controller_is_away() {
    let mut looks = 0;
    let controller = Controller::start(move |_| {
        looks += 1;
        match looks {
            1 | 4 => instance(true),
            // One that dies, and one that is about to be the leader.
            2 => (0, String::new()),
            3 => (503, String::new()),
            _ => instance(false),
        }
    });
    let qemu = qemu(Some("completed"));
    let moved =
        move_away(&controller.client(), "vm1", &qemu.path, "tcp:h2:4444", MigrationSpeed::default()).unwrap();
    assert_eq!(moved.total_ms, 7);
    assert_eq!(controller.asked(), [LOOK; 5]);
}

#[test]
fn the_controller_hears_that_a_guest_stays_and_what_failed_first_is_told() {
    let controller = Controller::start(|request| match request {
        LOOK => instance(true),
        _ => (503, String::new()),
    });
    let qemu = qemu(Some("failed"));
    let stays = move_away(&controller.client(), "vm1", &qemu.path, "tcp:h2:4444", MigrationSpeed::default());
    assert!(matches!(stays, Err(VmmError::Migration { .. })), "{stays:?}");
    assert_eq!(controller.asked(), [LOOK, ABORT]);
}

#[test]
fn the_controller_is_told_nothing_of_a_guest_that_may_be_here_or_there() {
    let controller = Controller::start(|_| instance(true));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp.sock");
    let gone = path.clone();
    let qemu = Qemu::start(move |name, _| {
        if name == "query-migrate" {
            // QEMU is no more.
            std::fs::remove_file(&gone).unwrap();
            return None;
        }
        let kvm = r#"{"return": {"enabled": true, "present": true}}"#;
        Some(if name == "query-kvm" { kvm.to_owned() } else { r#"{"return": {}}"#.to_owned() })
    });
    std::fs::hard_link(&qemu.path, &path).unwrap();
    let unknown = move_away(&controller.client(), "vm1", &path, "tcp:h2:4444", MigrationSpeed::default());
    let Err(VmmError::Undecided { reason, .. }) = &unknown else { panic!("{unknown:?}") };
    assert!(reason.contains("activate-migration vm1") && reason.contains("abort-migration vm1"), "{reason}");
    assert_eq!(controller.asked(), [LOOK]);
}
