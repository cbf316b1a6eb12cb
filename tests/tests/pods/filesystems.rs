//! File systems of a guest on SSDs of other hosts, while everything between dies and returns: no file is wrong, and what
//! looks for damage finds none.

use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, CreateVolume, ReplicaState};
use wadi_tests::files::{FileSystem, Files};
use wadi_tests::pod::{Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::stage::rounds;

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(2);
/// Less is too small for XFS.
const SIZE: &str = "320M";
const DISKS: [(FileSystem, &str); 2] = [(FileSystem::Ext4, "vda"), (FileSystem::Xfs, "vdb")];

fn wait_for(pod: &Pod, device: &str, state: ReplicaState) {
    let began = Instant::now();
    loop {
        let volume = pod.api().volume("vol1").unwrap();
        if volume.replicas.iter().any(|it| it.device == device && it.state == state) {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{device} never was {state:?}: {volume:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn console(vm: &mut PodVm) -> String {
    let bytes = std::fs::read(vm.qemu().spec().console_log()).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits until the guest has written so many files more.
fn wait_for_files(vm: &mut PodVm, files: &mut [Files; 2], more: usize) {
    let wanted = files.each_ref().map(|files| files.count() + more);
    let began = Instant::now();
    loop {
        let said = console(vm);
        for files in files.iter_mut() {
            files.hear(&said);
        }
        if files.iter().zip(wanted).all(|(files, wanted)| files.count() >= wanted) {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "no files are written any more");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn file_systems_are_whole_after_every_daemon_was_killed() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    // One on one SSD, one on two.
    for (name, device, replicas) in [("vol0", Some("h2/ssd0".to_owned()), 1), ("vol1", None, 2)] {
        let (name, size) = (name.to_owned(), SIZE.parse().unwrap());
        pod.api().create_volume(&CreateVolume { device, replicas, ..CreateVolume::new(name, size) }).unwrap();
    }
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: Vec::new(),
        volumes: vec!["vol0".to_owned(), "vol1".to_owned()],
        ..CreateInstance::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    let mut vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let mut files = DISKS.map(|(system, _)| Files::on(system));
    for (system, disk) in DISKS {
        system.make(&vm, disk).unwrap();
    }
    for round in 0..rounds() {
        for ((system, disk), files) in DISKS.into_iter().zip(&files) {
            system.mount(&vm, disk, "rw").unwrap();
            files.start(&vm, &format!("r{round}")).unwrap();
        }
        for (host, role) in [("h2", Role::BlkBackend), ("h1", Role::BlkFrontend), ("h3", Role::BlkBackend)] {
            wait_for_files(&mut vm, &mut files, 5);
            pod.daemon(host, role).unwrap().kill().unwrap();
            pod.start_daemon(host, role).unwrap();
            wait_for_files(&mut vm, &mut files, 5);
            if role == Role::BlkBackend {
                let device = if host == "h2" { "h2/ssd0" } else { "h3/ssd1" };
                wait_for(&pod, device, ReplicaState::InSync);
            }
        }
        for files in &files {
            files.stop(&vm).unwrap();
        }
        let said = console(&mut vm);
        for (files, (_, disk)) in files.iter_mut().zip(DISKS) {
            files.hear(&said);
            files.check_all(&vm, disk).unwrap();
        }
    }
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
    eprintln!("{} files on ext4 and {} on xfs", files[0].count(), files[1].count());
}
