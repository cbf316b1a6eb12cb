//! Volumes grow while a guest uses them, and a guest uses as many queues as a disk may have.

use std::thread;
use std::time::Duration;

use guest_images::{Guest, Silent};
use pod_api::{ByteSize, ChangeVolume, CreateInstance, CreateVolume, Instance};
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::waiting::wait_for;

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(3);
const MIB: u64 = 1 << 20;
const BEFORE_MIB: u64 = 96;
/// By how much a volume grows each time.
const STEP_MIB: u64 = 64;
const STEPS: u64 = 3;
/// What a disk may have.
const QUEUES_MAX: u16 = 16;

fn instance(pod: &Pod, volumes: &[&str]) -> Instance {
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        volumes: volumes.iter().map(|&name| name.to_owned()).collect(),
        ..CreateInstance::default()
    };
    pod.create_instance_as(&request).unwrap()
}

/// The sum of a mebibyte of a disk, from the disk itself.
fn sum_at(vm: &PodVm, disk: &str, at_mib: u64) -> String {
    let read = format!("dd if=/dev/{disk} bs=1M skip={at_mib} count=1 iflag=direct 2> /dev/null | md5sum");
    vm.exec_within(&read, PATIENCE).unwrap()
}

/// Grows a volume, waits until the guest knows, and has it write the last mebibyte. Returns that one's sum.
fn grow(pod: &Pod, vm: &PodVm, (volume, disk): (&str, &str), size_mib: u64) -> String {
    let size = Some(ByteSize::new(size_mib * MIB));
    pod.api().change_volume(volume, &ChangeVolume { size, ..ChangeVolume::default() }).unwrap();
    let sectors = (size_mib * MIB / 512).to_string();
    wait_for("the guest's news of its larger disk", || {
        vm.exec(&format!("cat /sys/block/{disk}/size")).unwrap().trim() == sectors
    });
    let write = format!(
        "head -c 1048576 /dev/urandom > /tmp/{disk}; \
         dd if=/tmp/{disk} of=/dev/{disk} bs=1M seek={} oflag=direct conv=fsync 2> /dev/null && md5sum < /tmp/{disk}",
        size_mib - 1,
    );
    vm.exec_within(&write, PATIENCE).unwrap()
}

#[test]
fn a_guest_that_writes_sees_its_disks_grow() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    // Each volume has room behind it.
    let mut pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").ssd("ssd0", "1G").ssd("ssd1", "1G"))
        .host(HostPlan::new("h3").ssd("ssd0", "1G"))
        .start()
        .unwrap();
    let volume = |name, device, replicas| {
        let volume = CreateVolume::new(name, ByteSize::new(BEFORE_MIB * MIB));
        pod.api().create_volume(&CreateVolume { device, replicas, ..volume }).unwrap()
    };
    volume("plain", Some("h2/ssd1".to_owned()), 1);
    let mirror = volume("mirror", Some("h2/ssd0".to_owned()), 2);
    assert_eq!(mirror.replicas.len(), 2, "{mirror:?}");
    let vm = pod.boot(&instance(&pod, &["plain", "mirror"]), &guest, VmShape::default()).unwrap();
    let disks = [("plain", "vda"), ("mirror", "vdb")];
    let job = |disk: &str| {
        Job { disk: disk.into(), offset_mib: 0, size_mib: 64, pattern: Pattern::Random4K, flush_every: 64 }
            .command()
    };
    let (jobs, on) = (disks.map(|(_, disk)| job(disk)), &vm);
    let mut sums = Vec::new();
    thread::scope(|scope| {
        let running = jobs.each_ref().map(|job| scope.spawn(move || on.exec_within(job, PATIENCE)));
        for step in 1..=STEPS {
            for disk in disks {
                let size_mib = BEFORE_MIB + step * STEP_MIB;
                sums.push((disk.1, size_mib - 1, grow(&pod, &vm, disk, size_mib)));
            }
        }
        for job in running {
            Report::parse(&job.join().unwrap().unwrap()).unwrap();
        }
    });
    for (disk, at_mib, sum) in &sums {
        assert_eq!(&sum_at(&vm, disk, *at_mib), sum, "{disk}, {at_mib} MiB");
    }
    // Each replica of the mirror has all of it.
    pod.daemon("h2", Role::BlkBackend).unwrap().kill().unwrap();
    for (disk, at_mib, sum) in sums.iter().filter(|(disk, ..)| *disk == "vdb") {
        assert_eq!(&sum_at(&vm, disk, *at_mib), sum, "{disk}, {at_mib} MiB, without the first replica");
    }
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
}

#[test]
fn a_guest_uses_all_queues_that_a_disk_may_have_while_daemons_die() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = PodBuilder::three_hosts().disk_queues(QUEUES_MAX).start().unwrap();
    let volume = CreateVolume::new("vol0", ByteSize::new(BEFORE_MIB * MIB));
    pod.api()
        .create_volume(&CreateVolume { device: Some("h2/ssd0".to_owned()), replicas: 1, ..volume })
        .unwrap();
    // A guest uses no more of them than it has vCPUs.
    let shape = VmShape { memory_mib: 512, cpus: QUEUES_MAX.into() };
    let vm = pod.boot(&instance(&pod, &["vol0"]), &guest, shape).unwrap();
    let queues = vm.exec("ls /sys/block/vda/mq | wc -l").unwrap();
    assert_eq!(queues.trim(), QUEUES_MAX.to_string());
    // One writer on each vCPU, so in each queue, which reads back what it wrote.
    let job = format!(
        "fio --name=t --filename=/dev/vda --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --iodepth=4 \
         --numjobs={QUEUES_MAX} --cpus_allowed=0-{} --cpus_allowed_policy=split --size=2m --offset_increment=4m \
         --fsync=64 --verify=crc32c --do_verify=1 --verify_fatal=1",
        QUEUES_MAX - 1
    );
    thread::scope(|scope| {
        let running = scope.spawn(|| vm.run(&job, PATIENCE));
        for (host, role) in [("h2", Role::BlkBackend), ("h1", Role::BlkFrontend)] {
            pod.daemon(host, role).unwrap().kill().unwrap();
            pod.start_daemon(host, role).unwrap();
            pod.wait_until_joined().unwrap();
        }
        let outcome = running.join().unwrap().unwrap();
        assert!(outcome.success(), "{}", String::from_utf8_lossy(&outcome.stderr));
    });
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
}
