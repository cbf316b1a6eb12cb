//! The columns of a striped volume move to SSDs of other hosts, and to another one of their own, while an unmodified guest writes and
//! verifies: because somebody says so, and because their SSDs are drained. Frontend and backends die meanwhile, and every byte is there.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{AddReplica, ByteSize, CreateInstance, CreateVolume, ReplicaState, Stripes, Volume};
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, PodVm, Role, VmShape};

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(2);

fn volume(pod: &Pod) -> Volume {
    pod.api().volume("vol0").unwrap()
}

fn until(pod: &Pod, what: &str, holds: impl Fn(&Volume) -> bool) {
    let began = Instant::now();
    while !holds(&volume(pod)) {
        assert!(began.elapsed() < PATIENCE, "{what}: {:?}", volume(pod));
        thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until the columns are there, and nothing else is.
fn lies_on(pod: &Pod, columns: [&str; 2]) {
    until(pod, "a column never arrived", |volume| {
        volume.replicas.iter().map(|it| it.device.as_str()).eq(columns)
            && volume.replicas.iter().all(|it| it.state == ReplicaState::InSync)
    });
}

/// How many volumes are in the table of an SSD.
fn tabled(pod: &Pod, image: &str) -> usize {
    let table = Command::new(pod.binary("vhost-blk-cxl"))
        .args(["volumes", "--json"])
        .arg(pod.directory().join(image))
        .output()
        .unwrap();
    let table: serde_json::Value = serde_json::from_slice(&table.stdout).unwrap();
    table["volumes"].as_array().unwrap().len()
}

fn wiped(pod: &Pod, image: &str) {
    let began = Instant::now();
    while tabled(pod, image) != 0 {
        assert!(began.elapsed() < PATIENCE, "the place on {image} was never wiped");
        thread::sleep(Duration::from_millis(50));
    }
}

fn checksum(vm: &PodVm) -> String {
    let command =
        "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=1M skip=96 count=8 2>/dev/null | md5sum";
    vm.exec_within(command, PATIENCE).unwrap()
}

fn moves(pod: &Pod, from: &str, to: &str) {
    let request = AddReplica { device: Some(to.to_owned()), replaces: Some(from.to_owned()) };
    let volume = pod.api().add_replica("vol0", &request).unwrap();
    assert_eq!(volume.replicas.len(), 3, "{volume:?}");
}

#[test]
fn columns_move_under_a_guest_that_writes() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let h4 = HostPlan::new("h4").ssd("ssd2", "2G").ssd("ssd3", "2G");
    let mut pod = PodBuilder::three_hosts().host(h4).start().unwrap();
    pod.wait_for_protocol().unwrap();
    // So that the columns lie where the test begins.
    pod.api().drain_host("h4", true).unwrap();
    pod.api()
        .create_volume(&CreateVolume {
            stripes: Some(Stripes { columns: 2, size: ByteSize::new(64 << 10) }),
            ..CreateVolume::new("vol0", "128M".parse().unwrap())
        })
        .unwrap();
    pod.api().drain_host("h4", false).unwrap();
    let instance = pod
        .create_instance_as(&CreateInstance {
            name: "vm1".to_owned(),
            host: "h1".to_owned(),
            nics: Vec::new(),
            volumes: vec!["vol0".to_owned()],
            ..CreateInstance::default()
        })
        .unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let written = vm
        .exec_within(
            "head -c 8388608 /dev/urandom > /tmp/data && md5sum < /tmp/data && \
             dd if=/tmp/data of=/dev/vda bs=1M seek=96 conv=fsync 2>/dev/null",
            PATIENCE,
        )
        .unwrap();
    let job = |pattern| Job { disk: "vda".into(), offset_mib: 0, size_mib: 64, pattern, flush_every: 64 };
    let meanwhile = |pod: &mut Pod, pattern, happens: &dyn Fn(&mut Pod)| {
        let command = job(pattern).command();
        thread::scope(|scope| {
            let job = scope.spawn(|| vm.exec_within(&command, PATIENCE));
            thread::sleep(Duration::from_millis(300));
            happens(pod);
            Report::parse(&job.join().unwrap().unwrap()).unwrap();
        });
        assert_eq!(checksum(&vm), written);
    };
    lies_on(&pod, ["h2/ssd0", "h3/ssd1"]);

    meanwhile(&mut pod, Pattern::Random4K, &|pod| {
        moves(pod, "h2/ssd0", "h4/ssd2");
        lies_on(pod, ["h4/ssd2", "h3/ssd1"]);
    });
    wiped(&pod, "h2-ssd0.img");

    // The frontend dies in the middle.
    meanwhile(&mut pod, Pattern::Random4K, &|pod| {
        moves(pod, "h3/ssd1", "h2/ssd0");
        pod.daemon("h1", Role::BlkFrontend).unwrap().kill().unwrap();
        pod.start_daemon("h1", Role::BlkFrontend).unwrap();
        lies_on(pod, ["h4/ssd2", "h2/ssd0"]);
    });
    wiped(&pod, "h3-ssd1.img");

    // Where it would go to dies before all of it can be there, and the column stays.
    meanwhile(&mut pod, Pattern::Sequential128K, &|pod| {
        moves(pod, "h4/ssd2", "h3/ssd1");
        pod.daemon("h3", Role::BlkBackend).unwrap().kill().unwrap();
        lies_on(pod, ["h4/ssd2", "h2/ssd0"]);
        pod.start_daemon("h3", Role::BlkBackend).unwrap();
    });
    pod.wait_until_joined().unwrap();
    wiped(&pod, "h3-ssd1.img");

    // Its host is to be empty.
    meanwhile(&mut pod, Pattern::Random4K, &|pod| {
        pod.api().drain_host("h2", true).unwrap();
        lies_on(pod, ["h4/ssd2", "h3/ssd1"]);
    });
    wiped(&pod, "h2-ssd0.img");

    // To the other SSD of its host, whose backend serves both places meanwhile.
    meanwhile(&mut pod, Pattern::Random4K, &|pod| {
        moves(pod, "h4/ssd2", "h4/ssd3");
        lies_on(pod, ["h4/ssd3", "h3/ssd1"]);
    });
    wiped(&pod, "h4-ssd2.img");
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
}
