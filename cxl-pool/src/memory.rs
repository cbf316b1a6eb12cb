//! The coherence interface: everything that may be done to shared lines.

use std::time::Duration;

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use crate::{ByteOffset, LINE_BYTES};

/// The words of a line.
pub const LINE_WORDS: usize = LINE_BYTES / 8;

/// How the words of a line tell that they are new: bits in some of its words, which are either all set or all clear. A word
/// that is zero altogether is not new in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineMark {
    /// Which bits of which words. There are some in the last word.
    pub bits: [u64; LINE_WORDS],
    /// Whether they are set when the words are new.
    pub set: bool,
}

impl LineMark {
    /// What a word becomes by being marked.
    #[inline]
    pub fn apply(&self, word: usize, value: u64) -> u64 {
        value & !self.bits[word] | if self.set { self.bits[word] } else { 0 }
    }

    /// Whether a word, by what it holds, is new. One without bits of the mark says nothing against it.
    #[inline]
    pub fn holds(&self, word: usize, value: u64) -> bool {
        self.bits[word] == 0 || value != 0 && self.apply(word, value) == value
    }
}

/// Access to the shared lines of a pool, as one host sees them through its own caches.
///
/// Another host sees what was written only once it was written back **or evicted, at any moment**; this
/// host sees what another one wrote only once it invalidated its copy, which a prefetcher may have
/// brought in **at any moment**. So:
///
/// * To publish: write, [`write_back`](Self::write_back), [`store_fence`](Self::store_fence), then write
///   and write back the message that announces it.
/// * To consume: [`invalidate`](Self::invalidate) **before** the first read, [`full_fence`](Self::full_fence), read.
/// * To give lines away for the other side to write: [`flush`](Self::flush) first, and invalidate when
///   they come back.
///
/// Cloning is cheap, though not free: clone when something is set up, not per message.
///
/// # Panics
///
/// Every method panics when what it is asked for does not lie inside the pool, and `load` and `store`
/// also when the offset is not a multiple of 8: that is a bug of the caller.
pub trait Memory: Clone + Send + Sync + 'static {
    /// Whether the hardware keeps hosts coherent. Then `write_back`, `invalidate`, `flush` and
    /// `prefetch` do nothing, and the fences order what the CPU may reorder.
    const COHERENT: bool;

    /// The size of the pool.
    fn size_bytes(&self) -> u64;

    /// Loads the 8 bytes at a multiple of 8, as little-endian number; later accesses of this host stay later.
    fn load(&self, at: ByteOffset) -> u64;

    /// Stores 8 bytes at a multiple of 8; earlier accesses of this host stay earlier. Never torn.
    fn store(&self, at: ByteOffset, value: u64);

    /// Loads `N` words of one line, at a multiple of their size, **the last one first**: if that is what
    /// [`store_words`](Self::store_words) put there, then the others are too, or newer.
    #[inline]
    fn load_words<const N: usize>(&self, at: ByteOffset) -> [u64; N] {
        let mut words = [0; N];
        for (word, value) in words.iter_mut().enumerate().rev() {
            *value = self.load(at.saturating_add(word as u64 * 8));
        }
        words
    }

    /// Stores `N` words to one line, at a multiple of their size, **the last one last**.
    #[inline]
    fn store_words<const N: usize>(&self, at: ByteOffset, words: [u64; N]) {
        for (word, value) in words.into_iter().enumerate() {
            self.store(at.saturating_add(word as u64 * 8), value);
        }
    }

    /// Stores whole lines, one after the other, and marks their words as new. A mark becomes visible **no earlier than
    /// the words before it**, back to the mark before. Until then a reader finds there what it found before, or the mark's
    /// opposite.
    #[inline]
    fn store_lines(&self, at: ByteOffset, lines: &[[u64; LINE_WORDS]], mark: &LineMark) {
        for (number, line) in lines.iter().enumerate() {
            let marked = std::array::from_fn(|word| mark.apply(word, line[word]));
            self.store_words::<LINE_WORDS>(at.saturating_add((number * LINE_BYTES) as u64), marked);
        }
    }

    /// Loads whole lines, one after the other, up to the first one with a word that is not marked as new, and says how many.
    /// In each line **a mark is loaded before the words before it**, back to the mark before, so that they are new too. The
    /// mark's bits are clear in what comes out; lines that were not loaded stay as they are.
    #[inline]
    fn load_lines(&self, at: ByteOffset, into: &mut [[u64; LINE_WORDS]], mark: &LineMark) -> usize {
        for (number, line) in into.iter_mut().enumerate() {
            let words = self.load_words::<LINE_WORDS>(at.saturating_add((number * LINE_BYTES) as u64));
            if !(0..LINE_WORDS).all(|word| mark.holds(word, words[word])) {
                return number;
            }
            *line = std::array::from_fn(|word| words[word] & !mark.bits[word]);
        }
        into.len()
    }

    /// Reads bytes.
    fn read(&self, at: ByteOffset, into: &mut [u8]);

    /// Writes bytes. Another host may see any 8-byte part of them before any other.
    fn write(&self, at: ByteOffset, from: &[u8]);

    /// Writes zeros.
    fn zero(&self, at: ByteOffset, bytes: u64);

    /// Copies from the pool to guest memory, as many bytes as `into` has.
    fn copy_to<B: BitmapSlice>(&self, at: ByteOffset, into: &VolatileSlice<'_, B>);

    /// Copies from guest memory to the pool, as many bytes as `from` has.
    fn copy_from<B: BitmapSlice>(&self, at: ByteOffset, from: &VolatileSlice<'_, B>);

    /// Copies from guest memory to the pool past the cache: this host will not read it again. Needs a `store_fence` before the
    /// message that announces it, but no `write_back`.
    #[inline]
    fn stream_from<B: BitmapSlice>(&self, at: ByteOffset, from: &VolatileSlice<'_, B>) {
        self.copy_from(at, from);
        self.write_back(at, from.len() as u64);
    }

    /// Writes bytes past the cache unless all hosts are coherent: this host will not read them again. Needs a
    /// `store_fence` before the message that announces them, but no `write_back`.
    fn write_streaming(&self, at: ByteOffset, from: &[u8]);

    /// Writes the touched lines back if they are dirty; they may stay in the cache.
    fn write_back(&self, at: ByteOffset, bytes: u64);

    /// Drops this host's copy of the touched lines, so that a later load fetches them. Takes effect at
    /// any time up to the next `full_fence`. What this host wrote to them and did not write back is
    /// written back, which is never what a reader wants: use [`flush`](Self::flush) on one's own lines.
    fn invalidate(&self, at: ByteOffset, bytes: u64);

    /// Writes the touched lines back and drops them, before they are given away.
    fn flush(&self, at: ByteOffset, bytes: u64);

    /// Asks for a line to be brought into the cache.
    fn prefetch(&self, at: ByteOffset);

    /// Asks for lines of this host's to be brought into the cache for being written. Whoever else reads them just now has
    /// to fetch them again.
    #[inline]
    fn prefetch_to_write(&self, at: ByteOffset, bytes: u64) {
        let _ = (at, bytes);
    }

    /// On coherent memory: lets go of lines that were read, and will be written by another host before they are read again, so that it
    /// need not take them away first. Nothing but speed depends on it.
    #[inline]
    fn let_go(&self, at: ByteOffset, bytes: u64) {
        let _ = (at, bytes);
    }

    /// On coherent memory: writes lines back that another host will read, so that it need not fetch them out of this host's cache.
    /// Nothing but speed depends on it.
    #[inline]
    fn pass_on(&self, at: ByteOffset, bytes: u64) {
        let _ = (at, bytes);
    }

    /// How long a load of the word at a multiple of 8 takes that has to fetch its line, whether hosts are coherent or not: this host's copy is thrown out of all its
    /// caches first, and written back if it is dirty. Nothing where that cannot be told.
    fn time_load(&self, at: ByteOffset) -> Option<Duration> {
        let _ = at;
        None
    }

    /// Orders earlier stores and write-backs before later ones.
    fn store_fence(&self);

    /// Orders everything earlier, invalidates included, before everything later.
    fn full_fence(&self);
}
