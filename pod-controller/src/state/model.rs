//! Random commands, and what must hold after each of them whatever they are.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{Area, EndpointId, HostId, LineCount, LineOffset, Role};
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::{DiskObject, Object, ObjectId, PortObject, RegistrationState};
use pod_protocol::reports::{DeviceReport, Join};
use proptest::prelude::*;
use uuid::Uuid;

use super::*;

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn options(pool_mib: u64) -> Options {
    let lines = |bytes: u64| LineCount::covering(bytes);
    Options {
        pool: Uuid::from_u128(0xabcd << 112),
        data: Area { start: LineOffset::new(2 * MIB / 64), lines: lines(pool_mib * MIB) },
        tx_area: lines(2 * MIB),
        rx_area: lines(4 * MIB),
        data_area: lines(2 * MIB),
        net_slots: 1024,
        blk_slots: 256,
        rx_quota_buffers: 256,
        disk_queues: 1,
        socket_name_bytes_max: 80,
    }
}

pub(crate) fn endpoint(host: u16, role: Role) -> EndpointId {
    EndpointId::new(HostId::new(host), role)
}

pub(crate) fn join(host: u16, devices: Vec<DeviceReport>) -> Join {
    Join {
        host_name: format!("h{host}"),
        software: "test 1".to_owned(),
        pid: 7,
        devices,
        memory_failures: Vec::new(),
    }
}

pub(crate) fn nic(name: &str, up: bool, backup: bool) -> DeviceReport {
    DeviceReport::Nic {
        name: name.to_owned(),
        driver: "null".to_owned(),
        mac: None,
        up,
        speed_mbps: 10_000,
        mtu: 1500,
        features: 0b1011,
        backup,
    }
}

pub(crate) fn ssd(name: &str, mib: u64) -> DeviceReport {
    DeviceReport::Ssd {
        name: name.to_owned(),
        driver: "null".to_owned(),
        size_bytes: mib * MIB,
        block_bytes: 512,
        table: None,
        reserved_bytes: 0,
    }
}

/// What endpoints of a host report: host 1 has none, host 2 a NIC and an SSD, host 3 a backup NIC, another NIC, an SSD.
pub(crate) fn devices_of(endpoint: EndpointId, up: bool) -> Vec<DeviceReport> {
    match (endpoint.host.get(), endpoint.role) {
        (2, Role::NetBackend) => vec![nic("nic0", up, false)],
        (3, Role::NetBackend) => vec![nic("nic0", true, true), nic("nic1", up, false)],
        (2, Role::BlkBackend) => vec![ssd("ssd0", 64)],
        (3, Role::BlkBackend) => vec![ssd("ssd0", 32)],
        _ => Vec::new(),
    }
}

/// A step of a run. Numbers pick from what there is, so that most steps do something.
#[derive(Clone, Debug)]
enum Step {
    Join { host: u16, role: usize, restart: bool, up: bool },
    Silent { host: u16, role: usize },
    Back { host: u16, role: usize },
    Gone { host: u16, role: usize },
    FenceExpired { host: u16 },
    Link { host: u16, nic: u8, up: bool },
    Failed { host: u16, nic: u8 },
    DeviceBack { host: u16, nic: u8, up: bool },
    Migrate { name: u8, to: Option<(u16, u8)> },
    Drained { lease: usize },
    FailBack { host: u16, nic: u8 },
    Drain { host: u16, device: Option<bool>, on: bool },
    Trust { host: u16, nic: u8, held: bool },
    Attach { lease: usize, incoming: bool, connected: bool, running: bool },
    MoveTo { name: u8, host: u16 },
    StayHere { name: u8 },
    MovedTo { name: u8, force: bool },
    Scrub { endpoint: usize, region: usize },
    ScrubAll,
    CreateVolume { name: u8, mib: u64, device: Option<u16>, replicas: u8 },
    CreateStriped { name: u8, mib: u64 },
    Replica { volume: usize, number: u32, epoch: u64, says: Says },
    AddReplica { name: u8, device: Option<u16>, replaces: Option<u16> },
    RemoveReplica { name: u8, host: u16 },
    DeleteVolume { name: u8 },
    CreateInstance { name: u8, host: u16, nics: usize, volumes: Vec<u8>, mac: Option<u8> },
    DeleteInstance { name: u8 },
}

