//! A domain is found and ended through libvirt's `virsh`: here a program that answers as libvirt 9 does.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Dropping it ends it.
struct Sleeper(Child);

/// A process that is called as libvirt calls the QEMU of a domain.
fn qemu_of(domain: &str) -> Sleeper {
    let mut command = Command::new("sh");
    command.args(["-c", "read -r _", "-name"]).arg(format!("guest={domain},debug-threads=on"));
    Sleeper(command.stdin(Stdio::piped()).spawn().unwrap())
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `vmm` with the `virsh` of this directory; what it says, and whether it succeeded.
fn vmm(words: &[&str], directory: &Path) -> (String, bool) {
    let path = format!("{}:{}", directory.display(), std::env::var("PATH").unwrap());
    let output = Command::new(env!("CARGO_BIN_EXE_vmm"))
        .args(words)
        .arg("--directory")
        .arg(directory.join("vm"))
        .env("PATH", path)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&said).into_owned(), output.status.success())
}

#[test]
fn a_domain_is_attached_listed_and_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let (qemu, other) = (qemu_of("vm1"), qemu_of("vm2"));
    let (pid, other) = (qemu.0.id(), other.0.id());
    let script = format!(
        r#"#!/bin/sh
[ "$1 $2" = "--connect test:///d" ] || {{ echo "error: no connection" >&2; exit 1; }}
shift 2
[ "$2" = vm1 ] || [ "$2" = vm3 ] || {{ echo "error: failed to get domain '$2'" >&2; exit 1; }}
case "$2 $1 $3" in
  vm3*query-cpus-fast*) echo '{{"return":[{{"thread-id":{other},"cpu-index":0,"target":"x86_64"}}],"id":"libvirt-25"}}' ;;
  *query-name*) echo "{{\"return\":{{\"name\":\"$2\"}},\"id\":\"libvirt-24\"}}" ;;
  *query-cpus-fast*) echo '{{"return":[{{"thread-id":{pid},"props":{{"core-id":0}},"qom-path":"/machine/unattached/device[0]","cpu-index":0,"target":"x86_64"}}],"id":"libvirt-26"}}' ;;
  *query-status*) echo '{{"return":{{"status":"paused","singlestep":false,"running":false}},"id":"libvirt-27"}}' ;;
  *destroy*) kill -9 {pid} ;;
  *) echo "error: unknown command $1" >&2; exit 1 ;;
esac
"#
    );
    let virsh = directory.path().join("virsh");
    fs::write(&virsh, script).unwrap();
    fs::set_permissions(&virsh, fs::Permissions::from_mode(0o755)).unwrap();

    let (said, done) = vmm(&["attach", "--domain", "vm1"], directory.path());
    assert!(!done && said.contains("no connection"), "{said}");
    let (said, done) = vmm(&["attach", "--domain", "vm2", "--connect", "test:///d"], directory.path());
    assert!(!done && said.contains("failed to get domain 'vm2'"), "{said}");
    // It runs on another host, and another process has that id here.
    let (said, done) = vmm(&["attach", "--domain", "vm3", "--connect", "test:///d"], directory.path());
    assert!(!done && said.contains("not on this host"), "{said}");
    let (said, done) = vmm(&["attach", "--domain", "vm1", "--connect", "test:///d"], directory.path());
    assert!(done && said.contains(&format!("process {pid}, vCPU threads {pid}")), "{said}");
    let (said, done) = vmm(&["list"], directory.path());
    assert!(done && said.contains("paused") && said.contains("libvirt's domain vm1"), "{said}");
    // It does not hear the power button: `virsh shutdown` fails.
    let (said, done) = vmm(&["stop", "vm1", "--grace", "1"], directory.path());
    assert!(done && said.contains("QEMU has ended it"), "{said}");
    let (said, done) = vmm(&["stop", "vm1"], directory.path());
    assert!(!done && said.contains("has: none"), "{said}");
}
