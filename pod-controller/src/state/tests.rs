//! Scenarios, one promise each.

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::objects::{NicPolicy, Object, ObjectId, PortObject, RateLimit, RegistrationState};
use pod_protocol::reports::DeviceReport;

use super::model::{MIB, check, devices_of, endpoint, join, nic, options, scrub_all, ssd};
use super::*;
use crate::api::EventKind;

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
    let link = DeviceId { host: HostId::new(3), name: "nic1".to_owned() };
    must(&mut state, &Command::Link { device: link, up: false, reason: "no cable".to_owned() });
    state
}

fn volume(name: &str, mib: u64) -> Command {
    Command::CreateVolume { name: name.to_owned(), size_bytes: mib * MIB, device: None }
}

fn instance(name: &str, nics: usize, volumes: &[&str]) -> Command {
    Command::CreateInstance {
        name: name.to_owned(),
        host: HostId::new(1),
        nics: vec![NicWish::default(); nics],
        volumes: volumes.iter().map(|name| (*name).to_owned()).collect(),
    }
}

fn pod_with_vm() -> State {
    let mut state = pod();
    must(&mut state, &volume("vol0", 16));
    must(&mut state, &instance("vm1", 1, &["vol0"]));
    state
}

fn nic_lease(state: &State) -> Lease {
    state.leases.values().find(|lease| lease.active_nic().is_some()).expect("a NIC").clone()
}

fn disk_lease(state: &State) -> Lease {
    state.leases.values().find(|lease| lease.volume().is_some()).expect("a disk").clone()
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

#[test]
fn instance_gets_a_remote_nic_and_its_backup() {
    let state = pod_with_vm();
    let lease = nic_lease(&state);
    assert_eq!(state.device_name(lease.active_nic().expect("active")), "h2/nic0");
    assert_eq!(state.device_name(lease.standby_nic().expect("standby")), "h3/nic0");
    assert_eq!(registration(&state, NET_BACKEND), Some(RegistrationState::Active));
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Standby));
    let port = port(&state);
    assert_eq!((port.socket.as_str(), port.device.as_str(), port.mtu), ("vm1-net0.sock", "net0", 1500));
    assert_ne!(port.active.channel, port.standby.expect("a backup").channel);
    assert!(port.mac.is_local() && !port.mac.is_multicast());
}

#[test]
fn own_host_comes_first_and_then_the_least_loaded() {
    let mut state = pod();
    let up = DeviceId { host: HostId::new(3), name: "nic1".to_owned() };
    must(&mut state, &Command::Link { device: up, up: true, reason: "cable".to_owned() });
    must(&mut state, &instance("vm1", 1, &[]));
    must(&mut state, &instance("vm2", 1, &[]));
    let used: Vec<String> = state
        .leases
        .values()
        .filter_map(|lease| lease.active_nic().map(|nic| state.device_name(nic)))
        .collect();
    assert_eq!(used, ["h2/nic0", "h3/nic1"], "spread over the pod, and not on the backup");

    join_as(&mut state, endpoint(2, Role::NetFrontend), 1);
    let local = Command::CreateInstance {
        name: "vm3".to_owned(),
        host: HostId::new(2),
        nics: vec![NicWish::default()],
        volumes: Vec::new(),
    };
    must(&mut state, &local);
    let lease = state.leases.values().last().expect("a lease");
    assert_eq!(state.device_name(lease.active_nic().expect("active")), "h2/nic0");
}

#[test]
fn lost_link_moves_the_lease_to_the_backup() {
    let mut state = pod_with_vm();
    let before = port(&state);
    let device = DeviceId { host: HostId::new(2), name: "nic0".to_owned() };
    let effects =
        must(&mut state, &Command::Link { device: device.clone(), up: false, reason: "carrier".to_owned() });
    assert_eq!(kinds(&effects), [EventKind::LinkDown, EventKind::Failover]);
    let after = port(&state);
    assert_eq!(after.active.channel, before.standby.expect("a backup").channel);
    assert_ne!(after.active.generation, before.active.generation);
    assert_eq!(after.tx_area, before.tx_area, "what was not sent yet stays where it is");
    assert_eq!(registration(&state, NET_BACKEND), Some(RegistrationState::Standby));
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Active));
    assert_eq!(state.failovers, 1);

    // It is not moved back by itself.
    must(&mut state, &Command::Link { device, up: true, reason: "carrier".to_owned() });
    assert_eq!(port(&state), after);
}

