//! What is found without looking at all of the pod.
//!
//! It follows from the state alone, and follows its changes ([`State::follow`](super::State::follow)). A copy of the state has none
//! until its first command.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseId, MacAddress, VolumeId};

use super::by_digest::{ByDigest, digest};
use super::loads::Loads;
use super::sorted::Sorted;
use super::ssd_loads::SsdLoads;
use super::stale::Stale;
use super::wanting::Wanting;
use super::work::Work;
use super::{Channel, Device, DeviceId, Endpoint, Instance, Lease, LeaseKind, Presence, Volume};

/// The least that a lease can have.
const LEAST: LeaseId = match LeaseId::new(0) {
    Some(id) => id,
    None => LeaseId::MAX,
};

/// What is found quickly, once somebody needed it.
#[derive(Debug, Default)]
pub(super) struct Index(pub(super) Option<Box<Found>>);

/// See the [module](self).
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// By name.
    instances: ByDigest<InstanceId>,
    /// Those that are not deleted, by name.
    volumes: ByDigest<VolumeId>,
    /// Of both sides of a migration.
    sockets: ByDigest<LeaseId>,
    macs: ByDigest<LeaseId>,
    pub(super) lives: Lives,
    /// What leases ask of NICs.
    pub(super) loads: Loads,
    /// What volumes take of SSDs.
    pub(super) ssds: SsdLoads,
    /// By frontend, and then by backend.
    pub(super) channels: BTreeMap<EndpointId, BTreeMap<EndpointId, ChannelId>>,
    /// By backend.
    pub(super) served: BTreeMap<EndpointId, BTreeSet<ChannelId>>,
    /// Instances on a host, or on their way there.
    pub(super) at_host: BTreeMap<HostId, BTreeSet<InstanceId>>,
    /// Leases whose NIC it is, or may become, or was.
    pub(super) on_nic: BTreeMap<DeviceId, Sorted<LeaseId>>,
    on_volume: BTreeSet<(VolumeId, LeaseId)>,
    /// Volumes with a place on an SSD, or that had one.
    pub(super) on_ssd: BTreeMap<DeviceId, BTreeSet<VolumeId>>,
    /// The NICs of a link aggregation group.
    pub(super) groups: BTreeMap<String, BTreeSet<DeviceId>>,
    /// Devices that are to be empty by themselves.
    pub(super) drained: BTreeSet<DeviceId>,
    /// Leases that want to be near others of a group, or away from them.
    grouped: ByDigest<LeaseId>,
    /// Volumes that are not deleted and are in a group of volumes.
    grouped_volumes: ByDigest<VolumeId>,
    /// Leases that are being moved.
    pub(super) draining: BTreeSet<LeaseId>,
    /// Leases that are not on their first NIC.
    pub(super) away: BTreeSet<LeaseId>,
    /// Leases without a backup that works.
    pub(super) bare: BTreeSet<LeaseId>,
    /// Leases on NICs that are to be empty.
    pub(super) leaving: BTreeSet<LeaseId>,
    /// Leases on a NIC that does not work.
    pub(super) degraded: BTreeSet<LeaseId>,
    /// Leases on disks that answer errors.
    pub(super) failed: BTreeSet<LeaseId>,
    /// What found no room; nothing if that is not known.
    pub(super) wanting: Option<Wanting>,
    /// What has yet to be settled.
    pub(super) work: Work,
    /// Who may have to be told something else since somebody asked.
    pub(super) stale: Stale,
}

/// A copy has none until it needs one.
impl Clone for Index {
    fn clone(&self) -> Self {
        Self(None)
    }
}

/// States that are alike are, whatever was looked up in them.
impl PartialEq for Index {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Eq for Index {}

/// Which endpoints are there, and since when. Everything asks for that again and again.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Lives {
    /// By host and role.
    all: Vec<Option<Life>>,
    silent: usize,
}

/// The life of an endpoint, and whether it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) incarnation: u64,
    pub(super) presence: Presence,
}

impl Lives {
    fn place(id: EndpointId) -> usize {
        usize::from(id.host.get()) * Role::ALL.len() + usize::from(id.role.slot())
    }

    pub(super) fn follow(&mut self, id: EndpointId, new: Option<&Endpoint>) {
        let place = Self::place(id);
        if self.all.len() <= place {
            self.all.resize(place + 1, None);
        }
        if let Some(known) = self.all.get_mut(place) {
            let new = new.map(Endpoint::life);
            let is_silent = |life: Option<Life>| life.is_some_and(|it| it.presence == Presence::Silent);
            self.silent = self.silent + usize::from(is_silent(new)) - usize::from(is_silent(*known));
            *known = new;
        }
        // However many there have been, those that there are take as much room.
        let used = self.all.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        self.all.truncate(used);
    }

