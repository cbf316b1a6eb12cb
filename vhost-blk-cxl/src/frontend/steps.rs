//! Requests with more data than is sent at once: they are carried out step by step.
//!
//! To those who carry requests out, each step is a request of its own. The guest is answered after the last one, or the
//! first one that fails. Steps wait in the queue for what is to be sent again, so that no new request overtakes them for long.

use cxl_pool::Memory;
use vhost_frontend::CopyError;

use super::device::REQUEST_BYTES_MAX;
use super::disk::Disk;
use super::place::Place;
use super::serve::copy_out;
use super::slots::{Slot, State};
use crate::message::Operation;

impl Slot {
    /// Begins a request; one without data is a single step, however long the range.
    pub(super) fn begin(&mut self, offset_bytes: u64, length_bytes: u64, has_data: bool) {
        let most = if has_data { REQUEST_BYTES_MAX } else { u64::MAX };
        self.offset_bytes = offset_bytes;
        self.length_bytes = length_bytes.min(most);
        self.done_bytes = 0;
        self.left_bytes = length_bytes - self.length_bytes;
    }

    fn advance(&mut self) {
        self.offset_bytes += self.length_bytes;
        self.done_bytes += self.length_bytes;
        self.length_bytes = self.left_bytes.min(REQUEST_BYTES_MAX);
        self.left_bytes -= self.length_bytes;
    }
}

impl<M: Memory> Disk<M> {
    /// A step is done: queues the next one. False if there is none, or if nobody waits for it.
    pub(super) fn next_step(&mut self, index: u16) -> Result<bool, CopyError> {
        let slot = self.slots.get_mut(index);
        if slot.left_bytes == 0 || slot.state != State::Sent {
            return Ok(false);
        }
        if let (Operation::Read, Place::Buffer(buffer), Some(served)) =
            (slot.operation, slot.place, &self.rings[usize::from(slot.ring)])
        {
            copy_out(&self.memory, &served.ring, slot, buffer)?;
        }
        // The data of the next step finds its place when it is its turn.
        if let Some(buffer) = std::mem::replace(&mut slot.place, Place::Nowhere).buffer() {
            self.buffers.free(buffer);
        }
        slot.advance();
        self.slots.rename(index);
        self.slots.set_state(index, State::Queued);
        self.queued.push_back(index);
        Ok(true)
    }
}
