//! Bringing the place beside a column in line with the column while the guest goes on.
//!
//! Region by region, the column is read and the place beside it written. Until all of that is done, the place may differ from the
//! column where it is *dirty*. Then it is flushed, so that it is as durable as the column; from that moment no write is
//! acknowledged without it, and the controller is told.

use cxl_pool::{LineOffset, Memory};
use vhost_frontend::Buffer;

use super::super::copy_buffers::COPIES_MAX;
use super::super::regions::{REGION_BYTES, overlap, regions_of};
use super::StripedDisk;
use super::beside::Stage;
use super::parts::{Leg, Owner, Part};
use crate::message::{Charge, Operation, Request, Status, Tag};

/// A region on its way.
#[derive(Debug, Clone, Copy)]
struct Copying {
    region: u64,
    /// What is read of the column, and then written beside it.
    request: Request,
    buffer: Buffer,
    /// It waits for nothing but the devices. Before, it waits for writes to the region that were under way, and new ones wait for
    /// it.
    begun: bool,
    /// The place differs there once more.
    spoiled: bool,
    /// Nobody needs it any more; the column may still fill its buffer.
    given_up: bool,
}

/// All that are under way.
#[derive(Debug, Default)]
pub(super) struct Copies([Option<Copying>; COPIES_MAX]);

impl Copies {
    /// Whether a request to the column meets a region that is being copied.
    pub(super) fn meet(&self, request: &Request) -> bool {
        let mut live = self.0.iter().flatten().filter(|copy| !copy.given_up);
        live.any(|copy| overlap(&copy.request, request))
    }

    /// Whether nobody needs what this one does.
    pub(super) fn is_given_up(&self, slot: usize) -> bool {
        self.0[slot].is_none_or(|copy| copy.given_up)
    }

    /// Takes the buffer of one that nobody needs.
    pub(super) fn take_buffer(&mut self, slot: usize) -> Option<Buffer> {
        self.0[slot].take().map(|copy| copy.buffer)
    }

    fn none_live(&self) -> bool {
        self.0.iter().flatten().all(|copy| copy.given_up)
    }
}

impl<M: Memory> StripedDisk<M> {
    /// Does what can be done now.
    pub(super) fn resync(&mut self) {
        // Of a guest that is about to come, another host's frontend is the one that writes.
        if self.beside.is_none() || self.disk.object().incoming {
            return;
        }
        for slot in 0..COPIES_MAX {
            self.read_column(slot);
        }
        while self.begin_copy() {}
        let at = self.layout.columns();
        let is_done = |it: &super::Beside| {
            matches!(it.stage, Stage::Copying)
                && it.dirty.is_empty()
                && !it.settling
                && self.copies.none_live()
        };
        // What is under way in the guest's own memory goes to the column only, and a read of that cannot begin anew elsewhere.
        if self.beside.as_ref().is_some_and(is_done) && self.is_there(at) && !self.any_in_guest() {
            let request = self.own_request(Operation::Flush, 0, 0, LineOffset::new(0));
            if self.enter(Owner::Settling, at, request).is_some()
                && let Some(beside) = &mut self.beside
            {
                (beside.stage, beside.settling) = (Stage::Flushing, true);
            }
        }
        self.count_dirty();
    }

    fn is_there(&self, at: usize) -> bool {
        let away = self.is_beside(at) && self.beside.as_ref().is_some_and(|beside| beside.away);
        self.columns.get(at).is_some_and(|column| column.ready && !column.refused && !away)
    }

    fn own_request(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
        data: LineOffset,
    ) -> Request {
        Request {
            holder: self.disk.holder(),
            tag: Tag::new(0),
            operation,
            force_unit_access: false,
            may_unmap: false,
            intent_log: false,
            marked: false,
            charge: Charge::Nothing,
            offset_bytes,
            length_bytes,
            data,
            segments: 0,
        }
    }

    /// Chooses a region to copy.
    fn begin_copy(&mut self) -> bool {
        let Some(slot) = self.copies.0.iter().position(Option::is_none) else { return false };
        let column_bytes = self.layout.column_bytes(self.disk.object().size_bytes);
        let there = |column: usize| self.is_there(column) && self.is_there(self.layout.columns());
        let is_wanted = |it: &super::Beside| it.stage == Stage::Copying && there(it.column);
        if !self.beside.as_ref().is_some_and(is_wanted) {
            return false;
        }
        let live = self.copies.0.iter().flatten().filter(|copy| !copy.given_up);
        let busy: [Option<u64>; COPIES_MAX] = {
            let mut regions = live.map(|copy| copy.region);
            std::array::from_fn(|_| regions.next())
        };
        let Some(beside) = &mut self.beside else { return false };
        let Some(region) = beside.dirty.next(|region| busy.contains(&Some(region))) else { return false };
        // Shorter where the column ends.
        let offset = region * REGION_BYTES;
        let length = REGION_BYTES.min(column_bytes.saturating_sub(offset));
        let Some(buffer) = self.copy_buffers.take(&mut self.disk.buffers) else { return false };
        let request = self.own_request(Operation::Read, offset, length, buffer.start().line());
        self.copies.0[slot] =
            Some(Copying { region, request, buffer, begun: false, spoiled: false, given_up: false });
        self.read_column(slot);
        true
    }

