//! What volumes take of the pod's SSDs, and the SSDs in the order in which they are chosen.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use pod_protocol::ids::VolumeId;

use super::rates::{RateCapacity, Rates};
use super::volume::first_fit;
use super::{Device, DeviceId, Health, Kind, State, Volume};

/// All SSDs with what volumes take of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SsdLoads {
    ssds: BTreeMap<DeviceId, SsdLoad>,
    /// Those that can be given to somebody now, the one with the largest share free first.
    order: BTreeSet<(Reverse<u128>, DeviceId)>,
}

/// What volumes take of an SSD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SsdLoad {
    /// Nothing is known of one that its host does not have any more, or that is no SSD.
    ssd: Option<Ssd>,
    /// The places of volumes, with their sizes. One volume may have left a place on it that has yet to be wiped.
    places: BTreeMap<Place, u64>,
    /// The sum of their sizes.
    occupied_bytes: u128,
    /// What volumes are sure of, in requests and in bytes per second.
    sure_of: [u128; 2],
}

/// What an SSD is, without what is on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ssd {
    size_bytes: u64,
    /// Before this there are no volumes.
    reserved_bytes: u64,
    /// It holds volumes that nobody has adopted.
    has_strangers: bool,
    capacity: RateCapacity,
    /// Whether it can be given to somebody now.
    usable: bool,
}

/// Where a replica begins, and which one it is.
type Place = (u64, VolumeId, u32);

impl SsdLoad {
    /// How much of it volumes occupy.
    pub fn occupied_bytes(&self) -> u64 {
        u64::try_from(self.occupied_bytes).unwrap_or(u64::MAX)
    }

    /// What volumes on it are sure of.
    pub fn rates(&self) -> Rates {
        let [iops, bytes] = self.sure_of.map(|sum| u64::try_from(sum).unwrap_or(u64::MAX));
        Rates { iops, bytes_per_second: bytes }
    }

    /// Where volumes lie, in order: `(start, size)`.
    pub(super) fn extents(&self) -> impl Iterator<Item = (u64, u64)> {
        self.places.iter().map(|((start, ..), bytes)| (*start, *bytes))
    }

    /// Where on it there is room for so much that is sure of so much.
    pub(super) fn start_for(&self, size_bytes: u64, wanted: Rates) -> Option<u64> {
        let ssd = self.ssd?;
        let is_free = !ssd.has_strangers && ssd.capacity.left(self.rates()).has(wanted);
        let start = || first_fit(ssd.reserved_bytes, ssd.size_bytes, size_bytes, self.extents());
        if is_free { start() } else { None }
    }

    /// The share of it that is free, of its room or of what it can do, whichever is less. None where nothing new may come.
    fn rank(&self) -> Option<Reverse<u128>> {
        let ssd = self.ssd.filter(|ssd| ssd.usable && !ssd.has_strangers)?;
        let room = share(ssd.size_bytes.saturating_sub(self.occupied_bytes()), ssd.size_bytes);
        Some(Reverse(room.min(ssd.capacity.free_share(self.rates()))))
    }

    fn is_nothing(&self) -> bool {
        self.ssd.is_none() && self.places.is_empty()
    }
}

impl SsdLoads {
    /// What is on an SSD.
    pub fn get(&self, id: &DeviceId) -> Option<&SsdLoad> {
        self.ssds.get(id)
    }

    /// The SSDs that can be given to somebody, the one with the largest share free first.
    pub(super) fn in_order(&self) -> impl DoubleEndedIterator<Item = (&DeviceId, &SsdLoad)> {
        self.order.iter().filter_map(|(_, id)| Some((id, self.ssds.get(id)?)))
    }

    /// An SSD is this now, with the volumes on it as before; or there is none.
    pub(super) fn refresh(&mut self, id: &DeviceId, now: Option<Ssd>) {
        if now.is_some() || self.ssds.contains_key(id) {
            self.change(id, |load| load.ssd = now);
        }
    }

    /// A volume came.
    pub(super) fn note(&mut self, volume: &Volume) {
        self.put(volume, true);
    }

    /// A volume goes, or is about to change.
    pub(super) fn forget(&mut self, volume: &Volume) {
        self.put(volume, false);
    }

