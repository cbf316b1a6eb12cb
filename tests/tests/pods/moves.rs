//! A volume moves to an SSD of another host, or to another SSD of its own host, and back while an unmodified guest writes and verifies.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{AddReplica, CreateInstance, CreateVolume, NicRequest, ReplicaState};
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::waiting::wait_for;

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

/// Waits until nothing is kept of the volume on an SSD that it has left.
fn wiped(pod: &Pod, device: &str) {
    let image = format!("{}.img", device.replace('/', "-"));
    let began = Instant::now();
    while tabled(pod, &image) != 0 {
        assert!(began.elapsed() < PATIENCE, "the place on {device} was never wiped");
        thread::sleep(Duration::from_millis(50));
    }
}

fn moves(pod: &Pod, from: &str, to: &str) {
    let request = AddReplica { device: Some(to.to_owned()), replaces: Some(from.to_owned()) };
    let before = pod.api().volume("vol0").unwrap().replicas.len().max(1);
    let volume = pod.api().add_replica("vol0", &request).unwrap();
    assert_eq!(volume.replicas.len(), before + 1, "{volume:?}");
}

/// Waits until the mirror lies there, with all that it has, and nowhere else.
fn mirrored_on(pod: &Pod, devices: [&str; 2]) {
    wait_for("the replica's move", || {
        let mut replicas = pod.api().volume("vol0").unwrap().replicas;
        replicas.sort_by(|one, other| one.device.cmp(&other.device));
        replicas
            .iter()
            .map(|it| (it.device.as_str(), it.state))
            .eq(devices.map(|it| (it, ReplicaState::InSync)))
    });
}

/// A VM on h1 whose disk lies on h2, and on other hosts if there are to be more replicas.
fn boot(pod: &Pod, nics: Vec<NicRequest>, replicas: u8) -> PodVm {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let (name, size) = ("vol0".to_owned(), "128M".parse().unwrap());
    let device = Some("h2/ssd0".to_owned());
    pod.api().create_volume(&CreateVolume { device, replicas, ..CreateVolume::new(name, size) }).unwrap();
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics,
        volumes: vec!["vol0".to_owned()],
        ..CreateInstance::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    pod.boot(&instance, &guest, VmShape::default()).unwrap()
}

/// Writes to the end of the disk what is compared later. Returns its checksum.
fn fill(vm: &PodVm) -> String {
    vm.exec_within(
        "head -c 8388608 /dev/urandom > /tmp/data && md5sum < /tmp/data && \
         dd if=/tmp/data of=/dev/vda bs=1M seek=96 conv=fsync 2>/dev/null",
        PATIENCE,
    )
    .unwrap()
}

/// What happens while the guest writes to its disk, and reads and compares what it wrote. What was there before stays.
fn under_load(pod: &mut Pod, vm: &PodVm, written: &str, happens: impl FnOnce(&mut Pod)) {
    let pattern = Pattern::Random4K;
    let command = Job { disk: "vda".into(), offset_mib: 0, size_mib: 64, pattern, flush_every: 64 }.command();
    thread::scope(|scope| {
        let job = scope.spawn(|| vm.exec_within(&command, PATIENCE));
        thread::sleep(Duration::from_millis(300));
        happens(pod);
        Report::parse(&job.join().unwrap().unwrap()).unwrap();
    });
    let command =
        "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=1M skip=96 count=8 2>/dev/null | md5sum";
    assert_eq!(vm.exec_within(command, PATIENCE).unwrap(), written);
}

fn no_errors(vm: &PodVm) {
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
}

#[test]
fn a_volume_moves_under_a_guest_that_writes() {
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    let vm = boot(&pod, vec![NicRequest::default()], 1);
    let written = fill(&vm);
    for (from, to) in [("h2/ssd0", "h3/ssd1"), ("h3/ssd1", "h2/ssd0")] {
        under_load(&mut pod, &vm, &written, |pod| {
            moves(pod, from, to);
            arrived(pod, to);
        });
        wiped(&pod, from);
    }
    no_errors(&vm);
}

/// The backend serves both places meanwhile. It dies in the middle, and so does the frontend; and an SSD is left because it is drained.
#[test]
fn a_volume_moves_between_two_ssds_of_its_host_while_daemons_die() {
    let host = HostPlan::new("h2").ssd("ssd0", "2G").ssd("ssd1", "2G");
    let mut pod = PodBuilder::new().host(HostPlan::new("h1").vms()).host(host).start().unwrap();
    pod.wait_for_protocol().unwrap();
    let vm = boot(&pod, Vec::new(), 1);
    let written = fill(&vm);
    for (from, to, dies) in [
        ("h2/ssd0", "h2/ssd1", None),
        ("h2/ssd1", "h2/ssd0", None),
        ("h2/ssd0", "h2/ssd1", Some(("h2", Role::BlkBackend))),
        ("h2/ssd1", "h2/ssd0", Some(("h1", Role::BlkFrontend))),
    ] {
        under_load(&mut pod, &vm, &written, |pod| {
            moves(pod, from, to);
            if let Some((host, role)) = dies {
                pod.daemon(host, role).unwrap().kill().unwrap();
                assert!(!pod.api().volume("vol0").unwrap().replicas.is_empty(), "it is there already");
                pod.start_daemon(host, role).unwrap();
            }
            arrived(pod, to);
        });
        wiped(&pod, from);
    }
    under_load(&mut pod, &vm, &written, |pod| {
        pod.podctl(&["devices", "drain", "h2/ssd0"]).unwrap();
        arrived(pod, "h2/ssd1");
    });
    wiped(&pod, "h2/ssd0");
    no_errors(&vm);
}

/// One backend serves both places while the other replica's goes on. It dies in the middle, and so does the frontend. In the end the
/// place to which it moved last has to have everything, for nobody else is there.
#[test]
fn a_replica_of_a_mirror_moves_between_two_ssds_of_its_host_while_daemons_die() {
    let moving = HostPlan::new("h2").ssd("ssd0", "2G").ssd("ssd1", "2G");
    let staying = HostPlan::new("h3").ssd("ssd0", "2G");
    let hosts = PodBuilder::new().host(HostPlan::new("h1").vms()).host(moving).host(staying);
    let mut pod = hosts.start().unwrap();
    pod.wait_for_protocol().unwrap();
    let vm = boot(&pod, Vec::new(), 2);
    mirrored_on(&pod, ["h2/ssd0", "h3/ssd0"]);
    let written = fill(&vm);
    for (from, to, dies) in [
        ("h2/ssd0", "h2/ssd1", ("h2", Role::BlkBackend)),
        ("h2/ssd1", "h2/ssd0", ("h1", Role::BlkFrontend)),
        ("h2/ssd0", "h2/ssd1", ("h3", Role::BlkBackend)),
    ] {
        under_load(&mut pod, &vm, &written, |pod| {
            moves(pod, from, to);
            let (host, role) = dies;
            pod.daemon(host, role).unwrap().kill().unwrap();
            assert_eq!(pod.api().volume("vol0").unwrap().replicas.len(), 3, "it is there already");
            pod.start_daemon(host, role).unwrap();
            mirrored_on(pod, [to, "h3/ssd0"]);
        });
        wiped(&pod, from);
    }
    under_load(&mut pod, &vm, &written, |pod| pod.daemon("h3", Role::BlkBackend).unwrap().kill().unwrap());
    no_errors(&vm);
}
