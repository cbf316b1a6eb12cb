//! What a daemon cannot work with it refuses: one clear line, an exit status that is not 0, nothing left behind.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use wadi_tests::pod::{HostPlan, Pod, PodBuilder, Role};

/// A pod with a host that could run all four daemons; none runs.
fn one_host() -> Pod {
    let host = HostPlan::new("h1").vms().nic("nic0").ssd("ssd0", "64M");
    PodBuilder::new().host(host).lay_out().unwrap()
}

/// Everything below a directory but locks, which outlive their holders by design, and logs.
fn files(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut pending = vec![directory.to_owned()];
    while let Some(next) = pending.pop() {
        for entry in fs::read_dir(&next).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                if !path.ends_with("locks") {
                    pending.push(path);
                }
            } else {
                found.insert(path.display().to_string());
            }
        }
    }
    found
}

/// Runs a command that must refuse, and returns its one line.
fn refusal(mut command: Command) -> String {
    let mut child = command
        .env("RUST_LOG", "error")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > Duration::from_secs(10) {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("{command:?} does not refuse; it says {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{command:?} succeeded");
    assert_eq!(output.status.code().unwrap_or(-1), 1, "{said}");
    assert_eq!(said.lines().count(), 1, "not one line:\n{said}");
    assert!(said.starts_with("error: "), "{said}");
    said
}

/// Every daemon refuses with a line that contains all of `words`, and leaves nothing behind.
fn all_refuse(pod: &Pod, words: &[&str]) {
    for role in Role::ALL {
        refuses(pod, role, words);
    }
}

fn refuses(pod: &Pod, role: Role, words: &[&str]) {
    let before = files(pod.directory());
    let said = refusal(pod.daemon_command("h1", role).unwrap());
    for word in words {
        assert!(said.contains(word), "{role}: {word:?} is not in {said}");
    }
    assert_eq!(files(pod.directory()), before, "{role} left something behind");
}

/// Changes the host's configuration.
fn edit(pod: &Pod, from: &str, to: &str) {
    let path = pod.config_path("h1");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn unknown_key_in_the_configuration() {
    let pod = one_host();
    pod.create_pool().unwrap();
    edit(&pod, "wakeup = \"socket\"", "wakeup = \"socket\"\nwake-up = true");
    all_refuse(&pod, &["h1.toml", "line", "wake-up"]);
}

#[test]
fn configuration_that_is_no_toml() {
    let pod = one_host();
    pod.create_pool().unwrap();
    fs::write(pod.config_path("h1"), b"[host\n\xff\x00").unwrap();
    all_refuse(&pod, &["h1.toml"]);
}

#[test]
fn missing_configuration() {
    let pod = one_host();
    pod.create_pool().unwrap();
    fs::remove_file(pod.config_path("h1")).unwrap();
    all_refuse(&pod, &["h1.toml"]);
}

#[test]
fn missing_pool() {
    let pod = one_host();
    let pool = pod.pool_path().display().to_string();
    all_refuse(&pod, &[&pool]);
    let mut command = Command::new(pod.binary("pod-controller"));
    command.arg("--config").arg(pod.controller_config_path());
    assert!(refusal(command).contains(&pool));
}

#[test]
fn file_that_is_no_pool() {
    let pod = one_host();
    fs::write(pod.pool_path(), vec![7; 1 << 20]).unwrap();
    all_refuse(&pod, &["pool"]);
}

#[test]
fn pool_of_another_version() {
    let pod = one_host();
    pod.create_pool().unwrap();
    // The layout's major version, after eight bytes that say what it is; see docs/layout.md.
    let file = fs::File::options().write(true).open(pod.pool_path()).unwrap();
    file.write_all_at(&99_u16.to_le_bytes(), 8).unwrap();
    all_refuse(&pod, &["version", "99"]);
}

#[test]
fn pool_that_was_cut_off() {
    let pod = one_host();
    pod.create_pool().unwrap();
    fs::File::options().write(true).open(pod.pool_path()).unwrap().set_len(1 << 20).unwrap();
    all_refuse(&pod, &["pool"]);
}

#[test]
fn nic_that_is_not_there() {
    let pod = one_host();
    pod.create_pool().unwrap();
    edit(&pod, "uplink = \"eth0\"", "uplink = \"eth7\"");
    refuses(&pod, Role::NetBackend, &["nic0", "eth7"]);
}

#[test]
fn ssd_that_is_not_there() {
    let pod = one_host();
    pod.create_pool().unwrap();
    edit(&pod, "size = \"64M\"\n", "");
    refuses(&pod, Role::BlkBackend, &["ssd0", "ssd0.img"]);
}

#[test]
fn driver_that_nobody_knows() {
    let pod = one_host();
    pod.create_pool().unwrap();
    edit(&pod, "driver = \"tap\"", "driver = \"rj45\"");
    edit(&pod, "driver = \"file\"", "driver = \"tape\"");
    refuses(&pod, Role::NetBackend, &["rj45"]);
    refuses(&pod, Role::BlkBackend, &["tape"]);
}

#[test]
fn host_that_runs_already() {
    let mut pod = one_host();
    pod.create_pool().unwrap();
    pod.start_controller().unwrap();
    for role in Role::ALL {
        pod.start_daemon("h1", role).unwrap();
    }
    pod.wait_until_joined().unwrap();
    // Which of the things that they cannot share they find first is up to them.
    all_refuse(&pod, &[]);
    pod.wait_until_joined().unwrap();
}
