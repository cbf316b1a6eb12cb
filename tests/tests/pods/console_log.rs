//! What a guest writes to its console takes no more room on its host than it may.

use std::fs;
use std::path::Path;
use std::time::Duration;

use guest_images::agent::Agent;
use guest_images::{Guest, Silent};
use vmm::{CONSOLE_LOG_BYTES, Vm};
use wadi_tests::bare_vm::bare_vm;
use wadi_tests::waiting::wait_for;

/// The emulated serial port takes each byte by itself.
const LONG: Duration = Duration::from_mins(5);

#[test]
fn a_guest_that_writes_without_end_fills_no_file_system() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let spec = bare_vm("talks", &guest, directory.path());
    let mut vm = Vm::start(spec.clone()).unwrap();
    let agent = Agent::connect(&spec.exec_socket(), LONG).unwrap();
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let log = || read(&spec.console_log());
    assert!(agent.run("echo part $((7 * 111)) > /dev/ttyS0", LONG).unwrap().success());
    wait_for("the first words", || log().contains("part 777"));

    // A word of its own after each half of what one log may have, so that what is lost can be told from what is kept.
    for word in 1..=5 {
        let write = format!(
            "yes {word} | head -c {} > /dev/ttyS0; echo part $(({word} * 111)) > /dev/ttyS0",
            CONSOLE_LOG_BYTES / 2
        );
        assert!(agent.run(&write, LONG).unwrap().success());
    }
    wait_for("the last words", || log().contains("part 555"));
    let size = |path: &Path| fs::metadata(path).unwrap().len();
    assert_eq!(size(&spec.old_console_log()), CONSOLE_LOG_BYTES);
    assert!(size(&spec.console_log()) < CONSOLE_LOG_BYTES);
    let all = read(&spec.old_console_log()) + &log();
    assert!(
        !all.contains("part 777") && !all.contains("part 111") && all.contains("part 444"),
        "the oldest is what is lost"
    );
    let logs = fs::read_dir(directory.path())
        .unwrap()
        .filter(|it| it.as_ref().unwrap().file_name().to_string_lossy().contains("console.log"));
    assert_eq!(logs.count(), 2);
    assert!(vm.stop().unwrap().success());
}
