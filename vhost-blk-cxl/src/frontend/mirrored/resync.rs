//! Bringing replicas in line while the guest goes on.
//!
//! The source is a replica in sync. Another one is *dirty* where it differs from the source, or may. Region by region, the
//! source is read and the other one written; new writes to a region that is being copied wait, and the copy waits for those
//! that were under way, so that it can neither miss nor undo one.
//!
//! A stale replica comes back in steps. It is flushed first: if its write verifier changed, it lost more than it missed, and
//! all of it is dirty. Then it gets every new write, and what is dirty is copied. When nothing is dirty any more it is
//! flushed again, so that it is as durable as the others, counts from then on, and the controller is told.
//!
//! Replicas in sync may be dirty too: they have all that was acknowledged, but a predecessor of this frontend may have ended
//! between its writes to one and to the other, and a write that failed may have reached one. Reads of such a region wait
//! until it was copied.

use cxl_pool::Memory;
use tracing::{info, warn};
use vhost_frontend::Buffer;

use super::super::regions::REGION_BYTES;
use super::begin::line_of;
use super::replica::Resync;
use super::work::{Leg, Purpose, Stage, Work};
use super::{COPIES_MAX, MirroredDisk};
use crate::message::{Charge, Operation, Request, Status, Tag};

impl<M: Memory> MirroredDisk<M> {
    /// Does what can be done now.
    pub(super) fn resync(&mut self) {
        if self.disk.object().incoming {
            // Another host's frontend serves the guest, and is the one that writes.
            return;
        }
        for target in 0..self.replicas.len() {
            self.step(target);
        }
        let draining: Vec<u16> = self
            .works
            .own()
            .filter(|(_, work)| matches!(work.purpose, Purpose::Copy { stage: Stage::Draining, .. }))
            .map(|(index, _)| index)
            .collect();
        for index in draining {
            self.read_source(index);
        }
        while self.copies() < COPIES_MAX && self.begin_copy() {}
    }

    fn copies(&self) -> usize {
        self.works.own().filter(|(_, work)| matches!(work.purpose, Purpose::Copy { .. })).count()
    }

    /// Moves a stale replica on.
    fn step(&mut self, target: usize) {
        let copied =
            |it: &(u16, &Work)| matches!(it.1.purpose, Purpose::Copy { target: of, .. } if of == target);
        let copying = self.works.own().any(|work| copied(&work));
        let replica = &mut self.replicas[target];
        if replica.in_sync || replica.leaving || replica.failing.is_some() || !replica.is_there() {
            return;
        }
        let next = match replica.resync {
            // What it may still be doing could undo what is done now.
            Resync::Idle if replica.orphans.is_empty() => Resync::Probing,
            Resync::Copying if replica.dirty.is_empty() && !copying => Resync::Flushing,
            _ => return,
        };
        replica.resync = next;
        if next == Resync::Probing {
            info!(lease = %self.disk.object().lease, ssd = replica.ssd, dirty = replica.dirty.len(),
                of = replica.dirty.total(), "resynchronising the replica");
        }
        let mark = replica.unflushed.mark();
        let request = self.own_request(Operation::Flush, 0, 0, None);
        let Some(index) = self.works.enter_own(request, Purpose::Settle { target }) else { return };
        if let Some(work) = self.works.get_mut(index) {
            work.marks[target] = mark;
            work.begun = true;
        }
        self.queue(index, target);
    }

    /// A flush of a stale replica ended.
    pub(super) fn advance_settle(&mut self, index: u16, target: usize, work: &Work) {
        if work.legs[target].is_open() {
            return;
        }
        self.works.remove(index);
        self.recheck = true;
        self.doubt(target, work);
        let replica = &mut self.replicas[target];
        let lost = work.legs[target] != Leg::Done;
        match replica.resync {
            // It was asked what it remembers; if that is not all, everything is dirty by now.
            Resync::Probing if !lost || replica.dirty.len() == replica.dirty.total() => {
                replica.resync = Resync::Copying;
            }
            Resync::Flushing if !lost && replica.dirty.is_empty() => {
                self.join(target);
            }
            Resync::Flushing if !lost => replica.resync = Resync::Copying,
            Resync::Probing | Resync::Flushing => replica.resync = Resync::Resting,
            Resync::Idle | Resync::Resting | Resync::Copying | Resync::Joining(_) | Resync::Told(_) => {}
        }
    }

    pub(super) fn own_request(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
        buffer: Option<Buffer>,
    ) -> Request {
        Request {
            holder: self.disk.holder(),
            tag: Tag::new(0),
            operation,
            force_unit_access: false,
            may_unmap: false,
            intent_log: false,
            marked: true,
            charge: Charge::Nothing,
            offset_bytes,
            length_bytes,
            data: buffer.map_or(cxl_pool::LineOffset::new(0), |buffer| line_of(buffer.start())),
            segments: 0,
        }
    }

