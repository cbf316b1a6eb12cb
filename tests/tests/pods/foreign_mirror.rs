//! A volume that is mirrored on disks of other programs, as SPDK's vhost or qemu-storage-daemon are, under an unmodified guest: its frontend is
//! killed, then the program of one disk, which comes back, then that of the other one, and every byte is there.

use std::os::unix::fs::MetadataExt as _;
use std::process::Command;
use std::thread;
use std::time::Duration;

use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, CreateVolume, ReplicaState};
use wadi_tests::fio::{Job, Pattern};
use wadi_tests::foreign_disk::ForeignDisk;
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, Role, VmShape};
use wadi_tests::waiting::wait_for;

const DISK_BYTES: u64 = 128 << 20;
/// A program that is gone is not waited for.
const SETTINGS: &str = "reconnect-ms = 0";
/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(2);

/// h1 runs VMs; the disks of h2 and h3 are other programs'.
fn pod() -> (Pod, [ForeignDisk; 2]) {
    let owner = |host: &str, ssd: &str| HostPlan::new(host).foreign_ssd(ssd).ssd_settings(SETTINGS);
    let hosts = [HostPlan::new("h1").vms(), owner("h2", "ssd0"), owner("h3", "ssd1")];
    let plan = hosts.into_iter().fold(PodBuilder::new(), PodBuilder::host);
    let mut pod = plan.lay_out().unwrap();
    let disks = [("h2", "ssd0"), ("h3", "ssd1")]
        .map(|(host, ssd)| ForeignDisk::start(&pod, host, ssd, DISK_BYTES, None).unwrap());
    pod.create_pool().unwrap();
    pod.start_controller().unwrap();
    for (host, role) in [("h1", Role::BlkFrontend), ("h2", Role::BlkBackend), ("h3", Role::BlkBackend)] {
        pod.start_daemon(host, role).unwrap();
    }
    pod.wait_until_joined().unwrap();
    (pod, disks)
}

fn wait_for_replica(pod: &Pod, device: &str, state: ReplicaState) {
    wait_for(&format!("{device} to be {state:?}"), || {
        let replicas = pod.api().volume("vol0").unwrap().replicas;
        replicas.iter().any(|replica| replica.device == device && replica.state == state)
    });
}

/// What the disk itself says is on it.
fn table(pod: &Pod, disk: &ForeignDisk) -> String {
    let said = Command::new(pod.binary("vhost-blk-cxl")).arg("volumes").arg(disk.file()).output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    String::from_utf8(said.stdout).unwrap()
}

#[test]
fn disks_of_other_programs_mirror_each_other_and_every_byte_is_there() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let (mut pod, mut disks) = pod();
    let (name, size) = ("vol0".to_owned(), "64M".parse().unwrap());
    pod.api().create_volume(&CreateVolume { replicas: 2, ..CreateVolume::new(name, size) }).unwrap();
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        volumes: vec!["vol0".to_owned()],
        ..CreateInstance::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    for disk in &disks {
        let table = table(&pod, disk);
        assert!(
            table.starts_with("vol0: ") && table.contains("replicas may differ in"),
            "it has a log: {table}"
        );
    }
    let job = |offset_mib| Job {
        disk: "vda".into(),
        offset_mib,
        size_mib: 16,
        pattern: Pattern::Random4K,
        flush_every: 64,
    };
    let written = |disk: &ForeignDisk| disk.file().metadata().unwrap().blocks() * 512;
    thread::scope(|scope| {
        let before = written(&disks[0]);
        let work = scope.spawn(|| job(0).run(&vm, PATIENCE));
        wait_for("some writes", || written(&disks[0]) > before + (2 << 20));
        pod.daemon("h1", Role::BlkFrontend).unwrap().kill().unwrap();
        pod.start_daemon("h1", Role::BlkFrontend).unwrap();
        work.join().unwrap().unwrap();
    });
    thread::scope(|scope| {
        let before = written(&disks[0]);
        let work = scope.spawn(|| job(16).run(&vm, PATIENCE));
        wait_for("some writes", || written(&disks[0]) > before + (2 << 20));
        disks[1].kill().unwrap();
        wait_for_replica(&pod, "h3/ssd1", ReplicaState::StaleAway);
        work.join().unwrap().unwrap();
    });
    // What the dead one misses for certain.
    let sums =
        vm.exec_within("head -c 8388608 /dev/urandom > /tmp/data && md5sum < /tmp/data", PATIENCE).unwrap();
    vm.exec_within("dd if=/tmp/data of=/dev/vda bs=1M seek=40 conv=fsync", PATIENCE).unwrap();
    disks[1].serve(&pod, "h3").unwrap();
    wait_for_replica(&pod, "h3/ssd1", ReplicaState::InSync);
    disks[0].kill().unwrap();
    let read = "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=1M skip=40 count=8 2>/dev/null | md5sum";
    assert_eq!(vm.exec_within(read, PATIENCE).unwrap(), sums);
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
    let table = table(&pod, &disks[1]);
    assert!(table.contains("h3/ssd1, this one: in sync"), "{table}");
}
