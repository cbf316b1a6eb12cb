//! NICs and volumes come to a VM that runs, and leave it, by one command; what fails is undone, and who is killed is gone on for.

use std::collections::BTreeMap;
use std::process::Command;
use std::thread;
use std::time::Duration;

use guest_images::agent::Agent;
use guest_images::{Guest, Silent};
use pod_api::{AttachDevice, ChangeVolume, CreateInstance, CreateVolume, Instance, NicRequest};
use serde_json::json;
use vmm::{MigrationSpeed, VmSpec};
use wadi_tests::monitor;
use wadi_tests::pod::{CLIENT_ADDRESS, HostPlan, Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::process::Daemon;
use wadi_tests::stage::rounds;
use wadi_tests::waiting::wait_for;

const SHAPE: VmShape = VmShape { memory_mib: 320, cpus: 2 };
const LONG: Duration = Duration::from_mins(1);
/// The address of the NIC that comes.
const SECOND_ADDRESS: &str = "10.77.0.3";

fn instances(pod: &Pod, words: &[&str]) -> Result<String, String> {
    pod.podctl(&[&["instances"], words].concat())
}

/// Follows vm1 for the machine that is noted in this directory.
fn follow(pod: &Pod, directory: &str) -> Daemon {
    let mut command = Command::new(pod.binary("vmm"));
    command.args(["follow", "vm1", "--server"]);
    command.arg(format!("unix:{}", pod.directory().join("run/controller.sock").display()));
    command.arg("--directory").arg(pod.directory().join(directory));
    Daemon::start("vmm-follow", command, &pod.directory().join("log/vmm-follow.log")).unwrap()
}

fn create_volumes(pod: &Pod, names: &[&str]) {
    for name in names {
        let (size, labels) = ("64M".parse().unwrap(), BTreeMap::new());
        let request = CreateVolume { labels, ..CreateVolume::new(*name, size) };
        pod.api().create_volume(&request).unwrap();
    }
}

/// The guest's disk of a volume, such as `vdb`; empty if it has none.
fn disk_of(vm: &PodVm, volume: &str) -> String {
    let find = format!(
        "for it in /sys/block/vd*; do [ \"$(cat $it/serial 2> /dev/null)\" = {volume} ] && basename $it; done; true"
    );
    vm.exec(&find).unwrap().trim().to_owned()
}

fn has_disk(vm: &PodVm, volume: &str) -> bool {
    !disk_of(vm, volume).is_empty()
}

fn wait_for_disk(vm: &PodVm, volume: &str) {
    wait_for("the guest to see the disk", || has_disk(vm, volume));
}

/// Fills the beginning of a volume, and returns the sum of that.
fn write(vm: &PodVm, volume: &str) -> String {
    let disk = disk_of(vm, volume);
    vm.exec(&format!(
        "dd if=/dev/urandom of=/tmp/a bs=1M count=4 && dd if=/tmp/a of=/dev/{disk} bs=64k oflag=direct conv=fsync && \
         md5sum < /tmp/a"
    ))
    .unwrap()
}

/// The sum of the beginning of a volume, from the medium.
fn read(vm: &PodVm, volume: &str) -> String {
    let disk = disk_of(vm, volume);
    vm.exec(&format!("dd if=/dev/{disk} of=/tmp/b bs=1M count=4 iflag=direct && md5sum < /tmp/b")).unwrap()
}

/// The guest uses its second NIC.
fn use_second_nic(pod: &Pod, vm: &PodVm) {
    let mac = pod.api().instance("vm1").unwrap().nics[1].mac.clone();
    let there = || vm.exec("cat /sys/class/net/eth1/address || true").unwrap().trim() == mac;
    wait_for("the guest to see the NIC", there);
    vm.exec(&format!("ip address add {SECOND_ADDRESS}/24 dev eth1 && ip link set eth1 up")).unwrap();
    ping_by_second_nic(vm);
}

fn ping_by_second_nic(vm: &PodVm) {
    wait_for("the NIC to carry packets", || {
        vm.run(&format!("ping -c 1 -W 1 -I eth1 {CLIENT_ADDRESS}"), LONG).unwrap().success()
    });
}

fn has_second_nic(vm: &PodVm) -> bool {
    vm.exec("ls /sys/class/net").unwrap().lines().any(|name| name == "eth1")
}

fn names(instance: &Instance) -> Vec<&str> {
    let nics = instance.nics.iter().map(|nic| nic.device.as_str());
    nics.chain(instance.disks.iter().map(|disk| disk.device.as_str())).collect()
}

fn has(pod: &Pod, devices: &[&str]) {
    assert_eq!(names(&pod.api().instance("vm1").unwrap()), devices);
}

fn wait_until_it_has(pod: &Pod, devices: &[&str]) {
    wait_for("a device to leave", || names(&pod.api().instance("vm1").unwrap()) == devices);
}

fn attach_volume(pod: &Pod, volume: &str) {
    instances(pod, &["attach", "vm1", "--volume", volume]).unwrap();
}

#[test]
fn devices_come_and_go_while_a_vm_runs() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[("vol0", 1 << 26, Some("h2/ssd0"))]).unwrap();
    // QEMU would not take such names as they are.
    create_volumes(&pod, &["1st", "vol2", "3rd"]);
    let spec = VmSpec { ports: Some(4), ..pod.machine(&instance, &guest, SHAPE) };
    let mut vm = pod.begin_machine(&instance, spec).unwrap().arrived().unwrap();

    // Nobody is there to plug it in.
    let error = instances(&pod, &["attach", "vm1", "--volume", "1st", "--wait", "1"]).unwrap_err();
    assert!(error.contains("its lease is given back") && error.contains("vmm follow vm1"), "{error}");
    has(&pod, &["net0", "vol0"]);

    let follower = follow(&pod, "vm");
    let mut sum = None;
    for round in 0..=rounds() {
        eprintln!("round {round}");
        let said = instances(&pod, &["attach", "vm1", "--volume", "1st"]).unwrap();
        assert!(said.contains("1st"), "{said}");
        wait_for_disk(&vm, "1st");
        // What was written before is there again.
        if let Some(sum) = &sum {
            assert_eq!(&read(&vm, "1st"), sum);
        }
        instances(&pod, &["attach", "vm1", "--nic"]).unwrap();
        has(&pod, &["net0", "net1", "vol0", "1st"]);
        use_second_nic(&pod, &vm);

        // Once is enough, and there is room for two.
        let error = instances(&pod, &["attach", "vm1", "--volume", "1st"]).unwrap_err();
        assert!(error.contains("leased to vm1"), "{error}");
        let error = instances(&pod, &["attach", "vm1", "--volume", "vol2"]).unwrap_err();
        assert!(error.contains("no PCIe port is free") && error.contains("--ports 5"), "{error}");
        wait_until_it_has(&pod, &["net0", "net1", "vol0", "1st"]);
        assert_eq!(pod.api().volume("vol2").unwrap().instance, None);

        // A frontend that starts anew finds what was plugged in.
        let written = write(&vm, "1st");
        if round < rounds() {
            for role in [Role::NetFrontend, Role::BlkFrontend] {
                pod.daemon("h1", role).unwrap().kill().unwrap();
                pod.start_daemon("h1", role).unwrap();
            }
            pod.wait_until_joined().unwrap();
            assert_eq!(read(&vm, "1st"), written);
            ping_by_second_nic(&vm);
        }
        sum = Some(written);

        instances(&pod, &["detach", "vm1", "net1"]).unwrap();
        instances(&pod, &["detach", "vm1", "1st"]).unwrap();
        has(&pod, &["net0", "vol0"]);
        assert!(!has_disk(&vm, "1st") && !has_second_nic(&vm));
        assert_eq!(pod.api().volume("1st").unwrap().instance, None);
    }

    // What the machine started with comes and goes as well.
    instances(&pod, &["detach", "vm1", "vol0"]).unwrap();
    assert!(!has_disk(&vm, "vol0"));
    attach_volume(&pod, "vol0");
    wait_for_disk(&vm, "vol0");

    // By force it is gone for the pod at once; the guest loses it when it can, and may have it again.
    attach_volume(&pod, "1st");
    wait_for_disk(&vm, "1st");
    instances(&pod, &["detach", "vm1", "1st", "--force"]).unwrap();
    has(&pod, &["net0", "vol0"]);
    wait_for("the guest to lose its disk", || !has_disk(&vm, "1st"));
    attach_volume(&pod, "1st");
    wait_for_disk(&vm, "1st");
    assert_eq!(Some(read(&vm, "1st")), sum);

    // A guest is told that it may only read, where that is so; and that does not change under it.
    let read_only = |on| {
        let change = ChangeVolume { read_only: Some(on), ..ChangeVolume::default() };
        pod.api().change_volume("1st", &change)
    };
    assert_eq!(read_only(true).unwrap_err().status(), Some(409));
    instances(&pod, &["detach", "vm1", "1st"]).unwrap();
    assert!(read_only(true).unwrap().read_only);
    attach_volume(&pod, "1st");
    wait_for_disk(&vm, "1st");
    let disk = disk_of(&vm, "1st");
    assert_eq!(vm.exec(&format!("cat /sys/block/{disk}/ro")).unwrap().trim(), "1");
    let overwrite = format!("dd if=/dev/zero of=/dev/{disk} bs=4k count=1 oflag=direct");
    assert!(!vm.run(&overwrite, LONG).unwrap().success());
    assert_eq!(Some(read(&vm, "1st")), sum);
    instances(&pod, &["detach", "vm1", "1st"]).unwrap();
    assert!(!read_only(false).unwrap().read_only);

    // Nobody plugs anything into a machine that has ended; the next one starts with it.
    vm.stop().unwrap();
    wait_for("the frontends to see it", || {
        pod.api().instance("vm1").unwrap().nics.iter().all(|nic| !nic.connected && !nic.plugged)
    });
    instances(&pod, &["detach", "vm1", "vol0"]).unwrap();
    attach_volume(&pod, "3rd");
    has(&pod, &["net0", "3rd"]);
    let instance = pod.api().instance("vm1").unwrap();
    let vm = pod.boot(&instance, &guest, SHAPE).unwrap();
    let written = write(&vm, "3rd");
    assert_eq!(read(&vm, "3rd"), written);
    drop((vm, follower));
    pod.api().delete_instance_by_force("vm1").unwrap();
}