/// What a frontend says of a replica.
#[derive(Clone, Copy, Debug)]
enum Says {
    Failed,
    Synced,
    Left,
}

const ROLES: [Role; 4] = [Role::NetFrontend, Role::NetBackend, Role::BlkFrontend, Role::BlkBackend];

fn step() -> impl Strategy<Value = Step> {
    let (host, role) = (1_u16..4, 0_usize..4);
    prop_oneof![
        8 => (host.clone(), role.clone(), any::<bool>(), prop::bool::weighted(0.8))
            .prop_map(|(host, role, restart, up)| Step::Join { host, role, restart, up }),
        2 => (host.clone(), role.clone()).prop_map(|(host, role)| Step::Silent { host, role }),
        1 => (host.clone(), role.clone()).prop_map(|(host, role)| Step::Back { host, role }),
        1 => (host.clone(), role).prop_map(|(host, role)| Step::Gone { host, role }),
        1 => host.clone().prop_map(|host| Step::FenceExpired { host }),
        3 => (host.clone(), 0_u8..2, any::<bool>()).prop_map(|(host, nic, up)| Step::Link { host, nic, up }),
        1 => (host.clone(), 0_u8..2).prop_map(|(host, nic)| Step::Failed { host, nic }),
        1 => (host.clone(), 0_u8..2, any::<bool>()).prop_map(|(host, nic, up)| Step::DeviceBack { host, nic, up }),
        3 => (0_u8..5, prop::option::of((host.clone(), 0_u8..2))).prop_map(|(name, to)| Step::Migrate { name, to }),
        2 => (0_usize..8).prop_map(|lease| Step::Drained { lease }),
        1 => (host.clone(), 0_u8..2).prop_map(|(host, nic)| Step::FailBack { host, nic }),
        2 => (host.clone(), any::<Option<bool>>(), any::<bool>())
            .prop_map(|(host, device, on)| Step::Drain { host, device, on }),
        1 => (host.clone(), 0_u8..2, any::<bool>()).prop_map(|(host, nic, held)| Step::Trust { host, nic, held }),
        4 => (0_usize..8, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
            |(lease, incoming, connected, running)| Step::Attach { lease, incoming, connected, running }
        ),
        3 => (0_u8..5, host.clone()).prop_map(|(name, host)| Step::MoveTo { name, host }),
        1 => (0_u8..5).prop_map(|name| Step::StayHere { name }),
        1 => (0_u8..5, any::<bool>()).prop_map(|(name, force)| Step::MovedTo { name, force }),
        4 => (0_usize..12, 0_usize..8).prop_map(|(endpoint, region)| Step::Scrub { endpoint, region }),
        2 => Just(Step::ScrubAll),
        3 => (0_u8..5, 1_u64..20, prop::option::of(2_u16..4), 1_u8..3)
            .prop_map(|(name, mib, device, replicas)| Step::CreateVolume { name, mib, device, replicas }),
        1 => (0_u8..5, 1_u64..20).prop_map(|(name, mib)| Step::CreateStriped { name, mib }),
        5 => (0_usize..4, 0_u32..4, 0_u64..2, prop::sample::select(vec![Says::Failed, Says::Synced, Says::Left]))
            .prop_map(|(volume, number, epoch, says)| Step::Replica { volume, number, epoch, says }),
        3 => (0_u8..5, prop::option::of(2_u16..4), prop::option::of(2_u16..4))
            .prop_map(|(name, device, replaces)| Step::AddReplica { name, device, replaces }),
        1 => (0_u8..5, 2_u16..4).prop_map(|(name, host)| Step::RemoveReplica { name, host }),
        1 => (0_u8..5).prop_map(|name| Step::DeleteVolume { name }),
        5 => (0_u8..5, host, 0_usize..3, prop::collection::vec(0_u8..5, 0..3), prop::option::of(0_u8..4)).prop_map(
            |(name, host, nics, volumes, mac)| Step::CreateInstance { name, host, nics, volumes, mac }
        ),
        2 => (0_u8..5).prop_map(|name| Step::DeleteInstance { name }),
    ]
}

