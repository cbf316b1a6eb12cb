//! Looking for a target that is gone, in a thread of its own: the worker has other devices.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tracing::{debug, warn};

use super::connection::{Connection, Peer, Target};
use super::identity::Disk;

/// Between two attempts, twice as long each time.
const PAUSE_AT_FIRST: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// What comes of it.
pub(super) enum News {
    /// It is back.
    Back(Box<Connection>),
    /// It did not come back in the time that it had, and why. It is looked for all the same.
    Late(String),
}

/// A target that is being looked for.
pub(super) struct Reconnecting {
    news: Receiver<News>,
    /// Readable when there are some.
    event: OwnedFd,
    /// Nobody looks any more when this goes.
    _wanted: SyncSender<()>,
}

impl Reconnecting {
    /// Looks for it until it is back, and says so when that takes longer than `patience`. `before` is who had what is to be done once
    /// more: another process does not get that before it has ended.
    pub(super) fn begin(target: Target, before: Peer, disk: Disk, patience: Duration) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let bell = event.try_clone()?;
        // One of each.
        let (tells, news) = sync_channel(2);
        let (wanted, unwanted) = sync_channel(0);
        let until = Instant::now().checked_add(patience);
        // Nobody waits for its end: a target may take its time to agree.
        std::thread::Builder::new().name("reconnect".to_owned()).spawn(move || {
            look(&target, &before, &disk, until, &unwanted, |news| {
                // Nobody may want them any more.
                let _ = tells.try_send(news);
                let _ = rustix::io::write(&bell, &1_u64.to_ne_bytes());
            });
        })?;
        Ok(Self { news, event, _wanted: wanted })
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// What is new, if anything is.
    pub(super) fn news(&self) -> Option<News> {
        // Before the look: what comes after it rings again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.news.try_recv().ok()
    }
}

fn look(
    target: &Target,
    before: &Peer,
    disk: &Disk,
    until: Option<Instant>,
    unwanted: &Receiver<()>,
    tell: impl Fn(News),
) {
    let mut pause = PAUSE_AT_FIRST;
    // What was said of one that is late.
    let mut said: Option<String> = None;
    loop {
        let reason = match attempt(target, before, disk) {
            Ok(connection) => return tell(News::Back(connection)),
            Err(reason) => reason,
        };
        debug!(ssd = target.name, reason, "the target is not back");
        match &said {
            None if until.is_some_and(|until| Instant::now() >= until) => {
                said = Some(reason.clone());
                tell(News::Late(reason));
            }
            Some(known) if *known != reason => {
                warn!(ssd = target.name, reason, "the target is still not back: it is looked for on and on");
                said = Some(reason);
            }
            _ => {}
        }
        match unwanted.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(PAUSE_MAX),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn attempt(target: &Target, before: &Peer, disk: &Disk) -> Result<Box<Connection>, String> {
    let connection = Connection::open(target).map_err(|error| error.to_string())?;
    disk.check(&connection.disk)?;
    // A process ends what it has before it lets anybody connect again, or with itself. The kernel may still be writing for one that is
    // about to end.
    if let Some(process) = before.process.as_ref().filter(|_| !before.may_be(&connection.peer)) {
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        if !matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..)) {
            return Err("another process serves the disk, and the one before has not ended".to_owned());
        }
    }
    Ok(Box::new(connection))
}
