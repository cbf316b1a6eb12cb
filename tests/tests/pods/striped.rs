//! A striped volume under an unmodified guest: the backend of one of its SSDs is killed under load and comes back, and every
//! byte is there.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{ByteSize, CreateInstance, CreateVolume, Stripes};
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::stage::rounds;
use wadi_tests::waiting::wait_for;

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(2);

const STRIPES: Stripes = Stripes { columns: 4, size: ByteSize::new(64 << 10) };
const IMAGES: [&str; 4] = ["h2-ssd0.img", "h3-ssd1.img", "h4-ssd2.img", "h5-ssd3.img"];

/// What the table of volumes on an SSD says of the only one there.
fn tabled(pod: &Pod, image: &str) -> serde_json::Value {
    let table = Command::new(pod.binary("vhost-blk-cxl"))
        .args(["volumes", "--json"])
        .arg(pod.directory().join(image))
        .output()
        .unwrap();
    let table: serde_json::Value = serde_json::from_slice(&table.stdout).unwrap();
    assert_eq!(table["volumes"].as_array().unwrap().len(), 1, "{table}");
    table["volumes"][0].clone()
}

fn checksum(vm: &PodVm) -> String {
    let command =
        "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=1M skip=96 count=8 2>/dev/null | md5sum";
    vm.exec_within(command, PATIENCE).unwrap()
}

#[test]
fn the_backend_of_a_column_dies_under_load_and_every_byte_is_there() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = PodBuilder::three_hosts()
        .host(HostPlan::new("h4").ssd("ssd2", "256M"))
        .host(HostPlan::new("h5").ssd("ssd3", "256M"))
        .start()
        .unwrap();
    let (name, size) = ("vol0".to_owned(), "128M".parse().unwrap());
    let volume = pod
        .api()
        .create_volume(&CreateVolume { stripes: Some(STRIPES), ..CreateVolume::new(name, size) })
        .unwrap();
    assert_eq!(volume.size_bytes, 128 << 20, "{volume:?}");
    let instance = pod
        .create_instance_as(&CreateInstance {
            name: "vm1".to_owned(),
            host: "h1".to_owned(),
            nics: Vec::new(),
            volumes: vec!["vol0".to_owned()],
            ..CreateInstance::default()
        })
        .unwrap();
    // A quarter of it on each SSD, and each of them says so.
    for image in IMAGES {
        let column = tabled(&pod, image);
        assert_eq!(column["size_bytes"], 32 << 20, "{column}");
        assert!(!column["stripe"].is_null(), "{column}");
    }
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let sectors = vm.exec("cat /sys/block/vda/size").unwrap();
    assert_eq!(sectors.trim().parse::<u64>().unwrap() * 512, 128 << 20);
    let written = vm
        .exec_within(
            "head -c 8388608 /dev/urandom > /tmp/data && md5sum < /tmp/data && \
             dd if=/tmp/data of=/dev/vda bs=1M seek=96 conv=fsync 2>/dev/null",
            PATIENCE,
        )
        .unwrap();
    assert_eq!(checksum(&vm), written);
    if instance.ram.is_some() {
        // What it wrote through its page cache lies in whole pages.
        wait_for("something that was not copied, since the guest's RAM lies in the pool", || {
            not_copied(&pod) > 0
        });
    }

    let deaths = [
        ("h2", Role::BlkBackend, Pattern::Random4K),
        // Requests that lie on two of them.
        ("h3", Role::BlkBackend, Pattern::Sequential128K),
        ("h1", Role::BlkFrontend, Pattern::Random4K),
    ];
    for _ in 0..rounds() {
        for (host, role, pattern) in deaths {
            let job = Job { disk: "vda".into(), offset_mib: 0, size_mib: 64, pattern, flush_every: 64 };
            let command = job.command();
            thread::scope(|scope| {
                let job = scope.spawn(|| vm.exec_within(&command, PATIENCE));
                wait_for_writes(&vm);
                pod.daemon(host, role).unwrap().kill().unwrap();
                pod.start_daemon(host, role).unwrap();
                Report::parse(&job.join().unwrap().unwrap()).unwrap();
            });
            pod.wait_until_joined().unwrap();
            assert_eq!(checksum(&vm), written, "after the death of {host}'s {role}");
        }
    }
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
    // All columns were written to.
    for image in IMAGES {
        let column = tabled(&pod, image);
        let mut bytes = vec![0; 1 << 20];
        let file = File::open(pod.directory().join(image)).unwrap();
        file.read_exact_at(&mut bytes, column["start_bytes"].as_u64().unwrap()).unwrap();
        assert!(bytes.iter().any(|&byte| byte != 0), "{image} is empty");
    }
}

/// How many requests used the guest's own memory in the pool.
fn not_copied(pod: &Pod) -> u64 {
    let page = pod.api().metrics().unwrap();
    let is_it = |line: &&str| line.contains("h1/blk-frontend") && line.contains("zero-copy-requests");
    let line = page.lines().find(is_it);
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
}

/// Waits until the job is under way.
fn wait_for_writes(vm: &PodVm) {
    let writes = || -> u64 {
        let counters = vm.exec("cat /sys/block/vda/stat").unwrap();
        counters.split_whitespace().nth(4).unwrap().parse().unwrap()
    };
    let (began, before) = (Instant::now(), writes());
    while writes() < before + 100 {
        assert!(began.elapsed() < PATIENCE, "nothing is written");
        thread::sleep(Duration::from_millis(20));
    }
}