#[test]
fn lease_moves_once_a_backup_appears() {
    let mut state = pod_with_vm();
    must(&mut state, &Command::Gone { endpoint: BACKUP_BACKEND });
    let device = DeviceId { host: HostId::new(2), name: "nic0".to_owned() };
    let effects = must(&mut state, &Command::Link { device, up: false, reason: "carrier".to_owned() });
    assert_eq!(kinds(&effects), [EventKind::LinkDown, EventKind::Degraded]);
    let effects = join_as(&mut state, BACKUP_BACKEND, 2);
    assert!(kinds(&effects).contains(&EventKind::Failover));
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Active));
}

#[test]
fn lease_that_never_had_a_backup_moves_to_a_new_one() {
    let mut state = State::new(options(256));
    for id in [NET_FRONTEND, NET_BACKEND] {
        join_as(&mut state, id, 1);
    }
    must(&mut state, &instance("vm1", 1, &[]));
    let device = DeviceId { host: HostId::new(2), name: "nic0".to_owned() };
    must(&mut state, &Command::Link { device, up: false, reason: "carrier".to_owned() });
    let effects = join_as(&mut state, BACKUP_BACKEND, 1);
    assert!(kinds(&effects).contains(&EventKind::Failover));
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Active));
}

#[test]
fn silent_backend_is_fenced_and_waited_for_before_its_leases_move() {
    let mut state = pod_with_vm();
    let effects = must(&mut state, &Command::Silent { endpoint: NET_BACKEND });
    assert!(effects.contains(&Effect::Fence(NET_BACKEND)));
    assert_eq!(
        registration(&state, BACKUP_BACKEND),
        Some(RegistrationState::Standby),
        "not before the fence is seen"
    );
    // A heartbeat that comes too late changes nothing: the fence is up.
    must(&mut state, &Command::Back { endpoint: NET_BACKEND });
    must(&mut state, &Command::FenceExpired { endpoint: NET_BACKEND, incarnation: 99 });
    assert_eq!(state.failovers, 0);
    let effects = must(&mut state, &Command::FenceExpired { endpoint: NET_BACKEND, incarnation: 1 });
    assert_eq!(kinds(&effects), [EventKind::Failover]);
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Active));
}

#[test]
fn a_fenced_life_never_joins_again() {
    let mut state = pod_with_vm();
    silent(&mut state, NET_BACKEND);
    let again = join_command(NET_BACKEND, 1);
    refused(&mut state, &again);
    must(&mut state, &Command::FenceExpired { endpoint: NET_BACKEND, incarnation: 1 });
    refused(&mut state, &again);
    join_as(&mut state, NET_BACKEND, 2);
    assert_eq!(state.endpoints[&NET_BACKEND].presence, Presence::Joined);
}

#[test]
fn silence_alone_takes_nothing_from_who_has_no_substitute() {
    let mut state = pod_with_vm();
    for id in [NET_FRONTEND, BLK_FRONTEND, BLK_BACKEND] {
        let before = state.desired(id);
        let effects = must(&mut state, &Command::Silent { endpoint: id });
        assert_eq!(kinds(&effects), [EventKind::EndpointSilent]);
        assert_eq!(state.desired(id), before);
        must(&mut state, &Command::Back { endpoint: id });
    }
}

#[test]
fn rejoining_after_a_controller_restart_moves_nothing() {
    let mut state = pod_with_vm();
    let before = state.clone();
    for id in [NET_FRONTEND, BLK_FRONTEND, NET_BACKEND, BLK_BACKEND, BACKUP_BACKEND] {
        let desired = state.desired(id);
        let mut devices = devices_of(id, true);
        if id == BACKUP_BACKEND {
            devices[1] = nic("nic1", false, false);
        }
        let effects = must(
            &mut state,
            &Command::Join { endpoint: id, incarnation: 1, join: join(id.host.get(), devices) },
        );
        assert_eq!(effects, Vec::new());
        assert_eq!(state.desired(id), desired);
    }
    assert_eq!(
        (state.regions, state.leases, state.channels),
        (before.regions, before.leases, before.channels)
    );
}

