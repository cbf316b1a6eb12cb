//! A file as it would be if it were opened: to see what the database makes of it, and leave it as it is.

use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{BackendError, StorageBackend};

const PAGE_BYTES: u64 = 4096;

/// A file that several have to do with.
#[derive(Debug)]
pub(super) struct Shared(pub(super) Arc<dyn StorageBackend>);

/// A file that is only read: what is written to it is kept here, and forgotten.
#[derive(Debug)]
pub(super) struct Tried {
    below: Arc<dyn StorageBackend>,
    written: Mutex<Written>,
}

#[derive(Debug)]
struct Written {
    bytes: u64,
    /// How much of the file below is still seen.
    bytes_below: u64,
    /// By number.
    pages: BTreeMap<u64, Vec<u8>>,
}

/// Locks are those of the file below.
macro_rules! lock_below {
    ($below:tt) => {
        fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
            self.$below.try_lock_range(start, end)
        }

        fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
            self.$below.try_lock_shared_range(start, end)
        }

        fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
            self.$below.lock_range(start, end)
        }

        fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
            self.$below.lock_shared_range(start, end)
        }

        fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
            self.$below.unlock_range(start, end)
        }

        fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
            self.$below.query_lock_range(start, end)
        }

        fn close(&self) -> io::Result<()> {
            self.$below.close()
        }
    };
}

impl StorageBackend for Shared {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }

    lock_below!(0);
}

impl Tried {
    pub(super) fn new(below: Arc<dyn StorageBackend>) -> io::Result<Self> {
        let bytes = below.len()?;
        let written = Mutex::new(Written { bytes, bytes_below: bytes, pages: BTreeMap::new() });
        Ok(Self { below, written })
    }

    fn written(&self) -> MutexGuard<'_, Written> {
        // Whoever panicked over it has done with it.
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Written {
    /// A page as it is now.
    fn page(&self, number: u64, below: &dyn StorageBackend) -> io::Result<Vec<u8>> {
        if let Some(page) = self.pages.get(&number) {
            return Ok(page.clone());
        }
        let start = number * PAGE_BYTES;
        let there = self.bytes_below.saturating_sub(start).min(PAGE_BYTES);
        let mut page = vec![0; length(there)?];
        if there > 0 {
            below.read(start, &mut page)?;
        }
        page.resize(length(PAGE_BYTES)?, 0);
        Ok(page)
    }
}

impl StorageBackend for Tried {
    fn len(&self) -> io::Result<u64> {
        Ok(self.written().bytes)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let written = self.written();
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > written.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut at = offset;
        let mut left = out;
        while !left.is_empty() {
            let page = written.page(at / PAGE_BYTES, &*self.below)?;
            let from = &page[length(at % PAGE_BYTES)?..];
            let (now, later) = left.split_at_mut(from.len().min(left.len()));
            now.copy_from_slice(&from[..now.len()]);
            at += now.len() as u64;
            left = later;
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut written = self.written();
        written.bytes = len;
        written.bytes_below = written.bytes_below.min(len);
        written.pages.retain(|number, _| number * PAGE_BYTES < len);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut written = self.written();
        let mut at = offset;
        let mut left = data;
        while !left.is_empty() {
            let mut page = written.page(at / PAGE_BYTES, &*self.below)?;
            let to = &mut page[length(at % PAGE_BYTES)?..];
            let (now, later) = left.split_at(to.len().min(left.len()));
            to[..now.len()].copy_from_slice(now);
            written.pages.insert(at / PAGE_BYTES, page);
            at += now.len() as u64;
            left = later;
        }
        Ok(())
    }

    lock_below!(below);
}

fn length(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(io::Error::other)
}
