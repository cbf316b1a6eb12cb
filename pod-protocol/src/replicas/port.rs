//! A replica's place among the others.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use cxl_channel::doorbell::{Doorbell, DoorbellError, DoorbellListener};
use cxl_pool::{Layout, Memory, Record, ReplicaHello, ReplicaId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::peer::{MESSAGE_BYTES_LIMIT, PROTOCOL, Peer};
use crate::controller::PortWaker;
use crate::daemon::{LockError, LockFile};
use crate::liveness::{look_own, new_incarnation, read_own_beat, write_beat};
use crate::run_directory::{RunDirectory, RunDirectoryError};

/// How often it is looked whether others were restarted, and how often the replica itself beats.
const SWEEP_EVERY: Duration = Duration::from_millis(20);
/// How long to sleep at most while a connection is made, during which nobody rings.
const SLEEP_WHILE_CONNECTING: Duration = Duration::from_millis(1);
/// After this long a connection that is still not made is waited for without haste.
const CONNECTING_HASTE: Duration = Duration::from_secs(1);
/// How long to sleep at most where others cannot ring.
const SLEEP_WITHOUT_DOORBELL: Duration = Duration::from_millis(2);
/// How long the heartbeat of the slot is watched before it is taken.
const WATCH_FOR: Duration = Duration::from_millis(200);

/// What a replica's port cannot do.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaPortError {
    /// The pool has no slot for it.
    #[error("the pool has slots for {slots} controller replicas, from 0: replica {replica} has none")]
    NoSlot {
        /// Which one.
        replica: ReplicaId,
        /// How many there are.
        slots: usize,
    },
    /// On this kernel another process is this replica.
    #[error(
        "controller replica {replica} runs already as {holder}: stop it first, or give this one another number"
    )]
    AlreadyRuns {
        /// Which one.
        replica: ReplicaId,
        /// Who.
        holder: String,
    },
    /// On some other host a process is this replica.
    #[error(
        "another host runs controller replica {replica}, as process {pid} there: give this one another number"
    )]
    AliveElsewhere {
        /// Which one.
        replica: ReplicaId,
        /// The other's process, as seen on its host.
        pid: u32,
    },
    /// The run directory cannot be used.
    #[error(transparent)]
    RunDirectory(#[from] RunDirectoryError),
    /// The lock file cannot be used.
    #[error(transparent)]
    Lock(LockError),
    /// The doorbell cannot be bound.
    #[error(transparent)]
    Doorbell(#[from] DoorbellError),
    /// The message is too long.
    #[error("a message of {bytes} bytes is longer than the {MESSAGE_BYTES_LIMIT} that replicas exchange")]
    TooLong {
        /// How long it is.
        bytes: usize,
    },
    /// It has not been seen, or has not answered yet.
    #[error("controller replica {replica} is not connected")]
    NotConnected {
        /// Which one.
        replica: ReplicaId,
    },
    /// It takes nothing.
    #[error("controller replica {replica} takes nothing, and too much waits for it")]
    Backlog {
        /// Which one.
        replica: ReplicaId,
    },
}

/// Carries messages to and from the other replicas: whole, in order, or not at all. Use it from one thread, as a
/// [`ControllerPort`](crate::controller::ControllerPort).
pub struct ReplicaPort<M: Memory> {
    memory: M,
    layout: Layout,
    me: ReplicaId,
    life: u32,
    run: RunDirectory,
    peers: BTreeMap<ReplicaId, Peer<M>>,
    beat: u64,
    sweep_due: Instant,
    doorbells: bool,
    listener: DoorbellListener,
    waker: PortWaker,
    _lock: LockFile,
}

impl<M: Memory> ReplicaPort<M> {
    /// Takes the replica's slot of the pool. Refused while another process has it. With `doorbells` the hosts of all
    /// replicas share this kernel; without, the port looks at its rings in short steps. Other threads get its attention
    /// with the waker.
    pub fn open(
        layout: &Layout,
        memory: M,
        run: RunDirectory,
        me: ReplicaId,
        (doorbells, waker): (bool, PortWaker),
    ) -> Result<Self, ReplicaPortError> {
        if !layout.replicas().any(|replica| replica == me) {
            return Err(ReplicaPortError::NoSlot { replica: me, slots: layout.replicas().count() });
        }
        run.prepare()?;
        let lock = LockFile::acquire(&run.replica_lock(me)).map_err(|error| match error {
            LockError::Held { holder, .. } => ReplicaPortError::AlreadyRuns { replica: me, holder },
            LockError::Io { .. } => ReplicaPortError::Lock(error),
        })?;
        let before = look_own::<ReplicaHello, M>(&memory, layout.replica_hello(me));
        if let Some(hello) = before {
            refuse_if_alive(&memory, layout, me, hello.pid)?;
        }
        let listener = DoorbellListener::bind(&run.replica_doorbell(me))?;
        let life = before.map_or(0, |hello| hello.life).wrapping_add(1);
        let incarnation = new_incarnation();
        ReplicaHello { incarnation, life, pid: std::process::id(), protocol: PROTOCOL }
            .publish(&memory, layout.replica_hello(me));
        memory.full_fence();
        let others = layout.replicas().filter(|replica| *replica != me);
        Ok(Self {
            peers: others.map(|replica| (replica, Peer::new(replica))).collect(),
            beat: read_own_beat(&memory, layout.replica_heartbeat(me)),
            memory,
            layout: layout.clone(),
            me,
            life,
            run,
            sweep_due: Instant::now(),
            doorbells,
            listener,
            waker,
            _lock: lock,
        })
    }

    /// The next message and who sent it, if there is one. Never blocks. Call it often: it also sends what waits, and
    /// beats.
    pub fn poll(&mut self, now: Instant) -> Option<(ReplicaId, Vec<u8>)> {
        if now >= self.sweep_due {
            self.sweep_due = now + SWEEP_EVERY;
            self.beat = self.beat.wrapping_add(1);
            write_beat(&self.memory, self.layout.replica_heartbeat(self.me), self.beat);
            for (replica, peer) in &mut self.peers {
                let doorbell = || Doorbell::connect(&self.run.replica_doorbell(*replica));
                peer.sweep(&self.memory, &self.layout, (self.me, self.life), doorbell, now);
            }
        }
        // Each is asked, whoever had something before: none waits for another.
        self.peers.iter_mut().find_map(|(replica, peer)| Some((*replica, peer.converse(now)?)))
    }

    /// Sends a message. It may be lost with the other replica, or with a restart of either.
    pub fn send(&mut self, to: ReplicaId, message: Vec<u8>) -> Result<(), ReplicaPortError> {
        let peer = self.peers.get_mut(&to).ok_or(ReplicaPortError::NotConnected { replica: to })?;
        peer.send(message)
    }

    /// Sleeps until something may have happened, or for this long.
    pub fn wait(&mut self, at_most: Duration) {
        let now = Instant::now();
        let mut limit = at_most.min(self.sweep_due.saturating_duration_since(now));
        let mut connecting = self.peers.values_mut().filter_map(Peer::connecting_since);
        if connecting.any(|since| now.duration_since(since) < CONNECTING_HASTE) {
            limit = limit.min(SLEEP_WHILE_CONNECTING);
        }
        let mut nothing_new = true;
        if self.doorbells {
            for peer in self.peers.values_mut() {
                nothing_new &= peer.announce_sleep();
            }
        } else {
            limit = limit.min(SLEEP_WITHOUT_DOORBELL);
        }
        if nothing_new {
            let mut watched = [
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::from_borrowed_fd(self.waker.as_fd(), PollFlags::IN),
            ];
            // An interruption leads to another round; nothing else can go wrong with descriptors of our own.
            let _ = poll(&mut watched, Timespec::try_from(limit).ok().as_ref());
        }
        self.listener.drain();
        self.waker.drain();
        for peer in self.peers.values_mut() {
            peer.wake();
        }
    }
}

fn refuse_if_alive<M: Memory>(
    memory: &M,
    layout: &Layout,
    replica: ReplicaId,
    pid: u32,
) -> Result<(), ReplicaPortError> {
    let at = layout.replica_heartbeat(replica);
    let first = read_own_beat(memory, at);
    thread::sleep(WATCH_FOR / 2);
    let second = read_own_beat(memory, at);
    thread::sleep(WATCH_FOR / 2);
    // Twice: the last beat of a dead one may still leave its cache.
    if second != first && read_own_beat(memory, at) != second {
        return Err(ReplicaPortError::AliveElsewhere { replica, pid });
    }
    Ok(())
}
