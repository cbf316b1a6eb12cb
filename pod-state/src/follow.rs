//! How what is looked up, and what has yet to be settled, follow the changes of the state.

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::ids::{LeaseId, VolumeId};
use smol_str::SmolStr;

use super::index::{Found, Index, same_devices};
use super::loads::leans_alike;
use super::ssd_loads::{SsdLoads, takes_alike};
use super::stale::Stale;
use super::table::{Past, Was};
use super::work::Work;
use super::{Device, DeviceId, Effect, Endpoint, Hold, Kind, Lease, Refusal, State, Volume};

impl State {
    /// What is found quickly; nothing in a copy of a state.
    pub(super) fn found(&self) -> Option<&Found> {
        self.known.0.as_deref()
    }

    /// What was touched and has yet to be settled.
    pub(super) fn work(&self) -> impl Iterator<Item = &Work> {
        self.found().map(|found| &found.work).into_iter()
    }

    /// The leases around what was touched.
    pub(super) fn touched(&self) -> impl Iterator<Item = &Lease> {
        self.work().flat_map(|work| &work.leases).filter_map(|id| self.leases.get(id))
    }

    /// Looks things up in all of the state, once.
    pub(super) fn find_all(&self) -> Found {
        let mut found = Found::default();
        self.endpoints.iter().for_each(|(id, it)| found.lives.follow(*id, Some(it)));
        self.devices.iter().for_each(|(id, it)| found.follow_device(id, None, Some(it)));
        self.volumes.iter().for_each(|(id, it)| found.follow_volume(*id, None, Some(it)));
        self.instances.iter().for_each(|(id, it)| found.follow_instance(*id, None, Some(it)));
        self.leases.iter().for_each(|(id, it)| found.follow_lease(*id, None, Some(it)));
        self.channels.iter().for_each(|(id, it)| found.follow_channel(*id, None, Some(it)));
        (found.loads, found.ssds) = (self.loads(), self.ssd_loads());
        for (id, lease) in &self.leases {
            let ways = [
                (self.needs_standby(lease), &mut found.bare),
                (self.is_to_leave(lease), &mut found.leaving),
                (self.is_degraded(lease), &mut found.degraded),
                (self.is_failed_disk(lease), &mut found.failed),
            ];
            ways.into_iter().filter(|(is_so, _)| *is_so).for_each(|(_, all)| {
                all.insert(*id);
            });
        }
        found
    }

    /// Whether what was kept from one command to the next is what is there.
    #[cfg(any(test, feature = "model"))]
    pub fn finds_all(&self) -> bool {
        // A command that was refused may have been handed rows to change, and left them: these are looked at by the next one.
        let keeps = |found: &Found| {
            let mut all = self.find_all();
            (all.work, all.stale) = (found.work.clone(), found.stale.clone());
            all.wanting.clone_from(&found.wanting);
            *found == all
        };
        self.regions.finds_all() && self.found().is_none_or(keeps)
    }

    /// A command begins. What was changed before is not taken back any more.
    pub(super) fn begin(&mut self) {
        if self.known.0.is_none() {
            self.known = Index(Some(Box::new(self.find_all())));
            self.everyone_is_stale();
            // All of it was seen.
            self.endpoints.begin_to_follow();
            self.devices.begin_to_follow();
            self.volumes.begin_to_follow();
            self.instances.begin_to_follow();
            self.leases.begin_to_follow();
            self.channels.begin_to_follow();
            self.fabric.boards.begin_to_follow();
            self.fabric.mchannels.begin_to_follow();
        }
        self.follow();
        self.commit();
    }

    fn commit(&mut self) {
        self.endpoints.commit();
        self.devices.commit();
        self.volumes.commit();
        self.instances.commit();
        self.leases.commit();
        self.channels.commit();
        self.fabric.boards.commit();
        self.fabric.mchannels.commit();
        self.regions.commit();
    }

    /// Whether the command has changed any row.
    pub(super) fn rows_changed(&self) -> bool {
        self.endpoints.has_changed()
            || self.devices.has_changed()
            || self.volumes.has_changed()
            || self.instances.has_changed()
            || self.leases.has_changed()
            || self.channels.has_changed()
            || self.fabric.boards.has_changed()
            || self.fabric.mchannels.has_changed()
    }

    pub(super) fn is_followed(&self) -> bool {
        self.endpoints.is_followed()
            && self.devices.is_followed()
            && self.volumes.is_followed()
            && self.instances.is_followed()
            && self.leases.is_followed()
            && self.channels.is_followed()
            && self.fabric.boards.is_followed()
            && self.fabric.mchannels.is_followed()
    }

