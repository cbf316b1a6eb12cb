//! What is around an endpoint or a device: looked up where that is kept, and searched for in a copy of a state.

use std::collections::BTreeSet;

use cxl_pool::EndpointId;
use pod_protocol::ids::{LeaseId, VolumeId};

use super::index::Found;
use super::{Channel, DeviceId, Lease, State, Volume};

impl State {
    /// What is looked up, if it is that of now.
    fn kept(&self) -> Option<&Found> {
        self.found().filter(|_| self.is_followed())
    }

    /// The channels that an endpoint has an end of.
    pub(super) fn channels_at(&self, id: EndpointId) -> Vec<&Channel> {
        let is_at = |channel: &&Channel| channel.frontend == id || channel.backend == id;
        match self.kept() {
            Some(found) => found.channels_of(id).filter_map(|it| self.channels.get(&it)).collect(),
            None => self.channels.values().filter(is_at).collect(),
        }
    }

    /// The leases that a frontend serves, or will.
    pub fn leases_served_by(&self, frontend: EndpointId) -> Vec<&Lease> {
        let is_served = |lease: &&Lease| self.frontends_of(lease).any(|it| it == frontend);
        // It is found by the instances of its host.
        match self.found().filter(|_| self.instances.is_followed()) {
            Some(found) => self.leases_at(found, frontend).collect(),
            None => self.leases.values().filter(is_served).collect(),
        }
    }

    /// The leases that may be registered at a NIC, some of which are not.
    pub(super) fn leases_near_nic(&self, nic: &DeviceId) -> Vec<&Lease> {
        let Some(found) = self.kept() else { return self.leases.values().collect() };
        // A lease on one NIC of a group is on all of them.
        let lag = self.devices.get(nic).and_then(|device| device.lag());
        let group = lag.and_then(|lag| found.groups.get(lag)).into_iter().flatten();
        let nics = group.chain([nic]).filter_map(|nic| found.on_nic.get(nic));
        let ids: BTreeSet<LeaseId> = nics.flatten().copied().collect();
        ids.into_iter().filter_map(|id| self.leases.get(&id)).collect()
    }

    /// The leases that want to be near others of a group or away from them, and some others.
    pub(super) fn leases_of_group(&self, group: &str) -> Vec<&Lease> {
        match self.found().filter(|_| self.leases.is_followed()) {
            Some(found) => found.leases_of_group(group).filter_map(|id| self.leases.get(&id)).collect(),
            None => self.leases.values().collect(),
        }
    }

    /// The volumes of a group, and some others.
    pub(super) fn volumes_of_group(&self, group: &str) -> Vec<&Volume> {
        match self.found().filter(|_| self.volumes.is_followed()) {
            Some(found) => found.volumes_of_group(group).filter_map(|id| self.volumes.get(&id)).collect(),
            None => self.volumes.values().collect(),
        }
    }

    /// Some of the leases, as they are kept; all of them if none are.
    pub(super) fn leases_among(&self, kept: impl Fn(&Found) -> &BTreeSet<LeaseId>) -> Vec<&Lease> {
        match self.found().filter(|_| self.leases.is_followed()) {
            Some(found) => kept(found).iter().filter_map(|id| self.leases.get(id)).collect(),
            None => self.leases.values().collect(),
        }
    }

    /// The volumes with a place on an SSD, or that had one.
    pub(super) fn volumes_near(&self, ssd: &DeviceId) -> Vec<&Volume> {
        match self.kept() {
            Some(found) => {
                let ids = found.on_ssd.get(ssd).into_iter().flatten();
                ids.filter_map(|id| self.volumes.get(id)).collect()
            }
            None => self.volumes.values().collect(),
        }
    }

    /// The leases on volumes that lie on SSDs of a backend.
    pub(super) fn leases_on_ssds_of(&self, backend: EndpointId) -> Vec<&Lease> {
        let Some(found) = self.kept() else {
            let is_there = |lease: &&Lease| self.backends_of(lease).any(|it| it == backend);
            return self.leases.values().filter(is_there).collect();
        };
        let ssds = self.devices_at(backend.host).filter_map(|(id, _)| found.on_ssd.get(id));
        let volumes: BTreeSet<VolumeId> = ssds.flatten().copied().collect();
        let leases = volumes.into_iter().filter_map(|id| self.leases.get(&found.lease_of_volume(id)?));
        let is_there = |lease: &&Lease| self.backends_of(lease).any(|it| it == backend);
        leases.filter(is_there).collect()
    }
}
