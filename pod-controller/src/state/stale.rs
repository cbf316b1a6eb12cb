//! Who may have to be told something else than before.
//!
//! What an endpoint should have depends on its own life, on the leases that it serves and all that is around these, on its devices,
//! and on its channels. Whatever a command touches of that makes it stale; what everybody has a part of makes everybody so.

use std::collections::BTreeSet;

use cxl_pool::{EndpointId, HostId, Role};

use super::index::Found;
use super::work::Work;
use super::{Channel, DeviceId, Instance, Lease, State, Volume};

/// Whose objects and scrubs may be other ones than they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stale {
    /// Anybody's.
    Everyone,
    /// No others than these endpoints'.
    These(BTreeSet<EndpointId>),
}

impl Default for Stale {
    fn default() -> Self {
        Self::These(BTreeSet::new())
    }
}

impl Stale {
    pub(super) fn extend(&mut self, more: impl IntoIterator<Item = EndpointId>) {
        if let Self::These(these) = self {
            these.extend(more);
        }
    }

    /// A lease was like this.
    pub(super) fn lease_before(&mut self, old: &Lease) {
        self.extend(old.nics().map(DeviceId::net_backend));
    }

    /// An instance is, or was, like this.
    pub(super) fn instance(&mut self, instance: &Instance) {
        for host in [Some(instance.host), instance.incoming].into_iter().flatten() {
            self.extend(frontends_of(host));
        }
    }

    /// A channel was like this.
    pub(super) fn channel_before(&mut self, old: &Channel) {
        self.extend([old.frontend, old.backend]);
    }

    /// A volume is, or was, like this.
    pub(super) fn volume(&mut self, volume: &Volume) {
        let places = volume.replicas.iter().chain(&volume.former);
        self.extend(places.map(|place| place.device.blk_backend()));
    }
}

/// The frontends of a host.
fn frontends_of(host: HostId) -> [EndpointId; 2] {
    [Role::NetFrontend, Role::BlkFrontend].map(|role| EndpointId::new(host, role))
}

impl State {
    /// Who has become stale since this was asked last; at first, everybody.
    pub(crate) fn take_stale(&mut self) -> Stale {
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
        let Found { work, stale, .. } = found;
        let Stale::These(these) = stale else { return };
        let Work { endpoints, devices, volumes, leases, channels, frontends, boards, .. } = work;
        these.extend(endpoints.iter().chain(&*frontends));
        for lease in leases.iter().filter_map(|id| self.leases.get(id)) {
            these.extend(self.frontends_of(lease).chain(self.backends_of(lease)));
        }
        for channel in channels.iter().filter_map(|id| self.channels.get(id)) {
            these.extend([channel.frontend, channel.backend]);
        }
        let owner = |id: &DeviceId| {
            self.devices.get(id).map(|device| EndpointId::new(id.host, device.role())).into_iter()
        };
        these.extend(devices.iter().flat_map(owner));
        for volume in volumes.iter().filter_map(|id| self.volumes.get(id)) {
            stale.volume(volume);
        }
        let is_frontend = |id: &&EndpointId| matches!(id.role, Role::NetFrontend | Role::BlkFrontend);
        let shares = !self.fabric.elements.is_empty() && endpoints.iter().any(|id| is_frontend(&id));
        if shares || !boards.is_empty() {
            // Each of them reads the boards of all others.
            stale.extend(self.endpoints.keys().filter(is_frontend).copied());
        }
    }
}
