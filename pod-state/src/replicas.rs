//! Places that come to a volume and go from it while it is in use: how it moves from one SSD to another.
//!
//! A new replica begins stale and is brought in line by the frontend, as one that was away. One that is to go is *leaving*, and
//! goes in steps:
//!
//! 1. Another replica has everything, and that is committed; the tables on both SSDs say so before the frontend hears of it.
//! 2. The frontend has heard. The replica is marked stale, so that nobody counts on it.
//! 3. The frontend has let go of it: nothing of it is in flight there. Its place is wiped, and then given on.
//!
//! Until it has gone, the new one is known to replace it. Should that be lost before, or be taken away again, the old one stays, as it
//! would have before the first step.
//!
//! Were the first two steps one, a pod that loses the controller's state right then would find a table on the old SSD which
//! claims to be the only good one.

use cxl_pool::EndpointId;
use pod_api::{ByteSize, EventKind};
use pod_protocol::ids::{LeaseId, PlaceNumber, VolumeId};

use super::mirror::PLACES_MAX;
use super::{DeviceId, Effect, Kind, Refusal, RefusalKind, Replica, State, Volume};

impl State {
    /// Has a volume lie in one more place, or move there.
    pub(super) fn add_replica(
        &mut self,
        name: &str,
        device: Option<&DeviceId>,
        old: Option<&DeviceId>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let volume = self.volume_named(name).ok_or_else(|| Refusal::not_found("volume", name))?;
        if volume.stripe_bytes.is_some() {
            return self.move_column(volume.id, device, old, effects);
        }
        let replaced = match old {
            None => None,
            Some(old) => {
                let place = self.place_of(volume, old)?;
                self.check_block_without(volume, place)?;
                Some(place.number)
            }
        };
        if let Some(going) = volume.replicas.iter().find(|it| it.leaving || it.replaces.is_some()) {
            let detail = format!(
                "{name} is moving already: wait until {} has everything or is gone, or take the new place away again \
                 (podctl volumes remove-replica)",
                self.device_name(&going.device)
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        let most = if replaced.is_some() { PLACES_MAX } else { PLACES_MAX - 1 };
        if volume.replicas.len() >= most {
            let detail = format!("{name} has {} replicas already, which is the most", volume.replicas.len());
            return Err(Refusal::new(RefusalKind::InvalidValue, detail));
        }
        self.check_instance_stays(volume)?;
        let (device, start_bytes) = self.place_another(volume, device, old)?;
        let place = volume.next_place_on(device.host);
        let id = volume.id;
        let (kind, message) = match old {
            Some(old) => (
                EventKind::MigrationPrepared,
                format!("it moves from {} to {}", self.device_name(old), self.device_name(&device)),
            ),
            None => (EventKind::VolumeChanged, format!("it gets a replica on {}", self.device_name(&device))),
        };
        if let Some(volume) = self.volumes.get_mut(&id) {
            let number = volume.next_number;
            volume.next_number += 1;
            let replica = Replica::new(number, device, start_bytes);
            volume.replicas.push(Replica { stale: true, place, replaces: replaced, ..replica });
            volume.epoch += 1;
        }
        effects.push(Effect::event(kind, name, message));
        Ok(())
    }

    /// A volume does not move while its instance does.
    pub(super) fn check_instance_stays(&self, volume: &Volume) -> Result<(), Refusal> {
        let moving = self.lease_of_volume(volume.id).filter(|lease| lease.incoming.is_some());
        if let Some(instance) = moving.and_then(|lease| self.instances.get(&lease.instance)) {
            let name = &instance.name;
            let detail = format!(
                "the instance {name}, which uses {}, is moving to another host: wait until it is there, or abort that (podctl \
                 instances abort-migration {name})",
                volume.name
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        Ok(())
    }

    /// A place more of the size that each of a volume's places has, in place of an old one if there is one that it comes in place of.
    pub(super) fn place_another(
        &self,
        volume: &Volume,
        device: Option<&DeviceId>,
        old: Option<&DeviceId>,
    ) -> Result<(DeviceId, u64), Refusal> {
        let block_bytes = self.block_bytes_of(volume);
        if let Some(wanted) = device {
            let wanted_name = self.device_name(wanted);
            match self.devices.get(wanted).map(|known| &known.kind) {
                Some(Kind::Ssd { block_bytes: block, .. }) if Some(*block) != block_bytes => {
                    let detail = format!(
                        "{wanted_name} has blocks of {block} bytes, and a guest that uses {} expects {}",
                        volume.name,
                        block_bytes.unwrap_or(0)
                    );
                    return Err(Refusal::new(RefusalKind::InvalidValue, detail));
                }
                Some(Kind::Ssd { .. }) => {}
                _ => {
                    return Err(Refusal::new(
                        RefusalKind::NotFound,
                        format!("there is no SSD {wanted_name}"),
                    ));
                }
            }
            self.check_free_of(volume, wanted, old)?;
        }
        let fits = |id: &DeviceId| self.block_bytes(id) == block_bytes && self.may_come_to(volume, id, old);
        let rates = volume.rates_of_place();
        let neighbours = self.neighbours(&volume.groups, Some(volume.id));
        if let Some(wanted) = device {
            self.check_apart(&neighbours, &volume.groups, wanted)?;
        }
        self.place_volume((volume.place_bytes(), rates), device, &neighbours, fits).ok_or_else(|| {
            let place = device.map_or_else(
                || "no SSD where it may lie".to_owned(),
                |id| format!("not {}", self.device_name(id)),
            );
            let size = ByteSize::new(volume.place_bytes());
            let (rates, apart) = (rates.as_well(), neighbours.as_well(&volume.groups));
            let detail = format!(
                "there is no room for {size}{rates} in one piece: {place} that is up has that much free{apart}"
            );
            Refusal::new(RefusalKind::NoRoom, detail)
        })
    }

    pub(super) fn place_of<'a>(&self, volume: &'a Volume, device: &DeviceId) -> Result<&'a Replica, Refusal> {
        volume.replica_on(device).ok_or_else(|| {
            let detail = format!("{} does not lie on {}", volume.name, self.device_name(device));
            Refusal::new(RefusalKind::NotFound, detail)
        })
    }

    /// A guest that uses a disk cannot be told of another block.
    pub(super) fn check_block_without(&self, volume: &Volume, place: &Replica) -> Result<(), Refusal> {
        if self.keeps_block_without(volume, place) || self.lease_of_volume(volume.id).is_none() {
            return Ok(());
        }
        let detail = format!(
            "without {} the disk would have another block, of which its guest cannot be told: delete the instance first",
            self.device_name(&place.device)
        );
        Err(Refusal::new(RefusalKind::Leased, detail))
    }

    /// Whether the volume has the same block without this place.
    pub(super) fn keeps_block_without(&self, volume: &Volume, place: &Replica) -> bool {
        let others = volume.devices().filter(|ssd| **ssd != place.device);
        let left = others.filter_map(|ssd| self.block_bytes(ssd)).max();
        left.is_none() || left == self.block_bytes_of(volume)
    }

    /// Has a volume not lie there any more.
    pub(super) fn remove_replica(
        &mut self,
        name: &str,
        device: &DeviceId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let volume = self.volume_named(name).ok_or_else(|| Refusal::not_found("volume", name))?;
        if volume.stripe_bytes.is_some() {
            return self.call_column_move_off(volume.id, device, effects);
        }
        let place = self.place_of(volume, device)?;
        let ssd = self.device_name(device);
        let (id, number, replaced) = (volume.id, place.number, place.replaces);
        if place.leaving {
            self.goes_in_any_case(id, number);
            return Ok(());
        }
        let stays = |it: &Replica| !it.leaving || replaced == Some(it.number);
        let remains = |it: &&Replica| it.number != number && !it.stale && stays(it);
        let up = |it: &Replica| self.is_up(&it.device);
        if !place.stale && !volume.replicas.iter().filter(remains).any(up) {
            let detail = format!(
                "nobody else has what {ssd} has of {name}: have it moved (podctl volumes move), or delete the volume"
            );
            return Err(Refusal::new(RefusalKind::InvalidValue, detail));
        }
        self.check_block_without(volume, place)?;
        self.goes_in_any_case(id, number);
        if let Some(volume) = self.volumes.get_mut(&id) {
            for replica in volume.replicas.iter_mut().filter(|it| it.number == number) {
                (replica.leaving, replica.replaces) = (true, None);
            }
            volume.epoch += 1;
        }
        let (kind, message) = match replaced {
            Some(_) => {
                (EventKind::MigrationAborted, format!("it does not move to {ssd}: that was called off"))
            }
            None => (EventKind::VolumeChanged, format!("its replica on {ssd} is to go")),
        };
        effects.push(Effect::event(kind, name, message));
        self.stays(id, replaced, effects);
        Ok(())
    }

    /// Whatever becomes of the one that was to take its place.
    fn goes_in_any_case(&mut self, id: VolumeId, number: u32) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        for replica in volume.replicas.iter_mut().filter(|it| it.replaces == Some(number)) {
            replica.replaces = None;
        }
    }

    /// A replica that was to go, since another one would take its place, does not go now: that one is lost, or is to go itself.
    pub(super) fn stays(&mut self, id: VolumeId, replaced: Option<u32>, effects: &mut Vec<Effect>) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let goes = |it: &&mut Replica| Some(it.number) == replaced && it.leaving;
        let Some(replica) = volume.replicas.iter_mut().find(goes) else { return };
        replica.leaving = false;
        volume.epoch += 1;
        let (name, device) = (volume.name.clone(), replica.device.clone());
        let message = format!("its replica on {} stays meanwhile", self.device_name(&device));
        effects.push(Effect::event(EventKind::MigrationAborted, name, message));
    }

