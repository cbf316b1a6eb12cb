//! What must hold in every state. Whatever does not, panics: only tests and the simulation look, and a panic is how they fail.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{Area, EndpointId, HostId, LineCount, Role};
use pod_protocol::ids::{LeaseId, PlaceNumber};
use pod_protocol::objects::{DiskObject, NicObject, Object, PortObject, RegistrationState};
use pod_protocol::protocol::Protocol;

use crate::{
    Device, DeviceId, GuestRam, Health, Kind, Lease, LeaseKind, Presence, Region, RegionUse, Replica, State,
    Volume,
};

/// Everything that must hold in every state.
pub fn check(state: &State) {
    no_two_regions_overlap(state);
    no_two_extents_overlap(state);
    no_lease_is_active_twice(state);
    no_backup_is_crowded(state);
    state.leases.values().for_each(|lease| is_not_left_behind(state, lease));
    nothing_is_shared_by_accident(state);
    what_is_used_is_referred_to_once(state);
    objects_are_consistent(state);
    a_mirror_can_always_be_relied_on(state);
    a_guest_has_its_ram_on_both_sides(state);
    no_slot_is_taken_twice(state);
    nobody_forgets_what_is_referred_to(state);
    groups_are_known(state);
    labels_are_of_who_is_there(state);
    nothing_is_left_to_settle(state);
}

/// Hosts that are gone leave no labels, and nobody has any in a pod some of which knows of none.
fn labels_are_of_who_is_there(state: &State) {
    assert!(state.host_labels.keys().all(|host| state.hosts.contains_key(host)));
    let labelled = state.devices.values().any(|device| !device.labels.is_empty())
        || state.types.values().any(|it| !it.labels.is_empty());
    assert!(state.options.protocol_minor >= 1 || !labelled && state.host_labels.is_empty());
    assert!(state.host_labels.values().all(|labels| !labels.is_empty()));
}

/// In a pod some of which knows of none, no volume is in a group.
fn groups_are_known(state: &State) {
    for volume in state.volumes.values().filter(|it| !it.deleted) {
        let known = state.options.protocol_minor >= 1 || volume.groups.is_empty();
        assert!(known, "{} is in groups that nobody knew before", volume.name);
    }
}

/// A device that leases or volumes refer to is known, whether or not its host has it.
fn nobody_forgets_what_is_referred_to(state: &State) {
    for (id, nic) in state.leases.values().flat_map(|lease| lease.nics().map(|nic| (lease.id, nic))) {
        assert!(state.devices.contains_key(nic), "{id} refers to {nic:?}, which nobody knows");
    }
    for volume in state.volumes.values() {
        let unknown = volume.all_places().find(|place| !state.devices.contains_key(&place.device));
        assert_eq!(unknown, None, "{} lies where nobody knows", volume.name);
    }
}

/// To look at all of the pod finds nothing that was not done after looking at what a command touched.
fn nothing_is_left_to_settle(state: &State) {
    assert!(state.finds_all(), "what is looked up is not what is there");
    let (mut settled, mut effects) = (state.clone(), Vec::new());
    settled.settle_all(&mut effects);
    assert_eq!(settled, *state, "something was left undone");
    assert_eq!(effects, []);
}

/// Frontend and backends agree on where a guest's RAM is, and nothing of a former life of a storage backend can land there.
fn a_guest_has_its_ram_on_both_sides(state: &State) {
    for id in state.endpoints.keys() {
        for object in state.desired(*id).into_values() {
            ram_is_where_the_guest_has_it(state, *id, &object);
        }
    }
}

pub(super) fn ram_is_where_the_guest_has_it(state: &State, id: EndpointId, object: &Object) {
    let (lease, ram, incoming) = match object {
        Object::Port(it) => (it.lease, it.ram_area, it.incoming),
        Object::Disk(it) => (it.lease, it.ram_area, it.incoming),
        Object::Registration(it) => (it.lease, it.ram_area, false),
        Object::Volume(it) => (it.lease, it.ram_area, false),
        _ => return,
    };
    let lease = &state.leases[&lease];
    let known = state.instances[&lease.instance].ram.as_ref();
    let region = known.and_then(|ram| if incoming { ram.incoming } else { ram.region });
    let area = region.and_then(|region| state.regions.get(region)).map(|region| region.area);
    assert_eq!(ram, area, "{id} is told of other RAM");
    let Some(known) = known else { return };
    let fits = |area: Area| area.lines == known.lines && area.start.get().is_multiple_of(1 << 15);
    assert!(area.is_none_or(fits));
    if let Object::Volume(_) = object {
        let life = state.endpoints[&id].incarnation;
        assert!(area.is_none() || known.clean_for.get(&id.host) == Some(&life), "{id} has not flushed");
    }
}

