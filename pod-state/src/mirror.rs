//! Mirrored volumes: which replicas may be relied on.
//!
//! A replica is *stale* when it may miss something that was acknowledged. It is marked before anything is acknowledged
//! without it: its frontend asks, or its backend is known to be over, and what the frontend is told comes after the commit
//! and after the other replicas' SSDs have it in their tables. The last replica that is not stale is never marked, whatever
//! becomes of it: nobody else has what it has.
//!
//! The epoch of a volume grows with each change of that set. A frontend says in which epoch a replica is in line again, so
//! that what it said before it asked for something else counts no more.

use std::collections::BTreeSet;

use cxl_pool::{EndpointId, HostId};
use pod_api::EventKind;
use pod_protocol::ids::{LeaseId, VolumeId};
use pod_protocol::volume_table::{MirrorEntry, MirrorMember};

use super::groups::Neighbours;
use super::rates::Rates;
use super::{DeviceId, Effect, Refusal, RefusalKind, Replica, State, Volume};

/// The most replicas of a volume.
pub(super) const REPLICAS_MAX: u8 = 3;
/// While it moves, a volume may have one more.
pub(super) const PLACES_MAX: usize = REPLICAS_MAX as usize + 1;

impl State {
    /// Finds places for a volume, each on another host.
    pub(super) fn place_replicas(
        &self,
        size: (u64, Rates),
        device: Option<&DeviceId>,
        replicas: u8,
        neighbours: &Neighbours,
    ) -> Result<Vec<Replica>, Refusal> {
        if replicas == 0 || replicas > REPLICAS_MAX {
            return Err(Refusal::new(
                RefusalKind::InvalidValue,
                format!("a volume can have 1 to {REPLICAS_MAX} replicas, not {replicas}"),
            ));
        }
        Ok(self.places(size, device, replicas, neighbours))
    }

    /// Places of this size that are sure of so much, each on another host: so many, or fewer if there are
    /// not as many.
    pub(super) fn places(
        &self,
        size: (u64, Rates),
        device: Option<&DeviceId>,
        count: u8,
        neighbours: &Neighbours,
    ) -> Vec<Replica> {
        let mut places: Vec<Replica> = Vec::new();
        for number in 0..u32::from(count) {
            let hosts: BTreeSet<HostId> = places.iter().map(|replica| replica.device.host).collect();
            let wanted = device.filter(|_| number == 0);
            let elsewhere = |id: &DeviceId| !hosts.contains(&id.host);
            let Some((device, start_bytes)) = self.place_volume(size, wanted, neighbours, elsewhere) else {
                break;
            };
            places.push(Replica::new(number, device, start_bytes));
        }
        places
    }

    /// A replica missed something. Nobody counts on it any more, unless it is the last one.
    pub(super) fn replica_failed(
        &mut self,
        endpoint: EndpointId,
        lease: LeaseId,
        number: u32,
        epoch: u64,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(id) = self.striped_at(endpoint, lease) {
            return self.column_not_copied(id, (number, epoch), reason, effects);
        }
        let Some(id) = self.volume_at(endpoint, lease) else { return };
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let Some(replica) = volume.replicas.iter().find(|replica| replica.number == number) else { return };
        if !replica.stale {
            self.drop_replica(id, number, reason, effects);
        } else if epoch == volume.epoch {
            // It may have said just before that the replica is in line. That must not be heard after this.
            volume.epoch += 1;
        }
    }

    /// A stale replica has everything.
    pub(super) fn replica_synced(
        &mut self,
        endpoint: EndpointId,
        lease: LeaseId,
        number: u32,
        epoch: u64,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(id) = self.striped_at(endpoint, lease) {
            return self.column_copied(id, (number, epoch), effects);
        }
        let Some(id) = self.volume_at(endpoint, lease) else { return };
        let Some(volume) = self.volumes.get_mut(&id).filter(|volume| volume.epoch == epoch) else { return };
        let stale = |replica: &&mut Replica| replica.number == number && replica.stale;
        let Some(replica) = volume.replicas.iter_mut().find(stale) else { return };
        if replica.leaving {
            return;
        }
        replica.stale = false;
        volume.epoch += 1;
        let replaced = replica.replaces;
        let (name, device) = (volume.name.clone(), replica.device.clone());
        let replaced = volume.replicas.iter_mut().find(|it| Some(it.number) == replaced);
        let old = replaced.map(|replaced| {
            replaced.leaving = true;
            replaced.device.clone()
        });
        effects.push(self.has_everything(name, &device, old.as_ref()));
    }

