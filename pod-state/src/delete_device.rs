//! Devices that their hosts do not have any more, and that are not expected back.

use pod_api::EventKind;
use pod_protocol::ids::VolumeId;

use super::{DeviceId, Effect, Health, LeaseKind, Refusal, RefusalKind, State, Volume};

/// What becomes of a volume without an SSD.
enum Without {
    /// Others have what this place of it has.
    GoesOn(u32),
    /// Nobody else has its data.
    IsLost(String),
}

impl State {
    /// Forgets a device. Volumes of which nobody else has the data are deleted with it if `lose_data` says so, else nothing is.
    pub(super) fn delete_device(
        &mut self,
        id: &DeviceId,
        lose_data: bool,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let name = self.device_name(id);
        let device = self.devices.get(id).ok_or_else(|| Refusal::not_found("device", &name))?;
        if device.health != Health::Absent {
            let detail = format!(
                "{name} counts as there: take it out of the configuration of {} and start that again, then delete it",
                self.endpoint_name(cxl_pool::EndpointId::new(id.host, device.role()))
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        self.check_serves_nobody(id, &name)?;
        let here = self.volumes.values().filter(|it| !it.deleted && it.replica_on(id).is_some());
        let here: Vec<VolumeId> = here.map(|it| it.id).collect();
        let mut without = Vec::new();
        for volume in here {
            let Some(volume) = self.volumes.get(&volume) else { continue };
            without.push((volume.id, self.without(volume, id, &name, lose_data)?));
        }
        for (volume, becomes) in without {
            match becomes {
                Without::GoesOn(number) => {
                    self.leave(volume, number, effects);
                }
                Without::IsLost(name) => self.delete_volume(&name, effects)?,
            }
        }
        // What nobody will wipe.
        for volume in self.volumes.values_mut() {
            volume.replicas.retain(|place| place.device != *id);
            volume.former.retain(|place| place.device != *id);
        }
        self.volumes.retain(|_, volume| !volume.replicas.is_empty() || !volume.former.is_empty());
        for lease in self.leases.values_mut() {
            if let LeaseKind::Nic { standby, home, draining, .. } = &mut lease.kind {
                *standby = standby.take().filter(|nic| nic != id);
                *home = home.take().filter(|nic| nic != id);
                *draining = draining.take().filter(|it| it.nic != *id);
            }
        }
        self.forget_device(id);
        self.look_again();
        effects.push(Effect::event(EventKind::DeviceGone, name, "it is not part of the pod any more"));
        Ok(())
    }

    /// Refuses while a lease has no other NIC to be on.
    fn check_serves_nobody(&self, id: &DeviceId, name: &str) -> Result<(), Refusal> {
        let Some(lease) = self.leases.values().find(|lease| lease.active_nic() == Some(id)) else {
            return Ok(());
        };
        let instance = self.instances.get(&lease.instance).map_or("an instance", |it| it.name.as_str());
        let detail = format!(
            "{} of the instance {instance} is on {name}, since no other NIC could take it: have one that works, or detach it first",
            lease.device
        );
        Err(Refusal::new(RefusalKind::Leased, detail))
    }

    /// What becomes of a volume that has a place on this SSD.
    fn without(
        &self,
        volume: &Volume,
        id: &DeviceId,
        ssd: &str,
        lose_data: bool,
    ) -> Result<Without, Refusal> {
        let place = self.place_of(volume, id)?;
        let has_it = |other: &super::Replica| other.number != place.number && !other.stale && !other.leaving;
        let name = &volume.name;
        if volume.stripe_bytes.is_none() && volume.replicas.iter().any(has_it) {
            if !lose_data {
                let detail = format!(
                    "{ssd} has a replica of the volume {name}: remove that first (podctl volumes remove-replica {name} --device {ssd})"
                );
                return Err(Refusal::new(RefusalKind::Busy, detail));
            }
            self.check_block_without(volume, place)?;
            return Ok(Without::GoesOn(place.number));
        }
        if !lose_data {
            let detail = format!(
                "nobody else has what {ssd} has of the volume {name}: delete that first, or have its data be lost with the device \
                 (podctl devices delete --lose-data, ?lose-data=true)"
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        match self.instance_of_volume(volume.id) {
            None => Ok(Without::IsLost(name.clone())),
            Some(instance) => {
                let detail = format!(
                    "the volume {name}, whose data would be lost, is leased to {instance}: detach it first (podctl instances detach)"
                );
                Err(Refusal::new(RefusalKind::Leased, detail))
            }
        }
    }
}

#[cfg(test)]
mod tests;