    /// Has what is looked up follow what was changed, and notes what may have to follow from it.
    pub(super) fn follow(&mut self) {
        if self.is_followed() {
            return;
        }
        let Some(mut found) = self.known.0.take() else { return };
        let (endpoints, devices) = (self.endpoints.begin_to_follow(), self.devices.begin_to_follow());
        let (volumes, instances) = (self.volumes.begin_to_follow(), self.instances.begin_to_follow());
        let (leases, channels) = (self.leases.begin_to_follow(), self.channels.begin_to_follow());
        let (boards, mchannels) =
            (self.fabric.boards.begin_to_follow(), self.fabric.mchannels.begin_to_follow());
        // First what is looked up, then what is found by it.
        for id in endpoints.keys() {
            found.lives.follow(*id, self.endpoints.get(id));
        }
        for (id, old) in changed(&volumes) {
            found.follow_volume(*id, old.row(), self.volumes.get(id));
        }
        for (id, old) in changed(&instances) {
            found.follow_instance(*id, old.row(), self.instances.get(id));
        }
        for (id, old) in changed(&channels) {
            found.follow_channel(*id, old.row(), self.channels.get(id));
        }
        for (id, old) in changed(&devices) {
            found.follow_device(id, old.row(), self.devices.get(id));
        }
        for (id, old) in changed(&leases) {
            found.follow_lease(*id, old.row(), self.leases.get(id));
        }
        self.follow_loads(&mut found, &endpoints, &devices, &leases);
        self.follow_ssds(&mut found.ssds, &endpoints, &devices, &volumes);
        let mut work = std::mem::take(&mut found.work);
        let now = mchannels.keys().filter_map(|id| self.instances.get(id));
        now.chain(instances.values().filter_map(Was::row)).for_each(|it| found.stale.instance(it));
        let mut stale = std::mem::take(&mut found.stale);
        leases.values().filter_map(Was::row).for_each(|it| stale.lease_before(self, &found, it));
        for volume in volumes.values().filter_map(Was::row) {
            stale.volume(volume, found.lease_of_volume(volume.id));
        }
        for (id, old) in changed(&devices) {
            if receives(old.row()) != receives(self.devices.get(id)) {
                let served = found.served.get(&id.net_backend()).into_iter().flatten();
                served.filter_map(|it| self.channels.get(it)).for_each(|it| stale.channel_before(it));
            }
        }
        found.stale = stale;
        channels.values().filter_map(Was::row).for_each(|it| found.stale.channel_before(it));
        for (id, old) in &instances {
            work.instance(self, *id);
            let now = self.instances.get(id);
            if let Some(old) = old.row()
                && now.is_none_or(|now| (now.host, now.incoming) != (old.host, old.incoming))
            {
                for role in [Role::NetFrontend, Role::BlkFrontend] {
                    work.frontends_at(old, role);
                }
            }
        }
        for (id, old) in &leases {
            let now = self.leases.get(id);
            work.lease(self, *id);
            if let Some(either) = old.row().or(now) {
                work.instances.insert(either.instance);
                if let Some(volume) = either.volume() {
                    work.leased(self, &found, volume);
                }
            }
            let moves = |lease: &Lease| lease.incoming.is_some();
            if let Some(old) = old.row()
                && (!same_devices(Some(old), now) || now.map(moves) != Some(moves(old)))
                && let Some(instance) = self.instances.get(&old.instance)
            {
                work.frontends_at(instance, old.kind.frontend_role());
            }
        }
        for id in volumes.keys() {
            work.volume(self, &found, *id);
        }
        for (id, old) in &devices {
            work.device(self, &found, id);
            if let Some(lag) = old.row().and_then(Device::lag) {
                work.group(self, &found, lag);
                // It may be in that group no more, and its leases use the others no more.
                work.frontends_on(self, &found, id);
            }
        }
        for id in endpoints.keys() {
            work.endpoint(self, &found, *id);
        }
        work.channels.extend(channels.keys());
        work.boards.extend(boards.keys());
        found.work = work;
        self.known.0 = Some(found);
        self.endpoints.followed(endpoints);
        self.devices.followed(devices);
        self.volumes.followed(volumes);
        self.instances.followed(instances);
        self.leases.followed(leases);
        self.channels.followed(channels);
        self.fabric.boards.followed(boards);
        self.fabric.mchannels.followed(mchannels);
    }

