use std::collections::BTreeSet;

use cxl_channel::RingPlacement;
use cxl_pool::{EndpointId, Generation, LineCount};
use pod_protocol::ids::{ChannelId, LeaseId};

use super::{
    Channel, DeviceId, Effect, Health, Hold, Kind, Lease, LeaseKind, Options, Presence, Purpose, Rings,
    State, Volume,
};
use crate::api::EventKind;

impl State {
    /// Makes everything follow from the facts. Doing it twice changes nothing more.
    pub(super) fn settle(&mut self, effects: &mut Vec<Effect>) {
        self.end_lost_drains();
        self.change_rails();
        self.nics_leave(effects);
        // Twice: a lease without a backup may need one to move to, and one that moved may need another.
        self.choose_standbys();
        self.fail_over(effects);
        self.choose_standbys();
        self.drop_lost_replicas(effects);
        self.end_leaving_replicas(effects);
        self.finish_migrations(effects);
        self.volumes_leave(effects);
        let mut short = self.make_receive_areas();
        short |= self.make_guest_rams();
        short |= self.make_lease_areas();
        short |= self.make_boards();
        let pairs = self.pairs();
        self.drop_channels(&pairs);
        self.add_channels(pairs);
        short |= self.make_rings(effects);
        self.note_holders();
        self.fence_silent(effects);
        if short && !self.short {
            let message = "something that is needed does not fit: delete instances, or restart daemons that have yet \
                           to let go of quarantined regions";
            effects.push(Effect::event(EventKind::PoolFull, "pool", message));
        }
        self.short = short;
    }

    /// The frontend that serves a lease.
    pub fn frontend_of(&self, lease: &Lease) -> Option<EndpointId> {
        let role = lease.kind.frontend_role();
        self.instances.get(&lease.instance).map(|instance| EndpointId::new(instance.host, role))
    }

    /// The backend that serves a lease, and then those that take over, or that it has left.
    pub fn backends_of(&self, lease: &Lease) -> impl Iterator<Item = EndpointId> {
        let volume = lease.volume().and_then(|volume| self.volumes.get(&volume));
        let disk = volume.into_iter().flat_map(Volume::devices).map(DeviceId::blk_backend);
        let rails = lease.active_nic().map_or_else(Vec::new, |active| self.other_rails(active));
        let nics = lease.nics().chain(&rails).map(DeviceId::net_backend);
        // They are few, and asked for of all leases again and again.
        let mut backends: Vec<EndpointId> = Vec::with_capacity(4);
        for backend in nics.chain(disk) {
            if !backends.contains(&backend) {
                backends.push(backend);
            }
        }
        backends.into_iter()
    }

    /// The life of an endpoint that new things can be made for.
    pub(super) fn life_of(&self, id: EndpointId) -> Option<u64> {
        let there = |presence| matches!(presence, Presence::Joined | Presence::Silent);
        self.endpoints
            .get(&id)
            .filter(|endpoint| there(endpoint.presence))
            .map(|endpoint| endpoint.incarnation)
    }

    fn can_move(&self, lease: &Lease) -> bool {
        // One that is not trusted is better than none.
        lease.standby_nic().is_some_and(|standby| self.is_up(standby))
    }

    fn fail_over(&mut self, effects: &mut Vec<Effect>) {
        let moving: Vec<LeaseId> = self
            .leases
            .values()
            .filter(|lease| lease.active_nic().is_some_and(|nic| self.is_lost(nic)) && self.can_move(lease))
            .map(|lease| lease.id)
            .collect();
        for id in moving {
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            let LeaseKind::Nic { active, standby: Some(standby), draining, .. } = &mut lease.kind else {
                continue;
            };
            std::mem::swap(active, standby);
            *draining = None;
            lease.generation = lease.generation.next();
            self.failovers += 1;
            let (device, instance) = (lease.device.clone(), lease.instance);
            let message =
                format!("{device} moved from {} to {}", self.nic_name(id, false), self.nic_name(id, true));
            let subject =
                self.instances.get(&instance).map_or_else(String::new, |instance| instance.name.clone());
            effects.push(Effect::event(EventKind::Failover, subject, message));
        }
    }

