//! What a disk in several places takes from its guest, and gives back when all places concerned have done it.

use cxl_pool::Memory;

use super::disk::{Allowance, Disk, REQUESTS_MAX};
use super::unflushed::{Mark, Unflushed};
use crate::message::{Completion, Operation, Request, Status, Words};

/// Between the [`Disk`] and those who carry its requests out in several places.
pub(super) struct GuestSide {
    /// What the disk would send to its one backend.
    outbox: Vec<Words>,
    answers: Vec<Completion>,
    /// Buffers were taken back since the last fence.
    taken_back: bool,
    /// Losses that concern the guest, whichever places there are when it hears of them: by a flush, or a write that
    /// ends in no cache, once all of that has ended.
    pub(super) losses: Unflushed,
}

impl GuestSide {
    pub(super) fn new() -> Self {
        Self {
            outbox: Vec::with_capacity(REQUESTS_MAX.into()),
            answers: Vec::with_capacity(REQUESTS_MAX.into()),
            taken_back: false,
            losses: Unflushed::default(),
        }
    }

    /// Takes requests from the guest. True if anything moved.
    pub(super) fn take<M: Memory>(&mut self, disk: &mut Disk<M>, mut enter: impl FnMut(Request)) -> bool {
        let mut allowance = Allowance { messages: u32::MAX, more: true, outbox: &mut self.outbox };
        let moved = disk.submit(&mut allowance);
        for words in self.outbox.drain(..) {
            // The disk made them.
            if let Ok(request) = Request::decode(&words) {
                enter(request);
            }
        }
        moved
    }

    /// Ends a request, the guest's number `sequence` when the next one will be `next`.
    pub(super) fn end<M: Memory>(
        &mut self,
        disk: &Disk<M>,
        request: &Request,
        mut status: Status,
        sequence: u64,
        next: u64,
    ) {
        let tells = match request.operation {
            _ if status != Status::Ok || disk.is_unheard(request.tag) => false,
            Operation::Flush => !self.losses.flushed(sequence, Mark::default(), next),
            Operation::Write | Operation::WriteZeroes if request.force_unit_access => {
                !self.losses.written_through(next)
            }
            _ => false,
        };
        if tells {
            status = Status::IoError;
        }
        let bytes = if status == Status::Ok { request.length_bytes } else { 0 };
        // The places' verifiers were looked at, each of them.
        let completion = request.completion(status, bytes, 0);
        self.taken_back |= disk.take_back(&completion);
        self.answers.push(completion);
    }

    /// Whether the guest has been given all its answers.
    pub(super) fn is_settled(&self) -> bool {
        self.answers.is_empty()
    }

    /// Gives the guest its answers, once all channels were looked at. True if there were any.
    pub(super) fn settle<M: Memory>(&mut self, disk: &mut Disk<M>) -> bool {
        let answered = !self.answers.is_empty();
        if answered {
            if std::mem::take(&mut self.taken_back) {
                // The invalidations of all buffers before the first read of any.
                disk.memory.full_fence();
            }
            for answer in self.answers.drain(..) {
                disk.complete(&answer);
            }
            // By now: what one place lost while another has it is no loss.
            if self.losses.tells() {
                disk.told();
            }
            disk.unblock();
        }
        disk.signal();
        disk.release_stopped();
        answered
    }
}
