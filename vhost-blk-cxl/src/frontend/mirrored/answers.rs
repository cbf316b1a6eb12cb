//! What answers of replicas mean for a request.

use cxl_pool::Memory;
use pod_protocol::ids::ChannelId;
use tracing::warn;

use super::super::regions::regions_of;
use super::MirroredDisk;
use super::replica::{Replica, Resync};
use super::work::{Leg, Purpose, Work};
use crate::message::{Completion, Operation, Request, Status};

impl<M: Memory> MirroredDisk<M> {
    /// An answer arrived.
    pub(crate) fn complete(&mut self, channel: ChannelId, completion: &Completion) {
        let found = self.works.find(completion.tag).and_then(|index| {
            let legs = self.works.get(index)?.legs;
            // The backend may have two replicas of the volume: which one it was stands in the answer, as in the request.
            let mut sent = self.replicas.iter().zip(legs);
            let is_it = |(replica, leg): (&Replica, Leg)| {
                leg == Leg::Sent(completion.holder) && replica.is_on(channel)
            };
            Some((sent.position(is_it)?, index))
        });
        let Some((replica, index)) = found else { return self.answer_orphan(channel, completion) };
        let it = &mut self.replicas[replica];
        it.sent -= 1;
        it.throttled.answered(completion);
        let Some(work) = self.works.get(index).copied() else { return };
        let leg = if work.request.operation != completion.operation {
            // The backend is confused; it would not do better if asked again.
            self.disk.counters.malformed.add(1);
            Leg::Failed(Status::IoError)
        } else if completion.status == Status::Refused {
            // The lease moved on while the request was under way; it goes out again with what comes.
            it.refused |= completion.holder == it.holder(completion.holder.lease);
            it.queue.push_back(index);
            Leg::Queued
        } else if completion.status != Status::Ok {
            Leg::Failed(completion.status)
        } else if self.is_vouched(replica, &work, completion.write_verifier)
            && !self.is_outdated(replica, &work)
        {
            Leg::Done
        } else {
            Leg::Failed(Status::IoError)
        };
        if let Some(work) = self.works.get_mut(index) {
            work.legs[replica] = leg;
        }
        self.advance(index);
    }

    /// An answer that nobody waits for: its buffer is free now.
    fn answer_orphan(&mut self, channel: ChannelId, completion: &Completion) {
        let all = self.replicas.iter_mut().chain(&mut self.departed);
        let mut on = all.filter(|replica| replica.is_on(channel));
        let answered = |replica: &mut Replica| replica.orphan_answered(completion.tag, completion.holder);
        let Some(orphan) = on.find_map(answered) else {
            return self.disk.counters.stale.add(1);
        };
        if let Some(buffer) = orphan.buffer {
            self.disk.buffers.free(buffer);
            self.disk.unblock();
        }
        self.departed.retain(|replica| !replica.orphans.is_empty());
        self.recheck = true;
    }

    /// Whether a replica remembers what it must for this to be done.
    fn is_vouched(&mut self, replica: usize, work: &Work, verifier: u64) -> bool {
        let next = self.works.next_sequence();
        if self.replicas[replica].unflushed.answered(verifier, next) {
            self.lost(replica);
        }
        let unflushed = &mut self.replicas[replica].unflushed;
        let vouched = match work.request.operation {
            Operation::Write | Operation::WriteZeroes if !work.request.force_unit_access => {
                unflushed.written();
                true
            }
            Operation::Flush => unflushed.flushed(work.sequence, work.marks[replica], next),
            _ => true,
        };
        // Before the guest hears of it.
        self.note(replica);
        vouched
    }