#[test]
fn restarted_frontend_gets_everything_fresh() {
    let mut state = pod_with_vm();
    let before = port(&state);
    let old = nic_lease(&state).area.expect("an area").region;
    join_as(&mut state, NET_FRONTEND, 2);
    let after = port(&state);
    assert_ne!(after.tx_area, before.tx_area);
    assert_ne!(after.active.generation, before.active.generation);
    assert_eq!(after.active.channel, before.active.channel, "the channel keeps its name");
    let region = state.regions.get(old).expect("quarantined");
    assert_eq!(region.usage, RegionUse::Quarantined);
    assert!([NET_FRONTEND, NET_BACKEND, BACKUP_BACKEND].iter().all(|holder| region.holders.contains(holder)));

    for command in scrub_all(&state) {
        must(&mut state, &command);
    }
    assert_eq!(state.regions.get(old), None, "free again once all have let go");
}

#[test]
fn storage_backend_flushes_before_it_serves_again() {
    let mut state = pod_with_vm();
    let lease = disk_lease(&state);
    let area = lease.area.expect("an area").region;
    let frontend_before = state.desired(BLK_FRONTEND);
    join_as(&mut state, BLK_BACKEND, 2);
    assert_eq!(
        state.desired(BLK_FRONTEND),
        frontend_before,
        "the frontend keeps what it has until there is better"
    );
    assert!(state.desired(BLK_BACKEND).is_empty(), "nothing is served over a cache that was not flushed");
    assert_eq!(state.scrubs(BLK_BACKEND).keys().copied().collect::<Vec<_>>(), [area]);

    must(&mut state, &Command::Scrubbed { endpoint: BLK_BACKEND, incarnation: 1, region: area });
    assert!(state.desired(BLK_BACKEND).is_empty(), "an answer of the dead does not count");
    must(&mut state, &Command::Scrubbed { endpoint: BLK_BACKEND, incarnation: 2, region: area });
    assert!(state.desired(BLK_BACKEND).contains_key(&ObjectId::Volume(lease.id)));
    let channel = |objects: Objects| {
        objects
            .into_values()
            .find_map(|it| if let Object::Channel(it) = it { Some(it) } else { None })
            .expect("one")
    };
    let (old, new) = (channel(frontend_before), channel(state.desired(BLK_FRONTEND)));
    assert_eq!(old.id, new.id);
    assert!(new.generation > old.generation && new.outgoing != old.outgoing);
    assert_eq!(disk_lease(&state).area, lease.area, "data of requests under way stays where it is");
}

#[test]
fn leased_volume_is_not_deleted() {
    let mut state = pod_with_vm();
    let refusal = refused(&mut state, &Command::DeleteVolume { name: "vol0".to_owned() });
    assert_eq!(refusal.kind, RefusalKind::Leased);
    assert!(refusal.detail.contains("vm1"), "{refusal}");
    assert_eq!(refused(&mut state, &instance("vm2", 0, &["vol0"])).kind, RefusalKind::Leased);
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: false });
    must(&mut state, &Command::DeleteVolume { name: "vol0".to_owned() });
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut state = pod_with_vm();
    let on = |host: u16, nics: Vec<NicWish>| Command::CreateInstance {
        name: "vm2".to_owned(),
        host: HostId::new(host),
        nics,
        volumes: Vec::new(),
    };
    let wish = NicWish::default;
    for (command, kind) in [
        (volume("vol0", 1), RefusalKind::Exists),
        (volume("../etc", 1), RefusalKind::InvalidName),
        (volume("vol1", 0), RefusalKind::InvalidValue),
        (volume("vol1", 1 << 30), RefusalKind::NoRoom),
        (instance("vm1", 0, &[]), RefusalKind::Exists),
        (instance("VM", 0, &[]), RefusalKind::InvalidName),
        (instance("vm2", 0, &["nothing"]), RefusalKind::NotFound),
        (instance("vm2", 9, &[]), RefusalKind::InvalidValue),
        (on(9, vec![wish()]), RefusalKind::HostNotReady),
        (on(1, vec![NicWish { mtu: Some(9000), ..wish() }]), RefusalKind::NoDevice),
        (on(1, vec![NicWish { mtu: Some(1), ..wish() }]), RefusalKind::InvalidValue),
        (on(1, vec![NicWish { queue_pairs: Some(0), ..wish() }]), RefusalKind::InvalidValue),
        (on(1, vec![NicWish { mac: "01:00:00:00:00:01".parse().ok(), ..wish() }]), RefusalKind::InvalidValue),
        (on(1, vec![NicWish { mac: Some(port(&state).mac), ..wish() }]), RefusalKind::Exists),
        (Command::DeleteInstance { name: "vm9".to_owned(), force: false }, RefusalKind::NotFound),
        (Command::DeleteVolume { name: "vol9".to_owned() }, RefusalKind::NotFound),
    ] {
        assert_eq!(refused(&mut state, &command).kind, kind, "{command:?}");
    }
}

