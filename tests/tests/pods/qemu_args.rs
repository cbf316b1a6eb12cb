//! The command line that `vmm qemu-args` prints starts the machine from a shell; what runs then is found by its process, and held.

use std::fs;
use std::process::Command;
use std::time::Duration;

use guest_images::agent::Agent;
use guest_images::{Guest, Silent};
use wadi_tests::pod::{Pod, PodBuilder, VmShape};
use wadi_tests::process::Daemon;
use wadi_tests::waiting::wait_for;

const LONG: Duration = Duration::from_mins(1);

/// What a program of the pod says that has to succeed.
fn said(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn vmm(pod: &Pod) -> Command {
    Command::new(pod.binary("vmm"))
}

#[test]
fn what_is_printed_starts_a_machine_that_can_be_attached_and_held() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[("vol0", 1 << 26, Some("h2/ssd0"))]).unwrap();
    let spec = pod.machine(&instance, &guest, VmShape { memory_mib: 320, cpus: 1 });
    fs::create_dir_all(&spec.directory).unwrap();
    let mut args = vmm(&pod);
    args.args(["qemu-args", "--instance", "vm1", "--accelerator", "tcg", "--memory", "320", "--server"]);
    args.arg(format!("unix:{}", pod.directory().join("run/controller.sock").display()));
    args.arg("--kernel").arg(&guest.kernel).arg("--initrd").arg(&guest.initrd);
    args.arg("--append").arg(&guest.command_line).arg("--directory").arg(&spec.directory);
    let line = said(&mut args);

    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("exec {line}"));
    let mut qemu = Daemon::start("qemu", shell, &pod.directory().join("log/qemu.log")).unwrap();
    let agent = Agent::connect(&spec.exec_socket(), LONG).unwrap();
    let seen = agent.run("ls /sys/block /sys/class/net", LONG).unwrap();
    assert!(seen.text().contains("vda") && seen.text().contains("eth0"), "{}", seen.text());
    wait_for("both devices to be used", || {
        let now = pod.api().instance("vm1").unwrap();
        now.nics[0].connected && now.disks[0].connected
    });

    // Whoever starts it so has no shim in it.
    let noted = pod.directory().join("noted");
    let pid = qemu.pid().unwrap().to_string();
    said(vmm(&pod).args(["attach", "--pid", &pid, "--name", "shells", "--directory"]).arg(&noted));
    let mut slice = vmm(&pod);
    slice.args(["slice", "shells", "--share", "50", "--seconds", "1", "--directory"]).arg(&noted);
    let output = slice.output().unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() {
        assert!(out.starts_with("shells: cgroup v") && out.contains("no shim"), "{output:?}");
    } else {
        assert!(error.contains("cannot be sliced") && error.contains("cgroup: "), "{output:?}");
    }
    assert_eq!(agent.run("echo works", LONG).unwrap().text(), "works\n");
    qemu.kill().unwrap();
}
