//! The test guest by itself: it is the same whenever it is built, and runs commands as they are given.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use guest_images::agent::{Agent, AgentError};
use guest_images::{Guest, Silent};
use vmm::{Accelerator, Registry, Vm, VmSpec};
use wadi_tests::bare_vm::bare_vm;

const LONG: Duration = Duration::from_mins(1);

#[test]
fn same_packages_give_the_same_guest() {
    let first = Guest::ensure(&mut Silent).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let store = elsewhere.path().join("packages");
    fs::create_dir(&store).unwrap();
    for package in first.manifest().unwrap().packages {
        let from = Guest::default_directory().join("packages").join(&package.file);
        fs::copy(from, store.join(&package.file)).unwrap();
    }
    let second = Guest::ensure_in(elsewhere.path(), &mut Silent).unwrap();
    let (first, second) = (first.manifest().unwrap(), second.manifest().unwrap());
    // Debian may have published something since the first was built.
    if first.packages == second.packages {
        assert_eq!(first, second);
    }
}

#[test]
fn commands_run_as_they_are_given() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let spec = VmSpec {
        memory_mib: 256,
        accelerator: Accelerator::probe(vmm::QEMU.as_ref(), &guest.kernel),
        ..bare_vm("bare", &guest, directory.path())
    };
    let mut vm = Vm::start(spec.clone()).unwrap();
    let agent = Agent::connect(&spec.exec_socket(), LONG).unwrap();

    let outcome = agent.run("echo out; echo err >&2; exit 3", LONG).unwrap();
    assert_eq!((outcome.status, &outcome.stdout[..], &outcome.stderr[..]), (3, &b"out\n"[..], &b"err\n"[..]));

    // Every byte there is, both ways, and a command line of several lines with quotes.
    let bytes: Vec<u8> = (0..200_000_u32).map(|n| (n % 251) as u8).collect();
    let echo = agent.start("# it's\ncat", &bytes).unwrap().wait(LONG).unwrap();
    assert!(echo.stdout == bytes, "{} bytes came back", echo.stdout.len());

    // A long one does not hold up a short one, and can be killed with its children.
    let long = agent.start("sleep 1000 | cat", &[]).unwrap();
    assert_eq!(agent.run("echo short", LONG).unwrap().text(), "short\n");
    assert!(long.outcome().is_none());
    agent.signal(&long, "TERM").unwrap();
    assert_eq!(long.wait(LONG).unwrap().status, 128 + 15);
    assert_eq!(agent.run("pidof sleep", LONG).unwrap().stdout, b"");

    let late = agent.run("sleep 1000", Duration::from_millis(100));
    assert!(matches!(late, Err(AgentError::TimedOut { .. })), "{late:?}");

    for program in [
        "fio --version",
        "iperf3 --version",
        "ethtool --version",
        "mkfs.ext4 -V",
        "fsck.ext4 -V",
        "mkfs.xfs -V",
        "xfs_repair -V",
    ] {
        let outcome = agent.run(program, LONG).unwrap();
        assert!(outcome.success(), "{program}: {}", String::from_utf8_lossy(&outcome.stderr));
    }

    is_found(&vm, directory.path());
    let twice = Vm::start(spec.clone()).unwrap_err().to_string();
    assert!(twice.contains("runs already"), "{twice}");

    // Whoever waits when the machine goes hears of it.
    let job = agent.start("sleep 1000", &[]).unwrap();
    let said = vmm(&["stop", "bare", "--grace", "1"], directory.path());
    assert!(said.contains("QEMU has ended it"), "{said}");
    assert!(vm.stop().unwrap().success());
    assert!(matches!(job.wait(LONG), Err(AgentError::Gone { .. })));
    assert!(!spec.monitor_socket().exists());
}

fn vmm(words: &[&str], directory: &Path) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_wadi-demo")).with_file_name("vmm");
    let output = Command::new(program).args(words).arg("--directory").arg(directory).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// It is listed where it was started, and elsewhere once it was looked for.
fn is_found(vm: &Vm, directory: &Path) {
    let listed = Registry::new(directory).running().unwrap().machines;
    let [machine] = &listed[..] else { panic!("{listed:?}") };
    assert_eq!((machine.name.as_str(), machine.process.pid), ("bare", vm.pid()));
    let vcpus = machine.monitor.vcpus().unwrap();
    let name = |thread: u32| fs::read_to_string(format!("/proc/{}/task/{thread}/comm", vm.pid())).unwrap();
    assert_eq!(vcpus.len(), 1);
    assert!(name(vcpus[0].thread_id).starts_with("CPU 0/"), "{}", name(vcpus[0].thread_id));

    let elsewhere = directory.join("elsewhere");
    assert_eq!(vmm(&["list"], &elsewhere).lines().count(), 1);
    vmm(&["attach", "--pid", &vm.pid().to_string(), "--name", "found"], &elsewhere);
    let said = vmm(&["list"], &elsewhere);
    let row: Vec<&str> = said.lines().nth(1).unwrap().split_whitespace().collect();
    let (pid, thread) = (vm.pid().to_string(), vcpus[0].thread_id.to_string());
    assert_eq!(row[..5], ["found", &pid, "attach", "running", &thread], "{said}");
}