    fn nic_name(&self, lease: LeaseId, active: bool) -> String {
        let lease = self.leases.get(&lease);
        let nic = lease.and_then(|lease| if active { lease.active_nic() } else { lease.standby_nic() });
        nic.map_or_else(String::new, |nic| self.device_name(nic))
    }

    /// Looks for a backup where there is none that works. One that fails and has no better stays: it may come back. A lease
    /// whose own NIC does not work either takes what there is, an ordinary NIC too.
    fn choose_standbys(&mut self) {
        let in_need: Vec<LeaseId> =
            self.leases.values().filter(|lease| self.needs_standby(lease)).map(|lease| lease.id).collect();
        if in_need.is_empty() {
            return;
        }
        let mut loads = self.loads();
        for id in in_need {
            let Some(lease) = self.leases.get(&id) else { continue };
            let LeaseKind::Nic { active, mtu, features, reserved_mbps, .. } = &lease.kind else { continue };
            let found = loads.place_standby(active, *mtu, *features, *reserved_mbps).map(|it| it.0);
            let any = || if self.is_up(active) { None } else { self.place_move(&loads, lease, false) };
            let Some(found) = found.or_else(any) else { continue };
            loads.forget(lease);
            if let Some(lease) = self.leases.get_mut(&id) {
                if let LeaseKind::Nic { standby, .. } = &mut lease.kind {
                    *standby = Some(found);
                }
                loads.note(lease);
            }
        }
    }

    fn needs_standby(&self, lease: &Lease) -> bool {
        let LeaseKind::Nic { active, standby, .. } = &lease.kind else { return false };
        let works = |id: &DeviceId| {
            let trusted =
                !self.is_drained(id) && self.devices.get(id).is_some_and(|device| device.held.is_none());
            // A NIC of its own group does not take over from the others: it fails with them, or works with them.
            trusted
                && !self.are_rails(active, id)
                && if self.is_up(active) { !self.is_lost(id) } else { self.is_up(id) }
        };
        !standby.as_ref().is_some_and(works)
    }

    /// Gives each life of a network backend its own areas: its predecessor's device may still write to the old ones.
    fn make_receive_areas(&mut self) -> bool {
        let mut short = false;
        let nics: Vec<DeviceId> =
            self.devices.iter().filter(|(_, device)| device.is_nic()).map(|(id, _)| id.clone()).collect();
        for id in nics {
            let life = self.life_of(id.net_backend());
            let Some(device) = self.devices.get_mut(&id) else { continue };
            let absent = device.health == Health::Absent;
            let Kind::Nic { rx, .. } = &mut device.kind else { continue };
            let wanted = if absent { None } else { life };
            let kept = rx.is_some_and(|hold| wanted == Some(hold.incarnation) || (life.is_none() && !absent));
            if kept {
                continue;
            }
            if let Some(old) = rx.take() {
                self.regions.retire(old.region);
            }
            if let Some(incarnation) = wanted {
                let purpose = Purpose::Receive(id.clone());
                let region = self.regions.allocate(self.options.rx_area, purpose, id.net_backend());
                *rx = region.map(|region| Hold { region, incarnation });
                short |= rx.is_none();
            }
        }
        short
    }

    /// Gives each life of a frontend its own areas.
    fn make_lease_areas(&mut self) -> bool {
        let mut short = false;
        let ids: Vec<LeaseId> = self.leases.keys().copied().collect();
        for id in ids {
            short |= self.make_incoming_area(id);
            let Some(lease) = self.leases.get(&id) else { continue };
            let Some(frontend) = self.frontend_of(lease) else { continue };
            let Some(incarnation) = self.life_of(frontend) else { continue };
            if lease.area.is_some_and(|hold| hold.incarnation == incarnation) {
                continue;
            }
            let incarnations =
                self.backends_of(lease).filter_map(|it| Some((it.host, self.life_of(it)?))).collect();
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            if let Some(old) = lease.area.take() {
                self.regions.retire(old.region);
            }
            let (lines, purpose) = area_of(&self.options, lease);
            let region = self.regions.allocate(lines, purpose, frontend);
            lease.area = region.map(|region| Hold { region, incarnation });
            short |= region.is_none();
            if let LeaseKind::Disk { clean_for, .. } = &mut lease.kind {
                *clean_for = incarnations;
            }
        }
        short
    }