/// The commands that a step stands for, given what there is.
#[expect(clippy::too_many_lines, reason = "a few lines for each of many steps")]
fn commands(state: &State, step: &Step) -> Vec<Command> {
    match *step {
        Step::Join { host, role, restart, up } => {
            let endpoint = endpoint(host, ROLES[role]);
            let known = state.endpoints.get(&endpoint);
            let incarnation = match known {
                Some(known) if !restart && known.presence == Presence::Joined => known.incarnation,
                Some(known) => known.incarnation + 1,
                None => 1,
            };
            vec![Command::Join { endpoint, incarnation, join: join(host, devices_of(endpoint, up)) }]
        }
        Step::Silent { host, role } => vec![Command::Silent { endpoint: endpoint(host, ROLES[role]) }],
        Step::Back { host, role } => vec![Command::Back { endpoint: endpoint(host, ROLES[role]) }],
        Step::Gone { host, role } => vec![Command::Gone { endpoint: endpoint(host, ROLES[role]) }],
        Step::FenceExpired { host } => {
            let endpoint = endpoint(host, Role::NetBackend);
            let incarnation = state.endpoints.get(&endpoint).map_or(0, |known| known.incarnation);
            vec![Command::FenceExpired { endpoint, incarnation }]
        }
        Step::Link { host, nic, up } => {
            let device = DeviceId { host: HostId::new(host), name: format!("nic{nic}") };
            vec![Command::Link { device, up, reason: "carrier".to_owned() }]
        }
        Step::Failed { host, nic } => {
            let device = DeviceId { host: HostId::new(host), name: format!("nic{nic}") };
            vec![Command::DeviceFailed { device, reason: "broken".to_owned() }]
        }
        Step::DeviceBack { host, nic: number, up } => {
            let name = format!("nic{number}");
            let report = nic(&name, up, host == 3 && number == 0);
            vec![Command::DeviceBack { device: DeviceId { host: HostId::new(host), name }, report }]
        }
        Step::Migrate { name, to } => {
            let to = to.map(|(host, nic)| DeviceId { host: HostId::new(host), name: format!("nic{nic}") });
            vec![Command::MigrateNic { instance: format!("vm{name}"), device: "net0".to_owned(), to }]
        }
        Step::Drained { lease } => {
            let drain = state.drains().nth(lease % 2);
            drain.map(|(lease, generation)| Command::DrainExpired { lease, generation }).into_iter().collect()
        }
        Step::Drain { host, device, on } => {
            let device = device.map(|nic| if nic { "nic0".to_owned() } else { "ssd0".to_owned() });
            vec![Command::Drain { host: HostId::new(host), device, on }]
        }
        Step::FailBack { host, nic } => {
            vec![Command::FailBack {
                device: DeviceId { host: HostId::new(host), name: format!("nic{nic}") },
            }]
        }
        Step::Trust { host, nic, held } => {
            let device = DeviceId { host: HostId::new(host), name: format!("nic{nic}") };
            let reason = "flaps".to_owned();
            vec![if held {
                Command::HoldLink { device, reason }
            } else {
                Command::ReleaseLink { device, reason }
            }]
        }
        Step::Attach { lease, incoming, connected, running } => {
            attach_command(state, lease, incoming, (connected, running)).into_iter().collect()
        }
        Step::MoveTo { name, host } => {
            vec![Command::PrepareMigration { name: format!("vm{name}"), to: HostId::new(host) }]
        }
        Step::StayHere { name } => vec![Command::AbortMigration { name: format!("vm{name}") }],
        Step::MovedTo { name, force } => {
            vec![Command::ActivateMigration { name: format!("vm{name}"), force }]
        }
        Step::Scrub { endpoint, region } => scrub_command(state, endpoint, region).into_iter().collect(),
        Step::ScrubAll => scrub_all(state),
        Step::CreateVolume { name, mib, device, replicas } => vec![Command::CreateVolume {
            name: format!("vol{name}"),
            size_bytes: mib * MIB,
            device: device.map(|host| DeviceId { host: HostId::new(host), name: "ssd0".to_owned() }),
            replicas,
        }],
        Step::CreateStriped { name, mib } => vec![Command::CreateStriped {
            name: format!("vol{name}"),
            size_bytes: mib * MIB,
            columns: 2,
            stripe_bytes: 64 << 10,
        }],
        Step::Replica { volume, number, epoch, says } => {
            replica_command(state, volume, number, epoch, says).into_iter().collect()
        }
        Step::AddReplica { name, device, replaces } => {
            let ssd = |host| DeviceId { host: HostId::new(host), name: "ssd0".to_owned() };
            let (device, replaces) = (device.map(ssd), replaces.map(ssd));
            vec![Command::AddReplica { name: format!("vol{name}"), device, replaces }]
        }
        Step::RemoveReplica { name, host } => vec![Command::RemoveReplica {
            name: format!("vol{name}"),
            device: DeviceId { host: HostId::new(host), name: "ssd0".to_owned() },
        }],
        Step::DeleteVolume { name } => vec![Command::DeleteVolume { name: format!("vol{name}") }],
        Step::CreateInstance { name, host, nics, ref volumes, mac } => {
            let mac = mac.map(|last| pod_protocol::ids::MacAddress::new([2, 0, 0, 0, 0, last]));
            vec![Command::CreateInstance {
                name: format!("vm{name}"),
                host: HostId::new(host),
                nics: (0..nics).map(|_| NicWish { mac, ..NicWish::default() }).collect(),
                volumes: volumes.iter().map(|name| format!("vol{name}")).collect(),
            }]
        }
        Step::DeleteInstance { name } => {
            vec![Command::DeleteInstance { name: format!("vm{name}"), force: true }]
        }
    }
}

