//! What a replica has of another one: an address, and a connection while there is one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cxl_pool::ReplicaId;
use pod_protocol::replicas::{MESSAGE_BYTES_LIMIT, ReplicaPortError, WAITING_BYTES_LIMIT};
use tokio::sync::mpsc;

use crate::config::ReplicaAddress;

/// A message, and who sent it.
pub(super) type Arrival = (ReplicaId, Vec<u8>);

/// To one of the others.
pub(super) struct Line {
    pub(super) replica: ReplicaId,
    pub(super) address: ReplicaAddress,
    connected: Mutex<Connected>,
}

#[derive(Default)]
struct Connected {
    /// Of how many connections this is the last.
    count: u64,
    /// How many of them were lost.
    losses: u64,
    outlet: Option<Outlet>,
}

#[derive(Clone)]
struct Outlet {
    sender: mpsc::UnboundedSender<Vec<u8>>,
    waiting_bytes: Arc<AtomicUsize>,
}

/// What is to be sent on a connection. Once another one is there, nothing comes any more.
pub(super) struct Outgoing {
    pub(super) count: u64,
    receiver: mpsc::UnboundedReceiver<Vec<u8>>,
    waiting_bytes: Arc<AtomicUsize>,
}

impl Line {
    pub(super) fn new(replica: ReplicaId, address: ReplicaAddress) -> Self {
        Self { replica, address, connected: Mutex::default() }
    }

    pub(super) fn send(&self, message: Vec<u8>) -> Result<(), ReplicaPortError> {
        let (replica, bytes) = (self.replica, message.len());
        if bytes > MESSAGE_BYTES_LIMIT {
            return Err(ReplicaPortError::TooLong { bytes });
        }
        let outlet = self.connected().outlet.clone().ok_or(ReplicaPortError::NotConnected { replica })?;
        if outlet.waiting_bytes.load(Ordering::Relaxed) + bytes > WAITING_BYTES_LIMIT {
            return Err(ReplicaPortError::Backlog { replica });
        }
        outlet.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        outlet.sender.send(message).map_err(|_| ReplicaPortError::NotConnected { replica })
    }

    /// There is a connection, which takes the place of the one before.
    pub(super) fn connect(&self) -> Outgoing {
        let (sender, receiver) = mpsc::unbounded_channel();
        let waiting_bytes = Arc::new(AtomicUsize::new(0));
        let mut connected = self.connected();
        connected.count += 1;
        // Of the one before, if it was there still.
        connected.losses += u64::from(connected.outlet.is_some());
        connected.outlet = Some(Outlet { sender, waiting_bytes: Arc::clone(&waiting_bytes) });
        Outgoing { count: connected.count, receiver, waiting_bytes }
    }

    /// That one is lost. Whether it was the last, and nothing else has taken its place.
    pub(super) fn disconnect(&self, count: u64) -> bool {
        let mut connected = self.connected();
        let last = connected.count == count;
        if last {
            connected.losses += u64::from(connected.outlet.take().is_some());
        }
        last
    }

    /// How many connections were lost, with what was under way on them.
    pub(super) fn losses(&self) -> u64 {
        self.connected().losses
    }

    fn connected(&self) -> MutexGuard<'_, Connected> {
        // It is set in one step, whoever panicked.
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outgoing {
    /// The next message; none when another connection has taken the place of this one.
    pub(super) async fn next(&mut self) -> Option<Vec<u8>> {
        let message = self.receiver.recv().await;
        self.count(message)
    }

    /// As [`Outgoing::next`], if there is one now.
    pub(super) fn next_now(&mut self) -> Option<Vec<u8>> {
        let message = self.receiver.try_recv().ok();
        self.count(message)
    }

    fn count(&self, message: Option<Vec<u8>>) -> Option<Vec<u8>> {
        let message = message?;
        self.waiting_bytes.fetch_sub(message.len(), Ordering::Relaxed);
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_is_lost_once() {
        let address: ReplicaAddress = "localhost:1".parse().expect("an address");
        let line = Line::new(ReplicaId::new(1), address);
        let first = line.connect();
        assert_eq!(line.losses(), 0);
        // Another one takes its place before it is known that the first is lost.
        let second = line.connect();
        assert_eq!(line.losses(), 1);
        assert!(!line.disconnect(first.count));
        assert_eq!(line.losses(), 1);
        assert!(line.disconnect(second.count));
        assert!(line.send(Vec::new()).is_err());
        assert_eq!(line.losses(), 2);
        line.connect();
        assert_eq!(line.losses(), 2);
    }
}
