use pod_api::EventKind;
use pod_protocol::ids::PlaceNumber;

use super::refusal::shown;
use super::{Effect, GuestRam, Kind, Refusal, RefusalKind, Replica, State};

impl State {
    pub(super) fn delete_volume(&mut self, name: &str, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        let id = self.volume_named(name).ok_or_else(|| Refusal::not_found("volume", name))?.id;
        self.end_copier_of(id, effects)?;
        if let Some(lease) = self.lease_of_volume(id) {
            let holder = self.instances.get(&lease.instance).map_or("an instance", |it| it.name.as_str());
            return Err(Refusal::new(
                RefusalKind::Leased,
                format!(
                    "the volume {} is leased to {holder}: detach it first (podctl instances detach)",
                    shown(name)
                ),
            ));
        }
        let Some(volume) = self.volumes.get_mut(&id) else { return Ok(()) };
        let devices = &self.devices;
        let is_wiped = |replica: &Replica| {
            let device = devices.get(&replica.device).map(|device| &device.kind);
            matches!(device, Some(Kind::Ssd { keeps_table: true, .. }))
        };
        volume.replicas.retain(is_wiped);
        volume.places_mut().for_each(|it| it.place = PlaceNumber::FIRST);
        volume.former.extend(volume.beside.take().filter(is_wiped));
        if volume.replicas.is_empty() && volume.former.is_empty() {
            self.volumes.remove(&id);
            effects.push(Effect::event(EventKind::VolumeDeleted, name, "its range is free, and not wiped"));
        } else {
            volume.deleted = true;
            effects.push(Effect::event(
                EventKind::VolumeDeleted,
                name,
                "its range is free when it was wiped",
            ));
        }
        Ok(())
    }

    pub(super) fn delete_instance(
        &mut self,
        name: &str,
        force: bool,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let instance = self.instance_named(name).ok_or_else(|| Refusal::not_found("instance", name))?;
        let id = instance.id;
        let used = self.leases_of(instance).find(|lease| lease.is_in_use());
        if let Some(lease) = used.filter(|_| !force) {
            let (device, name) = (&lease.device, shown(name));
            let by_force = "delete by force (podctl instances delete --force, ?force=true)";
            let detail = if lease.is_unheard_of() {
                format!(
                    "a VMM used {device} of the instance {name} until its frontend started anew, and may be about to connect again: ask \
                     again in a few seconds, or {by_force}"
                )
            } else {
                format!("a VMM uses {device} of the instance {name}: stop the VM first, or {by_force}")
            };
            return Err(Refusal::new(RefusalKind::Connected, detail));
        }
        for lease in self.lease_ids_of(id) {
            let Some(lease) = self.leases.remove(&lease) else { continue };
            self.end_promise(&lease);
            let incoming = lease.incoming.and_then(|incoming| incoming.area);
            for area in lease.area.into_iter().chain(incoming) {
                self.regions.retire(area.region);
            }
        }
        let ram = self.instances.remove(&id).and_then(|instance| instance.ram);
        ram.iter().flat_map(GuestRam::regions).for_each(|region| self.regions.retire(region));
        effects.push(Effect::event(EventKind::InstanceDeleted, name, "its leases ended"));
        Ok(())
    }
}