/// Somebody lets go of something.
fn scrub_command(state: &State, endpoint: usize, region: usize) -> Option<Command> {
    let (id, known) =
        state.endpoints.iter().nth(endpoint).filter(|(_, known)| known.presence == Presence::Joined)?;
    let region = *state.scrubs(*id).keys().nth(region)?;
    Some(Command::Scrubbed { endpoint: *id, incarnation: known.incarnation, region })
}

/// A frontend says something of a replica, in this epoch or so many before.
fn replica_command(state: &State, volume: usize, replica: u32, behind: u64, says: Says) -> Option<Command> {
    let mut mirrored = state.leases.values().filter_map(|lease| {
        let volume = state.volumes.get(&lease.volume()?).filter(|volume| volume.is_mirrored())?;
        Some((lease, volume))
    });
    let (lease, volume) = mirrored.nth(volume % 2)?;
    let (lease, endpoint) = (lease.id, state.frontend_of(lease)?);
    let epoch = volume.epoch.saturating_sub(behind);
    let reason = "it failed a write".to_owned();
    Some(match says {
        Says::Failed => Command::ReplicaFailed { endpoint, lease, replica, epoch, reason },
        Says::Synced => Command::ReplicaSynced { endpoint, lease, replica, epoch },
        Says::Left => Command::ReplicaLeft { endpoint, lease, replica, epoch },
    })
}

/// The frontend that serves a lease, or the one that will, speaks of its VMM.
fn attach_command(
    state: &State,
    lease: usize,
    incoming: bool,
    (connected, running): (bool, bool),
) -> Option<Command> {
    let lease = state.leases.values().nth(lease)?;
    let side = if incoming { state.incoming_frontend(lease) } else { state.frontend_of(lease) };
    let running = running && connected;
    Some(Command::Attachment { endpoint: side?, lease: lease.id, connected, running, write_through: false })
}

/// Every endpoint that is there lets go of what it has to.
pub(crate) fn scrub_all(state: &State) -> Vec<Command> {
    let there = state.endpoints.iter().filter(|(_, known)| known.presence == Presence::Joined);
    there
        .flat_map(|(id, known)| {
            state.scrubs(*id).into_keys().map(|region| Command::Scrubbed {
                endpoint: *id,
                incarnation: known.incarnation,
                region,
            })
        })
        .collect()
}

