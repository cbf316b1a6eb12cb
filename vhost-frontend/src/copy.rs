//! Copies between a descriptor chain and the pool or our own memory.
//!
//! Guest memory is shared with a running guest, so it is never looked at through references: all copies go through
//! volatile slices.

use cxl_pool::{ByteOffset, LINE_BYTES, Memory};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

use crate::chain::Segment;
use crate::dirty_log::DirtyLog;
use crate::memory::GuestMemory;
use crate::view::GuestView;

/// A copy that could not be made. What it copied before that stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CopyError {
    /// The chain has no more bytes.
    #[error("the chain ends {missing} bytes too early")]
    Short {
        /// As many bytes more were asked for.
        missing: u64,
    },
    /// The VMM took the memory away since the chain was walked.
    #[error("{0:#x} is no guest memory any more")]
    NotMemory(u64),
}

/// A position in a list of segments.
#[derive(Debug, Clone)]
struct Cursor<'a> {
    view: GuestView<'a>,
    segments: &'a [Segment],
    /// Bytes of the first segment that are behind us.
    consumed: u32,
    left: u64,
}

impl<'a> Cursor<'a> {
    fn new(memory: &'a GuestMemoryMmap<()>, segments: &'a [Segment]) -> Self {
        let left = segments.iter().map(|segment| u64::from(segment.bytes)).sum();
        Self { view: GuestView::new(memory), segments, consumed: 0, left }
    }

    /// Passes over `bytes`, handing each piece of guest memory, and its distance from the beginning, to `each`.
    fn advance(
        &mut self,
        bytes: u64,
        mut each: impl FnMut(u64, &VolatileSlice<'_>),
    ) -> Result<(), CopyError> {
        if bytes > self.left {
            return Err(CopyError::Short { missing: bytes - self.left });
        }
        let mut done = 0;
        while done < bytes {
            let segment = self.segments[0];
            let piece = self.piece(bytes - done);
            let at = GuestAddress(segment.address.0 + u64::from(self.consumed));
            if let Some(slice) = self.view.slice(at, piece as usize) {
                each(done, &slice);
            } else {
                // In several regions, or in none.
                let mut from = done;
                for slice in self.view.memory().get_slices(at, piece as usize) {
                    let slice = slice.map_err(|_| CopyError::NotMemory(at.0))?;
                    each(from, &slice);
                    from += slice.len() as u64;
                }
            }
            self.skip_within(piece);
            done += u64::from(piece);
        }
        Ok(())
    }

    /// As much of the first segment as is left, but at most `bytes`.
    #[allow(clippy::cast_possible_truncation)] // a minimum of something and a u32
    fn piece(&self, bytes: u64) -> u32 {
        u64::from(self.segments[0].bytes - self.consumed).min(bytes) as u32
    }

    fn skip(&mut self, bytes: u64) -> Result<(), CopyError> {
        if bytes > self.left {
            return Err(CopyError::Short { missing: bytes - self.left });
        }
        let mut done = 0;
        while done < bytes {
            let piece = self.piece(bytes - done);
            self.skip_within(piece);
            done += u64::from(piece);
        }
        Ok(())
    }

    /// Logs the next `bytes` bytes, as far as there are.
    fn mark(mut self, log: &DirtyLog, bytes: u64) {
        let bytes = bytes.min(self.left);
        let mut done = 0;
        while done < bytes {
            let piece = self.piece(bytes - done);
            log.mark(GuestAddress(self.segments[0].address.0 + u64::from(self.consumed)), u64::from(piece));
            self.skip_within(piece);
            done += u64::from(piece);
        }
    }

    fn skip_within(&mut self, piece: u32) {
        self.consumed += piece;
        self.left -= u64::from(piece);
        if self.consumed == self.segments[0].bytes {
            self.segments = &self.segments[1..];
            self.consumed = 0;
        }
    }
}

/// What is as long as this goes past the cache on coherent hosts too: who reads it is another host, for which fetching what this
/// one has modified takes longer than fetching what memory has.
const PAST_THE_CACHE_BYTES: u64 = 32 << 10;

const PAGE_BYTES: u64 = 4096;

/// Reads what the guest lets the device read.
#[derive(Debug, Clone)]
pub struct ChainReader<'a>(Cursor<'a>);

impl<'a> ChainReader<'a> {
    /// Begins at the first byte of `segments`.
    pub fn new(memory: &'a GuestMemoryMmap<()>, segments: &'a [Segment]) -> Self {
        Self(Cursor::new(memory, segments))
    }

    /// Bytes that are left.
    pub fn left(&self) -> u64 {
        self.0.left
    }

    /// Passes over `bytes`.
    pub fn skip(&mut self, bytes: u64) -> Result<(), CopyError> {
        self.0.skip(bytes)
    }

