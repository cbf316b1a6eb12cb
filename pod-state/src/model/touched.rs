//! What must hold of what commands touched: for pods so large that to look at all of them after each command takes too long.
//!
//! Each of these looks at a row and at what is around it. If all of a state was as it should be, and a command changed no more than
//! it notes, all is again. That it notes everything is what [`check`] finds by looking at all. As there, whatever is wrong panics.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, HostId};
use pod_protocol::ids::RegionId;
use pod_protocol::objects::{Object, RegistrationState};

use super::check;
use super::invariants::{
    extents_are_apart, has_the_right_holders, is_not_crowded, is_not_left_behind, nics_differ,
    object_is_consistent, ram_is_where_the_guest_has_it, volume_can_be_relied_on,
};
use crate::{
    Channel, Device, DeviceId, GuestRam, Instance, Kind, Lease, LeaseKind, Objects, Part, Parts, Purpose,
    Region, RegionUse, Stale, State, Volume,
};

/// Everything that must hold of what commands touched since a copy of the state was made, and of what is around it; of all where
/// nobody makes copies.
pub fn check_touched(state: &State) {
    let Some(rows) = state.uncopied() else { return check(state) };
    rows.regions.iter().filter_map(|id| state.regions.get(*id)).for_each(|it| region_is_right(state, it));
    let volumes = rows.volumes.iter().filter_map(|id| state.volumes.get(id));
    volumes.for_each(|volume| volume_is_right(state, volume));
    rows.instances
        .iter()
        .filter_map(|id| state.instances.get(id))
        .for_each(|it| instance_is_right(state, it));
    rows.leases.iter().filter_map(|id| state.leases.get(id)).for_each(|it| lease_is_right(state, it));
    rows.channels.iter().filter_map(|id| state.channels.get(id)).for_each(|it| channel_is_right(state, it));
    for (id, device) in rows.devices.iter().filter_map(|id| Some((id, state.devices.get(id)?))) {
        device_is_right(state, id, device);
    }
    for (id, board) in rows.boards.iter().filter_map(|id| Some((id, state.fabric.boards.get(id)?))) {
        is_used_for(state, board.region, &Purpose::Board(*id));
    }
    let leases = rows.leases.iter().filter_map(|id| state.leases.get(id));
    let nics: BTreeSet<&DeviceId> =
        leases.flat_map(|it| [it.active_nic(), it.standby_nic()]).flatten().chain(&rows.devices).collect();
    for nic in nics {
        is_leant_on_by_few(state, nic);
    }
    let Some(Stale::These(ends)) = state.found().map(|found| &found.stale) else { return };
    for (id, parts) in ends {
        is_told_what_fits(state, *id, parts);
    }
}

fn region_is_right(state: &State, region: &Region) {
    has_the_right_holders(region);
    let end = |area: cxl_pool::Area| area.start.get() + area.lines.get();
    let (start, data) = (region.area.start, state.regions.data());
    let (before, after) = state.regions.beside(start);
    assert!(before.is_none_or(|it| end(it.area) <= start.get()), "{region:?} overlaps {before:?}");
    assert!(after.is_none_or(|it| end(region.area) <= it.area.start.get()), "{region:?} overlaps {after:?}");
    assert!(start >= data.start && end(region.area) <= end(data), "{region:?} lies outside");
    assert_eq!(state.regions.at(start), Some(region), "another region begins where {region:?} does");
    let used = users(state, region);
    assert_eq!(used, usize::from(region.usage == RegionUse::InUse), "{region:?} is used {used} times");
}

/// How often that refers to a region which it is for.
fn users(state: &State, region: &Region) -> usize {
    let mut users: Vec<RegionId> = Vec::new();
    match &region.purpose {
        Purpose::Ring(id) => {
            let rings = state.channels.get(id).and_then(|channel| channel.rings);
            users.extend(rings.iter().flat_map(|rings| [rings.to_backend, rings.to_frontend]));
        }
        Purpose::Transmit(id) | Purpose::Data(id) => {
            users.extend(state.leases.get(id).into_iter().flat_map(areas_of));
        }
        Purpose::Receive(id) => {
            if let Some(Device { kind: Kind::Nic { rx: Some(rx), .. }, .. }) = state.devices.get(id) {
                users.push(rx.region);
            }
        }
        Purpose::Ram(id) => {
            let ram = state.instances.get(id).and_then(|instance| instance.ram.as_ref());
            users.extend(ram.into_iter().flat_map(GuestRam::regions));
        }
        Purpose::Board(id) => users.extend(state.fabric.boards.get(id).map(|board| board.region)),
        Purpose::Nothing => {}
    }
    users.into_iter().filter(|id| *id == region.id).count()
}

fn areas_of(lease: &Lease) -> impl Iterator<Item = RegionId> {
    let incoming = lease.incoming.as_ref().and_then(|incoming| incoming.area);
    lease.area.into_iter().chain(incoming).map(|hold| hold.region)
}

/// Who refers to a region refers to one that is there for it. So no other does, and it is used once.
fn is_used_for(state: &State, region: RegionId, purpose: &Purpose) {
    let region = state.regions.get(region).expect("a region is there that is referred to");
    assert_eq!(&region.purpose, purpose, "a region is for something else");
    assert_eq!((region.usage, users(state, region)), (RegionUse::InUse, 1), "{region:?}");
}

fn volume_is_right(state: &State, volume: &Volume) {
    volume_can_be_relied_on(state, volume);
    let Some(found) = state.found() else { return };
    for place in volume.all_places() {
        let beside = found.on_ssd.get(&place.device).into_iter().flatten();
        let extents = beside.filter_map(|id| state.volumes.get(id)).flat_map(|volume| {
            let here = volume.all_places().filter(|it| it.device == place.device);
            here.map(|it| (it.start_bytes, volume.place_bytes()))
        });
        extents_are_apart(state, &place.device, extents.collect());
    }
}

