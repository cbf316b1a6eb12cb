use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::HostId;

use super::rates::Rates;
use super::volume::first_fit;
use super::{Device, DeviceId, Health, Kind, LeaseKind, Presence, State};

/// What volumes use of an SSD.
#[derive(Default)]
pub(super) struct Used {
    /// Their places: `(start, size)`.
    places: Vec<(u64, u64)>,
    /// What they are sure of.
    rates: Rates,
}

impl Device {
    /// Whether it works, if its owner is there like this.
    pub(super) fn is_up(&self, owner: Presence) -> bool {
        self.health == Health::Up && owner == Presence::Joined
    }

    /// Whether it is certain not to be used any more, if its owner is there like this.
    pub(super) fn is_lost(&self, owner: Presence) -> bool {
        self.health != Health::Up || owner.is_over()
    }
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
        let is_up = |device: &Device| self.presence_of_owner(id, device).is_some_and(|it| device.is_up(it));
        self.devices.get(id).is_some_and(is_up)
    }

    /// Whether it is certain that a device is not used any more by whom it was given to: it has no link, it failed, or
    /// its owner is over. An owner that is merely silent may still be at work.
    pub(crate) fn is_lost(&self, id: &DeviceId) -> bool {
        let is_lost =
            |device: &Device| self.presence_of_owner(id, device).is_none_or(|it| device.is_lost(it));
        self.devices.get(id).is_none_or(is_lost)
    }

    pub(super) fn presence_of_owner(&self, id: &DeviceId, device: &Device) -> Option<Presence> {
        let owner = cxl_pool::EndpointId::new(id.host, device.role());
        self.look_at(owner).map(|life| life.presence)
    }

    /// How many leases use a device now.
    pub fn leases_on(&self, id: &DeviceId) -> u32 {
        let on = self.leases.values().filter(|lease| match &lease.kind {
            LeaseKind::Nic { active, .. } => self.are_rails(active, id),
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

    /// The SSD for a new volume, and where on it: the one with the largest share free, of its room and of what it can do, on
    /// none of these hosts.
    pub(super) fn place_volume(
        &self,
        (size_bytes, wanted): (u64, Rates),
        device: Option<&DeviceId>,
        without: &BTreeSet<HostId>,
    ) -> Option<(DeviceId, u64)> {
        let mut taken = self.extents_by_device();
        self.devices
            .iter()
            .filter(|(id, _)| device.is_none_or(|wanted| wanted == *id) && !without.contains(&id.host))
            .filter_map(|(id, known)| {
                let Kind::Ssd { size_bytes: device_bytes, .. } = known.kind else { return None };
                let used = taken.remove(id).unwrap_or_default();
                let start = self.start_on(known, &used, (size_bytes, wanted))?;
                let occupied: u64 = used.places.iter().map(|(_, size)| size).sum();
                let free_share = share(device_bytes.saturating_sub(occupied), device_bytes)
                    .min(self.rate_capacity(known).free_share(used.rates));
                Some((self.is_usable(id), free_share, id, start))
            })
            .filter(|(usable, ..)| *usable || device.is_some())
            .min_by_key(|(_, free_share, id, _)| (Reverse(*free_share), *id))
            .map(|(_, _, id, start)| (id.clone(), start))
    }

    /// Where on an SSD that is used like this there is room for so much that is sure of so much.
    pub(super) fn start_on(
        &self,
        ssd: &Device,
        used: &Used,
        (size_bytes, wanted): (u64, Rates),
    ) -> Option<u64> {
        let Kind::Ssd { size_bytes: device_bytes, reserved_bytes, ref strangers, .. } = ssd.kind else {
            return None;
        };
        let is_free = strangers.is_empty() && self.rate_capacity(ssd).left(used.rates).has(wanted);
        let start = first_fit(reserved_bytes, device_bytes, size_bytes, used.places.clone());
        start.filter(|_| is_free)
    }

    /// Of each SSD, the places of volumes on it and what these are sure of.
    pub(super) fn extents_by_device(&self) -> BTreeMap<&DeviceId, Used> {
        let mut by_device: BTreeMap<&DeviceId, Used> = BTreeMap::new();
        for volume in self.volumes.values() {
            let size_bytes = volume.place_bytes();
            for place in volume.replicas.iter().chain(&volume.former) {
                by_device.entry(&place.device).or_default().places.push((place.start_bytes, size_bytes));
            }
            for ssd in volume.devices().filter(|_| !volume.deleted) {
                let used = by_device.entry(ssd).or_default();
                used.rates = used.rates.plus(volume.rates_of_place());
            }
        }
        by_device
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

/// What part this is of all, in millionths.
pub(super) fn share(part: u64, all: u64) -> u128 {
    u128::from(part) * 1_000_000 / u128::from(all.max(1))
}