    /// Gives the frontend to which a lease moves an area of its own. True if there was no room.
    fn make_incoming_area(&mut self, id: LeaseId) -> bool {
        let frontend = self.leases.get(&id).and_then(|lease| self.incoming_frontend(lease));
        let Some((frontend, incarnation)) = frontend.and_then(|it| Some((it, self.life_of(it)?))) else {
            return false;
        };
        let Some(lease) = self.leases.get_mut(&id) else { return false };
        let (lines, purpose) = area_of(&self.options, lease);
        let Some(incoming) = &mut lease.incoming else { return false };
        if incoming.area.is_some_and(|hold| hold.incarnation == incarnation) {
            return false;
        }
        if let Some(old) = incoming.area.take() {
            self.regions.retire(old.region);
        }
        let region = self.regions.allocate(lines, purpose, frontend);
        incoming.area = region.map(|region| Hold { region, incarnation });
        region.is_none()
    }

    /// The pairs of endpoints that leases join.
    fn pairs(&self) -> BTreeSet<(EndpointId, EndpointId)> {
        let pairs = self
            .leases
            .values()
            .flat_map(|lease| self.frontends_of(lease).map(move |frontend| (frontend, lease)));
        pairs
            .flat_map(|(frontend, lease)| self.backends_of(lease).map(move |backend| (frontend, backend)))
            .collect()
    }

    /// The channel between two endpoints.
    pub(super) fn channel_between(&self, frontend: EndpointId, backend: EndpointId) -> Option<&Channel> {
        self.channels.values().find(|channel| channel.frontend == frontend && channel.backend == backend)
    }

    fn drop_channels(&mut self, pairs: &BTreeSet<(EndpointId, EndpointId)>) {
        let regions = &mut self.regions;
        self.channels.retain(|_, channel| {
            let kept = pairs.contains(&(channel.frontend, channel.backend));
            if let Some(rings) = channel.rings.filter(|_| !kept) {
                regions.retire(rings.to_backend);
                regions.retire(rings.to_frontend);
            }
            kept
        });
    }

    fn add_channels(&mut self, pairs: BTreeSet<(EndpointId, EndpointId)>) {
        let known: BTreeSet<(EndpointId, EndpointId)> =
            self.channels.values().map(|channel| (channel.frontend, channel.backend)).collect();
        for (frontend, backend) in pairs {
            if !known.contains(&(frontend, backend)) {
                self.last.channel += 1;
                let id = ChannelId::new(self.last.channel);
                let generation = Generation::default();
                self.channels.insert(id, Channel { id, frontend, backend, generation, rings: None });
            }
        }
    }

    /// Makes rings for each pair of lives. Until then the side that lives on keeps the old ones: it loses nothing by
    /// waiting, and resubmits when the new ones come.
    fn make_rings(&mut self, effects: &mut Vec<Effect>) -> bool {
        let mut short = false;
        let ids: Vec<ChannelId> = self.channels.keys().copied().collect();
        let unclean = self.unclean_pairs();
        for id in ids {
            let Some(channel) = self.channels.get(&id) else { continue };
            let (Some(frontend_incarnation), Some(backend_incarnation)) =
                (self.life_of(channel.frontend), self.life_of(channel.backend))
            else {
                continue;
            };
            let current = channel.rings.is_some_and(|rings| {
                rings.frontend_incarnation == frontend_incarnation
                    && rings.backend_incarnation == backend_incarnation
            });
            if current || unclean.contains(&(channel.frontend, channel.backend)) {
                continue;
            }
            let (frontend, backend, engine) = (channel.frontend, channel.backend, channel.engine());
            let lines = self.options.ring_lines(engine);
            let Some(to_backend) = self.regions.allocate(lines, Purpose::Ring(id), frontend) else {
                short = true;
                continue;
            };
            let Some(to_frontend) = self.regions.allocate(lines, Purpose::Ring(id), backend) else {
                self.regions.cancel(to_backend);
                short = true;
                continue;
            };
            let slots = self.options.slots(engine);
            for region in [to_backend, to_frontend].into_iter().filter_map(|id| self.regions.get(id)) {
                effects.push(Effect::Clear(RingPlacement { start: region.area.start, slots }));
            }
            let rings = Rings { to_backend, to_frontend, slots, frontend_incarnation, backend_incarnation };
            let Some(channel) = self.channels.get_mut(&id) else { continue };
            channel.generation = channel.generation.next();
            if let Some(old) = channel.rings.replace(rings) {
                self.regions.retire(old.to_backend);
                self.regions.retire(old.to_frontend);
            }
        }
        short
    }

