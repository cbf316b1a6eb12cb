//! The vCPU of an unmodified QEMU with KVM is held to a part of its time: it never leaves `KVM_RUN` by itself.

use std::thread;
use std::time::Duration;

use vmm::MonitorAddress;
use vmm::slicing::{Actuator as _, CgroupActuator, ControlFile, ShimActuator, VcpuUse, duty, find_shim};
use wadi_tests::counting_vm::CountingVm;
use wadi_tests::held_vcpus::{Span, assert_no_more_than, has_quota, hold};
use wadi_tests::storm::storm;
use wadi_tests::waiting::wait_for;

const SHARE: f64 = 0.3;

#[test]
fn a_vcpu_in_kvm_is_held_to_its_share() {
    let directory = tempfile::tempdir().unwrap();
    let shim = find_shim().expect("cargo builds the shim with vmm");
    let Some(vm) = CountingVm::start(directory.path(), Some(&shim)).unwrap() else { return };
    let counts_on = |from: u64| wait_for("the guest to count on", || vm.count().unwrap() > from + 100_000);
    let thread = vm.running().monitor.vcpus().unwrap()[0].thread_id;
    let mut shim = ShimActuator::new(vm.running()).unwrap();
    let reader = ControlFile::open(vm.vcpu_control().unwrap()).unwrap();
    let vcpu = || reader.usage().unwrap().remove(0);
    assert_eq!(vcpu(), VcpuUse { thread, ..VcpuUse::default() }, "nothing is armed without an order");

    for window in [Duration::from_millis(10), Duration::from_millis(1)] {
        let before = vcpu();
        hold(&mut shim, duty(SHARE, window), || {
            let span = Span::begin(|| reader.usage().unwrap());
            wait_for("windows", || vcpu().sleeps > before.sleeps + 100);
            span.assert_no_less_than(SHARE, 2 * window, &[vcpu()]);
            // Each sleep was one at the return from KVM_RUN, which the timer's signal ends: the vCPU is never elsewhere for long.
            let held = vcpu().since(&before);
            assert_no_more_than(SHARE, window, &[VcpuUse { carry_ns: 0, ..held }]);
            counts_on(vm.count().unwrap());
        });
        wait_for("the order to end", || {
            let elapsed = vcpu().elapsed;
            thread::sleep(Duration::from_millis(100));
            vcpu().elapsed == elapsed
        });
        counts_on(vm.count().unwrap());
    }

    // QEMU builds many long answers, and maps memory for the guest, while its vCPU is put to sleep at any moment.
    let MonitorAddress::Socket { path: monitor } = &vm.running().monitor else { panic!("it has a socket") };
    for share in [0.05, SHARE] {
        hold(&mut shim, duty(share, Duration::from_millis(1)), || {
            let came = storm(monitor, 200, || vcpu().sleeps).unwrap();
            eprintln!("at {share}: {came:?}");
            for _ in 0..3 {
                vmm::plug_memory(monitor, 128).unwrap();
            }
            storm(monitor, 200, || vcpu().sleeps).unwrap();
            // What it costs to come and go leaves it little of such windows.
            let before = vm.count().unwrap();
            wait_for("the guest to count on", || vm.count().unwrap() > before + 1000);
        });
    }

    if has_quota() {
        let mut cgroup = CgroupActuator::new(vm.running()).unwrap();
        cgroup.set(duty(SHARE, Duration::from_millis(10))).unwrap();
        let group = || std::fs::read_to_string(format!("/proc/{thread}/cgroup")).unwrap();
        assert!(group().contains("wadi-counting-"), "{}", group());
        counts_on(vm.count().unwrap());
        drop(cgroup);
        assert!(!group().contains("wadi-counting-"), "{}", group());
    } else {
        eprintln!("the kernel's quota is not tried: no processor controller is mounted");
    }
}
