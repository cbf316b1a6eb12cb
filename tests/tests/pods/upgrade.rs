//! A pod that runs is upgraded process by process while a guest works through it: controllers first, followers before the one
//! that leads, then host by host. It speaks the version before until the last of them is new, goes back to it when one does,
//! and takes in nobody who is two versions away. Old controllers lead new daemons as well: so it is where hosts are upgraded first, or
//! only the controllers go back.
//!
//! `WADI_PREVIOUS_BINARIES` names the programs to upgrade from; without it, those of this release speak the version before.

use std::time::Duration;

use cxl_pool::{HostId, Pool, Role as Slot};
use pod_api::{DeviceHealth, DeviceKind, EventKind};
use pod_protocol::config::HostConfig;
use pod_protocol::daemon::StopSignal;
use pod_protocol::endpoint::{Endpoint, Handler, RunError};
use pod_protocol::ids::RegionId;
use pod_protocol::objects::{Object, ObjectId};
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::Join;
use pod_protocol::telemetry::Telemetry;
use wadi_tests::conversation::Conversation;
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::pod::{Pod, PodBuilder, PodVm, Release, Role};
use wadi_tests::replicas::Replicas;
use wadi_tests::stage::Stage;
use wadi_tests::waiting::{self, until};

/// Hosts in the order in which they are upgraded, with what runs there: those with devices before the one with guests.
const HOSTS: [(&str, [Role; 2]); 3] = [
    ("h3", [Role::BlkBackend, Role::NetBackend]),
    ("h2", [Role::BlkBackend, Role::NetBackend]),
    ("h1", [Role::BlkFrontend, Role::NetFrontend]),
];

/// A part of the guest's disk, and a load for it that is verified.
fn load(part: u32) -> String {
    let (offset_mib, pattern) = (64 * part, Pattern::Random4K);
    Job { disk: "vda".into(), offset_mib, size_mib: 24, pattern, flush_every: 64 }.command()
}

/// What the pod speaks. Controllers of 1.0 do not say.
fn spoken(pod: &Pod) -> String {
    let said = pod.api().pool().unwrap().protocol;
    if said.is_empty() { "1.0".to_owned() } else { said }
}

fn wait_for(pod: &Pod, protocol: Protocol) {
    until(&format!("the pod to speak {protocol}"), || (spoken(pod) == protocol.to_string()).then_some(()));
}

/// How many daemons say that the pod speaks this minor, as they were told.
fn told(replicas: &mut Replicas, minor: u16) -> usize {
    let leader = replicas.leader(3);
    let metrics = replicas.client(leader).unwrap().metrics().unwrap();
    let gauges = metrics.lines().filter(|line| line.contains("name=\"pod-protocol-minor\""));
    gauges.filter(|line| line.ends_with(&format!(" {minor}"))).count()
}

fn replace(pod: &mut Pod, host: &str, role: Role) {
    pod.daemon(host, role).unwrap().stop().unwrap();
    pod.start_daemon(host, role).unwrap();
    pod.wait_until_joined().unwrap();
}

