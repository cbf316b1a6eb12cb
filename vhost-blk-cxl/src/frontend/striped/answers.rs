//! What answers of columns mean for the requests that they are parts of.

use cxl_pool::Memory;
use pod_protocol::ids::ChannelId;
use tracing::warn;

use super::super::slots::State;
use super::StripedDisk;
use super::parts::{Leg, Owner, Part};
use crate::message::{Completion, Operation, Status};

impl<M: Memory> StripedDisk<M> {
    /// An answer arrived.
    pub(crate) fn complete(&mut self, channel: ChannelId, completion: &Completion) {
        let found = self.parts.find(completion.tag).and_then(|index| {
            let part = *self.parts.get(index)?;
            let there = self.columns[part.column].is_on(channel);
            (there && part.leg == Leg::Sent(completion.holder)).then_some((index, part))
        });
        let Some((index, part)) = found else {
            if !self.orphan_answered(channel, completion) {
                self.disk.counters.stale.add(1);
            }
            return;
        };
        let column = &mut self.columns[part.column];
        column.sent -= 1;
        column.throttled.answered(completion);
        if part.owner == Owner::Nobody {
            self.end(index, completion.status);
        } else if part.request.operation != completion.operation {
            // The backend is confused; it would not do better if asked again.
            self.disk.counters.malformed.add(1);
            self.answered(index, &part, Status::IoError);
        } else if completion.status == Status::Refused {
            // The lease moved on while the request was under way; it goes out again with what comes.
            column.refused |= completion.holder == column.holder(completion.holder.lease);
            self.queue_again(index, &part);
        } else if part.request.segments > 0 && !completion.knows_lists {
            // It refused the part without a look at its data.
            if let Owner::Guest(job) = part.owner
                && let Some(Some(job)) = self.jobs.get_mut(usize::from(job))
            {
                job.unlisted = true;
            }
            self.end(index, Status::IoError);
        } else {
            let status = self.vouched(&part, completion);
            self.answered(index, &part, status);
        }
        self.recheck = true;
    }

    /// The status of a part, given what its column remembers of earlier ones. What a successor has to know of it is noted before the guest
    /// hears of it.
    fn vouched(&mut self, part: &Part, completion: &Completion) -> Status {
        let status = self.status_of(part, completion);
        self.note(part.column);
        status
    }

    fn status_of(&mut self, part: &Part, completion: &Completion) -> Status {
        if completion.status != Status::Ok {
            return completion.status;
        }
        let next = self.sequence + 1;
        if self.columns[part.column].unflushed.answered(completion.write_verifier, next) {
            self.lost(part.column);
        }
        let sequence = match part.owner {
            Owner::Guest(job) => {
                self.jobs.get(usize::from(job)).copied().flatten().map_or(0, |job| job.sequence)
            }
            Owner::Copy(_) | Owner::Settling | Owner::Nobody => next,
        };
        let unflushed = &mut self.columns[part.column].unflushed;
        match part.request.operation {
            Operation::Write | Operation::WriteZeroes if !part.request.force_unit_access => {
                unflushed.written();
            }
            Operation::Flush if !unflushed.flushed(sequence, part.mark, next) => return Status::IoError,
            _ => {}
        }
        Status::Ok
    }

    /// A column lost writes that were not flushed.
    pub(super) fn lost(&mut self, at: usize) {
        self.disk.counters.lost_writes.add(1);
        if self.is_beside(at) {
            warn!(lease = %self.disk.object().lease, "the SSD that a column moves to lost writes that were not flushed");
            // The column has what it lost.
            self.columns[at].unflushed.forget_losses();
        } else {
            warn!(lease = %self.disk.object().lease, column = at,
                "the SSD lost writes that were not flushed: the guest's next flush fails");
            self.guest.losses.take_losses(&mut self.columns[at].unflushed);
        }
        self.differ(at);
    }