    /// Chooses a region of a replica to copy.
    fn begin_copy(&mut self) -> bool {
        if !self.replicas.get(self.source).is_some_and(super::Replica::gets_reads) {
            return false;
        }
        let Some((target, region)) = self.choose() else { return false };
        // Shorter where the volume ends.
        let offset = region * REGION_BYTES;
        let length = REGION_BYTES.min(self.disk.object().size_bytes.saturating_sub(offset));
        let Some(buffer) = self.copy_buffers.take(&mut self.disk.buffers) else { return false };
        let request = self.own_request(Operation::Read, offset, length, Some(buffer));
        let purpose = Purpose::Copy { target, region, stage: Stage::Draining, buffer };
        let Some(index) = self.works.enter_own(request, purpose) else {
            self.copy_buffers.give_back(buffer);
            return false;
        };
        self.read_source(index);
        true
    }

    fn choose(&mut self) -> Option<(usize, u64)> {
        let busy: Vec<u64> = self
            .works
            .own()
            .filter_map(|(_, work)| match work.purpose {
                Purpose::Copy { region, .. } => Some(region),
                _ => None,
            })
            .collect();
        let mut found = None;
        // Reads that wait come first. A region stays in the list until none in sync differs there.
        let replicas = &self.replicas;
        self.wanted.retain(|&region| {
            let differs = |it: &super::Replica| it.in_sync && it.dirty.contains(region);
            if found.is_none() && !busy.contains(&region) {
                found = replicas
                    .iter()
                    .position(|it| differs(it) && it.is_there() && it.failing.is_none())
                    .map(|target| (target, region));
            }
            replicas.iter().any(differs)
        });
        found.or_else(|| {
            self.replicas.iter_mut().enumerate().find_map(|(target, it)| {
                let wanted =
                    it.is_there() && it.failing.is_none() && (it.in_sync || it.resync == Resync::Copying);
                let region = if wanted { it.dirty.next(|region| busy.contains(&region)) } else { None };
                region.map(|region| (target, region))
            })
        })
    }

    /// Reads the source, unless a write to the region is under way.
    fn read_source(&mut self, index: u16) {
        let Some(work) = self.works.get(index).copied() else { return };
        let Purpose::Copy { target, region, buffer, .. } = work.purpose else { return };
        if self.meets_write(&work.request) || !self.replicas[self.source].gets_reads() {
            return;
        }
        self.disk.flushed.flush(&self.disk.memory, buffer.start(), work.request.length_bytes);
        if let Some(work) = self.works.get_mut(index) {
            work.purpose = Purpose::Copy { target, region, stage: Stage::Reading, buffer };
            work.begun = true;
        }
        self.queue(index, self.source);
    }

    /// A copy was read, or written.
    pub(super) fn advance_copy(&mut self, index: u16, work: &Work) {
        let Purpose::Copy { target, region, stage, .. } = work.purpose else { return };
        match stage {
            Stage::Draining => {}
            Stage::Reading => match work.legs[self.source] {
                // Others have what it lost: one of them is the source next.
                Leg::Done if self.replicas[self.source].lost => self.end_copy(index, true),
                Leg::Done => self.write_target(index, work),
                Leg::Failed(_) => {
                    let (source, it) = (self.replicas[self.source].ssd.clone(), &mut self.replicas[target]);
                    warn!(lease = %self.disk.object().lease, from = source, to = it.ssd, region,
                        "cannot be copied: the source cannot read it");
                    if it.in_sync {
                        // It has all that was acknowledged, as the source had.
                        if !work.spoiled {
                            it.dirty.remove(region);
                        }
                    } else {
                        it.resync = Resync::Resting;
                    }
                    self.end_copy(index, true);
                }
                _ => {}
            },
            Stage::Writing => match work.legs[target] {
                Leg::Done => {
                    if !work.spoiled {
                        self.replicas[target].dirty.remove(region);
                    }
                    self.end_copy(index, true);
                }
                Leg::Failed(Status::Unsupported) if work.request.operation == Operation::WriteZeroes => {
                    if let Some(work) = self.works.get_mut(index) {
                        work.request.operation = Operation::Write;
                        work.request.may_unmap = false;
                    }
                    self.queue(index, target);
                }
                Leg::Failed(_) => {
                    if !self.fail(target, "a region could not be copied to it") {
                        self.stumble(target, &work.request);
                    }
                    self.end_copy(index, true);
                }
                _ => {}
            },
        }
    }

    fn write_target(&mut self, index: u16, work: &Work) {
        let Purpose::Copy { target, region, buffer, .. } = work.purpose else { return };
        if !self.replicas[target].gets_writes() {
            return self.end_copy(index, true);
        }
        // What takes no room on the source shall take none on the other.
        let zeros = self.disk.is_filled_with_zeros(buffer, work.request.length_bytes);
        if let Some(work) = self.works.get_mut(index) {
            work.request.operation = if zeros { Operation::WriteZeroes } else { Operation::Write };
            work.request.may_unmap = zeros;
            work.legs[self.source] = Leg::None;
            work.purpose = Purpose::Copy { target, region, stage: Stage::Writing, buffer };
        }
        self.queue(index, target);
    }

    /// A copy is over. Its buffer is free unless a replica may still fill it.
    pub(super) fn end_copy(&mut self, index: u16, buffer_is_free: bool) {
        if let Some(work) = self.works.remove(index)
            && let Purpose::Copy { buffer, .. } = work.purpose
        {
            if buffer_is_free {
                self.copy_buffers.give_back(buffer);
            } else {
                self.copy_buffers.lose();
            }
        }
        self.recheck = true;
    }
}
