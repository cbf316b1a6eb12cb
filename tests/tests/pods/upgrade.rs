//! A pod that runs is upgraded process by process while guests of two hosts work through it: controllers first, followers before the one
//! that leads, then host by host. It speaks the version before until the last of them is new, goes back to it when one does,
//! and takes in nobody who is two versions away. Old controllers lead new daemons as well: so it is where hosts are upgraded first, or
//! only the controllers go back.
//!
//! `WADI_PREVIOUS_BINARIES` names the programs to upgrade from; without it, those of this release speak the version before.

use std::time::Duration;

use cxl_pool::{HostId, Pool, Role as Slot};
use guest_images::{Guest, Silent};
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
use wadi_tests::pod::{GuestJob, HostPlan, Pod, PodBuilder, PodVm, Release, Role, VmShape};
use wadi_tests::replicas::Replicas;
use wadi_tests::stage::Stage;
use wadi_tests::waiting::{self, until};

/// Hosts in the order in which they are upgraded, with what runs there: those with devices before those with guests.
const HOSTS: [(&str, [Role; 2]); 4] = [
    ("h3", [Role::BlkBackend, Role::NetBackend]),
    ("h2", [Role::BlkBackend, Role::NetBackend]),
    ("h1", [Role::BlkFrontend, Role::NetFrontend]),
    ("h4", [Role::BlkFrontend, Role::NetFrontend]),
];
const DAEMONS: usize = 2 * HOSTS.len();
const OTHER_ADDRESS: &str = "10.77.0.9";

/// A guest on h1 and one on h4, to each of which a connection is open all the time.
struct Guests<'a> {
    vms: [&'a PodVm; 2],
    conversations: [Conversation; 2],
}

/// What both do with their disks.
struct Loads<'a>([GuestJob<'a>; 2]);

impl<'a> Guests<'a> {
    fn begin(pod: &Pod, vms: [&'a PodVm; 2]) -> Self {
        let [one, other] = vms;
        let conversations = [
            Conversation::begin(pod, one).unwrap(),
            Conversation::begin_at(OTHER_ADDRESS, pod, other).unwrap(),
        ];
        Self { vms, conversations }
    }

    /// A load on a part of each guest's disk, which is verified. What one of them does is enough for most of the time.
    fn load(&self, part: u32) -> Loads<'a> {
        let job = |size_mib| {
            let (offset_mib, pattern) = (64 * part, Pattern::Random4K);
            Job { disk: "vda".into(), offset_mib, size_mib, pattern, flush_every: 64 }.command()
        };
        let [one, other] = self.vms;
        Loads([one.start(&job(24)).unwrap(), other.start(&job(8)).unwrap()])
    }

    fn check(&self, when: &str) {
        self.conversations.iter().for_each(|conversation| conversation.check(when).unwrap());
    }
}

