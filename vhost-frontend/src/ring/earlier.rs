//! What a ring shows of the time before we had it.

use std::sync::atomic::Ordering;

use virtio_queue::QueueT as _;
use vm_memory::{Bytes, GuestAddress};

use super::{Notes, Ring, USED_ELEMENT_BYTES, USED_HEADER_BYTES};

/// Where an element of the used ring has its length.
const LENGTH_AT: u64 = 4;

/// Whether a predecessor may have left requests in flight on rings that do not run while another one starts. What they are is not
/// known before they start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OthersOwe {
    /// It has not.
    #[default]
    Nothing,
    /// On one that the VMM has described, and is about to start.
    Starting,
    /// On one of which the VMM has said nothing yet. It may be about to, or never do: a driver need not use all rings, and the record
    /// of what is in flight may be of one before that did.
    Undescribed,
}

impl Ring {
    /// The same ring, and whether such owe requests of a predecessor that start after it.
    #[must_use]
    pub(crate) fn beside(self, others_owe: OthersOwe) -> Self {
        Self { others_owe, ..self }
    }

    /// Whether rings that start after this one owe requests of a predecessor: where requests of several rings concern the same
    /// thing, none of this one that is not [owed](Ring::owed) may begin before those. Not of the ring that starts last.
    pub fn others_owe(&self) -> OthersOwe {
        self.others_owe
    }

    /// The same ring, with room for notes.
    #[must_use]
    pub(crate) fn with_notes(self, notes: Option<Notes>) -> Self {
        Self { notes, ..self }
    }

    /// Where an engine finds what its predecessor noted of the device, and notes things for its successor, if there is room: the same
    /// for all rings.
    pub fn notes(&self) -> Option<&Notes> {
        self.notes.as_ref()
    }

    /// Whether something was taken from it before it came to us, by a predecessor or on another host. To be asked before anything
    /// is taken here.
    pub fn was_used_before(&self) -> bool {
        let queue = &self.parts.queue;
        if queue.next_used() != 0 || queue.next_avail() != 0 || !self.again.is_empty() {
            return true;
        }
        // After 65536 requests the indices are where they began. Then the last element has been written too, and drivers begin with zeros
        // there.
        let last = USED_HEADER_BYTES + USED_ELEMENT_BYTES * u64::from(self.table.size.saturating_sub(1));
        let at = GuestAddress(queue.used_ring() + last + LENGTH_AT);
        self.parts.memory.load(at, Ordering::Relaxed).is_ok_and(|length: u32| length != 0)
    }
}
