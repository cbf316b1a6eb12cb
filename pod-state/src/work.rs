//! What a command touched, and what may have to follow from that.
//!
//! Whether something of a lease has to change depends on the lease, its instance, its volume, the devices that these are on, and the
//! endpoints of its frontend and of those devices. So whatever of these changes, the leases around it are looked at, and no others.

use std::collections::BTreeSet;

use cxl_pool::{EndpointId, Role};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseId, VolumeId};

use super::index::Found;
use super::{DeviceId, Instance, State};

/// See the [module](self).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) endpoints: BTreeSet<EndpointId>,
    pub(super) devices: BTreeSet<DeviceId>,
    groups: BTreeSet<String>,
    pub(super) volumes: BTreeSet<VolumeId>,
    pub(super) instances: BTreeSet<InstanceId>,
    pub(super) leases: BTreeSet<LeaseId>,
    pub(super) channels: BTreeSet<ChannelId>,
    /// Whoever may have channels that no lease needs any more.
    pub(super) frontends: BTreeSet<EndpointId>,
    /// Whose boards are other ones.
    pub(super) boards: BTreeSet<EndpointId>,
    /// NICs are there that were not, or are other ones than they were: a lease may find one that found none.
    pub(super) has_other_nics: bool,
    /// A NIC may have more room than when leases that are to leave theirs were looked at.
    pub(super) has_less_load: bool,
    /// Leases that were looked at, and of which it may have to be told how they are.
    pub(super) seen: BTreeSet<LeaseId>,
}

impl Work {
    /// An endpoint is another one, or is there or not.
    pub(super) fn endpoint(&mut self, state: &State, found: &Found, id: EndpointId) {
        if !self.endpoints.insert(id) {
            return;
        }
        for (device, known) in state.devices_at(id.host) {
            if known.role() == id.role {
                self.device(state, found, device);
            }
        }
        if matches!(id.role, Role::NetFrontend | Role::BlkFrontend) {
            self.leases.extend(state.leases_at(found, id).map(|lease| lease.id));
        }
        self.channels.extend(found.channels_of(id));
    }

    /// A device is another one, or works or does not.
    pub(super) fn device(&mut self, state: &State, found: &Found, id: &DeviceId) {
        if !self.devices.insert(id.clone()) {
            return;
        }
        for lease in found.on_nic.get(id).into_iter().flatten() {
            self.lease(state, *lease);
        }
        for volume in found.on_ssd.get(id).into_iter().flatten() {
            self.volume(state, found, *volume);
        }
        if let Some(lag) = state.devices.get(id).and_then(|device| device.lag()) {
            self.group(state, found, lag);
        }
    }

    /// A link aggregation group has other NICs, or some of them work or do not.
    pub(super) fn group(&mut self, state: &State, found: &Found, lag: &String) {
        if !self.groups.insert(lag.clone()) {
            return;
        }
        for nic in found.groups.get(lag).into_iter().flatten() {
            self.device(state, found, nic);
            self.frontends_on(state, found, nic);
        }
    }

    /// The leases on a NIC may use fewer others than they did.
    pub(super) fn frontends_on(&mut self, state: &State, found: &Found, nic: &DeviceId) {
        let leases = found.on_nic.get(nic).into_iter().flatten().filter_map(|id| state.leases.get(id));
        self.frontends.extend(leases.flat_map(|lease| state.frontends_of(lease)));
    }

    /// A volume lies elsewhere, or other places of it are good.
    pub(super) fn volume(&mut self, state: &State, found: &Found, id: VolumeId) {
        self.leased(state, found, id);
        let lease = found.lease_of_volume(id).and_then(|lease| state.leases.get(&lease));
        self.frontends.extend(lease.into_iter().flat_map(|it| state.frontends_of(it)));
    }

    /// The lease on a volume came, is another one, or went. It lies where it did.
    pub(super) fn leased(&mut self, state: &State, found: &Found, id: VolumeId) {
        if self.volumes.insert(id)
            && let Some(lease) = found.lease_of_volume(id)
        {
            self.lease(state, lease);
        }
    }

    /// An instance moves, or has other devices, or other RAM.
    pub(super) fn instance(&mut self, state: &State, id: InstanceId) {
        self.instances.insert(id);
        if let Some(instance) = state.instances.get(&id) {
            self.leases.extend(instance.nics.iter().chain(&instance.disks));
        }
    }

    /// A lease is another one.
    pub(super) fn lease(&mut self, state: &State, id: LeaseId) {
        if self.leases.insert(id)
            && let Some(lease) = state.leases.get(&id)
        {
            self.instances.insert(lease.instance);
        }
    }

    /// The frontends of an instance with this role may have channels that no lease needs any more.
    pub(super) fn frontends_at(&mut self, instance: &Instance, role: Role) {
        let hosts = [Some(instance.host), instance.incoming].into_iter().flatten();
        self.frontends.extend(hosts.map(|host| EndpointId::new(host, role)));
    }

    /// Everything.
    pub(super) fn everything(&mut self, state: &State) {
        self.endpoints.extend(state.endpoints.keys().chain(state.fabric.boards.keys()));
        self.devices.extend(state.devices.keys().cloned());
        self.volumes.extend(state.volumes.keys());
        self.instances.extend(state.instances.keys());
        self.leases.extend(state.leases.keys());
        self.channels.extend(state.channels.keys());
        self.frontends.extend(state.channels.values().map(|channel| channel.frontend));
        self.boards.extend(state.fabric.boards.keys());
        (self.has_other_nics, self.has_less_load) = (true, true);
    }

    /// Whether all is done, but for what has to be told.
    pub(super) fn is_done(&self) -> bool {
        let Self { endpoints, devices, groups, volumes, instances, leases, channels, .. } = self;
        let Self { frontends, boards, has_other_nics, has_less_load, .. } = self;
        endpoints.is_empty()
            && devices.is_empty()
            && groups.is_empty()
            && volumes.is_empty()
            && instances.is_empty()
            && leases.is_empty()
            && channels.is_empty()
            && frontends.is_empty()
            && boards.is_empty()
            && !has_other_nics
            && !has_less_load
    }

    /// It is done, but for what has to be told.
    pub(super) fn done(&mut self) {
        let mut seen = std::mem::take(&mut self.seen);
        seen.append(&mut self.leases);
        *self = Self { seen, ..Self::default() };
    }
}
