//! SSDs that do more than they should: volumes move to SSDs that do less.
//!
//! A move costs more than that of a NIC's lease, since all of the volume is copied. So it is the smallest volume that is enough, an
//! SSD has one move at a time, and none while something else is copied or wiped there.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::HostId;
use pod_protocol::ids::{LeaseId, VolumeId};

use super::ssd_loads::SsdLoads;
use super::{DeviceId, Lease, Rates, Relief, Replica, State, Volume};

/// What SSDs do, and for whom, in a second. Reads and writes are one sum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskRates {
    /// By SSD; those of which nothing is known are not among them.
    pub ssds: BTreeMap<DeviceId, Rates>,
    /// What SSDs of a host do for a lease.
    pub leases: BTreeMap<(HostId, LeaseId), Rates>,
}

/// How far SSDs are relieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeRelief {
    /// From where to where, and by how many moves.
    pub relief: Relief,
    /// Volumes that are larger stay.
    pub bytes_max: u64,
}

/// What plans are made of.
struct Scene<'a> {
    measured: &'a DiskRates,
    resting: &'a BTreeSet<VolumeId>,
    limits: VolumeRelief,
    /// SSDs where something is copied or wiped, and those of moves that are planned.
    busy: BTreeSet<&'a DeviceId>,
    /// Hosts to which others would move, be it from the same group.
    goals: BTreeSet<HostId>,
    /// What volumes use of SSDs.
    used: Cow<'a, SsdLoads>,
}

/// A volume that is to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeMove {
    /// Which.
    pub volume: VolumeId,
    /// The SSD that it leaves.
    pub from: DeviceId,
    /// Where to.
    pub to: DeviceId,
    /// What it has an SSD do.
    pub rates: Rates,
}

impl State {
    /// Which volumes would leave these SSDs, one of each at most, those first that do most for what they can.
    pub fn plan_volume_moves(
        &self,
        overloaded: &BTreeSet<DeviceId>,
        measured: &DiskRates,
        resting: &BTreeSet<VolumeId>,
        limits: VolumeRelief,
    ) -> Vec<VolumeMove> {
        let used = |ssd| self.devices.get(ssd)?.can_do().used_permille(*measured.ssds.get(ssd)?);
        let hottest = overloaded.iter().filter_map(|ssd| Some((used(ssd)?, ssd)));
        let mut hottest: Vec<(u64, &DeviceId)> = hottest.collect();
        hottest.sort_by_key(|(used, ssd)| (Reverse(*used), *ssd));
        let mut moves: Vec<VolumeMove> = Vec::new();
        if hottest.is_empty() {
            return moves;
        }
        let (busy, used) = (self.copying_ssds(), self.ssd_loads_now());
        let mut scene = Scene { measured, resting, limits, busy, goals: BTreeSet::new(), used };
        for (_, from) in hottest {
            if moves.len() >= limits.relief.moves_max as usize {
                break;
            }
            if let Some((volume, to, rates)) = self.volume_off(from, &scene) {
                scene.busy.extend([from, to]);
                scene.goals.insert(to.host);
                moves.push(VolumeMove { volume, from: from.clone(), to: to.clone(), rates });
            }
        }
        moves
    }

