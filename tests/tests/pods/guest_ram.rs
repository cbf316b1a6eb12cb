//! A guest whose RAM lies in the pool: what it sends and stores is not copied, and is right, whatever dies meanwhile.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, Fabric, MchannelSpec, NicRequest, RegionState};
use vmm::slicing::GuestRam;
use vmm::{Registry, VmSpec};
use wadi_tests::fair_vcpus::HUNGRY;
use wadi_tests::fake_resctrl::{BYTES_PER_SECOND, FakeResctrl};
use wadi_tests::fio::{self, Job, Pattern};
use wadi_tests::iperf::{self, Way};
use wadi_tests::newer_qemu;
use wadi_tests::pod::{GUEST_ADDRESS, Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::process::Daemon;

const RAM_BYTES: u64 = 256 << 20;
const DEADLINE: Duration = Duration::from_mins(1);
const PATIENCE: Duration = Duration::from_mins(2);

/// What an endpoint of h1 has not copied so far.
fn not_copied(pod: &Pod, endpoint: &str, what: &str) -> u64 {
    let page = pod.api().metrics().unwrap();
    let (endpoint, what) = (format!("endpoint=\"h1/{endpoint}\""), format!("name=\"zero-copy-{what}\""));
    let line = page.lines().find(|line| line.contains(&endpoint) && line.contains(&what));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < DEADLINE, "{what}: not so after {DEADLINE:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn job(offset_mib: u32, pattern: Pattern) -> Job {
    Job { disk: "vda".into(), offset_mib, size_mib: 32, pattern, flush_every: 64 }
}

/// Packets and blocks pass, and more of both than before was not copied.
fn works_without_copies(pod: &Pod, vm: &PodVm) {
    let (packets, requests) =
        (not_copied(pod, "net-frontend", "packets"), not_copied(pod, "blk-frontend", "requests"));
    iperf::run(vm, Way::Out, 1).unwrap();
    iperf::run(vm, Way::In, 1).unwrap();
    job(0, Pattern::Sequential128K).run(vm, PATIENCE).unwrap();
    wait_until("packets are not copied", || not_copied(pod, "net-frontend", "packets") > packets + 100);
    wait_until("requests are not copied", || not_copied(pod, "blk-frontend", "requests") > requests + 100);
}

fn state_of_ram(pod: &Pod) -> Option<RegionState> {
    let pool = pod.api().pool().unwrap();
    pool.regions.into_iter().find(|region| region.purpose == "ram").map(|region| region.state)
}

/// What they load and store is counted, and held back, as the manual says: by `vmm slice vm1 --share fair` alone.
fn its_vcpus_have_a_share(pod: &Pod, vm: &PodVm) {
    // Less than one vCPU moves.
    let elements = [("pool".to_owned(), BYTES_PER_SECOND / 4)].into();
    let fabric = Fabric { window_us: 10_000, sample_us: 400_000, elements, ..Fabric::default() };
    pod.api().set_fabric(&fabric).unwrap();
    let spec = MchannelSpec { weight: 1, tenant: "default".to_owned(), path: vec!["pool".to_owned()] };
    pod.api().set_mchannel("vm1", &spec).unwrap();
    let shown = || pod.api().mchannel("vm1").unwrap();
    wait_until("nobody counts its vCPUs, and that is said", || shown().vcpus_uncounted);

    let counts = FakeResctrl::start(pod, ["vm1"]).unwrap();
    let mut command = Command::new(pod.binary("vmm"));
    command.args(["slice", "vm1", "--share", "fair", "--wait"]).arg("--resctrl").arg(counts.path());
    command.arg("--config").arg(pod.config_path("h1")).arg("--directory").arg(pod.directory().join("vm"));
    let log = pod.directory().join("log/vm1-slice.log");
    let mut agent = Daemon::start("vmm slice", command, &log).unwrap();
    wait_until("its vCPUs are counted", || shown().vcpus.is_some_and(|it| it.bytes > 0));
    assert!(!shown().vcpus_uncounted);
    let hungry = vm.start(HUNGRY).unwrap();
    wait_until("they are held back", || shown().vcpus.is_some_and(|it| it.slept_ms > 0));
    hungry.signal("KILL").unwrap();
    agent.check().unwrap();
    assert!(agent.stop().unwrap().success(), "{}", agent.said());
    pod.api().clear_mchannel("vm1").unwrap();
}

#[test]
fn guest_in_the_pool_is_served_without_copies_and_loses_nothing() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let qemu = newer_qemu::with_offset().unwrap();
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    pod.api()
        .create_volume(
            &serde_json::from_value(
                serde_json::json!({"name": "vol0", "size": 1 << 27, "device": "h2/ssd0"}),
            )
            .unwrap(),
        )
        .unwrap();
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest::default()],
        volumes: vec!["vol0".to_owned()],
        ram_bytes: Some(RAM_BYTES),
        ..CreateInstance::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    let ram = instance.ram.clone().unwrap();
    assert_eq!((ram.size_bytes, Path::new(&ram.pool)), (RAM_BYTES, pod.pool_path().as_path()));

    let spec = pod.machine(&instance, &guest, VmShape::default());
    assert_eq!(spec.memory_mib, 256, "memory follows from the instance");
    if qemu != Path::new(vmm::QEMU) {
        let refused = pod.begin_machine(&instance, spec.clone()).unwrap_err();
        assert!(format!("{refused:#}").contains("`offset`"), "{refused:#}");
    }
    let spec = VmSpec { qemu, ..spec };
    let mut vm = pod.begin_machine(&instance, spec.clone()).unwrap().arrived().unwrap();
    vm.exec(&format!("ip address add {GUEST_ADDRESS}/24 dev eth0 && ip link set eth0 up")).unwrap();
    let server = iperf::Server::start(&pod).unwrap();
    works_without_copies(&pod, &vm);

    // What its vCPUs load and store goes over the fabric, but for what they do in memory that is plugged in.
    let machine = Registry::new(&spec.directory).find("vm1").unwrap();
    let all = GuestRam { in_pool: RAM_BYTES, whole: RAM_BYTES };
    assert_eq!(GuestRam::look(&machine, &pod.pool_path()).unwrap(), all);
    assert_eq!((all.require("vm1", &pod.pool_path()).is_ok(), all.warning("vm1")), (true, None));
    its_vcpus_have_a_share(&pod, &vm);

    // The same memory is nobody else's while QEMU lives.
    let elsewhere = VmSpec { directory: pod.directory().join("vm-again"), ..spec.clone() };
    let refused = pod.begin_machine(&instance, elsewhere).unwrap_err();
    assert!(format!("{refused:#}").contains("another QEMU has"), "{refused:#}");

    // Whatever dies while the guest writes and sends.
    for (host, role) in [
        ("h2", Role::BlkBackend),
        ("h1", Role::BlkFrontend),
        ("h1", Role::NetFrontend),
        ("h2", Role::NetBackend),
    ] {
        eprintln!("{host}/{role} is killed");
        let written = vm.start(&job(32, Pattern::Random4K).command()).unwrap();
        let stream = iperf::Stream::begin(&vm, Way::Out, 4).unwrap();
        pod.daemon(host, role).unwrap().kill().unwrap();
        pod.start_daemon(host, role).unwrap();
        pod.wait_until_joined().unwrap();
        fio::Report::parse(&written.finish(PATIENCE).unwrap()).unwrap();
        stream.finish().unwrap();
    }
    works_without_copies(&pod, &vm);
    assert_eq!(pod.api().instance("vm1").unwrap().ram, Some(ram), "it is where it was");

    // Started again it has the same memory, of which backends' kernels have pages.
    vm.stop().unwrap();
    let mut vm = pod.begin_machine(&instance, spec).unwrap().arrived().unwrap();
    vm.exec(&format!("ip address add {GUEST_ADDRESS}/24 dev eth0 && ip link set eth0 up")).unwrap();
    works_without_copies(&pod, &vm);

    // A VM that is still there keeps its memory, although its instance is gone.
    pod.api().delete_instance_by_force("vm1").unwrap();
    wait_until("everyone else lets go", || {
        let pool = pod.api().pool().unwrap();
        let ram = pool.regions.iter().find(|region| region.purpose == "ram");
        ram.is_some_and(|ram| ram.holders.iter().all(|holder| holder.starts_with("h1/")))
    });
    assert_eq!(state_of_ram(&pod), Some(RegionState::Quarantined));
    vm.exec("true").unwrap();
    vm.stop().unwrap();
    wait_until("the memory is free", || state_of_ram(&pod).is_none());
    drop(server);
}
