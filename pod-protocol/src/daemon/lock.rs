//! Files that are locked while a daemon runs, so that it runs once.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Held until dropped, or until the process is gone. The file stays: removing it would let two processes lock two
/// files of the same name.
#[derive(Debug)]
pub struct LockFile {
    file: File,
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // Closing it is not enough: a child that another thread is just starting has the file too, until it executes its program. It is
        // closed all the same if this fails.
        let _ = flock(self.file.as_fd(), FlockOperation::Unlock);
    }
}

/// A lock that was not obtained.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Someone else has it.
    #[error("{} is locked by {holder}", path.display())]
    Held {
        /// Which file.
        path: PathBuf,
        /// Who says so in it, such as `process 1234`.
        holder: String,
    },
    /// The file cannot be used.
    #[error("cannot lock {}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl LockFile {
    /// Locks a file, which is created if it is missing, and writes our process id into it. Never waits.
    pub fn acquire(path: &Path) -> Result<Self, LockError> {
        let failed = |source: io::Error| LockError::Io { path: path.to_owned(), source };
        let mut file = open_lock(path).map_err(failed)?;
        match flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(LockError::Held { path: path.to_owned(), holder: holder(&mut file) });
            }
            Err(errno) => return Err(failed(errno.into())),
        }
        // For people and for messages only, the lock holds without it.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(Self { file })
    }
}

/// Opens a file that is to be locked, which is created if it is missing. Nobody but its owner can, from now on: whoever opens a file,
/// if only for reading, can lock it, and keep it locked for ever.
pub fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(false).read(true).write(true).mode(0o600).open(path)?;
    close_to_others(&file)?;
    Ok(file)
}

/// Takes from all but the owner of a file or directory what they may do with it.
pub fn close_to_others(file: &File) -> io::Result<()> {
    let mode = file.metadata()?.permissions().mode();
    if mode & OTHERS == 0 {
        return Ok(());
    }
    file.set_permissions(Permissions::from_mode(mode & 0o7777 & !OTHERS))
}

/// What the group and everybody else may do.
const OTHERS: u32 = 0o077;

fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.take(20).read_to_string(&mut text);
    match text.trim().parse::<u32>() {
        Ok(pid) if read.is_ok() => format!("process {pid}"),
        _ => "another process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_lock_is_refused_and_names_the_holder_until_the_first_is_dropped() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("h1-agent.lock");
        let first = LockFile::acquire(&path).expect("free");
        let refused = LockFile::acquire(&path).expect_err("held").to_string();
        assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
        drop(first);
        LockFile::acquire(&path).expect("free again");
    }

    #[test]
    fn a_child_that_is_being_started_keeps_nothing_locked() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("h1-agent.lock");
        let first = LockFile::acquire(&path).expect("free");
        let _of_the_child = first.file.try_clone().expect("another descriptor of the same open file");
        drop(first);
        LockFile::acquire(&path).expect("free again");
    }

    #[test]
    fn nobody_but_its_owner_can_open_a_lock_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let [new, old] = ["new.lock", "old.lock"].map(|name| directory.path().join(name));
        std::fs::write(&old, "").expect("written");
        std::fs::set_permissions(&old, Permissions::from_mode(0o644)).expect("its owner's");
        for path in [new, old] {
            let _lock = LockFile::acquire(&path).expect("free");
            let mode = std::fs::metadata(&path).expect("there").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", path.display());
        }
    }

    #[test]
    fn lock_in_missing_directory_is_an_error() {
        let refused = LockFile::acquire(Path::new("/nonexistent/x.lock")).expect_err("missing");
        assert!(matches!(refused, LockError::Io { .. }));
    }
}