    /// The volume whose move off an SSD is best: of those that relieve it enough one of the lowest priority, and of these the
    /// smallest; or else the one that relieves it most.
    fn volume_off<'a>(
        &'a self,
        from: &DeviceId,
        scene: &Scene<'a>,
    ) -> Option<(VolumeId, &'a DeviceId, Rates)> {
        let Scene { measured, resting, limits, .. } = scene;
        if scene.busy.contains(from) {
            return None;
        }
        let can_do = self.devices.get(from)?.can_do();
        let low = can_do.part(limits.relief.low_percent);
        let now = *measured.ssds.get(from)?;
        if low.has(now) {
            return None;
        }
        let before = can_do.used_permille(now)?;
        let candidate = |volume: &Volume| {
            let lease = self.lease_that_lets_move(volume, from)?;
            let rates = *measured.leases.get(&(from.host, lease.id))?;
            let left = now.minus(rates);
            let after = can_do.used_permille(left)?;
            let goes =
                after < before && volume.size_bytes <= limits.bytes_max && !resting.contains(&volume.id);
            // What is left counts only where it is too much anyway.
            let too_much = if low.has(left) { 0 } else { after + 1 };
            goes.then_some(((too_much, self.priority_of(lease), volume.size_bytes, volume.id), rates))
        };
        let near = self.volumes_near(from);
        let mut candidates: Vec<_> = near.into_iter().filter_map(candidate).collect();
        candidates.sort_unstable_by_key(|(order, _)| *order);
        candidates.into_iter().find_map(|((_, _, _, volume), rates)| {
            Some((volume, self.ssd_for(self.volumes.get(&volume)?, from, rates, scene)?, rates))
        })
    }

    /// The lease on a volume that has all of its data there and nowhere else, that has to be with no others, and whose frontend can copy
    /// it now.
    fn lease_that_lets_move(&self, volume: &Volume, from: &DeviceId) -> Option<&Lease> {
        let is_alone = matches!(
            volume.replicas.as_slice(),
            [Replica { device, stale: false, leaving: false, replaces: None, .. }] if device == from
        );
        let stays = volume.stripe_bytes.is_some() || volume.groups.together.is_some();
        if volume.deleted || stays || !is_alone {
            return None;
        }
        let lease = self.lease_of_volume(volume.id)?;
        (!lease.leaving && lease.incoming.is_none()).then_some(lease)
    }

    /// The SSD that would do the least of what it can with this volume, and not too much.
    fn ssd_for<'a>(
        &'a self,
        volume: &Volume,
        from: &DeviceId,
        rates: Rates,
        scene: &Scene<'a>,
    ) -> Option<&'a DeviceId> {
        let block_bytes = self.block_bytes_of(volume);
        let low_percent = scene.limits.relief.low_percent;
        let (size, wanted) = (volume.size_bytes, volume.rates_of_place());
        let fits = scene.measured.ssds.iter().filter_map(|(id, there)| {
            let known = self.devices.get(id)?;
            let (can_do, with) = (known.can_do(), there.plus(rates));
            let has_room = || scene.used.get(id).is_some_and(|ssd| ssd.start_for(size, wanted).is_some());
            let good = can_do.is_known()
                && can_do.part(low_percent).has(with)
                && self.may_come_to(volume, id, Some(from))
                && self.apart_at(volume, id.host).is_none()
                && !(volume.groups.apart.is_some() && scene.goals.contains(&id.host))
                && self.block_bytes(id) == block_bytes
                && self.is_usable(id)
                && !scene.busy.contains(id)
                && has_room();
            good.then_some((can_do.used_permille(with)?, id))
        });
        fits.min().map(|(_, id)| id)
    }

    /// Whether volumes are being copied to or from an SSD, or wiped there.
    pub fn is_copying(&self, ssd: &DeviceId) -> bool {
        self.volumes_near(ssd).into_iter().any(|volume| self.at_work(volume).any(|it| it == ssd))
    }

    /// All SSDs of which that is so.
    pub fn copying_ssds(&self) -> BTreeSet<&DeviceId> {
        self.volumes.values().flat_map(|volume| self.at_work(volume)).collect()
    }

    /// Where a volume is being copied or wiped.
    fn at_work<'a>(&'a self, volume: &'a Volume) -> impl Iterator<Item = &'a DeviceId> {
        let moves = |it: &Replica| it.leaving || it.replaces.is_some() || it.stale && self.is_up(&it.device);
        // It is the frontend of whoever has it that copies.
        let is_copied =
            volume.deleted || volume.places().any(moves) && self.lease_of_volume(volume.id).is_some();
        let places = volume.places().filter(move |_| is_copied);
        places.chain(&volume.former).map(|it| &it.device)
    }

    /// What is planned, in words.
    pub fn show_volume_move(&self, it: &VolumeMove) -> String {
        let volume = self.volumes.get(&it.volume);
        format!(
            "{} of {} with {} to {}",
            volume.map_or("a volume", |volume| &volume.name),
            self.instance_of_volume(it.volume).unwrap_or("an instance"),
            it.rates,
            self.device_name(&it.to)
        )
    }

    /// The name of the instance that has a volume.
    pub fn instance_of_volume(&self, volume: VolumeId) -> Option<&str> {
        let lease = self.lease_of_volume(volume)?;
        self.instances.get(&lease.instance).map(|instance| instance.name.as_str())
    }
}

#[cfg(test)]
mod tests;
