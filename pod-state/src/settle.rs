use std::collections::BTreeSet;

use cxl_pool::{EndpointId, LineCount};
use pod_api::EventKind;
use pod_protocol::ids::{ChannelId, LeaseId};

use super::backups::InNeed;
use super::index::Life;
use super::wanting::Wanting;
use super::{
    DeviceId, Effect, Endpoint, Health, Hold, Kind, Lease, LeaseKind, Options, Presence, Purpose, State,
    Volume,
};

impl State {
    /// Makes everything follow from the facts that were changed. All the rest does so already, so that to look at all of the pod
    /// would give the same; what finds no room waits for any change, and is tried again each time. Doing it twice changes nothing more.
    pub(super) fn settle(&mut self, effects: &mut Vec<Effect>) {
        self.follow();
        if self.short {
            self.touch_wanting();
        }
        if self.is_settled() {
            return;
        }
        // Each step may be what the next one has to look at.
        self.end_lost_drains();
        self.follow();
        self.change_rails();
        self.follow();
        self.nics_leave(effects);
        // A lease without a backup may need one to move to, and one that moved may need another.
        let defers = self.defers_backups();
        self.choose_backups(if defers { InNeed::Stranded } else { InNeed::All });
        self.fail_over(effects);
        let moved = !self.leases.is_followed();
        if moved {
            self.follow();
            if self.decides_by_more() {
                // One may have fled to a NIC of a group that is to be empty while others of the group are not.
                self.change_rails();
                self.follow();
            }
        }
        if moved && defers {
            self.defer_backups();
        }
        if moved || defers {
            self.choose_backups(InNeed::All);
        }
        self.drop_lost_replicas(effects);
        self.follow();
        self.end_leaving_replicas(effects);
        self.follow();
        self.end_column_moves(effects);
        self.follow();
        self.end_moves_within_hosts(effects);
        self.follow();
        if self.finish_migrations(effects) {
            // What was on its way from one NIC to another is not any more, and may have to leave the one where it is.
            self.follow();
            self.nics_leave(effects);
        }
        self.follow();
        self.volumes_leave(effects);
        self.follow();
        let mut wanting = Wanting::default();
        self.make_receive_areas(&mut wanting);
        self.make_guest_rams(&mut wanting);
        self.follow();
        self.make_lease_areas(&mut wanting);
        self.make_boards(&mut wanting);
        self.drop_channels();
        let new = self.add_channels();
        self.follow();
        let made = self.make_rings(&new, &mut wanting, effects);
        self.follow();
        self.note_holders(&made);
        let fenced = self.fence_silent(effects);
        self.follow();
        let short = !wanting.is_empty();
        if short && fenced {
            // Who is fenced needs nothing: it may be that all others have what they need.
            self.touch_everything();
            return self.settle(effects);
        }
        if self.has_way_out() {
            // What finds no room is all that is looked at again for that, and not all of the pod.
            if let Some(found) = &mut self.known.0 {
                found.wanting = Some(wanting);
            }
            // Each time one more leaves at least.
            return self.settle(effects);
        }
        if let Some(mut found) = self.known.0.take() {
            self.note_stale(&mut found);
            found.work.done();
            found.wanting = Some(wanting);
            self.known.0 = Some(found);
        }
        if short && !self.short {
            let message = "something that is needed does not fit: delete instances, or restart daemons that have yet \
                           to let go of quarantined regions";
            effects.push(Effect::event(EventKind::PoolFull, "pool", message));
        }
        self.short = short;
    }

    /// Whether nothing was touched since this was done last, and nothing is tried again and again.
    fn is_settled(&self) -> bool {
        let found = self.found();
        !self.short
            && self.drained_hosts.is_empty()
            && found.is_some_and(|found| found.drained.is_empty() && found.work.is_done())
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
        self.look_at(id).filter(|life| there(life.presence)).map(|life| life.incarnation)
    }

    /// Whether an endpoint is there, in which life.
    pub(super) fn look_at(&self, id: EndpointId) -> Option<Life> {
        match self.found().filter(|_| self.endpoints.is_followed()) {
            Some(found) => found.lives.get(id),
            None => self.endpoints.get(&id).map(Endpoint::life),
        }
    }