#[test]
fn pod_is_upgraded_host_by_host_under_load_and_goes_back() {
    let (old, new) = (Release::Previous.protocol(), Release::This.protocol());
    let mut stage = Stage::set_up_in(PodBuilder::three_hosts().release(Release::Previous)).unwrap();
    let mut replicas = Replicas::instead_of_the_controller(&mut stage.pod).unwrap();
    let (vm, pod) = (&stage.vm, &mut stage.pod);
    let conversation = Conversation::begin(pod, vm).unwrap();
    assert_eq!(spoken(pod), old.to_string());

    let disk = vm.start(&load(0)).unwrap();
    pod.set_release(Release::This);
    replace_controllers(pod, &mut replicas, &conversation, |pod| assert_eq!(spoken(pod), old.to_string()));
    Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

    for (part, (host, roles)) in (1..).zip(HOSTS) {
        let disk = vm.start(&load(part)).unwrap();
        assert!(disk.outcome().is_none(), "the storage daemon, which is first, is replaced under load");
        for role in roles {
            assert_eq!(spoken(pod), old.to_string(), "before {host}/{role}");
            assert_eq!(told(&mut replicas, new.minor), 0, "before {host}/{role}");
            replace(pod, host, role);
            conversation.check(&format!("with {host}/{role} new")).unwrap();
        }
        Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();
    }
    wait_for(pod, new);
    until("all daemons to hear of it", || (told(&mut replicas, new.minor) == 6).then_some(()));

    stranger_is_refused(pod);
    old_controllers_lead_new_daemons(vm, pod, &mut replicas, &conversation);

    // One step back, of a follower and a daemon, and forth again.
    pod.set_release(Release::Previous);
    let follower = (replicas.leader(3) + 1) % 3;
    replicas.replace(follower, pod).unwrap();
    replicas.leader(3);
    replace(pod, "h1", Role::NetFrontend);
    let asked = (follower + 1) % 3;
    pod.ask(replicas.client(asked).unwrap());
    wait_for(pod, old);
    conversation.check("with a daemon and a replica of the version before").unwrap();
    let disk = vm.start(&load(7)).unwrap();
    pod.set_release(Release::This);
    replicas.replace(follower, pod).unwrap();
    replicas.leader(3);
    assert_eq!(spoken(pod), old.to_string(), "a daemon is old still");
    replace(pod, "h1", Role::NetFrontend);
    wait_for(pod, new);
    until("all daemons to hear of it", || (told(&mut replicas, new.minor) == 6).then_some(()));
    conversation.check("with all of it new again").unwrap();
    Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

    let log = vm.exec("dmesg").unwrap();
    assert!(!log.contains("I/O error"), "{log}");
    let counters = pod.api().metrics().unwrap();
    let lost = counters.lines().filter(|it| it.starts_with("wadi_lease_errors_total") && !it.ends_with(" 0"));
    assert_eq!(lost.collect::<Vec<_>>(), [""; 0]);
}

/// All controllers, one after the other, followers first, become those of the pod's release.
fn replace_controllers(
    pod: &Pod,
    replicas: &mut Replicas,
    conversation: &Conversation,
    check: impl Fn(&Pod),
) {
    let leader = replicas.leader(3);
    for replica in [(leader + 1) % 3, (leader + 2) % 3, leader] {
        replicas.replace(replica, pod).unwrap();
        replicas.leader(3);
        check(pod);
        conversation.check(&format!("with another replica {replica}")).unwrap();
    }
    let (known, speaks) = (pod.api().controllers().unwrap(), pod.release().protocol().to_string());
    // Controllers of 1.0 do not say.
    let said = |said: &Option<String>| said.as_ref().is_none_or(|said| *said == speaks);
    assert!(known.iter().all(|it| said(&it.protocol)), "not all speak {speaks}: {known:?}");
}