    /// A replica lost writes that were not flushed.
    pub(super) fn lost(&mut self, replica: usize) {
        warn!(lease = %self.disk.object().lease, ssd = self.replicas[replica].ssd,
            "the SSD lost writes that were not flushed");
        self.disk.counters.lost_writes.add(1);
        if self.fail(replica, "it lost writes that were not flushed") {
            self.replicas[replica].lost = true;
            self.replicas[replica].dirty.insert_all();
        } else if self.replicas[replica].counts() {
            // Without another one, the guest's next flush fails.
            self.guest.losses.take_losses(&mut self.replicas[replica].unflushed);
            self.others_differ_from(replica);
        } else {
            self.replicas[replica].dirty.insert_all();
        }
    }

    /// Whether a replica's answer to a read of the guest is one of before writes that others have.
    fn is_outdated(&self, replica: usize, work: &Work) -> bool {
        let reads = work.purpose == Purpose::Guest && work.request.operation == Operation::Read;
        reads && self.replicas[replica].lost
    }

    /// A replica that nobody can go on without does not hold any more what others may have got meanwhile, from the guest or as
    /// copies of what it had in its cache.
    pub(super) fn others_differ_from(&mut self, replica: usize) {
        for other in 0..self.replicas.len() {
            // Of the source nothing is dirty, unless it is to be dropped itself.
            if other != replica || other != self.source {
                self.replicas[other].dirty.insert_all();
            }
        }
        self.works.spoil_copies();
        self.recheck = true;
    }

    /// A replica missed something. False if there is no other one that could go on without it.
    pub(super) fn fail(&mut self, index: usize, reason: &str) -> bool {
        let good =
            |(other, it): (usize, &super::Replica)| other != index && it.in_sync && it.failing.is_none();
        if !self.replicas[index].counts() || !self.replicas.iter().enumerate().any(good) {
            return false;
        }
        let replica = &mut self.replicas[index];
        if replica.failing.is_none() {
            warn!(lease = %self.disk.object().lease, ssd = replica.ssd, reason, "the replica is to be dropped");
            replica.failing = Some(reason.to_owned());
            self.report(index);
        }
        true
    }

    /// Ends a request if it has come so far.
    pub(super) fn advance(&mut self, index: u16) {
        let Some(work) = self.works.get(index).copied().filter(|work| work.begun) else { return };
        match (work.purpose, work.request.operation) {
            (Purpose::Copy { .. }, _) => self.advance_copy(index, &work),
            (Purpose::Settle { target }, _) => self.advance_settle(index, target, &work),
            (Purpose::LoadLog { buffer }, _) => self.advance_load(index, buffer, &work),
            (Purpose::WriteLog { version, buffer }, _) => self.advance_log(index, version, buffer, &work),
            (Purpose::Sweep, _) => self.advance_sweep(index, &work),
            (Purpose::Guest, Operation::Read) => self.advance_read(index, &work),
            (Purpose::Guest, _) => self.advance_write(index, &work),
        }
    }

    pub(super) fn advance_all(&mut self) {
        for index in self.works.in_order() {
            self.advance(index);
        }
    }

    fn advance_read(&mut self, index: u16, work: &Work) {
        if work.legs.contains(&Leg::Done) {
            return self.finish(index, Status::Ok);
        }
        if work.legs.iter().any(|leg| leg.is_open()) {
            return;
        }
        // Another one may do better.
        if let Some(work) = self.works.get_mut(index) {
            for (tried, leg) in work.tried.iter_mut().zip(&mut work.legs) {
                *tried |= matches!(leg, Leg::Failed(_));
                *leg = Leg::None;
            }
            work.begun = false;
            self.not_under_way(index);
            self.waiting.push_back(index);
            self.recheck = true;
        }
    }

