//! What the requests of a striped disk are cut into.

use super::super::unflushed::Mark;
use crate::message::{Holder, Request, Status, Tag};

/// Parts that are under way at a time. The longest request has fewer.
pub(super) const PARTS_MAX: u16 = 4096;

/// For whom a part is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// A request of the guest, at the place of its slot.
    Guest(u16),
    /// A region that is copied to the place beside a column: which one of those under way.
    Copy(usize),
    /// The flush after which the place beside a column is complete.
    Settling,
    /// Nobody any more, but a backend may still be carrying it out.
    Nobody,
}

/// Where a part is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leg {
    /// To be sent, or sent again.
    Queued,
    /// To be sent again, and what it was sent to before may still be carrying it out.
    Lingering,
    /// With the backend, sent as this.
    Sent(Holder),
    /// The place beside a column did not do it. What that means for its request depends on which of both is the column in the
    /// end.
    Failed(Status),
    /// Nobody waits for it any more, but a backend may still be carrying it out.
    Lost,
}

/// A part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// As its column gets it.
    pub(super) request: Request,
    pub(super) owner: Owner,
    pub(super) column: usize,
    pub(super) leg: Leg,
    /// Counts parts in the order in which they were cut.
    pub(super) serial: u64,
    /// Of a flush: what it vouches for.
    pub(super) mark: Mark,
    /// Where in the data of its request its own begins.
    pub(super) data_bytes: u64,
}

/// A request of the guest, at the place of its slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    pub(super) request: Request,
    /// Parts that have yet to end.
    pub(super) open: usize,
    /// How it ends.
    pub(super) status: Status,
    /// Counts requests in the order in which they came.
    pub(super) sequence: u64,
    /// It has to begin anew, in another buffer: a backend that nobody waits for may still fill the one it has.
    pub(super) stranded: bool,
    /// A backend of an earlier version has refused a list: the data is to be copied.
    pub(super) unlisted: bool,
}

impl Job {
    pub(super) fn new(request: Request, sequence: u64) -> Self {
        Self { request, open: 0, status: Status::Ok, sequence, stranded: false, unlisted: false }
    }

    /// A part ended like this.
    pub(super) fn note(&mut self, status: Status) {
        if status != Status::Ok && self.status != Status::IoError {
            self.status = status;
        }
    }
}

/// All parts.
#[derive(Debug)]
pub(super) struct Parts {
    all: Vec<Option<Part>>,
    free: Vec<u16>,
    serial: u64,
    uses: u16,
}

impl Parts {
    pub(super) fn new() -> Self {
        let all = vec![None; PARTS_MAX.into()];
        Self { all, free: (0..PARTS_MAX).rev().collect(), serial: 0, uses: 0 }
    }

    /// How many more there may be.
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Enters a part, if there is room.
    pub(super) fn enter(&mut self, mut part: Part) -> Option<u16> {
        let index = self.free.pop()?;
        self.serial += 1;
        self.uses = self.uses.wrapping_add(1);
        part.serial = self.serial;
        part.request.tag = Tag::new(u32::from(self.uses) << 16 | u32::from(index));
        self.all[usize::from(index)] = Some(part);
        Some(index)
    }

    pub(super) fn get(&self, index: u16) -> Option<&Part> {
        self.all.get(usize::from(index))?.as_ref()
    }

    pub(super) fn get_mut(&mut self, index: u16) -> Option<&mut Part> {
        self.all.get_mut(usize::from(index))?.as_mut()
    }

    /// The one that bears this tag.
    pub(super) fn find(&self, tag: Tag) -> Option<u16> {
        let index = u16::try_from(tag.get() & 0xffff).ok()?;
        (self.get(index)?.request.tag == tag).then_some(index)
    }

    pub(super) fn remove(&mut self, index: u16) -> Option<Part> {
        let part = self.all.get_mut(usize::from(index))?.take()?;
        self.free.push(index);
        Some(part)
    }

    /// Whether something holds of any.
    pub(super) fn any(&self, holds: impl Fn(&Part) -> bool) -> bool {
        self.all.iter().flatten().any(holds)
    }

    /// The number of the oldest one of which something holds.
    pub(super) fn oldest_where(&self, holds: impl Fn(&Part) -> bool) -> Option<u64> {
        self.all.iter().flatten().filter(|part| holds(part)).map(|part| part.serial).min()
    }

    /// Two columns have changed places.
    pub(super) fn swap_columns(&mut self, one: usize, other: usize) {
        for part in self.all.iter_mut().flatten() {
            part.column = match part.column {
                column if column == one => other,
                column if column == other => one,
                column => column,
            };
        }
    }

    /// Those of which something holds, in the order in which they were cut.
    pub(super) fn in_order(&self, holds: impl Fn(&Part) -> bool) -> Vec<u16> {
        let found = (0_u16..).zip(&self.all).filter_map(|(index, part)| Some((part.as_ref()?, index)));
        let mut found: Vec<(u64, u16)> =
            found.filter(|(part, _)| holds(part)).map(|(part, index)| (part.serial, index)).collect();
        found.sort_unstable();
        found.into_iter().map(|(_, index)| index).collect()
    }
}
