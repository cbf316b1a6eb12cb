//! Another program's disk as an SSD: the initiator's side of vhost-user-blk, towards qemu-storage-daemon, SPDK's vhost or
//! anything else that serves one.
//!
//! The pool itself is the memory that the target is given, so its reads and writes go straight to and from the buffers of
//! the guests' requests. What else a split virtqueue needs lies in a few pages beside it.
//!
//! A target that goes away may come back, as one does that is upgraded: what it had is kept meanwhile, and done once more from its beginning.
//! Where that takes too long the device has failed, with all that it had, until the target is there after all.
//!
//! A target may tell once that it could not write what it has in its cache, to whoever flushes first. So after a flush that failed the
//! device has another write verifier: what was written before, for whomever, nobody vouches for.

mod config;
mod connection;
mod identity;
mod reconnecting;
mod requests;
mod ring;
mod scratch;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::Pool;
use rustix::event::{PollFd, PollFlags, epoll, poll};
use tracing::{debug, error, info, warn};

use self::connection::{Connection, PATIENCE, Target};
use self::identity::Disk;
use self::reconnecting::{News, Reconnecting};
use self::requests::Requests;
pub(crate) use self::scratch::SCRATCH_BYTES;
pub use self::scratch::Scratch;
use super::verifier::Losses;
use super::{Command, CommandId, Finished, Full, Geometry, OpenError, Outcome, Ssd};
use crate::message::Operation;
use crate::segments::Segment;

/// For how long a target that is gone is waited for, unless something else is said.
pub(super) const RECONNECT_PATIENCE: Duration = Duration::from_secs(30);

/// A disk behind a vhost-user-blk socket.
pub struct VhostUserSsd {
    target: Target,
    /// As it was when it was opened.
    disk: Disk,
    requests: Requests,
    link: Link,
    /// Readable when the target called, is gone, or is back.
    events: OwnedFd,
    ended: Vec<Finished>,
    /// The target's, by the process that it is.
    target_verifier: u64,
    write_verifier: u64,
    losses: Losses,
    /// A flush failed. What has been reaped by now was written before, and has the verifier of before; what is reaped from here on has
    /// another one.
    flush_failed: bool,
    /// That flushes fail has been said.
    said: bool,
    patience: Duration,
}

/// How the target is reached.
enum Link {
    There(Box<Connection>),
    /// It is gone, and is looked for.
    Gone {
        looking: Reconnecting,
        /// Why it has failed: it was waited for long enough.
        late: Option<String>,
    },
    /// It is gone, and cannot be looked for.
    Failed(String),
}

impl VhostUserSsd {
    /// Connects to a target and gives it the pool as its memory.
    pub fn connect(name: &str, path: &Path, pool: &Pool) -> Result<Self, OpenError> {
        Self::connect_with(name, path, Some(pool.clone()))
    }

    /// Connects to a target to see what is on its disk. It has no data of guests to read or write, nor a pool.
    pub fn look_at(path: &Path) -> Result<Self, OpenError> {
        Self::connect_with(&path.display().to_string(), path, None)
    }

