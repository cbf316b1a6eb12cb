//! The way over the network, for replicas whose hosts do not rely on the pool for what they say to each other: TCP, with TLS on both
//! sides.
//!
//! Each pair has one connection. The one with the higher number makes it, again and again until it is there; a new one takes the
//! place of the one before. Both show a certificate of the replicas' authority, which must be for the host that the other one knows
//! of them.

mod frame;
mod greeting;
mod line;
mod link;
mod trust;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::{Memory, ReplicaId};
use pod_protocol::controller::PortWaker;
use pod_protocol::daemon::LockFile;
use pod_protocol::protocol::Protocol;
use pod_protocol::replicas::{ReplicaPortError, ReplicaSlot};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use uuid::Uuid;

use self::line::{Arrival, Line};
use self::link::Site;
pub(super) use self::trust::Trust;
use super::exchange::Exchange;
use crate::config::TcpSection;
use crate::tls::TlsError;

/// How many messages wait here at most until they are looked at; then those who send wait.
const ARRIVALS_MAX: usize = 256;

/// Why replicas cannot be connected over the network.
#[derive(Debug, thiserror::Error)]
pub enum TcpError {
    /// Its certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The address cannot be had.
    #[error(
        "cannot listen on {address} for the other replicas: {source}; set another replication.tcp.listen"
    )]
    Listen {
        /// Which one.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// A thread or a descriptor.
    #[error("cannot start what connects controller replicas: {0}")]
    Resources(io::Error),
    /// There are more addresses than replicas.
    #[error(
        "replication.tcp.addresses names {addresses} replicas, and the pool has slots for {slots}: create it with --replicas \
         {addresses}, or take those out that are too many"
    )]
    TooMany {
        /// How many there are.
        addresses: usize,
        /// For how many the pool was made.
        slots: usize,
    },
}

/// What keeps others from being this replica.
pub(super) enum Place<M: Memory> {
    /// A slot of the pool.
    Slot(Box<ReplicaSlot<M>>),
    /// A file of this machine, outside of the pod.
    Outside {
        /// Held as long as this.
        _lock: LockFile,
        /// What it speaks.
        protocol: Protocol,
    },
}

impl<M: Memory> Place<M> {
    fn protocol(&self) -> Protocol {
        match self {
            Self::Slot(slot) => slot.protocol(),
            Self::Outside { protocol, .. } => *protocol,
        }
    }
}

/// A replica's connections to the others.
pub(super) struct Tcp<M: Memory> {
    place: Place<M>,
    waker: PortWaker,
    lines: BTreeMap<ReplicaId, Arc<Line>>,
    arrivals: mpsc::Receiver<Arrival>,
    trust: Arc<Trust>,
    /// Some until it is dropped.
    runtime: Option<Runtime>,
}

impl<M: Memory> Tcp<M> {
    /// Listens, and connects to the others from now on. A pool that is not known has the id 0.
    pub(super) fn open(
        place: Place<M>,
        waker: PortWaker,
        (me, pool): (ReplicaId, Uuid),
        (section, trust): (&TcpSection, Arc<Trust>),
    ) -> Result<Self, TcpError> {
        // One of its own: what Raft waits for, such as a disk, must not look like a lost connection.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("replicas-tcp")
            .enable_all()
            .build()
            .map_err(TcpError::Resources)?;
        let protocol = place.protocol();
        let (sender, arrivals) = mpsc::channel(ARRIVALS_MAX);
        let listener = runtime.block_on(TcpListener::bind(section.listen));
        let listener = listener.map_err(|source| TcpError::Listen { address: section.listen, source })?;
        let others = (0..).map(ReplicaId::new).zip(&section.addresses).filter(|(replica, _)| *replica != me);
        let lines: BTreeMap<ReplicaId, Arc<Line>> = others
            .map(|(replica, address)| (replica, Arc::new(Line::new(replica, address.clone()))))
            .collect();
        let site = Arc::new(Site {
            me,
            protocol,
            pool,
            trust: Arc::clone(&trust),
            waker: waker.clone(),
            arrivals: sender,
        });
        for (_, line) in lines.range(..me) {
            runtime.spawn(link::keep_connected(Arc::clone(&site), Arc::clone(line)));
        }
        runtime.spawn(link::accept(site, lines.clone(), listener));
        Ok(Self { place, waker, lines, arrivals, trust, runtime: Some(runtime) })
    }
}

impl<M: Memory> Tcp<M> {
    /// The certificates.
    pub(super) fn trust(&self) -> Arc<Trust> {
        Arc::clone(&self.trust)
    }
}

impl<M: Memory> Exchange for Tcp<M> {
    fn poll(&mut self, now: Instant) -> Option<(ReplicaId, Vec<u8>)> {
        if let Place::Slot(slot) = &mut self.place {
            slot.beat(now);
        }
        self.check().ok()?;
        self.arrivals.try_recv().ok()
    }

    fn send(&mut self, to: ReplicaId, message: Vec<u8>) -> Result<(), ReplicaPortError> {
        self.check()?;
        let line = self.lines.get(&to).ok_or(ReplicaPortError::NotConnected { replica: to })?;
        line.send(message)
    }

    fn losses(&self, to: ReplicaId) -> u64 {
        self.lines.get(&to).map_or(0, |line| line.losses())
    }

    fn wait(&mut self, at_most: Duration) {
        let limit = match &self.place {
            Place::Slot(slot) => at_most.min(slot.due().saturating_duration_since(Instant::now())),
            Place::Outside { .. } => at_most,
        };
        self.waker.wait(limit);
    }

    fn check(&self) -> Result<(), ReplicaPortError> {
        match &self.place {
            Place::Slot(slot) => slot.check(),
            Place::Outside { .. } => Ok(()),
        }
    }
}

impl<M: Memory> Drop for Tcp<M> {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Whatever is under way is lost with us.
            runtime.shutdown_background();
        }
    }
}
