//! Memory that counts the lines that cross the link.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cxl_pool::{ByteOffset, LINE_BYTES, Memory};
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

/// Lines so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    pub(super) fetched: u64,
    pub(super) written: u64,
}

/// What one part of a daemon moved, and which lines it would have to fetch.
pub(super) struct Counts {
    fetched: AtomicU64,
    written: AtomicU64,
    /// One bit per line: not in the cache. At first that is none: what a part looks at once does not count.
    absent: Box<[AtomicU64]>,
}

impl Counts {
    pub(super) fn new(pool_bytes: u64) -> Arc<Self> {
        let words = pool_bytes.div_ceil(64 * LINE_BYTES as u64);
        let absent = (0..words).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { fetched: AtomicU64::new(0), written: AtomicU64::new(0), absent })
    }

    pub(super) fn read(&self) -> Counted {
        Counted {
            fetched: self.fetched.load(Ordering::Relaxed),
            written: self.written.load(Ordering::Relaxed),
        }
    }

    fn each_line(at: ByteOffset, bytes: u64, mut run: impl FnMut(u64)) {
        if bytes > 0 {
            let last = at.saturating_add(bytes - 1).line().get();
            (at.line().get()..=last).for_each(&mut run);
        }
    }

    fn word(&self, line: u64) -> (&AtomicU64, u64) {
        // The memory below refuses what lies outside.
        let word = usize::try_from(line / 64).unwrap_or(usize::MAX).min(self.absent.len() - 1);
        (&self.absent[word], 1 << (line % 64))
    }

    fn touch(&self, at: ByteOffset, bytes: u64) {
        Self::each_line(at, bytes, |line| {
            let (word, bit) = self.word(line);
            if word.load(Ordering::Relaxed) & bit != 0 {
                word.fetch_and(!bit, Ordering::Relaxed);
                self.fetched.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    fn drop_lines(&self, at: ByteOffset, bytes: u64) {
        Self::each_line(at, bytes, |line| {
            let (word, bit) = self.word(line);
            word.fetch_or(bit, Ordering::Relaxed);
        });
    }

    fn write(&self, at: ByteOffset, bytes: u64) {
        Self::each_line(at, bytes, |_| {
            self.written.fetch_add(1, Ordering::Relaxed);
        });
    }
}

/// Memory that counts.
#[derive(Clone)]
pub(super) struct CountingMemory<M: Memory> {
    pub(super) memory: M,
    pub(super) counts: Arc<Counts>,
}

impl<M: Memory> Memory for CountingMemory<M> {
    const COHERENT: bool = M::COHERENT;

    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn load(&self, at: ByteOffset) -> u64 {
        self.counts.touch(at, 8);
        self.memory.load(at)
    }

    fn store(&self, at: ByteOffset, value: u64) {
        self.counts.touch(at, 8);
        self.memory.store(at, value);
    }

    fn load_words<const N: usize>(&self, at: ByteOffset) -> [u64; N] {
        self.counts.touch(at, N as u64 * 8);
        self.memory.load_words(at)
    }

    fn store_words<const N: usize>(&self, at: ByteOffset, words: [u64; N]) {
        self.counts.touch(at, N as u64 * 8);
        self.memory.store_words(at, words);
    }

    fn read(&self, at: ByteOffset, into: &mut [u8]) {
        self.counts.touch(at, into.len() as u64);
        self.memory.read(at, into);
    }

    fn write(&self, at: ByteOffset, from: &[u8]) {
        self.counts.touch(at, from.len() as u64);
        self.memory.write(at, from);
    }

    fn zero(&self, at: ByteOffset, bytes: u64) {
        self.counts.touch(at, bytes);
        self.memory.zero(at, bytes);
    }

    fn copy_to<B: BitmapSlice>(&self, at: ByteOffset, into: &VolatileSlice<'_, B>) {
        self.counts.touch(at, into.len() as u64);
        self.memory.copy_to(at, into);
    }

    fn copy_from<B: BitmapSlice>(&self, at: ByteOffset, from: &VolatileSlice<'_, B>) {
        self.counts.touch(at, from.len() as u64);
        self.memory.copy_from(at, from);
    }

    fn write_streaming(&self, at: ByteOffset, from: &[u8]) {
        self.counts.write(at, from.len() as u64);
        self.memory.write_streaming(at, from);
    }

    fn write_back(&self, at: ByteOffset, bytes: u64) {
        self.counts.write(at, bytes);
        self.memory.write_back(at, bytes);
    }

    fn invalidate(&self, at: ByteOffset, bytes: u64) {
        self.counts.drop_lines(at, bytes);
        self.memory.invalidate(at, bytes);
    }

    fn flush(&self, at: ByteOffset, bytes: u64) {
        self.counts.write(at, bytes);
        self.counts.drop_lines(at, bytes);
        self.memory.flush(at, bytes);
    }

    fn prefetch(&self, at: ByteOffset) {
        self.counts.touch(at, 1);
        self.memory.prefetch(at);
    }

    fn store_fence(&self) {
        self.memory.store_fence();
    }

    fn full_fence(&self) {
        self.memory.full_fence();
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::HostId;
    use cxl_pool::simulated::SimulatedPool;

    use super::*;

    #[test]
    fn a_line_is_fetched_once_after_each_invalidate() {
        let memory = CountingMemory {
            memory: SimulatedPool::new(1, 4096).host(HostId::new(1)),
            counts: Counts::new(4096),
        };
        let at = ByteOffset::new(64);
        memory.load(at);
        for _ in 0..3 {
            memory.invalidate(at, 64);
            memory.full_fence();
            memory.load(at);
            memory.load(at);
        }
        memory.write_back(at, 65);
        let counted = memory.counts.read();
        assert_eq!((counted.fetched, counted.written), (3, 2));
    }
}
