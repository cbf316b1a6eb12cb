//! Where the bytes of a striped volume lie: unit by unit, in its columns by turns.

/// How a volume is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Two at least.
    columns: u64,
    unit_bytes: u64,
}

/// A part of a request that lies in one column, in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) column: usize,
    /// Where in the column.
    pub(super) offset_bytes: u64,
    pub(super) length_bytes: u64,
    /// Where in the data of the request.
    pub(super) data_bytes: u64,
}

impl Layout {
    pub(super) fn new(columns: usize, unit_bytes: u64) -> Self {
        Self { columns: (columns as u64).max(1), unit_bytes: unit_bytes.max(1) }
    }

    /// Over how many columns.
    pub(super) fn columns(self) -> usize {
        // A few.
        usize::try_from(self.columns).unwrap_or(usize::MAX)
    }

    /// How long each column of a volume of this size is.
    pub(super) fn column_bytes(self, size_bytes: u64) -> u64 {
        size_bytes.div_ceil(self.unit_bytes * self.columns) * self.unit_bytes
    }

    /// How many pieces [`Layout::pieces`] has.
    pub(super) fn count(self, offset_bytes: u64, length_bytes: u64) -> usize {
        let end = offset_bytes.saturating_add(length_bytes);
        let units = end.div_ceil(self.unit_bytes).saturating_sub(offset_bytes / self.unit_bytes);
        usize::try_from(units).unwrap_or(usize::MAX)
    }

    /// The pieces of a request with data, in the order of that.
    pub(super) fn pieces(self, offset_bytes: u64, length_bytes: u64) -> impl Iterator<Item = Piece> {
        let mut done = 0;
        std::iter::from_fn(move || {
            if done >= length_bytes {
                return None;
            }
            let at = offset_bytes + done;
            let (unit, within) = (at / self.unit_bytes, at % self.unit_bytes);
            let length = (self.unit_bytes - within).min(length_bytes - done);
            let piece = Piece {
                // Below the number of columns.
                column: usize::try_from(unit % self.columns).unwrap_or(usize::MAX),
                offset_bytes: unit / self.columns * self.unit_bytes + within,
                length_bytes: length,
                data_bytes: done,
            };
            done += length;
            Some(piece)
        })
    }

    /// The ranges of a request without data: what it covers of a column is one.
    pub(super) fn ranges(self, offset_bytes: u64, length_bytes: u64) -> impl Iterator<Item = Piece> {
        let end = offset_bytes.saturating_add(length_bytes);
        (0_usize..).zip(0..self.columns).filter_map(move |(column, number)| {
            let (from, to) = (self.below(number, offset_bytes), self.below(number, end));
            let piece = Piece { column, offset_bytes: from, length_bytes: to - from, data_bytes: 0 };
            (to > from).then_some(piece)
        })
    }

    /// How many bytes of a column lie before this place of the volume.
    fn below(self, column: u64, at: u64) -> u64 {
        let unit = at / self.unit_bytes;
        let (row, turn) = (unit / self.columns, unit % self.columns);
        row * self.unit_bytes
            + match column.cmp(&turn) {
                std::cmp::Ordering::Less => self.unit_bytes,
                std::cmp::Ordering::Equal => at % self.unit_bytes,
                std::cmp::Ordering::Greater => 0,
            }
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers, chosen by the test")]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const SECTOR: u64 = 512;

    /// Where a sector lies, said in another way.
    fn place(columns: u64, unit: u64, sector: u64) -> (usize, u64) {
        let row = sector / (columns * unit);
        let in_row = sector % (columns * unit);
        ((in_row / unit) as usize, row * unit + in_row % unit)
    }

    proptest! {
        #[test]
        fn each_sector_has_its_place(columns in 1_u64..5, unit in 1_u64..9, from in 0_u64..200, sectors in 1_u64..100) {
            let layout = Layout::new(columns as usize, unit * SECTOR);
            let mut next = 0;
            let mut seen = BTreeSet::new();
            let pieces: Vec<Piece> = layout.pieces(from * SECTOR, sectors * SECTOR).collect();
            prop_assert_eq!(pieces.len(), layout.count(from * SECTOR, sectors * SECTOR));
            for piece in pieces {
                prop_assert_eq!(piece.data_bytes, next * SECTOR);
                for at in 0..piece.length_bytes / SECTOR {
                    let there = (piece.column, piece.offset_bytes / SECTOR + at);
                    prop_assert_eq!(there, place(columns, unit, from + next));
                    seen.insert(there);
                    next += 1;
                }
            }
            prop_assert_eq!(next, sectors);
            let mut ranges = BTreeSet::new();
            for piece in layout.ranges(from * SECTOR, sectors * SECTOR) {
                for at in 0..piece.length_bytes / SECTOR {
                    prop_assert!(ranges.insert((piece.column, piece.offset_bytes / SECTOR + at)));
                }
            }
            prop_assert_eq!(ranges, seen);
        }
    }
}
