//! What discards SSDs heed, and guests are told of that.
//!
//! An SSD forgets whole units, and a file system makes holes of whole blocks. What is smaller, or lies across two of them, takes a guest
//! time and gives nothing back, so its driver asks for what fits. That is advice and no promise: a volume may move to an SSD that is
//! otherwise while its guest goes on.

use super::{DeviceId, Kind, State, Volume};

impl State {
    /// What a discard of a volume has to be a multiple of to have an effect on all of its SSDs, as far as that is known.
    pub(super) fn discard_granularity_of(&self, volume: &Volume) -> Option<u32> {
        let largest = volume.devices().filter_map(|ssd| self.discard_granularity(ssd)).max()?;
        match volume.stripe_bytes.map(u32::try_from) {
            None => Some(largest),
            Some(unit) => across(largest, unit.ok()?, u32::try_from(volume.replicas.len()).ok()?),
        }
    }

    /// The same of an SSD.
    pub fn discard_granularity(&self, device: &DeviceId) -> Option<u32> {
        match self.devices.get(device)?.kind {
            Kind::Ssd { discard_granularity_bytes, .. } => discard_granularity_bytes,
            Kind::Nic { .. } => None,
        }
    }

    /// Nothing is known of it.
    pub(super) fn forget_discards(&mut self) {
        let known: Vec<DeviceId> =
            self.devices.keys().filter(|id| self.discard_granularity(id).is_some()).cloned().collect();
        for id in known {
            if let Some(Kind::Ssd { discard_granularity_bytes, .. }) =
                self.devices.get_mut(&id).map(|device| &mut device.kind)
            {
                *discard_granularity_bytes = None;
            }
        }
    }
}

/// What fits columns that heed such multiples, and of which units are taken by turns. What lies in one column of a range is one range
/// there, so where a unit is not enough, as many rows of units are as are.
fn across(granularity: u32, unit: u32, columns: u32) -> Option<u32> {
    if granularity == 0 || unit.is_multiple_of(granularity) {
        return Some(granularity);
    }
    let (mut divisor, mut rest) = (granularity, unit);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (granularity / divisor).checked_mul(unit)?.checked_mul(columns)
}

#[cfg(test)]
mod tests;
