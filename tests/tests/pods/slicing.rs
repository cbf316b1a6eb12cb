//! The vCPUs of a virtual machine that works are held to a part of their time.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use guest_images::agent::Agent;
use guest_images::{Guest, Silent};
use vmm::slicing::{
    self, Actuator as _, CgroupActuator, ControlFile, Share, ShimActuator, VcpuUse, duty, find_shim,
};
use vmm::{RunningVm, Vm, VmSpec};
use wadi_tests::bare_vm::bare_vm;
use wadi_tests::held_vcpus::{Span, assert_no_more_than, has_quota, hold};
use wadi_tests::storm::storm;
use wadi_tests::waiting::wait_for;

const LONG: Duration = Duration::from_mins(1);
const WINDOW: Duration = Duration::from_millis(10);
const SHARE: f64 = 0.3;

fn machine(guest: &Guest, directory: &Path) -> VmSpec {
    VmSpec {
        memory_max_mib: Some(1024),
        cpus: 2,
        vcpu_shim: Some(find_shim().expect("cargo builds the shim with vmm")),
        ..bare_vm("sliced", guest, directory)
    }
}

/// Gives a vCPU a group of its own, as libvirt does, where the processor controller is on the first version of cgroups.
fn own_group(pid: u32, thread: u32) -> Option<PathBuf> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let fields = |line: &str| line.splitn(3, ':').map(str::to_owned).collect::<Vec<_>>();
    let group = groups.lines().map(fields).find(|it| it[1].split(',').any(|name| name == "cpu"))?;
    let home = Path::new("/sys/fs/cgroup/cpu").join(group[2].trim_start_matches('/'));
    let own = home.join(format!("own-{pid}"));
    std::fs::create_dir(&own).unwrap();
    // With a limit, which its domain was given: half of the time.
    std::fs::write(own.join("cpu.cfs_period_us"), "100000").unwrap();
    std::fs::write(own.join("cpu.cfs_quota_us"), "50000").unwrap();
    std::fs::write(own.join("tasks"), thread.to_string()).unwrap();
    Some(own)
}

/// The kernel's quota holds the same machine.
fn quota_holds_it_and_lets_it_go(running: &RunningVm, pid: u32, threads: &[u32], agent: &Agent) {
    let group = |thread: u32| std::fs::read_to_string(format!("/proc/{thread}/cgroup")).unwrap();
    let home = group(threads[0]);
    let own = own_group(pid, threads[1]);
    let homes: Vec<String> = threads.iter().map(|thread| group(*thread)).collect();
    let without_shim = RunningVm { vcpu_control: None, ..running.clone() };
    let choice = slicing::choose(&without_shim, None, Share::Percent(25.0)).unwrap();
    assert!(choice.actuator.name().starts_with("cgroup "), "{}", choice.reason);
    assert!(choice.reason.contains("started without the shim"), "{}", choice.reason);
    drop(choice);
    let mut cgroup = CgroupActuator::new(running).unwrap();
    assert_eq!(cgroup.set(duty(0.75, WINDOW)).unwrap(), WINDOW, "a group that is held to less stays so");
    assert_eq!(cgroup.set(duty(0.25, WINDOW)).unwrap(), WINDOW);
    assert!(threads.iter().all(|thread| group(*thread).contains("wadi-sliced-")), "{}", group(threads[0]));
    assert_eq!(group(pid), home, "no other thread is held");
    assert_eq!(agent.run("echo works", LONG).unwrap().text(), "works\n");
    assert_eq!(cgroup.usage().unwrap().len(), 2);
    drop(cgroup);
    assert_eq!(
        threads.iter().map(|thread| group(*thread)).collect::<Vec<_>>(),
        homes,
        "each is where it was"
    );
    if let Some(own) = own {
        std::fs::write(own.with_file_name("tasks"), threads[1].to_string()).unwrap();
        std::fs::remove_dir(own).unwrap();
    }

    // So it does when who asked for it is killed.
    let directory = running.files[0].parent().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_wadi-demo")).with_file_name("vmm");
    let mut command = Command::new(program);
    command.args(["slice", &running.name, "--share", "5", "--window", "10000", "--actuator", "cgroup"]);
    let mut agent = command.arg("--directory").arg(directory).stdout(Stdio::null()).spawn().unwrap();
    let held = |thread: &u32| group(*thread).contains("wadi-sliced-");
    wait_for("the vCPUs to be held", || threads.iter().all(held));
    agent.kill().unwrap();
    agent.wait().unwrap();
    wait_for("the vCPUs to be freed", || threads.iter().all(|thread| group(*thread) == home));
}