    fn advance_write(&mut self, index: u16, work: &Work) {
        // A replica that works on it reads its buffer.
        if work.legs.iter().any(|leg| leg.is_open()) {
            return;
        }
        let counts = |replica: usize| self.replicas.get(replica).is_some_and(super::Replica::counts);
        let counting: Vec<usize> = (0..self.replicas.len()).filter(|&replica| counts(replica)).collect();
        let failed =
            |status: Status| counting.iter().any(|&replica| work.legs[replica] == Leg::Failed(status));
        let done = counting.iter().any(|&replica| work.legs[replica] == Leg::Done);
        let unsupported = failed(Status::Unsupported);
        if !done && counting.iter().all(|&replica| work.legs[replica] == Leg::None) && !counting.is_empty() {
            // All of them are being dropped but one that joins; the controller's word is waited for.
            return;
        }
        if !done || unsupported && !failed(Status::IoError) {
            if done || failed(Status::IoError) {
                // What the replicas hold now may differ.
                self.diverge(&work.request);
            }
            (0..self.replicas.len()).for_each(|replica| self.doubt(replica, work));
            let status =
                if unsupported && !failed(Status::IoError) { Status::Unsupported } else { Status::IoError };
            return self.finish(index, status);
        }
        let mut waits = false;
        for replica in 0..self.replicas.len() {
            let (leg, counts) = (work.legs[replica], self.replicas[replica].counts());
            match leg {
                Leg::Failed(_) if counts => {
                    let others = self.fail(replica, "it failed a request that others carried out");
                    self.doubt(replica, work);
                    if !others {
                        self.diverge(&work.request);
                        return self.finish(index, Status::IoError);
                    }
                    waits = true;
                }
                Leg::Failed(_) => {
                    self.doubt(replica, work);
                    self.stumble(replica, &work.request);
                }
                // It came in line after the flush began, and has flushed since.
                Leg::None if work.request.operation == Operation::Flush => {
                    waits |= counts && self.replicas[replica].failing.is_some();
                }
                Leg::None => waits |= counts,
                Leg::Done | Leg::Queued | Leg::Sent(_) => {}
            }
        }
        if !waits {
            self.finish(index, Status::Ok);
        }
    }

    /// If a replica failed a flush, or a write that was to be on its medium: of what it acknowledged before and had not flushed, any
    /// part may be gone, and a later flush that succeeds says nothing of it. All of that is still marked.
    pub(super) fn doubt(&mut self, replica: usize, work: &Work) {
        let Request { operation, force_unit_access, .. } = work.request;
        let flushes = operation == Operation::Flush || operation.writes() && force_unit_access;
        if !flushes || work.legs[replica] != Leg::Failed(Status::IoError) {
            return;
        }
        let it = &mut self.replicas[replica];
        let goes = it.failing.is_some() && it.counts();
        // Until it is dropped, what it reads may be older than what others have.
        it.lost |= goes;
        if replica != self.source || goes {
            return self.intent.differs_where_marked(&mut self.replicas[replica]);
        }
        // It stays what others are brought in line with.
        for other in (0..self.replicas.len()).filter(|&other| other != replica) {
            self.intent.differs_where_marked(&mut self.replicas[other]);
        }
        self.works.spoil_copies();
    }

    /// A replica that was on its way back missed something.
    pub(super) fn stumble(&mut self, replica: usize, request: &Request) {
        let it = &mut self.replicas[replica];
        if request.operation.writes() {
            it.dirty.insert_range(regions_of(request));
        }
        if matches!(it.resync, Resync::Probing | Resync::Copying | Resync::Flushing | Resync::Joining(_)) {
            it.resync = Resync::Resting;
        }
    }

    /// Replicas may hold different things where a write failed.
    fn diverge(&mut self, request: &Request) {
        if !request.operation.writes() {
            return;
        }
        for replica in (0..self.replicas.len()).filter(|&replica| replica != self.source) {
            self.replicas[replica].dirty.insert_range(regions_of(request));
        }
    }

    /// Ends a request of the guest.
    pub(super) fn finish(&mut self, index: u16, status: Status) {
        let Some(work) = self.works.remove(index) else { return };
        self.not_under_way(index);
        let next = self.works.next_sequence();
        // What the guest asked for, whatever the replicas were.
        let request = Request { operation: self.disk.slots.get(index).operation, ..work.request };
        self.guest.end(&self.disk, &request, status, work.sequence, next);
        self.recheck = true;
    }
}