    pub(super) fn get(&self, id: EndpointId) -> Option<Life> {
        self.all.get(Self::place(id)).copied().flatten()
    }

    /// Whether somebody is silent.
    pub(super) const fn any_silent(&self) -> bool {
        self.silent > 0
    }
}

impl Endpoint {
    pub(super) const fn life(&self) -> Life {
        Life { incarnation: self.incarnation, presence: self.presence }
    }
}

impl Found {
    pub(super) fn follow_instance(&mut self, id: InstanceId, old: Option<&Instance>, new: Option<&Instance>) {
        let alike = |old: &Instance, new: &Instance| {
            old.name == new.name && (old.host, old.incoming) == (new.host, new.incoming)
        };
        if old.zip(new).is_some_and(|(old, new)| alike(old, new)) {
            return;
        }
        for (instance, there) in sides(old, new) {
            self.instances.set(digest(&instance.name), id, there);
            for host in [Some(instance.host), instance.incoming].into_iter().flatten() {
                set_of(&mut self.at_host, &host, id, there);
            }
        }
    }

    pub(super) fn follow_volume(&mut self, id: VolumeId, old: Option<&Volume>, new: Option<&Volume>) {
        for (volume, there) in sides(old, new) {
            if !volume.deleted {
                self.volumes.set(digest(&volume.name), id, there);
                volume.groups.names().for_each(|it| self.grouped_volumes.set(digest(it), id, there));
            }
            for place in volume.all_places() {
                set_of(&mut self.on_ssd, &place.device, id, there);
            }
        }
    }

    pub(super) fn follow_device(&mut self, id: &DeviceId, old: Option<&Device>, new: Option<&Device>) {
        for (device, there) in sides(old, new) {
            if let Some(lag) = device.lag() {
                set_of(&mut self.groups, lag, id.clone(), there);
            }
            if device.drained {
                set(&mut self.drained, id.clone(), there);
            }
        }
    }

    pub(super) fn follow_channel(&mut self, id: ChannelId, old: Option<&Channel>, new: Option<&Channel>) {
        let pair = |it: &Channel| (it.frontend, it.backend);
        if old.map(pair) == new.map(pair) {
            return;
        }
        for (channel, there) in sides(old, new) {
            set_of(&mut self.served, &channel.backend, id, there);
            if there {
                self.channels.entry(channel.frontend).or_default().insert(channel.backend, id);
            } else if let Some(channels) = self.channels.get_mut(&channel.frontend) {
                channels.remove(&channel.backend);
                if channels.is_empty() {
                    self.channels.remove(&channel.frontend);
                }
            }
        }
    }

    pub(super) fn follow_lease(&mut self, id: LeaseId, old: Option<&Lease>, new: Option<&Lease>) {
        if !old.zip(new).is_some_and(|(old, new)| sockets(old).eq(sockets(new))) {
            for (lease, there) in sides(old, new) {
                sockets(lease).for_each(|it| self.sockets.set(digest(it), id, there));
            }
        }
        if !same_devices(old, new) {
            for (lease, there) in sides(old, new) {
                match lease.kind {
                    LeaseKind::Nic { mac, .. } => self.macs.set(number(mac), id, there),
                    LeaseKind::Disk { volume, .. } => set(&mut self.on_volume, (volume, id), there),
                }
                lease.nics().for_each(|nic| self.lies_on(nic, id, there));
            }
        }
        if !old.zip(new).is_some_and(|(old, new)| groups(old).eq(groups(new))) {
            for (lease, there) in sides(old, new) {
                groups(lease).for_each(|it| self.grouped.set(digest(it), id, there));
            }
        }
        set(&mut self.draining, id, new.is_some_and(|lease| lease.draining().is_some()));
        set(&mut self.away, id, new.is_some_and(Lease::is_away));
        if new.is_none() {
            for known in [&mut self.bare, &mut self.leaving, &mut self.degraded, &mut self.failed] {
                known.remove(&id);
            }
        }
    }

    /// A lease is on a NIC from now on, or is not.
    fn lies_on(&mut self, nic: &DeviceId, id: LeaseId, there: bool) {
        match self.on_nic.get_mut(nic) {
            Some(known) if there => drop(known.insert(id)),
            Some(known) => {
                known.remove(&id);
                if known.is_empty() {
                    self.on_nic.remove(nic);
                }
            }
            None if there => drop(self.on_nic.insert(nic.clone(), Sorted::from_iter([id]))),
            None => {}
        }
    }

