//! Which parts of a disk's data area have left this host's cache.

use cxl_pool::{Area, ByteOffset, Memory};

/// Remembers where this host's cache can hold no dirty line of the data area any more.
///
/// A buffer that the backend shall fill must not have any: evicted later, it would destroy the data. Each unit is
/// flushed before it is given away for the first time, for a predecessor on this host may have written to it. From then
/// on nothing here leaves a dirty line behind: data of writes is written back, and fenced, before the message that
/// announces it, and filled buffers are only read. What stays are clean copies, and these are invalidated when the buffer
/// comes back.
#[derive(Debug)]
pub(super) struct Flushed {
    start: u64,
    unit_bytes: u64,
    /// One bit per unit.
    units: Vec<u64>,
}

impl Flushed {
    pub(super) fn nothing_of(area: Area, unit_bytes: u32) -> Self {
        let unit_bytes = u64::from(unit_bytes);
        let words = usize::try_from(area.bytes().div_ceil(unit_bytes * 64)).expect("a pool is mapped");
        Self { start: area.start_byte().get(), unit_bytes, units: vec![0; words] }
    }

    /// Flushes what was not yet, of the units that these bytes of the area lie in; a fence has to follow.
    #[track_caller]
    pub(super) fn flush<M: Memory>(&mut self, memory: &M, at: ByteOffset, bytes: u64) {
        if M::COHERENT {
            return;
        }
        let from = at.get() - self.start;
        for unit in from / self.unit_bytes..(from + bytes).div_ceil(self.unit_bytes) {
            let Ok(word) = usize::try_from(unit / 64) else { return };
            let bit = 1 << (unit % 64);
            if self.units[word] & bit == 0 {
                self.units[word] |= bit;
                memory.flush(ByteOffset::new(self.start + unit * self.unit_bytes), self.unit_bytes);
            }
        }
    }
}