/// Everything that must hold in every state.
pub(crate) fn check(state: &State) {
    no_two_regions_overlap(state);
    no_two_extents_overlap(state);
    no_lease_is_active_twice(state);
    nothing_is_shared_by_accident(state);
    what_is_used_is_referred_to_once(state);
    objects_are_consistent(state);
    a_mirror_can_always_be_relied_on(state);
}

/// One replica at least has everything, no two share a host, and who serves knows as much as who is served.
fn a_mirror_can_always_be_relied_on(state: &State) {
    for volume in state.volumes.values().filter(|volume| !volume.deleted) {
        assert!(volume.replicas.iter().any(|replica| !replica.stale), "nothing of {} is good", volume.name);
        let hosts: BTreeSet<HostId> = volume.devices().map(|ssd| ssd.host).collect();
        assert_eq!(hosts.len(), volume.replicas.len(), "{} has two replicas on a host", volume.name);
        let numbers: BTreeSet<u32> = volume.replicas.iter().map(|replica| replica.number).collect();
        assert_eq!(numbers.len(), volume.replicas.len(), "{} has a number twice", volume.name);
        assert!(numbers.last() < Some(&volume.next_number));
        for replica in &volume.replicas {
            assert!(!replica.leaving || volume.is_mirrored(), "{} leaves the only place it has", volume.name);
            let entry = state.mirror_entry(volume, replica.number);
            assert_eq!(entry.is_some(), volume.is_mirrored());
            assert!(entry.is_none_or(|it| it.is_stale() == replica.stale && it.epoch == volume.epoch));
        }
    }
}

fn no_two_regions_overlap(state: &State) {
    let data = state.regions.data();
    let mut end = data.start.get();
    for region in state.regions.by_place() {
        assert!(region.area.start.get() >= end, "{region:?} overlaps its predecessor");
        end = region.area.start.get() + region.area.lines.get();
        assert!(
            (region.usage == RegionUse::Quarantined) != region.holders.is_empty()
                || region.usage == RegionUse::InUse,
            "{region:?} has the wrong holders"
        );
    }
    assert!(end <= data.start.get() + data.lines.get(), "a region ends beyond the pool");
    assert_eq!(state.regions.by_place().count(), state.regions.iter().count());
}

fn no_two_extents_overlap(state: &State) {
    let mut extents: BTreeMap<&DeviceId, Vec<(u64, u64)>> = BTreeMap::new();
    for volume in state.volumes.values() {
        for replica in volume.replicas.iter().chain(&volume.former) {
            extents.entry(&replica.device).or_default().push((replica.start_bytes, volume.place_bytes()));
        }
    }
    for (device, mut extents) in extents {
        extents.sort_unstable();
        for pair in extents.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "volumes overlap on {device:?}: {pair:?}");
        }
        if let Some(Device { kind: Kind::Ssd { size_bytes, .. }, health: Health::Up, .. }) =
            state.devices.get(device)
        {
            assert!(extents.last().is_none_or(|(start, size)| start + size <= *size_bytes));
        }
    }
}

fn no_lease_is_active_twice(state: &State) {
    let mut volumes = BTreeSet::new();
    for lease in state.leases.values() {
        if let Some(volume) = lease.volume() {
            assert!(volumes.insert(volume), "{volume} is leased twice");
            assert!(state.volumes.contains_key(&volume), "{volume} is leased and does not exist");
        }
        if let (Some(active), Some(standby)) = (lease.active_nic(), lease.standby_nic()) {
            assert_ne!(active, standby, "{} has its active NIC as standby", lease.id);
        }
        if let Some(draining) = lease.draining_nic() {
            assert_ne!(Some(draining), lease.active_nic(), "{} leaves the NIC that it is on", lease.id);
            assert!(!state.is_lost(draining), "{} waits for a NIC that does not work", lease.id);
        }
    }
    let mut active: BTreeMap<LeaseId, EndpointId> = BTreeMap::new();
    let mut served: BTreeMap<LeaseId, EndpointId> = BTreeMap::new();
    for id in state.endpoints.keys() {
        for object in state.desired(*id).into_values() {
            match object {
                Object::Registration(it) if it.state == RegistrationState::Active => {
                    assert!(active.insert(it.lease, *id).is_none(), "{} is active at two backends", it.lease);
                }
                Object::Port(PortObject { lease, incoming: false, .. })
                | Object::Disk(DiskObject { lease, incoming: false, .. }) => {
                    assert!(served.insert(lease, *id).is_none(), "{lease} is served by two frontends");
                }
                _ => {}
            }
        }
    }
}