#[test]
fn who_follows_may_be_killed_and_a_guest_may_take_its_time() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[("vol0", 1 << 26, Some("h2/ssd0"))]).unwrap();
    create_volumes(&pod, &["vol1"]);
    let mut vm = pod.boot(&instance, &guest, SHAPE).unwrap();
    let monitor = vm.qemu().spec().monitor_socket();
    let lease = |request: &AttachDevice| pod.api().attach_device("vm1", request, LONG / 2).unwrap();
    let volume = AttachDevice { volume: Some("vol1".to_owned()), nic: None };
    let nic = AttachDevice { nic: Some(NicRequest::default()), volume: None };

    // Half of it is done, and whoever did it is dead.
    let leased = lease(&volume);
    let address = json!({"type": "unix", "data": {"path": leased.disks[1].socket}});
    let backend = json!({"type": "socket", "data": {"addr": address, "server": false, "reconnect": 1}});
    let half = json!({"execute": "chardev-add", "arguments": {"id": "wadi-vol1", "backend": backend}});
    monitor::tell(&monitor, &half).unwrap();
    let mut follower = follow(&pod, "vm");
    wait_for_disk(&vm, "vol1");
    let sum = write(&vm, "vol1");
    wait_for("the controller to hear of it", || pod.api().instance("vm1").unwrap().disks[1].plugged);

    // It is killed at any moment of coming and going, and the next one goes on.
    for round in 0..3 * u64::from(rounds()) {
        lease(&nic);
        pod.api().detach_device("vm1", "vol1", false).unwrap();
        thread::sleep(Duration::from_millis(round * 137 % 300));
        follower.check().unwrap();
        follower.kill().unwrap();
        follower = follow(&pod, "vm");
        wait_until_it_has(&pod, &["net0", "net1", "vol0"]);
        assert!(!has_disk(&vm, "vol1"));
        use_second_nic(&pod, &vm);
        lease(&volume);
        pod.api().detach_device("vm1", "net1", false).unwrap();
        thread::sleep(Duration::from_millis(round * 153 % 300));
        follower.check().unwrap();
        follower.kill().unwrap();
        follower = follow(&pod, "vm");
        wait_until_it_has(&pod, &["net0", "vol0", "vol1"]);
        assert!(!has_second_nic(&vm));
        wait_for_disk(&vm, "vol1");
        assert_eq!(read(&vm, "vol1"), sum);
    }

    // A guest that stands still lets go of nothing, and of what it was asked for once it goes on.
    wait_for("the controller to hear of it", || pod.api().instance("vm1").unwrap().disks[1].plugged);
    monitor::tell(&monitor, &json!({"execute": "stop"})).unwrap();
    pod.api().detach_device("vm1", "vol1", false).unwrap();
    wait_for("the guest to be told of", || pod.api().instance("vm1").unwrap().disks[1].refused.is_some());
    let shown = instances(&pod, &["get", "vm1"]).unwrap();
    assert!(shown.contains("vol1 leaves once the guest has let go of it: the guest was asked"), "{shown}");
    let error = instances(&pod, &["detach", "vm1", "vol1", "--wait", "0"]).unwrap_err();
    assert!(error.contains("vol1 is still in vm1") && error.contains("--force"), "{error}");
    has(&pod, &["net0", "vol0", "vol1"]);
    let error = instances(&pod, &["attach", "vm1", "--volume", "vol1"]).unwrap_err();
    assert!(error.contains("once the guest has let go of it"), "{error}");
    monitor::tell(&monitor, &json!({"execute": "cont"})).unwrap();
    wait_until_it_has(&pod, &["net0", "vol0"]);
    assert!(!has_disk(&vm, "vol1"));
    attach_volume(&pod, "vol1");
    wait_for_disk(&vm, "vol1");
    assert_eq!(read(&vm, "vol1"), sum);

    // There is one at a time.
    let mut second = Command::new(pod.binary("vmm"));
    second.args(["follow", "vm1", "--server"]);
    second.arg(format!("unix:{}", pod.directory().join("run/controller.sock").display()));
    let second = second.arg("--directory").arg(pod.directory().join("vm")).output().unwrap();
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && error.contains("follows vm1 already"), "{error}");
    drop((vm, follower));
    pod.api().delete_instance_by_force("vm1").unwrap();
}

