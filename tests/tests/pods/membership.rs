//! Hosts and devices join a pod and leave it while a guest writes, verifies and is reached.

use std::fmt::Write as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

use guest_images::{Guest, Silent};
use pod_api::{AddReplica, CreateVolume, DeviceHealth, DeviceKind, Volume};
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::looks::volume_on;
use wadi_tests::pod::{CLIENT_ADDRESS, HostPlan, Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::waiting::until;

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(2);

/// The host's daemons end, as they do when it loses power.
fn power_off(pod: &mut Pod, host: &str) {
    for role in [Role::NetBackend, Role::BlkBackend] {
        pod.daemon(host, role).unwrap().kill().unwrap();
    }
}

/// Takes a host that is off out of the pod.
fn delete(pod: &Pod, host: &str) {
    until("its daemons to be known to be gone", || pod.api().reset_host(host).ok());
    pod.api().delete_host(host).unwrap();
    assert!(pod.api().hosts().unwrap().iter().all(|it| it.name != host));
    assert!(pod.api().devices().unwrap().iter().all(|it| !it.name.starts_with(host)));
}

/// Starts a backend of a host anew, with this configuration.
fn reconfigure(pod: &mut Pod, host: &str, role: Role, text: &str) {
    fs::write(pod.config_path(host), text).unwrap();
    pod.daemon(host, role).unwrap().kill().unwrap();
    pod.start_daemon(host, role).unwrap();
}

/// What a configuration says of its two NICs.
fn tables_of_nics(text: &str) -> (&str, &str) {
    const TABLE: &str = "\n[[nic]]";
    let first = text.find(TABLE).unwrap();
    let second = first + 1 + text[first + 1..].find(TABLE).unwrap();
    let end = text.find("\n[[ssd]]").unwrap();
    (&text[first..second], &text[second..end])
}

fn wait_until_up(pod: &Pod, host: &str, device: &str) {
    until(device, || pod.api().device(host, device).ok().filter(|it| it.health == DeviceHealth::Up));
}

fn move_volume(pod: &Pod, from: &str, to: &str) {
    let request = AddReplica { device: Some(to.to_owned()), replaces: Some(from.to_owned()) };
    pod.api().add_replica("vol0", &request).unwrap();
    until("the volume's move", || {
        let volume = pod.api().volume("vol0").unwrap();
        (volume.device == to && volume.replicas.is_empty()).then_some(())
    });
}

/// Has the guest use this NIC, if it does not already.
fn use_nic(pod: &Pod, nic: &str) {
    until(nic, || {
        let there = pod.api().instance("vm1").unwrap().nics[0].nic == nic;
        // It may still be on its way from another one.
        let _ = there || pod.api().migrate_nic("vm1", "net0", Some(nic)).is_ok();
        there.then_some(())
    });
}

/// A volume that no instance uses.
fn unused(device: &str) -> CreateVolume {
    CreateVolume { device: Some(device.to_owned()), ..CreateVolume::new("unused", "8M".parse().unwrap()) }
}

/// Fills a volume that no instance uses.
fn fill(pod: &Pod, volume: &Volume) -> Vec<u8> {
    let bytes = (0..volume.size_bytes).map(|at| (at / 4096).to_le_bytes()[0] ^ at.to_le_bytes()[0]);
    let data: Vec<u8> = bytes.collect();
    let image = pod.directory().join(format!("{}.img", volume.device.replace('/', "-")));
    let image = fs::File::options().write(true).open(image).unwrap();
    image.write_all_at(&data, volume.start_bytes).unwrap();
    image.sync_all().unwrap();
    data
}

/// A volume that no instance uses leaves an SSD that is to be empty by itself, and whoever wants it then has all of it.
fn leaves_by_itself(pod: &Pod, host: &str, data: &[u8]) {
    let moved = until("it to leave", || {
        let volume = pod.api().volume("unused").unwrap();
        let is_over = volume.replicas.is_empty() && volume.instance.is_none();
        (!volume.device.starts_with(host) && is_over).then_some(volume)
    });
    let (to, ssd) = moved.device.split_once('/').unwrap();
    assert!(volume_on(pod, "unused", to, ssd).unwrap() == *data, "it is not what it was");
    assert!(pod.api().instances().unwrap().iter().all(|it| it.copies.is_none()), "nobody is left");
    pod.api().delete_volume("unused").unwrap();
}

fn answers(vm: &PodVm) {
    vm.exec(&format!("ping -c 3 -W 5 {CLIENT_ADDRESS}")).unwrap();
}

#[test]
fn hosts_and_devices_come_and_go_while_a_guest_works() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let fourth = HostPlan::new("h4").nic("nic0").nic("nic1").ssd("ssd0", "512M");
    let mut pod = PodBuilder::three_hosts().host(fourth).start().unwrap();

    // A host leaves that nothing depends on.
    assert!(pod.api().delete_host("h4").is_err(), "its daemons run");
    power_off(&mut pod, "h4");
    delete(&pod, "h4");
    // Its second NIC has yet to be built in.
    let with_both = fs::read_to_string(pod.config_path("h4")).unwrap();
    let (nic0, nic1) = tables_of_nics(&with_both);
    fs::write(pod.config_path("h4"), with_both.replacen(nic1, "", 1)).unwrap();

    let instance = pod.create_instance("vm1", "h1", &[("vol0", 96 << 20, Some("h2/ssd0"))]).unwrap();
    assert_eq!(instance.nics[0].nic, "h2/nic0");
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let job =
        Job { disk: "vda".into(), offset_mib: 0, size_mib: 32, pattern: Pattern::Random4K, flush_every: 64 };
    let (command, is_over) = (job.command(), AtomicBool::new(false));
    thread::scope(|scope| {
        // It ends when this panics, too.
        let _stop = Stop(&is_over);
        let jobs = scope.spawn(|| {
            let mut jobs = 0;
            while !is_over.load(Ordering::Relaxed) {
                Report::parse(&vm.exec_within(&command, PATIENCE).unwrap()).unwrap();
                jobs += 1;
            }
            jobs
        });
        answers(&vm);

        // A host joins, and the guest goes on with what it brings.
        for role in [Role::NetBackend, Role::BlkBackend] {
            pod.start_daemon("h4", role).unwrap();
        }
        wait_until_up(&pod, "h4", "nic0");
        wait_until_up(&pod, "h4", "ssd0");
        pod.api().migrate_nic("vm1", "net0", Some("h4/nic0")).unwrap();
        pod.wait_for_nic("vm1", "h4/nic0").unwrap();
        move_volume(&pod, "h2/ssd0", "h4/ssd0");
        answers(&vm);

        // The host that had all before leaves.
        assert!(pod.api().delete_host("h2").is_err(), "its daemons run");
        pod.api().create_volume(&unused("h2/ssd0")).unwrap();
        let data = fill(&pod, &pod.api().volume("unused").unwrap());
        pod.api().drain_host("h2", true).unwrap();
        leaves_by_itself(&pod, "h2", &data);
        power_off(&mut pod, "h2");
        delete(&pod, "h2");
        answers(&vm);

        // An SSD is built in, and the one that is in use comes back with it.
        let before = fs::read_to_string(pod.config_path("h4")).unwrap();
        let mut with_more = before.clone();
        let image = pod.directory().join("h4-ssd1.img");
        write!(
            with_more,
            "\n[[ssd]]\nname = \"ssd1\"\ndriver = \"file\"\npath = \"{}\"\nsize = \"512M\"\n",
            image.display()
        )
        .unwrap();
        reconfigure(&mut pod, "h4", Role::BlkBackend, &with_more);
        wait_until_up(&pod, "h4", "ssd1");
        wait_until_up(&pod, "h4", "ssd0");

        // And one is taken out.
        move_volume(&pod, "h4/ssd0", "h3/ssd1");
        until("the place it left to be wiped", || {
            let ssd = pod.api().device("h4", "ssd0").unwrap();
            matches!(ssd.kind, DeviceKind::Ssd { used_bytes: 0, .. }).then_some(())
        });
        let ssd0 = before.find("\n[[ssd]]").unwrap();
        let without = with_more.replacen(&before[ssd0..], "", 1);
        assert!(without.contains("ssd1") && !without.contains("ssd0"), "{without}");
        reconfigure(&mut pod, "h4", Role::BlkBackend, &without);
        until("the SSD to be gone", || pod.api().device("h4", "ssd0").is_err().then_some(()));
        wait_until_up(&pod, "h4", "ssd1");
        answers(&vm);

        // So are NICs: one is built in, and the one that was there is taken out while it is in use.
        assert!(pod.api().device("h4", "nic1").is_err());
        let now = fs::read_to_string(pod.config_path("h4")).unwrap();
        let with_another = now.replacen(nic0, &format!("{nic0}{nic1}"), 1);
        reconfigure(&mut pod, "h4", Role::NetBackend, &with_another);
        wait_until_up(&pod, "h4", "nic1");
        wait_until_up(&pod, "h4", "nic0");
        use_nic(&pod, "h4/nic0");
        answers(&vm);
        reconfigure(&mut pod, "h4", Role::NetBackend, &now.replacen(nic0, nic1, 1));
        // It would be missed as where the guest belongs, until somebody says that it will not come back.
        until("the NIC to be gone", || pod.api().delete_device("h4", "nic0", false).ok());
        assert!(pod.api().device("h4", "nic0").is_err());
        wait_until_up(&pod, "h4", "nic1");
        answers(&vm);
        use_nic(&pod, "h4/nic1");
        answers(&vm);

        is_over.store(true, Ordering::Relaxed);
        assert!(jobs.join().unwrap() > 0);
    });
    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
}

/// Sets it when it is dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
