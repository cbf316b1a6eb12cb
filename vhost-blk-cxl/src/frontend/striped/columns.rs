//! Columns whose backends come and go.

use cxl_pool::Memory;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::{DiskObject, ReplicaObject};

use super::super::last_look::Throttled;
use super::StripedDisk;
use super::parts::{Leg, Owner, Part};
use crate::message::{Operation, Status};

/// The columns of a disk, in their order on it.
pub(super) fn in_order(object: &DiskObject) -> Vec<&ReplicaObject> {
    let mut columns: Vec<&ReplicaObject> = object.replicas.iter().collect();
    columns.sort_by_key(|column| column.number);
    columns
}

impl<M: Memory> StripedDisk<M> {
    /// A ring has started. If it inherits something, a predecessor served the guest: some of what it wrote may lie in the columns' caches.
    pub(crate) fn begins(&mut self, inherits: bool) {
        for at in 0..self.columns.len() {
            let (note, next) = (self.disk.noted(number_of(at)), self.sequence + 1);
            let beside = self.is_beside(at);
            let unflushed = &mut self.columns[at].unflushed;
            unflushed.forget_noted();
            if inherits {
                unflushed.written();
            }
            if self.disk.adopts && !beside && unflushed.adopt(note, next) {
                self.lost(at);
            }
            self.note(at);
        }
    }

    /// Notes for a successor what there is to note of a column.
    pub(super) fn note(&mut self, at: usize) {
        // What is noted while the guest has yet to hear of a loss tells a successor, too. What is beside a column has what that has.
        if self.guest.losses.is_telling() || self.is_beside(at) {
            return;
        }
        if let Some(note) = self.columns[at].unflushed.next_note() {
            self.disk.note_of(number_of(at), note);
        }
    }

    /// How many parts a channel's backend has.
    pub(crate) fn with_backend(&self, channel: ChannelId) -> u32 {
        let on = self.columns.iter().filter(|column| column.is_on(channel));
        on.map(|column| column.sent).sum::<u32>() + self.stranded.on(channel)
    }

    pub(super) fn change_columns(&mut self, object: &DiskObject) {
        for (at, said) in in_order(object).into_iter().enumerate().take(self.layout.columns()) {
            let column = &mut self.columns[at];
            let other_channel = column.route.channel != said.route.channel;
            if column.route.generation != said.route.generation {
                column.refused = false;
            }
            column.ssd.clone_from(&said.ssd);
            (column.route, column.place) = (said.route, said.place);
            if other_channel {
                // What went over the old one will never be answered.
                self.restart(at);
            }
        }
    }

    /// A channel begins a new generation. Nothing that was sent before will be answered, and once the new one is ready
    /// nothing of it is being carried out any more: everything is sent again.
    pub(crate) fn channel_restarts(&mut self, channel: ChannelId) {
        for at in 0..self.columns.len() {
            if self.columns[at].is_on(channel) {
                self.restart(at);
            }
        }
    }

    fn restart(&mut self, at: usize) {
        self.columns[at].ready = false;
        self.columns[at].refused = false;
        self.columns[at].throttled = Throttled::default();
        let sent = self.parts.in_order(|part| part.column == at && matches!(part.leg, Leg::Sent(_)));
        let mut again = 0;
        for index in sent.into_iter().rev() {
            let Some(part) = self.parts.get(index).copied() else { continue };
            // What nobody waits for is not done again: its guest may have something newer there. Nor is a read by what is no
            // column any more.
            let lost = match part.owner {
                Owner::Guest(job) => {
                    let reads = part.request.operation == Operation::Read;
                    self.is_abandoned(job) || reads && self.is_beside(at)
                }
                Owner::Copy(slot) => self.copies.is_given_up(slot),
                Owner::Settling => false,
                Owner::Nobody => true,
            };
            if let Some(part) = self.parts.get_mut(index) {
                part.leg = if lost { Leg::Lost } else { Leg::Lingering };
            }
            if !lost {
                self.columns[at].sent -= 1;
                self.columns[at].queue.push_front(index);
                again += 1;
            }
        }
        self.disk.counters.resubmitted.add(again);
        self.stirred = true;
    }

    /// A channel can be used: nothing of its earlier generation is being carried out any more.
    pub(crate) fn channel_ready(&mut self, channel: ChannelId) {
        self.orphans_over(channel);
        self.channel_is_ready(channel);
    }

    /// A channel can be used by columns that did not use it yet. What is none any more may have something under way there.
    pub(crate) fn channel_is_ready(&mut self, channel: ChannelId) {
        for at in 0..self.columns.len() {
            if !self.columns[at].is_on(channel) || self.columns[at].ready {
                continue;
            }
            self.columns[at].ready = true;
            // The backend may be another one by now.
            self.disk.finder.lists = true;
            self.earlier_is_over(at);
            self.disk.unblock();
            (self.recheck, self.stirred) = (true, true);
        }
    }

    /// There is no channel any more: nobody at its other end carries out anything.
    pub(crate) fn channel_removed(&mut self, channel: ChannelId) {
        for at in 0..self.columns.len() {
            if !self.columns[at].is_on(channel) {
                continue;
            }
            self.columns[at].ready = false;
            if self.disk.object().failed {
                self.restart(at);
                self.earlier_is_over(at);
                self.drop_abandoned();
            }
        }
    }

    /// Nothing is being carried out any more of what was sent to a column over an earlier generation of its channel.
    fn earlier_is_over(&mut self, at: usize) {
        for index in self.parts.in_order(|part| part.column == at && part.leg == Leg::Lingering) {
            if let Some(part) = self.parts.get_mut(index) {
                part.leg = Leg::Queued;
            }
        }
        for index in self.parts.in_order(|part| part.column == at && part.leg == Leg::Lost) {
            self.columns[at].sent -= 1;
            let reads = |part: &Part| match part.owner {
                Owner::Guest(job) => {
                    part.request.operation == Operation::Read && !self.is_abandoned(job) && self.is_beside(at)
                }
                Owner::Copy(_) | Owner::Settling | Owner::Nobody => false,
            };
            if self.parts.get(index).is_some_and(reads) {
                self.move_to_column(index);
            } else {
                self.end(index, Status::IoError);
            }
        }
    }

    /// Whether a column is reached over this channel.
    pub(crate) fn uses(&self, channel: ChannelId) -> bool {
        self.columns.iter().any(|column| column.is_on(channel)) || self.stranded.on(channel) > 0
    }

    /// The channels of its columns, and of the place beside one.
    pub(crate) fn channels(&self) -> impl Iterator<Item = ChannelId> {
        self.columns.iter().map(|column| column.route.channel)
    }
}

/// As what a column is noted: there may be another number in its place when it has moved.
fn number_of(at: usize) -> Option<u32> {
    u32::try_from(at).ok()
}