/// Ends the machine of `vmm run`, which outlives it.
struct Ends<'a>(&'a Pod);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        let mut stop = Command::new(self.0.binary("vmm"));
        stop.args(["stop", "vm1", "--grace", "0", "--directory"]).arg(self.0.directory().join("vm"));
        // It may have ended.
        let _ = stop.output();
    }
}

#[test]
fn vmm_run_follows_its_own_machine_and_another_does_when_it_is_killed() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[("vol0", 1 << 26, Some("h2/ssd0"))]).unwrap();
    create_volumes(&pod, &["vol1"]);
    let spec = pod.machine(&instance, &guest, SHAPE);
    let run_in = |directory: &str| {
        let mut run = Command::new(pod.binary("vmm"));
        run.args(["run", "--instance", "vm1", "--accelerator", "tcg", "--memory", "320"]);
        run.arg("--server").arg(format!("unix:{}", pod.directory().join("run/controller.sock").display()));
        run.arg("--kernel").arg(&guest.kernel).arg("--initrd").arg(&guest.initrd);
        run.arg("--append").arg(&guest.command_line);
        run.arg("--directory").arg(pod.directory().join(directory));
        run
    };
    let _ends = Ends(&pod);
    let mut run = Daemon::start("vmm-run", run_in("vm"), &pod.directory().join("log/vmm-run.log")).unwrap();
    let agent = Agent::connect(&spec.exec_socket(), LONG).unwrap();
    // It is noted in another directory that it runs, and the pod knows it all the same.
    let second = run_in("elsewhere").output().unwrap();
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && error.contains("a VMM uses net0 of vm1 already"), "{error}");
    let mut slice = Command::new(pod.binary("vmm"));
    slice
        .args(["slice", "vm1", "--share", "50", "--seconds", "1", "--directory"])
        .arg(pod.directory().join("vm"));
    let slice = slice.output().unwrap();
    let said = String::from_utf8_lossy(&slice.stdout).into_owned();
    assert!(
        slice.status.success() && said.starts_with("vm1: shim (QEMU was started with the shim)"),
        "{slice:?}"
    );
    let disks = || agent.run("ls /sys/block | grep -c vd", LONG).unwrap().text().trim().to_owned();
    attach_volume(&pod, "vol1");
    wait_for("the guest to see the disk", || disks() == "2");
    instances(&pod, &["detach", "vm1", "vol1"]).unwrap();
    assert_eq!(disks(), "1");
    run.kill().unwrap();
    let error = instances(&pod, &["attach", "vm1", "--volume", "vol1", "--wait", "1"]).unwrap_err();
    assert!(error.contains("vmm follow vm1"), "{error}");
    let follower = follow(&pod, "vm");
    attach_volume(&pod, "vol1");
    wait_for("the guest to see the disk", || disks() == "2");
    instances(&pod, &["detach", "vm1", "vol1"]).unwrap();
    assert_eq!(disks(), "1");
    drop(follower);
}