#[test]
fn sockets_of_two_instances_never_collide() {
    let mut state = pod();
    must(&mut state, &volume("b-c", 1));
    must(&mut state, &volume("c", 1));
    must(&mut state, &instance("a", 0, &["b-c"]));
    assert_eq!(refused(&mut state, &instance("a-b", 0, &["c"])).kind, RefusalKind::Exists);
}

#[test]
fn pool_without_room_refuses_and_keeps_nothing() {
    let mut state = State::new(options(24));
    for id in [NET_FRONTEND, NET_BACKEND, BACKUP_BACKEND] {
        join_as(&mut state, id, 1);
    }
    let mut created = 0;
    let refusal = loop {
        let command = instance(&format!("vm{created}"), 1, &[]);
        match state.apply(&command) {
            Ok(_) => created += 1,
            Err(refusal) => break refusal,
        }
        check(&state);
    };
    assert!(created > 0);
    assert_eq!(refusal.kind, RefusalKind::NoRoom);
    assert_eq!(state.instances.len(), created);
}

#[test]
fn hosts_cannot_take_each_others_names() {
    let mut state = pod();
    let mut stranger = join(4, Vec::new());
    stranger.host_name = "h1".to_owned();
    let id = endpoint(4, Role::NetFrontend);
    let command = Command::Join { endpoint: id, incarnation: 1, join: stranger };
    assert_eq!(refused(&mut state, &command).kind, RefusalKind::JoinConflict);
    let mut renamed = join(1, Vec::new());
    renamed.host_name = "other".to_owned();
    let command = Command::Join { endpoint: NET_FRONTEND, incarnation: 2, join: renamed };
    assert_eq!(refused(&mut state, &command).kind, RefusalKind::JoinConflict);
    let wrong_owner = join(1, vec![ssd("ssd0", 1)]);
    let command = Command::Join { endpoint: NET_FRONTEND, incarnation: 2, join: wrong_owner };
    assert_eq!(refused(&mut state, &command).kind, RefusalKind::JoinConflict);
}

#[test]
fn ssd_that_shrank_is_not_used() {
    let mut state = pod_with_vm();
    let command =
        Command::Join { endpoint: BLK_BACKEND, incarnation: 2, join: join(2, vec![ssd("ssd0", 8)]) };
    let effects = must(&mut state, &command);
    assert!(kinds(&effects).contains(&EventKind::DeviceFailed));
    let disk = state
        .desired(BLK_FRONTEND)
        .into_values()
        .find_map(|it| if let Object::Disk(it) = it { Some(it) } else { None });
    assert!(disk.expect("a disk").failed);
}

#[test]
fn another_pool_is_refused() {
    let mut state = pod_with_vm();
    let mut other = options(256);
    other.pool = uuid::Uuid::from_u128(1);
    assert_eq!(refused(&mut state, &Command::Configure { options: other }).kind, RefusalKind::InvalidValue);
    let mut larger = options(256);
    larger.tx_area = cxl_pool::LineCount::covering(4 * MIB);
    let before = state.regions.clone();
    must(&mut state, &Command::Configure { options: larger });
    assert_eq!(state.regions, before, "what is allocated stays");
}

