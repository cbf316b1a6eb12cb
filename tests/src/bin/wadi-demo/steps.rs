//! The demo, step by step.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use guest_images::Guest;
use pod_api::Instance;
use wadi_tests::fio::{Job, Pattern};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{CLIENT_ADDRESS, GUEST_ADDRESS, Pod, PodBuilder, PodVm, VmShape};
use wadi_tests::probe::{Loss, Probe};

use crate::narrator::Narrator;
use crate::summary::{Summary, milliseconds};

const PATIENCE: Duration = Duration::from_mins(2);

/// Runs all of it, or with `only_up` what is needed to look around.
pub(crate) fn run(narrator: &mut Narrator, keep: bool, only_up: bool) -> Result<()> {
    let guest = narrator.step("test guest from Debian packages", |narrator| Ok(Guest::ensure(narrator)?))?;
    let pod = narrator
        .step("pod: h1 runs VMs; h2 has a NIC and an SSD; h3 the backup NIC and an SSD", |_| {
            PodBuilder::three_hosts().keep(keep).start()
        })?;
    let instance = narrator.step("instance on h1, through the controller's API", |narrator| {
        let instance = pod.create_instance("vm1", "h1", &[("vol0", 1 << 30, Some("h2/ssd0"))])?;
        let (nic, disk) = (&instance.nics[0], &instance.disks[0]);
        narrator.outcome(format!(
            "instance vm1 on h1 leases NIC {} (backup {}) and 1 GiB of SSD {}",
            nic.nic,
            nic.backup.as_deref().unwrap_or("none"),
            disk.ssd
        ));
        Ok(instance)
    })?;
    let mut vm = narrator.step("VM boots a stock Debian kernel", |narrator| {
        let mut vm = pod.boot(&instance, &guest, VmShape::default())?;
        let release = vm.exec("uname -r")?;
        let accelerator = vm.qemu().spec().accelerator;
        narrator.outcome(format!("VM runs a stock Debian kernel {} with {accelerator}", release.trim()));
        Ok(vm)
    })?;
    if only_up {
        return leave(pod, &instance, vm);
    }

    let random = narrator.step("disk: random 4 KiB with flushes, read back and checked", |_| {
        disk_job(Pattern::Random4K, 64, 64).run(&vm, PATIENCE)
    })?;
    let sequential = narrator.step("disk: sequential 128 KiB with flushes, read back and checked", |_| {
        disk_job(Pattern::Sequential128K, 512, 32).run(&vm, PATIENCE)
    })?;
    narrator.step("disk: mkfs, mount, write, unmount, fsck, compare", |_| filesystem(&vm))?;
    let round_trip = narrator.step("network: round trips from the client", |_| round_trip(&pod))?;
    let mut server = iperf::Server::start(&pod)?;
    let sent = narrator.step("network: TCP from the guest", |_| iperf::run(&vm, Way::Out, 4))?;
    let received = narrator.step("network: TCP to the guest", |_| iperf::run(&vm, Way::In, 4))?;
    let failover = narrator.step("pulling the cable of h2's NIC while traffic runs", |narrator| {
        let loss = pull_cable(&pod, &vm)?;
        narrator.outcome(format!(
            "cable of h2's NIC pulled under traffic: h3 took over, packets lost for {:.0} ms",
            milliseconds(loss.longest_gap)
        ));
        Ok(loss)
    })?;

    let summary = Summary {
        host: instance.host.clone(),
        nic: instance.nics[0].nic.clone(),
        backup: instance.nics[0].backup.clone().unwrap_or_default(),
        ssd: instance.disks[0].ssd.clone(),
        executed_by: vm.qemu().spec().accelerator.to_string(),
        random,
        sequential,
        round_trip,
        sent,
        received,
        failover,
    };
    println!("\n{}", summary.table());
    if keep {
        server.daemon().stop()?;
        drop(server);
        leave(pod, &instance, vm)?;
    } else {
        narrator.step("everything removed", |_| {
            vm.stop()?;
            drop((vm, server, pod));
            Ok(())
        })?;
    }
    println!("done in {:.0} s", narrator.elapsed().as_secs_f64());
    Ok(())
}

