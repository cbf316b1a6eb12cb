//! Large areas, such as the RAM of guests, are let go of piece by piece: meanwhile the endpoint does what else it is told, and
//! looks at its fence.

use cxl_channel::RequestId;
use cxl_pool::{Area, LineCount, LineOffset};

use crate::ids::RegionId;

/// So much is flushed in one go: tens of milliseconds where every line is dirty, far less where none is.
const PIECE_LINES: u64 = (64 << 20) / 64;

/// A scrub that the controller asked for and that has not been answered.
#[derive(Debug)]
pub(super) struct Scrubbing {
    pub(super) id: RequestId,
    pub(super) region: RegionId,
    pub(super) left: Pieces,
}

/// An area in pieces.
#[derive(Debug)]
pub(super) struct Pieces(pub(super) Area);

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
}
