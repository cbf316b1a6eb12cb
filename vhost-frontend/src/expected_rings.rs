//! A deadline by which rings are to run.
//!
//! A guest that has moved from another host brings along whether its NIC had a link there. Where the frontend of that host was
//! away at that moment it had none, and QEMU holds on to this: it neither starts the rings, nor takes the link up again before
//! its backend comes anew. So whoever knows that a guest has arrived sets this deadline, and a VMM that runs no rings by then is
//! disconnected: it connects again, and takes up the link.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

const NEVER: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The deadline. Its descriptor is readable once it has passed, until it is cancelled or set anew.
#[derive(Debug)]
pub(crate) struct ExpectedRings(OwnedFd);

impl ExpectedRings {
    /// None is set.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// From now on so long.
    pub(crate) fn within(&self, wait: Duration) -> io::Result<()> {
        let seconds = i64::try_from(wait.as_secs()).unwrap_or(i64::MAX);
        // A time of zero would be none.
        self.set(Timespec { tv_sec: seconds, tv_nsec: i64::from(wait.subsec_nanos().max(1)) })
    }

    /// Forgets the deadline, be it past or to come.
    pub(crate) fn cancel(&self) -> io::Result<()> {
        self.set(NEVER)
    }

    fn set(&self, value: Timespec) -> io::Result<()> {
        let when = Itimerspec { it_interval: NEVER, it_value: value };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &when)?;
        Ok(())
    }
}

impl AsFd for ExpectedRings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
