//! What tells that a file changed, so that it is read again.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// When a file was written and when anything else of it changed, how long it is, which it is, and who may use it: whoever was told to
/// have others not write to it changes nothing but its mode, within the tick of the clock even.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileStamp {
    written: (i64, i64),
    changed: (i64, i64),
    bytes: u64,
    number: u64,
    mode: u32,
}

impl FileStamp {
    /// Of a file as it is now.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let it = fs::metadata(path)?;
        Ok(Self {
            written: (it.mtime(), it.mtime_nsec()),
            changed: (it.ctime(), it.ctime_nsec()),
            bytes: it.len(),
            number: it.ino(),
            mode: it.mode(),
        })
    }
}
