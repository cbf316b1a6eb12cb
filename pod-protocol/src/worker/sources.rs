//! The file descriptors that wake a worker.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How a task names a file descriptor that it watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

impl Token {
    /// The worker's own descriptors have the tokens from here on.
    const RESERVED_FROM: u64 = u64::MAX - 1;
    /// Someone sent a message.
    pub(super) const MESSAGES: Self = Self(Self::RESERVED_FROM);
    /// A peer rang.
    pub(super) const DOORBELL: Self = Self(Self::RESERVED_FROM + 1);
}

/// How many events one look at the kernel brings. What is left over comes with the next look.
const EVENTS_MAX: usize = 32;

/// The file descriptors that a worker watches for becoming readable, level-triggered.
#[derive(Debug)]
pub struct Sources {
    epoll: OwnedFd,
    ready: Vec<Token>,
}

impl Sources {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, ready: Vec::with_capacity(EVENTS_MAX) })
    }

    /// Watches a file descriptor. It must be removed before it is closed if anyone else holds a duplicate of it, as a
    /// VMM does of its queues' eventfds: the kernel forgets it only with its last duplicate.
    pub fn add(&mut self, fd: impl AsFd, token: Token) -> io::Result<()> {
        if token.0 >= Token::RESERVED_FROM {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this token is the worker's own"));
        }
        self.add_any(fd, token)
    }

    pub(super) fn add_any(&mut self, fd: impl AsFd, token: Token) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.0), epoll::EventFlags::IN)?)
    }

    /// Watches a file descriptor no longer.
    pub fn remove(&mut self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// What is readable now.
    pub(super) fn look(&mut self) -> &[Token] {
        let mut events = [const { MaybeUninit::uninit() }; EVENTS_MAX];
        self.ready.clear();
        // The only errors are an interruption, after which the next look follows, and misuse, which the types exclude.
        if let Ok((events, _)) = epoll::wait(&self.epoll, &mut events[..], Some(&Timespec::default())) {
            self.ready.extend(events.iter().map(|event| Token(event.data.u64())));
        }
        &self.ready
    }

    /// Sleeps until something is readable, or for this long. Returns whether anything is.
    pub(super) fn sleep(&self, at_most: Option<Duration>) -> bool {
        // Not epoll_wait itself: its timeout has whole milliseconds.
        let timeout = at_most.and_then(|at_most| Timespec::try_from(at_most).ok());
        let mut watched = [PollFd::new(&self.epoll, PollFlags::IN)];
        matches!(poll(&mut watched, timeout.as_ref()), Ok(1..))
    }
}