    /// Reads the column, unless a write to the region is under way.
    fn read_column(&mut self, slot: usize) {
        let Some(copy) = self.copies.0[slot].filter(|copy| !copy.begun && !copy.given_up) else { return };
        let Some(column) = self.beside.as_ref().map(|beside| beside.column) else { return };
        if self.meets_write(&copy.request) {
            return;
        }
        self.disk.flushed.flush(&self.disk.memory, copy.buffer.start(), copy.request.length_bytes);
        if self.enter(Owner::Copy(slot), column, copy.request).is_some() {
            self.copies.0[slot] = Some(Copying { begun: true, ..copy });
        }
    }

    /// A region was read, or written.
    pub(super) fn advance_copy(&mut self, slot: usize, part: &Part, status: Status) {
        let Some(copy) = self.copies.0[slot] else { return };
        if copy.given_up {
            return self.end_copy(slot);
        }
        match (part.request.operation, status) {
            (Operation::Read, Status::Ok) => {
                let zeros = self.disk.is_filled_with_zeros(copy.buffer, copy.request.length_bytes);
                let operation = if zeros { Operation::WriteZeroes } else { Operation::Write };
                self.write_beside(slot, Request { operation, may_unmap: zeros, ..copy.request });
            }
            (Operation::WriteZeroes, Status::Unsupported) => {
                self.write_beside(slot, Request { operation: Operation::Write, ..copy.request });
            }
            (operation, Status::Ok) => {
                debug_assert!(operation.writes());
                if let Some(beside) = self.beside.as_mut().filter(|_| !copy.spoiled) {
                    beside.dirty.remove(copy.region);
                }
                self.end_copy(slot);
            }
            (operation, _) => {
                self.end_copy(slot);
                let reads = operation == Operation::Read;
                self.break_off(if reads { "the column cannot be read" } else { "it failed a write" });
            }
        }
    }

    fn write_beside(&mut self, slot: usize, request: Request) {
        // There is room: the part that ended has made it.
        if self.enter(Owner::Copy(slot), self.layout.columns(), request).is_none() {
            self.end_copy(slot);
        }
    }

    /// A copy is over, and its buffer free.
    fn end_copy(&mut self, slot: usize) {
        if let Some(copy) = self.copies.0[slot].take() {
            self.copy_buffers.give_back(copy.buffer);
            if self.beside.is_none() {
                self.give_copy_buffers_up();
            }
        }
        self.recheck = true;
    }

    /// The flush ended after which the place is complete, unless something was missed meanwhile.
    pub(super) fn settled(&mut self, status: Status) {
        let epoch = self.disk.object().epoch;
        let Some(beside) = &mut self.beside else { return };
        beside.settling = false;
        if !matches!(beside.stage, Stage::Flushing) {
            return;
        }
        if status != Status::Ok {
            return self.break_off("it failed a flush");
        }
        beside.stage = if beside.dirty.is_empty() { Stage::Told(epoch) } else { Stage::Copying };
        self.report();
    }

    /// Ends all copies. What has been asked for already may still be done.
    pub(super) fn give_copies_up(&mut self) {
        for slot in 0..COPIES_MAX {
            let asked = self.parts.in_order(|part| part.owner == Owner::Copy(slot));
            let Some(&index) = asked.first() else {
                self.end_copy(slot);
                continue;
            };
            let Some(part) = self.parts.get(index).copied() else { continue };
            let fills = part.request.operation == Operation::Read;
            if part.leg == Leg::Queued || part.leg == Leg::Lingering && !fills {
                self.columns[part.column].queue.retain(|&queued| queued != index);
                self.parts.remove(index);
                self.end_copy(slot);
            } else if fills {
                if let Some(copy) = &mut self.copies.0[slot] {
                    copy.given_up = true;
                }
            } else {
                // Whatever is written there late, nobody reads it.
                if let Some(part) = self.parts.get_mut(index) {
                    part.owner = Owner::Nobody;
                }
                self.end_copy(slot);
            }
        }
    }

    /// What one of both places holds is not what was written to it: they differ, wherever that may be.
    pub(super) fn differ(&mut self, at: usize) {
        let concerned = |it: &super::Beside| it.column == at || self.is_beside(at);
        if !self.beside.as_ref().is_some_and(concerned) {
            return;
        }
        if self.counts_beside() {
            return self.break_off("writes were lost that were not flushed");
        }
        if let Some(beside) = self.beside.as_mut().filter(|beside| beside.gets_writes()) {
            beside.dirty.insert_all();
            beside.stage = Stage::Copying;
            self.copies.0.iter_mut().flatten().for_each(|copy| copy.spoiled = true);
        }
    }

    /// Both places may differ where a request wrote.
    pub(super) fn differ_in(&mut self, request: &Request) {
        if self.counts_beside() {
            return self.break_off("it may differ from the column where a write failed");
        }
        if let Some(beside) = self.beside.as_mut().filter(|beside| beside.gets_writes()) {
            beside.dirty.insert_range(regions_of(request));
        }
    }

    /// Shows how much has yet to be copied.
    pub(super) fn count_dirty(&self) {
        let regions = self.beside.as_ref().filter(|it| it.gets_writes()).map_or(0, |it| it.dirty.len());
        self.disk.counters.dirty_bytes.set(regions.saturating_mul(REGION_BYTES));
    }
}
