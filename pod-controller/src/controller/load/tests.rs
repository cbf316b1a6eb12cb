use std::time::Duration;

use cxl_pool::{HostId, Role};
use pod_protocol::telemetry::{DeviceTelemetry, LeaseTelemetry, Telemetry};
use pod_state::model::{endpoint, guest_with_volume, pod_with_ssds, ssd_of};

use super::super::conductor::Delays;
use super::super::listener::Listener;
use super::*;
use crate::balance::{BalanceMode, BalancePolicy, ReliefPolicy};
use crate::link_policy::LinkPolicy;

/// A controller of two SSDs, of which the first does too much, and its time.
struct Scene {
    conductor: Conductor<Listener>,
    now: Instant,
    requests: u64,
}

impl Scene {
    fn new() -> Self {
        let mut state = pod_with_ssds(&[(Some(1000), None); 2]);
        for name in ["one", "two"] {
            guest_with_volume(&mut state, name, 4, 2, 1).expect("there is room");
        }
        let second = Duration::from_secs(1);
        let delays = Delays { fence: second, blk_grace: second, drain: second };
        let policy = BalancePolicy::default();
        let ssds = ReliefPolicy { mode: BalanceMode::Move, windows: 2, ..policy.ssds };
        let fail_back = crate::link_policy::FailBack::default();
        let links = LinkPolicy { flaps: 0, flap_window: second, hold: second, fail_back, stable: second };
        let policies = (delays, links, BalancePolicy { ssds, ..policy });
        let conductor = Conductor::new(Listener::default(), state, 1, policies);
        Self { conductor, now: Instant::now(), requests: 0 }
    }

    /// A second passes, in which somebody has a wish.
    fn pass(&mut self, wish: Option<Command>) {
        self.now += Duration::from_secs(1);
        self.requests += 450;
        for host in [2, 3] {
            let done = if host == 2 { self.requests } else { 0 };
            let device = DeviceTelemetry {
                name: "ssd0".to_owned(),
                operations: 2 * done,
                ..DeviceTelemetry::default()
            };
            let leases = self.conductor.state.leases.values();
            let leases = leases.map(|it| LeaseTelemetry { reads: done, ..LeaseTelemetry::new(it.id) });
            let telemetry =
                Telemetry { leases: leases.collect(), devices: vec![device], ..Telemetry::default() };
            self.conductor.load.note(endpoint(host, Role::BlkBackend), self.now, &telemetry);
        }
        let Ok(_) = self.conductor.turn(wish.into_iter().map(|it| (it, ())).collect(), self.now);
    }

    fn told(&self, of: EventKind) -> Vec<(&str, &str)> {
        let told = self.conductor.world.told.iter().filter(|(kind, ..)| *kind == of);
        told.map(|(_, subject, message)| (subject.as_str(), message.as_str())).collect()
    }
}

#[test]
fn a_volume_that_moves_is_told_of_with_its_instance() {
    let mut scene = Scene::new();
    for _ in 0..10 {
        scene.pass(None);
    }
    assert_eq!(scene.told(EventKind::Balanced), [("vm-one", "one moves from h2/ssd0 to h3/ssd0")]);
    let overloaded = scene.told(EventKind::Overloaded);
    assert!(
        matches!(overloaded[..], [("h2/ssd0", it)] if it.contains("it does 900 requests/s: moving one of vm-one")),
        "{overloaded:?}"
    );
    let volume = scene.conductor.state.volume_named("one").expect("it is there");
    assert!(volume.replica_on(&ssd_of(3)).is_some());
}

#[test]
fn another_policy_holds_at_once_and_counts_anew() {
    let mut scene = Scene::new();
    scene.pass(None);
    let moves = scene.conductor.load.picture(scene.now).policy;
    let off = BalancePolicy { ssds: ReliefPolicy { mode: BalanceMode::Off, ..moves.ssds }, ..moves };
    scene.conductor.world.policy = Some(off);
    for _ in 0..10 {
        scene.pass(None);
    }
    assert_eq!(scene.told(EventKind::Balanced), []);
    assert_eq!(scene.conductor.world.shown, Some(off));
    scene.conductor.world.policy = Some(moves);
    scene.pass(None);
    assert_eq!(scene.told(EventKind::Balanced), [], "it takes two windows");
    scene.pass(None);
    scene.pass(None);
    assert_eq!(scene.told(EventKind::Balanced).len(), 1);
    assert_eq!(scene.conductor.world.shown, Some(moves));
}

#[test]
fn a_move_that_is_refused_is_told_of_once() {
    let mut scene = Scene::new();
    for _ in 0..2 {
        scene.pass(None);
    }
    // Somebody has the same volume get a replica just before.
    let mirror = Command::AddReplica { name: "one".to_owned(), device: None, replaces: None };
    scene.pass(Some(mirror));
    for _ in 0..20 {
        scene.pass(None);
    }
    assert!(scene.told(EventKind::Balanced).is_empty());
    let overloaded = scene.told(EventKind::Overloaded);
    let refused = overloaded.iter().filter(|(_, told)| told.starts_with("one does not move to h3/ssd0: "));
    assert_eq!(refused.count(), 1, "{overloaded:?}");
    let volume = scene.conductor.state.volume_named("one").expect("it is there");
    assert!(volume.touches(HostId::new(2)) && volume.touches(HostId::new(3)));
}
