//! Instances that are made without looking at the rest of the pod.
//!
//! What a pod has is settled after each command, and an instance with nothing but NICs takes only what is free: it changes nothing
//! for others. So it is enough to make what belongs to it, and to find things by an index. The result is the same, to the
//! last number, as if all of the pod were settled again.

use std::collections::{BTreeMap, BTreeSet};

use cxl_channel::RingPlacement;
use cxl_pool::{EndpointId, Generation, HostId};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseId, MacAddress, RegionId};

use super::create::Wanted;
use super::loads::Loads;
use super::settle::area_of;
use super::{
    Channel, DeviceId, Effect, Hold, Kind, Lease, LeaseKind, Presence, Purpose, Refusal, Rings, State,
};

/// What is found quickly. It follows from the state, is kept from one creation to the next, and is made anew when anything else
/// happened.
#[derive(Debug, Default)]
pub(super) struct Index(Option<Box<Found>>);

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) instances: BTreeSet<String>,
    pub(super) sockets: BTreeSet<(HostId, String)>,
    pub(super) macs: BTreeMap<MacAddress, InstanceId>,
    pub(super) loads: Loads,
    channels: BTreeMap<(EndpointId, EndpointId), ChannelId>,
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

impl Found {
    /// A lease came to a host.
    pub(super) fn note(&mut self, host: HostId, lease: &Lease) {
        self.sockets.insert((host, lease.socket.clone()));
        if let LeaseKind::Nic { mac, .. } = lease.kind {
            self.macs.insert(mac, lease.instance);
        }
        self.loads.note(lease);
    }

    fn forget(&mut self, host: HostId, lease: &Lease) {
        self.sockets.remove(&(host, lease.socket.clone()));
        if let LeaseKind::Nic { mac, .. } = lease.kind {
            self.macs.remove(&mac);
        }
        self.loads.forget(lease);
    }
}

impl State {
    /// Whether an instance can be made without settling all of the pod.
    pub(super) fn is_quick(&self, wanted: &Wanted<'_>) -> bool {
        wanted.volumes.is_empty() && wanted.ram_bytes.is_none() && !self.short
    }

    /// Something other than a quick creation is about to happen.
    pub(super) fn drop_index(&mut self) {
        self.found = Index(None);
    }

