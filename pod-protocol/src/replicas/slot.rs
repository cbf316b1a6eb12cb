//! A replica's place in the pool.

use std::time::{Duration, Instant};

use cxl_pool::{Layout, Memory, Record, ReplicaHello, ReplicaId};

use super::port::ReplicaPortError;
use crate::daemon::{LockError, LockFile};
use crate::link::Link;
use crate::liveness::{Alive, Usurper, new_incarnation, predecessor, read_own_beat, usurper, write_beat};
use crate::protocol::Protocol;
use crate::run_directory::RunDirectory;

/// How often the replica beats.
const BEAT_EVERY: Duration = Duration::from_millis(20);

/// A replica's slot of the pool, which one process has, on whatever host, while it beats.
pub struct ReplicaSlot<M: Memory> {
    memory: M,
    layout: Layout,
    me: ReplicaId,
    life: u32,
    protocol: Protocol,
    incarnation: u64,
    beat: u64,
    due: Instant,
    /// Who has it instead, once that was seen.
    usurper: Option<Usurper>,
    _lock: LockFile,
}

impl<M: Memory> ReplicaSlot<M> {
    /// Takes it, for a process that speaks this version. Refused while another process has it.
    pub fn open(
        layout: &Layout,
        memory: M,
        run: &RunDirectory,
        (me, protocol): (ReplicaId, Protocol),
    ) -> Result<Self, ReplicaPortError> {
        if !layout.replicas().any(|replica| replica == me) {
            return Err(ReplicaPortError::NoSlot { replica: me, slots: layout.replicas().count() });
        }
        let lock = lock_replica(run, me)?;
        let place = (layout.replica_hello(me), layout.replica_heartbeat(me));
        let before = predecessor::<ReplicaHello, M>(&memory, place)
            .map_err(|Alive { pid }| ReplicaPortError::AliveElsewhere { replica: me, pid })?;
        let life = before.map_or_else(|| seen_by_others(&memory, layout, me), |hello| hello.life);
        let life = life.wrapping_add(1);
        let incarnation = new_incarnation();
        ReplicaHello { incarnation, life, pid: std::process::id(), protocol: protocol.into() }
            .publish(&memory, layout.replica_hello(me));
        // The fence in this makes the hello visible, too.
        let beat = read_own_beat(&memory, layout.replica_heartbeat(me));
        let (layout, due) = (layout.clone(), Instant::now());
        Ok(Self { memory, layout, me, life, protocol, incarnation, beat, due, usurper: None, _lock: lock })
    }

    /// Beats if it is time to, and says so. A slot that is not this process's any more is not kept alive.
    pub fn beat(&mut self, now: Instant) -> bool {
        if now < self.due {
            return false;
        }
        self.due = now + BEAT_EVERY;
        let hello = self.layout.replica_hello(self.me);
        self.usurper =
            self.usurper.or_else(|| usurper::<ReplicaHello, M>(&self.memory, hello, self.incarnation));
        if self.usurper.is_some() {
            return false;
        }
        self.beat = self.beat.wrapping_add(1);
        write_beat(&self.memory, self.layout.replica_heartbeat(self.me), self.beat);
        true
    }

    /// Whether it was still this process's when it was to beat last. Once it is not, the process is this replica no more.
    pub const fn check(&self) -> Result<(), ReplicaPortError> {
        match self.usurper {
            None => Ok(()),
            Some(by) => Err(ReplicaPortError::Usurped { replica: self.me, by }),
        }
    }

    /// When it is to beat again.
    pub const fn due(&self) -> Instant {
        self.due
    }

    pub(super) const fn memory(&self) -> &M {
        &self.memory
    }

    pub(super) const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What it speaks.
    pub const fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Which replica it is, and which life of it this is.
    pub(super) const fn identity(&self) -> (ReplicaId, u32) {
        (self.me, self.life)
    }
}

/// Keeps other processes with this run directory from being this replica, as long as it is held.
pub fn lock_replica(run: &RunDirectory, me: ReplicaId) -> Result<LockFile, ReplicaPortError> {
    run.prepare()?;
    LockFile::acquire(&run.replica_lock(me)).map_err(|error| match error {
        LockError::Held { holder, .. } => ReplicaPortError::AlreadyRuns { replica: me, holder },
        LockError::Io { .. } => ReplicaPortError::Lock(error),
    })
}

/// The latest life of this replica that another one may know of. None was there before, or its hello cannot be read: its process was
/// killed while it wrote, say. The rings know which generations they had, each of which is the sum of a life of this one and one of
/// the other's, so that none of this one's was later.
fn seen_by_others<M: Memory>(memory: &M, layout: &Layout, me: ReplicaId) -> u32 {
    let others = layout.replicas().filter(|other| *other != me);
    let rings = others.map(|other| (layout.ring_between(me, other), layout.ring_between(other, me)));
    rings.map(|(out, back)| Link::generation(memory, out, back).get()).max().unwrap_or(0)
}
