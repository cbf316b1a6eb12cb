//! What carries messages among replicas.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::{Memory, Pool, ReplicaId};
use pod_protocol::config::Wakeup;
use pod_protocol::controller::PortWaker;
use pod_protocol::replicas::{ReplicaPort, ReplicaPortError, ReplicaSlot};

use super::replica::ReplicationError;
use super::tcp::{Tcp, TcpError, Trust};
use crate::config::{Config, ReplicationSection};

/// Carries messages to and from the other replicas: whole, in order, or not at all. What is under way is lost when a
/// connection is. One thread uses it, which others wake.
pub(super) trait Exchange {
    /// The next message and who sent it, if there is one. Never blocks. To be called often.
    fn poll(&mut self, now: Instant) -> Option<(ReplicaId, Vec<u8>)>;

    /// Sends a message. It may be lost.
    fn send(&mut self, to: ReplicaId, message: Vec<u8>) -> Result<(), ReplicaPortError>;

    /// Sleeps until something may have happened, or for this long.
    fn wait(&mut self, at_most: Duration);

    /// Whether the process still has the replica's slot of the pool. Once it has not, it is this replica no more.
    fn check(&self) -> Result<(), ReplicaPortError>;
}

impl<M: Memory> Exchange for ReplicaPort<M> {
    fn poll(&mut self, now: Instant) -> Option<(ReplicaId, Vec<u8>)> {
        Self::poll(self, now)
    }

    fn send(&mut self, to: ReplicaId, message: Vec<u8>) -> Result<(), ReplicaPortError> {
        Self::send(self, to, message)
    }

    fn wait(&mut self, at_most: Duration) {
        Self::wait(self, at_most);
    }

    fn check(&self) -> Result<(), ReplicaPortError> {
        Self::check(self)
    }
}

/// Rings in the pool, or connections over the network, as it is configured.
pub(super) enum AnyExchange<M: Memory> {
    Pool(ReplicaPort<M>),
    Tcp(Tcp<M>),
}

impl<M: Memory> AnyExchange<M> {
    /// The certificates that are shown to other replicas, if there are any.
    pub(super) fn trust(&self) -> Option<Arc<Trust>> {
        match self {
            Self::Pool(_) => None,
            Self::Tcp(connections) => Some(connections.trust()),
        }
    }

    /// Takes the replica's slot of the pool, in either case.
    pub(super) fn open(
        pool: &Pool,
        memory: &M,
        config: &Config,
        section: &ReplicationSection,
        waker: &PortWaker,
    ) -> Result<Self, ReplicationError> {
        let (layout, me) = (pool.layout(), ReplicaId::new(section.replica));
        let place = (me, config.run.protocol);
        let (run, waker) = (config.run_directory(), waker.clone());
        let Some(tcp) = &section.tcp else {
            let doorbells = config.run.wakeup == Wakeup::Socket;
            return Ok(Self::Pool(ReplicaPort::open(
                layout,
                memory.clone(),
                run,
                place,
                (doorbells, waker),
            )?));
        };
        let trust = Arc::new(Trust::open(tcp).map_err(TcpError::from)?);
        let slot = ReplicaSlot::open(layout, memory.clone(), &run, place)?;
        let (slots, uuid) = (layout.replicas().count(), pool.superblock().uuid);
        Ok(Self::Tcp(Tcp::open(slot, waker, (me, slots, uuid), (tcp, trust))?))
    }
}
