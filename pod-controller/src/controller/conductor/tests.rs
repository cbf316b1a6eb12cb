use cxl_pool::{HostId, Role};
use pod_state::model::{join, options};

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