fn silent(state: &mut State, endpoint: EndpointId) {
    must(state, &Command::Silent { endpoint });
}

fn disk_failed(state: &State) -> bool {
    let mut objects = state.desired(BLK_FRONTEND).into_values();
    objects
        .find_map(|object| if let Object::Disk(disk) = object { Some(disk.failed) } else { None })
        .expect("a disk")
}

#[test]
fn silent_host_loses_its_nic_at_once_and_its_disks_after_the_grace() {
    let mut state = pod_with_vm();
    let expired = Command::GraceExpired { endpoint: BLK_BACKEND, incarnation: 1 };
    silent(&mut state, NET_BACKEND);
    silent(&mut state, BLK_BACKEND);
    let moved = must(&mut state, &Command::FenceExpired { endpoint: NET_BACKEND, incarnation: 1 });
    assert!(kinds(&moved).contains(&EventKind::Failover));
    assert!(!disk_failed(&state), "guests wait");
    must(&mut state, &Command::Back { endpoint: BLK_BACKEND });
    must(&mut state, &expired);
    assert!(!disk_failed(&state) && state.endpoints[&BLK_BACKEND].presence == Presence::Joined);
    silent(&mut state, BLK_BACKEND);
    let fenced = must(&mut state, &expired);
    assert!(fenced.contains(&Effect::Fence(BLK_BACKEND)));
    assert!(!disk_failed(&state), "it may still write");
    let failed = must(&mut state, &Command::FenceExpired { endpoint: BLK_BACKEND, incarnation: 1 });
    assert!(kinds(&failed).contains(&EventKind::DiskFailed) && disk_failed(&state));
    let back = join_as(&mut state, BLK_BACKEND, 2);
    assert!(kinds(&back).contains(&EventKind::DiskBack) && !disk_failed(&state));
}

#[test]
fn adopted_pool_keeps_what_the_pod_is_made_of() {
    let mut state = pod_with_vm();
    let before = state.clone();
    let regions: Vec<_> = state.regions.iter().map(|region| region.id).collect();
    let mut other = state.options.clone();
    other.pool = uuid::Uuid::from_u128(7);
    refused(&mut state, &Command::Configure { options: other.clone() });
    must(&mut state, &Command::AdoptPool { options: other });
    assert_eq!(state.regions.iter().count(), 0);
    assert!(state.channels.values().all(|channel| channel.rings.is_none()));
    assert_eq!(state.volumes, before.volumes);
    assert_eq!(state.instances, before.instances);
    for id in [NET_FRONTEND, BLK_FRONTEND, NET_BACKEND, BLK_BACKEND, BACKUP_BACKEND] {
        join_as(&mut state, id, 2);
    }
    for command in scrub_all(&state) {
        must(&mut state, &command);
    }
    assert!(state.channels.values().all(|channel| channel.rings.is_some()));
    assert!(state.regions.iter().all(|region| !regions.contains(&region.id)), "numbers go on");
    for (id, lease) in &state.leases {
        assert!(lease.generation != before.leases[id].generation && lease.area.is_some());
    }
    assert!(port(&state).mac == port(&before).mac && !disk_failed(&state));
}

#[test]
fn reset_host_holds_nothing_and_can_be_deleted() {
    let mut state = pod_with_vm();
    let reset = Command::ResetHost { name: "h3".to_owned() };
    let delete = Command::DeleteHost { name: "h3".to_owned() };
    assert_eq!(refused(&mut state, &reset).kind, RefusalKind::HostAlive);
    assert_eq!(refused(&mut state, &delete).kind, RefusalKind::HostAlive);
    silent(&mut state, BACKUP_BACKEND);
    assert_eq!(refused(&mut state, &delete).kind, RefusalKind::NotReset);
    let effects = must(&mut state, &reset);
    assert!(effects.contains(&Effect::Fence(BACKUP_BACKEND)), "it may be frozen");
    must(&mut state, &delete);
    assert!(state.host_named("h3").is_none());
    assert!(state.devices.keys().all(|device| device.host.get() != 3));
    must(&mut state, &Command::Gone { endpoint: NET_BACKEND });
    must(&mut state, &Command::Gone { endpoint: BLK_BACKEND });
    let refusal = refused(&mut state, &Command::DeleteHost { name: "h2".to_owned() });
    assert_eq!(refusal.kind, RefusalKind::Leased);
}

