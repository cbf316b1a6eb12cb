//! When a controller has backups chosen after a failover.

use cxl_pool::{HostId, Role};
use pod_protocol::protocol::Protocol;
use pod_state::model::{create_instance, endpoint, join, nic, options};
use pod_state::{NicWish, Options};

use super::super::listener::Listener;
use super::*;
use crate::link_policy::FailBack;

/// A controller of hosts with a NIC each, and its time: h2 with an ordinary one, on which an instance is, the others with
/// backups. Each has room for one lease.
fn scene() -> (Conductor<Listener>, Instant) {
    let mut state =
        State::new(Options { protocol_minor: Protocol::DEFERS_BACKUPS, nic_leases_max: 1, ..options(256) });
    for host in 2..=5 {
        let devices = vec![nic("nic0", true, host > 2)];
        for (role, devices) in [(Role::NetFrontend, Vec::new()), (Role::NetBackend, devices)] {
            let id = endpoint(host, role);
            state.apply(&Command::Join { endpoint: id, incarnation: 1, join: join(host, devices) }).unwrap();
        }
    }
    state.apply(&instance("a")).unwrap();
    let second = Duration::from_secs(1);
    let delays = Delays { fence: second, blk_grace: second, drain: second };
    let fail_back = FailBack::default();
    let links = LinkPolicy { flaps: 0, flap_window: second, hold: second, fail_back, stable: second };
    let policies = (delays, links, BalancePolicy::default());
    (Conductor::new(Listener::default(), state, 1, policies), Instant::now())
}

fn instance(name: &str) -> Command {
    create_instance(name, 2, vec![NicWish::default()], &[])
}

fn link(host: u16, up: bool) -> Command {
    let device = DeviceId { host: HostId::new(host), name: "nic0".into() };
    Command::Link { device, up, reason: "its cable".to_owned() }
}

fn hosts_of(conductor: &Conductor<Listener>, instance: &str) -> [Option<u16>; 2] {
    let state = conductor.state();
    let lease = &state.leases[&state.instance_named(instance).unwrap().nics[0]];
    [lease.active_nic(), lease.standby_nic()].map(|nic| nic.map(|nic| nic.host.get()))
}

#[test]
fn the_turn_after_a_failover_is_due_at_once_and_chooses_backups() {
    let (mut conductor, now) = scene();
    assert_eq!(hosts_of(&conductor, "a"), [Some(2), Some(3)]);
    let Ok(due) = conductor.turn(vec![(link(2, false), ())], now);
    assert_eq!((hosts_of(&conductor, "a"), due), ([Some(3), Some(2)], Some(now)));
    let Ok(due) = conductor.turn(Vec::new(), now);
    assert_eq!((hosts_of(&conductor, "a"), due), ([Some(3), Some(4)], None));
}

#[test]
fn a_second_failure_waits_for_no_backups_of_the_first() {
    let (mut conductor, now) = scene();
    let Ok(_) = conductor.turn(vec![(link(2, false), ()), (link(3, false), ())], now);
    assert_eq!(hosts_of(&conductor, "a")[0], Some(4));
    assert_eq!(conductor.state().failovers, 2);
}

#[test]
fn what_is_made_in_the_turn_of_a_failover_takes_no_backups_room() {
    let (mut conductor, now) = scene();
    let Ok(_) = conductor.turn(vec![(link(2, false), ()), (instance("b"), ())], now);
    assert_eq!(hosts_of(&conductor, "a"), [Some(3), Some(4)]);
    assert_eq!(hosts_of(&conductor, "b"), [Some(5), None]);
}