fn disk_job(pattern: Pattern, size_mib: u32, flush_every: u32) -> Job {
    Job { disk: "vda".to_owned(), offset_mib: 0, size_mib, pattern, flush_every }
}

fn filesystem(vm: &PodVm) -> Result<()> {
    for command in [
        "mkfs.ext4 -q -F /dev/vda",
        "mkdir -p /mnt && mount /dev/vda /mnt",
        "cd /mnt && for i in $(seq 50); do head -c 400000 /dev/urandom > file-$i; done && sha256sum file-* > /tmp/sums",
        "umount /mnt",
        "fsck.ext4 -f -n /dev/vda",
        "echo 3 > /proc/sys/vm/drop_caches && mount -o ro /dev/vda /mnt && cd /mnt && sha256sum -c -s /tmp/sums",
        "umount /mnt",
    ] {
        vm.exec_within(command, PATIENCE)?;
    }
    Ok(())
}

fn round_trip(pod: &Pod) -> Result<Duration> {
    let probe = Probe::start(pod.client_namespace(), GUEST_ADDRESS)?;
    thread::sleep(Duration::from_secs(2));
    let loss = probe.finish()?;
    if loss.lost > 0 {
        bail!("{} of {} echo requests were lost without a reason", loss.lost, loss.sent);
    }
    Ok(loss.median_round_trip)
}

/// iperf3 runs in the guest, echo requests come from the client, and the cable goes.
fn pull_cable(pod: &Pod, vm: &PodVm) -> Result<Loss> {
    let stream = vm.start(&iperf::command(Way::Out, 6))?;
    let probe = Probe::start(pod.client_namespace(), GUEST_ADDRESS)?;
    thread::sleep(Duration::from_secs(2));
    pod.pull_cable("h2", "nic0")?;
    let pulled = Instant::now();
    loop {
        let nic = pod.api().instance("vm1")?.nics[0].nic.clone();
        if nic == "h3/nic1" {
            break;
        }
        if pulled.elapsed() > Duration::from_secs(10) {
            bail!("the instance still uses {nic}");
        }
        thread::sleep(Duration::from_millis(10));
    }
    thread::sleep(Duration::from_secs(2));
    let loss = probe.finish()?;
    iperf::Report::parse(&stream.finish(PATIENCE)?)?;
    vm.exec(&format!("ping -c 3 -i 0.1 -q {CLIENT_ADDRESS}"))?;
    Ok(loss)
}

fn leave(pod: Pod, instance: &Instance, mut vm: PodVm) -> Result<()> {
    let text = how_to_look_around(&pod, instance, &mut vm);
    pod.leave(vm)?;
    println!("{text}");
    Ok(())
}

fn how_to_look_around(pod: &Pod, instance: &Instance, vm: &mut PodVm) -> String {
    let podctl = pod.binary("podctl").display().to_string();
    let demo = pod.binary("wadi-demo").display().to_string();
    let controller = pod.directory().join("run/controller.sock").display().to_string();
    let console = vm.qemu().spec().console_socket().display().to_string();
    let client = pod.client_namespace().name();
    let network = instance.nics[0].device.clone();
    format!(
        "The pod stays up. Look around:
  export WADI_CONTROLLER=unix:{controller}
  {podctl} instances list   # also: hosts, devices, volumes list; events; pool
  curl -s --unix-socket {controller} http://pod/metrics
  ip netns exec {client} ping {GUEST_ADDRESS}
  ip netns                  # every host is one, -tor is the switch
  {vmm} console {console}   # a shell in the guest, Ctrl-] leaves it
  {vmm} qemu-args --instance {name} --kernel KERNEL     # how {name} with {network} is started
  ls {directory}/log        # what the daemons said
Remove it:
  {demo} --remove
",
        vmm = pod.binary("vmm").display(),
        name = instance.name,
        directory = pod.directory().display(),
    )
}
