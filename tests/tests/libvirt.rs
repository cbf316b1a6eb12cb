//! libvirt runs the domain that `vmm xml` prints.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use guest_images::agent::Agent;
use guest_images::{EXEC_PORT, Guest, Silent};
use vmm::Accelerator;
use wadi_tests::pod::{CLIENT_ADDRESS, GUEST_ADDRESS, PodBuilder};
use wadi_tests::process::Daemon;

const LONG: Duration = Duration::from_mins(1);
/// libvirt tries QEMU out first, which takes long on a busy machine.
const START: Duration = Duration::from_mins(5);

/// Runs libvirt as the first process of a namespace of processes, which reaps what libvirt leaves behind: it waits until
/// each QEMU that it tried out is gone for good, and the first process of a container may be slow to let it go.
const REAPER: &str = "virt-qemu-run \"$@\" & wait $!";

/// What the test adds to the domain: a way to run commands in the guest, and that QEMU runs as root, to whom the pod's
/// sockets belong.
fn with_agent(xml: &str, socket: &Path) -> String {
    let channel = format!(
        "<channel type='unix'><source mode='bind' path='{}'/><target type='virtio' name='{EXEC_PORT}'/></channel>",
        socket.display()
    );
    let label = "<seclabel type='static' model='dac' relabel='no'><label>+0:+0</label></seclabel>";
    xml.replace("</devices>", &format!("{channel}</devices>"))
        .replace("</domain>", &format!("{label}</domain>"))
}

#[test]
fn libvirt_runs_the_domain_as_it_is_printed() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[("vol0", 64 << 20, Some("h2/ssd0"))]).unwrap();
    let printed = Command::new(pod.binary("vmm"))
        .args(["xml", "--instance", "vm1", "--memory", "512", "--append", &guest.command_line])
        .arg("--server")
        .arg(format!("unix:{}", pod.directory().join("run/controller.sock").display()))
        .arg("--kernel")
        .arg(&guest.kernel)
        .arg("--initrd")
        .arg(&guest.initrd)
        .arg("--accelerator")
        .arg(Accelerator::probe(&guest.kernel).to_string().to_lowercase())
        .output()
        .unwrap();
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let directory = pod.directory().join("libvirt");
    let root = directory.join("root");
    fs::create_dir_all(root.join("etc")).unwrap();
    // Without the daemon that writes logs for libvirt, and without a /dev of QEMU's own, which lacks terminals where the root
    // directory was changed.
    fs::write(root.join("etc/qemu.conf"), "stdio_handler = \"file\"\nnamespaces = []\n").unwrap();
    let (xml, socket) = (directory.join("vm1.xml"), directory.join("exec.sock"));
    fs::write(&xml, with_agent(&String::from_utf8(printed.stdout).unwrap(), &socket)).unwrap();

    // libvirt's own driver for QEMU, in a process and a directory of its own.
    let mut command = pod.host("h1").unwrap().command(Path::new("unshare"));
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", REAPER, "virt-qemu-run"]);
    command.arg("-r").arg(&root).arg(&xml);
    let mut libvirt = Daemon::start("virt-qemu-run", command, &directory.join("log")).unwrap();
    let qemu_log = root.join("log/qemu/vm1.log");
    let started = Instant::now();
    while !socket.exists() {
        libvirt.check().unwrap();
        assert!(started.elapsed() < START, "{}", libvirt.said());
        std::thread::sleep(Duration::from_millis(20));
    }
    let agent = Agent::connect(&socket, LONG).unwrap_or_else(|error| {
        panic!("{error}: {}{}", libvirt.said(), fs::read_to_string(&qemu_log).unwrap_or_default())
    });
    let run = |command: &str| {
        let outcome = agent.run(command, LONG).unwrap();
        assert!(outcome.success(), "{command}: {}", String::from_utf8_lossy(&outcome.stderr));
        outcome.text()
    };
    let nic = &instance.nics[0];
    assert_eq!(run("cat /sys/class/net/eth0/address").trim(), nic.mac);
    assert_eq!(run("cat /sys/class/net/eth0/mtu").trim(), nic.mtu.to_string());
    run(&format!("ip address add {GUEST_ADDRESS}/24 dev eth0 && ip link set eth0 up"));
    run(&format!("ping -c 3 -W 5 {CLIENT_ADDRESS}"));
    assert_eq!(run("cat /sys/block/vda/serial").trim(), instance.disks[0].serial);
    run(
        "dd if=/dev/urandom of=/tmp/a bs=1M count=8 && dd if=/tmp/a of=/dev/vda bs=64k oflag=direct conv=fsync",
    );
    run(
        "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda of=/tmp/b bs=1M count=8 iflag=direct && cmp /tmp/a /tmp/b",
    );
    // libvirt notes the end of its guest; it itself stays, and with its first process the namespace ends.
    let _ = agent.run("poweroff -f", LONG);
    let started = Instant::now();
    while !fs::read_to_string(&qemu_log).unwrap().contains("reason=shutdown") {
        assert!(started.elapsed() < LONG, "{}", libvirt.said());
        std::thread::sleep(Duration::from_millis(20));
    }
    libvirt.kill().unwrap();
}
