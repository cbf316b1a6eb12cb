//! SSDs in whose place others have come, under their names.
//!
//! The controller knows an SSD by its host and its name, and what lies where on it by its own state. Another one of the same name has
//! nothing of that: volumes would be empty there, and replicas lack all but what was written since. So it is left alone until whoever runs
//! the pod has the one before again, or gives it up.

use pod_api::EventKind;
use pod_protocol::reports::DeviceReport;

use super::{DeviceId, Effect, Health, Kind, State};

/// What happened to such an SSD, and what is to be done.
pub const REPLACED: &str = "its host has another SSD under its name, which is left alone: put back the one that was there, or give that \
     one up (podctl devices delete) and restart the backend";

impl State {
    /// Whether what a host reports under the name of an SSD is another one, while volumes have places on the one before.
    pub(super) fn is_another(&self, id: &DeviceId, report: &DeviceReport) -> bool {
        let DeviceReport::Ssd { identity, .. } = report else { return false };
        let Some(Kind::Ssd { identity: Some(before), .. }) = self.devices.get(id).map(|known| &known.kind)
        else {
            return false;
        };
        let differs = match identity {
            Some(now) => now != before,
            None => has_yet_to_get_its_number(report),
        };
        let has_places = || self.volumes.values().any(|it| it.all_places().any(|place| place.device == *id));
        self.knows_ssds() && differs && has_places()
    }

    /// The one before is away, and why that is remembered.
    pub(super) fn note_replaced(&mut self, id: &DeviceId, effects: &mut Vec<Effect>) {
        let name = self.device_name(id);
        let Some(device) = self.devices.get_mut(id) else { return };
        let Kind::Ssd { replaced, .. } = &mut device.kind else { return };
        let was_known = std::mem::replace(replaced, true);
        if device.health != Health::Absent || !was_known {
            device.health = Health::Absent;
            effects.push(Effect::event(EventKind::DeviceGone, name, REPLACED));
        }
    }

    /// SSDs are known by their names only.
    pub(super) fn forget_identities(&mut self) {
        let is_known = |kind: &Kind| matches!(kind, Kind::Ssd { identity, replaced, .. } if identity.is_some() || *replaced);
        let known: Vec<DeviceId> =
            self.devices.iter().filter(|(_, it)| is_known(&it.kind)).map(|(id, _)| id.clone()).collect();
        for id in known {
            if let Some(Kind::Ssd { identity, replaced, .. }) =
                self.devices.get_mut(&id).map(|device| &mut device.kind)
            {
                (*identity, *replaced) = (None, false);
            }
        }
    }
}

/// Whether it is a disk of another program that is empty, and will get its number with its first table. Daemons of an earlier version, which
/// never say one, reserve nothing of such disks.
pub(super) fn has_yet_to_get_its_number(report: &DeviceReport) -> bool {
    matches!(report, DeviceReport::Ssd { driver, reserved_bytes: 1.., identity: None, .. } if driver == "vhost-user")
}
