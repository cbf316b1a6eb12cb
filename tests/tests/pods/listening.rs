//! A VMM that listens on its devices' sockets while the frontends connect to it: each of them is killed under traffic, and
//! finds the others again.

use std::thread;
use std::time::Duration;

use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, CreateVolume, NicRequest};
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{CLIENT_ADDRESS, Pod, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::stage::rounds;
use wadi_tests::waiting::wait_for;

const SHAPE: VmShape = VmShape { memory_mib: 320, cpus: 2 };
/// How long a frontend stays away.
const AWAY: Duration = Duration::from_millis(300);

fn works(vm: &PodVm) {
    let said = vm.exec(&format!("ping -c 10 -i 0.05 -q {CLIENT_ADDRESS}")).unwrap();
    assert!(said.contains("10 packets received"), "{said}");
    job().run(vm, Duration::from_mins(2)).unwrap();
}

fn job() -> Job {
    Job { disk: "vda".into(), offset_mib: 0, size_mib: 24, pattern: Pattern::Random4K, flush_every: 64 }
}

/// Sectors that the guest has written.
fn written(vm: &PodVm) -> u64 {
    let counts = vm.exec("cat /sys/block/vda/stat").unwrap();
    counts.split_whitespace().nth(6).unwrap().parse().unwrap()
}

fn restart(pod: &mut Pod, role: Role) {
    pod.daemon("h1", role).unwrap().kill().unwrap();
    thread::sleep(AWAY);
    pod.start_daemon("h1", role).unwrap();
    pod.wait_until_joined().unwrap();
}

#[test]
fn frontends_connect_to_a_vmm_that_listens_whoever_dies() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    let size = "64M".parse().unwrap();
    pod.api().create_volume(&CreateVolume::new("vol0", size)).unwrap();
    let instance = pod
        .create_instance_as(&CreateInstance {
            name: "vm1".to_owned(),
            host: "h1".to_owned(),
            nics: vec![NicRequest::default()],
            volumes: vec!["vol0".to_owned()],
            vmm_listens: true,
            ..CreateInstance::default()
        })
        .unwrap();
    assert!(instance.vmm_listens);
    // The frontends have made nothing: QEMU does.
    for socket in [&instance.nics[0].socket, &instance.disks[0].socket] {
        assert!(!std::path::Path::new(socket).exists(), "{socket}");
    }
    let server = iperf::Server::start(&pod).unwrap();
    for round in 0..rounds() {
        let vm = pod.boot(&instance, &guest, SHAPE).unwrap();
        works(&vm);
        let stream = iperf::Stream::begin(&vm, Way::Out, 3).unwrap();
        restart(&mut pod, Role::NetFrontend);
        stream.finish().unwrap();
        let before = written(&vm);
        let writes = vm.start(&job().command()).unwrap();
        wait_for("fio to write", || written(&vm) > before);
        restart(&mut pod, Role::BlkFrontend);
        Report::parse(&writes.finish(Duration::from_mins(2)).unwrap()).unwrap();
        works(&vm);
        let log = vm.exec("dmesg").unwrap();
        assert!(!log.contains("I/O error"), "{log}");
        // QEMU is killed, leaves its sockets behind, and the next round's takes their place.
        eprintln!("round {round}: QEMU is killed");
        drop(vm);
    }
    let vm = pod.boot(&instance, &guest, SHAPE).unwrap();
    works(&vm);
    drop(vm);
    let here = pod.api().instance("vm1").unwrap();
    assert!(here.ready, "{here:?}");
    pod.api().delete_instance_by_force("vm1").unwrap();
    drop(server);
}