/// What comes into a VM, comes where nothing is.
fn no_slot_is_taken_twice(state: &State) {
    let slots: BTreeSet<_> = state.leases.values().map(|it| (it.instance, state.slot_of(it))).collect();
    assert_eq!(slots.len(), state.leases.len(), "two devices of an instance have one slot");
}

/// One replica at least has everything, no two share a host, and who serves knows as much as who is served.
fn a_mirror_can_always_be_relied_on(state: &State) {
    for volume in state.volumes.values() {
        volume_can_be_relied_on(state, volume);
    }
}

pub(super) fn volume_can_be_relied_on(state: &State, volume: &Volume) {
    if volume.deleted {
        return;
    }
    assert!(volume.replicas.iter().any(|replica| !replica.stale), "nothing of {} is good", volume.name);
    hosts_are_apart(state, volume);
    let numbers: BTreeSet<u32> = volume.replicas.iter().map(|replica| replica.number).collect();
    assert_eq!(numbers.len(), volume.replicas.len(), "{} has a number twice", volume.name);
    assert!(numbers.last() < Some(&volume.next_number));
    if volume.stripe_bytes.is_some() {
        assert_eq!(numbers.len(), volume.next_number as usize, "{} lacks a column", volume.name);
        assert!(volume.replicas.iter().all(|it| !it.stale && !it.leaving && it.replaces.is_none()));
    }
    if let Some(beside) = &volume.beside {
        assert!(volume.stripe_bytes.is_some() && beside.stale && numbers.contains(&beside.number));
        assert!(
            beside.leaving || state.options.protocol_minor > 0,
            "{} moves as nobody knew before",
            volume.name
        );
        assert!(!state.is_lost(&beside.device), "{} waits for a place that does not work", volume.name);
    }
    for replica in &volume.replicas {
        let replaced = |it: &&Replica| Some(it.number) == replica.replaces;
        let replaced = volume.replicas.iter().find(replaced);
        assert_eq!(replaced.is_some(), replica.replaces.is_some(), "{} replaces nobody", volume.name);
        assert!(
            replaced.is_none_or(|it| it.leaving != replica.stale),
            "{}: the old place of a move goes when the new one has everything, and not before",
            volume.name
        );
        assert!(!replica.leaving || volume.is_mirrored(), "{} leaves the only place it has", volume.name);
        let entry = state.mirror_entry(volume, replica.number);
        assert_eq!(entry.is_some(), volume.is_mirrored());
        assert!(entry.is_none_or(|it| it.is_stale() == replica.stale && it.epoch == volume.epoch));
    }
}

/// No two places of a volume lie on one host, unless one of both is to go; and then they are told apart.
fn hosts_are_apart(state: &State, volume: &Volume) {
    let mut on_host: BTreeMap<HostId, Vec<&Replica>> = BTreeMap::new();
    volume.places().for_each(|place| on_host.entry(place.device.host).or_default().push(place));
    let beside = |place: &Replica| volume.beside.as_ref() == Some(place);
    for here in on_host.values() {
        if let [one, other] = here.as_slice() {
            let is_to_go = |one: &Replica, other: &Replica| {
                one.leaving || beside(one) || other.replaces == Some(one.number)
            };
            let moves = is_to_go(one, other) || is_to_go(other, one);
            assert!(moves, "{} has two places on a host", volume.name);
            assert!(state.moves_within_hosts(), "{} moves as nobody knew before", volume.name);
            let places: BTreeSet<PlaceNumber> = here.iter().map(|it| it.place).collect();
            assert_eq!(places, BTreeSet::from([PlaceNumber::FIRST, PlaceNumber::SECOND]));
        } else {
            assert_eq!(here.len(), 1, "{} has many places on a host", volume.name);
            assert!(
                here.iter().all(|it| it.place.is_first()),
                "{} has a second place and no first",
                volume.name
            );
        }
        let ssds: BTreeSet<&DeviceId> = here.iter().map(|it| &it.device).collect();
        assert_eq!(ssds.len(), here.len(), "{} has two places on an SSD", volume.name);
    }
}

fn no_two_regions_overlap(state: &State) {
    let data = state.regions.data();
    let mut end = data.start.get();
    for region in state.regions.by_place() {
        assert!(region.area.start.get() >= end, "{region:?} overlaps its predecessor");
        end = region.area.start.get() + region.area.lines.get();
        has_the_right_holders(region);
    }
    assert!(end <= data.start.get() + data.lines.get(), "a region ends beyond the pool");
    assert_eq!(state.regions.by_place().count(), state.regions.iter().count());
}

pub(super) fn has_the_right_holders(region: &Region) {
    assert!(
        (region.usage == RegionUse::Quarantined) != region.holders.is_empty()
            || region.usage == RegionUse::InUse,
        "{region:?} has the wrong holders"
    );
}

