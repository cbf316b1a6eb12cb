//! The vCPUs of a virtual machine that works are held to a part of their time.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_images::agent::Agent;
use guest_images::{Guest, Silent};
use vmm::slicing::{Actuator as _, CgroupActuator, Duty, ShimActuator, VcpuUse, duty, find_shim};
use vmm::{RunningVm, Vm, VmSpec};
use wadi_tests::bare_vm::bare_vm;

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

/// Waits until `done`, and says for what it waited if that takes too long.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Renews an order until it is dropped.
fn hold<T>(shim: &mut ShimActuator, duty: Duty, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let renewing = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                shim.set(duty).unwrap();
                thread::sleep(Duration::from_millis(100));
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        over.store(true, Ordering::Release);
        renewing.join().unwrap();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// No vCPU ran for more than its share, what one window may carry, and what was forgiven, however late timers and wake-ups were; and
/// each sleep was as long as the rest of a window.
fn assert_no_more_than_the_share(vcpus: &[VcpuUse]) {
    for vcpu in vcpus {
        let most = vcpu.elapsed.mul_f64(SHARE) + 2 * WINDOW + vcpu.forgiven;
        assert!(vcpu.ran <= most, "{vcpu:?}");
        assert!(vcpu.slept <= vcpu.elapsed, "{vcpu:?}");
        let sleeps = u32::try_from(vcpu.sleeps).unwrap();
        assert!(vcpu.slept >= WINDOW.mul_f64(0.99 * (1.0 - SHARE)) * sleeps, "{vcpu:?}");
        let window = i64::try_from(WINDOW.as_nanos()).unwrap();
        assert!((-window..=window).contains(&vcpu.carry_ns), "{vcpu:?}");
    }
}

/// The kernel's quota holds the same machine.
fn quota_holds_it_and_lets_it_go(running: &RunningVm, pid: u32, threads: &[u32], agent: &Agent) {
    let mut cgroup = CgroupActuator::new(running).unwrap();
    let group = |thread: u32| std::fs::read_to_string(format!("/proc/{thread}/cgroup")).unwrap();
    let home = group(threads[0]);
    assert_eq!(cgroup.set(duty(0.25, WINDOW)).unwrap(), WINDOW);
    assert!(threads.iter().all(|thread| group(*thread).contains("wadi-sliced-")), "{}", group(threads[0]));
    assert_eq!(group(pid), home, "no other thread is held");
    assert_eq!(agent.run("echo works", LONG).unwrap().text(), "works\n");
    assert_eq!(cgroup.usage().unwrap().len(), 2);
    drop(cgroup);
    assert!(threads.iter().all(|thread| group(*thread) == home));

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

#[test]
fn vcpus_are_held_to_their_share_and_nothing_else_notices() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let spec = machine(&guest, directory.path());
    let mut vm = Vm::start(spec.clone()).unwrap();
    let agent = Agent::connect(&spec.exec_socket(), LONG).unwrap();
    let running = vm.running().unwrap().clone();
    let mut shim = ShimActuator::new(&running).unwrap();

    let threads: Vec<u32> = running.monitor.vcpus().unwrap().iter().map(|vcpu| vcpu.thread_id).collect();
    let known: Vec<u32> = shim.usage().unwrap().iter().map(|vcpu| vcpu.thread).collect();
    assert_eq!(known, threads, "each vCPU is known, and no other thread");
    let at_rest = |vcpu: &VcpuUse| VcpuUse { thread: vcpu.thread, ..VcpuUse::default() } == *vcpu;
    assert!(shim.usage().unwrap().iter().all(at_rest), "nothing is armed without an order");

    let busy: Vec<_> = (0..2).map(|_| agent.start("while :; do :; done", &[]).unwrap()).collect();
    let order = duty(SHARE, WINDOW);
    let reader = vmm::slicing::ControlFile::open(&spec.vcpu_control()).unwrap();
    hold(&mut shim, order, || {
        wait_for("both vCPUs to be put to sleep", || {
            reader.usage().unwrap().iter().all(|vcpu| vcpu.sleeps > 20)
        });
        // QEMU's main thread builds long answers, and plugs memory in, while vCPUs are put to sleep at any moment: were one to hold
        // a lock of the allocator or QEMU's own, this would not come to an end.
        for _ in 0..15 {
            vmm::describe_monitor(&spec.monitor_socket()).unwrap();
        }
        vmm::plug_memory(&spec.monitor_socket(), 128).unwrap();
        assert_eq!(agent.run("echo works", LONG).unwrap().text(), "works\n");
        let sleeps = |vcpus: Vec<VcpuUse>| vcpus.iter().map(|vcpu| vcpu.sleeps).min().unwrap();
        let before = sleeps(reader.usage().unwrap());
        wait_for("more windows", || sleeps(reader.usage().unwrap()) > before + 50);
        assert_no_more_than_the_share(&reader.usage().unwrap());
    });

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

    if std::fs::read_to_string("/proc/self/mounts").unwrap().contains(" cgroup") {
        quota_holds_it_and_lets_it_go(&running, vm.pid(), &threads, &agent);
    } else {
        eprintln!("no cgroup file system is mounted: the kernel's quota is not tried");
    }
    assert!(vm.stop().unwrap().success());
    assert!(!spec.vcpu_control().exists());
}
