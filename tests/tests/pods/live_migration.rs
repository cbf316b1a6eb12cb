//! A VM moves to another host of the pod while it runs, with QEMU's own means: its NIC and its disk stay where they are,
//! nothing that it does fails, and nothing of what it wrote is wrong.

use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{
    ByteSize, ChangeVolume, CreateInstance, CreateVolume, Instance, NicRequest, ReplicaState, Stripes,
};
use pod_protocol::ids::MacAddress;
use vmm::MigrationSpeed;
use wadi_tests::announcements::Announcements;
use wadi_tests::conversation::Conversation;
use wadi_tests::iperf::{self, Way};
use wadi_tests::looks::volume_on;
use wadi_tests::pod::{
    CLIENT_ADDRESS, GUEST_ADDRESS, HostPlan, Pod, PodBuilder, PodVm, RAM_BYTES, Role, VmShape,
};
use wadi_tests::probe::Probe;
use wadi_tests::stage::{VOLUME_BYTES, rounds};
use wadi_tests::waiting::wait_for;

const DEADLINE: Duration = Duration::from_mins(1);
/// The striped volume's, before it grows.
const STRIPED_BYTES: u64 = 128 << 20;
const SHAPE: VmShape = VmShape { memory_mib: 256, cpus: 2 };
/// What is behind both SSDs.
const IMAGES: [&str; 2] = ["h2-ssd0.img", "h3-ssd1.img"];

/// Two hosts for VMs; the NIC is neither's. Their guests leave it to others to announce their addresses.
fn pod() -> Pod {
    PodBuilder::new()
        .silent_guests()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0").ssd("ssd0", "2G"))
        .host(HostPlan::new("h3").vms().backup_nic("nic1").ssd("ssd1", "2G"))
        .start()
        .unwrap()
}

/// The same, and its guests announce their addresses themselves.
fn pod_of_mirrors() -> Pod {
    PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0").ssd("ssd0", "2G"))
        .host(HostPlan::new("h3").vms().backup_nic("nic1").ssd("ssd1", "2G"))
        .start()
        .unwrap()
}

