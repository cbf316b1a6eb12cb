//! Instances that want more of a NIC and of an SSD than there is share them by their priorities, and others than they were at once.

use pod_api::{CreateInstance, EventKind, Instance, NicRequest};
use pod_protocol::ids::MacAddress;
use wadi_tests::foreign_disk::ForeignDisk;
use wadi_tests::loads::{Load, near, until};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, Role};

/// So many requests per second the SSD does, whatever their length.
const IOPS: u32 = 400;
/// What the NIC's cable carries.
const MBIT: u32 = 24;

/// h1 runs VMs; h2 has a NIC on a slow cable, and a slow SSD.
fn pod() -> (Pod, ForeignDisk) {
    let mut pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(
            HostPlan::new("h2")
                .nic("nic0")
                .nic_settings("send-buffer-bytes = 65536")
                .foreign_ssd("ssd0")
                .ssd_settings("queue-depth = 4"),
        )
        .lay_out()
        .unwrap();
    let disk = ForeignDisk::start(&pod, "h2", "ssd0", 64 << 20, Some(IOPS)).unwrap();
    let shape = ["qdisc", "add", "dev", "eth0", "root", "tbf", "burst", "16kb", "limit", "1mb", "rate"];
    let mut shaper = pod.host("h2").unwrap().command("tc".as_ref());
    assert!(shaper.args(shape).arg(format!("{MBIT}mbit")).status().unwrap().success());
    pod.create_pool().unwrap();
    pod.start_controller().unwrap();
    for (host, role) in [
        ("h1", Role::NetFrontend),
        ("h1", Role::BlkFrontend),
        ("h2", Role::NetBackend),
        ("h2", Role::BlkBackend),
    ] {
        pod.start_daemon(host, role).unwrap();
    }
    pod.wait_until_joined().unwrap();
    (pod, disk)
}

fn create(pod: &Pod, name: &str, priority: Option<u16>) -> Instance {
    let volume = format!("{name}-disk");
    let wish = serde_json::json!({ "name": volume, "size": 16 << 20 });
    pod.api().create_volume(&serde_json::from_value(wish).unwrap()).unwrap();
    let request = CreateInstance {
        name: name.into(),
        host: "h1".into(),
        nics: vec![NicRequest::default()],
        volumes: vec![volume],
        priority,
        ..Default::default()
    };
    pod.create_instance_as(&request).unwrap()
}

fn divided(rates: &[f64], parts: &[f64]) -> bool {
    let (sum, all): (f64, f64) = (rates.iter().sum(), parts.iter().sum());
    rates.iter().zip(parts).all(|(rate, part)| near(*rate, sum * part / all))
}

#[test]
fn what_there_is_too_little_of_is_shared_by_priorities() {
    let (pod, _disk) = pod();
    let instances = [create(&pod, "vm1", None), create(&pod, "vm2", Some(300)), create(&pod, "vm3", None)];
    let disks = instances.each_ref().map(|it| Load::disk(&it.disks[0].socket));
    let nics = instances.each_ref().map(|it| {
        let mac: MacAddress = it.nics[0].mac.parse().unwrap();
        Load::nic(&it.nics[0].socket, mac.bytes())
    });
    until("disks, 1:3:1", &disks, |rates| divided(rates, &[1.0, 3.0, 1.0]));
    until("NICs, 1:3:1", &nics, |rates| {
        let sum: f64 = rates.iter().sum();
        // No more than the cable carries, and it is busy: what is counted are frames without what a cable adds to them.
        divided(rates, &[1.0, 3.0, 1.0])
            && sum * 8.0 > f64::from(MBIT) * 0.9e6
            && sum * 8.0 < f64::from(MBIT) * 1.05e6
    });

    // Another priority holds at once, for guests that go on.
    let shown = pod.podctl(&["instances", "priority", "vm3", "600"]).unwrap();
    assert!(shown.contains("priority: 600"), "{shown}");
    until("disks, 1:3:6", &disks, |rates| divided(rates, &[1.0, 3.0, 6.0]));
    until("NICs, 1:3:6", &nics, |rates| divided(rates, &[1.0, 3.0, 6.0]));
    let table = pod.podctl(&["instances", "list", "-o", "wide"]).unwrap();
    assert!(table.contains("PRIORITY") && table.contains("600"), "{table}");
    let events = pod.api().events(0).unwrap().events;
    let told = events.iter().find(|it| it.kind == EventKind::PriorityChanged).expect("it is told");
    assert_eq!((told.subject.as_str(), told.message.as_str()), ("vm3", "its priority is 600, and was 100"));
    let wrong = pod.podctl(&["instances", "priority", "vm3", "0"]).unwrap_err();
    assert!(wrong.contains("use 1 to 1000"), "{wrong}");

    // Who is alone has all of it, whatever its priority.
    let [first, second, third] = disks;
    second.stop();
    third.stop();
    let alone = [first];
    until("one disk alone", &alone, |rates| near(rates[0], f64::from(IOPS) * 16384.0));
    alone.into_iter().chain(nics).for_each(Load::stop);
}