fn instance_is_right(state: &State, instance: &Instance) {
    let leases: BTreeSet<_> = instance.nics.iter().chain(&instance.disks).collect();
    assert_eq!(
        leases.len(),
        instance.nics.len() + instance.disks.len(),
        "{} has a lease twice",
        instance.name
    );
    let mut slots = BTreeSet::new();
    for id in leases {
        let lease = state.leases.get(id).expect("a lease of an instance is there");
        assert_eq!(lease.instance, instance.id);
        assert!(slots.insert(state.slot_of(lease)), "two devices of {} have one slot", instance.name);
    }
    assert_ne!(instance.incoming, Some(instance.host), "{} moves to where it is", instance.name);
    for region in instance.ram.iter().flat_map(GuestRam::regions) {
        is_used_for(state, region, &Purpose::Ram(instance.id));
    }
}

fn lease_is_right(state: &State, lease: &Lease) {
    nics_differ(state, lease);
    is_not_left_behind(state, lease);
    let id = lease.id;
    let instance = state.instances.get(&lease.instance).expect("a lease is of an instance that is there");
    assert!(instance.nics.contains(&id) != instance.disks.contains(&id), "{id} belongs to nobody");
    assert_eq!(lease.incoming.is_some(), instance.incoming.is_some(), "half of an instance moves");
    let purpose = match &lease.kind {
        LeaseKind::Nic { mac, .. } => {
            let known = state.found().and_then(|found| found.lease_with_mac(*mac));
            assert_eq!(known, Some(id), "two leases have the address {mac}");
            Purpose::Transmit(id)
        }
        LeaseKind::Disk { volume, .. } => {
            assert!(state.volumes.contains_key(volume), "{volume} is leased and does not exist");
            assert_eq!(state.lease_of_volume(*volume).map(|it| it.id), Some(id), "{volume} is leased twice");
            Purpose::Data(id)
        }
    };
    areas_of(lease).for_each(|region| is_used_for(state, region, &purpose));
    let Some(found) = state.found() else { return };
    for (host, socket) in sockets_of(state, lease) {
        let others = found.leases_with_socket(socket).filter(|it| *it != id);
        let mut others = others.filter_map(|it| state.leases.get(&it));
        let has_it = |other: &Lease| sockets_of(state, other).contains(&(host, socket));
        assert!(!others.any(has_it), "two leases have the socket {socket}");
    }
    is_served_once(state, lease);
}

/// The sockets of a lease, on both sides of a migration, and where they are.
fn sockets_of<'a>(state: &State, lease: &'a Lease) -> Vec<(HostId, &'a str)> {
    let Some(instance) = state.instances.get(&lease.instance) else { return Vec::new() };
    let incoming = lease.incoming.as_ref().zip(instance.incoming);
    let incoming = incoming.map(|(incoming, to)| (to, incoming.socket.as_str()));
    [(instance.host, lease.socket.as_str())].into_iter().chain(incoming).collect()
}

/// One frontend serves it, and one NIC is the active one, but for those of a group.
fn is_served_once(state: &State, lease: &Lease) {
    let told = |id: EndpointId| {
        let mut objects = Objects::new();
        state.renew(id, &Part::Lease(lease.id), &mut objects);
        objects.into_values()
    };
    let serves = |object: Object| match object {
        Object::Port(port) => !port.incoming,
        Object::Disk(disk) => !disk.incoming,
        _ => false,
    };
    let serving = state.frontends_of(lease).filter(|id| told(*id).any(serves)).count();
    assert!(serving <= 1, "{} is served by two frontends", lease.id);
    let active = state.backends_of(lease).flat_map(told).filter_map(|object| match object {
        Object::Registration(it) if it.state == RegistrationState::Active => Some(it),
        _ => None,
    });
    let active: Vec<_> = active.collect();
    for it in &active {
        assert!(active.len() == 1 || it.has_other_rails, "{} is active at two backends", lease.id);
        assert_eq!((it.has_other_rails, it.generation), (state.has_rails(lease), lease.generation));
    }
}

fn channel_is_right(state: &State, channel: &Channel) {
    for ring in channel.rings.iter().flat_map(|rings| [rings.to_backend, rings.to_frontend]) {
        is_used_for(state, ring, &Purpose::Ring(channel.id));
    }
}

fn device_is_right(state: &State, id: &DeviceId, device: &Device) {
    if let Kind::Nic { rx: Some(rx), .. } = &device.kind {
        is_used_for(state, rx.region, &Purpose::Receive(id.clone()));
    }
}

fn is_leant_on_by_few(state: &State, nic: &DeviceId) {
    let around = state.found().and_then(|found| found.on_nic.get(nic)).into_iter().flatten();
    let leans = |lease: &&Lease| [lease.active_nic(), lease.standby_nic()].contains(&Some(nic));
    let leases = around.filter_map(|id| state.leases.get(id)).filter(leans);
    is_not_crowded(state, nic, leases.count());
}

/// What an endpoint has to be told refers to what is there.
fn is_told_what_fits(state: &State, id: EndpointId, parts: &Parts) {
    if !state.endpoints.contains_key(&id) {
        return;
    }
    let mut objects: Objects = BTreeMap::new();
    match parts {
        Parts::All => objects = state.desired(id),
        Parts::These(parts) => parts.iter().for_each(|part| drop(state.renew(id, part, &mut objects))),
    }
    for object in objects.values() {
        object_is_consistent(state, id, object);
        ram_is_where_the_guest_has_it(state, id, object);
    }
}
