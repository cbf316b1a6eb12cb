//! The command line that `vmm cloud-hypervisor-args` prints, as a shell understands it, and as Cloud Hypervisor does where that is installed.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use guest_images::{Guest, Silent};
use pod_api::Instance;
use vmm::cloud_hypervisor::CLOUD_HYPERVISOR;
use wadi_tests::pod::{Pod, PodBuilder};
use wadi_tests::process::Daemon;
use wadi_tests::waiting::wait_for;

/// What is printed for vm1, to be run by this program.
fn printed(pod: &Pod, guest: &Guest, program: &Path) -> String {
    let output = Command::new(pod.binary("vmm"))
        .args(["cloud-hypervisor-args", "--instance", "vm1", "--memory", "256"])
        .arg(format!("--server=unix:{}", pod.directory().join("run/controller.sock").display()))
        .args(["--append", "console=ttyS0 panic=-1"])
        .arg("--kernel")
        .arg(&guest.kernel)
        .arg("--initrd")
        .arg(&guest.initrd)
        .arg("--directory")
        .arg(pod.directory())
        .arg("--program")
        .arg(program)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The words that a program gets by that, as it would be started from a terminal.
fn words(pod: &Pod, guest: &Guest) -> Vec<String> {
    let program = pod.directory().join("shows its words");
    fs::write(&program, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new("sh").arg("-c").arg(printed(pod, guest, &program)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// The value of a name in the words of an option.
fn value<'a>(words: &'a [String], option: &str, name: &str) -> &'a str {
    let at = words.iter().position(|word| word == option).unwrap();
    let pairs = words[at + 1].split(',').filter_map(|pair| pair.split_once('='));
    pairs.into_iter().find(|pair| pair.0 == name).unwrap().1
}

fn connected(instance: &Instance) -> bool {
    instance.nics.iter().all(|nic| nic.connected) && instance.disks.iter().all(|disk| disk.connected)
}

fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(CLOUD_HYPERVISOR)).find(|it| it.exists())
}

#[test]
fn an_instance_is_described_to_cloud_hypervisor() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[("vol0", 64 << 20, None)]).unwrap();

    let words = words(&pod, &guest);
    let (nic, disk) = (&instance.nics[0], &instance.disks[0]);
    assert_eq!(value(&words, "--net", "mac"), nic.mac);
    assert_eq!(value(&words, "--net", "mtu"), nic.mtu.to_string());
    for (option, socket) in [("--net", &nic.socket), ("--disk", &disk.socket)] {
        assert_eq!(value(&words, option, "socket"), socket);
        assert!(fs::metadata(socket).unwrap().file_type().is_socket(), "{socket}");
    }
    assert_eq!(value(&words, "--memory", "shared"), "on");
    assert!(words.contains(&"console=ttyS0 panic=-1".to_owned()), "{words:?}");

    let Some(program) = installed().filter(|_| Path::new("/dev/kvm").exists()) else {
        println!("{CLOUD_HYPERVISOR} or KVM is not here: nothing is started");
        return;
    };
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("exec {}", printed(&pod, &guest, &program)));
    let log = pod.directory().join("cloud-hypervisor.log");
    let mut running = Daemon::start("cloud-hypervisor", command, &log).unwrap();
    wait_for("the guest's drivers", || {
        running.check().unwrap();
        connected(&pod.api().instance("vm1").unwrap())
    });
    running.kill().unwrap();
}
