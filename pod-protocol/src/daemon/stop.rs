//! Being told to stop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Set once, by SIGTERM or SIGINT or by hand, and never cleared. Clones are the same signal.
///
/// Its file descriptor becomes readable when it is set and stays so: watch it, but do not read from it.
#[derive(Clone, Debug)]
pub struct StopSignal(Arc<State>);

#[derive(Debug)]
struct State {
    stopped: Arc<AtomicBool>,
    watched: UnixStream,
    written: UnixStream,
}

impl StopSignal {
    /// Set only by [`StopSignal::stop`].
    pub fn manual() -> io::Result<Self> {
        let (watched, written) = UnixStream::pair()?;
        written.set_nonblocking(true)?;
        Ok(Self(Arc::new(State { stopped: Arc::default(), watched, written })))
    }

    /// Set by SIGTERM or SIGINT as well. A second SIGINT ends the process at once, should the first take too long.
    pub fn on_signals() -> io::Result<Self> {
        let signal = Self::manual()?;
        // Before the flag is registered: signals run their actions in this order, so only a second one finds it set.
        signal_hook::flag::register_conditional_default(SIGINT, Arc::clone(&signal.0.stopped))?;
        for number in [SIGTERM, SIGINT] {
            signal_hook::flag::register(number, Arc::clone(&signal.0.stopped))?;
            signal_hook::low_level::pipe::register(number, signal.0.written.try_clone()?)?;
        }
        Ok(signal)
    }

    /// Sets it.
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::Release);
        // A full socket is readable already.
        let _ = rustix::io::write(&self.0.written, &[0]);
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.0.stopped.load(Ordering::Acquire)
    }

    /// Waits until it is set.
    pub fn wait(&self) {
        while !self.wait_for(Duration::from_hours(1)) {}
    }

    /// Waits until it is set, or for this long. Returns whether it is set.
    pub fn wait_for(&self, at_most: Duration) -> bool {
        let began = Instant::now();
        while !self.is_set() {
            let left = at_most.saturating_sub(began.elapsed());
            if left.is_zero() {
                return false;
            }
            let timeout = Timespec::try_from(left).ok();
            let mut watched = [PollFd::new(self, PollFlags::IN)];
            // An interruption leads to another look; nothing else can go wrong with a socket of our own.
            let _ = poll(&mut watched, timeout.as_ref());
        }
        true
    }
}

impl AsFd for StopSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.watched.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn waiting_ends_when_another_thread_stops() {
        let signal = StopSignal::manual().expect("a pair");
        assert!(!signal.wait_for(Duration::from_millis(1)));
        let other = signal.clone();
        let stopper = thread::spawn(move || other.stop());
        signal.wait();
        stopper.join().expect("no panic");
        assert!(signal.is_set() && signal.wait_for(Duration::ZERO));
    }

    #[test]
    fn sigterm_sets_it() {
        let signal = StopSignal::on_signals().expect("registered");
        signal_hook::low_level::raise(SIGTERM).expect("raised");
        signal.wait();
    }
}
