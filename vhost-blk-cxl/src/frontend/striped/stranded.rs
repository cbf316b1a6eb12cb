//! Reads that a device was given when it was a column, and that nobody answers now that it is none.
//!
//! The device may still fill their buffers, so these are kept aside until it has answered, or its backend has begun anew. The
//! requests begin anew in other buffers.

use cxl_pool::Memory;
use pod_protocol::ids::ChannelId;
use vhost_frontend::Buffer;

use super::super::place::Place;
use super::StripedDisk;
use super::parts::{Leg, Owner};
use crate::message::{Completion, Holder, Operation, Status, Tag};

/// What a backend may still be carrying out although nobody waits for its answer.
#[derive(Debug, Clone, Copy)]
struct Orphan {
    channel: ChannelId,
    tag: Tag,
    /// As what it was sent; none if it will not be answered.
    sent_as: Option<Holder>,
    /// The number of the request whose buffer it may fill; 0 if it fills none.
    sequence: u64,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Stranded {
    orphans: Vec<Orphan>,
    /// Kept aside, with the number of the request that had it.
    buffers: Vec<(u64, Buffer)>,
    /// Requests that wait for another buffer.
    jobs: Vec<u16>,
    /// Kept free for them.
    spare: Option<Buffer>,
}

impl Stranded {
    /// A request has to begin anew.
    pub(super) fn wait(&mut self, job: u16) {
        self.jobs.push(job);
    }

    /// Whether requests wait for buffers.
    pub(super) fn any_wait(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Whether a backend may still fill what a request had.
    fn may_fill(&self, sequence: u64) -> bool {
        self.orphans.iter().any(|orphan| orphan.sequence == sequence)
    }

    /// How many answers of a channel have yet to come.
    pub(super) fn on(&self, channel: ChannelId) -> u32 {
        let on = self.orphans.iter().filter(|orphan| orphan.channel == channel && orphan.sent_as.is_some());
        u32::try_from(on.count()).unwrap_or(u32::MAX)
    }
}

impl<M: Memory> StripedDisk<M> {
    /// Keeps a buffer for a bad day.
    pub(super) fn keep_spare(&mut self) {
        if self.stranded.spare.is_none() {
            self.stranded.spare = self.disk.spare();
        }
    }

    /// Waits no longer for reads that the place beside a column has.
    pub(super) fn strand_reads(&mut self) {
        let at = self.layout.columns();
        let is_read = |operation| operation == Operation::Read;
        for index in self.parts.in_order(|part| part.column == at && is_read(part.request.operation)) {
            let Some(Owner::Guest(job)) = self.parts.get(index).map(|part| part.owner) else { continue };
            self.orphan(index);
            if let Some(Some(job)) = self.jobs.get_mut(usize::from(job)) {
                job.stranded = true;
            }
            self.release(job);
        }
        self.recheck = true;
    }

    /// The same of all that it has.
    pub(super) fn orphan_all(&mut self) {
        let at = self.layout.columns();
        for index in self.parts.in_order(|part| part.column == at) {
            self.orphan(index);
        }
    }

    fn orphan(&mut self, index: u16) {
        let Some(part) = self.parts.remove(index) else { return };
        let sequence = match part.owner {
            Owner::Guest(job) if part.request.operation == Operation::Read => {
                self.jobs.get(usize::from(job)).copied().flatten().map_or(0, |job| job.sequence)
            }
            Owner::Copy(slot) => {
                // Of a move before this one. No request has this number.
                let sequence = u64::MAX - slot as u64;
                if let Some(buffer) = self.copies.take_buffer(slot) {
                    self.copy_buffers.lose();
                    self.stranded.buffers.push((sequence, buffer));
                }
                sequence
            }
            Owner::Guest(_) | Owner::Settling | Owner::Nobody => 0,
        };
        let sent_as = match part.leg {
            Leg::Sent(holder) => Some(holder),
            Leg::Queued | Leg::Lingering | Leg::Failed(_) | Leg::Lost => None,
        };
        let column = &mut self.columns[part.column];
        if matches!(part.leg, Leg::Sent(_) | Leg::Lost) {
            column.sent -= 1;
        }
        let orphan = Orphan { channel: column.route.channel, tag: part.request.tag, sent_as, sequence };
        if sent_as.is_some() || sequence > 0 {
            self.stranded.orphans.push(orphan);
        }
    }

