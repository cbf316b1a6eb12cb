use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// Wakes a worker when somebody who was held back may go on. Readable once it has fired.
#[derive(Debug)]
pub struct PaceTimer {
    timer: OwnedFd,
    until: Option<Instant>,
}

impl PaceTimer {
    /// One that is not armed.
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self { timer: timerfd_create(TimerfdClockId::Monotonic, flags)?, until: None })
    }

    /// Fires after this time, or earlier if it was to fire earlier.
    pub fn arm(&mut self, wait: Duration) {
        let until = Instant::now() + wait;
        if self.until.is_some_and(|armed| armed <= until) {
            return;
        }
        let seconds = i64::try_from(wait.as_secs()).unwrap_or(i64::MAX);
        // A time of zero would disarm it.
        let value = Timespec { tv_sec: seconds, tv_nsec: i64::from(wait.subsec_nanos().max(1)) };
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let when = Itimerspec { it_interval: never, it_value: value };
        if timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &when).is_ok() {
            self.until = Some(until);
        }
    }

    /// It became readable.
    pub fn fired(&mut self) {
        // Nothing there is as good as something there.
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        self.until = None;
    }
}

impl AsFd for PaceTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
