//! What waits for what while a column moves.
//!
//! Requests of the guest that meet do not come here together, as on any disk. So a read never sees a write that only one of both
//! places has: whichever of them is the column next, for this frontend or for its successor, has all that was seen. What the place
//! beside the column may still do of before it was given up is waited for too. A write waits for the copy of a region that it
//! touches, and the copy waited for those that were under way, so that it can neither miss nor undo one.

use cxl_pool::Memory;

use super::super::regions::{conflict, overlap};
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

    /// Whether a request of the guest has to wait for what is done at the column that moves.
    pub(super) fn must_wait(&self, request: &Request) -> bool {
        let Some(beside) = self.beside.as_ref().filter(|it| it.gets_writes()) else { return false };
        let mut ranges = self.layout.ranges(request.offset_bytes, request.length_bytes);
        let Some(piece) = ranges.find(|piece| piece.column == beside.column) else { return false };
        let there = of_column(request, &piece);
        self.begun().any(|part| conflict(&part.request, &there))
            || request.operation.writes() && self.copies.meet(&there)
    }

    fn begun(&self) -> impl Iterator<Item = &Part> {
        let begun = self.beside.iter().flat_map(|beside| &beside.begun);
        begun.filter_map(|&index| self.parts.get(index))
    }

    /// Whether what is asked of the column that moves meets a write that has begun.
    pub(super) fn meets_write(&self, request: &Request) -> bool {
        self.begun().any(|part| part.request.operation.writes() && overlap(&part.request, request))
    }

    /// Whether what is new must not meet a part: one of the guest, or a write that the place beside the column has of before it was
    /// given up, whose buffer is another's by now.
    fn may_meet(&self, part: &Part) -> bool {
        let Some(beside) = &self.beside else { return false };
        let operation = part.request.operation;
        match part.owner {
            Owner::Guest(_) => {
                operation != Operation::Flush && (beside.column == part.column || self.is_beside(part.column))
            }
            Owner::Nobody => operation.writes() && self.is_beside(part.column),
            Owner::Copy(_) | Owner::Settling => false,
        }
    }

    /// A part of a request begins.
    pub(super) fn note_begin(&mut self, index: u16) {
        let meets = self.parts.get(index).is_some_and(|part| self.may_meet(part));
        if let Some(beside) = self.beside.as_mut().filter(|it| meets && it.gets_writes()) {
            beside.begun.push(index);
        }
    }

    /// Takes note of what has begun already.
    pub(super) fn note_all_begun(&mut self) {
        let begun = self.parts.in_order(|part| self.may_meet(part));
        if let Some(beside) = &mut self.beside {
            beside.begun.clear();
            beside.begun.extend(begun);
        }
    }

    /// A part ended. Where a write of the guest was not carried out, both places may differ.
    pub(super) fn note_end(&mut self, index: u16, part: &Part, status: Status) {
        let Some(beside) = &mut self.beside else { return };
        let Some(at) = beside.begun.iter().position(|&begun| begun == index) else { return };
        beside.begun.swap_remove(at);
        if status != Status::Ok && part.owner != Owner::Nobody && part.request.operation.writes() {
            self.differ_in(&part.request);
        }
    }
}

/// A request, as the column gets it of which it touches this piece.
fn of_column(request: &Request, piece: &Piece) -> Request {
    Request { offset_bytes: piece.offset_bytes, length_bytes: piece.length_bytes, ..*request }
}
