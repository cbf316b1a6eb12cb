//! The buffers of an instance's transmit area.

use cxl_pool::Area;
use vhost_frontend::{Buffer, BufferArea};

use crate::scattered;

/// The unit in which the area is handed out.
const UNIT_BYTES: u32 = 128;
/// Lengths that nearly all packets fit: acknowledgements and the like, other short ones, packets whose payload is elsewhere, and
/// frames of the usual MTU. The shortest ones lie close together: further apart they would share fewer sets of the caches.
const USUAL_BYTES: [u32; 4] = [128, 256, scattered::BUFFER_BYTES, 2048];

/// Hands out buffers of a transmit area. Those of usual lengths are kept when they come back, and the one that came
/// back last goes out first: it is the likeliest to be in the cache.
#[derive(Debug)]
pub(super) struct TransmitBuffers {
    area: BufferArea,
    kept: [Vec<Buffer>; USUAL_BYTES.len()],
    kept_bytes: u64,
}

impl TransmitBuffers {
    /// Buffers of `area`, of which at most `packets` are in use at a time.
    pub(super) fn new(area: Area, packets: usize) -> Self {
        let kept = USUAL_BYTES.map(|_| Vec::with_capacity(packets));
        Self { area: BufferArea::new(area, UNIT_BYTES), kept, kept_bytes: 0 }
    }

    /// Bytes that are not in use; a run of that length need not exist.
    pub(super) fn free_bytes(&self) -> u64 {
        self.area.free_bytes() + self.kept_bytes
    }

    /// A buffer of at least `bytes`, or nothing when no run is long enough.
    #[inline]
    pub(super) fn alloc(&mut self, bytes: u32) -> Option<Buffer> {
        if let Some(class) = USUAL_BYTES.iter().position(|usual| bytes <= *usual) {
            if let Some(buffer) = self.kept[class].pop() {
                self.kept_bytes -= u64::from(buffer.bytes());
                return Some(buffer);
            }
            if let Some(buffer) = self.area.alloc(USUAL_BYTES[class]) {
                return Some(buffer);
            }
        }
        self.area.alloc(bytes).or_else(|| {
            self.give_all_back();
            self.area.alloc(bytes)
        })
    }

    /// Takes a buffer back. It must have come from here and not have been given back before.
    #[inline]
    pub(super) fn free(&mut self, buffer: Buffer) {
        match USUAL_BYTES.iter().position(|usual| buffer.bytes() == *usual) {
            Some(class) if self.kept[class].len() < self.kept[class].capacity() => {
                self.kept[class].push(buffer);
                self.kept_bytes += u64::from(buffer.bytes());
            }
            _ => self.area.free(buffer),
        }
    }

    fn give_all_back(&mut self) {
        for buffer in self.kept.iter_mut().flat_map(|kept| kept.drain(..)) {
            self.area.free(buffer);
        }
        self.kept_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cxl_pool::{LineCount, LineOffset};
    use proptest::prelude::*;

    fn buffers() -> TransmitBuffers {
        TransmitBuffers::new(Area::new(LineOffset::new(64), LineCount::new(1024)), 32)
    }

    #[test]
    fn what_was_kept_makes_room_for_a_long_packet() {
        let mut buffers = buffers();
        let short: Vec<Buffer> = (0..32).filter_map(|_| buffers.alloc(2000)).collect();
        assert_eq!(buffers.free_bytes(), 0);
        assert_eq!(buffers.alloc(60), None);
        for buffer in short {
            buffers.free(buffer);
        }
        assert_eq!(buffers.free_bytes(), 1 << 16);
        assert!(buffers.alloc(1 << 16).is_some());
    }

    #[test]
    fn the_buffer_that_came_back_last_goes_out_first() {
        let mut buffers = buffers();
        let (first, second) = (buffers.alloc(76), buffers.alloc(76));
        buffers.free(second.expect("room"));
        buffers.free(first.expect("room"));
        assert_eq!(buffers.alloc(100), first);
        assert_eq!(buffers.alloc(128), second);
    }

    proptest! {
        #[test]
        fn buffers_never_overlap_and_none_is_lost(
            steps in prop::collection::vec((any::<bool>(), 1u32..9000, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut buffers = buffers();
            let mut held: Vec<Buffer> = Vec::new();
            for (give_back, bytes, which) in steps {
                if give_back && !held.is_empty() {
                    buffers.free(held.swap_remove(which.index(held.len())));
                } else if held.len() < 32 && let Some(buffer) = buffers.alloc(bytes) {
                    prop_assert!(buffer.bytes() >= bytes);
                    for other in &held {
                        let (a, b) = (buffer.start().get(), other.start().get());
                        prop_assert!(a + u64::from(buffer.bytes()) <= b || b + u64::from(other.bytes()) <= a);
                    }
                    held.push(buffer);
                }
                let used: u64 = held.iter().map(|buffer| u64::from(buffer.bytes())).sum();
                prop_assert_eq!(buffers.free_bytes() + used, 1 << 16);
            }
        }
    }
}
