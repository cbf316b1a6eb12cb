//! Replicas that come and go.

use cxl_pool::Memory;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::{DiskObject, ReplicaObject};
use pod_protocol::reports::Report;
use tracing::{info, warn};

use super::super::last_look::Throttled;
use super::super::regions::regions_of;
use super::replica::{Orphan, Replica, Resync};
use super::work::{Leg, Purpose, Stage, Work};
use super::{MirroredDisk, REPLICAS_MAX};
use crate::message::{Operation, Status};

impl<M: Memory> MirroredDisk<M> {
    /// The controller says who is in sync, and who can be reached.
    pub(super) fn change_members(&mut self, object: &DiskObject) {
        self.grow(object.size_bytes);
        // First those that are in sync, so that one of them takes over from a source that is not any more.
        for in_sync in [true, false] {
            for said in object.replicas.iter().filter(|said| said.in_sync == in_sync) {
                if let Some(index) = self.replicas.iter().position(|known| known.number == said.number) {
                    self.change_member(index, said, object.epoch);
                }
            }
        }
        self.admit(object);
        let stays = |number: u32| object.replicas.iter().any(|said| said.number == number);
        while let Some(index) = self.replicas.iter().position(|known| !stays(known.number)) {
            self.forget(index);
        }
        // There may have been no room for all of them before.
        self.admit(object);
        self.epoch = self.epoch.max(object.epoch);
        self.keep_last();
    }

    /// The controller may have dropped all others before it heard that one is to be dropped. That is the last one then, which is
    /// never dropped: what it has is what the disk holds.
    fn keep_last(&mut self) {
        let mut in_sync = (0..self.replicas.len()).filter(|&index| self.replicas[index].in_sync);
        let (Some(last), None) = (in_sync.next(), in_sync.next()) else { return };
        let replica = &mut self.replicas[last];
        if replica.failing.take().is_none() {
            return;
        }
        warn!(lease = %self.disk.object().lease, ssd = replica.ssd, "the replica is the last one, and stays");
        let loses = std::mem::take(&mut replica.lost);
        if loses {
            replica.unflushed.forget_losses();
            self.guest.losses.lose(self.works.next_sequence());
            self.others_differ_from(last);
        }
        self.take_for_source(last);
        for number in self.works.in_order() {
            let Some(work) = self.works.get_mut(number).filter(|work| work.purpose == Purpose::Guest) else {
                continue;
            };
            if work.request.operation == Operation::Read {
                // Nobody has anything newer.
                work.tried[last] &= !loses;
            } else if work.begun && work.legs[last] == Leg::None {
                // It was to be done without this one.
                work.marks[last] = self.replicas[last].unflushed.mark();
                self.queue(number, last);
            }
        }
        self.recheck = true;
    }

    fn grow(&mut self, size_bytes: u64) {
        self.intent.grow(size_bytes);
        for (index, replica) in self.replicas.iter_mut().enumerate() {
            let before = replica.dirty.total();
            replica.dirty.grow(size_bytes);
            if index != self.source && size_bytes > self.disk.object().size_bytes {
                // Nobody knows what was there; its last region may have been shorter.
                replica.dirty.insert_range(before.saturating_sub(1)..replica.dirty.total());
            }
        }
    }

    /// Replicas that are new here. Nobody knows what their places held before.
    fn admit(&mut self, object: &DiskObject) {
        for said in &object.replicas {
            let known = self.replicas.iter().any(|known| known.number == said.number);
            if known || self.replicas.len() == REPLICAS_MAX {
                continue;
            }
            info!(lease = %self.disk.object().lease, ssd = said.ssd, number = said.number, "there is a replica more");
            let mut replica = Replica::new(said, object.size_bytes.max(self.disk.object().size_bytes));
            replica.dirty.insert_all();
            self.replicas.push(replica);
            if self.spares.len() + 1 < self.replicas.len() {
                self.spares.extend(self.disk.spare());
            }
            self.keep_of_area();
            self.recheck = true;
        }
    }

    /// A replica is none of this volume any more.
    fn forget(&mut self, index: usize) {
        self.leave(index);
        let replica = self.replicas.remove(index);
        info!(lease = %self.disk.object().lease, ssd = replica.ssd, number = replica.number, "the replica is gone");
        self.works.close_gap(index);
        // Of the one that it was, leave() has made another one the source, if there is one.
        self.source = if self.source > index { self.source - 1 } else { self.source };
        self.source = self.source.min(self.replicas.len().saturating_sub(1));
        if !replica.orphans.is_empty() {
            self.departed.push(replica);
        }
    }

    /// Says of a replica that is to go that this is known, and later that nothing of it is in flight there any more.
    pub(super) fn report_leaving(&self, index: usize) {
        let replica = &self.replicas[index];
        let good = |it: &Replica| it.number != replica.number && it.in_sync && !it.leaving;
        let let_go = replica.orphans.is_empty() && replica.sent == 0 || replica.away;
        if replica.leaving
            && (replica.in_sync || let_go)
            && self.replicas.iter().any(good)
            && let Some(reporter) = &self.reporter
        {
            let (lease, epoch) = (self.disk.object().lease, self.epoch);
            reporter.report(Report::ReplicaLeft { lease, replica: replica.number, epoch });
        }
    }

