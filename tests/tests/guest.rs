//! The test guest by itself: it is the same whenever it is built, and runs commands as they are given.

use std::fs;
use std::time::Duration;

use guest_images::agent::{Agent, AgentError};
use guest_images::{Guest, Silent};
use vmm::{Accelerator, DirectKernel, Vm, VmSpec};

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
        name: "bare".to_owned(),
        memory_mib: 256,
        memory_max_mib: None,
        cpus: 1,
        accelerator: Accelerator::probe(&guest.kernel),
        kernel: Some(DirectKernel {
            kernel: guest.kernel.clone(),
            initrd: Some(guest.initrd.clone()),
            command_line: guest.command_line.clone(),
        }),
        networks: Vec::new(),
        disks: Vec::new(),
        listens: false,
        directory: directory.path().to_owned(),
        incoming: None,
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

    // Whoever waits when the machine goes hears of it.
    let job = agent.start("sleep 1000", &[]).unwrap();
    assert!(vm.stop().unwrap().success());
    assert!(matches!(job.wait(LONG), Err(AgentError::Gone { .. })));
    assert!(!spec.monitor_socket().exists());
}