    fn connect_with(name: &str, path: &Path, pool: Option<Pool>) -> Result<Self, OpenError> {
        let failed = |what| {
            let (ssd, path) = (name.to_owned(), path.display().to_string());
            move |source| OpenError::Io { ssd, what, path, source }
        };
        let scratch = Arc::new(Scratch::new().map_err(failed("make memory for"))?);
        let target = Target { name: name.to_owned(), path: path.to_owned(), pool, scratch };
        let connection = Connection::open(&target)?;
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|errno| failed("watch")(io::Error::from(errno)))?;
        watch(&events, &connection).map_err(failed("watch"))?;
        let Connection { disk, abilities, write_verifier, .. } = connection;
        let Geometry { size_bytes, block_bytes } = disk.geometry;
        info!(ssd = name, path = %path.display(), bytes = size_bytes, block = block_bytes, id = ?disk.shown_id(), ?abilities, "connected");
        Ok(Self {
            target,
            disk,
            requests: Requests::new(abilities),
            link: Link::There(Box::new(connection)),
            events,
            ended: Vec::new(),
            target_verifier: write_verifier,
            write_verifier,
            losses: Losses::default(),
            flush_failed: false,
            said: false,
            patience: RECONNECT_PATIENCE,
        })
    }

    /// For a target that is gone requests wait so long, and no longer.
    #[must_use]
    pub fn waiting_for(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Has whoever connects to the same target next know by what is noted there that a flush failed.
    #[must_use]
    pub fn noting_losses_in(self, path: PathBuf) -> Self {
        let losses = Losses::noted_in(path);
        Self { write_verifier: losses.verifier(self.target_verifier), losses, ..self }
    }

    /// Reads what the disk begins with, while nobody else has it do anything. Fewer bytes if the disk is smaller.
    fn read_now(&mut self, bytes: u64) -> io::Result<Vec<u8>> {
        let give_up = Instant::now() + PATIENCE;
        let bytes = bytes.min(self.disk.geometry.size_bytes);
        let mut found = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
        let mut offset_bytes = 0;
        for piece in found.chunks_mut(SCRATCH_BYTES) {
            let length_bytes = piece.len() as u64;
            let command = Command {
                id: CommandId(0),
                operation: Operation::Read,
                force_unit_access: false,
                may_unmap: false,
                offset_bytes,
                length_bytes,
                data: Scratch::AT,
            };
            self.submit(command).map_err(|Full| io::Error::from(io::ErrorKind::ResourceBusy))?;
            self.kick();
            if self.end_of_the_only_one(give_up)? != Outcome::Done {
                return Err(io::Error::other("the device failed it"));
            }
            self.target.scratch.take(piece);
            offset_bytes += length_bytes;
        }
        Ok(found)
    }

    fn end_of_the_only_one(&mut self, give_up: Instant) -> io::Result<Outcome> {
        let mut ended = Vec::new();
        loop {
            self.reap(&mut ended);
            if let Some(finished) = ended.pop() {
                return Ok(finished.outcome);
            }
            let left = give_up.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut fds = [PollFd::new(&self.events, PollFlags::IN)];
            match poll(&mut fds, Some(&left.try_into().unwrap_or_default())) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Takes what the target answered, up to a flush that failed. True if there was anything.
    fn collect(&mut self, into: &mut Vec<Finished>) -> bool {
        let Link::There(connection) = &mut self.link else { return false };
        let mut any = false;
        while let Some((slot, status)) = connection.ring.answer() {
            any = true;
            let (next, finished) = self.requests.answered(slot, status);
            if let Some(next) = next {
                connection.ring.put(&next, self.requests.list(next.slot));
            }
            into.extend(finished);
            if self.requests.take_failed_flush() {
                // What follows is not to wait for another call.
                let _ = rustix::io::write(&connection.call, &1_u64.to_ne_bytes());
                self.note_loss();
                break;
            }
        }
        any
    }

    /// Before the answer to the flush goes out: nobody is to vouch for what may be gone.
    fn note_loss(&mut self) {
        self.flush_failed = true;
        let ssd = &self.target.name;
        if std::mem::replace(&mut self.said, true) {
            debug!(ssd, "another flush failed");
        } else {
            error!(
                ssd,
                "a flush failed: what was written before and not flushed is taken for lost, of all volumes"
            );
        }
        if let Err(error) = self.losses.add() {
            error!(ssd, %error, "it cannot be noted that a flush failed: restart the target before this backend is restarted, or \
                guests do not hear of what it lost");
        }
    }

    /// The target closed the connection. What it answered before was taken.
    fn lose(&mut self, into: &mut Vec<Finished>) {
        let Link::There(connection) = &mut self.link else { return };
        // They would stay readable.
        let _ = epoll::delete(&self.events, &connection.socket);
        let _ = epoll::delete(&self.events, &connection.call);
        let peer = std::mem::take(&mut connection.peer);
        warn!(ssd = self.target.name, patience = ?self.patience, "the target closed the connection: it is waited for");
        let begun = Reconnecting::begin(self.target.clone(), peer, self.disk, self.patience);
        let watched = begun.and_then(|it| {
            epoll::add(&self.events, it.event(), epoll::EventData::new_u64(2), epoll::EventFlags::IN)?;
            Ok(it)
        });
        match watched {
            Ok(looking) => self.link = Link::Gone { looking, late: None },
            Err(error) => self.fail(&error.to_string(), into),
        }
    }

    /// Goes on with a target that is back, or has it failed when it was waited for long enough.
    fn look_for_target(&mut self, into: &mut Vec<Finished>) {
        let Link::Gone { looking, late } = &mut self.link else { return };
        match looking.news() {
            None => {}
            Some(News::Back(connection)) => {
                let _ = epoll::delete(&self.events, looking.event());
                match watch(&self.events, &connection) {
                    Ok(()) => self.resume(connection, into),
                    Err(error) => self.fail(&error.to_string(), into),
                }
            }
            Some(News::Late(reason)) => {
                error!(
                    ssd = self.target.name,
                    reason, "the target did not come back in time: the device has failed until it does"
                );
                *late =
                    Some(format!("the vhost-user target closed the connection, and is not back: {reason}"));
                self.requests.fail_all(into);
            }
        }
    }

    fn resume(&mut self, mut connection: Box<Connection>, into: &mut Vec<Finished>) {
        // Of what this says that something may be lost, all answers from here on do.
        self.target_verifier = connection.write_verifier;
        self.write_verifier = self.losses.verifier(self.target_verifier);
        self.said = false;
        let again = self.requests.begin_anew(connection.abilities, into);
        info!(
            ssd = self.target.name,
            again = again.len(),
            "the target is back: what it had and has not failed is done once more"
        );
        for request in &again {
            connection.ring.put(request, self.requests.list(request.slot));
        }
        connection.kick();
        self.link = Link::There(connection);
    }

    fn fail(&mut self, reason: &str, into: &mut Vec<Finished>) {
        error!(
            ssd = self.target.name,
            reason, "the target cannot be looked for: the device is given up until the backend is restarted"
        );
        self.link = Link::Failed(format!("the vhost-user target closed the connection: {reason}"));
        self.requests.fail_all(into);
    }
}

fn watch(events: &OwnedFd, connection: &Connection) -> io::Result<()> {
    use epoll::{EventData, EventFlags};
    epoll::add(events, &connection.call, EventData::new_u64(0), EventFlags::IN)?;
    epoll::add(events, &connection.socket, EventData::new_u64(1), EventFlags::IN | EventFlags::RDHUP)?;
    Ok(())
}

impl Ssd for VhostUserSsd {
    fn driver(&self) -> &'static str {
        "vhost-user"
    }

    fn geometry(&self) -> Geometry {
        self.disk.geometry
    }

    fn writes_zeroes(&self) -> bool {
        self.requests.writes_zeroes()
    }

    fn discard_granularity_bytes(&self) -> Option<u32> {
        self.requests.discard_granularity_bytes()
    }

    fn submit(&mut self, command: Command) -> Result<(), Full> {
        if self.failure().is_some() {
            self.ended.push(Finished { id: command.id, outcome: Outcome::Failed });
            return Ok(());
        }
        match (self.requests.begin(command)?, &mut self.link) {
            (Some(request), Link::There(connection)) => {
                connection.ring.put(&request, self.requests.list(request.slot));
            }
            // It begins when the target is back.
            (Some(_), _) => {}
            (None, _) => self.ended.push(Finished { id: command.id, outcome: Outcome::Done }),
        }
        Ok(())
    }

    fn submit_list(&mut self, command: Command, segments: &[Segment]) -> Result<(), Full> {
        if self.failure().is_some() {
            return self.submit(command);
        }
        if let (Some(request), Link::There(connection)) =
            (self.requests.begin_list(command, segments)?, &mut self.link)
        {
            connection.ring.put(&request, self.requests.list(request.slot));
        }
        Ok(())
    }

    fn kick(&mut self) {
        if let Link::There(connection) = &mut self.link {
            connection.kick();
        }
    }

    fn reap(&mut self, into: &mut Vec<Finished>) {
        into.append(&mut self.ended);
        if std::mem::take(&mut self.flush_failed) {
            self.write_verifier = self.losses.verifier(self.target_verifier);
        }
        let Link::There(_) = self.link else { return self.look_for_target(into) };
        if !self.collect(into) {
            let mut fds = [PollFd::new(&self.events, PollFlags::IN)];
            if !matches!(poll(&mut fds, Some(&rustix::event::Timespec::default())), Ok(1..)) {
                return;
            }
            if let Link::There(connection) = &self.link {
                // Then once more: what came before the event was taken is there.
                let _ = rustix::io::read(&connection.call, &mut [0; 8]);
            }
            let gone = |link: &Link| matches!(link, Link::There(connection) if connection.is_gone());
            if !self.collect(into) && gone(&self.link) {
                // What it answered last, just before it went.
                self.collect(into);
                return self.lose(into);
            }
        }
        // The next requests of commands that take several.
        self.kick();
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.as_fd())
    }

    fn read_beginning(&mut self, bytes: u64) -> Option<io::Result<(Vec<u8>, Arc<Scratch>)>> {
        Some(self.read_now(bytes).map(|found| (found, Arc::clone(&self.target.scratch))))
    }

    fn write_verifier(&self) -> u64 {
        self.write_verifier
    }

    fn failure(&self) -> Option<&str> {
        match &self.link {
            Link::Failed(reason) => Some(reason),
            Link::Gone { late, .. } => late.as_deref(),
            Link::There(_) => None,
        }
    }
}
