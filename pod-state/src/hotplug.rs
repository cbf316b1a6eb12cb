//! NICs and volumes that come to an instance, or leave it, while it runs.
//!
//! A lease that comes is made as those of a new instance are; the VMM plugs its device in once the frontend serves the socket. A
//! lease that is to leave is marked, and ends when its VMM says that the guest has let go of the device, or lets go of the socket,
//! which it does after that: whoever follows the instance for the VMM only looks at what there is, and may die and look again.
//!
//! Each device has a PCIe slot of its own for as long as it is leased: the VMM that receives the guest in a live migration puts it
//! where the other has it, whatever came and went before.

use std::collections::{BTreeMap, BTreeSet};

use pod_api::EventKind;
use pod_protocol::ids::{InstanceId, LeaseId};

use super::create::Wanted;
use super::refusal::shown;
use super::{Effect, Instance, Lease, NicWish, Refusal, RefusalKind, State};

impl State {
    /// Leases one NIC or one volume more to an instance.
    pub(super) fn attach_device(
        &mut self,
        name: &str,
        nic: Option<&NicWish>,
        volume: Option<&String>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let instance = self.instance_named(name).ok_or_else(|| Refusal::not_found("instance", name))?;
        self.check_no_copier(instance)?;
        if instance.incoming.is_some() {
            let detail = format!("{name} is moving to another host: wait until it is there, or abort that");
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        if nic.is_some() == volume.is_some() {
            return Err(Refusal::new(RefusalKind::InvalidValue, "ask for a NIC or for a volume"));
        }
        let (id, host, vmm_listens) = (instance.id, instance.host, instance.vmm_listens);
        let kind = instance.instance_type.clone();
        let instance_type = self.type_named(kind.as_deref()).unwrap_or_default();
        let nics: Vec<NicWish> = nic.cloned().into_iter().collect();
        let nics = if nics.is_empty() { nics } else { instance_type.complete(&nics) };
        let volumes: Vec<String> = volume.cloned().into_iter().collect();
        let wanted = Wanted {
            name,
            host,
            nics: &nics,
            volumes: &volumes,
            instance_type: None,
            vmm_listens,
            ram_bytes: None,
            priority: None,
            copier: false,
        };
        self.check_devices(&wanted, &nics, Some(id))?;
        let before: BTreeSet<LeaseId> = self.lease_ids_of(id).into_iter().collect();
        self.attempt(effects, |state, effects| {
            state.add_nics(id, &wanted, &nics)?;
            state.add_disks(id, &wanted, effects)?;
            state.promise_iops(&volumes, instance_type.volume_iops)?;
            let mut new = state.lease_ids_of(id);
            new.retain(|lease| !before.contains(lease));
            for lease in new.iter().filter_map(|lease| state.leases.get(lease)) {
                let message = format!("{} is leased to it, for its VMM to plug in", lease.device);
                effects.push(Effect::event(EventKind::DeviceAttached, name, message));
            }
            state.settle(effects);
            state.check_leases_made(new.iter().filter_map(|lease| state.leases.get(lease)))
        })
    }

    /// Has a device leave its instance: at once if no VMM uses it or by force, else when the VMM has let go of it.
    pub(super) fn detach_device(
        &mut self,
        name: &str,
        device: &str,
        force: bool,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let id = self.lease_named(name, device)?;
        let Some(lease) = self.leases.get_mut(&id) else { return Ok(()) };
        if lease.incoming.is_some() {
            let detail = format!("{name} is moving to another host: wait until it is there, or abort that");
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        // A frontend that starts anew knows of no VMM for a moment, and the guest has the device all the same.
        if (lease.is_in_use() || lease.plugged) && !force {
            (lease.leaving, lease.refused) = (true, None);
            let message = format!("{device} is to leave it, once its guest has let go of it");
            effects.push(Effect::event(EventKind::DeviceLeaving, name, message));
            return Ok(());
        }
        self.end_lease(id, effects);
        Ok(())
    }

    /// The VMM says whether its guest has a device, and why that is not what was asked for.
    pub(super) fn device_answered(
        &mut self,
        name: &str,
        device: &str,
        (plugged, refused): (bool, Option<&str>),
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let id = self.lease_named(name, device)?;
        let Some(lease) = self.leases.get_mut(&id) else { return Ok(()) };
        if lease.leaving && !plugged {
            self.end_lease(id, effects);
            return Ok(());
        }
        lease.plugged = plugged;
        let reason = refused.map(|reason| reason.chars().take(REASON_CHARACTERS_MAX).collect::<String>());
        if lease.refused != reason {
            if let Some(reason) = &reason {
                let message = format!("{device}: {reason}");
                effects.push(Effect::event(EventKind::DeviceRefused, name, message));
            }
            lease.refused = reason;
        }
        Ok(())
    }

    /// Ends a lease whose device was to leave and whose VMM has let go of it.
    pub(super) fn end_if_left(&mut self, id: LeaseId, effects: &mut Vec<Effect>) {
        if self.leases.get(&id).is_some_and(|lease| lease.leaving && !lease.connected) {
            self.end_lease(id, effects);
        }
    }

    /// The slot of a leased device.
    pub fn slot_of(&self, lease: &Lease) -> u8 {
        let instance = self.instances.get(&lease.instance);
        instance.and_then(|it| self.slots(it).get(&lease.id).copied()).unwrap_or_default()
    }

    /// The lowest slot that no device of the instance has; there is one, since an instance has few devices.
    pub(super) fn free_slot(&self, instance: InstanceId) -> Option<u8> {
        let taken = self.instances.get(&instance).map(|it| self.slots(it)).unwrap_or_default();
        lowest_free(&taken.into_values().collect())
    }

    /// The slots of an instance's devices; leases of before there were slots have what the others leave them.
    fn slots(&self, instance: &Instance) -> BTreeMap<LeaseId, u8> {
        let leases: Vec<&Lease> = self.leases_of(instance).collect();
        let mut slots: BTreeMap<LeaseId, u8> =
            leases.iter().filter_map(|lease| Some((lease.id, lease.slot?))).collect();
        let mut taken: BTreeSet<u8> = slots.values().copied().collect();
        for lease in leases.into_iter().filter(|lease| lease.slot.is_none()) {
            let Some(slot) = lowest_free(&taken) else { continue };
            taken.insert(slot);
            slots.insert(lease.id, slot);
        }
        slots
    }

    fn end_lease(&mut self, id: LeaseId, effects: &mut Vec<Effect>) {
        let Some(lease) = self.leases.remove(&id) else { return };
        self.end_promise(&lease);
        let incoming = lease.incoming.as_ref().and_then(|incoming| incoming.area);
        for area in lease.area.into_iter().chain(incoming) {
            self.regions.retire(area.region);
        }
        if let Some(instance) = self.instances.get_mut(&lease.instance) {
            instance.nics.retain(|nic| *nic != id);
            instance.disks.retain(|disk| *disk != id);
            let message = format!("{} is not leased to it any more", lease.device);
            effects.push(Effect::event(EventKind::DeviceDetached, instance.name.clone(), message));
        }
    }

    fn lease_named(&self, instance: &str, device: &str) -> Result<LeaseId, Refusal> {
        let known = self.instance_named(instance).ok_or_else(|| Refusal::not_found("instance", instance))?;
        let mut own = self.leases_of(known).filter(|lease| lease.device == device);
        let lease = own.next().ok_or_else(|| {
            let detail = format!("the instance {} has no device {}", shown(instance), shown(device));
            Refusal::new(RefusalKind::NotFound, detail)
        })?;
        Ok(lease.id)
    }
}

fn lowest_free(taken: &BTreeSet<u8>) -> Option<u8> {
    (0..=u8::MAX).find(|slot| !taken.contains(slot))
}

/// The most that is kept of what a VMM says.
const REASON_CHARACTERS_MAX: usize = 400;
