//! The pool as the kernel sees it: addresses for its system calls.
#![allow(unsafe_code, reason = "hands the pool's mapping to the kernel, which takes addresses")]

use cxl_pool::{Area, ByteOffset, LineCount, LineOffset, Pool};

/// The mapped pool, for drivers whose system calls read and write it.
pub(super) struct Window {
    base: *mut u8,
    bytes: u64,
    /// Keeps the mapping.
    _pool: Pool,
}

// SAFETY: the pointer is only ever handed to the kernel, never dereferenced, and the mapping it points into lives
// as long as the pool beside it, on whatever thread.
unsafe impl Send for Window {}

impl Window {
    pub(super) fn new(pool: &Pool) -> Self {
        let bytes = pool.superblock().size_bytes;
        let lines = LineCount::new(bytes / cxl_pool::LINE_BYTES as u64);
        let base = pool.pointer(Area::new(LineOffset::new(0), lines));
        Self { base, bytes, _pool: pool.clone() }
    }

    /// The address of a range. It must lie in the pool: whoever got it from a peer has checked it.
    pub(super) fn address(&self, at: ByteOffset, bytes: u64) -> *mut u8 {
        let end = at.get().checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "a range outside of the pool was not refused earlier"
        );
        let offset = usize::try_from(at.get()).expect("a mapped pool fits the address space");
        // SAFETY: the range was found to lie within the mapping that `base` begins.
        unsafe { self.base.add(offset) }
    }
}
