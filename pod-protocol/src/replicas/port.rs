//! A replica's place among the others.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use cxl_channel::doorbell::{Doorbell, DoorbellError, DoorbellListener};
use cxl_pool::{Layout, Memory, ReplicaId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::peer::{MESSAGE_BYTES_LIMIT, Peer};
use super::slot::ReplicaSlot;
use crate::controller::PortWaker;
use crate::daemon::LockError;
use crate::liveness::{Usurper, as_process};
use crate::naps::Naps;
use crate::protocol::Protocol;
use crate::run_directory::{RunDirectory, RunDirectoryError};

/// How long to sleep at most while a connection is made, during which nobody rings.
const SLEEP_WHILE_CONNECTING: Duration = Duration::from_millis(1);
/// After this long a connection that is still not made is waited for without haste.
const CONNECTING_HASTE: Duration = Duration::from_secs(1);
/// How long to sleep at most where others cannot ring. There are few to look at, and whoever leads waits for most of them.
const SLEEP_WITHOUT_DOORBELL: Duration = Duration::from_micros(500);

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
    #[error("another host runs controller replica {replica}, {}: give this one another number", as_process(*pid))]
    AliveElsewhere {
        /// Which one.
        replica: ReplicaId,
        /// The other's process, as seen on its host; none if its hello cannot be read.
        pid: Option<u32>,
    },
    /// Another process is this replica now.
    #[error("controller replica {replica} stops: {by}. Each replica needs a number of its own")]
    Usurped {
        /// Which one.
        replica: ReplicaId,
        /// Who has its slot.
        by: Usurper,
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
    /// It has not been seen, has not answered yet, or is stopped.
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
    slot: ReplicaSlot<M>,
    run: RunDirectory,
    peers: BTreeMap<ReplicaId, Peer<M>>,
    /// Whose message came last.
    heard: ReplicaId,
    doorbells: bool,
    naps: Naps,
    listener: DoorbellListener,
    waker: PortWaker,
}

impl<M: Memory> ReplicaPort<M> {
    /// Takes the replica's slot of the pool, for a process that speaks this version. Refused while another process has it. With `doorbells` the hosts of all
    /// replicas share this kernel; without, the port looks at its rings in short steps. Other threads get its attention
    /// with the waker.
    pub fn open(
        layout: &Layout,
        memory: M,
        run: RunDirectory,
        (me, protocol): (ReplicaId, Protocol),
        (doorbells, waker): (bool, PortWaker),
    ) -> Result<Self, ReplicaPortError> {
        let slot = ReplicaSlot::open(layout, memory, &run, (me, protocol))?;
        let listener = DoorbellListener::bind(&run.replica_doorbell(me))?;
        let others = layout.replicas().filter(|replica| *replica != me);
        let peers = others.map(|replica| (replica, Peer::new(replica))).collect();
        let naps = Naps::new(SLEEP_WITHOUT_DOORBELL, Instant::now());
        Ok(Self { slot, run, peers, heard: me, doorbells, naps, listener, waker })
    }

    /// The next message and who sent it, if there is one. Never blocks. Call it often: it also sends what waits, and
    /// beats.
    pub fn poll(&mut self, now: Instant) -> Option<(ReplicaId, Vec<u8>)> {
        if self.slot.beat(now) {
            let (memory, layout) = (self.slot.memory(), self.slot.layout());
            for (replica, peer) in &mut self.peers {
                let doorbell = || Doorbell::connect(&self.run.replica_doorbell(*replica));
                let own = (self.slot.identity(), self.slot.protocol());
                peer.sweep(memory, layout, own, doorbell, now);
            }
        }
        // The rings are another one's now.
        self.check().ok()?;
        // Who comes after the one that was heard last is asked first: nobody who has much to say keeps others from being heard, or
        // from being spoken to.
        let asked_first = Bound::Excluded(self.heard);
        let in_turn = [(asked_first, Bound::Unbounded), (Bound::Unbounded, Bound::Included(self.heard))];
        let peers = &mut self.peers;
        let arrived = in_turn.into_iter().find_map(|replicas| {
            peers.range_mut(replicas).find_map(|(replica, peer)| Some((*replica, peer.converse(now)?)))
        });
        if let Some((replica, _)) = arrived {
            self.heard = replica;
            self.naps.spoke(now);
        }
        arrived
    }

    /// Whether the process is this replica, as far as it was seen. Once it is not, it says and hears nothing any more.
    pub const fn check(&self) -> Result<(), ReplicaPortError> {
        self.slot.check()
    }

    /// Sends a message. It may be lost with the other replica, or with a restart of either.
    pub fn send(&mut self, to: ReplicaId, message: Vec<u8>) -> Result<(), ReplicaPortError> {
        self.check()?;
        let peer = self.peers.get_mut(&to).ok_or(ReplicaPortError::NotConnected { replica: to })?;
        peer.send(message)?;
        self.naps.spoke(Instant::now());
        Ok(())
    }

    /// How often something that was sent to another replica was lost, or may have been: it was restarted, or took nothing for long. What was
    /// sent before the last time may never be answered.
    pub fn losses(&self, to: ReplicaId) -> u64 {
        self.peers.get(&to).map_or(0, Peer::losses)
    }

    /// Sleeps until something may have happened, or for this long.
    pub fn wait(&mut self, at_most: Duration) {
        let now = Instant::now();
        let mut limit = at_most.min(self.slot.due().saturating_duration_since(now));
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
            limit = limit.min(self.naps.next(now));
        }
        if nothing_new {
            let mut watched = [
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::from_borrowed_fd(self.waker.as_fd(), PollFlags::IN),
            ];
            // An interruption leads to another round; nothing else can go wrong with descriptors of our own.
            let _ = poll(&mut watched, Timespec::try_from(limit).ok().as_ref());
        }
        self.naps.woke(Instant::now());
        self.listener.drain();
        self.waker.drain();
        for peer in self.peers.values_mut() {
            peer.wake();
        }
    }
}
