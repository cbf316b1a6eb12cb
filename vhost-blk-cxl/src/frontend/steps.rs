//! Requests with more data than is sent at once, and long discards: they are carried out step by step.
//!
//! To those who carry requests out, each step is a request of its own. The guest is answered after the last one, or the
//! first one that fails. Steps wait in the queue for what is to be sent again, so that no new request overtakes them for long.
//!
//! A disk that is held to a share of the fabric sends no more at once than its VM may save up: a request of 4 MiB that passed as a whole would
//! be several times what a small share allows in any K.

use cxl_pool::Memory;
use vhost_frontend::{Buffer, BufferArea, CopyError};

use super::device::{REQUEST_BYTES_MAX, SECTOR_BYTES, range_sectors_max};
use super::disk::Disk;
use super::place::Place;
use super::serve::copy_out;
use super::slots::{Slot, State};
use crate::message::Operation;

/// Steps are no shorter, however small a share is, nor than a block of the volume.
const STEP_BYTES_LEAST: u64 = 4096;

/// How many bytes a step of a request has at most, if it is so many with data.
pub(super) fn step_bytes_max(operation: Operation, with_data: u64) -> u64 {
    match operation {
        Operation::Read | Operation::Write => with_data,
        // Where there are several places devices may have to write zeroes for it: as many as a guest may ask for at once.
        Operation::Discard => u64::from(range_sectors_max(false)) * SECTOR_BYTES,
        Operation::Flush | Operation::WriteZeroes => u64::MAX,
    }
}

/// Room for a step of so many bytes, or for a shorter one where nothing is under way that gives any back: what is kept for other
/// things may have cut the area up.
pub(super) fn room_for_step(buffers: &mut BufferArea, bytes: u64, any_under_way: bool) -> Option<Buffer> {
    let mut bytes = bytes;
    loop {
        let found = buffers.alloc(u32::try_from(bytes).ok()?);
        if found.is_some() || any_under_way || bytes <= STEP_BYTES_LEAST {
            return found;
        }
        bytes = (bytes / 2).next_multiple_of(STEP_BYTES_LEAST);
    }
}

impl Slot {
    /// Begins a request, of which a step has so many bytes at most. Its data has no place yet.
    pub(super) fn begin(&mut self, offset_bytes: u64, length_bytes: u64, step_bytes_max: u64) {
        self.place = Place::Nowhere;
        self.offset_bytes = offset_bytes;
        self.length_bytes = length_bytes.min(step_bytes_max);
        self.done_bytes = 0;
        self.left_bytes = length_bytes - self.length_bytes;
    }

    /// Its step has this buffer, which may be shorter than what was asked for.
    pub(super) fn place_in(&mut self, buffer: Buffer) {
        let bytes = self.length_bytes.min(buffer.bytes().into());
        self.left_bytes += self.length_bytes - bytes;
        self.length_bytes = bytes;
        self.place = Place::Buffer(buffer);
    }

    fn advance(&mut self, step_bytes_max: u64) {
        self.offset_bytes += self.length_bytes;
        self.done_bytes += self.length_bytes;
        self.length_bytes = self.left_bytes.min(step_bytes_max);
        self.left_bytes -= self.length_bytes;
    }
}

impl<M: Memory> Disk<M> {
    /// How many bytes a step of a request with data has at most now: whole blocks.
    pub(super) fn data_step_bytes_max(&self) -> u64 {
        let Some(pacer) = &self.pacer else { return self.step_bytes_most };
        let least = u64::from(self.object.block_bytes).max(STEP_BYTES_LEAST);
        (pacer.at_once_bytes() / least * least).clamp(least, self.step_bytes_most)
    }

    /// So many [spares](Disk::spare) are kept of the area, and so many bytes for other things. A step finds room in what is left, and in a
    /// spare.
    pub(super) fn keep_of_area(&mut self, spares: usize, more_bytes: u64) {
        let spare_bytes = self.spare_bytes();
        let kept_bytes = spare_bytes.saturating_mul(spares as u64).saturating_add(more_bytes);
        let left_bytes = self.buffers.total_bytes().saturating_sub(kept_bytes);
        let most = if spares > 0 { left_bytes.min(spare_bytes) } else { left_bytes.min(REQUEST_BYTES_MAX) };
        self.step_bytes_most = (most / STEP_BYTES_LEAST * STEP_BYTES_LEAST).max(STEP_BYTES_LEAST);
    }

    /// A step is done: queues the next one. False if there is none, or if nobody waits for it.
    pub(super) fn next_step(&mut self, index: u16) -> Result<bool, CopyError> {
        let step_bytes_max = step_bytes_max(self.slots.get(index).operation, self.data_step_bytes_max());
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
        slot.advance(step_bytes_max);
        self.slots.rename(index);
        self.slots.set_state(index, State::Queued);
        self.queued.push_back(index);
        Ok(true)
    }
}
