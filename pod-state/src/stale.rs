//! Who may have to be told something else than before, and of what.
//!
//! What an endpoint should have depends on its own life, on the leases that it serves and all that is around these, on its devices,
//! and on its channels. Whatever a command touches of that makes that part of it stale; what everybody has a part of makes everybody
//! so.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::ids::LeaseId;

use super::index::Found;
use super::work::Work;
use super::{Channel, Device, DeviceId, Instance, Lease, Part, Parts, State, Volume};

/// Whose objects and scrubs may be other ones than they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stale {
    /// Anybody's, and any of them.
    Everyone,
    /// No others than these endpoints', and of their objects no others than these parts. Scrubs may be other ones whatever the part.
    These(BTreeMap<EndpointId, Parts>),
}

impl Default for Stale {
    fn default() -> Self {
        Self::These(BTreeMap::new())
    }
}

impl Stale {
    /// How many parts may be other ones; none if any may.
    pub fn parts(&self) -> Option<usize> {
        let Self::These(these) = self else { return None };
        these
            .values()
            .map(|parts| if let Parts::These(these) = parts { Some(these.len()) } else { None })
            .sum()
    }

    fn part(&mut self, id: EndpointId, part: Part) {
        if let Self::These(these) = self {
            these.entry(id).or_default().add(part);
        }
    }

    fn whole(&mut self, id: EndpointId) {
        if let Self::These(these) = self {
            these.insert(id, Parts::All);
        }
    }

    fn lease_at(&mut self, endpoints: impl IntoIterator<Item = EndpointId>, lease: LeaseId) {
        for id in endpoints {
            self.part(id, Part::Lease(lease));
        }
    }

    /// Endpoints may have to flush something else.
    pub(super) fn scrubs(&mut self, endpoints: impl IntoIterator<Item = EndpointId>) {
        if let Self::These(these) = self {
            for id in endpoints {
                these.entry(id).or_default();
            }
        }
    }

    /// A lease was like this.
    pub(super) fn lease_before(&mut self, state: &State, found: &Found, old: &Lease) {
        self.lease_at(state.near(found, old), old.id);
    }

    /// An instance is, or was, like this.
    pub(super) fn instance(&mut self, instance: &Instance) {
        for host in [Some(instance.host), instance.incoming].into_iter().flatten() {
            for lease in &instance.nics {
                self.lease_at([net_frontend(host)], *lease);
            }
            for lease in &instance.disks {
                self.lease_at([blk_frontend(host)], *lease);
            }
        }
    }

    /// A channel was like this, or what its frontend is told of it beside the rings.
    pub(super) fn channel_before(&mut self, old: &Channel) {
        self.part(old.frontend, Part::Channel(old.id));
        self.part(old.backend, Part::Channel(old.id));
    }

    /// A volume is, or was, like this.
    pub(super) fn volume(&mut self, volume: &Volume, lease: Option<LeaseId>) {
        for ssd in volume.all_places().map(|place| &place.device) {
            self.part(ssd.blk_backend(), Part::Device(ssd.name.to_string()));
            if let Some(lease) = lease {
                self.lease_at([ssd.blk_backend()], lease);
            }
        }
    }
}

const fn net_frontend(host: HostId) -> EndpointId {
    EndpointId::new(host, Role::NetFrontend)
}

const fn blk_frontend(host: HostId) -> EndpointId {
    EndpointId::new(host, Role::BlkFrontend)
}

impl State {
    /// Who has become stale since somebody [took](Self::take_stale) it, if that is known now.
    pub fn stale(&self) -> Option<&Stale> {
        self.found().filter(|_| self.is_followed()).map(|found| &found.stale)
    }

    /// Who has become stale since this was asked last; at first, everybody.
    pub fn take_stale(&mut self) -> Stale {
        if self.known.0.is_none() {
            self.begin();
        }
        self.follow();
        self.known.0.as_mut().map_or(Stale::Everyone, |found| std::mem::take(&mut found.stale))
    }

    /// Everybody is.
    pub(super) fn everyone_is_stale(&mut self) {
        if let Some(found) = self.known.0.as_mut() {
            found.stale = Stale::Everyone;
        }
    }

    /// Notes who is because of what was touched.
    pub(super) fn note_stale(&self, found: &mut Found) {
        let mut stale = std::mem::take(&mut found.stale);
        if stale == Stale::Everyone {
            found.stale = stale;
            return;
        }
        let Work { endpoints, devices, volumes, leases, channels, boards, .. } = &found.work;
        for id in endpoints {
            stale.whole(*id);
        }
        for lease in leases.iter().filter_map(|id| self.leases.get(id)) {
            stale.lease_at(self.frontends_of(lease).chain(self.near(found, lease)), lease.id);
        }
        // Leases go over channels, whatever these were made for.
        let mut ends: BTreeMap<EndpointId, BTreeSet<EndpointId>> = BTreeMap::new();
        for channel in channels.iter().filter_map(|id| self.channels.get(id)) {
            stale.channel_before(channel);
            ends.entry(channel.frontend).or_default().insert(channel.backend);
        }
        for (frontend, backends) in ends {
            for lease in self.leases_at(found, frontend) {
                for backend in self.backends_of(lease).filter(|it| backends.contains(it)) {
                    stale.lease_at([frontend, backend], lease.id);
                }
            }
        }
        for (id, device) in devices.iter().filter_map(|id| Some((id, self.devices.get(id)?))) {
            stale.part(EndpointId::new(id.host, device.role()), Part::Device(id.name.to_string()));
        }
        for volume in volumes.iter().filter_map(|id| self.volumes.get(id)) {
            stale.volume(volume, found.lease_of_volume(volume.id));
        }
        let is_frontend = |id: &&EndpointId| matches!(id.role, Role::NetFrontend | Role::BlkFrontend);
        let shares = !self.fabric.elements.is_empty() && endpoints.iter().any(|id| is_frontend(&id));
        if shares || !boards.is_empty() {
            // Each of them reads the boards of all others.
            for id in self.endpoints.keys().filter(is_frontend) {
                stale.part(*id, Part::Fabric);
            }
        }
        // Whoever has one is told of the shares of its leases.
        for id in boards {
            stale.whole(*id);
        }
        found.stale = stale;
    }

    /// The backends that serve a lease, or might if other NICs of its group worked.
    fn near(&self, found: &Found, lease: &Lease) -> BTreeSet<EndpointId> {
        let lag = lease.active_nic().and_then(|nic| self.devices.get(nic)).and_then(Device::lag);
        let group = lag.and_then(|lag| found.groups.get(lag)).into_iter().flatten();
        let volume = lease.volume().and_then(|volume| self.volumes.get(&volume));
        let disk = volume.into_iter().flat_map(Volume::devices).map(DeviceId::blk_backend);
        lease.nics().chain(group).map(DeviceId::net_backend).chain(disk).collect()
    }
}
