//! What is known of a vring.

use std::fs::File;
use std::sync::PoisonError;

use crate::event;
use crate::ring::SharedCall;

/// Of the vrings of a legacy device on a PCI bus (virtio 1.2, 2.7.2).
const LEGACY_ALIGNMENT: u64 = 4096;
const DESCRIPTOR_BYTES: u64 = 16;
/// Of the available ring's flags, its index, and the event index behind its entries, and of each entry.
const AVAILABLE_WORD_BYTES: u64 = 2;

/// A vring as the VMM describes it, before and while it runs.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Vring {
    pub(super) size: u16,
    pub(super) addresses: Option<VringAddresses>,
    pub(super) base: u16,
    pub(super) kick: Option<File>,
    /// The VMM said how it kicks, perhaps that it does not.
    pub(super) kick_known: bool,
    pub(super) call: SharedCall,
    pub(super) error: Option<File>,
    pub(super) enabled: bool,
    /// It was served since it was started.
    pub(super) was_enabled: bool,
    /// The engine has it.
    pub(super) running: bool,
}

/// In the VMM's own address space.
#[derive(Debug, Clone, Copy)]
pub(super) struct VringAddresses {
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// What is written to the used ring is to be logged.
    pub(super) logged: bool,
}

impl Vring {
    /// Takes another call descriptor. What a ring that runs was to signal may have gone to the one before: QEMU replaces it right
    /// after it has started a ring, and listens to the first one no more. One signal too many is harmless, one too few is
    /// a queue that stands still.
    pub(super) fn replace_call(&mut self, call: Option<File>) {
        let mut current = self.call.lock().unwrap_or_else(PoisonError::into_inner);
        *current = call;
        if let Some(call) = current.as_ref().filter(|_| self.running) {
            event::signal(call);
        }
    }
}

impl VringAddresses {
    /// Whether a ring of so many entries lies as a driver of a legacy device has to lay it out.
    pub(super) fn is_legacy_layout(&self, size: u16) -> bool {
        let size = u64::from(size);
        let available = self.descriptors.wrapping_add(DESCRIPTOR_BYTES * size);
        let end = available.wrapping_add(AVAILABLE_WORD_BYTES * (3 + size));
        self.descriptors.is_multiple_of(LEGACY_ALIGNMENT)
            && self.available == available
            && Some(self.used) == end.checked_next_multiple_of(LEGACY_ALIGNMENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rings_at_their_legacy_places_may_be_a_legacy_drivers() {
        for size in [2, 64, 256, 1024, 32_768] {
            let available = 0x7f00_0000_1000 + 16 * u64::from(size);
            let end = available + 6 + 2 * u64::from(size);
            let legacy = VringAddresses {
                descriptors: 0x7f00_0000_1000,
                available,
                used: end.next_multiple_of(4096),
                logged: false,
            };
            assert!(legacy.is_legacy_layout(size));
            // As Linux lays out those of today's devices.
            let modern = VringAddresses { used: end.next_multiple_of(64), ..legacy };
            assert!(!modern.is_legacy_layout(size), "{modern:x?}");
            assert!(!VringAddresses { available: available + 16, ..legacy }.is_legacy_layout(size));
            assert!(!VringAddresses { descriptors: u64::MAX - 4095, ..legacy }.is_legacy_layout(size));
        }
    }
}
