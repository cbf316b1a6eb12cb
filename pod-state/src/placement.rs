use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::HostId;
use pod_protocol::objects::Qos;

use super::groups::Neighbours;
use super::rates::Rates;
use super::ssd_loads::SsdLoad;
use super::{Device, DeviceId, Filling, Groups, Health, LeaseKind, Presence, State};

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
    pub fn is_usable(&self, id: &DeviceId) -> bool {
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
    pub fn is_lost(&self, id: &DeviceId) -> bool {
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

    /// The same of each device that any lease uses, for whoever asks for many: all leases are looked through once.
    pub fn leases_by_device(&self) -> BTreeMap<DeviceId, u32> {
        let mut active: BTreeMap<&DeviceId, u32> = BTreeMap::new();
        let mut on: BTreeMap<DeviceId, u32> = BTreeMap::new();
        for lease in self.leases.values() {
            match &lease.kind {
                LeaseKind::Nic { active: nic, .. } => *active.entry(nic).or_default() += 1,
                LeaseKind::Disk { volume, .. } => {
                    // One volume may have two places on one SSD.
                    let ssds = self.volumes.get(volume).map(|it| it.devices().collect::<BTreeSet<_>>());
                    for ssd in ssds.into_iter().flatten() {
                        *on.entry(ssd.clone()).or_default() += 1;
                    }
                }
            }
        }
        for (nic, count) in active {
            for rail in self.rails_of(nic) {
                *on.entry(rail).or_default() += count;
            }
        }
        on
    }

    /// How many leases would move to a NIC.
    pub fn standby_leases_on(&self, id: &DeviceId) -> u32 {
        let on = self.leases.values().filter(|lease| lease.standby_nic() == Some(id));
        u32::try_from(on.count()).unwrap_or(u32::MAX)
    }

    /// The SSD of a host where a volume of this size finds room that is to be sure of so much. Whoever asks for the volume names it then: the
    /// command is one that every version of the controller carries out alike.
    /// A volume that is to lie with others goes where they are.
    pub fn ssd_near(
        &self,
        host: HostId,
        size_bytes: u64,
        (qos, groups): (&Qos, &Groups),
    ) -> Option<DeviceId> {
        let (size, neighbours) = ((size_bytes, Rates::sure_of(qos)), self.neighbours(groups, None));
        let is_near = |id: &DeviceId| id.host == host && (!neighbours.has_near() || neighbours.is_at(host));
        self.place_volume(size, None, &neighbours, is_near).map(|(id, _)| id)
    }

    /// The SSD for a new volume, and where on it: of those that will do one on which others lie that it is to be with, or one of their
    /// hosts; of these the one with the largest share free, of its room and of what it can do, or the smallest where SSDs are packed;
    /// or the one that is wanted.
    pub(super) fn place_volume(
        &self,
        (size_bytes, rates): (u64, Rates),
        wanted: Option<&DeviceId>,
        neighbours: &Neighbours,
        will_do: impl Fn(&DeviceId) -> bool,
    ) -> Option<(DeviceId, u64)> {
        let loads = self.ssd_loads_now();
        let place = |(id, ssd): (&DeviceId, &SsdLoad)| {
            let fits = neighbours.allow(id) && will_do(id);
            let start = if fits { ssd.start_for(size_bytes, rates) } else { None };
            Some((id.clone(), start?))
        };
        if let Some(id) = wanted {
            if self.decides_by_more() && !self.is_up(id) {
                return None;
            }
            return place((id, loads.get(id)?));
        }
        let filling = self.ssd_filling();
        let first = |is_good: &dyn Fn(&DeviceId) -> bool| {
            let good = loads.in_order().filter(|(id, _)| is_good(id));
            match filling {
                Filling::Spread => {
                    let mut good = good;
                    good.find_map(place)
                }
                Filling::Pack => good.rev().find_map(place),
            }
        };
        let near = || first(&|id| neighbours.is_on(id)).or_else(|| first(&|id| neighbours.is_at(id.host)));
        let near = if neighbours.has_near() { near() } else { None };
        near.or_else(|| first(&|_| true))
    }
}
