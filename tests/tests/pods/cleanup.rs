//! However a runner ends, nothing of it is left: no process, no namespace, no file.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use wadi_tests::runner;
use wadi_tests::stage::Stage;

/// Everything outside that bears `tag` in its name or its command line.
fn traces(tag: &str) -> Vec<String> {
    let mut found: Vec<String> = runner::traces(tag).iter().map(|path| path.display().to_string()).collect();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        // The janitor itself may be at work: it names the tag last.
        if command.contains(tag) && !command.trim_end().ends_with(&format!("janitor {tag}")) {
            found.push(command);
        }
    }
    found
}

/// Waits until nothing is left.
fn assert_gone(tag: &str) {
    let started = Instant::now();
    loop {
        let left = traces(tag);
        if left.is_empty() {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(10), "left behind: {left:#?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The demo, as far as its VM's start.
fn demo_with_a_vm() -> (Child, String) {
    let demo = Command::new(env!("CARGO_BIN_EXE_wadi-demo"))
        .env_remove("KEEP")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let tag = format!("wadi-{}", demo.id());
    let log = Path::new("/tmp").join(&tag).join("log/vm1-qemu.log");
    let started = Instant::now();
    while !log.exists() {
        assert!(started.elapsed() < Duration::from_mins(2), "the demo's VM does not start");
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(Duration::from_secs(1));
    assert!(traces(&tag).iter().any(|trace| trace.contains("qemu-system")));
    (demo, tag)
}

fn send(demo: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(demo.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

#[test]
fn a_pod_that_is_dropped_leaves_nothing() {
    let stage = Stage::set_up().unwrap();
    let tag = stage.pod.tag().to_owned();
    assert!(!traces(&tag).is_empty());
    drop(stage);
    assert_eq!(traces(&tag), Vec::<String>::new());
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    let (mut demo, tag) = demo_with_a_vm();
    send(&demo, Signal::INT);
    assert_eq!(demo.wait().unwrap().code(), Some(130));
    assert_gone(&tag);
}

#[test]
fn a_killed_demo_leaves_nothing() {
    let (mut demo, tag) = demo_with_a_vm();
    send(&demo, Signal::KILL);
    demo.wait().unwrap();
    assert_gone(&tag);
}
