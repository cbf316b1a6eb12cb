//! Kick, call and error descriptors, as a VMM hands them over.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use thiserror::Error;

/// What the kernel calls an event descriptor.
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";

/// A descriptor that cannot be waited for, or signalled, safely.
#[derive(Debug, Error)]
pub(crate) enum EventError {
    /// Something else than an eventfd.
    #[error("a vring's kick, call and error descriptors have to be eventfds, and the VMM sent {0}")]
    OtherKind(String),
    /// The kernel did not say what it is.
    #[error("cannot find out what kind of descriptor the VMM sent (is /proc mounted?)")]
    Unknown(#[source] io::Error),
}

/// Accepts an eventfd and makes it one that never blocks; nothing else is accepted.
///
/// A worker reads kicks and writes calls between the requests of other VMs: a descriptor that blocks would stop them all,
/// be it a full pipe, a file of a file system that its sender serves, or an eventfd whose counter is at its maximum. A
/// socket could besides be the VMM's own end of the connection, which would then never be seen to close.
pub(crate) fn accept(file: &File) -> Result<(), EventError> {
    let unknown = |errno: Errno| EventError::Unknown(errno.into());
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let kind = rustix::fs::readlink(link, Vec::new()).map_err(unknown)?;
    if kind.to_bytes() != EVENTFD {
        return Err(EventError::OtherKind(kind.to_string_lossy().into_owned()));
    }
    let flags = rustix::fs::fcntl_getfl(file.as_fd()).map_err(unknown)?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags | OFlags::NONBLOCK).map_err(unknown)
}

/// How often a ring is looked at whose VMM does not kick.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// A descriptor that is readable again and again, in the place of the kicks of a VMM that has none: a worker that sleeps looks at the
/// ring each time, and takes what it reads for a kick.
pub(crate) fn ticking() -> io::Result<File> {
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
    let always = Itimerspec { it_interval: TICK, it_value: TICK };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &always)?;
    Ok(timer.into())
}

/// Signals whoever listens to an accepted descriptor.
pub(crate) fn signal(event: &File) {
    // It refuses only when its counter is full, and then nobody has looked yet.
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn an_eventfd_does_not_block_once_it_is_accepted() {
        let event: File = eventfd(0, EventfdFlags::empty()).unwrap().into();
        accept(&event).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert_eq!(rustix::io::write(&event, &1_u64.to_ne_bytes()), Err(Errno::AGAIN));
    }

    #[test]
    fn nothing_else_is_accepted() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let refused: [File; 3] = [OwnedFd::from(socket).into(), reader.into(), tempfile::tempfile().unwrap()];
        for file in refused {
            assert!(matches!(accept(&file), Err(EventError::OtherKind(_))), "{file:?}");
        }
    }
}
