//! Disks whose backend is away: guests are made to wait for a while, and then get errors.

use cxl_pool::{EndpointId, Role};
use pod_api::EventKind;

use super::{DeviceId, Effect, Health, Lease, Presence, State};

impl State {
    /// Storage backends that are away and that guests still wait for.
    pub fn awaited(&self) -> impl Iterator<Item = (EndpointId, u64)> {
        let away = self.endpoints.iter().filter(|(id, endpoint)| {
            id.role == Role::BlkBackend && endpoint.presence != Presence::Joined && !endpoint.given_up
        });
        away.map(|(id, endpoint)| (*id, endpoint.incarnation))
    }

    /// Gives up waiting. Whoever is merely silent is fenced first: a write that the guest was told has failed must not
    /// happen afterwards.
    pub(super) fn grace_expired(&mut self, id: EndpointId, incarnation: u64, effects: &mut Vec<Effect>) {
        let Some(endpoint) = self.endpoints.get_mut(&id) else { return };
        if endpoint.incarnation != incarnation || endpoint.presence == Presence::Joined {
            return;
        }
        endpoint.given_up = true;
        if endpoint.presence == Presence::Silent {
            let message = "it has been silent for too long, and its disks answer I/O errors from now on";
            self.fence(id, message, effects);
        }
    }

    /// Whether the requests of a disk are answered by errors: its SSD failed, or its backend has come without it, or nobody waits
    /// for its backend any more.
    pub(super) fn is_failed_disk(&self, lease: &Lease) -> bool {
        let Some(volume) = lease.volume().and_then(|volume| self.volumes.get(&volume)) else { return false };
        let failed = |ssd: &DeviceId| {
            let backend = self.endpoints.get(&ssd.blk_backend());
            self.devices.get(ssd).is_some_and(|ssd| matches!(ssd.health, Health::Failed(_) | Health::Absent))
                || backend.is_some_and(|it| it.given_up && it.presence.is_over())
        };
        let mut good = volume.replicas.iter().filter(|replica| !replica.stale).map(|replica| &replica.device);
        // Of a striped one nobody else has what a column has.
        if volume.stripe_bytes.is_some() { good.any(failed) } else { good.all(failed) }
    }

    pub(super) fn tell_failed_disk(&self, lease: &Lease, failed: bool, effects: &mut Vec<Effect>) {
        let Some(volume) = lease.volume().and_then(|volume| self.volumes.get(&volume)) else { return };
        let Some(instance) = self.instances.get(&lease.instance) else { return };
        let ssds: Vec<String> = volume.devices().map(|ssd| self.device_name(ssd)).collect();
        let (kind, what) = if failed {
            (EventKind::DiskFailed, "answers I/O errors: its SSD is not there")
        } else {
            (EventKind::DiskBack, "is served again")
        };
        let message = format!("{} on {} {what}", lease.device, ssds.join(", "));
        effects.push(Effect::event(kind, instance.name.clone(), message));
    }
}