#[test]
fn a_machine_that_listens_gets_devices_too() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::three_hosts().start().unwrap();
    create_volumes(&pod, &["vol0", "vol1"]);
    let instance = pod
        .create_instance_as(&CreateInstance {
            name: "vm1".to_owned(),
            host: "h1".to_owned(),
            nics: vec![NicRequest::default()],
            volumes: vec!["vol0".to_owned()],
            vmm_listens: true,
            ..CreateInstance::default()
        })
        .unwrap();
    let vm = pod.boot(&instance, &guest, SHAPE).unwrap();
    let follower = follow(&pod, "vm");
    let mut sum = None;
    for round in 0..=rounds() {
        attach_volume(&pod, "vol1");
        wait_for_disk(&vm, "vol1");
        if let Some(sum) = &sum {
            assert_eq!(&read(&vm, "vol1"), sum);
        }
        sum = Some(write(&vm, "vol1"));
        if round < rounds() {
            instances(&pod, &["attach", "vm1", "--nic"]).unwrap();
            use_second_nic(&pod, &vm);
            instances(&pod, &["detach", "vm1", "net1"]).unwrap();
        }
        instances(&pod, &["detach", "vm1", "vol1"]).unwrap();
        has(&pod, &["net0", "vol0"]);
    }
    drop((vm, follower));
    pod.api().delete_instance_by_force("vm1").unwrap();
}