    /// Instances that may have this name.
    pub(super) fn instances_named(&self, name: &str) -> impl Iterator<Item = InstanceId> {
        self.instances.get(digest(name))
    }

    /// Volumes that are not deleted and may have this name.
    pub(super) fn volumes_named(&self, name: &str) -> impl Iterator<Item = VolumeId> {
        self.volumes.get(digest(name))
    }

    /// The lease on a volume.
    pub(super) fn lease_of_volume(&self, volume: VolumeId) -> Option<LeaseId> {
        starting_with(&self.on_volume, volume, LEAST).next()
    }

    /// Leases that may have a socket of this name, on whatever host.
    pub(super) fn leases_with_socket(&self, socket: &str) -> impl Iterator<Item = LeaseId> {
        self.sockets.get(digest(socket))
    }

    /// Leases that may be of a group.
    pub(super) fn leases_of_group(&self, group: &str) -> impl Iterator<Item = LeaseId> {
        self.grouped.get(digest(group))
    }

    /// Volumes that may be of a group.
    pub(super) fn volumes_of_group(&self, group: &str) -> impl Iterator<Item = VolumeId> {
        self.grouped_volumes.get(digest(group))
    }

    /// The lease with this address.
    pub(super) fn lease_with_mac(&self, mac: MacAddress) -> Option<LeaseId> {
        self.macs.get(number(mac)).next()
    }

    /// The channels of an endpoint.
    pub(super) fn channels_of(&self, endpoint: EndpointId) -> impl Iterator<Item = ChannelId> {
        let to_backends = self.channels.get(&endpoint).into_iter().flat_map(BTreeMap::values);
        to_backends.chain(self.served.get(&endpoint).into_iter().flatten()).copied()
    }
}

/// Whether a lease is on the same devices as before.
pub(super) fn same_devices(old: Option<&Lease>, new: Option<&Lease>) -> bool {
    match (old.map(|it| &it.kind), new.map(|it| &it.kind)) {
        (Some(LeaseKind::Disk { volume, .. }), Some(LeaseKind::Disk { volume: now, .. })) => volume == now,
        (Some(LeaseKind::Nic { mac, .. }), Some(LeaseKind::Nic { mac: now, .. })) => {
            mac == now && old.into_iter().flat_map(Lease::nics).eq(new.into_iter().flat_map(Lease::nics))
        }
        (None, None) => true,
        _ => false,
    }
}

/// What goes, and then what comes.
fn sides<'a, T>(old: Option<&'a T>, new: Option<&'a T>) -> impl Iterator<Item = (&'a T, bool)> {
    old.map(|it| (it, false)).into_iter().chain(new.map(|it| (it, true)))
}

fn set<T: Ord>(all: &mut BTreeSet<T>, one: T, there: bool) {
    if there {
        all.insert(one);
    } else {
        all.remove(&one);
    }
}

/// As [`set`], of what belongs to somebody.
fn set_of<K, T: Ord>(all: &mut BTreeMap<K, BTreeSet<T>>, whose: &K, one: T, there: bool)
where
    K: Ord + Clone,
{
    if there {
        if let Some(known) = all.get_mut(whose) {
            known.insert(one);
        } else {
            all.insert(whose.clone(), BTreeSet::from([one]));
        }
    } else if let Some(known) = all.get_mut(whose) {
        known.remove(&one);
        if known.is_empty() {
            all.remove(whose);
        }
    }
}

/// What is kept under a key; `least` is the least that can be.
fn starting_with<K: Ord + Copy, T: Ord + Copy>(
    all: &BTreeSet<(K, T)>,
    key: K,
    least: T,
) -> impl Iterator<Item = T> {
    all.range((key, least)..).take_while(move |it| it.0 == key).map(|it| it.1)
}

/// The sockets of a lease, on both sides of a migration.
fn sockets(lease: &Lease) -> impl Iterator<Item = &str> {
    let incoming = lease.incoming.as_ref().map(|incoming| incoming.socket.as_str());
    [Some(lease.socket.as_str()), incoming].into_iter().flatten()
}

/// The groups that a lease wants to be near, or away from. They are no others of the same name.
fn groups(lease: &Lease) -> impl Iterator<Item = &str> {
    let both = match &lease.kind {
        LeaseKind::Nic { apart, together, .. } => [apart.as_deref(), together.as_deref()],
        LeaseKind::Disk { .. } => [None, None],
    };
    both.into_iter().flatten()
}

/// An address as what it is found by.
fn number(mac: MacAddress) -> u64 {
    mac.bytes().into_iter().fold(0, |number, byte| number << 8 | u64::from(byte))
}
