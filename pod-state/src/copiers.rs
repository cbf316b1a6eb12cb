//! Volumes that are copied although no instance uses them: those on SSDs that are to be empty, those that somebody moves, and mirrors of
//! which a replica missed something.
//!
//! It is frontends that copy. So the controller makes an instance without a VM on a host whose frontend is there, a *copier*, and ends it
//! when there is nothing left to copy. Whoever wants the volume gets it at once, and the copier ends; the next frontend goes on with what
//! is left.
//!
//! Which copiers there are to be is found out by looking at all that is there, now and then, and not with each command: many volumes would
//! have to be looked at each time, and nobody waits for that.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{HostId, Role};
use pod_protocol::ids::{InstanceId, VolumeId};

use super::create::Wanted;
use super::{Command, Effect, Instance, Lease, Presence, Refusal, RefusalKind, Replica, State, Volume};

/// How many copiers a pod has at most at a time: guests go on meanwhile.
const COPIERS_MAX: usize = 4;
/// What a copier's only device is called, whatever its volume is called: its socket's path has to be short.
pub(super) const COPIERS_DISK: &str = "disk";

impl State {
    /// The commands after which there are the copiers that are needed, and no others. To be asked again whenever the state has changed: which
    /// volumes can be copied depends on all of it.
    pub fn copiers_due(&self) -> Vec<Command> {
        if !self.has_copiers() {
            return Vec::new();
        }
        let copiers: Vec<&Instance> = self.instances.values().filter(|it| it.copier).collect();
        let (needed, over): (Vec<&Instance>, Vec<&Instance>) =
            copiers.into_iter().partition(|it| self.is_needed(it));
        let over: BTreeSet<InstanceId> = over.into_iter().map(|it| it.id).collect();
        let mut commands: Vec<Command> =
            over.iter().map(|&instance| Command::EndCopier { instance }).collect();
        let mut at_work: BTreeMap<HostId, usize> = BTreeMap::new();
        for copier in &needed {
            *at_work.entry(copier.host).or_default() += 1;
        }
        let mut room = COPIERS_MAX.saturating_sub(needed.len());
        let mut leased: Option<BTreeSet<VolumeId>> = None;
        for volume in self.volumes.values().filter(|it| self.may_need_copy(it)) {
            if room == 0 {
                break;
            }
            let leased = leased.get_or_insert_with(|| {
                let stay = self.leases.values().filter(|lease| !over.contains(&lease.instance));
                stay.filter_map(Lease::volume).collect()
            });
            if leased.contains(&volume.id) || !self.can_be_copied(volume) {
                continue;
            }
            let Some(host) = self.host_for_copier(volume, &at_work) else { continue };
            *at_work.entry(host).or_default() += 1;
            commands.push(Command::CreateCopier { volume: volume.id, host });
            room -= 1;
        }
        commands
    }

    /// Has a frontend copy a volume that nobody uses.
    pub(super) fn create_copier(
        &mut self,
        volume: VolumeId,
        host: HostId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let known = self.volumes.get(&volume).filter(|it| !it.deleted);
        let known = known.ok_or_else(|| Refusal::not_found("volume", &volume.to_string()))?;
        if self.lease_of_volume(volume).is_some() {
            return Err(Refusal::new(RefusalKind::Leased, format!("{} is in use by now", known.name)));
        }
        let (name, volumes) = (self.copiers_name(volume), [known.name.clone()]);
        let wanted = Wanted {
            name: &name,
            host,
            nics: &[],
            volumes: &volumes,
            instance_type: None,
            vmm_listens: false,
            ram_bytes: None,
            priority: None,
            copier: true,
        };
        self.create_instance(&wanted, effects)
    }

    /// Ends a copier. Another instance stays.
    pub(super) fn end_copier(&mut self, id: InstanceId, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        let copier = self.instances.get(&id).filter(|it| it.copier).map(|it| it.name.clone());
        copier.map_or(Ok(()), |name| self.delete_instance(&name, true, effects))
    }

    /// Ends the copier of a volume, if it has one: somebody else is to have it.
    pub(super) fn end_copier_of(
        &mut self,
        volume: VolumeId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let lease = self.lease_of_volume(volume).filter(|lease| self.is_copiers(lease));
        let Some(copier) = lease.map(|it| it.instance) else { return Ok(()) };
        self.end_copier(copier, effects)?;
        // Whom its lease concerned is found by the volume, which may be gone with this command.
        self.follow();
        Ok(())
    }