#[test]
fn connected_instance_is_deleted_only_by_force() {
    let mut state = pod_with_vm();
    let lease = nic_lease(&state).id;
    must(&mut state, &Command::Attachment { endpoint: NET_FRONTEND, lease, connected: true });
    let delete = |force| Command::DeleteInstance { name: "vm1".to_owned(), force };
    assert_eq!(refused(&mut state, &delete(false)).kind, RefusalKind::Connected);
    must(&mut state, &delete(true));
    assert!(state.instances.is_empty());
}

#[test]
fn a_guest_is_offered_what_its_nic_can_do_whatever_its_backup_cannot() {
    let mut state = pod();
    let lesser = |name: &str| {
        let mut report = nic(name, true, true);
        if let DeviceReport::Nic { features, .. } = &mut report {
            *features = 0;
        }
        report
    };
    let join = join(3, vec![lesser("nic0"), nic("nic2", true, true)]);
    must(&mut state, &Command::Join { endpoint: BACKUP_BACKEND, incarnation: 2, join });
    must(&mut state, &instance("vm1", 1, &[]));
    // Rather the able one of two backups; the lesser one rather than none.
    let standby = |state: &State| nic_lease(state).standby_nic().map(|nic| nic.name.clone());
    assert_eq!((port(&state).features, standby(&state).as_deref()), (0b1011, Some("nic2")));
    let able = DeviceId { host: HostId::new(3), name: "nic2".to_owned() };
    must(&mut state, &Command::Link { device: able, up: false, reason: "no cable".to_owned() });
    assert_eq!((port(&state).features, standby(&state).as_deref()), (0b1011, Some("nic0")));
    let active = DeviceId { host: HostId::new(2), name: "nic0".to_owned() };
    must(&mut state, &Command::Link { device: active, up: false, reason: "no cable".to_owned() });
    assert_eq!(nic_lease(&state).active_nic().map(|nic| nic.name.as_str()), Some("nic0"));
    assert_eq!(port(&state).features, 0b1011, "what was offered cannot be taken back");
}

#[test]
fn what_an_instance_may_do_with_its_nic_changes_while_it_is_used() {
    let mut state = pod_with_vm();
    let change = |policy: NicPolicy| Command::ChangeNic {
        instance: "vm1".to_owned(),
        device: "net0".to_owned(),
        policy,
    };
    let limit = |packets| RateLimit { packets_per_second: packets, ..RateLimit::default() };
    let addresses = vec!["10.0.0.2".parse().expect("an address")];
    let policy = NicPolicy { transmit: limit(Some(1000)), addresses, ..NicPolicy::default() };
    assert_eq!(kinds(&must(&mut state, &change(policy.clone()))), [EventKind::NicChanged]);
    assert_eq!(kinds(&must(&mut state, &change(policy.clone()))), []);
    assert_eq!(port(&state).policy, policy);
    for backend in [NET_BACKEND, BACKUP_BACKEND] {
        let mut objects = state.desired(backend).into_values();
        assert!(objects.any(|it| matches!(it, Object::Registration(it) if it.policy == policy)), "{backend}");
    }
    for bad in [
        NicPolicy { receive: limit(Some(0)), ..NicPolicy::default() },
        NicPolicy { receive: RateLimit { burst_ms: 0, ..limit(None) }, ..NicPolicy::default() },
        NicPolicy { addresses: vec!["224.0.0.1".parse().expect("an address")], ..NicPolicy::default() },
    ] {
        assert_eq!(refused(&mut state, &change(bad)).kind, RefusalKind::InvalidValue);
    }
}

