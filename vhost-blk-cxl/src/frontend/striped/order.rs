//! What waits for what while a column moves.
//!
//! Writes that meet are carried out one after the other, and so are reads that meet a write: both places would order them
//! differently, and a read before the column changes its place could see what a read after that does not. A write waits for the
//! copy of a region that it touches, and the copy waited for those that were under way, so that it can neither miss nor undo one.
//!
//! That a write is under way does not end with the move: a read that the column got first may have seen it there, and the place
//! where the column is now has yet to do it. Until it has, what meets it waits.

use cxl_pool::Memory;

use super::super::regions::overlap;
use super::StripedDisk;
use super::layout::Piece;
use super::parts::{Owner, Part};
use crate::message::{Operation, Request, Status};

impl<M: Memory> StripedDisk<M> {
    /// Where else a part for a column goes.
    pub(super) fn twin_of(&self, column: usize, operation: Operation) -> Option<usize> {
        let moves = |it: &super::Beside| it.column == column && it.gets_writes();
        let goes_there = operation != Operation::Read && self.beside.as_ref().is_some_and(moves);
        goes_there.then(|| self.layout.columns())
    }

    /// Whether a request of the guest has to wait for others.
    pub(super) fn must_wait(&self, request: &Request) -> bool {
        self.meets_outlasting(request) || self.meets_move(request)
    }

    fn meets_move(&self, request: &Request) -> bool {
        let Some(beside) = self.beside.as_ref().filter(|it| it.gets_writes()) else { return false };
        let mut ranges = self.layout.ranges(request.offset_bytes, request.length_bytes);
        let Some(piece) = ranges.find(|piece| piece.column == beside.column) else { return false };
        let there = of_column(request, &piece);
        self.meets_write(&there) || request.operation.writes() && self.copies.meet(&there)
    }

    /// Whether a request meets a write that was under way when its column changed its place.
    fn meets_outlasting(&self, request: &Request) -> bool {
        let mut parts = self.outlasting.iter().filter_map(|write| self.outlasts(*write));
        parts.any(|part| {
            let ranges = self.layout.ranges(request.offset_bytes, request.length_bytes);
            let mut here = ranges.filter(|piece| piece.column == part.column);
            here.any(|piece| overlap(&part.request, &of_column(request, &piece)))
        })
    }

    fn outlasts(&self, (index, serial): (u16, u64)) -> Option<&Part> {
        self.parts.get(index).filter(|part| part.serial == serial)
    }

    /// A column has changed its place: takes note of the writes that it has yet to do there.
    pub(super) fn note_outlasting(&mut self, column: usize) {
        self.drop_outlasting();
        let is_write = |part: &Part| {
            part.column == column && matches!(part.owner, Owner::Guest(_)) && part.request.operation.writes()
        };
        for index in self.parts.in_order(is_write) {
            self.outlasting.extend(self.parts.get(index).map(|part| (index, part.serial)));
        }
    }

    /// Forgets those that are over.
    pub(super) fn drop_outlasting(&mut self) {
        let mut outlasting = std::mem::take(&mut self.outlasting);
        outlasting.retain(|&write| self.outlasts(write).is_some());
        self.outlasting = outlasting;
    }

    /// Whether what is asked of the column that moves meets a write that has begun.
    pub(super) fn meets_write(&self, request: &Request) -> bool {
        let writes = self.beside.iter().flat_map(|beside| &beside.writes);
        writes.filter_map(|&index| self.parts.get(index)).any(|part| overlap(&part.request, request))
    }

    /// Whether what is new must not meet a part: a write of the guest, or one that the place beside the column has of before it was
    /// given up, whose buffer is another's by now.
    fn may_meet(&self, part: &Part) -> bool {
        let concerned = |it: &super::Beside| match part.owner {
            Owner::Guest(_) => it.column == part.column || self.is_beside(part.column),
            Owner::Nobody => self.is_beside(part.column),
            Owner::Copy(_) | Owner::Settling => false,
        };
        part.request.operation.writes() && self.beside.as_ref().is_some_and(concerned)
    }

    /// A part of a request begins.
    pub(super) fn note_begin(&mut self, index: u16) {
        let meets = self.parts.get(index).is_some_and(|part| self.may_meet(part));
        if let Some(beside) = self.beside.as_mut().filter(|_| meets) {
            beside.writes.push(index);
        }
    }

    /// Takes note of what has begun already.
    pub(super) fn note_all_begun(&mut self) {
        let writes = self.parts.in_order(|part| self.may_meet(part));
        if let Some(beside) = &mut self.beside {
            beside.writes.clear();
            beside.writes.extend(writes);
        }
    }

    /// A part ended. Where a write of the guest was not carried out, both places may differ.
    pub(super) fn note_end(&mut self, index: u16, part: &Part, status: Status) {
        let Some(beside) = &mut self.beside else { return };
        let Some(at) = beside.writes.iter().position(|&write| write == index) else { return };
        beside.writes.swap_remove(at);
        if status != Status::Ok && part.owner != Owner::Nobody {
            self.differ_in(&part.request);
        }
    }
}

/// A request, as the column gets it of which it touches this piece.
fn of_column(request: &Request, piece: &Piece) -> Request {
    Request { offset_bytes: piece.offset_bytes, length_bytes: piece.length_bytes, ..*request }
}