    pub(super) fn is_silent(&self, id: EndpointId) -> bool {
        self.look_at(id).is_some_and(|life| life.presence == Presence::Silent)
    }

    fn can_move(&self, lease: &Lease) -> bool {
        // One that is not trusted is better than none.
        lease.standby_nic().is_some_and(|standby| self.is_up(standby))
    }

    fn fail_over(&mut self, effects: &mut Vec<Effect>) {
        let moving: Vec<LeaseId> = self
            .touched()
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

    /// Gives each life of a network backend its own areas: its predecessor's device may still write to the old ones.
    fn make_receive_areas(&mut self, wanting: &mut Wanting) {
        let touched: Vec<DeviceId> = self.work().flat_map(|work| &work.devices).cloned().collect();
        for id in touched {
            let life = self.life_of(id.net_backend());
            let Some(device) = self.devices.get(&id) else { continue };
            let absent = device.health == Health::Absent;
            let Kind::Nic { rx, .. } = &device.kind else { continue };
            let wanted = if absent { None } else { life };
            let kept = rx.is_some_and(|hold| wanted == Some(hold.incarnation) || (life.is_none() && !absent));
            if kept || rx.is_none() && wanted.is_none() {
                continue;
            }
            let Some(Kind::Nic { rx, .. }) = self.devices.get_mut(&id).map(|device| &mut device.kind) else {
                continue;
            };
            if let Some(old) = rx.take() {
                self.regions.retire(old.region);
            }
            if let Some(incarnation) = wanted {
                let purpose = Purpose::Receive(id.clone());
                let region = self.regions.allocate(self.options.rx_area, purpose, id.net_backend());
                *rx = region.map(|region| Hold { region: region.id, incarnation });
                if rx.is_none() {
                    wanting.devices.insert(id);
                }
            }
        }
    }

    /// Gives each life of a frontend its own areas.
    fn make_lease_areas(&mut self, wanting: &mut Wanting) {
        let ids: Vec<LeaseId> = self.touched().map(|lease| lease.id).collect();
        for id in ids {
            if !self.make_incoming_area(id) {
                wanting.leases.insert(id);
            }
            let Some(lease) = self.leases.get(&id) else { continue };
            let Some(frontend) = self.frontend_of(lease) else { continue };
            let Some(incarnation) = self.life_of(frontend) else { continue };
            if lease.area.is_some_and(|hold| hold.incarnation == incarnation) {
                continue;
            }
            let incarnations =
                self.backends_of(lease).filter_map(|it| Some((it.host, self.life_of(it)?))).collect();
            let Some(lease) = self.leases.get_mut_aside(&id) else { continue };
            if let Some(old) = lease.area.take() {
                self.regions.retire(old.region);
            }
            let (lines, purpose) = area_of(&self.options, lease);
            let region = self.regions.allocate(lines, purpose, frontend);
            lease.area = region.map(|region| Hold { region: region.id, incarnation });
            if lease.area.is_none() {
                wanting.leases.insert(id);
            }
            if let LeaseKind::Disk { clean_for, .. } = &mut lease.kind {
                *clean_for = incarnations;
            }
        }
    }

    /// Gives the frontend to which a lease moves an area of its own. False if there was no room.
    fn make_incoming_area(&mut self, id: LeaseId) -> bool {
        let frontend = self.leases.get(&id).and_then(|lease| self.incoming_frontend(lease));
        let Some((frontend, incarnation)) = frontend.and_then(|it| Some((it, self.life_of(it)?))) else {
            return true;
        };
        let is_made = |lease: &Lease| {
            let area = lease.incoming.as_ref().and_then(|incoming| incoming.area);
            area.is_some_and(|hold| hold.incarnation == incarnation)
        };
        if self.leases.get(&id).is_some_and(is_made) {
            return true;
        }
        let Some(lease) = self.leases.get_mut(&id) else { return true };
        let (lines, purpose) = area_of(&self.options, lease);
        let Some(incoming) = &mut lease.incoming else { return true };
        if let Some(old) = incoming.area.take() {
            self.regions.retire(old.region);
        }
        let region = self.regions.allocate(lines, purpose, frontend);
        incoming.area = region.map(|region| Hold { region: region.id, incarnation });
        incoming.area.is_some()
    }

    /// Notes who is given what, since each of them has to let go before it can be given to others. Whoever is not there
    /// is given nothing; when it comes, this is done again. Of the rings that were just made that is known.
    fn note_holders(&mut self, ringed: &[ChannelId]) {
        let is_there = |endpoint: &EndpointId| self.life_of(*endpoint).is_some();
        let mut held = Vec::new();
        for lease in self.touched() {
            let frontend = self.frontend_of(lease).filter(is_there);
            let ram = self.instances.get(&lease.instance).and_then(|it| it.ram.as_ref());
            let shared = lease.area.map(|area| area.region).into_iter().chain(ram.and_then(|ram| ram.region));
            let backends = self.backends_of(lease).filter(is_there);
            let endpoints: Vec<EndpointId> = frontend.into_iter().chain(backends).collect();
            held.extend(shared.flat_map(|region| endpoints.iter().map(move |it| (region, *it))));
            let incoming = self.incoming_frontend(lease).filter(is_there);
            if let Some(incoming) = incoming {
                let area = lease.incoming.as_ref().and_then(|it| it.area).map(|area| area.region);
                let regions = area.into_iter().chain(ram.and_then(|ram| ram.incoming));
                held.extend(regions.map(|region| (region, incoming)));
            }
            let others = lease.active_nic().map_or_else(Vec::new, |active| self.other_rails(active));
            for nic in lease.nics().chain(&others) {
                if let Some(Kind::Nic { rx: Some(rx), .. }) = self.devices.get(nic).map(|device| &device.kind)
                {
                    let frontends = frontend.into_iter().chain(incoming);
                    held.extend(frontends.map(|frontend| (rx.region, frontend)));
                }
            }
        }
        let touched = self.work().flat_map(|work| &work.channels);
        let touched = touched.filter(|id| ringed.binary_search(id).is_err());
        for channel in touched.filter_map(|id| self.channels.get(id)) {
            let sides = [channel.frontend, channel.backend].map(|side| Some(side).filter(is_there));
            for ring in channel.rings.iter().flat_map(|rings| [rings.to_backend, rings.to_frontend]) {
                held.extend(sides.into_iter().flatten().map(|side| (ring, side)));
            }
        }
        held.extend(self.held_boards().into_iter().filter(|(_, reader)| is_there(reader)));
        for one in held.chunk_by(|(region, _), (next, _)| region == next) {
            if let Some((region, _)) = one.first() {
                self.regions.hold(*region, one.iter().map(|(_, endpoint)| *endpoint));
            }
        }
    }

    /// Fences silent backends whose leases have somewhere to go. Others are left alone: fencing them would only add
    /// to the harm. True if there were any.
    fn fence_silent(&mut self, effects: &mut Vec<Effect>) -> bool {
        if self.endpoints.is_followed() && self.found().is_some_and(|found| !found.lives.any_silent()) {
            return false;
        }
        let fenced: BTreeSet<EndpointId> = self
            .touched()
            .flat_map(|lease| {
                let nics = lease.active_nic().map_or_else(Vec::new, |active| self.rails_of(active));
                let silent = nics.into_iter().filter(|nic| self.is_silent(nic.net_backend()));
                silent.filter(|nic| self.goes_on_without(lease, nic)).map(|nic| nic.net_backend())
            })
            .chain(self.silent_replicas())
            .collect();
        for id in &fenced {
            self.fence(*id, "it is silent, and what it serves can be served without it", effects);
        }
        !fenced.is_empty()
    }
}

/// How large the area of a lease is, and what it is for.
fn area_of(options: &Options, lease: &Lease) -> (LineCount, Purpose) {
    match lease.kind {
        LeaseKind::Nic { .. } => (options.tx_area, Purpose::Transmit(lease.id)),
        LeaseKind::Disk { .. } => (options.data_area, Purpose::Data(lease.id)),
    }
}
