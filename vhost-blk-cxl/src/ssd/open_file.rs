//! Finding, creating, locking and measuring the file of an SSD.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, StatxFlags};

use super::{Geometry, OpenError};

/// How long to wait for the lock, or the claim, of a predecessor whose requests the kernel is still finishing.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const RETRY_AFTER: Duration = Duration::from_millis(20);

const BLOCK_MIN: u32 = 512;
/// What every file system accepts that does not say what it needs.
const BLOCK_CAREFUL: u32 = 4096;

/// A file that is ours.
pub(super) struct OpenFile {
    /// Locked: the requests of a dead process hold the lock as well, so when we have it they have ended.
    pub(super) file: File,
    pub(super) geometry: Geometry,
    /// Past the page cache.
    pub(super) direct: bool,
}

/// Opens, or creates, and locks a file.
pub(super) fn open(ssd: &str, path: &Path, size_bytes: Option<u64>) -> Result<OpenFile, OpenError> {
    let shown = || path.display().to_string();
    let failed = |what| {
        move |source| OpenError::Io { ssd: ssd.to_owned(), what, path: path.display().to_string(), source }
    };
    let exclusive = match std::fs::metadata(path) {
        // The lock is one of this name for it only: whoever mounts it, or has a partition of it, asks for a claim.
        Ok(metadata) if metadata.file_type().is_block_device() => libc::O_EXCL,
        Ok(metadata) if metadata.is_file() => 0,
        Ok(_) => return Err(OpenError::NotADisk { ssd: ssd.to_owned(), path: shown() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if size_bytes.is_none() {
                return Err(OpenError::Missing { ssd: ssd.to_owned(), path: shown() });
            }
            create(path).map_err(failed("create"))?;
            0
        }
        Err(error) => return Err(failed("look at")(error)),
    };
    let (mut file, direct) = match read_write_at_last(path, libc::O_DIRECT | exclusive) {
        Ok(file) => (file, true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            (read_write(path, exclusive).map_err(failed("open"))?, false)
        }
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            return Err(OpenError::Claimed { ssd: ssd.to_owned(), path: shown() });
        }
        Err(error) => return Err(failed("open")(error)),
    };
    if !lock(&file).map_err(failed("lock"))? {
        return Err(OpenError::Locked { ssd: ssd.to_owned(), path: shown() });
    }
    let block_bytes = if direct { direct_block(&file) } else { BLOCK_MIN };
    let mut length = file.seek(SeekFrom::End(0)).map_err(failed("measure"))?;
    if let Some(size_bytes) = size_bytes
        && length == 0
    {
        // It was created now, or by somebody who did not come to this.
        file.set_len(size_bytes).and_then(|()| file.sync_all()).map_err(failed("set the size of"))?;
        length = size_bytes;
    }
    let size_bytes = length - length % u64::from(block_bytes);
    if size_bytes == 0 {
        return Err(OpenError::TooSmall {
            ssd: ssd.to_owned(),
            path: shown(),
            size_bytes: length,
            block_bytes,
        });
    }
    Ok(OpenFile { file, geometry: Geometry { size_bytes, block_bytes }, direct })
}

fn read_write(path: &Path, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

/// The same once a dead predecessor has it no longer, or after some time.
fn read_write_at_last(path: &Path, flags: i32) -> io::Result<File> {
    let began = Instant::now();
    loop {
        match read_write(path, flags) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && began.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(RETRY_AFTER);
            }
            opened => return opened,
        }
    }
}

/// Makes an empty file that outlives a power failure. It gets its size when it is locked.
fn create(path: &Path) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    match path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

fn lock(file: &File) -> io::Result<bool> {
    let began = Instant::now();
    loop {
        match rustix::fs::flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) if began.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(RETRY_AFTER);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// The alignment that direct I/O on this file needs.
fn direct_block(file: &File) -> u32 {
    let Ok(status) = rustix::fs::statx(file.as_fd(), "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return BLOCK_CAREFUL;
    };
    match status.stx_dio_offset_align {
        // Not said.
        0 => BLOCK_CAREFUL,
        align => align.next_power_of_two().max(BLOCK_MIN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_is_created_with_the_configured_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ssd.img");
        assert!(matches!(open("a", &path, None), Err(OpenError::Missing { .. })));
        assert!(!path.exists());
        let opened = open("a", &path, Some(1 << 20)).unwrap();
        assert_eq!(opened.geometry.size_bytes, 1 << 20);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
        drop(opened);
        // An existing file keeps its size, whatever the configuration says.
        assert_eq!(open("a", &path, Some(1 << 30)).unwrap().geometry.size_bytes, 1 << 20);
    }

    /// As after a crash in between. Without a size nobody says how large it shall be.
    #[test]
    fn a_file_that_was_created_and_has_no_size_yet_gets_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ssd.img");
        create(&path).unwrap();
        assert!(matches!(open("a", &path, None), Err(OpenError::TooSmall { .. })));
        assert_eq!(open("a", &path, Some(1 << 20)).unwrap().geometry.size_bytes, 1 << 20);
        assert_eq!(open("a", &path, None).unwrap().geometry.size_bytes, 1 << 20);
    }

    #[test]
    fn a_file_in_use_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ssd.img");
        let _first = open("a", &path, Some(1 << 20)).unwrap();
        assert!(matches!(open("b", &path, None), Err(OpenError::Locked { .. })));
    }

    #[test]
    fn what_is_no_disk_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(open("a", directory.path(), None), Err(OpenError::NotADisk { .. })));
        let empty = directory.path().join("empty");
        File::create(&empty).unwrap();
        assert!(matches!(open("a", &empty, None), Err(OpenError::TooSmall { .. })));
        let nowhere = directory.path().join("missing/ssd.img");
        assert!(matches!(open("a", &nowhere, Some(4096)), Err(OpenError::Io { .. })));
    }
}
