use std::cmp::Reverse;
use std::collections::BTreeSet;

use cxl_pool::HostId;
use pod_protocol::objects::NicPolicy;

use super::volume::first_fit;
use super::{Device, DeviceId, Health, Kind, LeaseKind, Presence, State};

/// A NIC as placement sees it.
struct Candidate<'a> {
    id: &'a DeviceId,
    speed_mbps: u64,
    mtu: u16,
    features: u64,
    backup: bool,
}

impl State {
    /// Whether a device can be given to somebody now.
    pub(crate) fn is_usable(&self, id: &DeviceId) -> bool {
        self.is_up(id)
            && !self.is_drained(id)
            && self.devices.get(id).is_some_and(|device| device.held.is_none())
    }

    /// Whether a device works, were it not for its past.
    pub fn is_up(&self, id: &DeviceId) -> bool {
        self.devices.get(id).is_some_and(|device| {
            device.health == Health::Up && self.presence_of_owner(id, device) == Some(Presence::Joined)
        })
    }

    /// Whether it is certain that a device is not used any more by whom it was given to: it has no link, it failed, or
    /// its owner is over. An owner that is merely silent may still be at work.
    pub(crate) fn is_lost(&self, id: &DeviceId) -> bool {
        self.devices.get(id).is_none_or(|device| {
            device.health != Health::Up || self.presence_of_owner(id, device).is_none_or(Presence::is_over)
        })
    }

    fn presence_of_owner(&self, id: &DeviceId, device: &Device) -> Option<Presence> {
        let owner = cxl_pool::EndpointId::new(id.host, device.role());
        self.endpoints.get(&owner).map(|endpoint| endpoint.presence)
    }

    /// How many leases use a device now.
    pub fn leases_on(&self, id: &DeviceId) -> u32 {
        let on = self.leases.values().filter(|lease| match &lease.kind {
            LeaseKind::Nic { active, .. } => active == id,
            LeaseKind::Disk { volume, .. } => {
                self.volumes.get(volume).is_some_and(|volume| volume.replica_on(id).is_some())
            }
        });
        u32::try_from(on.count()).unwrap_or(u32::MAX)
    }

    /// How many leases would move to a NIC.
    pub fn standby_leases_on(&self, id: &DeviceId) -> u32 {
        let on = self.leases.values().filter(|lease| lease.standby_nic() == Some(id));
        u32::try_from(on.count()).unwrap_or(u32::MAX)
    }

    fn usable_nics(&self) -> impl Iterator<Item = Candidate<'_>> {
        self.devices.iter().filter(|(id, _)| self.is_usable(id)).filter_map(|(id, device)| {
            match device.kind {
                Kind::Nic { speed_mbps, mtu, features, backup, .. } => {
                    Some(Candidate { id, speed_mbps, mtu, features, backup })
                }
                Kind::Ssd { .. } => None,
            }
        })
    }

    /// The NIC for a new lease: not a backup one if there is another; on the instance's own host if there is one; the
    /// least loaded one, by leases for its speed. It can give what the lease is promised.
    pub(super) fn place_nic(&self, host: HostId, mtu: Option<u16>, policy: &NicPolicy) -> Option<DeviceId> {
        self.usable_nics()
            .filter(|nic| mtu.is_none_or(|mtu| mtu <= nic.mtu) && self.can_promise(nic.id, policy, None))
            .min_by_key(|nic| (nic.backup, nic.id.host != host, self.load_of(nic), nic.id.clone()))
            .map(|nic| nic.id.clone())
    }

    /// The NIC that a lease moves to if nobody says which: one that can give what the lease is promised, an ordinary one before a
    /// backup, the least loaded one.
    pub(super) fn place_move(
        &self,
        active: &DeviceId,
        mtu: u16,
        standby: Option<&DeviceId>,
        policy: &NicPolicy,
    ) -> Option<DeviceId> {
        self.usable_nics()
            .filter(|nic| nic.id != active && nic.mtu >= mtu)
            .min_by_key(|nic| {
                let breaks_promise = !self.can_promise(nic.id, policy, None);
                (breaks_promise, nic.backup, Some(nic.id) == standby, self.load_of(nic), nic.id.clone())
            })
            .map(|nic| nic.id.clone())
    }

    /// The backup NIC for a lease: another one than the active, marked as backup; on another host if there is one, since
    /// hosts fail too; one that can do what the guest was offered, since another one's backend has to do that in
    /// software; the one that fewest lean on.
    pub(super) fn place_standby(&self, active: &DeviceId, mtu: u16, features: u64) -> Option<DeviceId> {
        self.usable_nics()
            .filter(|nic| nic.backup && nic.id != active && nic.mtu >= mtu)
            .min_by_key(|nic| {
                let lacks = nic.features & features != features;
                (nic.id.host == active.host, lacks, self.standby_leases_on(nic.id), nic.id.clone())
            })
            .map(|nic| nic.id.clone())
    }

    /// What one more lease would have to share, as a fraction with a common scale.
    fn load_of(&self, nic: &Candidate<'_>) -> u64 {
        const SCALE: u64 = 1 << 32;
        (u64::from(self.leases_on(nic.id)) + 1).saturating_mul(SCALE) / nic.speed_mbps.max(1)
    }

    /// The SSD for a new volume, and where on it: the one with the largest share free, on none of these hosts.
    pub(super) fn place_volume(
        &self,
        size_bytes: u64,
        device: Option<&DeviceId>,
        without: &BTreeSet<HostId>,
    ) -> Option<(DeviceId, u64)> {
        self.devices
            .iter()
            .filter(|(id, _)| device.is_none_or(|wanted| wanted == *id) && !without.contains(&id.host))
            .filter_map(|(id, known)| match known.kind {
                Kind::Ssd { size_bytes: device_bytes, reserved_bytes, ref strangers, .. }
                    if strangers.is_empty() =>
                {
                    let taken: Vec<(u64, u64)> = self.extents(id).collect();
                    let start = first_fit(reserved_bytes, device_bytes, size_bytes, taken)?;
                    let free = device_bytes.saturating_sub(self.used_bytes(id));
                    let free_share = u128::from(free) * 1_000_000 / u128::from(device_bytes.max(1));
                    Some((self.is_usable(id), free_share, id, start))
                }
                Kind::Ssd { .. } | Kind::Nic { .. } => None,
            })
            .filter(|(usable, ..)| *usable || device.is_some())
            .min_by_key(|(_, free_share, id, _)| (Reverse(*free_share), *id))
            .map(|(_, _, id, start)| (id.clone(), start))
    }

    /// The places of volumes on an SSD: `(start, size)`.
    pub(super) fn extents<'a>(&'a self, id: &'a DeviceId) -> impl Iterator<Item = (u64, u64)> + 'a {
        self.volumes.values().flat_map(move |volume| {
            let places = volume.replicas.iter().chain(&volume.former);
            places.filter(move |it| it.device == *id).map(|it| (it.start_bytes, volume.place_bytes()))
        })
    }

    /// How much of an SSD volumes occupy.
    pub fn used_bytes(&self, id: &DeviceId) -> u64 {
        self.extents(id).map(|(_, size)| size).sum()
    }
}
