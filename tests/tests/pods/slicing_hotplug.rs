//! vCPUs that are plugged into a virtual machine, and out of it, while its vCPUs are held to a part of their time.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use guest_images::agent::Agent;
use guest_images::{Guest, Silent};
use vmm::slicing::{ControlFile, Kind, find_shim};
use vmm::{RunningVm, Vm, VmSpec};
use wadi_tests::bare_vm::bare_vm;
use wadi_tests::held_vcpus::has_quota;
use wadi_tests::monitor::{plug_vcpu, unplug_vcpu};

const LONG: Duration = Duration::from_mins(1);

fn machine(guest: &Guest, directory: &Path) -> VmSpec {
    VmSpec {
        cpus_max: Some(2),
        vcpu_shim: Some(find_shim().expect("cargo builds the shim with vmm")),
        ..bare_vm("grows", guest, directory)
    }
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LONG, "never: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn threads(running: &RunningVm) -> Vec<u32> {
    running.monitor.vcpus().unwrap().iter().map(|vcpu| vcpu.thread_id).collect()
}

/// Holds the vCPUs until it is killed.
fn slice(running: &RunningVm, actuator: Kind) -> Child {
    let program = Path::new(env!("CARGO_BIN_EXE_wadi-demo")).with_file_name("vmm");
    let mut command = Command::new(program);
    command.args(["slice", &running.name, "--share", "30", "--window", "10000"]);
    command.args(["--actuator", &actuator.to_string(), "--directory"]);
    command.arg(running.files[0].parent().unwrap()).stdout(Stdio::null()).spawn().unwrap()
}

/// Keeps both vCPUs busy, or as many as there are.
fn keep_busy(agent: &Agent) {
    for _ in 0..2 {
        // It ends with the guest.
        drop(agent.start("while :; do :; done", &[]).unwrap());
    }
}

fn use_second_vcpu(agent: &Agent) {
    wait_for("the guest to use the second vCPU", || {
        let online = agent.run("echo 1 > /sys/devices/system/cpu/cpu1/online", LONG);
        online.is_ok_and(|outcome| outcome.success())
    });
}

/// A vCPU comes and is held, and goes and is forgotten. `is_held` says of a thread whether it is held back.
fn comes_and_goes(vm: &Vm, agent: &Agent, actuator: Kind, is_held: impl Fn(u32) -> bool) {
    let running = vm.running().unwrap();
    let monitor = vm.spec().monitor_socket();
    let mut holder = slice(running, actuator);
    let [first] = threads(running)[..] else { panic!("it has one vCPU") };
    wait_for("the first vCPU to be held", || is_held(first));
    plug_vcpu(&monitor, "second").unwrap();
    use_second_vcpu(agent);
    let [_, second] = threads(running)[..] else { panic!("it has two vCPUs") };
    wait_for("the second vCPU to be held", || is_held(second));
    assert!(is_held(first), "the first one still is");

    wait_for("the guest to let go of the second vCPU", || {
        // Asked again and again: it may not have noticed yet that there is one. While it lets go, QEMU refuses to ask it.
        let _ = unplug_vcpu(&monitor, "second");
        thread::sleep(Duration::from_millis(300));
        threads(running).len() == 1
    });
    wait_for("the second vCPU to be forgotten", || !is_held(second));
    assert!(holder.try_wait().unwrap().is_none(), "the first one is still held");
    wait_for("the first vCPU to be held still", || is_held(first));
    holder.kill().unwrap();
    holder.wait().unwrap();
}

/// Boots a machine of its own for each actuator: QEMU 7.2 does not survive that its translator's vCPUs come a second time.
fn boot(directory: &Path) -> (Vm, Agent) {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let spec = machine(&guest, directory);
    let vm = Vm::start(spec.clone()).unwrap();
    let agent = Agent::connect(&spec.exec_socket(), LONG).unwrap();
    keep_busy(&agent);
    (vm, agent)
}

#[test]
fn the_shim_holds_vcpus_that_come_and_forgets_those_that_go() {
    let directory = tempfile::tempdir().unwrap();
    let (mut vm, agent) = boot(directory.path());
    let file = ControlFile::open(&vm.spec().vcpu_control()).unwrap();
    let sleeps = |thread: u32| {
        let all = file.usage().unwrap();
        all.iter().find(|it| it.thread == thread).map(|it| it.sleeps)
    };
    comes_and_goes(&vm, &agent, Kind::Shim, |thread| {
        let before = sleeps(thread);
        thread::sleep(Duration::from_millis(200));
        before.is_some() && sleeps(thread) > before
    });
    assert!(vm.stop().unwrap().success());
}

#[test]
fn the_kernels_quota_holds_vcpus_that_come_and_forgets_those_that_go() {
    if !has_quota() {
        eprintln!("not tried: no processor controller is mounted");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (mut vm, agent) = boot(directory.path());
    let running = vm.running().unwrap().clone();
    let group = |thread: u32| fs::read_to_string(format!("/proc/{thread}/cgroup")).unwrap_or_default();
    let home = group(threads(&running)[0]);
    comes_and_goes(&vm, &agent, Kind::Cgroup, |thread| group(thread).contains("wadi-grows-"));
    wait_for("the vCPU to be freed", || group(threads(&running)[0]) == home);
    assert!(vm.stop().unwrap().success());
}