    /// Makes an instance that has nothing but NICs. False if the pool has no room for all of it: then nothing has changed, and
    /// whether what is being let go of makes the room is a matter for all of the pod.
    pub(super) fn create_quickly(
        &mut self,
        wanted: &Wanted<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<bool, Refusal> {
        let mut found = match self.found.0.take() {
            Some(found) => found,
            None => Box::new(self.find_all()),
        };
        let created = self.create_with(wanted, &mut found, effects);
        self.found = Index(Some(found));
        created
    }

    fn create_with(
        &mut self,
        wanted: &Wanted<'_>,
        found: &mut Found,
        effects: &mut Vec<Effect>,
    ) -> Result<bool, Refusal> {
        let instance_type = self.type_named(wanted.instance_type)?;
        let nics = &instance_type.complete(wanted.nics)[..];
        self.check_instance(wanted, found.instances.contains(wanted.name), nics)?;
        let (last, last_region) = (self.last.clone(), self.regions.last());
        let effects_before = effects.len();
        let id = self.begin_instance(wanted, nics.len(), effects);
        let mut made = Made::default();
        let tried = self.add_nics(id, wanted, nics, found);
        if tried.is_ok() && self.make_own(id, found, &mut made, effects) {
            self.note_own(id, &made);
            found.instances.insert(wanted.name.to_owned());
            return Ok(true);
        }
        effects.truncate(effects_before);
        let leases = self.instances.remove(&id).map(|it| it.nics).unwrap_or_default();
        for lease in leases.iter().filter_map(|lease| self.leases.remove(lease)) {
            found.forget(wanted.host, &lease);
        }
        for (pair, channel) in &made.channels {
            self.channels.remove(channel);
            found.channels.remove(pair);
        }
        made.regions.iter().for_each(|region| self.regions.cancel(*region));
        self.last = last;
        self.regions.set_last(last_region);
        tried.map(|()| false)
    }

    /// Everything that is found quickly, found slowly.
    pub(super) fn find_all(&self) -> Found {
        let host_of = |lease: &Lease| self.instances.get(&lease.instance).map(|it| (it.host, it.incoming));
        let mut sockets = BTreeSet::new();
        let mut macs = BTreeMap::new();
        for lease in self.leases.values() {
            let Some((host, incoming)) = host_of(lease) else { continue };
            sockets.insert((host, lease.socket.clone()));
            if let (Some(to), Some(incoming)) = (incoming, &lease.incoming) {
                sockets.insert((to, incoming.socket.clone()));
            }
            if let LeaseKind::Nic { mac, .. } = lease.kind {
                macs.insert(mac, lease.instance);
            }
        }
        Found {
            instances: self.instances.values().map(|it| it.name.clone()).collect(),
            sockets,
            macs,
            loads: self.loads(),
            channels: self.channels.values().map(|it| ((it.frontend, it.backend), it.id)).collect(),
        }
    }

    /// Whether what was kept from one creation to the next is what is there.
    #[cfg(test)]
    pub(super) fn finds_all(&self) -> bool {
        self.found.0.as_deref().is_none_or(|found| *found == self.find_all())
    }

    /// Areas, channels and rings, in the order in which settling makes them. False if there is no room.
    fn make_own(
        &mut self,
        id: InstanceId,
        found: &mut Found,
        made: &mut Made,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let leases: Vec<LeaseId> = self.instances.get(&id).map(|it| it.nics.clone()).unwrap_or_default();
        let mut pairs: BTreeSet<(EndpointId, EndpointId)> = BTreeSet::new();
        for lease_id in leases {
            let Some(lease) = self.leases.get(&lease_id) else { continue };
            let Some(frontend) = self.frontend_of(lease) else { continue };
            let silent = |nic: &DeviceId| {
                let known = self.endpoints.get(&nic.net_backend());
                known.is_some_and(|it| it.presence == Presence::Silent)
            };
            if lease.active_nic().is_some_and(|active| self.other_rails(active).iter().any(silent)) {
                // With a lease that can do without it, it is fenced.
                return false;
            }
            pairs.extend(self.backends_of(lease).map(|backend| (frontend, backend)));
            let Some(incarnation) = self.life_of(frontend) else { continue };
            let (lines, purpose) = area_of(&self.options, lease);
            let Some(region) = self.regions.allocate(lines, purpose, frontend) else { return false };
            made.regions.push(region);
            if let Some(lease) = self.leases.get_mut(&lease_id) {
                lease.area = Some(Hold { region, incarnation });
            }
        }
        for pair in pairs {
            if found.channels.contains_key(&pair) {
                continue;
            }
            let (frontend, backend) = pair;
            self.last.channel += 1;
            let id = ChannelId::new(self.last.channel);
            let generation = Generation::default();
            self.channels.insert(id, Channel { id, frontend, backend, generation, rings: None });
            found.channels.insert(pair, id);
            made.channels.push((pair, id));
        }
        made.channels.clone().into_iter().all(|(_, id)| self.make_own_rings(id, made, effects))
    }

    fn make_own_rings(&mut self, id: ChannelId, made: &mut Made, effects: &mut Vec<Effect>) -> bool {
        let Some(channel) = self.channels.get(&id) else { return false };
        let (frontend, backend, engine) = (channel.frontend, channel.backend, channel.engine());
        let (Some(frontend_incarnation), Some(backend_incarnation)) =
            (self.life_of(frontend), self.life_of(backend))
        else {
            // They are made when it is there.
            return true;
        };
        let lines = self.options.ring_lines(engine);
        let Some(to_backend) = self.regions.allocate(lines, Purpose::Ring(id), frontend) else {
            return false;
        };
        made.regions.push(to_backend);
        let Some(to_frontend) = self.regions.allocate(lines, Purpose::Ring(id), backend) else {
            return false;
        };
        made.regions.push(to_frontend);
        let slots = self.options.slots(engine);
        for region in [to_backend, to_frontend].into_iter().filter_map(|id| self.regions.get(id)) {
            effects.push(Effect::Clear(RingPlacement { start: region.area.start, slots }));
        }
        let rings = Rings { to_backend, to_frontend, slots, frontend_incarnation, backend_incarnation };
        if let Some(channel) = self.channels.get_mut(&id) {
            channel.generation = channel.generation.next();
            channel.rings = Some(rings);
        }
        true
    }

    /// Notes who is given what of it.
    fn note_own(&mut self, id: InstanceId, made: &Made) {
        let mut held: Vec<(RegionId, EndpointId)> = Vec::new();
        let leases = self.instances.get(&id).into_iter().flat_map(|it| &it.nics);
        for lease in leases.filter_map(|id| self.leases.get(id)) {
            let Some(frontend) = self.frontend_of(lease) else { continue };
            if let Some(area) = lease.area {
                held.extend(self.backends_of(lease).chain([frontend]).map(|it| (area.region, it)));
            }
            for nic in self.nics_of(lease) {
                if let Some(Kind::Nic { rx: Some(rx), .. }) =
                    self.devices.get(&nic).map(|device| &device.kind)
                {
                    held.push((rx.region, frontend));
                }
            }
        }
        for channel in made.channels.iter().filter_map(|(_, id)| self.channels.get(id)) {
            for ring in channel.rings.iter().flat_map(|rings| [rings.to_backend, rings.to_frontend]) {
                held.extend([(ring, channel.frontend), (ring, channel.backend)]);
            }
        }
        for (region, endpoint) in held {
            if self.life_of(endpoint).is_some() {
                self.regions.hold(region, endpoint);
            }
        }
    }
}

/// What was made and would have to go again.
#[derive(Default)]
struct Made {
    regions: Vec<RegionId>,
    channels: Vec<((EndpointId, EndpointId), ChannelId)>,
}