    /// Fills `into`.
    pub fn read(&mut self, into: &mut [u8]) -> Result<(), CopyError> {
        let mut rest = &mut *into;
        self.0.advance(rest.len() as u64, |_, slice| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(slice.len());
            // Both are as long as each other.
            let _ = slice.copy_to(now);
            rest = later;
        })
    }

    /// Copies `bytes` to the pool. They are in this host's cache afterwards: write them back before announcing them.
    pub fn copy_to_pool<M: Memory>(&mut self, pool: &M, at: ByteOffset, bytes: u64) -> Result<(), CopyError> {
        self.0.advance(bytes, |from, slice| pool.copy_from(ByteOffset::new(at.get() + from), slice))
    }

    /// Copies `bytes` to the pool and out of this host's cache, unless all hosts are coherent and it is few of them. A store fence
    /// has to follow before they are announced.
    #[track_caller]
    pub fn stream_to_pool<M: Memory>(
        &mut self,
        pool: &M,
        at: ByteOffset,
        bytes: u64,
    ) -> Result<(), CopyError> {
        if M::COHERENT && bytes < PAST_THE_CACHE_BYTES {
            return self.copy_to_pool(pool, at, bytes);
        }
        self.0.advance(bytes, |from, slice| pool.stream_from(ByteOffset::new(at.get() + from), slice))
    }
}

/// Writes what the guest lets the device write, and logs it where the guest's memory is logged.
#[derive(Debug, Clone)]
pub struct ChainWriter<'a> {
    cursor: Cursor<'a>,
    log: Option<&'a DirtyLog>,
}

impl<'a> ChainWriter<'a> {
    /// Begins at the first byte of `segments`.
    pub fn new(memory: &'a GuestMemory, segments: &'a [Segment]) -> Self {
        Self { cursor: Cursor::new(memory, segments), log: memory.log() }
    }

    /// Passes over `bytes`, letting `each` write to the pieces.
    #[inline]
    fn advance(&mut self, bytes: u64, each: impl FnMut(u64, &VolatileSlice<'_>)) -> Result<(), CopyError> {
        let Some(log) = self.log else { return self.cursor.advance(bytes, each) };
        let before = self.cursor.clone();
        let advanced = self.cursor.advance(bytes, each);
        // Also what was written before it failed.
        before.mark(log, bytes);
        advanced
    }

    /// Bytes that are left.
    pub fn left(&self) -> u64 {
        self.cursor.left
    }

    /// Passes over `bytes`, leaving them as they are.
    pub fn skip(&mut self, bytes: u64) -> Result<(), CopyError> {
        self.cursor.skip(bytes)
    }

    /// Writes all of `from`.
    pub fn write(&mut self, from: &[u8]) -> Result<(), CopyError> {
        let mut rest = from;
        self.advance(from.len() as u64, |_, slice| {
            let (now, later) = rest.split_at(slice.len());
            // Both are as long as each other.
            let _ = slice.write_slice(now, 0);
            rest = later;
        })
    }

    /// Writes `bytes` zeros.
    pub fn zero(&mut self, bytes: u64) -> Result<(), CopyError> {
        const ZEROS: [u8; 4096] = [0; 4096];
        self.advance(bytes, |_, slice| {
            let mut at = 0;
            while at < slice.len() {
                let piece = ZEROS.len().min(slice.len() - at);
                // Inside the slice by construction.
                let _ = slice.write_slice(&ZEROS[..piece], at);
                at += piece;
            }
        })
    }

    /// Copies `bytes` from the pool. Invalidate them first.
    pub fn copy_from_pool<M: Memory>(
        &mut self,
        pool: &M,
        at: ByteOffset,
        bytes: u64,
    ) -> Result<(), CopyError> {
        if M::COHERENT || bytes <= PAGE_BYTES {
            return self.advance(bytes, |from, slice| pool.copy_to(ByteOffset::new(at.get() + from), slice));
        }
        let end = at.get() + bytes;
        self.advance(bytes, |from, slice| copy_by_pages(pool, at.get() + from, end, slice))
    }
}

/// Copies from a place in the pool, which no cache of this host holds, and has each page fetched while the one before is copied, up to
/// `end`: processors do so by themselves, but not across the end of a page.
fn copy_by_pages<M: Memory>(pool: &M, from: u64, end: u64, into: &VolatileSlice<'_>) {
    let mut done = 0;
    while let Ok(left) = into.offset(done)
        && !left.is_empty()
    {
        let at = from + done as u64;
        let next =
            at.next_multiple_of(PAGE_BYTES) + if at.is_multiple_of(PAGE_BYTES) { PAGE_BYTES } else { 0 };
        let part = left.len().min(usize::try_from(next - at).unwrap_or(usize::MAX));
        for line in (next..end.min(next + PAGE_BYTES)).step_by(LINE_BYTES) {
            pool.prefetch(ByteOffset::new(line));
        }
        // It is not longer than what is left.
        if let Ok(part) = left.subslice(0, part) {
            pool.copy_to(ByteOffset::new(at), &part);
        }
        done += part;
    }
}