fn migrate(to: Option<(u16, &str)>) -> Command {
    let to = to.map(|(host, name)| DeviceId { host: HostId::new(host), name: name.to_owned() });
    Command::MigrateNic { instance: "vm1".to_owned(), device: "net0".to_owned(), to }
}

fn state_at(state: &State, id: EndpointId) -> Option<(RegistrationState, u16)> {
    state.desired(id).into_values().find_map(|object| match object {
        Object::Registration(it) => Some((it.state, it.generation.get())),
        _ => None,
    })
}

#[test]
fn a_lease_is_moved_in_order_and_drains_where_it_was() {
    let mut state = pod_with_vm();
    let before = port(&state);
    let effects = must(&mut state, &migrate(None));
    assert_eq!(kinds(&effects), [EventKind::Migrated]);
    let after = port(&state);
    assert_eq!(after.draining, Some(before.active), "with the generation that it had");
    assert_eq!(after.active.generation.get(), before.active.generation.get() + 1);
    assert_eq!(state_at(&state, BACKUP_BACKEND), Some((RegistrationState::Active, 2)));
    assert_eq!(state_at(&state, NET_BACKEND), Some((RegistrationState::Draining, 1)));
    assert_eq!(refused(&mut state, &migrate(None)).kind, RefusalKind::Busy);

    let drained = state.drains().next().expect("a drain");
    must(&mut state, &Command::DrainExpired { lease: drained.0, generation: drained.1 });
    assert_eq!(port(&state).draining, None);
    assert_eq!(state_at(&state, NET_BACKEND), Some((RegistrationState::Standby, 2)));
    let there = nic_lease(&state);
    must(&mut state, &Command::DrainExpired { lease: drained.0, generation: drained.1 });
    assert_eq!(nic_lease(&state), there, "told twice");

    // And back again.
    must(&mut state, &migrate(Some((2, "nic0"))));
    assert_eq!(state_at(&state, NET_BACKEND), Some((RegistrationState::Active, 3)));
    assert_eq!(state.failovers, 0);
}

#[test]
fn a_move_is_refused_where_it_cannot_go() {
    let mut state = pod_with_vm();
    assert_eq!(
        refused(&mut state, &migrate(Some((2, "nic0")))).kind,
        RefusalKind::InvalidValue,
        "it is there"
    );
    assert_eq!(refused(&mut state, &migrate(Some((3, "nic1")))).kind, RefusalKind::NoDevice, "no link");
    assert_eq!(refused(&mut state, &migrate(Some((2, "ssd0")))).kind, RefusalKind::NotFound);
    let other = Command::MigrateNic { instance: "vm1".to_owned(), device: "vol0".to_owned(), to: None };
    assert_eq!(refused(&mut state, &other).kind, RefusalKind::NotFound);
    let small = DeviceReport::Nic {
        name: "nic2".to_owned(),
        driver: "null".to_owned(),
        mac: None,
        up: true,
        speed_mbps: 1,
        mtu: 1400,
        features: 0,
        backup: false,
    };
    let join = join(3, vec![nic("nic0", true, true), small]);
    must(&mut state, &Command::Join { endpoint: BACKUP_BACKEND, incarnation: 2, join });
    assert_eq!(
        refused(&mut state, &migrate(Some((3, "nic2")))).kind,
        RefusalKind::InvalidValue,
        "a small MTU"
    );
}

#[test]
fn a_nic_that_is_lost_while_it_drains_is_given_up() {
    for lost in [2, 3] {
        let mut state = pod_with_vm();
        must(&mut state, &migrate(None));
        let device = DeviceId { host: HostId::new(lost), name: "nic0".to_owned() };
        must(&mut state, &Command::Link { device, up: false, reason: "no cable".to_owned() });
        assert_eq!(port(&state).draining, None);
        let on = nic_lease(&state).active_nic().map(|nic| nic.host.get());
        assert_eq!(on, Some(if lost == 2 { 3 } else { 2 }), "it goes back if the new one is lost");
    }
    // A frontend that is restarted knows nothing of it.
    let mut state = pod_with_vm();
    must(&mut state, &migrate(None));
    join_as(&mut state, NET_FRONTEND, 2);
    assert_eq!(state.drains().count(), 0);
}

