//! Buffers of an instance's area in the pool.

use cxl_pool::{Area, ByteOffset};

/// A run of bytes of a [`BufferArea`], whole units long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    start: ByteOffset,
    bytes: u32,
}

impl Buffer {
    /// Where in the pool it begins.
    pub fn start(&self) -> ByteOffset {
        self.start
    }

    /// How long it is: a multiple of the area's unit, at least what was asked for.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }
}

/// Hands out contiguous runs of units of a leased area.
///
/// A bitmap, searched from the lowest place that was given back since: buffers are short-lived and of like sizes, so the search
/// mostly succeeds at once, and the same few are used again and again, which stay in caches that all of the area does not fit
/// into. Nothing is allocated after [`BufferArea::new`].
#[derive(Debug)]
pub struct BufferArea {
    area: Area,
    unit_bytes: u32,
    units: u64,
    /// One bit per unit; set: in use. Bits beyond `units` are set, so that no run reaches them.
    used: Vec<u64>,
    next: u64,
    free: u64,
}

impl BufferArea {
    /// An allocator over `area` with units of `unit_bytes`, a power of two and at least one cache line: only whole
    /// lines change hands.
    pub fn new(area: Area, unit_bytes: u32) -> Self {
        assert!(unit_bytes.is_power_of_two(), "units of a buffer area are powers of two");
        assert!(unit_bytes as usize >= cxl_pool::LINE_BYTES, "only whole lines change hands");
        let units = area.bytes() / u64::from(unit_bytes);
        let words =
            usize::try_from(units.div_ceil(64)).expect("a pool is mapped, so its units fit in memory");
        let mut used = vec![0; words];
        if let (Some(last), rest) = (used.last_mut(), units % 64)
            && rest != 0
        {
            *last = u64::MAX << rest;
        }
        Self { area, unit_bytes, units, used, next: 0, free: units }
    }

    /// The area it hands out.
    pub fn area(&self) -> Area {
        self.area
    }

    /// Bytes that are not handed out; a run of that length need not exist.
    pub fn free_bytes(&self) -> u64 {
        self.free * u64::from(self.unit_bytes)
    }

    /// All bytes that can ever be handed out at once.
    pub fn total_bytes(&self) -> u64 {
        self.units * u64::from(self.unit_bytes)
    }

    /// A contiguous buffer of at least `bytes`, or nothing when no run is long enough.
    pub fn alloc(&mut self, bytes: u32) -> Option<Buffer> {
        let wanted = u64::from(bytes.div_ceil(self.unit_bytes).max(1));
        if wanted > self.free {
            return None;
        }
        let first = self.find(self.next, self.units, wanted).or_else(|| {
            // A run may begin before `next` and reach over it.
            let end = (self.next + wanted - 1).min(self.units);
            self.find(0, end, wanted)
        })?;
        self.mark(first, wanted, true);
        self.free -= wanted;
        self.next = if first + wanted == self.units { 0 } else { first + wanted };
        let start = ByteOffset::new(self.start() + first * u64::from(self.unit_bytes));
        // `wanted` came from a u32 count of bytes, rounded up to the unit: it fits unless the request was within a
        // unit of 4 GiB, which no area of an instance holds as one run of u32 length.
        let bytes = u32::try_from(wanted * u64::from(self.unit_bytes)).ok()?;
        Some(Buffer { start, bytes })
    }

    /// Takes a buffer back. It must have come from this area and not have been given back before.
    pub fn free(&mut self, buffer: Buffer) {
        let first = (buffer.start.get() - self.start()) / u64::from(self.unit_bytes);
        let units = u64::from(buffer.bytes / self.unit_bytes);
        debug_assert!(first + units <= self.units, "a buffer of another area");
        debug_assert!((first..first + units).all(|unit| self.is_used(unit)), "a buffer was given back twice");
        self.mark(first, units, false);
        self.free += units;
        self.next = self.next.min(first);
    }

    fn start(&self) -> u64 {
        self.area.start.bytes().get()
    }

    fn is_used(&self, unit: u64) -> bool {
        self.used[word(unit)] & bit(unit) != 0
    }

