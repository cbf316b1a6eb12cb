use cxl_pool::{HostId, Role};
use pod_state::NicWish;
use pod_state::model::{create_instance, join, nic, options};

use super::super::listener::Listener;
use super::*;
use crate::link_policy::FailBack;

const BACKEND: EndpointId = EndpointId::new(HostId::new(2), Role::NetBackend);

/// What is known of the backend once these have been heard, all in one turn.
fn presence_after(events: impl IntoIterator<Item = PortEvent<u64, ()>>) -> Option<Presence> {
    let second = Duration::from_secs(1);
    let delays = Delays { fence: second, blk_grace: second, drain: second };
    let links = LinkPolicy {
        flaps: 0,
        flap_window: second,
        hold: second,
        fail_back: FailBack::default(),
        stable: second,
    };
    let listener = Listener { events: events.into_iter().collect(), ..Listener::default() };
    let mut conductor =
        Conductor::new(listener, State::new(options(64)), 1, (delays, links, BalancePolicy::default()));
    let Ok(_) = conductor.turn(Vec::new(), Instant::now());
    assert!(conductor.world.events.is_empty());
    conductor.state.endpoints.get(&BACKEND).map(|known| known.presence)
}

fn joins() -> [PortEvent<u64, ()>; 2] {
    [
        PortEvent::Appeared { endpoint: BACKEND, incarnation: 1, pid: 1 },
        PortEvent::Joined { endpoint: BACKEND, request: (), join: join(2, Vec::new()) },
    ]
}

/// A turn in which much is heard may take in what came with several looks at the pool.
#[test]
fn what_is_heard_of_whoever_joins_in_the_same_turn_counts() {
    let (silent, back) =
        (PortEvent::Silent { endpoint: BACKEND, for_ms: 200 }, PortEvent::Back { endpoint: BACKEND });
    assert_eq!(presence_after(joins()), Some(Presence::Joined));
    assert_eq!(
        presence_after(joins().into_iter().chain([PortEvent::Gone { endpoint: BACKEND }])),
        Some(Presence::Gone)
    );
    assert_eq!(presence_after(joins().into_iter().chain([silent.clone()])), Some(Presence::Silent));
    assert_eq!(presence_after(joins().into_iter().chain([silent, back])), Some(Presence::Joined));
    assert_eq!(presence_after([PortEvent::Gone { endpoint: BACKEND }]), None);
}

/// Hosts may have been told otherwise than their controller for how long they may act unseen.
#[test]
fn who_may_act_for_longer_than_its_controller_knows_is_waited_for() {
    let now = Instant::now();
    let due = |fence_ms: Option<u64>| {
        let (second, mut joins) = (Duration::from_secs(1), joins());
        let delays = Delays { fence: second, blk_grace: second, drain: second };
        let fail_back = FailBack::default();
        let links = LinkPolicy { flaps: 0, flap_window: second, hold: second, fail_back, stable: second };
        if let PortEvent::Joined { join, .. } = &mut joins[1] {
            join.fence_ms = fence_ms;
        }
        let listener = Listener { events: joins.into(), ..Listener::default() };
        let policies = (delays, links, BalancePolicy::default());
        let mut conductor = Conductor::new(listener, State::new(options(64)), 1, policies);
        let Ok(_) = conductor.turn(Vec::new(), now);
        conductor.act(&Effect::Fence { endpoint: BACKEND, incarnation: 1 });
        let (_, due) = conductor.fences[&BACKEND];
        due.duration_since(now)
    };
    let short = Duration::from_millis(900);
    for fence_ms in [None, Some(20), Some(250)] {
        let due = due(fence_ms);
        assert!(due >= short && due < 10 * short, "{fence_ms:?}: {due:?}");
    }
    assert!(due(Some(60_000)) >= Duration::from_secs(66));
}

/// What a controller finds out as it begins, when nobody can be told anything, is not what its first turn has to tell.
#[test]
fn what_the_first_turn_decides_is_seen() {
    let mut state = State::new(options(256));
    for role in [Role::NetFrontend, Role::NetBackend] {
        let id = EndpointId::new(BACKEND.host, role);
        let devices = if role == Role::NetBackend { vec![nic("nic0", true, false)] } else { Vec::new() };
        let join = Command::Join { endpoint: id, incarnation: 1, join: join(2, devices) };
        state.apply(&join).expect("there is room");
    }
    let second = Duration::from_secs(1);
    let delays = Delays { fence: second, blk_grace: second, drain: second };
    let fail_back = FailBack::default();
    let links = LinkPolicy { flaps: 0, flap_window: second, hold: second, fail_back, stable: second };
    let policies = (delays, links, BalancePolicy::default());
    let mut conductor = Conductor::new(Listener::default(), state, 2, policies);
    let Ok(()) = conductor.resume(Vec::new(), Instant::now());
    // Somebody who joins has to be told once that is kept: nothing of this turn is found out ahead.
    let third = EndpointId::new(HostId::new(3), Role::NetFrontend);
    conductor.world.events.extend([
        PortEvent::Appeared { endpoint: third, incarnation: 1, pid: 1 },
        PortEvent::Joined { endpoint: third, request: (), join: join(3, Vec::new()) },
    ]);
    let create = create_instance("vm", 2, vec![NicWish::default()], &[]);
    let Ok(_) = conductor.turn(vec![(create, ())], Instant::now());
    let lease = conductor.state.instance_named("vm").expect("it was made").nics[0];
    let waits = conductor.reconciler.waiting().here.remove(&lease);
    assert_eq!(waits.as_deref(), Some("h2/net-frontend to join"));
}
