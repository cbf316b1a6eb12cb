//! A NIC that carries too much is relieved: an instance goes to another host's NIC while it sends, and no more than may. What they send arrives, once and in order.

use std::thread;
use std::time::Duration;

use pod_api::{CreateInstance, Event, EventKind, NicLimit, NicPolicy, NicRequest};
use pod_protocol::ids::MacAddress;
use wadi_tests::arrivals::Arrivals;
use wadi_tests::loads::Load;
use wadi_tests::pod::{HostPlan, Pod, PodBuilder};
use wadi_tests::waiting::until;

/// Windows of 200 ms, five of which count, and one move in an hour.
const BALANCE: &str = "\n[balance]\nmode = \"move\"\nwindow-ms = 200\nwindows = 5\nmoves-max = 1\n\
                       period-ms = 3600000\nrest-ms = 1000\n";
/// Instances, and how many Mbit/s each sends.
const GUESTS: [(&str, u64); 3] = [("calm", 1), ("busy1", 50), ("busy2", 50)];

fn events(pod: &Pod, kind: EventKind) -> Vec<Event> {
    pod.api().events(0).unwrap().events.into_iter().filter(|it| it.kind == kind).collect()
}

fn nic_of(pod: &Pod, instance: &str) -> String {
    pod.api().instance(instance).unwrap().nics[0].nic.clone()
}

/// A guest that sends as much as its NIC's policy lets it, and its address.
fn guest(pod: &Pod, name: &str, mbps: u64) -> ([u8; 6], Load) {
    let transmit = NicLimit { bytes_per_second: Some(mbps * 125_000), ..NicLimit::default() };
    let policy = NicPolicy { transmit, ..NicPolicy::default() };
    let request = CreateInstance {
        name: name.into(),
        host: "h1".into(),
        nics: vec![NicRequest { policy, ..NicRequest::default() }],
        ..Default::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    let mac: MacAddress = instance.nics[0].mac.parse().unwrap();
    (mac.bytes(), Load::nic(&instance.nics[0].socket, mac.bytes()))
}

#[test]
fn a_busy_instance_leaves_a_nic_that_carries_too_much() {
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0").nic_settings("speed-mbps = 50"))
        .host(HostPlan::new("h3").nic("nic0").nic_settings("speed-mbps = 1000"))
        .controller_sections(BALANCE)
        .start()
        .unwrap();
    pod.api().drain_device("h3", "nic0", true).unwrap();
    let arrivals = Arrivals::listen(pod.client_namespace()).unwrap();
    let guests = GUESTS.map(|(name, mbps)| guest(&pod, name, mbps));
    assert!(GUESTS.iter().all(|(name, _)| nic_of(&pod, name) == "h2/nic0"));
    until("too much on h2/nic0, and nowhere to go", || {
        let told = events(&pod, EventKind::Overloaded);
        let told = told.into_iter().find(|it| it.subject == "h2/nic0")?;
        told.message.contains("no lease on it fits another NIC").then_some(())
    });
    assert!(events(&pod, EventKind::Balanced).is_empty());

    pod.api().drain_device("h3", "nic0", false).unwrap();
    let balanced = until("an instance to leave", || events(&pod, EventKind::Balanced).pop());
    let moved = balanced.subject.clone();
    assert!(["busy1", "busy2"].contains(&moved.as_str()), "{balanced:?}");
    assert!(balanced.message.contains("h2/nic0") && balanced.message.contains("h3/nic0"), "{balanced:?}");
    assert_eq!(nic_of(&pod, &moved), "h3/nic0");

    // It goes on there, and what is left is more than should be, but as much as may has moved.
    let place = GUESTS.iter().position(|(name, _)| *name == moved).unwrap();
    let (_, load) = &guests[place];
    let before = load.bytes();
    until("the guest to go on", || (load.bytes() > before + 2_000_000).then_some(()));
    let load = |nic: &str| pod.api().balance().unwrap().nics.into_iter().find(|it| it.name == nic);
    until("both NICs to carry what they have", || {
        let (left, reached) = (load("h2/nic0")?, load("h3/nic0")?);
        (left.overloaded && left.carries_mbps < 70 && reached.carries_mbps > 25 && !reached.overloaded)
            .then_some(())
    });
    // Longer than it takes until a NIC is overloaded, and than a lease rests.
    thread::sleep(Duration::from_secs(3));
    assert_eq!(events(&pod, EventKind::Balanced).len(), 1, "one move may be");
    let stay = GUESTS.iter().filter(|(name, _)| *name != moved);
    assert!(stay.clone().all(|(name, _)| nic_of(&pod, name) == "h2/nic0"));
    let shown = pod.podctl(&["balance", "-o", "wide"]).unwrap();
    assert!(shown.contains("would move from h2/nic0 to h3/nic0"), "one more would: {shown}");
    let explained = pod.podctl(&["explain", "instance", &moved]).unwrap();
    eprintln!("{shown}\n{explained}");
    assert!(explained.contains("Mbit/s now"), "{explained}");
    for (mac, load) in guests {
        arrivals.expect(mac, load.stop_sending()).unwrap();
    }
}
