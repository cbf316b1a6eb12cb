//! The pages of a guest's memory that were written while its VMM moves it to another host: vhost-user's dirty log.
//!
//! The VMM copies the guest's memory while the guest runs, and copies again what changed meanwhile. What the guest's
//! processors write it sees by itself; what a device writes it learns from this bitmap, which it shares with us: one bit
//! for each page of 4 KiB from guest address 0 on, the lowest bit of each byte first. It takes bits off with one atomic
//! exchange and then reads the page, so a bit is set **after** the page was written, and atomically.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use thiserror::Error;
use vm_memory::{FileOffset, GuestAddress, MmapRegion, VolatileMemory};

use crate::chain::Segment;
use crate::memory::file_holds;

/// Bytes of a page, whatever size the guest's own pages have.
pub const LOG_PAGE_BYTES: u64 = 4096;

/// A dirty log that cannot be used.
#[derive(Debug, Error)]
pub enum DirtyLogError {
    /// Touching it would kill us.
    #[error("a dirty log of {bytes} bytes reaches beyond the end of its file")]
    BeyondFile {
        /// Its length.
        bytes: u64,
    },
    /// mmap refused it.
    #[error("cannot map a dirty log of {bytes} bytes")]
    Map {
        /// Its length.
        bytes: u64,
        /// Why.
        source: vm_memory::mmap::MmapRegionError,
    },
    /// A write there would be lost.
    #[error("a dirty log for {covers:#x} bytes of guest memory, which reaches up to {end:#x}")]
    TooShort {
        /// What it has bits for.
        covers: u64,
        /// Where the guest's memory ends.
        end: u64,
    },
}

/// The bitmap that the VMM shares. Cloning is cheap; the mapping lives as long as a clone of it.
#[derive(Debug, Clone)]
pub struct DirtyLog(Arc<MmapRegion<()>>);

impl DirtyLog {
    /// Maps `bytes` bytes of a file as a log.
    pub fn map(file: File, offset: u64, bytes: u64) -> Result<Self, DirtyLogError> {
        if !file_holds(&file, offset, bytes) {
            return Err(DirtyLogError::BeyondFile { bytes });
        }
        let size = usize::try_from(bytes).map_err(|_| DirtyLogError::BeyondFile { bytes })?;
        MmapRegion::from_file(FileOffset::new(file, offset), size)
            .map(|region| Self(Arc::new(region)))
            .map_err(|source| DirtyLogError::Map { bytes, source })
    }

    /// Up to which guest address it has bits.
    pub fn covers(&self) -> u64 {
        (self.0.size() as u64).saturating_mul(8 * LOG_PAGE_BYTES)
    }

    /// Whether it is the same mapping.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Notes that `bytes` bytes from `at` were written. What lies beyond the log is no guest memory: a log that is shorter
    /// than the guest's memory is not accepted.
    pub fn mark(&self, at: GuestAddress, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let last = at.0.saturating_add(bytes - 1) / LOG_PAGE_BYTES;
        let mut page = at.0 / LOG_PAGE_BYTES;
        while page <= last {
            // All pages whose bits are in one byte.
            let end = last.min(page | 7);
            let mask = (0xff_u8 << (page % 8)) & (0xff_u8 >> (7 - end % 8));
            let Some(byte) =
                usize::try_from(page / 8).ok().and_then(|byte| self.0.get_atomic_ref::<AtomicU8>(byte).ok())
            else {
                return;
            };
            // Also if it seems to be set: the VMM may be taking it off, and has to see the page as it is now.
            byte.fetch_or(mask, Ordering::SeqCst);
            page = end + 1;
        }
    }

    /// Takes over what another log says, which says nothing from then on. A page too many costs the VMM a page.
    pub fn absorb(&self, other: &Self) {
        for at in 0..self.0.size().min(other.0.size()) {
            let bytes = (self.0.get_atomic_ref::<AtomicU8>(at), other.0.get_atomic_ref::<AtomicU8>(at));
            if let (Ok(ours), Ok(theirs)) = bytes
                && theirs.load(Ordering::SeqCst) != 0
            {
                ours.fetch_or(theirs.swap(0, Ordering::SeqCst), Ordering::SeqCst);
            }
        }
    }

    /// Notes that the first `bytes` bytes of these segments were written.
    pub fn mark_segments(&self, segments: &[Segment], bytes: u64) {
        let mut left = bytes;
        for segment in segments {
            let piece = left.min(u64::from(segment.bytes));
            self.mark(segment.address, piece);
            left -= piece;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use proptest::prelude::*;

    use super::*;

    fn log(bytes: u64) -> (DirtyLog, File) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        (DirtyLog::map(file.try_clone().unwrap(), 0, bytes).unwrap(), file)
    }

    fn pages(file: &File, bytes: u64) -> Vec<u64> {
        let mut bits = vec![0; usize::try_from(bytes).unwrap()];
        file.read_exact_at(&mut bits, 0).unwrap();
        (0..bytes * 8)
            .filter(|page| bits[usize::try_from(page / 8).unwrap()] >> (page % 8) & 1 == 1)
            .collect()
    }

    proptest! {
        #[test]
        fn exactly_the_pages_that_were_written_are_marked(at in 0_u64..1 << 20, bytes in 0_u64..1 << 18) {
            let (log, file) = log(64);
            log.mark(GuestAddress(at), bytes);
            let expected: Vec<u64> =
                (0..512).filter(|page| page * 4096 < at + bytes && at < (page + 1) * 4096 && bytes > 0).collect();
            prop_assert_eq!(pages(&file, 64), expected);
        }
    }

    #[test]
    fn what_lies_beyond_the_log_is_ignored() {
        let (log, file) = log(1);
        log.mark(GuestAddress(7 * LOG_PAGE_BYTES), u64::MAX);
        log.mark(GuestAddress(u64::MAX), 1);
        assert_eq!(pages(&file, 1), [7]);
        assert_eq!(log.covers(), 8 * LOG_PAGE_BYTES);
    }

    #[test]
    fn a_log_beyond_its_file_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let map = |offset, bytes| DirtyLog::map(file.try_clone().unwrap(), offset, bytes);
        assert!(matches!(map(0, 4097), Err(DirtyLogError::BeyondFile { bytes: 4097 })));
        assert!(matches!(map(u64::MAX, 1), Err(DirtyLogError::BeyondFile { bytes: 1 })));
        assert!(matches!(map(1, 4095), Err(DirtyLogError::Map { .. })), "not at the beginning of a page");
        assert!(map(0, 4096).is_ok());
    }
}