/// Waits until a replica is in a state.
fn wait_for_replica(pod: &Pod, device: &str, state: ReplicaState) {
    let began = Instant::now();
    loop {
        let volume = pod.api().volume("vol0").unwrap();
        if volume.replicas.iter().any(|it| it.device == device && it.state == state) {
            return;
        }
        assert!(began.elapsed() < DEADLINE, "{device} never was {state:?}: {volume:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until nothing has to be compared any more, and compares by hand what the two hold.
fn compare_replicas(pod: &Pod) {
    let began = Instant::now();
    let dirty = || {
        let page = pod.api().metrics().unwrap();
        let lines = page.lines().filter(|line| line.contains("mirror-dirty-bytes"));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>()
    };
    while dirty() > 0.0 {
        assert!(began.elapsed() < DEADLINE, "{} bytes are never compared", dirty());
        thread::sleep(Duration::from_millis(50));
    }
    let places =
        [("h2", "ssd0"), ("h3", "ssd1")].map(|(host, ssd)| volume_on(pod, "vol0", host, ssd).unwrap());
    assert!(places[0].iter().any(|&byte| byte != 0), "the guest wrote");
    assert!(places[0] == places[1], "the replicas hold different data");
}

/// Writes to the beginning of some disks and verifies until it is told to stop; whatever goes wrong stays to be seen.
fn start_work(vm: &PodVm, disks: &[&str]) {
    vm.exec("rm -f /tmp/stop /tmp/failed-* /tmp/finished-*").unwrap();
    for disk in disks {
        vm.exec(&format!(
            "(while [ ! -e /tmp/stop ]; do \
                fio --name=w --filename=/dev/{disk} --rw=randwrite --bs=4k --size=24m --direct=1 --ioengine=libaio \
                  --iodepth=16 --fsync=256 --verify=crc32c --verify_fatal=1 > /tmp/fio-{disk}.log 2>&1 \
                  || {{ cp /tmp/fio-{disk}.log /tmp/failed-{disk}; break; }}; \
              done; touch /tmp/finished-{disk}) < /dev/null > /dev/null 2>&1 &",
        ))
        .unwrap();
    }
}

fn finish_work(vm: &PodVm, disks: &[&str]) {
    vm.exec("touch /tmp/stop").unwrap();
    for disk in disks {
        let finished = format!("while [ ! -e /tmp/finished-{disk} ]; do sleep 0.1; done");
        vm.exec_within(&finished, DEADLINE).unwrap();
    }
    let failed = vm.exec("cat /tmp/failed-* 2> /dev/null || true").unwrap();
    assert_eq!(failed, "", "a disk failed the guest");
    let errors = vm.exec("dmesg | grep -ciE 'i/o error|blk_update_request' || true").unwrap();
    assert_eq!(errors.trim(), "0");
}

fn is_on(instance: &Instance, host: &str) -> bool {
    instance.host == host && instance.migration.is_none()
}

/// Moves the instance's guest to `host`, where it goes on.
fn move_to(pod: &Pod, guest: &Guest, vm: PodVm, host: &str) -> PodVm {
    let before = boot_id(&vm);
    let (mut arrived, moved) = pod.move_to(vm, guest, SHAPE, host).unwrap();
    assert!(is_on(&pod.api().instance("vm1").unwrap(), host));
    eprintln!("to {host}: {moved:?}");
    let now = boot_id(&arrived);
    if now != before {
        let console = std::fs::read_to_string(arrived.qemu().spec().console_log()).unwrap_or_default();
        panic!("the guest has booted anew on {host}:\n{console}");
    }
    arrived
}

/// As [`move_to`], but the network frontend of the host `dead`, which the guest leaves or for which it leaves, is dead at that
/// moment.
fn move_past_dead_frontend(pod: &mut Pod, guest: &Guest, mut vm: PodVm, host: &str, dead: &str) -> PodVm {
    let moving = pod.api().migrate_instance("vm1", host).unwrap();
    let uri = format!("unix:{}", pod.directory().join(format!("to-{host}.sock")).display());
    let waiting = pod.await_guest(&moving, guest, SHAPE, &uri).unwrap();
    pod.daemon(dead, Role::NetFrontend).unwrap().kill().unwrap();
    let monitor = vm.qemu().spec().monitor_socket();
    let copied = vmm::migrate(&monitor, &uri, MigrationSpeed::default()).unwrap();
    eprintln!("to {host}: {copied:?}");
    pod.start_daemon(dead, Role::NetFrontend).unwrap();
    let began = Instant::now();
    while !is_on(&pod.api().instance("vm1").unwrap(), host) {
        assert!(began.elapsed() < DEADLINE, "its leases never follow");
        // It may be that nobody has told the controller yet that the guest is gone from there.
        let _ = pod.api().activate_migration("vm1", false);
        thread::sleep(Duration::from_millis(20));
    }
    vmm::quit(&monitor).unwrap();
    assert!(vm.qemu().wait().unwrap().success());
    waiting.arrived().unwrap()
}

/// It gets an answer in the end.
fn wait_for_link(vm: &PodVm) {
    let began = Instant::now();
    while vm.exec(&format!("ping -c 1 -W 1 -q {CLIENT_ADDRESS}")).is_err() {
        assert!(began.elapsed() < DEADLINE, "the guest never has a link");
    }
}

/// It sends and receives. Not beside a [`Probe`], whose requests fill the socket of the guest's ping, too.
fn ping(vm: &PodVm) {
    let said = vm.exec(&format!("ping -c 10 -i 0.05 -q {CLIENT_ADDRESS}")).unwrap();
    assert!(said.contains("10 packets received"), "{said}");
}

/// Differs from boot to boot.
fn boot_id(vm: &PodVm) -> String {
    vm.exec("cat /proc/sys/kernel/random/boot_id").unwrap()
}

/// A move that fails in the middle, since the machine there dies.
fn fail_to_move_to(pod: &Pod, guest: &Guest, vm: &mut PodVm, host: &str) {
    let from = pod.api().instance("vm1").unwrap().host;
    let moving = pod.api().migrate_instance("vm1", host).unwrap();
    let uri = format!("unix:{}", pod.directory().join(format!("to-{host}.sock")).display());
    let waiting = pod.await_guest(&moving, guest, SHAPE, &uri).unwrap();
    // So slow that it is not done before the other machine is dead.
    let slow = MigrationSpeed { bytes_per_second: 2 << 20, ..MigrationSpeed::default() };
    let killer = thread::spawn(move || {
        thread::sleep(Duration::from_secs(1));
        drop(waiting);
    });
    let monitor = vm.qemu().spec().monitor_socket();
    let error = vmm::move_away(pod.api(), "vm1", &monitor, &uri, slow).unwrap_err().to_string();
    assert!(error.contains("goes on here"), "{error}");
    killer.join().unwrap();
    assert!(is_on(&pod.api().instance("vm1").unwrap(), &from));
}

/// What the files behind both SSDs take up.
fn allocated_bytes(pod: &Pod) -> u64 {
    let of = |image: &str| std::fs::metadata(pod.directory().join(image)).unwrap().blocks() * 512;
    IMAGES.map(of).iter().sum()
}

/// What the guest discards of its striped disk takes no room any more, on either SSD.
fn discard_of_striped(pod: &Pod, vm: &PodVm) {
    let fill = "dd if=/dev/urandom of=/dev/vdb bs=1M count=8 seek=64 conv=fsync 2> /dev/null";
    vm.exec_within(fill, DEADLINE).unwrap();
    let before = allocated_bytes(pod);
    vm.exec(
        "fio --name=t --filename=/dev/vdb --rw=trim --bs=1m --size=4m --offset=64m --direct=1 --ioengine=sync",
    )
    .unwrap();
    let after = allocated_bytes(pod);
    // The labels of the SSDs may have grown by some blocks meanwhile.
    assert!(after + (3 << 20) <= before, "{before} bytes before, {after} after");
}

/// Grows the striped volume, waits until the guest knows, and has it write at the new end. Returns the data's sum.
fn grow_striped(pod: &Pod, vm: &PodVm, size_bytes: u64) -> String {
    let change = ChangeVolume { size: Some(ByteSize::new(size_bytes)), ..ChangeVolume::default() };
    pod.api().change_volume("vol1", &change).unwrap();
    let sectors = (size_bytes / 512).to_string();
    let began = Instant::now();
    while vm.exec("cat /sys/block/vdb/size").unwrap().trim() != sectors {
        assert!(began.elapsed() < DEADLINE, "the guest never heard of its larger disk");
        thread::sleep(Duration::from_millis(50));
    }
    let write = format!(
        "head -c 1048576 /dev/urandom > /tmp/end; \
         dd if=/tmp/end of=/dev/vdb bs=1M seek={} conv=fsync 2> /dev/null && md5sum < /tmp/end",
        (size_bytes >> 20) - 1,
    );
    vm.exec_within(&write, DEADLINE).unwrap()
}

/// The sum of what is there, from the disk itself.
fn last_mebibyte_of_striped(vm: &PodVm) -> String {
    let read = "echo 3 > /proc/sys/vm/drop_caches; \
                dd if=/dev/vdb bs=1M skip=$(( $(cat /sys/block/vdb/size) / 2048 - 1 )) 2> /dev/null | md5sum";
    vm.exec_within(read, DEADLINE).unwrap()
}

#[test]
fn a_guest_moves_to_another_host_and_notices_nothing() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = pod();
    let striped = Some(Stripes { columns: 2, size: "64K".parse().unwrap() });
    for (name, size, device, stripes) in
        [("vol0", VOLUME_BYTES, Some("h2/ssd0"), None), ("vol1", STRIPED_BYTES, None, striped)]
    {
        let volume = CreateVolume {
            device: device.map(str::to_owned),
            stripes,
            ..CreateVolume::new(name, ByteSize::new(size))
        };
        pod.api().create_volume(&volume).unwrap();
    }
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest::default()],
        volumes: vec!["vol0".to_owned(), "vol1".to_owned()],
        ..CreateInstance::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    let mut vm = pod.boot(&instance, &guest, SHAPE).unwrap();
    let mac = instance.nics[0].mac.parse::<MacAddress>().unwrap().bytes();
    discard_of_striped(&pod, &vm);
    // It may want every write on the medium at once, and that moves along.
    vm.exec("echo 'write through' > /sys/block/vdb/cache_type").unwrap();
    let disks = ["vda", "vdb"];
    let mut striped_bytes = STRIPED_BYTES;
    for _ in 0..rounds() {
        start_work(&vm, &disks);
        let announcements = Announcements::listen(pod.client_namespace()).unwrap();
        let probe = Probe::start(pod.client_namespace(), GUEST_ADDRESS).unwrap();
        vm = move_to(&pod, &guest, vm, "h3");
        // One by the backend, when the lease changed hands, and the others as QEMU asks for them.
        announcements.wait_for(mac, 3, DEADLINE).unwrap();
        let loss = probe.finish().unwrap();
        eprintln!("packets were lost for {:?} ({} of {})", loss.longest_gap, loss.lost, loss.sent);
        ping(&vm);

        // It hears of a larger disk where it is now, and what it writes there moves along.
        striped_bytes += 64 << 20;
        let sum = grow_striped(&pod, &vm, striped_bytes);

        fail_to_move_to(&pod, &guest, &mut vm, "h1");
        ping(&vm);

        vm = move_to(&pod, &guest, vm, "h1");
        finish_work(&vm, &disks);
        assert_eq!(last_mebibyte_of_striped(&vm), sum);
        assert_eq!(vm.exec("cat /sys/block/vdb/cache_type").unwrap().trim(), "write through");
    }
    let instance = pod.api().instance("vm1").unwrap();
    assert_eq!((instance.nics[0].nic.as_str(), instance.disks[0].ssd.as_str()), ("h2/nic0", "h2/ssd0"));
    let kinds: Vec<_> =
        pod.api().events(0).unwrap().events.into_iter().map(|event| event.kind.word()).collect();
    for kind in ["migration-prepared", "instance-migrated", "migration-aborted"] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
}

#[test]
fn a_guest_with_a_mirrored_volume_moves_while_a_replica_dies_and_returns() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = pod_of_mirrors();
    let (name, size) = ("vol0".to_owned(), "64M".parse().unwrap());
    pod.api().create_volume(&CreateVolume { replicas: 2, ..CreateVolume::new(name, size) }).unwrap();
    let instance = pod
        .create_instance_as(&CreateInstance {
            name: "vm1".to_owned(),
            host: "h1".to_owned(),
            nics: vec![NicRequest::default()],
            volumes: vec!["vol0".to_owned()],
            ..CreateInstance::default()
        })
        .unwrap();
    let mut vm = pod.boot(&instance, &guest, SHAPE).unwrap();
    start_work(&vm, &["vda"]);
    // With both replicas, then with one, whose fellow returns when the guest has arrived.
    vm = move_to(&pod, &guest, vm, "h3");
    pod.daemon("h2", Role::BlkBackend).unwrap().kill().unwrap();
    wait_for_replica(&pod, "h2/ssd0", ReplicaState::StaleAway);
    vm = move_to(&pod, &guest, vm, "h1");
    pod.start_daemon("h2", Role::BlkBackend).unwrap();
    wait_for_replica(&pod, "h2/ssd0", ReplicaState::InSync);
    // Now the other one, which the guest had alone.
    pod.daemon("h3", Role::BlkBackend).unwrap().kill().unwrap();
    wait_for_replica(&pod, "h3/ssd1", ReplicaState::StaleAway);
    pod.start_daemon("h3", Role::BlkBackend).unwrap();
    wait_for_replica(&pod, "h3/ssd1", ReplicaState::InSync);
    finish_work(&vm, &["vda"]);
    vm.exec("sync").unwrap();
    compare_replicas(&pod);

    // QEMU takes it along that the NIC had no link when its guest left.
    vm = move_past_dead_frontend(&mut pod, &guest, vm, "h3", "h1");
    wait_for_link(&vm);
    ping(&vm);
    // QEMU before 8.0 forgets what the driver of a guest acknowledged that arrives where nobody serves the NIC.
    vm = move_past_dead_frontend(&mut pod, &guest, vm, "h1", "h1");
    wait_for_link(&vm);
    ping(&vm);
    let _server = iperf::Server::start(&pod).unwrap();
    for way in [Way::Out, Way::In] {
        iperf::run(&vm, way, 1).unwrap();
    }
}

