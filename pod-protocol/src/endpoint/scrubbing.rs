//! Large areas, such as the RAM of guests, are let go of piece by piece: meanwhile the endpoint does what else it is told, and
//! looks at its fence.

use std::collections::VecDeque;

use cxl_channel::RequestId;
use cxl_pool::{Area, LineCount, LineOffset};

use crate::ids::RegionId;

/// So much is flushed in one go: tens of milliseconds where every line is dirty, far less where none is.
const PIECE_LINES: u64 = (64 << 20) / 64;

/// Scrubs that the controller asked for and that have not been answered, in the order in which it did.
#[derive(Debug)]
pub(super) struct Scrubs<Id = RequestId>(VecDeque<Scrubbing<Id>>);

#[derive(Debug)]
struct Scrubbing<Id> {
    /// It is asked for again when it takes longer than the controller waits, and answers all of them.
    ids: Vec<Id>,
    region: RegionId,
    area: Area,
    left: Pieces,
    /// Whether something else may use the region than when it began.
    stale: bool,
}

/// What is to be done next for the first one.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<Id> {
    /// Flush this piece of a region.
    Flush(RegionId, Area),
    /// Answer these: it is done.
    Answer(Vec<Id>),
}

impl<Id> Scrubs<Id> {
    pub(super) const fn new() -> Self {
        Self(VecDeque::new())
    }

    /// The controller asks for this one.
    pub(super) fn ask(&mut self, id: Id, region: RegionId, area: Area) {
        let same = self.0.iter_mut().find(|known| (known.region, known.area) == (region, area));
        let Some(known) = same else {
            let (ids, left) = (vec![id], Pieces(area));
            self.0.push_back(Scrubbing { ids, region, area, left, stale: false });
            return;
        };
        known.ids.push(id);
        if std::mem::take(&mut known.stale) {
            // What was flushed of it before may have been written since.
            known.left = Pieces(area);
        }
    }

    /// The endpoint has taken something into use, or has let go of it. What is asked for from now on is to be flushed from now on: a
    /// storage backend flushes a region before it serves it, and again when it lets go of it.
    pub(super) fn holdings_changed(&mut self) {
        for known in &mut self.0 {
            known.stale = true;
        }
    }

    /// What is to be done next.
    pub(super) fn next(&mut self) -> Option<Next<Id>> {
        let first = self.0.front_mut()?;
        match first.left.next() {
            Some(piece) => Some(Next::Flush(first.region, piece)),
            None => Some(Next::Answer(self.give_up())),
        }
    }

    /// Nothing more is to be done for the first one. Returns whom to answer.
    pub(super) fn give_up(&mut self) -> Vec<Id> {
        self.0.pop_front().map(|first| first.ids).unwrap_or_default()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// An area in pieces.
#[derive(Debug)]
struct Pieces(Area);

/// Whether an area is so large that others should not have to wait for all of it.
pub(super) fn is_long(area: Area) -> bool {
    area.lines.get() > PIECE_LINES
}

impl Iterator for Pieces {
    type Item = Area;

    fn next(&mut self) -> Option<Area> {
        let (start, left) = (self.0.start.get(), self.0.lines.get());
        let lines = left.min(PIECE_LINES);
        // An area that no pool has ends where no line can be, and its flush is refused before.
        self.0 = Area::new(LineOffset::new(start.saturating_add(lines)), LineCount::new(left - lines));
        (lines > 0).then(|| Area::new(LineOffset::new(start), LineCount::new(lines)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_an_area_once() {
        let area = |start, lines| Area::new(LineOffset::new(start), LineCount::new(lines));
        let whole = area(7, PIECE_LINES * 2 + 5);
        assert!(is_long(whole) && !is_long(area(7, PIECE_LINES)));
        let pieces: Vec<Area> = Pieces(whole).collect();
        let second = 7 + PIECE_LINES;
        assert_eq!(pieces, [area(7, PIECE_LINES), area(second, PIECE_LINES), area(second + PIECE_LINES, 5)]);
        assert_eq!(Pieces(area(7, 0)).next(), None);
    }

    /// Does all there is. Returns how many pieces were flushed, and who was answered after how many.
    fn finish(scrubs: &mut Scrubs<u32>) -> (usize, Vec<(usize, Vec<u32>)>) {
        let (mut pieces, mut answered) = (0, Vec::new());
        while let Some(next) = scrubs.next() {
            match next {
                Next::Flush(..) => pieces += 1,
                Next::Answer(ids) => answered.push((pieces, ids)),
            }
        }
        (pieces, answered)
    }

    #[test]
    fn what_is_asked_for_again_is_done_once_unless_something_else_may_use_it() {
        let area = |start| Area::new(LineOffset::new(start), LineCount::new(PIECE_LINES * 3));
        let (region, other) = (RegionId::new(1), RegionId::new(2));
        let mut scrubs = Scrubs::new();
        scrubs.ask(1, region, area(0));
        scrubs.ask(2, other, area(0));
        assert!(matches!(scrubs.next(), Some(Next::Flush(..))));
        scrubs.ask(3, region, area(0));
        scrubs.ask(4, region, area(1));
        let answers = [(2, vec![1, 3]), (5, vec![2]), (8, vec![4])];
        assert_eq!(finish(&mut scrubs), (8, answers.to_vec()));

        scrubs.ask(1, region, area(0));
        assert!(matches!(scrubs.next(), Some(Next::Flush(..))));
        scrubs.holdings_changed();
        scrubs.ask(2, region, area(0));
        assert_eq!(finish(&mut scrubs), (3, vec![(3, vec![1, 2])]), "it begins anew");
        assert!(scrubs.is_empty());
    }
}