/// The controllers alone go back, and lead daemons that are all new: they take their joins, orders and reports. Then they go forth
/// again.
fn old_controllers_lead_new_daemons(
    vm: &PodVm,
    pod: &mut Pod,
    replicas: &mut Replicas,
    conversation: &Conversation,
) {
    let (old, new) = (Release::Previous.protocol(), Release::This.protocol());
    let disk = vm.start(&load(4)).unwrap();
    pod.set_release(Release::Previous);
    replace_controllers(pod, replicas, conversation, |pod| wait_for(pod, old));
    waiting::wait_for("all daemons to hear of it", || told(replicas, old.minor) == 6);
    pod.set_release(Release::This);
    Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

    for _ in 0..2 {
        nic_fails_over(pod);
        conversation.check("with an old controller that has moved its NIC").unwrap();
    }

    // One dies and another one leaves in order, on each side; all join anew.
    let disk = vm.start(&load(5)).unwrap();
    assert!(disk.outcome().is_none(), "the disk is in use when its daemons go");
    for (host, role) in [("h2", Role::BlkBackend), ("h1", Role::NetFrontend)] {
        pod.daemon(host, role).unwrap().kill().unwrap();
        pod.start_daemon(host, role).unwrap();
        pod.wait_until_joined().unwrap();
    }
    for (host, role) in [("h2", Role::NetBackend), ("h1", Role::BlkFrontend)] {
        replace(pod, host, role);
    }
    conversation.check("with new daemons that joined at an old controller").unwrap();

    // What a volume had is wiped, and that is reported.
    let used = |pod: &Pod| match pod.api().device("h3", "ssd1").unwrap().kind {
        DeviceKind::Ssd { used_bytes, .. } => used_bytes,
        kind @ DeviceKind::Nic { .. } => panic!("{kind:?}"),
    };
    assert_eq!(used(pod), 0);
    pod.create_instance("vm2", "h1", &[("vol1", 64 << 20, Some("h3/ssd1"))]).unwrap();
    assert_eq!(used(pod), 64 << 20);
    pod.api().delete_instance("vm2").unwrap();
    pod.api().delete_volume("vol1").unwrap();
    waiting::wait_for("the volume's place to be free again", || used(pod) == 0);
    Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

    assert_eq!(spoken(pod), old.to_string());
    assert_eq!(told(replicas, old.minor), 6);
    let disk = vm.start(&load(6)).unwrap();
    replace_controllers(pod, replicas, conversation, |_| {});
    wait_for(pod, new);
    waiting::wait_for("all daemons to hear of it", || told(replicas, new.minor) == 6);
    Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();
}

/// The cable of the NIC in use is pulled, the other one takes its place, and the cable is plugged in again.
fn nic_fails_over(pod: &Pod) {
    let (one, other) = (("h2", "nic0"), ("h3", "nic1"));
    let used = pod.api().instance("vm1").unwrap().nics[0].nic.clone();
    let ((host, nic), backup) = if used == "h2/nic0" { (one, other) } else { (other, one) };
    pod.pull_cable(host, nic).unwrap();
    pod.wait_for_nic("vm1", &format!("{}/{}", backup.0, backup.1)).unwrap();
    pod.plug_cable(host, nic).unwrap();
    waiting::wait_for("the NIC to be up again", || {
        pod.api().device(host, nic).unwrap().health == DeviceHealth::Up
    });
}

/// Nothing of it is ever called.
struct Idle;

impl Handler for Idle {
    fn apply(&mut self, object: Object) -> Result<(), String> {
        Err(format!("{} was not to be told", object.id()))
    }

    fn remove(&mut self, _id: ObjectId) -> Result<(), String> {
        Ok(())
    }

    fn scrub(&mut self, _region: RegionId, _area: cxl_pool::Area) -> Result<(), String> {
        Ok(())
    }

    fn telemetry(&mut self) -> Telemetry {
        Telemetry::default()
    }

    fn fenced(&mut self) {}
}

/// A daemon of the version after the next one does not take part, and both sides say why.
fn stranger_is_refused(pod: &Pod) {
    let pool = Pool::open(&pod.pool_path()).unwrap();
    let mut config = HostConfig::load(&pod.config_path("h1")).unwrap();
    (config.host.id, config.host.name) = (HostId::new(9), "h9".to_owned());
    config.run.protocol = Protocol::of_minor(Protocol::CURRENT.minor + 2);
    let join = Join {
        host_name: config.host.name.clone(),
        software: "stranger 9".to_owned(),
        pid: std::process::id(),
        devices: Vec::new(),
        memory_failures: Vec::new(),
        fence_ms: None,
    };
    let stranger =
        Endpoint::join(&pool, pool.software(), &config, Slot::NetFrontend, join, |_, _| Box::new(Idle));
    let ended = stranger.unwrap().run_until(&StopSignal::manual().unwrap()).unwrap_err();
    assert!(matches!(ended, RunError::Incompatible { .. }), "{ended}");
    let why = "upgrade the other side to a release that speaks";
    assert!(ended.to_string().contains(why), "{ended}");
    until("an event that says so", || {
        let events = pod.api().events(0).ok()?.events;
        let refused = |message: &str| message.contains("upgrade this side to a release that speaks");
        events.iter().find(|it| it.kind == EventKind::JoinRefused && refused(&it.message)).map(|_| ())
    });
}