    /// The first free run of `wanted` units that begins at or after `from` and ends at or before `end`.
    fn find(&self, from: u64, end: u64, wanted: u64) -> Option<u64> {
        let mut first = from;
        let mut unit = from;
        while first + wanted <= end {
            if unit.is_multiple_of(64) && self.used[word(unit)] == u64::MAX {
                unit += 64;
                first = unit;
                continue;
            }
            if self.is_used(unit) {
                first = unit + 1;
            } else if unit + 1 - first == wanted {
                return Some(first);
            }
            unit += 1;
        }
        None
    }

    fn mark(&mut self, first: u64, units: u64, used: bool) {
        for unit in first..first + units {
            if used {
                self.used[word(unit)] |= bit(unit);
            } else {
                self.used[word(unit)] &= !bit(unit);
            }
        }
    }
}

#[allow(clippy::cast_possible_truncation)] // below the bitmap's length, which is a usize
fn word(unit: u64) -> usize {
    (unit / 64) as usize
}

fn bit(unit: u64) -> u64 {
    1 << (unit % 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cxl_pool::{LineCount, LineOffset};
    use proptest::prelude::*;

    fn area(lines: u64) -> Area {
        Area { start: LineOffset::new(128), lines: LineCount::new(lines) }
    }

    #[test]
    fn runs_out_and_recovers() {
        let mut buffers = BufferArea::new(area(64 * 8), 4096);
        assert_eq!(buffers.total_bytes(), 8 * 4096);
        let all: Vec<_> = (0..8).map(|_| buffers.alloc(4096).unwrap()).collect();
        assert_eq!(buffers.alloc(1), None);
        buffers.free(all[3]);
        buffers.free(all[4]);
        assert_eq!(buffers.alloc(3 * 4096), None);
        let pair = buffers.alloc(4097).unwrap();
        assert_eq!(pair.start(), all[3].start());
        assert_eq!(pair.bytes(), 8192);
    }

    #[test]
    fn a_run_is_found_across_the_place_of_the_last_allocation() {
        let mut buffers = BufferArea::new(area(64 * 8), 4096);
        let first = buffers.alloc(6 * 4096).unwrap();
        buffers.free(first);
        assert!(buffers.alloc(7 * 4096).is_some());
    }

    #[test]
    fn what_was_given_back_is_used_again_first() {
        let mut buffers = BufferArea::new(area(64 * 64), 4096);
        let [first, second] = [(); 2].map(|()| buffers.alloc(8192).unwrap());
        for _ in 0..100 {
            buffers.free(first);
            assert_eq!(buffers.alloc(8192), Some(first));
        }
        buffers.free(second);
        buffers.free(first);
        let whole = buffers.alloc(4 * 4096).unwrap();
        assert_eq!(whole.start(), first.start());
    }

    proptest! {
        #[test]
        fn buffers_never_overlap_and_stay_inside(steps in prop::collection::vec((any::<bool>(), 1u32..40_000, any::<prop::sample::Index>()), 1..300)) {
            let whole = area(64 * 100 + 17);
            let mut buffers = BufferArea::new(whole, 4096);
            let mut held: Vec<Buffer> = Vec::new();
            for (give_back, bytes, which) in steps {
                if give_back && !held.is_empty() {
                    let buffer = held.swap_remove(which.index(held.len()));
                    buffers.free(buffer);
                } else if let Some(buffer) = buffers.alloc(bytes) {
                    prop_assert!(buffer.bytes() >= bytes);
                    prop_assert!(whole.contains(buffer.start(), u64::from(buffer.bytes())));
                    for other in &held {
                        let (a, b) = (buffer.start().get(), other.start().get());
                        prop_assert!(a + u64::from(buffer.bytes()) <= b || b + u64::from(other.bytes()) <= a);
                    }
                    held.push(buffer);
                }
                let used: u64 = held.iter().map(|buffer| u64::from(buffer.bytes())).sum();
                prop_assert_eq!(buffers.free_bytes() + used, buffers.total_bytes());
            }
        }
    }
}