    /// A column has carried a part out, or has not.
    fn answered(&mut self, index: u16, part: &Part, status: Status) {
        let beside = self.is_beside(part.column);
        match part.owner {
            Owner::Guest(_) if beside && status != Status::Ok => self.not_done_beside(index, part, status),
            Owner::Guest(_) | Owner::Copy(_) | Owner::Settling | Owner::Nobody => self.end(index, status),
        }
    }

    /// The place beside a column has not done what the column may have done.
    fn not_done_beside(&mut self, index: u16, part: &Part, status: Status) {
        if part.request.operation == Operation::Read {
            // It is the column no more, and another place has what it had.
            return self.move_to_column(index);
        }
        if !self.counts_beside() {
            self.end(index, status);
        } else if let Some(part) = self.parts.get_mut(index) {
            part.leg = Leg::Failed(status);
        }
        if status != Status::Unsupported || self.counts_beside() {
            self.break_off("it failed a request of the guest");
        }
    }

    /// A part is over, and with the last one its request.
    pub(super) fn end(&mut self, index: u16, status: Status) {
        let Some(part) = self.parts.remove(index) else { return };
        self.recheck = true;
        match part.owner {
            Owner::Guest(job) => {
                self.note_end(index, &part, status);
                if !self.is_beside(part.column)
                    && let Some(Some(job)) = self.jobs.get_mut(usize::from(job))
                {
                    job.note(status);
                }
                self.release(job);
            }
            Owner::Copy(slot) => self.advance_copy(slot, &part, status),
            Owner::Settling => self.settled(status),
            Owner::Nobody => self.note_end(index, &part, status),
        }
    }

    /// A request waits for one part less.
    pub(super) fn release(&mut self, index: u16) {
        let Some(Some(job)) = self.jobs.get_mut(usize::from(index)) else { return };
        job.open -= 1;
        if job.open > 0 {
            return;
        }
        if job.stranded { self.stranded.wait(index) } else { self.finish(index) }
    }

    pub(super) fn finish(&mut self, index: u16) {
        let Some(job) = self.jobs.get_mut(usize::from(index)).and_then(Option::take) else { return };
        if job.unlisted && self.disk.slots.get(index).state == State::Sent && !self.disk.object().failed {
            return self.disk.copy_instead(index);
        }
        self.guest.end(&self.disk, &job.request, job.status, job.sequence, self.sequence + 1);
    }

    /// Sends a part once more.
    pub(super) fn queue_again(&mut self, index: u16, part: &Part) {
        if self.is_beside(part.column) && part.request.operation == Operation::Read {
            return self.move_to_column(index);
        }
        if let Some(part) = self.parts.get_mut(index) {
            part.leg = Leg::Queued;
            self.columns[part.column].queue.push_back(index);
        }
    }

    /// Whether nobody waits for a request any more, unless for that no backend fills the guest's memory any more.
    pub(super) fn is_abandoned(&self, job: u16) -> bool {
        let slot = self.disk.slots.get(job);
        slot.state == State::Abandoned || slot.fills_guest_memory() && self.disk.is_given_up(slot)
    }

    /// Ends what nobody waits for and no backend has. What one may have is not sent again.
    pub(super) fn drop_abandoned(&mut self) {
        let is_abandoned = |part: &Part| match part.owner {
            Owner::Guest(job) => matches!(part.leg, Leg::Queued | Leg::Lingering) && self.is_abandoned(job),
            Owner::Copy(_) | Owner::Settling | Owner::Nobody => false,
        };
        for index in self.parts.in_order(is_abandoned) {
            let Some(part) = self.parts.get_mut(index) else { continue };
            let column = &mut self.columns[part.column];
            column.queue.retain(|&queued| queued != index);
            if part.leg == Leg::Lingering {
                part.leg = Leg::Lost;
                column.sent += 1;
            } else {
                self.end(index, Status::IoError);
            }
        }
        for _ in 0..self.waiting.len() {
            let Some(job) = self.waiting.pop_front() else { break };
            if self.is_abandoned(job) {
                if let Some(Some(job)) = self.jobs.get_mut(usize::from(job)) {
                    job.status = Status::IoError;
                }
                self.finish(job);
            } else {
                self.waiting.push_back(job);
            }
        }
    }
}