fn nothing_is_shared_by_accident(state: &State) {
    let mut macs = BTreeSet::new();
    let mut sockets = BTreeSet::new();
    for lease in state.leases.values() {
        if let LeaseKind::Nic { mac, .. } = lease.kind {
            assert!(macs.insert(mac), "two leases have the address {mac}");
        }
        let host = state.instances[&lease.instance].host;
        assert!(sockets.insert((host, &lease.socket)), "two leases have the socket {}", lease.socket);
        let instance = &state.instances[&lease.instance];
        assert_eq!(lease.incoming.is_some(), instance.incoming.is_some(), "half of an instance moves");
        assert_ne!(instance.incoming, Some(instance.host), "{} moves to where it is", instance.name);
        if let (Some(incoming), Some(to)) = (&lease.incoming, instance.incoming) {
            assert!(sockets.insert((to, &incoming.socket)), "two leases have the socket {}", incoming.socket);
        }
        assert!(instance.nics.contains(&lease.id) != instance.disks.contains(&lease.id));
    }
    let of_instances: usize = state.instances.values().map(|it| it.nics.len() + it.disks.len()).sum();
    assert_eq!(of_instances, state.leases.len(), "a lease belongs to no instance, or an instance has none");
}

/// No region leaks: whatever is in use has exactly one user, and each user's region is in use.
fn what_is_used_is_referred_to_once(state: &State) {
    let incoming = |lease: &Lease| lease.incoming.as_ref().and_then(|incoming| incoming.area);
    let areas = state.leases.values().flat_map(|lease| lease.area.into_iter().chain(incoming(lease)));
    let areas = areas.map(|hold| hold.region);
    let rings = state.channels.values().filter_map(|channel| channel.rings);
    let rings = rings.flat_map(|rings| [rings.to_backend, rings.to_frontend]);
    let receive = state.devices.values().filter_map(|device| match device.kind {
        Kind::Nic { rx, .. } => rx.map(|hold| hold.region),
        Kind::Ssd { .. } => None,
    });
    let referred: Vec<_> = areas.chain(rings).chain(receive).collect();
    let unique: BTreeSet<_> = referred.iter().copied().collect();
    assert_eq!(referred.len(), unique.len(), "a region has two users");
    let in_use: BTreeSet<_> = state
        .regions
        .iter()
        .filter(|region| region.usage == RegionUse::InUse)
        .map(|region| region.id)
        .collect();
    assert_eq!(in_use, unique, "regions in use and regions referred to differ");
}

/// What endpoints are told fits together: both ends of a channel agree, and nothing refers to what is not there.
fn objects_are_consistent(state: &State) {
    let desired: BTreeMap<EndpointId, Objects> =
        state.endpoints.keys().map(|id| (*id, state.desired(*id))).collect();
    for (id, objects) in &desired {
        for (name, object) in objects {
            assert_eq!(*name, object.id());
            let has = |channel| objects.contains_key(&ObjectId::Channel(channel));
            match object {
                Object::Channel(channel) => {
                    assert!(channel.generation.get() > 0);
                    let mirrored =
                        desired.get(&channel.peer).and_then(|it| it.get(&ObjectId::Channel(channel.id)));
                    if let Some(Object::Channel(mirrored)) = mirrored {
                        assert_eq!((mirrored.peer, mirrored.generation), (*id, channel.generation));
                        assert_eq!(
                            (mirrored.outgoing, mirrored.incoming),
                            (channel.incoming, channel.outgoing)
                        );
                    }
                }
                Object::Port(port) => {
                    assert!(has(port.active.channel));
                    assert!(port.standby.is_none_or(|standby| has(standby.channel)));
                    assert!(port.draining.is_none_or(|left| has(left.channel) && left != port.active));
                }
                Object::Registration(it) => {
                    assert!(has(it.channel) && objects.contains_key(&ObjectId::Nic(it.nic.clone())));
                }
                Object::Volume(volume) => assert!(has(volume.channel)),
                // Its channel may have to wait for the backend.
                Object::Disk(disk) => {
                    let routes = disk.replicas.iter().map(|replica| replica.route).chain([disk.route]);
                    routes.for_each(|route| assert!(state.channels.contains_key(&route.channel)));
                    assert!(disk.replicas.len() != 1);
                }
                Object::Nic(_) | Object::Table(_) => {}
            }
            for region in areas_of(object) {
                let region = state.regions.by_place().find(|known| known.area == region).expect("a region");
                assert_eq!(region.usage, RegionUse::InUse, "{id} is given {region:?}");
                assert!(
                    region.holders.contains(id) || state.endpoints[id].presence != Presence::Joined,
                    "{id} is not a holder of {region:?}"
                );
            }
        }
    }
}

