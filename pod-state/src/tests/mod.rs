//! Scenarios, one promise each.

use cxl_pool::{EndpointId, HostId, Role};
use pod_api::EventKind;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::{
    NicPolicy, Object, ObjectId, PortObject, Priority, Qos, RateLimit, RegistrationState,
};
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::{DeviceReport, Join};

use super::model::{MIB, check, create_instance, devices_of, endpoint, join, nic, options, scrub_all, ssd};
use super::*;

mod absent;
mod allocation;
mod backups;
mod crowded;
mod drain;
mod fabric;
mod failover;
mod groups;
mod guest_ram;
mod hotplug;
mod in_need;
mod labels;
mod large_fabric;
mod live_migration;
mod moving;
mod orderly;
mod packing;
mod priorities;
mod rails;
mod read_only;
mod requests;
mod reservations;
mod restart;
mod versions;

const NET_FRONTEND: EndpointId = EndpointId::new(HostId::new(1), Role::NetFrontend);
const BLK_FRONTEND: EndpointId = EndpointId::new(HostId::new(1), Role::BlkFrontend);
const NET_BACKEND: EndpointId = EndpointId::new(HostId::new(2), Role::NetBackend);
const BACKUP_BACKEND: EndpointId = EndpointId::new(HostId::new(3), Role::NetBackend);
const BLK_BACKEND: EndpointId = EndpointId::new(HostId::new(2), Role::BlkBackend);

fn must(state: &mut State, command: &Command) -> Vec<Effect> {
    let effects = state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
    check(state);
    effects
}

fn refused(state: &mut State, command: &Command) -> Refusal {
    let before = state.clone();
    let refusal = state.apply(command).expect_err("refused");
    assert_eq!(*state, before, "a refusal changed something");
    refusal
}

fn join_command(id: EndpointId, incarnation: u64) -> Command {
    Command::Join { endpoint: id, incarnation, join: join(id.host.get(), devices_of(id, true)) }
}

fn join_as(state: &mut State, id: EndpointId, incarnation: u64) -> Vec<Effect> {
    must(state, &join_command(id, incarnation))
}

/// The pod of the demo: h1 with frontends, h2 with a NIC and an SSD, h3 with the backup NIC.
fn pod() -> State {
    let mut state = State::new(options(256));
    for id in [NET_FRONTEND, BLK_FRONTEND, NET_BACKEND, BLK_BACKEND, BACKUP_BACKEND] {
        join_as(&mut state, id, 1);
    }
    // Only h2's NIC is an ordinary one here.
    let link = DeviceId { host: HostId::new(3), name: "nic1".into() };
    must(&mut state, &Command::Link { device: link, up: false, reason: "no cable".to_owned() });
    state
}

fn volume(name: &str, mib: u64) -> Command {
    Command::CreateVolume {
        name: name.to_owned(),
        size_bytes: mib * MIB,
        device: None,
        replicas: 1,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    }
}

/// The same on this SSD.
fn volume_on(device: &DeviceId, name: &str, mib: u64) -> Command {
    let mut command = volume(name, mib);
    if let Command::CreateVolume { device: wanted, .. } = &mut command {
        *wanted = Some(device.clone());
    }
    command
}

fn instance(name: &str, nics: usize, volumes: &[&str]) -> Command {
    create_instance(name, 1, vec![NicWish::default(); nics], volumes)
}

fn pod_with_vm() -> State {
    let mut state = pod();
    must(&mut state, &volume("vol0", 16));
    must(&mut state, &instance("vm1", 1, &["vol0"]));
    state
}

fn attached(endpoint: EndpointId, lease: LeaseId, running: bool) -> Command {
    Command::Attachment { endpoint, lease, connected: true, running, write_through: false, untold: false }
}

fn speak(state: &mut State, minor: u16) {
    let speaking = state.speaking(minor);
    must(state, &speaking);
}

/// No VMM uses the device any more, or none came to it.
fn unattached(endpoint: EndpointId, lease: LeaseId) -> Command {
    Command::Attachment {
        endpoint,
        lease,
        connected: false,
        running: false,
        write_through: false,
        untold: false,
    }
}

fn nic_lease(state: &State) -> Lease {
    state.leases.values().find(|lease| lease.active_nic().is_some()).expect("a NIC").clone()
}

fn disk_lease(state: &State) -> Lease {
    state.leases.values().find(|lease| lease.volume().is_some()).expect("a disk").clone()
}

fn disk_failed(state: &State) -> bool {
    let mut objects = state.desired(BLK_FRONTEND).into_values();
    objects
        .find_map(|object| if let Object::Disk(disk) = object { Some(disk.failed) } else { None })
        .expect("a disk")
}

fn port(state: &State) -> PortObject {
    let mut objects = state.desired(NET_FRONTEND).into_values();
    objects
        .find_map(|object| if let Object::Port(port) = object { Some(port) } else { None })
        .expect("a port")
}

fn registration(state: &State, backend: EndpointId) -> Option<RegistrationState> {
    state.desired(backend).into_values().find_map(|object| match object {
        Object::Registration(it) => Some(it.state),
        _ => None,
    })
}

fn kinds(effects: &[Effect]) -> Vec<EventKind> {
    effects
        .iter()
        .filter_map(|effect| if let Effect::Event { kind, .. } = effect { Some(*kind) } else { None })
        .collect()
}
