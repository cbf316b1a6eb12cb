//! Where a request goes, and when it may.

use cxl_pool::{ByteOffset, LineOffset, Memory};

use super::super::place::Place;
use super::super::regions::{conflict, overlap, regions_of};
use super::MirroredDisk;
use super::replica::Replica;
use super::work::{Leg, Purpose, Work};
use crate::message::{Operation, Request, Status};

impl<M: Memory> MirroredDisk<M> {
    /// Lets everything go on that may.
    pub(super) fn pump(&mut self) {
        self.recheck = false;
        if self.intent.is_loading() {
            if self.disk.object().failed {
                self.refuse_waiting();
            }
            self.load_log();
            return self.count_dirty();
        }
        for _ in 0..self.waiting.len() {
            let Some(index) = self.waiting.pop_front() else { break };
            if self.must_wait(index) || !self.begin(index) {
                self.held_back.push(index);
                self.waiting.push_back(index);
            }
        }
        self.held_back.clear();
        self.refused();
        self.resync();
        self.write_log();
        self.count_dirty();
    }

    /// Begins a request of the guest. False if it has to wait.
    fn begin(&mut self, index: u16) -> bool {
        let Some(work) = self.works.get(index).copied() else { return true };
        match work.request.operation {
            Operation::Read => self.begin_read(index, &work),
            Operation::Flush => {
                for replica in 0..self.replicas.len() {
                    if self.replicas[replica].gets_writes() {
                        let mark = self.replicas[replica].unflushed.mark();
                        if let Some(work) = self.works.get_mut(index) {
                            work.marks[replica] = mark;
                        }
                        self.queue(index, replica);
                    }
                }
                self.begun(index);
                true
            }
            Operation::Write | Operation::Discard | Operation::WriteZeroes => {
                if self.meets_copy(&work.request) {
                    return false;
                }
                if self.cannot_mark(&work) {
                    self.finish(index, Status::IoError);
                    return true;
                }
                if !self.is_marked(&work.request) {
                    return false;
                }
                for replica in 0..self.replicas.len() {
                    if self.replicas[replica].gets_writes() {
                        self.queue(index, replica);
                    } else {
                        self.replicas[replica].dirty.insert_range(regions_of(&work.request));
                    }
                }
                self.writes.push(index);
                self.begun(index);
                true
            }
        }
    }

    fn begun(&mut self, index: u16) {
        if let Some(work) = self.works.get_mut(index) {
            work.begun = true;
        }
        // Where it goes nowhere, it is over.
        self.advance(index);
    }

    fn begin_read(&mut self, index: u16, work: &Work) -> bool {
        // What was never acknowledged may be on one replica and not on another: once it was read, it must stay.
        let mut in_line = true;
        for region in regions_of(&work.request) {
            let differs = |replica: &Replica| replica.in_sync && replica.dirty.contains(region);
            if self.replicas.iter().any(differs) {
                in_line = false;
                if !self.wanted.contains(&region) {
                    self.wanted.push_back(region);
                }
            }
        }
        if !in_line || work.needs_buffer && !self.replace_buffer(index) {
            return false;
        }
        let nearest = self
            .replicas
            .iter()
            .enumerate()
            .filter(|(replica, it)| it.gets_reads() && !work.tried[*replica])
            .min_by_key(|(replica, it)| (it.distance(), *replica))
            .map(|(replica, _)| replica);
        let Some(replica) = nearest else {
            let mut good = self.replicas.iter().zip(work.tried).filter(|(replica, _)| replica.in_sync);
            if good.all(|(_, tried)| tried) {
                self.finish(index, Status::IoError);
                return true;
            }
            return false;
        };
        self.queue(index, replica);
        self.reads.push(index);
        self.begun(index);
        true
    }

    /// A request has ended, or has to begin once more.
    pub(super) fn not_under_way(&mut self, index: u16) {
        for begun in [&mut self.writes, &mut self.reads] {
            if let Some(at) = begun.iter().position(|&begun| begun == index) {
                begun.swap_remove(at);
            }
        }
    }

    /// Whether a request of the guest has to wait for one that came before it: those that have begun, and, so that none waits for
    /// ever, those that wait themselves.
    fn must_wait(&self, index: u16) -> bool {
        let Some(work) = self.works.get(index) else { return false };
        let reads: &[u16] = if work.request.operation.writes() { &self.reads } else { &[] };
        let earlier = self.writes.iter().chain(reads).chain(&self.held_back);
        let mut earlier = earlier.filter_map(|&other| self.works.get(other));
        earlier.any(|other| conflict(&other.request, &work.request))
    }

    pub(super) fn queue(&mut self, index: u16, replica: usize) {
        if let Some(work) = self.works.get_mut(index) {
            work.legs[replica] = Leg::Queued;
            self.replicas[replica].queue.push_back(index);
            self.stirred = true;
        }
    }

    /// Whether a request meets a write that has begun.
    pub(super) fn meets_write(&self, request: &Request) -> bool {
        let mut writes = self.writes.iter().filter_map(|&index| self.works.get(index));
        writes.any(|work| overlap(&work.request, request))
    }

    /// Whether a request meets a region that is being copied.
    fn meets_copy(&self, request: &Request) -> bool {
        self.works
            .own()
            .any(|(_, work)| matches!(work.purpose, Purpose::Copy { .. }) && overlap(&work.request, request))
    }

    /// Gives a read another buffer, if it still needs one: a replica that was lost may fill the one it has.
    pub(super) fn replace_buffer(&mut self, index: u16) -> bool {
        let Some(work) = self.works.get_mut(index) else { return true };
        let tag = work.request.tag;
        // Also one that has left by now may still fill it.
        let all = self.replicas.iter_mut().chain(&mut self.departed);
        let mut orphans = all.flat_map(|replica| replica.orphans.iter_mut());
        let Some(orphan) = orphans.find(|orphan| orphan.tag == tag && orphan.buffer.is_none()) else {
            // It was answered meanwhile.
            work.needs_buffer = false;
            return true;
        };
        // Not longer than the longest request.
        let bytes = u32::try_from(work.request.length_bytes).unwrap_or(u32::MAX);
        let buffers = &mut self.disk.buffers;
        let mut buffer = buffers.alloc(bytes);
        while buffer.is_none()
            && let Some(spare) = self.spares.pop()
        {
            buffers.free(spare);
            buffer = buffers.alloc(bytes);
        }
        let slot = self.disk.slots.get_mut(index);
        let (Some(buffer), Place::Buffer(old)) = (buffer, slot.place) else { return false };
        slot.place = Place::Buffer(buffer);
        orphan.buffer = Some(old);
        work.needs_buffer = false;
        work.request.data = line_of(buffer.start());
        self.disk.flushed.flush(&self.disk.memory, buffer.start(), work.request.length_bytes);
        true
    }
}

pub(super) fn line_of(start: ByteOffset) -> LineOffset {
    start.line()
}