    fn put(&mut self, volume: &Volume, comes: bool) {
        for (ssd, place, bytes) in places(volume) {
            self.change(ssd, |load| {
                if comes {
                    load.places.insert(place, bytes);
                    load.occupied_bytes += u128::from(bytes);
                } else if load.places.remove(&place).is_some() {
                    load.occupied_bytes -= u128::from(bytes);
                }
            });
        }
        for (ssd, rates) in sure_of(volume) {
            self.change(ssd, |load| {
                for (sum, it) in load.sure_of.iter_mut().zip([rates.iops, rates.bytes_per_second]) {
                    let it = u128::from(it);
                    *sum = if comes { *sum + it } else { sum.saturating_sub(it) };
                }
            });
        }
    }

    fn change(&mut self, id: &DeviceId, change: impl FnOnce(&mut SsdLoad)) {
        let load = match self.ssds.get_mut(id) {
            Some(load) => load,
            None => self.ssds.entry(id.clone()).or_default(),
        };
        let before = load.rank();
        change(load);
        let (now, is_nothing) = (load.rank(), load.is_nothing());
        if is_nothing {
            self.ssds.remove(id);
        }
        if before != now {
            if let Some(rank) = before {
                self.order.remove(&(rank, id.clone()));
            }
            if let Some(rank) = now {
                self.order.insert((rank, id.clone()));
            }
        }
    }
}

/// The places that a volume has, and those that it has left.
fn places(volume: &Volume) -> impl Iterator<Item = (&DeviceId, Place, u64)> {
    let bytes = volume.place_bytes();
    volume.all_places().map(move |it| (&it.device, (it.start_bytes, volume.id, it.number), bytes))
}

/// What a volume is sure of on its SSDs.
fn sure_of(volume: &Volume) -> impl Iterator<Item = (&DeviceId, Rates)> {
    let rates = volume.rates_of_place();
    volume.devices().filter(|_| !volume.deleted).map(move |ssd| (ssd, rates))
}

/// Whether a volume takes the same of the same SSDs as before.
pub(super) fn takes_alike(old: Option<&Volume>, new: Option<&Volume>) -> bool {
    let all =
        |volume: Option<&'_ Volume>| volume.into_iter().flat_map(places).eq(new.into_iter().flat_map(places));
    all(old) && old.into_iter().flat_map(sure_of).eq(new.into_iter().flat_map(sure_of))
}

/// What part this is of all, in millionths.
pub(super) fn share(part: u64, all: u64) -> u128 {
    u128::from(part) * 1_000_000 / u128::from(all.max(1))
}

impl State {
    /// What volumes take of SSDs now.
    pub fn ssd_loads(&self) -> SsdLoads {
        let mut loads = SsdLoads::default();
        for (id, device) in &self.devices {
            loads.refresh(id, self.bare_ssd(id, device));
        }
        self.volumes.values().for_each(|volume| loads.note(volume));
        loads
    }

    /// What volumes take of SSDs, without looking at all of them if that is kept.
    pub(super) fn ssd_loads_now(&self) -> Cow<'_, SsdLoads> {
        let is_followed =
            self.endpoints.is_followed() && self.devices.is_followed() && self.volumes.is_followed();
        match self.found().filter(|_| is_followed) {
            Some(found) => Cow::Borrowed(&found.ssds),
            None => Cow::Owned(self.ssd_loads()),
        }
    }

    /// An SSD, without what is on it; nothing where its host has it no more.
    pub(super) fn bare_ssd(&self, id: &DeviceId, device: &Device) -> Option<Ssd> {
        let Kind::Ssd { size_bytes, reserved_bytes, ref strangers, .. } = device.kind else { return None };
        if device.health == Health::Absent {
            return None;
        }
        Some(Ssd {
            size_bytes,
            reserved_bytes,
            has_strangers: !strangers.is_empty(),
            capacity: self.rate_capacity(device),
            usable: self.is_usable(id),
        })
    }

    /// How much of an SSD volumes occupy.
    #[cfg(any(test, feature = "model"))]
    pub fn used_bytes(&self, id: &DeviceId) -> u64 {
        self.ssd_loads_now().get(id).map_or(0, SsdLoad::occupied_bytes)
    }
}
