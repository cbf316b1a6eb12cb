//! What an operator says about NICs, by `podctl`, while a guest uses them.

use std::time::Duration;

use guest_images::{Guest, Silent};
use pod_api::Nic;
use wadi_tests::pod::{CLIENT_ADDRESS, GUEST_ADDRESS, Pod, PodBuilder, VmShape};
use wadi_tests::waiting::wait_for;

const PATIENCE: Duration = Duration::from_secs(20);

fn nic(pod: &Pod) -> Nic {
    pod.api().instance("vm1").unwrap().nics[0].clone()
}

#[test]
fn a_nic_is_moved_held_to_its_addresses_and_brought_home_under_a_running_guest() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::three_hosts().start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[]).unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let reaches = |count: u32| {
        let said = vm.exec(&format!("ping -c {count} -i 0.05 -W 2 -q {CLIENT_ADDRESS} || true")).unwrap();
        said.contains(&format!("{count} packets received, 0% packet loss"))
    };
    assert!(reaches(5));
    assert_eq!(nic(&pod).nic, "h2/nic0");

    // Another address than the guest's, so nothing of it passes; its own, and everything does.
    pod.podctl(&["instances", "nic-policy", "vm1", "--address", "192.0.2.1"]).unwrap();
    assert_eq!(nic(&pod).policy.addresses, ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]);
    // The order was taken when podctl ends; the backend hears of it a moment later.
    wait_for("nothing passes", || !reaches(1));
    let said = vm.exec(&format!("ping -c 3 -i 0.1 -W 1 -q {CLIENT_ADDRESS} || true")).unwrap();
    assert!(said.contains(" 0 packets received"), "{said}");
    let own = [
        "instances",
        "nic-policy",
        "vm1",
        "--address",
        GUEST_ADDRESS,
        "--send",
        "100M",
        "--send-packets",
        "50000",
        "--send-minimum",
        "10M",
        "--receive-minimum",
        "5M",
    ];
    pod.podctl(&own).unwrap();
    let policy = nic(&pod).policy;
    assert_eq!(policy.transmit.packets_per_second, Some(50_000));
    assert_eq!((policy.transmit.bytes_per_second, policy.receive.bytes_per_second), (Some(100 << 20), None));
    let minima = [policy.transmit.minimum_bytes_per_second, policy.receive.minimum_bytes_per_second];
    assert_eq!(minima, [Some(10 << 20), Some(5 << 20)]);
    wait_for("everything passes", || reaches(1));
    assert!(reaches(5));
    let more_than_there_is = ["instances", "nic-policy", "vm1", "--receive-minimum", "1000G"];
    assert!(pod.podctl(&more_than_there_is).unwrap_err().contains("h2/nic0 carries"));
    // Both ends of the channel count what went over it.
    let counted = |end: &str, peer: &str, direction: &str| {
        let of = format!("endpoint=\"{end}\",peer=\"{peer}\",direction=\"{direction}\"}} ");
        let page = pod.api().metrics().unwrap();
        let mut lines = page.lines().filter(|line| line.starts_with("wadi_channel_messages_total{"));
        lines.find_map(|line| line.split_once(&of)?.1.parse::<u64>().ok()).unwrap_or(0)
    };
    let (frontend, backend) = ("h1/net-frontend", "h2/net-backend");
    wait_for("what one end sent, the other received", || {
        let sent = counted(frontend, backend, "sent");
        sent >= 10 && sent == counted(backend, frontend, "received")
    });
    assert!(pod.podctl(&["instances", "nic-policy", "vm2"]).unwrap_err().contains("vm2"));
    assert!(pod.podctl(&["instances", "nic-policy", "vm1", "--send-packets", "0"]).is_err());
    assert_eq!(nic(&pod).policy, policy, "what was refused changed something");

    // By order, with not a packet lost.
    let pings = vm.start(&format!("ping -c 60 -i 0.05 -W 5 -q {CLIENT_ADDRESS}")).unwrap();
    pod.podctl(&["instances", "migrate-nic", "vm1", "--to", "h3/nic1"]).unwrap();
    pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    let said = pings.finish(PATIENCE).unwrap();
    assert!(said.contains("60 packets received, 0% packet loss"), "{said}");
    assert!(
        pod.podctl(&["instances", "migrate-nic", "vm1", "--to", "h3/nic1"]).is_err(),
        "it is there already"
    );
    assert!(
        pod.podctl(&["instances", "migrate-nic", "vm1", "--to", "h9/nic1"]).unwrap_err().contains("h9/nic1")
    );
    assert_eq!(nic(&pod).policy, policy);

    // Back again, once the move before has ended.
    wait_for("the way back is free", || {
        pod.podctl(&["instances", "migrate-nic", "vm1", "--to", "h2/nic0"]).is_ok()
    });
    pod.wait_for_nic("vm1", "h2/nic0").unwrap();

    // What fled from a NIC comes home when it works and is told to.
    pod.pull_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    assert!(pod.podctl(&["devices", "fail-back", "h2/nic0"]).is_err(), "its cable is out");
    pod.plug_cable("h2", "nic0").unwrap();
    wait_for("it goes home", || {
        let _ = pod.podctl(&["devices", "release", "h2/nic0"]);
        pod.podctl(&["devices", "fail-back", "h2/nic0"]).is_ok() && nic(&pod).nic == "h2/nic0"
    });
    assert!(reaches(5));
}
