//! Columns whose backends come and go.

use cxl_pool::Memory;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::{DiskObject, ReplicaObject, Route};

use super::StripedDisk;
use super::parts::Leg;
use crate::message::Status;

/// How the columns of a disk are reached, in their order on it.
pub(super) fn routes(object: &DiskObject) -> Vec<Route> {
    let mut columns: Vec<&ReplicaObject> = object.replicas.iter().collect();
    columns.sort_by_key(|column| column.number);
    columns.into_iter().map(|column| column.route).collect()
}

impl<M: Memory> StripedDisk<M> {
    pub(super) fn column_on(&self, channel: ChannelId) -> Option<usize> {
        self.columns.iter().position(|column| column.route.channel == channel)
    }

    /// How many parts a channel's backend has.
    pub(crate) fn with_backend(&self, channel: ChannelId) -> u32 {
        self.column_on(channel).map_or(0, |at| self.columns[at].sent)
    }

    pub(super) fn change_columns(&mut self, object: &DiskObject) {
        for (at, route) in routes(object).into_iter().enumerate().take(self.columns.len()) {
            let column = &mut self.columns[at];
            let other_channel = column.route.channel != route.channel;
            if column.route.generation != route.generation {
                column.refused = false;
            }
            column.route = route;
            if other_channel {
                // What went over the old one will never be answered.
                self.channel_restarts(route.channel);
            }
        }
    }

    /// A channel begins a new generation. Nothing that was sent before will be answered, and once the new one is ready
    /// nothing of it is being carried out any more: everything is sent again.
    pub(crate) fn channel_restarts(&mut self, channel: ChannelId) {
        let Some(at) = self.column_on(channel) else { return };
        self.columns[at].ready = false;
        self.columns[at].refused = false;
        let sent = self.parts.in_order(|part| part.column == at && matches!(part.leg, Leg::Sent(_)));
        let mut again = 0;
        for index in sent.into_iter().rev() {
            let Some(job) = self.parts.get(index).map(|part| part.job) else { continue };
            // What nobody waits for is not done again: its guest may have something newer there.
            let lost = self.is_abandoned(job);
            if let Some(part) = self.parts.get_mut(index) {
                part.leg = if lost { Leg::Lost } else { Leg::Queued };
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
        let Some(at) = self.column_on(channel).filter(|&at| !self.columns[at].ready) else { return };
        self.columns[at].ready = true;
        self.end_lost(at);
        self.disk.unblock();
        self.stirred = true;
    }

    /// There is no channel any more: nobody at its other end carries out anything.
    pub(crate) fn channel_removed(&mut self, channel: ChannelId) {
        let Some(at) = self.column_on(channel) else { return };
        self.columns[at].ready = false;
        if self.disk.object().failed {
            self.channel_restarts(channel);
            self.end_lost(at);
            self.drop_abandoned();
        }
    }

    fn end_lost(&mut self, at: usize) {
        for index in self.parts.in_order(|part| part.column == at && part.leg == Leg::Lost) {
            self.columns[at].sent -= 1;
            self.end(index, Status::IoError);
        }
    }

    /// Whether a column is reached over this channel.
    pub(crate) fn uses(&self, channel: ChannelId) -> bool {
        self.column_on(channel).is_some()
    }

    /// The channels of its columns.
    pub(crate) fn channels(&self) -> impl Iterator<Item = ChannelId> {
        self.columns.iter().map(|column| column.route.channel)
    }
}
