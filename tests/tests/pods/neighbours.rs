//! Two virtual machines on the same NIC reach each other without the wire, and neither can pose as somebody else.

use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{CLIENT_ADDRESS, HostPlan, Pod, PodBuilder, PodVm, VmShape};

const ADDRESSES: [&str; 2] = ["10.77.0.2", "10.77.0.3"];
const SMALL: VmShape = VmShape { memory_mib: 320, cpus: 1 };

fn pings(from: &PodVm, to: &str) {
    let said = from.exec(&format!("ping -c 5 -i 0.1 -q {to}")).unwrap();
    assert!(said.contains("5 packets received, 0% packet loss"), "{said}");
}

/// Frames of an instance that were dropped for this reason, as the controller's metrics tell.
fn drops(pod: &Pod, instance: &str, reason: &str) -> u64 {
    let page = pod.api().metrics().unwrap();
    let wanted = [format!("instance=\"{instance}\""), format!("reason=\"{reason}\"")];
    let lines = page.lines().filter(|line| line.contains("lease_drops"));
    let lines = lines.filter(|line| wanted.iter().all(|label| line.contains(label)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

fn mac(vm: &PodVm) -> String {
    vm.exec("cat /sys/class/net/eth0/address").unwrap().trim().to_owned()
}

#[test]
fn neighbours_talk_and_nobody_poses_as_another() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    // One on a host without devices, the other on the host of the NIC itself.
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").vms().nic("nic0"))
        .start()
        .unwrap();
    let instances =
        [("vm1", "h1"), ("vm2", "h2")].map(|(name, host)| pod.create_instance(name, host, &[]).unwrap());
    assert!(instances.iter().all(|instance| instance.nics[0].nic == "h2/nic0"), "{instances:?}");
    let boot = |place: usize| pod.boot_at(ADDRESSES[place], &instances[place], &guest, SMALL).unwrap();
    let vms = [boot(0), boot(1)];
    let server = iperf::Server::start(&pod).unwrap();

    // Broadcasts (ARP) and small frames.
    pings(&vms[0], ADDRESSES[1]);
    pings(&vms[1], ADDRESSES[0]);
    for vm in &vms {
        pings(vm, CLIENT_ADDRESS);
    }
    // The neighbour answered itself, and nobody for it.
    let seen = vms[0].exec(&format!("grep {} /proc/net/arp", ADDRESSES[1])).unwrap();
    assert!(seen.contains(&instances[1].nics[0].mac), "{seen}");

    // Long frames, unsegmented from one guest's driver to the other's.
    for way in [Way::Out, Way::In] {
        let listener = vms[1].start("iperf3 --server --one-off").unwrap();
        let command = iperf::command_to(ADDRESSES[1], way, 2);
        // The server needs a moment to listen.
        let output = vms[0].exec(&format!("sleep 1; {command}")).unwrap();
        iperf::Report::parse(&output).unwrap();
        listener.finish(Duration::from_secs(20)).unwrap();
    }
    for vm in &vms {
        iperf::run(vm, Way::Out, 1).unwrap();
        iperf::run(vm, Way::In, 1).unwrap();
    }
    for instance in ["vm1", "vm2"] {
        for reason in ["bad-header", "receiver-offloads", "spoofed-source"] {
            assert_eq!(drops(&pod, instance, reason), 0, "{instance}: {reason}");
        }
    }

    // With another source address nothing passes, to the neighbour or to the wire, and it is counted.
    vms[0]
        .exec("ip link set eth0 down && ip link set eth0 address 02:00:00:00:be:ef && ip link set eth0 up")
        .unwrap();
    assert_eq!(mac(&vms[0]), "02:00:00:00:be:ef");
    for to in [ADDRESSES[1], CLIENT_ADDRESS] {
        let outcome = vms[0].run(&format!("ping -c 2 -W 1 -q {to}"), Duration::from_secs(20)).unwrap();
        assert!(!outcome.success(), "{}", outcome.text());
    }
    let started = Instant::now();
    while drops(&pod, "vm1", "spoofed-source") == 0 {
        assert!(started.elapsed() < Duration::from_secs(10), "no spoofed frame is counted");
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(drops(&pod, "vm2", "spoofed-source"), 0);
    // Not even with the neighbour's own, which goes on as before.
    let stolen = &instances[1].nics[0].mac;
    vms[0]
        .exec(&format!("ip link set eth0 down && ip link set eth0 address {stolen} && ip link set eth0 up"))
        .unwrap();
    let outcome =
        vms[0].run(&format!("ping -c 2 -W 1 -q {CLIENT_ADDRESS}"), Duration::from_secs(20)).unwrap();
    assert!(!outcome.success(), "{}", outcome.text());
    pings(&vms[1], CLIENT_ADDRESS);

    // Back under its own, it is heard again.
    let own = &instances[0].nics[0].mac;
    vms[0]
        .exec(&format!("ip link set eth0 down && ip link set eth0 address {own} && ip link set eth0 up"))
        .unwrap();
    pings(&vms[0], CLIENT_ADDRESS);
    drop(server);
}