#[test]
fn leases_go_home_when_told_and_only_those_that_moved_by_themselves() {
    let mut state = pod_with_vm();
    let home = DeviceId { host: HostId::new(2), name: "nic0".to_owned() };
    let link = |up| Command::Link { device: home.clone(), up, reason: "cable".to_owned() };
    assert_eq!(state.missed_homes().count(), 0);
    must(&mut state, &link(false));
    assert_eq!(state.missed_homes().count(), 0, "it does not work yet");
    assert_eq!(refused(&mut state, &Command::FailBack { device: home.clone() }).kind, RefusalKind::NoDevice);
    must(&mut state, &link(true));
    assert_eq!(state.missed_homes().collect::<Vec<_>>(), [&home]);
    let effects = must(&mut state, &Command::FailBack { device: home.clone() });
    assert_eq!(kinds(&effects), [EventKind::FailedBack]);
    assert_eq!(nic_lease(&state).active_nic(), Some(&home));
    assert_eq!(state_at(&state, BACKUP_BACKEND), Some((RegistrationState::Draining, 2)));
    let drained = state.drains().next().expect("a drain");
    must(&mut state, &Command::DrainExpired { lease: drained.0, generation: drained.1 });

    // Where somebody puts it, there it stays.
    must(&mut state, &migrate(None));
    assert_eq!(state.missed_homes().count(), 0);
}

#[test]
fn nothing_moves_to_a_nic_that_is_held_unless_there_is_no_other() {
    let mut state = pod_with_vm();
    let backup = DeviceId { host: HostId::new(3), name: "nic0".to_owned() };
    let hold = Command::HoldLink { device: backup.clone(), reason: "flaps".to_owned() };
    assert_eq!(kinds(&must(&mut state, &hold)), [EventKind::LinkHeld]);
    assert_eq!(kinds(&must(&mut state, &hold)), [], "once");
    assert_eq!(refused(&mut state, &migrate(None)).kind, RefusalKind::NoDevice);
    let report = nic("nic2", true, true);
    let join = join(3, vec![nic("nic0", true, true), report]);
    must(&mut state, &Command::Join { endpoint: BACKUP_BACKEND, incarnation: 1, join });
    let standby = |state: &State| nic_lease(state).standby_nic().map(|nic| nic.name.clone());
    assert_eq!(standby(&state).as_deref(), Some("nic2"), "rather one that is trusted");
    for name in ["nic2", "nic0"] {
        let device =
            DeviceId { host: HostId::new(if name == "nic2" { 3 } else { 2 }), name: name.to_owned() };
        must(&mut state, &Command::Link { device, up: false, reason: "no cable".to_owned() });
    }
    let release = Command::ReleaseLink { device: backup.clone(), reason: "calm".to_owned() };
    assert_eq!(kinds(&must(&mut state, &release)).first(), Some(&EventKind::LinkReleased));
    assert_eq!(nic_lease(&state).active_nic(), Some(&backup));
}

#[test]
fn a_failed_nic_that_is_back_is_used_again() {
    let mut state = pod_with_vm();
    let device = DeviceId { host: HostId::new(2), name: "nic0".to_owned() };
    let failed = Command::DeviceFailed { device: device.clone(), reason: "it was deleted".to_owned() };
    must(&mut state, &failed);
    assert_eq!(nic_lease(&state).active_nic().map(|nic| nic.host.get()), Some(3));
    must(&mut state, &Command::Link { device: device.clone(), up: true, reason: "carrier".to_owned() });
    assert!(matches!(state.devices[&device].health, Health::Failed(_)), "a link is not enough");
    let back = |up| Command::DeviceBack { device: device.clone(), report: nic("nic0", up, false) };
    assert_eq!(kinds(&must(&mut state, &back(false))), [EventKind::DeviceBack]);
    assert!(matches!(state.devices[&device].health, Health::Down(_)));
    must(&mut state, &Command::Link { device: device.clone(), up: true, reason: "carrier".to_owned() });
    must(&mut state, &migrate(Some((2, "nic0"))));
    assert_eq!(nic_lease(&state).active_nic(), Some(&device));
}
