//! `vmm libvirt-hook` where there is no pod: what libvirt may do all the same, and what it is told.

use std::fs;
use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

const FOREIGN: &str = "<domain type='kvm'><name>d</name><uuid>u</uuid><devices/></domain>";
const OURS: &str = "<domain type='kvm'><name>d</name><uuid>u</uuid>
    <metadata><w:instance xmlns:w='urn:wadi:domain:1'/></metadata>
    <devices><disk type='vhostuser'><source type='unix' path='/nowhere/sockets/d-vol0.sock'/></disk></devices></domain>";

/// Runs the hook as libvirt does; what it says, and whether it allows what is about to happen.
fn hook(options: &[&str], operation: &str, xml: &str) -> (String, bool) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_vmm"))
        .arg("libvirt-hook")
        .args(options)
        .args(["--", "-d", operation, "begin", "-"])
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(xml.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&said).into_owned(), output.status.success())
}

/// Writes the configuration of a host; where.
fn host_config(directory: &Path) -> String {
    let path = directory.join("host.toml");
    let text =
        "[host]\nid = 1\nname = \"h1\"\n[pool]\npath = \"/nowhere/pool\"\n[run]\ndirectory = \"/nowhere\"\n";
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn domains_without_the_pod_start_without_the_pod() {
    let nowhere = ["--server", "unix:/nowhere/controller.sock", "--config", "/nowhere/host.toml"];
    for operation in ["prepare", "start", "started", "stopped", "release", "migrate", "restore", "reconnect"]
    {
        for xml in [FOREIGN, "", "\0\u{ff}<", &"<a>".repeat(1 << 18)] {
            let (said, allowed) = hook(&nowhere, operation, xml);
            assert!(allowed && said.is_empty(), "{operation}: {said}");
        }
    }
    // Nor does what has run already end with the pod.
    for operation in ["start", "started", "stopped", "migrate", "restore", "reconnect", "attach"] {
        let (said, allowed) = hook(&nowhere, operation, OURS);
        assert!(allowed && said.is_empty(), "{operation}: {said}");
    }
}

#[test]
fn a_domain_that_cannot_be_leased_for_is_refused() {
    let (said, allowed) = hook(&["--config", "/nowhere/host.toml"], "prepare", OURS);
    assert!(!allowed && said.contains("/nowhere/host.toml") && said.contains("domain -d"), "{said}");

    let directory = tempfile::tempdir().unwrap();
    let config = host_config(directory.path());
    let options = ["--config", &config, "--server", "unix:/nowhere/controller.sock", "--wait", "1"];
    for operation in ["prepare", "release"] {
        let (said, allowed) = hook(&options, operation, OURS);
        assert!(!allowed && said.contains("is pod-controller running there?"), "{operation}: {said}");
    }
    let (said, allowed) = hook(&options, "prepare", &OURS.replace("</domain>", ""));
    assert!(!allowed && said.contains("is no XML"), "{said}");
}

#[test]
fn a_controller_that_stands_still_holds_nobody_up_for_long() {
    let directory = tempfile::tempdir().unwrap();
    let config = host_config(directory.path());
    let socket = directory.path().join("controller.sock");
    // It lets whoever comes connect, and never answers.
    let _silent = UnixListener::bind(&socket).unwrap();
    let server = format!("unix:{}", socket.display());
    let options = ["--config", &config, "--server", &server, "--wait", "1"];
    let (said, allowed) = hook(&options, "prepare", OURS);
    assert!(!allowed && said.contains("has not answered for 21 s"), "{said}");
}