    /// A frontend has seen that a replica is to go, or has let go of it.
    pub(super) fn replica_left(
        &mut self,
        endpoint: EndpointId,
        lease: LeaseId,
        number: u32,
        epoch: u64,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(id) = self.striped_at(endpoint, lease) {
            return self.column_left(id, (number, epoch), effects);
        }
        let Some(id) = self.volume_at(endpoint, lease) else { return };
        let Some(volume) = self.volumes.get(&id).filter(|volume| volume.epoch == epoch) else { return };
        match volume.replicas.iter().find(|it| it.number == number && it.leaving) {
            Some(Replica { stale: true, .. }) => self.leave(id, number, effects),
            Some(_) => self.drop_replica(id, number, "it is to go", effects),
            None => {}
        }
    }

    /// Replicas that are to go and that nobody has to let go of: their volume is not in use, or their backend is over.
    pub(super) fn end_leaving_replicas(&mut self, effects: &mut Vec<Effect>) {
        let mut over: Vec<(VolumeId, u32)> = Vec::new();
        let touched = self.work().flat_map(|work| &work.volumes).filter_map(|id| self.volumes.get(id));
        for volume in touched.filter(|it| it.replicas.iter().any(|replica| replica.leaving)) {
            let leased = self.lease_of_volume(volume.id).is_some();
            let others = |number: u32| {
                volume.replicas.iter().any(|it| it.number != number && !it.stale && !it.leaving)
            };
            let ends = |it: &&Replica| {
                it.leaving && others(it.number) && (!leased || it.stale && self.is_lost(&it.device))
            };
            over.extend(volume.replicas.iter().filter(ends).map(|it| (volume.id, it.number)));
        }
        for (volume, number) in over {
            self.leave(volume, number, effects);
        }
    }

