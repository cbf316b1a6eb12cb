//! What a guest sees of its link: none while nothing carries its packets, whoever dies meanwhile, and no change while something does.

use std::process::Command;
use std::time::Duration;

use guest_images::{Guest, Silent};
use pod_api::Nic;
use wadi_tests::pod::{CLIENT_ADDRESS, Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::process::Daemon;
use wadi_tests::waiting::wait_for;

const LONG: Duration = Duration::from_mins(1);

fn follow(pod: &Pod) -> Daemon {
    let mut command = Command::new(pod.binary("vmm"));
    command.args(["follow", "vm1", "--server"]);
    command.arg(format!("unix:{}", pod.directory().join("run/controller.sock").display()));
    command.arg("--directory").arg(pod.directory().join("vm"));
    Daemon::start("vmm-follow", command, &pod.directory().join("log/vmm-follow.log")).unwrap()
}

fn nic(pod: &Pod) -> Nic {
    pod.api().instance("vm1").unwrap().nics[0].clone()
}

fn number(vm: &PodVm, file: &str) -> u64 {
    vm.exec(&format!("cat /sys/class/net/eth0/{file}")).unwrap().trim().parse().unwrap()
}

/// How often the guest has seen its link come or go.
fn changes(vm: &PodVm) -> u64 {
    number(vm, "carrier_changes")
}

fn wait_for_carrier(vm: &PodVm, there: bool) {
    wait_for(if there { "a link" } else { "no link" }, || (number(vm, "carrier") == 1) == there);
}

fn ping(vm: &PodVm) {
    wait_for("an answer", || vm.run(&format!("ping -c 1 -W 1 {CLIENT_ADDRESS}"), LONG).unwrap().success());
}

#[test]
fn a_guest_has_a_link_as_long_as_something_carries_its_packets() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[]).unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let mut follower = follow(&pod);
    ping(&vm);
    let before = changes(&vm);

    // Another NIC takes over, and then there is none left. Had the guest noticed the first, it would have seen more than one change.
    pod.pull_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    ping(&vm);
    assert!(nic(&pod).link);
    pod.pull_cable("h3", "nic1").unwrap();
    wait_for_carrier(&vm, false);
    assert_eq!(changes(&vm), before + 1);
    assert!(!nic(&pod).link);
    let shown = pod.podctl(&["instances", "get", "vm1"]).unwrap();
    assert!(shown.contains("net0 has no link: h3/nic1 does not work"), "{shown}");

    // QEMU shows a link when a frontend comes back. Whoever follows stands still until the guest has seen that: it might be too quick for it.
    follower.freeze().unwrap();
    pod.daemon("h1", Role::NetFrontend).unwrap().kill().unwrap();
    pod.start_daemon("h1", Role::NetFrontend).unwrap();
    wait_for_carrier(&vm, true);
    follower.thaw().unwrap();
    wait_for_carrier(&vm, false);

    // Nobody follows while a NIC comes back; the next one who does sees that.
    follower.check().unwrap();
    follower.kill().unwrap();
    pod.plug_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h2/nic0").unwrap();
    assert_eq!(number(&vm, "carrier"), 0);
    let mut follower = follow(&pod);
    wait_for_carrier(&vm, true);
    ping(&vm);

    // Its backend dies.
    let before = changes(&vm);
    pod.daemon("h2", Role::NetBackend).unwrap().kill().unwrap();
    wait_for_carrier(&vm, false);
    pod.start_daemon("h2", Role::NetBackend).unwrap();
    wait_for_carrier(&vm, true);
    ping(&vm);
    assert_eq!(changes(&vm), before + 2);
    follower.check().unwrap();
    let said = follower.said();
    assert!(said.contains("net0 has no link: h2/nic0") && said.contains("has its link again"), "{said}");
}