/// A number of a line of the controller's metrics, which has all of these words; 0 if there is no such line.
fn metric(pod: &Pod, words: &[&str]) -> u64 {
    let page = pod.api().metrics().unwrap();
    let line = page.lines().find(|line| words.iter().all(|word| line.contains(word)));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
}

/// The guest's flows leave by each of these NICs, and its frontend on `host` copies no long packet of them.
fn sends_by(pod: &Pod, vm: &PodVm, host: &str, nics: &[&str]) {
    let sent = |nic: &str| {
        let device = format!("device=\"{nic}\"");
        metric(pod, &["wadi_device_packets_total{", &device, "transmit"])
    };
    let endpoint = format!("endpoint=\"{host}/net-frontend\"");
    let lent = || metric(pod, &[&endpoint, "zero-copy-packets"]);
    let before: Vec<u64> = nics.iter().map(|nic| sent(nic)).collect();
    let lent_before = lent();
    vm.exec_within(&format!("iperf3 --client {CLIENT_ADDRESS} --parallel 24 --time 1"), DEADLINE).unwrap();
    for (nic, before) in nics.iter().zip(before) {
        wait_for(&format!("flows by {nic}"), || sent(nic) >= before + 100);
    }
    wait_for("packets that are not copied", || lent() >= lent_before + 100);
}