fn no_two_extents_overlap(state: &State) {
    let mut extents: BTreeMap<&DeviceId, Vec<(u64, u64)>> = BTreeMap::new();
    for volume in state.volumes.values() {
        for replica in volume.all_places() {
            extents.entry(&replica.device).or_default().push((replica.start_bytes, volume.place_bytes()));
        }
    }
    for (device, extents) in extents {
        extents_are_apart(state, device, extents);
    }
}

pub(super) fn extents_are_apart(state: &State, device: &DeviceId, mut extents: Vec<(u64, u64)>) {
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

/// Nobody is given a backup on which as many lean as can. Other NICs may come into a group, and then have what any of that has.
fn no_backup_is_crowded(state: &State) {
    let mut leans: BTreeMap<&DeviceId, usize> = BTreeMap::new();
    for lease in state.leases.values() {
        let nics: BTreeSet<&DeviceId> =
            [lease.active_nic(), lease.standby_nic()].into_iter().flatten().collect();
        for nic in nics {
            *leans.entry(nic).or_default() += 1;
        }
    }
    for (nic, count) in leans {
        is_not_crowded(state, nic, count);
    }
}

pub(super) fn is_not_crowded(state: &State, nic: &DeviceId, leases: usize) {
    let is_backup = state.devices.get(nic).is_some_and(Device::is_backup);
    let most = state.options.nic_leases_max as usize;
    assert!(!is_backup || leases <= most, "{leases} leases lean on {nic:?}");
}

/// Who is on a NIC that does not work has no other one: whatever speaks against those that work, they are better than none.
pub(super) fn is_not_left_behind(state: &State, lease: &Lease) {
    let LeaseKind::Nic { active, standby, mtu, .. } = &lease.kind else { return };
    if state.options.protocol_minor < Protocol::DECIDES_BY_MORE || !state.is_lost(active) {
        return;
    }
    let loads = state.loads_now();
    let takes_one_more =
        |id: &DeviceId| standby.as_ref() == Some(id) || loads.get(id).is_some_and(|nic| !nic.is_crowded());
    let better = state.devices.iter().find(|(id, device)| {
        device.can_carry(*mtu) && state.is_up(id) && takes_one_more(id) && !loads.are_rails(id, active)
    });
    assert_eq!(better, None, "{} stays on {active:?}, which does not work", lease.id);
}

fn no_lease_is_active_twice(state: &State) {
    let mut volumes = BTreeSet::new();
    for lease in state.leases.values() {
        if let Some(volume) = lease.volume() {
            assert!(volumes.insert(volume), "{volume} is leased twice");
            assert!(state.volumes.contains_key(&volume), "{volume} is leased and does not exist");
        }
        nics_differ(state, lease);
    }
    let mut active: BTreeMap<LeaseId, EndpointId> = BTreeMap::new();
    let mut served: BTreeMap<LeaseId, EndpointId> = BTreeMap::new();
    for id in state.endpoints.keys() {
        for object in state.desired(*id).into_values() {
            match object {
                Object::Registration(it) if it.state == RegistrationState::Active => {
                    let before = active.insert(it.lease, *id);
                    assert!(before.is_none() || it.has_other_rails, "{} is active at two backends", it.lease);
                    assert_eq!(it.has_other_rails, state.has_rails(&state.leases[&it.lease]));
                    assert_eq!(it.generation, state.leases[&it.lease].generation);
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

pub(super) fn nics_differ(state: &State, lease: &Lease) {
    if let (Some(active), Some(standby)) = (lease.active_nic(), lease.standby_nic()) {
        assert_ne!(active, standby, "{} has its active NIC as standby", lease.id);
    }
    if let Some(draining) = lease.draining_nic() {
        assert_ne!(Some(draining), lease.active_nic(), "{} leaves the NIC that it is on", lease.id);
        assert!(!state.is_lost(draining), "{} waits for a NIC that does not work", lease.id);
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
    let boards = state.board_regions();
    let rams = state.instances.values().filter_map(|it| it.ram.as_ref()).flat_map(GuestRam::regions);
    let referred: Vec<_> = areas.chain(rams).chain(rings).chain(receive).chain(boards).collect();
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
    for id in state.endpoints.keys() {
        for (name, object) in state.desired(*id) {
            assert_eq!(name, object.id());
            object_is_consistent(state, *id, &object);
        }
    }
}

/// An object that an endpoint is told of refers to what it is told of too, and to what others are told.
pub(super) fn object_is_consistent(state: &State, id: EndpointId, object: &Object) {
    let at = |channel, side| state.channels.get(&channel).and_then(|channel| state.channel_at(channel, side));
    let has = |channel| at(channel, id).is_some();
    let is_there = |device: &str| {
        let device = state.devices.get(&DeviceId { host: id.host, name: device.into() });
        device.is_some_and(|device| device.health != Health::Absent)
    };
    match object {
        Object::Channel(channel) => {
            assert!(channel.generation.get() > 0);
            let limits = state.options.protocol_minor >= Protocol::LIMITS_BACKENDS;
            assert_eq!(channel.receives.is_some(), limits && id.role == Role::NetFrontend);
            if let Some(mirrored) = at(channel.id, channel.peer) {
                assert_eq!((mirrored.peer, mirrored.generation), (id, channel.generation));
                assert_eq!((mirrored.outgoing, mirrored.incoming), (channel.incoming, channel.outgoing));
                let nics = state.devices_at(channel.peer.host).filter_map(|(nic, _)| state.nic_object(nic));
                let receives =
                    |it: &NicObject| channel.receives.iter().flatten().any(|area| *area == it.rx_area);
                assert!(channel.receives.is_none() || nics.into_iter().all(|nic| receives(&nic)));
            }
        }
        Object::Port(port) => {
            assert!(has(port.active.channel));
            assert!(port.rails.iter().all(|rail| has(rail.route.channel)));
            assert!(port.rails.is_empty() || port.rails.iter().any(|it| it.route == port.active));
            assert!(port.standby.is_none_or(|standby| has(standby.channel)));
            assert!(port.draining.is_none_or(|left| has(left.channel) && left != port.active));
        }
        Object::Registration(it) => {
            let nic = DeviceId { host: id.host, name: it.nic.as_str().into() };
            assert!(has(it.channel) && state.nic_object(&nic).is_some());
        }
        Object::Volume(volume) => {
            assert!(has(volume.channel));
            assert!(is_there(&volume.ssd), "{id} has to serve an SSD that it does not have");
        }
        // Its channel may have to wait for the backend.
        Object::Disk(disk) => {
            let places = disk.replicas.iter().chain(&disk.beside);
            let ways: BTreeSet<_> = places.clone().map(|it| (it.route.channel, it.place)).collect();
            assert_eq!(ways.len(), places.clone().count(), "two places of {} are reached alike", disk.lease);
            let routes = places.map(|replica| replica.route).chain([disk.route]);
            routes.for_each(|route| assert!(state.channels.contains_key(&route.channel)));
            assert!(disk.replicas.len() != 1);
        }
        Object::Fabric(fabric) => {
            for peer in &fabric.peers {
                let theirs = state.fabric_object(peer.endpoint);
                let Some(theirs) = theirs else { panic!("{peer:?} shares nothing") };
                assert_eq!((peer.sums, &fabric.elements), (theirs.sums, &theirs.elements));
            }
        }
        Object::Mchannel(mchannel) => {
            let Some(fabric) = state.fabric_object(id) else { panic!("{id} has an mchannel and no fabric") };
            let known = |number: &u32| fabric.elements.iter().any(|it| it.element == *number);
            assert!(!mchannel.path.is_empty() && mchannel.path.iter().all(known));
            assert!(fabric.tenants.iter().any(|it| it.tenant == mchannel.tenant));
        }
        Object::Nic(nic) => {
            assert!(is_there(&nic.nic), "{id} has to receive from a NIC that it does not have");
        }
        Object::Table(table) => {
            assert!(is_there(&table.ssd), "{id} has to write to an SSD that it does not have");
        }
        Object::Protocol(_) => {}
    }
    for area in areas_of(object) {
        let region = state.regions.at(area.start).filter(|it| it.area == area).expect("a region");
        assert_eq!(region.usage, RegionUse::InUse, "{id} is given {region:?}");
        assert!(
            region.holders.contains(&id) || state.endpoints[&id].presence != Presence::Joined,
            "{id} is not a holder of {region:?}"
        );
    }
}

fn areas_of(object: &Object) -> Vec<Area> {
    let with = |area: Area, ram: Option<Area>| ram.into_iter().chain([area]).collect();
    match object {
        Object::Nic(nic) => vec![nic.rx_area],
        Object::Port(port) => with(port.tx_area, port.ram_area),
        Object::Registration(it) => with(it.tx_area, it.ram_area),
        Object::Volume(volume) => with(volume.data_area, volume.ram_area),
        Object::Disk(disk) => with(disk.data_area, disk.ram_area),
        // Both halves of one region.
        Object::Fabric(fabric) => {
            let lines = fabric.sums.lines.get() + fabric.vms.lines.get();
            vec![Area::new(fabric.sums.start, LineCount::new(lines))]
        }
        Object::Channel(_) | Object::Table(_) | Object::Mchannel(_) | Object::Protocol(_) => Vec::new(),
    }
}