fn areas_of(object: &Object) -> Vec<Area> {
    match object {
        Object::Nic(nic) => vec![nic.rx_area],
        Object::Port(port) => vec![port.tx_area],
        Object::Registration(it) => vec![it.tx_area],
        Object::Volume(volume) => vec![volume.data_area],
        Object::Disk(disk) => vec![disk.data_area],
        Object::Channel(_) | Object::Table(_) => Vec::new(),
    }
}

/// What a run left behind goes away: endpoints return, instances and volumes are deleted, everything is let go of.
fn wind_down(state: &mut State) {
    let hosts: Vec<EndpointId> = state.endpoints.keys().copied().collect();
    for id in hosts {
        let incarnation = state.endpoints[&id].incarnation + 1;
        let join = join(id.host.get(), devices_of(id, true));
        state.apply(&Command::Join { endpoint: id, incarnation, join }).expect("a good join");
        check(state);
    }
    let names: Vec<String> = state.instances.values().map(|instance| instance.name.clone()).collect();
    for name in names {
        state.apply(&Command::DeleteInstance { name, force: true }).expect("it exists");
        check(state);
    }
    let names: Vec<String> = state.volumes.values().map(|volume| volume.name.clone()).collect();
    for name in names {
        state.apply(&Command::DeleteVolume { name }).expect("it exists and is free");
        check(state);
    }
    for command in scrub_all(state) {
        state.apply(&command).expect("never refused");
        check(state);
    }
}

fn rounds() -> u32 {
    std::env::var("WADI_ROUNDS").ok().and_then(|rounds| rounds.parse::<u32>().ok()).unwrap_or(1).max(1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512 * rounds()))]

    #[test]
    fn invariants_hold_after_every_command(
        pool_mib in prop_oneof![Just(24_u64), Just(64), Just(512)],
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut state = State::new(options(pool_mib));
        let mut log: Vec<Command> = Vec::new();
        for step in &steps {
            for command in commands(&state, step) {
                let before = state.clone();
                if state.apply(&command).is_ok() {
                    log.push(command);
                } else {
                    prop_assert_eq!(&state, &before, "a refused command changed something");
                }
                check(&state);
            }
        }

        // The log gives the same state again, and so does a snapshot with the rest of the log.
        let mut replayed = State::new(options(pool_mib));
        for (number, command) in log.iter().enumerate() {
            if number == log.len() / 2 {
                let snapshot = serde_json::to_vec(&replayed).expect("a state is JSON");
                replayed = serde_json::from_slice(&snapshot).expect("it reads back");
            }
            replayed.apply(command).expect("it was not refused before");
        }
        prop_assert_eq!(&replayed, &state);

        // Settling again changes nothing.
        let mut settled = state.clone();
        let mut effects = Vec::new();
        settled.settle(&mut effects);
        prop_assert_eq!(&settled, &state);
        prop_assert_eq!(effects, Vec::new());

        wind_down(&mut state);
        prop_assert_eq!(state.leases.len() + state.channels.len() + state.volumes.len(), 0);
        prop_assert!(
            state.regions.iter().all(|region| matches!(region.purpose, Purpose::Receive(_))),
            "what is left is not only what NICs receive into: {:?}", state.regions
        );
    }
}
