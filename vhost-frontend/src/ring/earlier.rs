//! What a ring shows of the time before we had it.

use std::sync::atomic::Ordering;

use virtio_queue::QueueT as _;
use vm_memory::{Bytes, GuestAddress};

use super::{Ring, USED_ELEMENT_BYTES, USED_HEADER_BYTES};

/// Where an element of the used ring has its length.
const LENGTH_AT: u64 = 4;

impl Ring {
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
