//! Areas that are a VM's memory on this host, for as long as its VMM lives.
//!
//! A VMM is no endpoint: it confirms nothing, and may be killed at any time. So an area that it uses is locked in the
//! pool's file by an open file description that the VMM inherits. The kernel keeps the lock while any process has that
//! description, and gives it back with the last one, however that ends. Whoever lets go of the area for its host looks first.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::process::Stdio;

use crate::{Area, Pool};

/// An area of the pool that is a VM's memory. Dropping it gives the area back, unless a process has inherited it.
#[derive(Debug)]
pub struct GuestLock {
    file: File,
}

impl GuestLock {
    /// Locks an area of the pool at this path. `WouldBlock` says that another VM's process has some of it.
    pub fn take(path: &Path, area: Area) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut lock = description_of(area)?;
        // SAFETY: the descriptor is open, and the kernel reads the structure, which outlives the call.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) };
        if result == 0 { Ok(Self { file }) } else { Err(io::Error::last_os_error()) }
    }

    /// The lock as the standard input of a process, which then has it too.
    pub fn to_stdio(&self) -> io::Result<Stdio> {
        self.file.try_clone().map(Stdio::from)
    }
}

impl Pool {
    /// Whether a process on this host has some of an area as a VM's memory ([`GuestLock`]).
    pub fn is_guest_locked(&self, area: Area) -> io::Result<bool> {
        is_locked(self.fd(), area)
    }
}

fn is_locked(file: BorrowedFd<'_>, area: Area) -> io::Result<bool> {
    let mut lock = description_of(area)?;
    // SAFETY: the descriptor is borrowed, so open, and the kernel writes a structure of ours.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result == 0 { Ok(i32::from(lock.l_type) != libc::F_UNLCK) } else { Err(io::Error::last_os_error()) }
}

/// All of an area, and nobody else's.
fn description_of(area: Area) -> io::Result<libc::flock> {
    let offset = |bytes: u64| i64::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let kind = |kind: i32| i16::try_from(kind).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    Ok(libc::flock {
        l_type: kind(libc::F_WRLCK)?,
        l_whence: kind(libc::SEEK_SET)?,
        l_start: offset(area.start_byte().get())?,
        l_len: offset(area.bytes())?,
        // The kernel wants it so for locks of descriptions.
        l_pid: 0,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{LineCount, LineOffset};

    #[test]
    fn area_is_locked_until_the_last_process_that_has_the_lock_is_gone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let area = |line, lines| Area::new(LineOffset::new(line), LineCount::new(lines));
        let locked = |area| is_locked(file.as_file().as_fd(), area).unwrap();
        assert!(!locked(area(0, 100)));
        let lock = GuestLock::take(file.path(), area(10, 10)).unwrap();
        for (area, expected) in [
            (area(0, 10), false),
            (area(0, 11), true),
            (area(10, 10), true),
            (area(19, 1), true),
            (area(20, 5), false),
        ] {
            assert_eq!(locked(area), expected, "{area}");
        }
        let again = GuestLock::take(file.path(), area(15, 10)).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::WouldBlock);
        let neighbour = GuestLock::take(file.path(), area(20, 10)).unwrap();
        let mut child = Command::new("sleep").arg("60").stdin(lock.to_stdio().unwrap()).spawn().unwrap();
        drop((lock, neighbour));
        assert!(locked(area(10, 10)), "the child has it");
        // A process that another test is just starting has the files of this one until it runs its program.
        let free = |area| {
            let began = Instant::now();
            while locked(area) && began.elapsed() < Duration::from_secs(10) {
                std::thread::yield_now();
            }
            !locked(area)
        };
        assert!(free(area(20, 10)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(free(area(0, 100)));
    }
}