    fn change_member(&mut self, index: usize, said: &ReplicaObject, epoch: u64) {
        let replica = &mut self.replicas[index];
        let other_channel = replica.route.channel != said.route.channel;
        if replica.route.generation != said.route.generation {
            replica.refused = false;
        }
        (replica.route, replica.place) = (said.route, said.place);
        if other_channel {
            // What went over the old one will never be answered.
            self.restart(index);
        }
        let replica = &mut self.replicas[index];
        let left = said.away && !replica.away || said.leaving && !replica.leaving;
        replica.away = said.away;
        replica.leaving = said.leaving;
        match (replica.in_sync, said.in_sync) {
            (true, false) => {
                info!(lease = %self.disk.object().lease, ssd = replica.ssd, epoch, "the replica was dropped");
                self.leave(index);
            }
            // The controller did not take it for in sync, and will not any more: what it was told is of an older epoch.
            (false, false) if matches!(replica.resync, Resync::Told(told) if told < epoch) => {
                self.leave(index);
            }
            (false, true) => {
                info!(lease = %self.disk.object().lease, ssd = replica.ssd, epoch, "the replica is in sync");
                replica.in_sync = true;
                replica.resync = Resync::Idle;
            }
            _ => {}
        }
        if left && !self.replicas[index].counts() {
            self.replicas[index].resync = Resync::Idle;
            self.detach(index);
        }
    }

    /// A replica does not count any more.
    fn leave(&mut self, index: usize) {
        let replica = &mut self.replicas[index];
        replica.in_sync = false;
        replica.failing = None;
        replica.lost = false;
        replica.resync = Resync::Idle;
        self.detach(index);
        if index == self.source
            && let Some(next) = self.replicas.iter().position(|replica| replica.in_sync)
        {
            self.take_for_source(next);
        }
    }

    /// Others are brought in line with this one from here on. Where it differed from the source before, everybody else differs from it
    /// now.
    fn take_for_source(&mut self, next: usize) {
        let differs = self.replicas[next].dirty.clone();
        for (other, replica) in self.replicas.iter_mut().enumerate() {
            if other == next {
                replica.dirty.clear();
            } else {
                replica.dirty.union(&differs);
            }
        }
        self.source = next;
    }

    /// Takes from a replica what it was to do. What it has already, it may still be doing.
    pub(super) fn detach(&mut self, index: usize) {
        self.replicas[index].queue.clear();
        for number in self.works.in_order() {
            let Some(work) = self.works.get(number).copied() else { continue };
            let leg = work.legs[index];
            if work.begun && work.request.operation.writes() && leg != Leg::Done {
                self.replicas[index].dirty.insert_range(regions_of(&work.request));
            }
            match work.purpose {
                Purpose::Copy { target, .. } if target == index || leg.is_open() => {
                    self.abort_copy(number, index, &work);
                }
                Purpose::Settle { target } => {
                    if target == index {
                        self.orphan(number, index, &work);
                        self.works.remove(number);
                    }
                }
                Purpose::Guest if leg.is_open() => self.detach_guest(number, index, &work),
                Purpose::LoadLog { buffer } if leg.is_open() => {
                    let sent = self.orphan(number, index, &work);
                    self.abort_load(number, index, buffer, sent);
                }
                Purpose::WriteLog { .. } | Purpose::Sweep if leg.is_open() => {
                    self.orphan(number, index, &work);
                    if let Some(work) = self.works.get_mut(number) {
                        work.legs[index] = Leg::None;
                    }
                }
                Purpose::Copy { .. }
                | Purpose::Guest
                | Purpose::LoadLog { .. }
                | Purpose::WriteLog { .. }
                | Purpose::Sweep => {}
            }
        }
        self.recheck = true;
    }

    fn detach_guest(&mut self, number: u16, index: usize, work: &Work) {
        let sent = self.orphan(number, index, work);
        let Some(it) = self.works.get_mut(number) else { return };
        it.legs[index] = Leg::None;
        if it.request.operation == Operation::Read {
            it.needs_buffer |= sent;
            it.begun = false;
            self.not_under_way(number);
            self.waiting.push_back(number);
            if sent {
                // Later, if there is none now.
                self.replace_buffer(number);
            }
        }
    }

    fn abort_copy(&mut self, number: u16, index: usize, work: &Work) {
        let Purpose::Copy { stage, buffer, .. } = work.purpose else { return };
        // Of a copy that is lost as a target while the source is read, the source's answer is an orphan.
        for replica in 0..self.replicas.len() {
            self.replicas[replica].queue.retain(|&queued| queued != number);
            let filling = self.orphan(number, replica, work) && stage == Stage::Reading;
            if filling && let Some(orphan) = self.replicas[replica].orphans.last_mut() {
                orphan.buffer = Some(buffer);
            }
        }
        debug_assert!(index < self.replicas.len());
        let filling = stage == Stage::Reading && work.legs.iter().any(|leg| matches!(leg, Leg::Sent(_)));
        self.end_copy(number, !filling);
    }