#[test]
fn what_was_plugged_in_moves_to_another_host_with_its_guest() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0").ssd("ssd0", "2G"))
        .host(HostPlan::new("h3").vms().backup_nic("nic1"))
        .start()
        .unwrap();
    let instance = pod.create_instance("vm1", "h1", &[("vol0", 1 << 26, Some("h2/ssd0"))]).unwrap();
    create_volumes(&pod, &["vol1", "vol2"]);
    let mut vm = pod.boot(&instance, &guest, SHAPE).unwrap();
    let follower = follow(&pod, "vm");
    attach_volume(&pod, "vol1");
    wait_for_disk(&vm, "vol1");
    // What is there now is not where a machine that starts anew would have it.
    instances(&pod, &["detach", "vm1", "vol0"]).unwrap();
    instances(&pod, &["attach", "vm1", "--nic"]).unwrap();
    use_second_nic(&pod, &vm);
    let sum = write(&vm, "vol1");

    let moving = pod.api().migrate_instance("vm1", "h3").unwrap();
    let uri = format!("unix:{}", pod.directory().join("to-h3.sock").display());
    let waiting = pod.await_guest(&moving, &guest, SHAPE, &uri).unwrap();
    let monitor = vm.qemu().spec().monitor_socket();
    vmm::move_away(pod.api(), "vm1", &monitor, &uri, MigrationSpeed::default()).unwrap();
    vmm::quit(&monitor).unwrap();
    assert!(vm.qemu().wait().unwrap().success());
    let vm = waiting.arrived().unwrap();
    drop(follower);

    assert_eq!(read(&vm, "vol1"), sum);
    ping_by_second_nic(&vm);
    let follower = follow(&pod, "vm-h3");
    attach_volume(&pod, "vol2");
    wait_for_disk(&vm, "vol2");
    instances(&pod, &["detach", "vm1", "vol1"]).unwrap();
    instances(&pod, &["detach", "vm1", "net1"]).unwrap();
    has(&pod, &["net0", "vol2"]);
    assert!(!has_disk(&vm, "vol1") && !has_second_nic(&vm));
    drop((vm, follower));
    pod.api().delete_instance_by_force("vm1").unwrap();
}
