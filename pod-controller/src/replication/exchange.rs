//! What carries messages among replicas.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::{Memory, Pool, ReplicaId};
use pod_protocol::config::Wakeup;
use pod_protocol::controller::PortWaker;
use pod_protocol::replicas::{ReplicaPort, ReplicaPortError, ReplicaSlot, lock_replica};
use uuid::Uuid;

use super::replica::ReplicationError;
use super::tcp::{Place, Tcp, TcpError, Trust};
use crate::config::{Config, ReplicationSection};

/// Carries messages to and from the other replicas: whole, in order, or not at all. What is under way is lost when a
/// connection is. One thread uses it, which others wake.
pub(super) trait Exchange {
    /// The next message and who sent it, if there is one. Never blocks. To be called often.
    fn poll(&mut self, now: Instant) -> Option<(ReplicaId, Vec<u8>)>;

    /// Sends a message. It may be lost.
    fn send(&mut self, to: ReplicaId, message: Vec<u8>) -> Result<(), ReplicaPortError>;

    /// How often something that was sent to a replica was lost, or may have been: it was restarted, or the connection to it was made anew.
    fn losses(&self, to: ReplicaId) -> u64;

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

    fn losses(&self, to: ReplicaId) -> u64 {
        Self::losses(self, to)
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
        let (addresses, slots) = (tcp.addresses.len(), layout.replicas().count());
        if addresses > slots {
            return Err(TcpError::TooMany { addresses, slots }.into());
        }
        let place = Place::Slot(Box::new(ReplicaSlot::open(layout, memory.clone(), &run, place)?));
        Ok(Self::Tcp(Tcp::open(place, waker, (me, pool.superblock().uuid), (tcp, trust))?))
    }

    /// Of a replica outside of the pod, which knows of this pool, if of any.
    pub(super) fn open_outside(
        config: &Config,
        section: &ReplicationSection,
        waker: &PortWaker,
        pool: Option<Uuid>,
    ) -> Result<Self, ReplicationError> {
        let me = ReplicaId::new(section.replica);
        let Some(tcp) = &section.tcp else {
            return Err(ReplicationError::Config("replication.outside needs [replication.tcp]".to_owned()));
        };
        let trust = Arc::new(Trust::open(tcp).map_err(TcpError::from)?);
        let lock = lock_replica(&config.run_directory(), me)?;
        let place = Place::Outside { _lock: lock, protocol: config.run.protocol };
        // It is told by the others which one it is, unless it knows.
        let pool = config.controller.adopt_pool.or(pool).unwrap_or_default();
        Ok(Self::Tcp(Tcp::open(place, waker.clone(), (me, pool), (tcp, trust))?))
    }
}

/// The other replicas that there may be.
pub(super) fn others(pool: Option<&Pool>, section: &ReplicationSection) -> Vec<ReplicaId> {
    let me = ReplicaId::new(section.replica);
    let addresses = section.tcp.as_ref().map_or(0, |tcp| tcp.addresses.len());
    match pool {
        Some(pool) => pool.layout().replicas().filter(|replica| *replica != me).collect(),
        None => (0..).map(ReplicaId::new).take(addresses).filter(|replica| *replica != me).collect(),
    }
}