    /// Notes that nobody waits for an answer any more. True if it was asked for.
    fn orphan(&mut self, number: u16, index: usize, work: &Work) -> bool {
        let Leg::Sent(sent_as) = work.legs[index] else { return false };
        debug_assert_eq!(self.works.find(work.request.tag), Some(number));
        self.replicas[index].orphans.push(Orphan { tag: work.request.tag, sent_as, buffer: None });
        true
    }

    /// A channel begins a new generation. Nothing that was sent before will be answered.
    pub(crate) fn channel_restarts(&mut self, channel: ChannelId) {
        for index in 0..self.replicas.len() {
            if self.replicas[index].is_on(channel) {
                self.restart(index);
            }
        }
    }

    /// Nothing that was sent to a replica before will be answered.
    fn restart(&mut self, index: usize) {
        let replica = &mut self.replicas[index];
        replica.ready = false;
        replica.refused = false;
        replica.throttled = Throttled::default();
        if !replica.counts() {
            replica.resync = Resync::Idle;
            self.detach(index);
            return self.advance_all();
        }
        let mut again = Vec::new();
        for number in self.works.in_order() {
            let Some(work) = self.works.get(number).copied() else { continue };
            if !matches!(work.legs[index], Leg::Sent(_)) {
                continue;
            }
            match (work.purpose, work.request.operation) {
                // Its buffer may be filled until the new generation is ready: another one is taken, at another replica
                // if there is one.
                (Purpose::Guest, Operation::Read) => self.detach_guest(number, index, &work),
                (Purpose::Copy { .. }, _) => self.abort_copy(number, index, &work),
                (Purpose::LoadLog { buffer }, _) => {
                    let sent = self.orphan(number, index, &work);
                    self.abort_load(number, index, buffer, sent);
                }
                _ => {
                    self.replicas[index].sent -= 1;
                    again.push(number);
                    if let Some(work) = self.works.get_mut(number) {
                        work.legs[index] = Leg::Queued;
                    }
                }
            }
        }
        self.disk.counters.resubmitted.add(again.len() as u64);
        for number in again.into_iter().rev() {
            self.replicas[index].queue.push_front(number);
        }
        self.recheck = true;
    }

    /// A channel can be used: nothing of its earlier generation is being carried out any more.
    pub(crate) fn channel_ready(&mut self, channel: ChannelId, near: bool) {
        for gone in self.departed.extract_if(.., |gone| gone.is_on(channel)) {
            for buffer in gone.orphans.into_iter().filter_map(|orphan| orphan.buffer) {
                self.disk.buffers.free(buffer);
                self.disk.unblock();
            }
        }
        self.channel_is_ready(channel, near);
    }

    /// A channel can be used by replicas that did not use it yet. One that is gone may have something under way there. The backend is
    /// on our own host, or on another one.
    pub(crate) fn channel_is_ready(&mut self, channel: ChannelId, near: bool) {
        for index in 0..self.replicas.len() {
            if self.replicas[index].is_on(channel) {
                self.replicas[index].near = near;
            }
            if self.replicas[index].is_on(channel) && !self.replicas[index].ready {
                self.begin_to_use(index);
            }
        }
    }

    fn begin_to_use(&mut self, index: usize) {
        let replica = &mut self.replicas[index];
        replica.ready = true;
        for orphan in replica.orphans.drain(..) {
            replica.sent -= 1;
            if let Some(buffer) = orphan.buffer {
                self.disk.buffers.free(buffer);
            }
        }
        if self.spares.len() + 1 < self.replicas.len() {
            self.spares.extend(self.disk.spare());
        }
        self.intent.replenish(&mut self.disk.buffers);
        self.ask_for_log_again(index);
        self.disk.unblock();
        self.recheck = true;
    }

    /// There is no channel any more.
    pub(crate) fn channel_removed(&mut self, channel: ChannelId) {
        for replica in self.replicas.iter_mut().filter(|replica| replica.is_on(channel)) {
            replica.ready = false;
        }
    }

    /// Whether a replica is reached over this channel.
    pub(crate) fn uses(&self, channel: ChannelId) -> bool {
        let mut all = self.replicas.iter().chain(&self.departed);
        all.any(|replica| replica.is_on(channel))
    }

    /// The channels of its replicas.
    pub(crate) fn channels(&self) -> impl Iterator<Item = ChannelId> {
        self.replicas.iter().map(|replica: &Replica| replica.route.channel)
    }

    /// What has not begun fails: nobody waits for the replicas any more.
    pub(super) fn refuse_waiting(&mut self) {
        while let Some(index) = self.waiting.pop_front() {
            self.finish(index, Status::IoError);
        }
    }
}