    /// Takes note of an answer that nobody waits for. False if it was not asked for.
    pub(super) fn orphan_answered(&mut self, channel: ChannelId, completion: &Completion) -> bool {
        let holder = Some(completion.holder);
        let is_it = |orphan: &Orphan| {
            orphan.channel == channel && orphan.tag == completion.tag && orphan.sent_as == holder
        };
        let Some(at) = self.stranded.orphans.iter().position(is_it) else { return false };
        self.stranded.orphans.swap_remove(at);
        self.free_kept();
        true
    }

    /// Nothing is carried out any more of what a channel's earlier generation brought.
    pub(super) fn orphans_over(&mut self, channel: ChannelId) {
        self.stranded.orphans.retain(|orphan| orphan.channel != channel);
        self.free_kept();
    }

    /// Gives buffers back that nobody may fill any more.
    fn free_kept(&mut self) {
        let Stranded { orphans, buffers, .. } = &mut self.stranded;
        let is_free = |kept: &mut (u64, Buffer)| !orphans.iter().any(|orphan| orphan.sequence == kept.0);
        for (_, buffer) in buffers.extract_if(.., is_free) {
            self.disk.buffers.free(buffer);
            self.disk.unblock();
        }
        self.recheck = true;
    }

    /// Begins requests anew, as far as there are buffers for them.
    pub(super) fn begin_stranded_anew(&mut self) {
        if self.stranded.jobs.is_empty() {
            if self.beside.is_none()
                && let Some(spare) = self.stranded.spare.take()
            {
                self.disk.buffers.free(spare);
                self.disk.unblock();
            }
            return;
        }
        for _ in 0..self.stranded.jobs.len() {
            let job = self.stranded.jobs.remove(0);
            if !self.begin_anew(job) {
                self.stranded.jobs.push(job);
            }
        }
    }

    fn begin_anew(&mut self, index: u16) -> bool {
        let is_abandoned = self.is_abandoned(index);
        let Some(Some(job)) = self.jobs.get_mut(usize::from(index)) else { return true };
        let Place::Buffer(old) = self.disk.slots.get(index).place else {
            // The guest's own memory cannot be kept aside.
            if self.stranded.may_fill(job.sequence) {
                return false;
            }
            self.enter_anew(index, is_abandoned);
            return true;
        };
        let place = if is_abandoned {
            Place::Nowhere
        } else {
            // Not longer than the longest request.
            let bytes = u32::try_from(job.request.length_bytes).unwrap_or(u32::MAX);
            let buffers = &mut self.disk.buffers;
            let found = buffers.alloc(bytes).or_else(|| {
                buffers.free(self.stranded.spare.take()?);
                buffers.alloc(bytes)
            });
            let Some(buffer) = found else { return false };
            job.request.data = buffer.start().line();
            self.disk.flushed.flush(&self.disk.memory, buffer.start(), job.request.length_bytes);
            Place::Buffer(buffer)
        };
        self.disk.slots.get_mut(index).place = place;
        self.stranded.buffers.push((job.sequence, old));
        self.enter_anew(index, is_abandoned);
        self.free_kept();
        true
    }

    /// Has a request cut once more, or ends it if nobody waits for it any more.
    fn enter_anew(&mut self, index: u16, is_abandoned: bool) {
        let Some(Some(job)) = self.jobs.get_mut(usize::from(index)) else { return };
        job.stranded = false;
        if is_abandoned {
            job.status = Status::IoError;
            self.finish(index);
        } else {
            job.status = Status::Ok;
            self.waiting.push_back(index);
        }
    }
}
