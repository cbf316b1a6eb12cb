//! A volume with three replicas under an unmodified guest: the backend of one is killed under load and comes back, then those of both
//! others, and every byte is there.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, CreateVolume, EventKind, NicRequest, ReplicaState};
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, PodVm, Role, VmShape};

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(2);

fn states(pod: &Pod) -> Vec<(String, ReplicaState)> {
    let volume = pod.api().volume("vol0").unwrap();
    volume.replicas.into_iter().map(|replica| (replica.device, replica.state)).collect()
}

fn wait_for(pod: &Pod, device: &str, state: ReplicaState) {
    let began = Instant::now();
    while !states(pod).contains(&(device.to_owned(), state)) {
        assert!(began.elapsed() < PATIENCE, "{device} never was {state:?}: {:?}", states(pod));
        thread::sleep(Duration::from_millis(50));
    }
}

/// Writes 8 MiB of chance, and returns its checksum.
fn write(vm: &PodVm, at_mib: u32) -> String {
    vm.exec_within(
        &format!(
            "head -c 8388608 /dev/urandom > /tmp/data && md5sum < /tmp/data && \
             dd if=/tmp/data of=/dev/vda bs=1M seek={at_mib} conv=fsync 2>/dev/null"
        ),
        PATIENCE,
    )
    .unwrap()
}

fn read(vm: &PodVm, at_mib: u32) -> String {
    vm.exec_within(
        &format!(
            "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=1M skip={at_mib} count=8 2>/dev/null | md5sum"
        ),
        PATIENCE,
    )
    .unwrap()
}

#[test]
fn replicas_die_one_after_the_other_and_every_byte_is_there() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = PodBuilder::three_hosts().host(HostPlan::new("h4").ssd("ssd2", "256M")).start().unwrap();
    let (name, size) = ("vol0".to_owned(), "192M".parse().unwrap());
    let volume =
        pod.api().create_volume(&CreateVolume { replicas: 3, ..CreateVolume::new(name, size) }).unwrap();
    let devices: Vec<String> = volume.replicas.iter().map(|replica| replica.device.clone()).collect();
    assert_eq!(devices, ["h2/ssd0", "h3/ssd1", "h4/ssd2"], "{volume:?}");
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest::default()],
        volumes: vec!["vol0".to_owned()],
        ..CreateInstance::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let first = write(&vm, 64);

    let command =
        Job { disk: "vda".into(), offset_mib: 0, size_mib: 64, pattern: Pattern::Random4K, flush_every: 64 }
            .command();
    let second = thread::scope(|scope| {
        let job = scope.spawn(|| vm.exec_within(&command, PATIENCE));
        thread::sleep(Duration::from_millis(500));
        pod.daemon("h2", Role::BlkBackend).unwrap().kill().unwrap();
        wait_for(&pod, "h2/ssd0", ReplicaState::StaleAway);
        Report::parse(&job.join().unwrap().unwrap()).unwrap();
        // What the dead one misses for certain.
        let second = write(&vm, 96);
        assert_eq!(read(&vm, 96), second);
        let job = scope.spawn(|| vm.exec_within(&command, PATIENCE));
        pod.start_daemon("h2", Role::BlkBackend).unwrap();
        wait_for(&pod, "h2/ssd0", ReplicaState::InSync);
        Report::parse(&job.join().unwrap().unwrap()).unwrap();
        second
    });

    let third = write(&vm, 128);
    for (host, device) in [("h3", "h3/ssd1"), ("h4", "h4/ssd2")] {
        pod.daemon(host, Role::BlkBackend).unwrap().kill().unwrap();
        wait_for(&pod, device, ReplicaState::StaleAway);
    }
    assert_eq!([read(&vm, 64), read(&vm, 96), read(&vm, 128)], [first, second, third]);
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");

    // The survivor's device says so itself, to whoever has nothing else.
    let table = Command::new(pod.binary("vhost-blk-cxl"))
        .args(["volumes", "--json"])
        .arg(pod.directory().join("h2-ssd0.img"))
        .output()
        .unwrap();
    let table: serde_json::Value = serde_json::from_slice(&table.stdout).unwrap();
    let members = table["volumes"][0]["mirror"]["replicas"].as_array().unwrap();
    let stale: Vec<bool> = members.iter().map(|member| member["stale"] == true).collect();
    let survives: Vec<bool> = members.iter().map(|member| member["ssd"] == "h2/ssd0").collect();
    assert!(stale.iter().zip(survives).all(|(stale, survives)| *stale != survives), "{members:?}");
    let kinds: Vec<EventKind> =
        pod.api().events(0).unwrap().events.into_iter().map(|event| event.kind).collect();
    let count = |wanted| kinds.iter().filter(|kind| **kind == wanted).count();
    assert_eq!((count(EventKind::ReplicaDropped), count(EventKind::ReplicaSynced)), (3, 1));
}