    /// Frontends and storage backends that have yet to flush what they would share over their channel.
    fn unclean_pairs(&self) -> BTreeSet<(EndpointId, EndpointId)> {
        let mut unclean = BTreeSet::new();
        for lease in self.leases.values().filter(|lease| lease.area.is_some()) {
            let LeaseKind::Disk { clean_for, .. } = &lease.kind else { continue };
            let Some(frontend) = self.frontend_of(lease) else { continue };
            for backend in self.backends_of(lease) {
                let life = self.life_of(backend);
                if life.is_none_or(|life| clean_for.get(&backend.host) != Some(&life))
                    || self.unclean_ram(lease, backend).is_some()
                {
                    unclean.insert((frontend, backend));
                }
            }
        }
        unclean
    }

    /// Notes who is given what, since each of them has to let go before it can be given to others. Whoever is not there
    /// is given nothing; when it comes, this is done again.
    fn note_holders(&mut self) {
        let mut held = Vec::new();
        for lease in self.leases.values() {
            let endpoints: Vec<EndpointId> =
                self.frontend_of(lease).into_iter().chain(self.backends_of(lease)).collect();
            held.extend(
                lease.area.into_iter().flat_map(|area| endpoints.iter().map(move |it| (area.region, *it))),
            );
            if let Some(ram) = self.instances.get(&lease.instance).and_then(|it| it.ram.as_ref()) {
                held.extend(ram.region.into_iter().flat_map(|it| endpoints.iter().map(move |id| (it, *id))));
                held.extend(ram.incoming.zip(self.incoming_frontend(lease)));
            }
            let incoming = lease.incoming.as_ref().and_then(|incoming| incoming.area);
            held.extend(incoming.and_then(|area| Some((area.region, self.incoming_frontend(lease)?))));
            for nic in self.nics_of(lease) {
                if let Some(Kind::Nic { rx: Some(rx), .. }) =
                    self.devices.get(&nic).map(|device| &device.kind)
                {
                    held.extend(self.frontends_of(lease).map(|frontend| (rx.region, frontend)));
                }
            }
        }
        for channel in self.channels.values() {
            for ring in channel.rings.iter().flat_map(|rings| [rings.to_backend, rings.to_frontend]) {
                held.extend([(ring, channel.frontend), (ring, channel.backend)]);
            }
        }
        held.extend(self.held_boards());
        for (region, endpoint) in held {
            if self.life_of(endpoint).is_some() {
                self.regions.hold(region, endpoint);
            }
        }
    }

    /// Fences silent backends whose leases have somewhere to go. Others are left alone: fencing them would only add
    /// to the harm.
    fn fence_silent(&mut self, effects: &mut Vec<Effect>) {
        let fenced: BTreeSet<EndpointId> = self
            .leases
            .values()
            .flat_map(|lease| {
                let nics = lease.active_nic().map_or_else(Vec::new, |active| self.rails_of(active));
                nics.into_iter().filter(|nic| self.goes_on_without(lease, nic)).map(|nic| nic.net_backend())
            })
            .filter(|backend| self.endpoints.get(backend).is_some_and(|it| it.presence == Presence::Silent))
            .chain(self.silent_replicas())
            .collect();
        for id in fenced {
            if let Some(endpoint) = self.endpoints.get_mut(&id) {
                endpoint.presence = Presence::Fencing;
                effects.push(Effect::Fence(id));
                let message = "it is silent, and what it serves can be served without it";
                effects.push(Effect::event(EventKind::EndpointFenced, self.endpoint_name(id), message));
            }
        }
    }
}

/// How large the area of a lease is, and what it is for.
pub(super) fn area_of(options: &Options, lease: &Lease) -> (LineCount, Purpose) {
    match lease.kind {
        LeaseKind::Nic { .. } => (options.tx_area, Purpose::Transmit(lease.id)),
        LeaseKind::Disk { .. } => (options.data_area, Purpose::Data(lease.id)),
    }
}