    /// A replica is none any more.
    pub(super) fn leave(&mut self, id: VolumeId, number: u32, effects: &mut Vec<Effect>) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let Some(at) = volume.replicas.iter().position(|it| it.number == number) else { return };
        let gone = volume.replicas.remove(at);
        self.goes_in_any_case(id, number);
        self.stays(id, gone.replaces, effects);
        self.left(id, gone, effects);
    }

    /// A volume does not have a place any more, which is wiped where that can be done.
    pub(super) fn left(&mut self, id: VolumeId, gone: Replica, effects: &mut Vec<Effect>) {
        let keeps_table = matches!(
            self.devices.get(&gone.device).map(|known| &known.kind),
            Some(Kind::Ssd { keeps_table: true, .. })
        );
        self.is_gone_from(id, gone.device.host, keeps_table);
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        volume.epoch += 1;
        if let [only] = volume.replicas.as_mut_slice() {
            // It was to go for one that had everything, and had failed by the time at which it went itself.
            only.leaving = false;
        }
        let (name, device) = (volume.name.clone(), gone.device.clone());
        if keeps_table {
            volume.former.push(Replica { place: PlaceNumber::FIRST, ..gone });
        }
        let message = format!("it does not lie on {} any more", self.device_name(&device));
        effects.push(Effect::event(EventKind::VolumeChanged, name, message));
    }
}

#[cfg(test)]
mod tests;
