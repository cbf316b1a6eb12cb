//! What is counted per channel: how busy it is, and what went wrong on it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cxl_pool::EndpointId;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::ChannelObject;
use pod_protocol::telemetry::ChannelTelemetry;

use crate::counters::Counter;

/// What is counted for our end of one channel. The worker that owns the end counts, the control thread reads.
#[derive(Debug)]
pub struct ChannelCounters {
    peer: EndpointId,
    /// Messages sent.
    pub sent: Counter,
    /// Messages received.
    pub received: Counter,
    /// How often a sender found no room.
    pub stalls: Counter,
    /// Messages received that say nothing that we know.
    pub unreadable: Counter,
    /// Messages received about a lease that we do not serve.
    pub strays: Counter,
    /// Completions for which a peer that has more under way than it may left no room.
    pub lost: Counter,
    depth: AtomicU64,
    depth_max: u64,
}

impl ChannelCounters {
    /// Counters at zero for a channel to `peer` with at most `depth_max` requests under way.
    pub fn new(peer: EndpointId, depth_max: u32) -> Self {
        Self {
            peer,
            sent: Counter::default(),
            received: Counter::default(),
            stalls: Counter::default(),
            unreadable: Counter::default(),
            strays: Counter::default(),
            lost: Counter::default(),
            depth: AtomicU64::new(0),
            depth_max: depth_max.into(),
        }
    }

    /// Says how many of our requests the peer has not completed yet.
    pub fn set_depth(&self, depth: u32) {
        self.depth.store(depth.into(), Ordering::Relaxed);
    }

    fn telemetry(&self, channel: ChannelId) -> ChannelTelemetry {
        ChannelTelemetry {
            channel,
            peer: self.peer,
            sent: self.sent.get(),
            received: self.received.get(),
            stalls: self.stalls.get(),
            unreadable: self.unreadable.get(),
            strays: self.strays.get(),
            lost: self.lost.get(),
            depth: self.depth.load(Ordering::Relaxed),
            depth_max: self.depth_max,
        }
    }
}

/// The counters of all channels of an engine.
#[derive(Clone, Debug, Default)]
pub struct ChannelBook(Arc<Mutex<BTreeMap<ChannelId, Arc<ChannelCounters>>>>);

impl ChannelBook {
    /// The counters of a channel. They go on where they are when its rings begin anew.
    pub fn open(&self, object: &ChannelObject, depth_max: u32) -> Arc<ChannelCounters> {
        let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &&Arc<ChannelCounters>| {
            (known.peer, known.depth_max) == (object.peer, u64::from(depth_max))
        };
        if let Some(known) = book.get(&object.id).filter(same) {
            known.set_depth(0);
            return Arc::clone(known);
        }
        let counters = Arc::new(ChannelCounters::new(object.peer, depth_max));
        book.insert(object.id, Arc::clone(&counters));
        counters
    }

    /// Forgets a channel.
    pub fn close(&self, channel: ChannelId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&channel);
    }

    /// All of them, as they are now.
    pub fn telemetry(&self) -> Vec<ChannelTelemetry> {
        let book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        book.iter().map(|(channel, counters)| counters.telemetry(*channel)).collect()
    }
}
