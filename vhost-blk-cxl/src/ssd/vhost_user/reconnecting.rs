//! Looking for a target that is gone, in a thread of its own: the worker has other devices.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tracing::debug;

use super::connection::{Connection, Peer, Target};
use crate::ssd::Geometry;

/// Between two attempts, twice as long each time.
const PAUSE_AT_FIRST: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// What comes of it: a connection, or why there is none.
type Outcome = Result<Box<Connection>, String>;

/// A target that is being looked for.
pub(super) struct Reconnecting {
    outcome: Receiver<Outcome>,
    /// Readable when there is one.
    event: OwnedFd,
    /// Nobody looks any more when this goes.
    _wanted: SyncSender<()>,
}

impl Reconnecting {
    /// Looks for so long. `before` is who had what is to be done once more: another process does not get that before it has ended.
    pub(super) fn begin(
        target: Target,
        before: Peer,
        geometry: Geometry,
        patience: Duration,
    ) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let ring = event.try_clone()?;
        let (found, outcome) = sync_channel(1);
        let (wanted, unwanted) = sync_channel(0);
        let until = Instant::now().checked_add(patience);
        // Nobody waits for its end: a target may take its time to agree.
        std::thread::Builder::new().name("reconnect".to_owned()).spawn(move || {
            if let Some(outcome) = look(&target, &before, geometry, until, &unwanted) {
                // Nobody may want it any more.
                let _ = found.try_send(outcome);
            }
            drop(found);
            let _ = rustix::io::write(&ring, &1_u64.to_ne_bytes());
        })?;
        Ok(Self { outcome, event, _wanted: wanted })
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// What came of it, if that is known.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        match self.outcome.try_recv() {
            Ok(outcome) => Some(outcome),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err("looking for it panicked".to_owned())),
        }
    }
}

fn look(
    target: &Target,
    before: &Peer,
    geometry: Geometry,
    until: Option<Instant>,
    unwanted: &Receiver<()>,
) -> Option<Outcome> {
    let mut pause = PAUSE_AT_FIRST;
    loop {
        let reason = match attempt(target, before, geometry) {
            Ok(connection) => return Some(Ok(connection)),
            Err(reason) => reason,
        };
        debug!(ssd = target.name, reason, "the target is not back");
        if until.is_some_and(|until| Instant::now() >= until) {
            return Some(Err(reason));
        }
        match unwanted.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(PAUSE_MAX),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

fn attempt(target: &Target, before: &Peer, geometry: Geometry) -> Outcome {
    let connection = Connection::open(target).map_err(|error| error.to_string())?;
    let Geometry { size_bytes, block_bytes } = connection.geometry;
    if size_bytes < geometry.size_bytes || block_bytes != geometry.block_bytes {
        return Err(format!(
            "its disk has {size_bytes} bytes in blocks of {block_bytes} now, and had {} in blocks of {}: is it the right one?",
            geometry.size_bytes, geometry.block_bytes
        ));
    }
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