    /// Ends all copiers, since not all of the pod knows of them.
    pub(super) fn forget_copiers(&mut self, effects: &mut Vec<Effect>) {
        let copiers = self.instances.values().filter(|it| it.copier);
        let copiers: Vec<InstanceId> = copiers.map(|it| it.id).collect();
        for copier in copiers {
            // Those that are there can be ended.
            let _ = self.end_copier(copier, effects);
        }
    }

    /// Refuses what somebody would do with an instance of his own: a copier ends whatever else it has.
    pub(super) fn check_no_copier(&self, instance: &Instance) -> Result<(), Refusal> {
        let Some(volume) = self.copied_by(instance) else { return Ok(()) };
        let detail = format!(
            "{} is there to copy {}, and ends by itself: it gets no devices, and does not move",
            instance.name, volume.name
        );
        Err(Refusal::new(RefusalKind::Busy, detail))
    }

    /// Whether a lease is a copier's.
    pub(super) fn is_copiers(&self, lease: &Lease) -> bool {
        self.instances.get(&lease.instance).is_some_and(|it| it.copier)
    }

    /// The volume that an instance is there to copy, if it is a copier.
    pub fn copied_by(&self, instance: &Instance) -> Option<&Volume> {
        let disk = instance.disks.first().filter(|_| instance.copier)?;
        self.volumes.get(&self.leases.get(disk)?.volume()?)
    }

    /// A name that no instance has.
    fn copiers_name(&self, volume: VolumeId) -> String {
        let first = format!("copier-{}", volume.get());
        let mut names = std::iter::once(first.clone()).chain((1..u32::MAX).map(|it| format!("{first}-{it}")));
        names.find(|name| self.instance_named(name).is_none()).unwrap_or(first)
    }

    fn is_needed(&self, copier: &Instance) -> bool {
        let volume = self.copied_by(copier).filter(|it| self.may_need_copy(it));
        self.has_frontend(copier.host) && volume.is_some_and(|it| self.can_be_copied(it))
    }

    /// Whether some of a volume is to be copied, as far as can be told without looking at others.
    fn may_need_copy(&self, volume: &Volume) -> bool {
        let comes_or_goes = || volume.places().any(|it| it.stale || self.is_drained(&it.device));
        !volume.deleted && comes_or_goes()
    }

    /// Whether some of a volume is to be copied, and can be now.
    fn can_be_copied(&self, volume: &Volume) -> bool {
        let mut coming = volume.places().filter(|it| it.stale && !it.leaving && self.is_up(&it.device));
        let mut whole = volume.replicas.iter().filter(|it| !it.stale && self.is_up(&it.device));
        if coming.next().is_some() {
            // What a column's SSD has, nobody else has; of a volume with several columns it is the one that moves.
            return match &volume.beside {
                Some(beside) => whole.any(|it| it.number == beside.number),
                None => whole.next().is_some(),
            };
        }
        let striped = volume.stripe_bytes.is_some();
        // As far as its instance, if it had one, would have it leave.
        let leaves = |it: &Replica| {
            !it.leaving
                && self.is_drained(&it.device)
                && self.is_up(&it.device)
                && (striped || self.keeps_block_without(volume, it))
                && self.place_another(volume, None, Some(&it.device)).is_ok()
        };
        !volume.is_moving() && (!striped || self.moves_columns()) && volume.replicas.iter().any(leaves)
    }

    /// Where a volume is copied: where the fewest are, and among those where some of it lies.
    fn host_for_copier(&self, volume: &Volume, at_work: &BTreeMap<HostId, usize>) -> Option<HostId> {
        let hosts = self.endpoints.keys().filter(|id| id.role == Role::BlkFrontend).map(|id| id.host);
        let order = |host: &HostId| {
            let is_far = !volume.places().any(|place| place.device.host == *host);
            (at_work.get(host).copied().unwrap_or(0), is_far, *host)
        };
        hosts.filter(|host| self.has_frontend(*host)).min_by_key(order)
    }

    /// Whether a frontend for disks is there, on a host to which instances may come.
    fn has_frontend(&self, host: HostId) -> bool {
        let frontend = self.endpoints.get(&cxl_pool::EndpointId::new(host, Role::BlkFrontend));
        frontend.is_some_and(|it| it.presence == Presence::Joined) && !self.is_drained_host(host)
    }
}

#[cfg(test)]
mod tests;