/// QEMU's main thread builds many long answers at once, and plugs memory in, while vCPUs that use devices and are translated anew all the time are put
/// to sleep at any moment: were one to sleep with a lock of the allocator or QEMU's own, this would not come to an end.
fn nothing_is_held_in_a_storm(
    shim: &mut ShimActuator,
    share: f64,
    spec: &VmSpec,
    reader: &ControlFile,
    agent: &Agent,
) {
    const SLEEPS: u64 = 500;
    const PLUGGED: usize = 2;
    let monitor = spec.monitor_socket();
    let blocks = || {
        let counted = agent.run("ls -d /sys/devices/system/memory/memory[0-9]* | wc -l", LONG).unwrap();
        counted.text().trim().parse::<usize>().unwrap()
    };
    let before = blocks();
    let busy = agent
        .start("while :; do echo storm > /dev/ttyS0; cat /proc/interrupts > /dev/null; done", &[])
        .unwrap();
    let said_by_guest = || std::fs::read(spec.console_log()).unwrap();
    let slept = || reader.usage().unwrap().iter().map(|vcpu| vcpu.sleeps).min().unwrap();
    hold(shim, duty(share, Duration::from_millis(1)), || {
        for _ in 0..PLUGGED {
            let came = storm(&monitor, SLEEPS, slept).unwrap();
            eprintln!("at {share}: {came:?}");
            vmm::plug_memory(&monitor, 128).unwrap();
            storm(&monitor, SLEEPS, slept).unwrap();
        }
    });
    // With a twentieth of its time an emulated guest has little left beyond its own ticks: what it does is looked at when it runs freely.
    let said = said_by_guest();
    wait_for("the guest to go on", || said_by_guest() != said);
    assert!(busy.outcome().is_none(), "it has ended");
    agent.signal(&busy, "KILL").unwrap();
    busy.wait(LONG).unwrap();
    // It has taken note of all that was plugged in meanwhile.
    wait_for("the guest to see the memory", || blocks() == before + PLUGGED);
}

#[test]
fn vcpus_are_held_to_their_share_and_nothing_else_notices() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let spec = machine(&guest, directory.path());
    let mut vm = Vm::start(spec.clone()).unwrap();
    let agent = Agent::connect(&spec.exec_socket(), LONG).unwrap();
    let running = vm.running().unwrap().clone();
    let choice = slicing::choose(&running, None, Share::Percent(30.0)).unwrap();
    assert_eq!((choice.actuator.name(), &*choice.reason), ("shim", "QEMU was started with the shim"));
    drop(choice);
    let mut shim = ShimActuator::new(&running).unwrap();

    let threads: Vec<u32> = running.monitor.vcpus().unwrap().iter().map(|vcpu| vcpu.thread_id).collect();
    let known: Vec<u32> = shim.usage().unwrap().iter().map(|vcpu| vcpu.thread).collect();
    assert_eq!(known, threads, "each vCPU is known, and no other thread");
    let at_rest = |vcpu: &VcpuUse| VcpuUse { thread: vcpu.thread, ..VcpuUse::default() } == *vcpu;
    assert!(shim.usage().unwrap().iter().all(at_rest), "nothing is armed without an order");

    let busy: Vec<_> = (0..2).map(|_| agent.start("while :; do :; done", &[]).unwrap()).collect();
    let order = duty(SHARE, WINDOW);
    let reader = ControlFile::open(&spec.vcpu_control()).unwrap();
    hold(&mut shim, order, || {
        wait_for("both vCPUs to be put to sleep", || {
            reader.usage().unwrap().iter().all(|vcpu| vcpu.sleeps > 20)
        });
        vmm::plug_memory(&spec.monitor_socket(), 128).unwrap();
        assert_eq!(agent.run("echo works", LONG).unwrap().text(), "works\n");
        let sleeps = |vcpus: Vec<VcpuUse>| vcpus.iter().map(|vcpu| vcpu.sleeps).min().unwrap();
        let span = Span::begin(|| reader.usage().unwrap());
        let before = sleeps(reader.usage().unwrap());
        wait_for("more windows", || sleeps(reader.usage().unwrap()) > before + 50);
        // One that waits for the other, as translated ones do now and then, neither runs nor waits for a processor.
        span.assert_no_less_than(SHARE / 2.0, 2 * WINDOW, &reader.usage().unwrap());
        assert_no_more_than(SHARE, WINDOW, &reader.usage().unwrap());
    });

    for share in [0.05, SHARE] {
        nothing_is_held_in_a_storm(&mut shim, share, &spec, &reader, &agent);
    }

    // Nobody renews the order any more, as after the death of an agent: the vCPUs run freely.
    let elapsed = || reader.usage().unwrap().iter().map(|vcpu| vcpu.elapsed).sum::<Duration>();
    let mut before = elapsed();
    wait_for("the order to end by itself", || {
        thread::sleep(Duration::from_millis(100));
        std::mem::replace(&mut before, elapsed()) == before
    });
    // Idle ones are not put to sleep at all.
    for job in busy {
        agent.signal(&job, "KILL").unwrap();
        job.wait(LONG).unwrap();
    }

    if has_quota() {
        quota_holds_it_and_lets_it_go(&running, vm.pid(), &threads, &agent);
    } else {
        eprintln!("the kernel's quota is not tried: no processor controller is mounted");
    }
    assert!(vm.stop().unwrap().success());
    assert!(!spec.vcpu_control().exists());
}
