//! A pool's file or device, mapped into this process.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::ptr::{self, NonNull};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags};

use crate::PoolError;

/// A shared mapping of a whole pool. It lies at one place until it is dropped.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    file: File,
}

// SAFETY: the mapping is plain memory that belongs to no thread. It is unmapped only when the last owner
// drops it, and everything that reads or writes it expects others to do so at the same time.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(file: File, path: &Path, bytes: u64) -> Result<Self, PoolError> {
        let map = || -> io::Result<Self> {
            let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
            // SAFETY: a new mapping, at an address that the kernel chooses, overlaps nothing.
            let base = unsafe {
                rustix::mm::mmap(
                    ptr::null_mut(),
                    bytes,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    &file,
                    0,
                )?
            };
            let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
            Ok(Self { base, bytes, file })
        };
        map().map_err(|source| PoolError::Io { operation: "map", path: path.to_owned(), source })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

/// Takes all of a file's memory, so that no write to its mapping finds that there is none left (SIGBUS). A file system that cannot, has no say
/// in when it is taken.
pub(crate) fn reserve(file: &File, bytes: u64) -> rustix::io::Result<()> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Err(Errno::OPNOTSUPP) => Ok(()),
        done => done,
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, and nobody holds a clone of its owner any more.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(result.is_ok(), "munmap of a whole mapping fails only on a wrong address");
    }
}

/// What a pool can lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// A regular file on tmpfs or hugetlbfs.
    File,
    /// A DAX character device.
    Device,
}

impl Backing {
    pub(crate) fn of(path: &Path, metadata: &Metadata) -> Result<Self, PoolError> {
        if metadata.file_type().is_file() {
            Ok(Self::File)
        } else if metadata.file_type().is_char_device() && dax_size_bytes(metadata.rdev()).is_some() {
            Ok(Self::Device)
        } else {
            Err(PoolError::UnsupportedFile { path: path.to_owned() })
        }
    }

    /// How many bytes there are to map.
    pub(crate) fn size_bytes(self, file: &File, path: &Path) -> Result<u64, PoolError> {
        let metadata = file.metadata().map_err(|source| PoolError::Io {
            operation: "look at",
            path: path.to_owned(),
            source,
        })?;
        match self {
            Self::File => Ok(metadata.len()),
            Self::Device => dax_size_bytes(metadata.rdev())
                .ok_or_else(|| PoolError::UnsupportedFile { path: path.to_owned() }),
        }
    }
}

/// The size of a DAX character device, which its file's metadata does not say; nothing if it is another kind
/// of device.
fn dax_size_bytes(device: u64) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let directory = format!("/sys/dev/char/{major}:{minor}");
    let subsystem = std::fs::read_link(format!("{directory}/subsystem")).ok()?;
    if subsystem.file_name()? != "dax" {
        return None;
    }
    std::fs::read_to_string(format!("{directory}/size")).ok()?.trim().parse().ok()
}
