//! Where a ring lies in the pool.

use cxl_pool::{Area, ByteOffset, Generation, LINE_BYTES, LineCount, LineOffset, Memory};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::header;

/// A ring: the sender's line, the receiver's line, then the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RingPlacement {
    /// The sender's line.
    pub start: LineOffset,
    /// How many messages it holds: a power of two.
    pub slots: u32,
}

/// The lines before the slots.
const HEADER_LINES: u64 = 2;

/// One line of the smallest messages.
const SLOTS_LEAST: u32 = 4;
/// More slots than this the consumed count could not tell apart.
const SLOTS_MOST: u32 = 1 << 20;

/// A ring that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PlacementError {
    /// The number of slots.
    #[error("a ring of {slots} slots cannot be: it takes a power of two from {SLOTS_LEAST} to {SLOTS_MOST}")]
    Slots {
        /// How many it was to have.
        slots: u32,
    },
    /// The place.
    #[error("a ring at {ring} lies outside {area}, where it belongs")]
    Outside {
        /// The lines of the ring.
        ring: Area,
        /// Where it belongs.
        area: Area,
    },
}

impl RingPlacement {
    /// How many lines a ring of this many slots takes, of messages of this many words.
    pub const fn lines(slots: u32, words: usize) -> LineCount {
        LineCount::new(HEADER_LINES + LineCount::covering(slots as u64 * words as u64 * 8).get())
    }

    /// The largest ring of messages of this many words that fits an area; nothing if none does.
    pub fn from_area(area: Area, words: usize) -> Option<Self> {
        let slots = area.lines.get().checked_sub(HEADER_LINES)? * LINE_BYTES as u64 / (words as u64 * 8);
        let slots = 1 << slots.min(u64::from(SLOTS_MOST)).checked_ilog2()?;
        (slots >= SLOTS_LEAST).then_some(Self { start: area.start, slots })
    }

    /// The lines that the ring takes.
    pub const fn area(&self, words: usize) -> Area {
        Area::new(self.start, Self::lines(self.slots, words))
    }

    /// Whether the ring is one, and lies inside this area. To be asked before a placement that came from
    /// elsewhere is used: [`Sender::begin`](crate::Sender::begin) and [`Receiver::open`](crate::Receiver::open)
    /// panic on what this refuses.
    pub fn check(&self, words: usize, area: Area) -> Result<(), PlacementError> {
        if !self.slots.is_power_of_two() || !(SLOTS_LEAST..=SLOTS_MOST).contains(&self.slots) {
            return Err(PlacementError::Slots { slots: self.slots });
        }
        let ring = self.area(words);
        if !area.contains_area(&ring) {
            return Err(PlacementError::Outside { ring, area });
        }
        Ok(())
    }

    /// Makes the ring's header lines say nothing, whatever lay there. For whoever hands out the placement, before
    /// either side has it, and only then.
    pub fn clear<M: Memory>(&self, memory: &M) {
        let bytes = HEADER_LINES * LINE_BYTES as u64;
        memory.zero(self.start.bytes(), bytes);
        memory.flush(self.start.bytes(), bytes);
        memory.full_fence();
    }

    /// The generation that was begun here last, whether by this host or another one; 0 if none was, or if it is just being begun.
    pub fn generation<M: Memory>(&self, memory: &M) -> Generation {
        // It may lie in this host's cache, written by a process that has died.
        memory.flush(self.sender_line(), LINE_BYTES as u64);
        memory.full_fence();
        let said = memory.load(self.sender_line().saturating_add(header::GENERATION));
        // No other numbers are ever written.
        u32::try_from(said).map_or(Generation::new(0), Generation::new)
    }

    pub(crate) fn expect_valid<M: Memory>(&self, words: usize, memory: &M) {
        let pool = Area::new(LineOffset::new(0), LineCount::new(memory.size_bytes() / LINE_BYTES as u64));
        if let Err(error) = self.check(words, pool) {
            panic!("{error}: the caller did not check the placement");
        }
    }

    pub(crate) const fn sender_line(&self) -> ByteOffset {
        self.start.bytes()
    }

    pub(crate) const fn receiver_line(&self) -> ByteOffset {
        self.start.bytes().saturating_add(LINE_BYTES as u64)
    }

    pub(crate) const fn first_slot(&self) -> ByteOffset {
        self.start.bytes().saturating_add(HEADER_LINES * LINE_BYTES as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_have_the_sizes_of_the_paper() {
        assert_eq!(RingPlacement::lines(8192, 2).get(), 2 + 2048);
        assert_eq!(RingPlacement::lines(8192, 8).get(), 2 + 8192);
    }

    #[test]
    fn a_ring_made_from_an_area_fits_it() {
        for lines in 0..600 {
            let area = Area::new(LineOffset::new(5), LineCount::new(lines));
            for words in [2, 8] {
                match RingPlacement::from_area(area, words) {
                    Some(ring) => assert_eq!(ring.check(words, area), Ok(())),
                    None => assert!(lines < RingPlacement::lines(SLOTS_LEAST, words).get()),
                }
            }
        }
    }

    #[test]
    fn rings_that_cannot_be_are_refused() {
        let area = Area::new(LineOffset::new(0), LineCount::new(258));
        let ring = |start, slots| RingPlacement { start: LineOffset::new(start), slots }.check(8, area);
        assert_eq!(ring(0, 256), Ok(()));
        assert_eq!(ring(0, 255), Err(PlacementError::Slots { slots: 255 }));
        assert_eq!(ring(0, 0), Err(PlacementError::Slots { slots: 0 }));
        assert!(matches!(ring(1, 256), Err(PlacementError::Outside { .. })));
        assert!(matches!(ring(u64::MAX, 256), Err(PlacementError::Outside { .. })));
    }
}