impl Loads<'_> {
    fn finish(self) {
        for job in self.0 {
            Report::parse(&job.finish(Duration::from_mins(2)).unwrap()).unwrap();
        }
    }

    /// Whether the disks are in use.
    fn go_on(&self) -> bool {
        self.0.iter().all(|job| job.outcome().is_none())
    }
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
    let hosts = PodBuilder::three_hosts().host(HostPlan::new("h4").vms());
    let mut stage = Stage::set_up_in(hosts.release(Release::Previous)).unwrap();
    let instance = stage.pod.create_instance("other", "h4", &[("disk", 640 << 20, Some("h2/ssd0"))]).unwrap();
    let guest = Guest::ensure(&mut Silent).unwrap();
    let other = stage.pod.boot_at(OTHER_ADDRESS, &instance, &guest, VmShape::default()).unwrap();
    let mut replicas = Replicas::instead_of_the_controller(&mut stage.pod).unwrap();
    let pod = &mut stage.pod;
    let guests = Guests::begin(pod, [&stage.vm, &other]);
    assert_eq!(spoken(pod), old.to_string());

    let loads = guests.load(0);
    pod.set_release(Release::This);
    replace_controllers(pod, &mut replicas, &guests, |pod| assert_eq!(spoken(pod), old.to_string()));
    loads.finish();

    for (part, (host, roles)) in (1..).zip(HOSTS) {
        let loads = guests.load(part);
        assert!(loads.go_on(), "the storage daemon, which is first, is replaced under load");
        for role in roles {
            assert_eq!(spoken(pod), old.to_string(), "before {host}/{role}");
            assert_eq!(told(&mut replicas, new.minor), 0, "before {host}/{role}");
            replace(pod, host, role);
            guests.check(&format!("with {host}/{role} new"));
        }
        loads.finish();
    }
    wait_for(pod, new);
    until("all daemons to hear of it", || (told(&mut replicas, new.minor) == DAEMONS).then_some(()));

    stranger_is_refused(pod);
    old_controllers_lead_new_daemons(pod, &mut replicas, &guests);

    // One step back, of a follower and a daemon, and forth again.
    pod.set_release(Release::Previous);
    let follower = (replicas.leader(3) + 1) % 3;
    replicas.replace(follower, pod).unwrap();
    replicas.leader(3);
    replace(pod, "h1", Role::NetFrontend);
    let asked = (follower + 1) % 3;
    pod.ask(replicas.client(asked).unwrap());
    wait_for(pod, old);
    guests.check("with a daemon and a replica of the version before");
    let loads = guests.load(7);
    pod.set_release(Release::This);
    replicas.replace(follower, pod).unwrap();
    replicas.leader(3);
    assert_eq!(spoken(pod), old.to_string(), "a daemon is old still");
    replace(pod, "h1", Role::NetFrontend);
    wait_for(pod, new);
    until("all daemons to hear of it", || (told(&mut replicas, new.minor) == DAEMONS).then_some(()));
    guests.check("with all of it new again");
    loads.finish();

    for vm in guests.vms {
        let log = vm.exec("dmesg").unwrap();
        assert!(!log.contains("I/O error"), "{log}");
    }
    let counters = pod.api().metrics().unwrap();
    let lost = counters.lines().filter(|it| it.starts_with("wadi_lease_errors_total") && !it.ends_with(" 0"));
    assert_eq!(lost.collect::<Vec<_>>(), [""; 0]);
}

/// All controllers, one after the other, followers first, become those of the pod's release.
fn replace_controllers(pod: &Pod, replicas: &mut Replicas, guests: &Guests<'_>, check: impl Fn(&Pod)) {
    let leader = replicas.leader(3);
    for replica in [(leader + 1) % 3, (leader + 2) % 3, leader] {
        replicas.replace(replica, pod).unwrap();
        replicas.leader(3);
        check(pod);
        guests.check(&format!("with another replica {replica}"));
    }
    let (known, speaks) = (pod.api().controllers().unwrap(), pod.release().protocol().to_string());
    // Controllers of 1.0 do not say.
    let said = |said: &Option<String>| said.as_ref().is_none_or(|said| *said == speaks);
    assert!(known.iter().all(|it| said(&it.protocol)), "not all speak {speaks}: {known:?}");
}

/// The controllers alone go back, and lead daemons that are all new: they take their joins, orders and reports. Then they go forth
/// again.
fn old_controllers_lead_new_daemons(pod: &mut Pod, replicas: &mut Replicas, guests: &Guests<'_>) {
    let (old, new) = (Release::Previous.protocol(), Release::This.protocol());
    let loads = guests.load(4);
    pod.set_release(Release::Previous);
    replace_controllers(pod, replicas, guests, |pod| wait_for(pod, old));
    waiting::wait_for("all daemons to hear of it", || told(replicas, old.minor) == DAEMONS);
    pod.set_release(Release::This);
    loads.finish();

    for _ in 0..2 {
        nic_fails_over(pod);
        guests.check("with an old controller that has moved its NIC");
    }

    // One dies and another one leaves in order, on each side; all join anew.
    let loads = guests.load(5);
    assert!(loads.go_on(), "the disk is in use when its daemons go");
    for (host, role) in [("h2", Role::BlkBackend), ("h1", Role::NetFrontend)] {
        pod.daemon(host, role).unwrap().kill().unwrap();
        pod.start_daemon(host, role).unwrap();
        pod.wait_until_joined().unwrap();
    }
    for (host, role) in [("h2", Role::NetBackend), ("h1", Role::BlkFrontend)] {
        replace(pod, host, role);
    }
    guests.check("with new daemons that joined at an old controller");

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
    loads.finish();

    assert_eq!(spoken(pod), old.to_string());
    assert_eq!(told(replicas, old.minor), DAEMONS);
    let loads = guests.load(6);
    replace_controllers(pod, replicas, guests, |_| {});
    wait_for(pod, new);
    waiting::wait_for("all daemons to hear of it", || told(replicas, new.minor) == DAEMONS);
    loads.finish();
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
