//! Where something lies in the pool: offsets in bytes and in cache lines, and ranges of lines.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bytes of a cache line: the unit of transfer, of ownership and of addressing.
pub const LINE_BYTES: usize = 64;

const LINE_SHIFT: u32 = LINE_BYTES.trailing_zeros();

/// A cache line, counted from the start of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LineOffset(u64);

impl LineOffset {
    /// The line with this number.
    pub const fn new(line: u64) -> Self {
        Self(line)
    }

    /// The line's number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Where the line begins. A line too far out for a byte offset gives the last one there is, which
    /// no pool contains.
    pub const fn bytes(self) -> ByteOffset {
        ByteOffset(self.0.saturating_mul(LINE_BYTES as u64))
    }

    /// The line this many lines further on, if there is a number for it.
    pub const fn checked_add(self, lines: LineCount) -> Option<Self> {
        match self.0.checked_add(lines.0) {
            Some(line) => Some(Self(line)),
            None => None,
        }
    }

    /// The line this many lines further on; the last one there is, if that is too far out.
    #[must_use]
    pub const fn saturating_add(self, lines: LineCount) -> Self {
        Self(self.0.saturating_add(lines.0))
    }
}

impl fmt::Display for LineOffset {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "line {}", self.0)
    }
}

/// A byte, counted from the start of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteOffset(u64);

impl ByteOffset {
    /// The byte with this number.
    pub const fn new(byte: u64) -> Self {
        Self(byte)
    }

    /// The byte's number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The line that the byte lies in.
    pub const fn line(self) -> LineOffset {
        LineOffset(self.0 >> LINE_SHIFT)
    }

    /// The byte this many bytes further on, if there is a number for it.
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(byte) => Some(Self(byte)),
            None => None,
        }
    }

    /// The byte this many bytes further on; the last one there is, if that is too far out.
    #[must_use]
    pub const fn saturating_add(self, bytes: u64) -> Self {
        Self(self.0.saturating_add(bytes))
    }
}

impl fmt::Display for ByteOffset {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "byte {:#x}", self.0)
    }
}

/// A number of cache lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LineCount(u64);

impl LineCount {
    /// This many lines.
    pub const fn new(lines: u64) -> Self {
        Self(lines)
    }

    /// As many lines as this many bytes need.
    pub const fn covering(bytes: u64) -> Self {
        Self(bytes.div_ceil(LINE_BYTES as u64))
    }

    /// How many lines.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// How many bytes; `u64::MAX` if that is too many to say.
    pub const fn bytes(self) -> u64 {
        self.0.saturating_mul(LINE_BYTES as u64)
    }
}

/// A range of whole cache lines, such as a leased region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Area {
    /// The first line.
    pub start: LineOffset,
    /// How many lines.
    pub lines: LineCount,
}

impl Area {
    /// The area of this many lines from here.
    pub const fn new(start: LineOffset, lines: LineCount) -> Self {
        Self { start, lines }
    }

    /// The line after the last one.
    pub const fn end(&self) -> LineOffset {
        self.start.saturating_add(self.lines)
    }

    /// The size in bytes.
    pub const fn bytes(&self) -> u64 {
        self.lines.bytes()
    }

    /// The first byte.
    pub const fn start_byte(&self) -> ByteOffset {
        self.start.bytes()
    }

    /// Whether all of these bytes lie inside. Safe for any values, also hostile ones; an empty range is
    /// inside if its offset is.
    pub const fn contains(&self, at: ByteOffset, bytes: u64) -> bool {
        let start = self.start.bytes().get();
        let Some(offset) = at.0.checked_sub(start) else { return false };
        match offset.checked_add(bytes) {
            Some(end) => end <= self.bytes() && (bytes > 0 || offset < self.bytes()),
            None => false,
        }
    }

    /// Whether all of the other area lies inside.
    pub const fn contains_area(&self, other: &Area) -> bool {
        other.start.0 >= self.start.0
            && match (other.start.checked_add(other.lines), self.start.checked_add(self.lines)) {
                (Some(other_end), Some(end)) => other_end.0 <= end.0,
                _ => false,
            }
    }

    /// Whether the two share a line.
    pub const fn overlaps(&self, other: &Area) -> bool {
        self.start.0 < other.end().0 && other.start.0 < self.end().0
    }
}

impl fmt::Display for Area {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "lines {}..{}", self.start.0, self.end().0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn area_contains_its_bytes_and_no_others() {
        let area = Area::new(LineOffset::new(2), LineCount::new(2));
        assert!(area.contains(ByteOffset::new(128), 128));
        assert!(area.contains(ByteOffset::new(255), 1));
        assert!(!area.contains(ByteOffset::new(127), 1));
        assert!(!area.contains(ByteOffset::new(255), 2));
        assert!(!area.contains(ByteOffset::new(256), 0));
    }

    proptest! {
        #[test]
        // Beyond 2^58 lines there is no byte offset: such an area contains nothing real.
        fn contains_agrees_with_wide_arithmetic(
            start in 0..1_u64 << 57,
            lines in 0..1_u64 << 57,
            at: u64,
            bytes: u64,
        ) {
            let area = Area::new(LineOffset::new(start), LineCount::new(lines));
            let (first, end) = (u128::from(start) * 64, (u128::from(start) + u128::from(lines)) * 64);
            let inside = u128::from(at) >= first
                && u128::from(at) + u128::from(bytes) <= end
                && u128::from(at) < end;
            prop_assert_eq!(area.contains(ByteOffset::new(at), bytes), inside);
        }

        #[test]
        fn overlaps_is_symmetric(a: (u64, u64), b: (u64, u64)) {
            let a = Area::new(LineOffset::new(a.0), LineCount::new(a.1));
            let b = Area::new(LineOffset::new(b.0), LineCount::new(b.1));
            prop_assert_eq!(a.overlaps(&b), b.overlaps(&a));
        }
    }
}