    /// What is told of a place that has everything, and perhaps takes that of another one.
    pub(super) fn has_everything(&self, name: String, device: &DeviceId, old: Option<&DeviceId>) -> Effect {
        let Some(old) = old else {
            let message = format!("{} has everything", self.device_name(device));
            return Effect::event(EventKind::ReplicaSynced, name, message);
        };
        let (new, old) = (self.device_name(device), self.device_name(old));
        Effect::event(
            EventKind::Migrated,
            name,
            format!("{new} has everything, and takes the place of {old}"),
        )
    }

    /// The mirrored volume of a lease that this frontend serves.
    pub(super) fn volume_at(&self, endpoint: EndpointId, lease: LeaseId) -> Option<VolumeId> {
        let lease = self.leases.get(&lease)?;
        let id = lease.volume().filter(|_| self.frontend_of(lease) == Some(endpoint))?;
        self.volumes.get(&id).is_some_and(Volume::is_mirrored).then_some(id)
    }

    pub(super) fn drop_replica(
        &mut self,
        id: VolumeId,
        number: u32,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let others = |replica: &Replica| replica.number != number && !replica.stale;
        if !volume.replicas.iter().any(others) {
            return;
        }
        let good = |replica: &&mut Replica| replica.number == number && !replica.stale;
        let Some(replica) = volume.replicas.iter_mut().find(good) else { return };
        replica.stale = true;
        volume.epoch += 1;
        let replaced = replica.replaces;
        let (name, device) = (volume.name.clone(), replica.device.clone());
        let message = format!("{} is not relied on any more: {reason}", self.device_name(&device));
        effects.push(Effect::event(EventKind::ReplicaDropped, name, message));
        self.stays(id, replaced, effects);
    }

    /// Drops replicas in use that are lost while another one works. One that is merely silent may still be at work.
    pub(super) fn drop_lost_replicas(&mut self, effects: &mut Vec<Effect>) {
        let mut lost: Vec<(VolumeId, u32)> = Vec::new();
        let leased = self.touched().filter_map(|lease| self.volumes.get(&lease.volume()?));
        for volume in leased.filter(|volume| volume.is_mirrored()) {
            let good = || volume.replicas.iter().filter(|replica| !replica.stale);
            if good().any(|replica| self.is_up(&replica.device)) {
                let over = good().filter(|replica| self.is_lost(&replica.device));
                lost.extend(over.map(|replica| (volume.id, replica.number)));
            }
        }
        for (volume, number) in lost {
            self.drop_replica(volume, number, "it does not work, and the others go on", effects);
        }
    }

    /// Silent backends that keep guests waiting although another replica works, or although all columns do.
    pub(super) fn silent_replicas(&self) -> impl Iterator<Item = EndpointId> {
        self.touched()
            .filter_map(|lease| self.volumes.get(&lease.volume()?))
            .filter(|volume| {
                let mut replicas = volume.replicas.iter();
                match volume.beside {
                    Some(_) => replicas.all(|column| self.is_up(&column.device)),
                    None => volume.is_mirrored() && replicas.any(|it| !it.stale && self.is_up(&it.device)),
                }
            })
            .flat_map(|volume| volume.places().map(|replica| replica.device.blk_backend()))
            .filter(|backend| self.is_silent(*backend))
    }

    /// What the SSD of a replica keeps about the mirror.
    pub(super) fn mirror_entry(&self, volume: &Volume, number: u32) -> Option<MirrorEntry> {
        let member = |replica: &Replica| MirrorMember {
            number: replica.number,
            ssd: self.device_name(&replica.device),
            stale: replica.stale,
        };
        volume.is_mirrored().then(|| MirrorEntry {
            epoch: volume.epoch,
            number,
            replicas: volume.replicas.iter().map(member).collect(),
        })
    }

    /// The replicas of a volume as a frontend sees them, those on its own host first.
    pub(super) fn replicas_for(frontend: EndpointId, volume: &Volume) -> Vec<&Replica> {
        let mut replicas: Vec<&Replica> = volume.replicas.iter().collect();
        replicas.sort_by_key(|replica| (replica.device.host != frontend.host, replica.number));
        replicas
    }
}

#[cfg(test)]
mod tests;