#[test]
fn a_guest_in_the_pool_moves_with_both_of_its_nics_and_with_the_one_that_is_left() {
    const RAILS: [&str; 2] = ["h2/nic0", "h4/nic0"];
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0").in_group("rack1"))
        .host(HostPlan::new("h3").vms())
        .host(HostPlan::new("h4").nic("nic0").in_group("rack1"))
        .start()
        .unwrap();
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        // One pair of queues: addresses and ports tell flows apart.
        nics: vec![NicRequest { rails: Some(2), ..NicRequest::default() }],
        ram_bytes: Some(RAM_BYTES),
        ..CreateInstance::default()
    };
    let in_use = || -> Vec<String> {
        let nic = pod.api().instance("vm1").unwrap().nics.remove(0);
        nic.rails.into_iter().filter(|rail| rail.in_use).map(|rail| rail.nic).collect()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    assert_eq!(in_use(), RAILS);
    let mut vm = pod.boot(&instance, &guest, SHAPE).unwrap();
    let _server = iperf::Server::start(&pod).unwrap();
    let conversation = Conversation::begin(&pod, &vm).unwrap();
    sends_by(&pod, &vm, "h1", &RAILS);

    let ram_before = pod.api().instance("vm1").unwrap().ram.unwrap();
    vm = move_to(&pod, &guest, vm, "h3");
    conversation.check("on the other host").unwrap();
    let ram = pod.api().instance("vm1").unwrap().ram.unwrap();
    assert_ne!(ram.start_bytes, ram_before.start_bytes, "its memory is where it has arrived");
    sends_by(&pod, &vm, "h3", &RAILS);

    // A cable is pulled there, and it leaves with the NIC that is left.
    pod.pull_cable("h2", "nic0").unwrap();
    wait_for("one NIC to be left", || in_use() == RAILS[1..]);
    conversation.check("with one NIC").unwrap();
    vm = move_to(&pod, &guest, vm, "h1");
    conversation.check("back with one NIC").unwrap();
    sends_by(&pod, &vm, "h1", &RAILS[1..]);
    pod.plug_cable("h2", "nic0").unwrap();
    wait_for("both NICs to be used", || in_use() == RAILS);
    sends_by(&pod, &vm, "h1", &RAILS);
    // What it left is nobody's.
    wait_for("the memory that it left to be free", || {
        let pool = pod.api().pool().unwrap();
        pool.regions.iter().filter(|region| region.purpose == "ram").count() == 1
    });
}
