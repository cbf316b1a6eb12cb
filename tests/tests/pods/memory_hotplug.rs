//! Memory is plugged into a virtual machine that works, packets and blocks come from there and go there, and it is unplugged again.

use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use vmm::VmSpec;
use wadi_tests::fio::{Job, Pattern};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{CLIENT_ADDRESS, GUEST_ADDRESS, Pod, PodBuilder, PodVm, Role, VmShape};

const SHAPE: VmShape = VmShape { memory_mib: 192, cpus: 2 };
const PLUGGED_MIB: u32 = 256;
/// What it lets go of again.
const MOVABLE_MIB: u32 = 128;
const DEADLINE: Duration = Duration::from_mins(1);

fn memory_mib(vm: &PodVm) -> u64 {
    let kib = vm.exec("awk '/MemTotal/ { print $2 }' /proc/meminfo").unwrap();
    kib.trim().parse::<u64>().unwrap() / 1024
}

/// The guest uses memory once it is told to: `online`, for anything, or `online_movable`, for what it can empty again.
fn use_plugged_memory(vm: &PodVm, how: &str, at_least_mib: u64) {
    let began = Instant::now();
    while memory_mib(vm) < at_least_mib {
        vm.exec(&format!(
            "for state in /sys/devices/system/memory/memory*/state; do \
               if grep -q offline $state; then echo {how} > $state; fi; done",
        ))
        .unwrap();
        assert!(began.elapsed() < DEADLINE, "the guest has {} MiB only", memory_mib(vm));
        thread::sleep(Duration::from_millis(50));
    }
}

fn write_and_verify(vm: &PodVm, size_mib: u32) {
    Job { disk: "vda".into(), offset_mib: 0, size_mib, pattern: Pattern::Random4K, flush_every: 64 }
        .run(vm, Duration::from_mins(2))
        .unwrap();
}

fn works(pod: &Pod, vm: &PodVm) {
    let said = vm.exec(&format!("ping -c 10 -i 0.05 -q {CLIENT_ADDRESS}")).unwrap();
    assert!(said.contains("10 packets received"), "{said}");
    for way in [Way::Out, Way::In] {
        iperf::run(vm, way, 1).unwrap();
    }
    write_and_verify(vm, 8);
    let page = pod.api().metrics().unwrap();
    let bad = page.lines().filter(|line| line.contains("lease_drops") && line.contains("bad-chain"));
    for line in bad {
        assert!(line.ends_with(" 0"), "{line}");
    }
}

#[test]
fn memory_is_plugged_in_and_unplugged_under_traffic() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[("vol0", 1 << 26, Some("h2/ssd0"))]).unwrap();
    let spec = VmSpec { memory_max_mib: Some(1024), ..pod.machine(&instance, &guest, SHAPE) };
    let monitor = spec.monitor_socket();
    let vm = pod.begin_machine(&instance, spec).unwrap().arrived().unwrap();
    vm.exec(&format!("ip address add {GUEST_ADDRESS}/24 dev eth0 && ip link set eth0 up")).unwrap();
    let server = iperf::Server::start(&pod).unwrap();
    let before = memory_mib(&vm);

    let stream = iperf::Stream::begin(&vm, Way::Out, 4).unwrap();
    for times in 1..=2 {
        vmm::plug_memory(&monitor, PLUGGED_MIB).unwrap();
        // Some of it describes the rest.
        use_plugged_memory(&vm, "online", before + u64::from(times * PLUGGED_MIB) * 9 / 10);
    }
    stream.finish().unwrap();
    // More is in use than there was at first: buffers are where there is room.
    vm.exec(
        "mkdir -p /fill && mount -t tmpfs -o size=100% tmpfs /fill && head -c 314572800 /dev/zero > /fill/it",
    )
    .unwrap();
    works(&pod, &vm);

    // A frontend that starts anew is told of all of it.
    for role in [Role::NetFrontend, Role::BlkFrontend] {
        pod.daemon("h1", role).unwrap().kill().unwrap();
        pod.start_daemon("h1", role).unwrap();
    }
    pod.wait_until_joined().unwrap();
    works(&pod, &vm);

    // What the guest can empty is taken from it again while disks and packets go there.
    vm.exec("umount /fill").unwrap();
    let before = memory_mib(&vm);
    for _ in 0..2 {
        vmm::plug_memory(&monitor, MOVABLE_MIB).unwrap();
        use_plugged_memory(&vm, "online_movable", before + u64::from(MOVABLE_MIB) * 9 / 10);
        thread::scope(|scope| {
            let disk = scope.spawn(|| write_and_verify(&vm, 24));
            let stream = iperf::Stream::begin(&vm, Way::Out, 4).unwrap();
            assert_eq!(vmm::unplug_memory(&monitor, DEADLINE).unwrap(), u64::from(MOVABLE_MIB));
            stream.finish().unwrap();
            disk.join().unwrap();
        });
        assert_eq!(memory_mib(&vm), before);
        works(&pod, &vm);
    }

    // There is no room for more than the machine was started with.
    let error = vmm::plug_memory(&monitor, 1024).unwrap_err().to_string();
    assert!(error.contains("space"), "{error}");
    let said = vm.exec(&format!("ping -c 3 -i 0.05 -q {CLIENT_ADDRESS}")).unwrap();
    assert!(said.contains("3 packets received"), "{said}");
    drop(server);
}