    fn follow_loads(
        &self,
        found: &mut Found,
        endpoints: &Past<EndpointId, super::Endpoint>,
        devices: &Past<DeviceId, Device>,
        leases: &Past<LeaseId, Lease>,
    ) {
        let lag = |device: Option<&Device>| device.and_then(|it| it.lag().cloned());
        let is_regrouped = devices.iter().any(|(id, old)| {
            let (old, new) = (old.row(), self.devices.get(id));
            lag(old) != lag(new) || old.is_some() != new.is_some() && found.on_nic.contains_key(id)
        });
        if is_regrouped {
            // What a lease is to its NICs is another thing now.
            found.loads = self.loads();
            found.stale = Stale::Everyone;
            (found.work.has_other_nics, found.work.has_less_load) = (true, true);
            return;
        }
        let owned = endpoints.keys().filter(|id| id.role == Role::NetBackend);
        let owned = owned.flat_map(|id| self.devices_at(id.host)).map(|(id, _)| id);
        for id in devices.keys().chain(owned) {
            let now = self.devices.get(id).and_then(|device| self.nic_load(id, device));
            if found.loads.refresh(id, now) {
                (found.work.has_other_nics, found.work.has_less_load) = (true, true);
            }
        }
        for (id, old) in changed(leases) {
            let (old, new) = (old.row(), self.leases.get(id));
            if leans_alike(old, new) {
                continue;
            }
            if let Some(old) = old {
                found.work.has_other_nics |= found.loads.forget(old);
                found.work.has_less_load = true;
            }
            if let Some(new) = new {
                found.loads.note(new);
            }
        }
    }

    fn follow_ssds(
        &self,
        ssds: &mut SsdLoads,
        endpoints: &Past<EndpointId, super::Endpoint>,
        devices: &Past<DeviceId, Device>,
        volumes: &Past<VolumeId, Volume>,
    ) {
        let owned = endpoints.keys().filter(|id| id.role == Role::BlkBackend);
        let owned = owned.flat_map(|id| self.devices_at(id.host)).map(|(id, _)| id);
        for id in devices.keys().chain(owned) {
            ssds.refresh(id, self.devices.get(id).and_then(|device| self.bare_ssd(id, device)));
        }
        for (id, old) in changed(volumes) {
            let (old, new) = (old.row(), self.volumes.get(id));
            if !takes_alike(old, new) {
                if let Some(old) = old {
                    ssds.forget(old);
                }
                if let Some(new) = new {
                    ssds.note(new);
                }
            }
        }
    }

    /// Notes whether a NIC has more room than it had.
    pub(super) fn note_less_load(&mut self, has_less_load: bool) {
        if let Some(found) = self.known.0.as_mut() {
            found.work.has_less_load = has_less_load;
        }
    }

    /// All of the pod is settled anew.
    pub(super) fn touch_everything(&mut self) {
        self.follow();
        let Some(mut found) = self.known.0.take() else { return };
        found.work.everything(self);
        self.known.0 = Some(found);
    }

    /// Settles all of the pod, whatever was touched.
    #[cfg(any(test, feature = "model"))]
    pub fn settle_all(&mut self, effects: &mut Vec<Effect>) {
        self.begin();
        self.touch_everything();
        self.settle(effects);
        self.conclude(effects);
    }

    /// Applies a command and settles all of the pod, whatever it touched.
    #[cfg(any(test, feature = "model"))]
    pub fn apply_to_all(&mut self, command: &super::Command) -> Result<Vec<Effect>, Refusal> {
        self.begin();
        self.touch_everything();
        self.apply(command)
    }

    /// What all leases depend on is another one: everything is looked up and settled anew.
    pub(super) fn look_again(&mut self) {
        self.follow();
        let (loads, ssds) = (self.loads(), self.ssd_loads());
        if let Some(found) = self.known.0.as_mut() {
            (found.loads, found.ssds) = (loads, ssds);
        }
        self.everyone_is_stale();
        self.touch_everything();
    }

