//! A NIC with a wire of a certain rate, and the clients at its other end.
//!
//! Packets arrive as their traces say, one after the other over the wire; what hosts send back takes its time on the wire too. The NIC tells
//! flows apart and accesses memory past the caches, as those of the paper do.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use cxl_pool::{ByteOffset, LINE_BYTES, Memory};
use hdrhistogram::Histogram;
use vhost_net_cxl::backend::receive_buffers::ReceiveBuffers;
use vhost_net_cxl::nic::{
    Batch, Driver, Flow, FlowTag, Identity, LinkState, Nic, NicError, OnLinkChange, Piece, Taken,
};
use vhost_net_cxl::offloads::Offloads;

use super::trace::{Arrival, Trace};
use super::{HOSTS, MAC_BYTES, mac};

/// What the wire carries.
pub(super) const BITS_PER_NS: f64 = 10.0;
/// Utilisation is that of windows of this length.
pub(super) const WINDOW_NS: u64 = 100_000;
/// So much may wait for the wire in the NIC.
const QUEUE_NS: f64 = 500_000.0;
const HEADER_BYTES: usize = 12;
/// A frame's addresses and type, then when it was sent and to which host.
const STAMP_AT: usize = HEADER_BYTES + 14;
const FRONT_BYTES: usize = STAMP_AT + 16;
/// On the wire a frame has a preamble, a checksum and a gap too.
const FRAMING_BYTES: u32 = 24;

/// What the clients saw.
#[derive(Debug)]
pub(super) struct Seen {
    /// Per host, round trips in ns.
    pub(super) round_trips: Vec<Histogram<u64>>,
    pub(super) sent: u64,
    /// What the NIC and the engine dropped, by reason.
    pub(super) dropped: BTreeMap<String, u64>,
    /// Bits that arrived per window.
    pub(super) windows: Vec<u64>,
}

impl Seen {
    pub(super) fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, 1_000_000_000, 3).expect("bounds that make sense");
        Self { round_trips: vec![histogram; HOSTS], sent: 0, dropped: BTreeMap::new(), windows: Vec::new() }
    }
}

/// Clients of one host.
struct Client {
    host: usize,
    trace: Trace,
    next: Arrival,
    tag: Option<FlowTag>,
}

/// When the traffic begins, once that is known.
pub(super) type Beginning = Arc<OnceLock<Instant>>;

/// The NIC.
pub(super) struct WireNic<M: Memory> {
    identity: Identity,
    link: LinkState,
    memory: M,
    /// When the clients begin; nothing arrives before.
    began: Beginning,
    /// Nothing arrives any more after this time.
    until_ns: u64,
    clients: Vec<Client>,
    /// Until when the wire is in use, each way.
    in_until_ns: f64,
    out_until_ns: f64,
    seen: Arc<Mutex<Seen>>,
    frame: Vec<u8>,
}

fn wire_ns(bytes: u32) -> f64 {
    f64::from(bytes + FRAMING_BYTES) * 8.0 / BITS_PER_NS
}

impl<M: Memory> WireNic<M> {
    /// A NIC for these hosts, each of which gets the traffic of its own seed.
    pub(super) fn new(
        name: &str,
        memory: M,
        hosts: &[usize],
        traffic: u64,
        began: Beginning,
        until_ns: u64,
        seen: Arc<Mutex<Seen>>,
    ) -> Self {
        let identity = Identity {
            name: name.to_owned(),
            driver: Driver::Null,
            mac: None,
            mtu: 1500,
            speed_mbps: 10_000,
            backup: false,
            lag: None,
            offloads: Offloads::NONE,
            cache_bypassing: true,
        };
        let client = |host: &usize| {
            let mut trace = Trace::new(traffic + *host as u64);
            let next = trace.next().expect("it has no end");
            Client { host: *host, trace, next, tag: None }
        };
        Self {
            identity,
            link: LinkState::new(true),
            memory,
            began,
            until_ns,
            clients: hosts.iter().map(client).collect(),
            in_until_ns: 0.0,
            out_until_ns: 0.0,
            seen,
            frame: vec![0; 2048],
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "a run is far shorter than 2^53 ns")]
    fn now_ns(&self) -> f64 {
        self.began.get().map_or(0.0, |began| began.elapsed().as_nanos() as f64)
    }
}

impl<M: Memory> Nic for WireNic<M> {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn link(&self) -> &LinkState {
        &self.link
    }

