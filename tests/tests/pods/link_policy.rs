//! By policy a lease goes home once its NIC works again, and nothing goes to a NIC whose link flaps, while a guest's traffic runs.

use pod_api::EventKind;
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{Pod, PodBuilder};
use wadi_tests::stage::Stage;
use wadi_tests::waiting::wait_for;

/// The second loss is one too many.
const SETTINGS: &str = "flaps-max = 1\nflap-window-ms = 60000\nhold-down-ms = 2000\nfail-back = \"return\"\nfail-back-after-ms = 500\n";

/// What became of the lease and of the NIC that it belongs on, in order.
fn story(pod: &Pod) -> Vec<EventKind> {
    let events = pod.api().events(0).unwrap().events.into_iter();
    let kinds = [EventKind::Failover, EventKind::FailedBack, EventKind::LinkHeld, EventKind::LinkReleased];
    events.map(|event| event.kind).filter(|kind| kinds.contains(kind)).collect()
}

#[test]
fn leases_go_home_by_policy_and_not_to_a_nic_that_flaps() {
    let stage = Stage::set_up_in(PodBuilder::three_hosts().controller_settings(SETTINGS)).unwrap();
    let pod = &stage.pod;
    let stream = iperf::Stream::begin(&stage.vm, Way::Out, 8).unwrap();
    // Once: it goes home as soon as its NIC has worked for a while.
    pod.pull_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    pod.plug_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h2/nic0").unwrap();
    assert_eq!(story(pod), [EventKind::Failover, EventKind::FailedBack]);

    // And once more: it has to have been calm for longer, and says so.
    pod.pull_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    wait_for("a NIC that is held", || story(pod).contains(&EventKind::LinkHeld));
    pod.plug_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h2/nic0").unwrap();
    let story = story(pod);
    assert_eq!(story[4..], [EventKind::LinkReleased, EventKind::FailedBack], "{story:?}");
    stream.finish().unwrap();
    let held = pod.podctl(&["events", "--kind", "link-held"]).unwrap();
    assert!(held.contains("h2/nic0") && held.contains("lost 2 times within 60 s"), "{held}");
}