    /// Notes how leases are that were looked at, and tells of those that are otherwise than before.
    pub(super) fn conclude(&mut self, effects: &mut Vec<Effect>) {
        self.follow();
        let Some(mut found) = self.known.0.take() else { return };
        self.note_stale(&mut found);
        found.stale.scrubs(self.regions.touched());
        found.work.done();
        let seen = std::mem::take(&mut found.work.seen);
        let (mut degraded, mut failed, mut served) = (Vec::new(), Vec::new(), Vec::new());
        for (id, lease) in seen.iter().filter_map(|id| Some((*id, self.leases.get(id)?))) {
            note(&mut found.bare, id, self.needs_standby(lease));
            note(&mut found.leaving, id, self.is_to_leave(lease));
            if note(&mut found.degraded, id, self.is_degraded(lease)) == Some(true) {
                degraded.push(lease);
            }
            match note(&mut found.failed, id, self.is_failed_disk(lease)) {
                Some(true) => failed.push(lease),
                Some(false) => served.push(lease),
                None => {}
            }
        }
        for lease in degraded {
            self.tell_degraded(lease, effects);
        }
        for lease in failed {
            self.tell_failed_disk(lease, true, effects);
        }
        for lease in served {
            self.tell_failed_disk(lease, false, effects);
        }
        self.known.0 = Some(found);
    }

    /// Tries what begins a command and of which only shows when it was tried whether it can be: if not, nothing has changed.
    pub(super) fn attempt(
        &mut self,
        effects: &mut Vec<Effect>,
        attempt: impl FnOnce(&mut Self, &mut Vec<Effect>) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let (last, failovers, short) = (self.last.clone(), self.failovers, self.short);
        let unbacked = self.unbacked.clone();
        let effects_before = effects.len();
        let tried = attempt(self, effects);
        if tried.is_err() {
            self.endpoints.take_back();
            self.devices.take_back();
            self.volumes.take_back();
            self.instances.take_back();
            self.leases.take_back();
            self.channels.take_back();
            self.fabric.boards.take_back();
            self.fabric.mchannels.take_back();
            self.regions.take_back();
            (self.last, self.failovers, self.short, self.unbacked) = (last, failovers, short, unbacked);
            // As before, there is nothing to tell.
            self.conclude(&mut Vec::new());
            effects.truncate(effects_before);
        }
        tried
    }

    /// The devices of a host.
    pub fn devices_at(&self, host: HostId) -> impl Iterator<Item = (&DeviceId, &Device)> {
        let first = DeviceId { host, name: SmolStr::default() };
        self.devices.range(first..).take_while(move |(id, _)| id.host == host)
    }

    /// The daemons of a host.
    pub fn endpoints_at(&self, host: HostId) -> impl Iterator<Item = (&EndpointId, &Endpoint)> {
        let first = EndpointId::new(host, Role::ALL[0]);
        self.endpoints.range(first..).take_while(move |(id, _)| id.host == host)
    }

    /// The leases that a frontend serves, or will.
    pub(super) fn leases_at(&self, found: &Found, frontend: EndpointId) -> impl Iterator<Item = &Lease> {
        let instances = found.at_host.get(&frontend.host).into_iter().flatten();
        let instances = instances.filter_map(|id| self.instances.get(id));
        let served = instances.flat_map(move |instance| {
            let (is_here, is_coming) =
                (instance.host == frontend.host, instance.incoming == Some(frontend.host));
            let devices: &[LeaseId] = match frontend.role {
                Role::NetFrontend => &instance.nics,
                Role::BlkFrontend => &instance.disks,
                _ => &[],
            };
            let leases = devices.iter().filter_map(|id| self.leases.get(id));
            leases.filter(move |lease| is_here || is_coming && lease.incoming.is_some())
        });
        served.inspect(move |lease| debug_assert!(self.frontends_of(lease).any(|it| it == frontend)))
    }
}

/// The rows that are other ones for those who derive something from them.
fn changed<K, V>(past: &Past<K, V>) -> impl Iterator<Item = (&K, &Was<V>)> {
    past.iter().filter(|(_, was)| !matches!(was, Was::Alike))
}

/// Where a NIC receives.
const fn receives(device: Option<&Device>) -> Option<Hold> {
    match device {
        Some(Device { kind: Kind::Nic { rx, .. }, .. }) => *rx,
        _ => None,
    }
}

/// Notes whether one is among these. Returns that if it was otherwise.
fn note(all: &mut std::collections::BTreeSet<LeaseId>, id: LeaseId, is_so: bool) -> Option<bool> {
    let changed = if is_so { all.insert(id) } else { all.remove(&id) };
    changed.then_some(is_so)
}

impl Device {
    /// The link aggregation group that it is in, if it is a NIC.
    pub(super) const fn lag(&self) -> Option<&String> {
        match &self.kind {
            Kind::Nic { lag, .. } => lag.as_ref(),
            Kind::Ssd { .. } => None,
        }
    }
}
