//! A volume moves to an SSD of another host and back while an unmodified guest writes and verifies.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{AddReplica, CreateInstance, CreateVolume, NicRequest};
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::pod::{Pod, PodBuilder, VmShape};

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(2);

/// Waits until the volume lies there, and nowhere else.
fn arrived(pod: &Pod, device: &str) {
    let began = Instant::now();
    loop {
        let volume = pod.api().volume("vol0").unwrap();
        if volume.device == device && volume.replicas.is_empty() {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "it never was on {device} alone: {volume:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn tabled(pod: &Pod, image: &str) -> usize {
    let table = Command::new(pod.binary("vhost-blk-cxl"))
        .args(["volumes", "--json"])
        .arg(pod.directory().join(image))
        .output()
        .unwrap();
    let table: serde_json::Value = serde_json::from_slice(&table.stdout).unwrap();
    table["volumes"].as_array().unwrap().len()
}

#[test]
fn a_volume_moves_under_a_guest_that_writes() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::three_hosts().start().unwrap();
    let (name, size) = ("vol0".to_owned(), "128M".parse().unwrap());
    let device = Some("h2/ssd0".to_owned());
    pod.api().create_volume(&CreateVolume { device, ..CreateVolume::new(name, size) }).unwrap();
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest::default()],
        volumes: vec!["vol0".to_owned()],
        instance_type: None,
        vmm_listens: false,
        ram_bytes: None,
        labels: std::collections::BTreeMap::new(),
        priority: None,
    };
    let instance = pod.create_instance_as(&request).unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let written = vm
        .exec_within(
            "head -c 8388608 /dev/urandom > /tmp/data && md5sum < /tmp/data && \
             dd if=/tmp/data of=/dev/vda bs=1M seek=96 conv=fsync 2>/dev/null",
            PATIENCE,
        )
        .unwrap();
    let command =
        Job { disk: "vda".into(), offset_mib: 0, size_mib: 64, pattern: Pattern::Random4K, flush_every: 64 }
            .command();
    for (from, to) in [("h2/ssd0", "h3/ssd1"), ("h3/ssd1", "h2/ssd0")] {
        thread::scope(|scope| {
            let job = scope.spawn(|| vm.exec_within(&command, PATIENCE));
            thread::sleep(Duration::from_millis(300));
            let request = AddReplica { device: Some(to.to_owned()), replaces: Some(from.to_owned()) };
            let volume = pod.api().add_replica("vol0", &request).unwrap();
            assert_eq!(volume.replicas.len(), 2, "{volume:?}");
            arrived(&pod, to);
            Report::parse(&job.join().unwrap().unwrap()).unwrap();
        });
        let read = vm
            .exec_within(
                "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=1M skip=96 count=8 2>/dev/null | md5sum",
                PATIENCE,
            )
            .unwrap();
        assert_eq!(read, written, "it moved from {from} to {to}");
        // Of what was left nothing is kept.
        let image = format!("{}.img", from.replace('/', "-"));
        let began = Instant::now();
        while tabled(&pod, &image) != 0 {
            assert!(began.elapsed() < PATIENCE, "the place on {from} was never wiped");
            thread::sleep(Duration::from_millis(50));
        }
    }
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
}