    fn watch_link(&mut self, _on_change: OnLinkChange) -> Result<(), NicError> {
        Ok(())
    }

    fn start(&mut self, _buffers: &mut ReceiveBuffers) -> Result<(), NicError> {
        Ok(())
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn set_receiver_offloads(&mut self, _offloads: Offloads) -> Result<(), NicError> {
        Ok(())
    }

    fn set_flows(&mut self, flows: &[Flow]) {
        for client in &mut self.clients {
            let flow = flows.iter().find(|flow| flow.destination.bytes() == mac(client.host));
            client.tag = flow.map(|flow| flow.tag);
        }
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "times of a short run"
    )]
    fn receive(&mut self, buffers: &mut ReceiveBuffers, batch: &mut Batch) -> Result<(), NicError> {
        let now = self.now_ns();
        let seen = Arc::clone(&self.seen);
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        while !batch.is_full() {
            let Some(first) = self.clients.iter_mut().min_by_key(|client| client.next.at_ns) else { break };
            let Arrival { at_ns, bytes } = first.next;
            let arrived = (at_ns as f64).max(self.in_until_ns + wire_ns(bytes));
            if at_ns >= self.until_ns || arrived > now {
                break;
            }
            first.next = first.trace.next().expect("it has no end");
            let (host, tag) = (first.host, first.tag);
            self.in_until_ns = arrived;
            seen.sent += 1;
            let window = (arrived as u64 / WINDOW_NS) as usize;
            if seen.windows.len() <= window {
                seen.windows.resize(window + 1, 0);
            }
            seen.windows[window] += u64::from(bytes + FRAMING_BYTES) * 8;
            let Some(buffer) = buffers.take() else {
                *seen.dropped.entry("no-receive-buffer".to_owned()).or_default() += 1;
                continue;
            };
            let at = buffers.offset(buffer);
            let whole = HEADER_BYTES + bytes as usize;
            let frame = &mut self.frame[..whole.next_multiple_of(LINE_BYTES)];
            frame[..STAMP_AT].fill(0);
            frame[HEADER_BYTES..][..MAC_BYTES].copy_from_slice(&mac(host));
            frame[HEADER_BYTES + MAC_BYTES..][..MAC_BYTES].copy_from_slice(&[6, 0, 0, 0, 0, 1]);
            // A local experimental type.
            frame[STAMP_AT - 2..STAMP_AT].copy_from_slice(&[0x88, 0xb5]);
            frame[STAMP_AT..][..8].copy_from_slice(&at_ns.to_le_bytes());
            frame[STAMP_AT + 8..][..8].copy_from_slice(&(host as u64).to_le_bytes());
            self.memory.write_streaming(at, frame);
            let piece = Piece { at, bytes: bytes + 12 };
            match tag {
                Some(tag) => batch.push_tagged_frame(piece, tag),
                None => batch.push_frame(piece),
            }
        }
        // What a device wrote is there before anybody is told.
        self.memory.store_fence();
        Ok(())
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "times of a short run"
    )]
    fn transmit(&mut self, packets: &Batch) -> Result<usize, NicError> {
        let now = self.now_ns();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        for (sent, packet) in packets.frames().enumerate() {
            if self.out_until_ns > now + QUEUE_NS {
                return Ok(sent);
            }
            let bytes: u32 = packet.iter().map(|piece| piece.bytes).sum();
            self.out_until_ns = self.out_until_ns.max(now) + wire_ns(bytes - 12);
            let Some(front) = packet.first().filter(|front| front.bytes as usize >= FRONT_BYTES) else {
                continue;
            };
            let stamp = self.memory.load_unaligned(front.at, STAMP_AT);
            let host = self.memory.load_unaligned(front.at, STAMP_AT + 8) as usize;
            if let Some(histogram) = seen.round_trips.get_mut(host) {
                histogram.saturating_record((self.out_until_ns - stamp as f64).max(1.0) as u64);
            }
        }
        Ok(packets.len())
    }

    fn transmit_frame(&mut self, _frame: &[u8]) -> Result<Taken, NicError> {
        Ok(Taken::Whole)
    }

    fn has_work(&self) -> bool {
        true
    }
}

/// Numbers anywhere in a frame.
trait Unaligned: Memory {
    fn load_unaligned(&self, at: ByteOffset, skip: usize) -> u64 {
        let mut bytes = [0; 8];
        self.read(at.saturating_add(skip as u64), &mut bytes);
        u64::from_le_bytes(bytes)
    }
}

impl<M: Memory> Unaligned for M {}
