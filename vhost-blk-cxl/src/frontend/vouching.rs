//! What the end of a request says of earlier ones, which the device may have forgotten.

use std::sync::atomic::{Ordering, fence};

use cxl_pool::Memory;
use tracing::warn;

use super::disk::Disk;
use super::own_flush::NO_RING;
use super::slots::State;
use crate::message::{Completion, Operation, Status, Tag};

impl<M: Memory> Disk<M> {
    /// The guest was told, by a flush or a write that failed, that it lost writes. What waits in its rings it made before it could know:
    /// flushes among that do not vouch for those writes either.
    pub(super) fn told(&mut self) {
        // The answer before the look at what there is: whatever the guest makes available later, it makes after the answer.
        fence(Ordering::SeqCst);
        for served in self.rings.iter_mut().flatten() {
            served.unaware = served.ring.waiting();
        }
        self.note();
    }

    /// The device has forgotten what the guest was told.
    pub(super) fn lost_writes(&self) {
        warn!(lease = %self.object.lease, instance = self.object.instance_name, device = self.object.device,
            "the SSD lost writes that were not flushed: the guest's next flush fails, or without a write cache its next write");
        self.counters.lost_writes.add(1);
    }

    /// The status of a request, given what the device remembers of earlier ones. What a successor has to know of it is noted before the
    /// guest hears of it.
    pub(super) fn vouched(&mut self, index: u16, completion: &Completion) -> Status {
        let status = self.status_of(index, completion);
        self.note();
        status
    }

    fn status_of(&mut self, index: u16, completion: &Completion) -> Status {
        if completion.status != Status::Ok {
            return completion.status;
        }
        if self.unflushed.answered(completion.write_verifier, self.slots.next_sequence()) {
            self.lost_writes();
        }
        let unheard = self.is_unheard(completion.tag);
        let (slot, next) = (self.slots.get(index), self.slots.next_sequence());
        match slot.operation {
            Operation::Write | Operation::WriteZeroes if !slot.force_unit_access => self.unflushed.written(),
            Operation::Write | Operation::WriteZeroes => {
                let vouched = unheard || self.unflushed.written_through(next);
                if !vouched {
                    return Status::IoError;
                }
            }
            Operation::Flush if unheard => self.unflushed.flushed_unasked(slot.vouches),
            Operation::Flush => {
                let vouched = self.unflushed.flushed(slot.sequence, slot.vouches, next);
                if !vouched || slot.unaware {
                    return Status::IoError;
                }
            }
            _ => {}
        }
        Status::Ok
    }

    /// Whether no guest hears how a request ends: it is one of our own, or given up.
    pub(super) fn is_unheard(&self, tag: Tag) -> bool {
        let heard = |index| {
            let slot = self.slots.get(index);
            slot.ring != NO_RING && slot.state != State::Abandoned
        };
        !u16::try_from(tag.get() & 0xffff).is_ok_and(heard)
    }
}
