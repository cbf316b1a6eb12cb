//! Power failures under a guest with file systems on another host's SSD, whose write cache is lost with the power: each file
//! that the guest was told to be on the disk is there afterwards, and the file systems are whole.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, Instance};
use wadi_tests::files::{FileSystem, Files};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::stage::rounds;

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(2);
/// Less is too small for XFS.
const SIZE_BYTES: u64 = 320 << 20;
const SHAPE: VmShape = VmShape { memory_mib: 512, cpus: 2 };

/// What fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Power {
    /// That of the SSD's host and that of the guest's.
    Both,
    /// That of the SSD's host. The guest finds out, is killed, and starts again.
    Drive,
}

/// A guest with its file systems, of which each has a disk.
struct Site {
    pod: Pod,
    guest: Guest,
    instance: Instance,
    disks: Vec<(Files, FileSystem, String)>,
    /// How often a file system was told of a loss.
    told: usize,
    options: &'static str,
}

impl Site {
    fn new(seed: u64, systems: &[FileSystem], options: &'static str) -> Result<Self> {
        let guest = Guest::ensure(&mut Silent)?;
        let pod = PodBuilder::new()
            .host(HostPlan::new("h1").vms())
            .host(HostPlan::new("h2").volatile_ssd("ssd0", "1G", seed))
            .start()?;
        let names: Vec<String> = (0..systems.len()).map(|index| format!("vol{index}")).collect();
        for name in &names {
            pod.api().create_volume(&pod_api::CreateVolume::new(
                name.clone(),
                pod_api::ByteSize::new(SIZE_BYTES),
            ))?;
        }
        let instance = pod.create_instance_as(&CreateInstance {
            name: "vm1".to_owned(),
            host: "h1".to_owned(),
            nics: Vec::new(),
            volumes: names,
            ..CreateInstance::default()
        })?;
        let disk =
            |(system, letter): (&FileSystem, char)| (Files::on(*system), *system, format!("vd{letter}"));
        let disks = systems.iter().zip('a'..).map(disk).collect();
        Ok(Self { pod, guest, instance, disks, told: 0, options })
    }

    fn first_boot(&self) -> Result<PodVm> {
        let vm = self.pod.boot(&self.instance, &self.guest, SHAPE)?;
        for (_, system, disk) in &self.disks {
            system.make(&vm, disk)?;
            system.mount(&vm, disk, self.options)?;
        }
        // An honest drive keeps that; a test of what happens without flushes begins with something.
        vm.exec("sync; for disk in /sys/block/vd*; do blockdev --flushbufs /dev/${disk##*/}; done")?;
        Ok(vm)
    }

    /// Has the guest write for a while, and takes the power away.
    fn fail(&mut self, mut vm: PodVm, round: u32, power: Power) -> Result<()> {
        for (files, ..) in &self.disks {
            files.start(&vm, &format!("r{round}"))?;
        }
        self.wait_for_files(&mut vm, 10)?;
        // Anywhere between two flushes.
        thread::sleep(Duration::from_millis(u64::from(round) * 17 % 100));
        self.pod.daemon("h2", Role::BlkBackend)?.kill()?;
        if power == Power::Drive {
            self.pod.start_daemon("h2", Role::BlkBackend)?;
            self.pod.wait_until_joined()?;
            self.wait_for_failures(&vm)?;
        }
        let console = vm.qemu().spec().console_log();
        // It is killed.
        drop(vm);
        if power == Power::Both {
            self.pod.daemon("h1", Role::BlkFrontend)?.kill()?;
            for (host, role) in [("h2", Role::BlkBackend), ("h1", Role::BlkFrontend)] {
                self.pod.start_daemon(host, role)?;
            }
            self.pod.wait_until_joined()?;
        }
        let said = String::from_utf8_lossy(&std::fs::read(console)?).into_owned();
        for (files, ..) in &mut self.disks {
            files.hear(&said);
        }
        Ok(())
    }

    /// Waits until the guest has written so many files more, on each file system.
    fn wait_for_files(&mut self, vm: &mut PodVm, more: usize) -> Result<()> {
        let wanted: Vec<usize> = self.disks.iter().map(|(files, ..)| files.count() + more).collect();
        let began = Instant::now();
        loop {
            let said = std::fs::read(vm.qemu().spec().console_log())?;
            let mut enough = true;
            for ((files, ..), wanted) in self.disks.iter_mut().zip(&wanted) {
                files.hear(&String::from_utf8_lossy(&said));
                enough &= files.count() >= *wanted;
            }
            if enough {
                return Ok(());
            }
            ensure!(began.elapsed() < PATIENCE, "the guest writes no files");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the guest cannot write any more. A drive that had lost nothing of a disk lets it go on.
    fn wait_for_failures(&mut self, vm: &PodVm) -> Result<()> {
        let began = Instant::now();
        loop {
            let mut failed = 0;
            for (files, ..) in &self.disks {
                failed += usize::from(files.has_failed(vm)?);
            }
            if failed == self.disks.len() || began.elapsed() > Duration::from_secs(3) {
                self.told += failed;
                return Ok(());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Starts the guest again and looks at everything.
    fn recover(&self) -> Result<PodVm> {
        self.wait_until_ready()?;
        let vm = self.pod.boot(&self.instance, &self.guest, SHAPE)?;
        for (files, system, disk) in &self.disks {
            system.mount(&vm, disk, self.options)?;
            files.check_all(&vm, disk)?;
            system.mount(&vm, disk, self.options)?;
        }
        Ok(vm)
    }

    fn wait_until_ready(&self) -> Result<()> {
        let began = Instant::now();
        loop {
            let instance = self.pod.api().instance("vm1")?;
            if instance.ready {
                return Ok(());
            }
            ensure!(began.elapsed() < PATIENCE, "vm1 waits for {:?}", instance.waiting_for);
            thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn what_a_guest_was_promised_outlives_power_failures() {
    let mut site = Site::new(7, &[FileSystem::Ext4, FileSystem::Xfs], "rw").unwrap();
    let mut vm = site.first_boot().unwrap();
    for round in 0..4 * rounds() {
        let power = if round % 2 == 0 { Power::Both } else { Power::Drive };
        site.fail(vm, round, power).unwrap();
        vm = site.recover().with_context(|| format!("round {round}, {power:?}")).unwrap();
    }
    let counts: Vec<usize> = site.disks.iter().map(|(files, ..)| files.count()).collect();
    eprintln!("{counts:?} files; {} times a file system was told of a loss", site.told);
}

/// The test can fail: a file system that flushes nothing loses what it promised.
#[test]
fn a_file_system_that_does_not_flush_is_caught() {
    let mut site = Site::new(7, &[FileSystem::Ext4], "rw,barrier=0").unwrap();
    let mut vm = site.first_boot().unwrap();
    for round in 0..4 {
        site.fail(vm, round, Power::Both).unwrap();
        match site.recover() {
            Ok(recovered) => vm = recovered,
            Err(error) => {
                eprintln!("round {round}: {error:#}");
                return;
            }
        }
    }
    panic!("every file was there, although nothing was flushed");
}
