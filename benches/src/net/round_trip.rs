//! A load generator with one packet in flight: it offers a frame on the transmit queue and waits until it comes back on
//! the receive queue. It can be run from the thread that serves the port.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use vhost_frontend::mock::{MockGuest, Piece};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use vm_memory::{Bytes, GuestAddress};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const RING_SIZE: u16 = 256;
const MEMORY_BYTES: u64 = 8 << 20;
const BUFFER_BYTES: u32 = 2048;
const HEADER_BYTES: u32 = 12;
/// A packet that took so long is lost; another one is sent.
const LOST_AFTER: Duration = Duration::from_millis(100);

/// Round trips in nanoseconds, and how many packets were lost.
#[derive(Clone, Debug)]
pub(super) struct Latencies {
    pub(super) ns: Histogram<u64>,
    pub(super) lost: u64,
}

/// A port and its driver.
pub(super) struct RoundTrips {
    guest: MockGuest,
    frame_bytes: u32,
    sent_at: Option<Instant>,
    until: Instant,
    counted_from: Instant,
    latencies: Latencies,
}

impl RoundTrips {
    /// Connects to a device as the guest with this address.
    pub(super) fn connect(socket: &Path, source: [u8; 6], frame_bytes: u32) -> Result<Self> {
        let mut guest = MockGuest::new(MEMORY_BYTES, 2, RING_SIZE);
        let features = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_NET_F_MRG_RXBUF | 1 << VIRTIO_RING_F_EVENT_IDX;
        guest.connect(socket, features);
        let mut frame = vec![0; (HEADER_BYTES + frame_bytes) as usize];
        let start = HEADER_BYTES as usize;
        frame[start..start + 6].copy_from_slice(&[2, 0, 0, 0, 0, 0xee]);
        frame[start + 6..start + 12].copy_from_slice(&source);
        frame[start + 12..start + 14].copy_from_slice(&[0x88, 0xb5]);
        let at = GuestAddress(guest.data_start());
        guest.memory().write_slice(&frame, at).context("the frame fits the memory")?;
        let now = Instant::now();
        let latencies = Latencies { ns: Histogram::new_with_bounds(1, 1_000_000_000, 3)?, lost: 0 };
        let mut load = Self { guest, frame_bytes, sent_at: None, until: now, counted_from: now, latencies };
        for buffer in 1..u64::from(RING_SIZE) {
            load.post(buffer);
        }
        Ok(load)
    }

    /// Counts from after a warm-up for so long.
    #[must_use]
    pub(super) fn lasting(mut self, warm_up: Duration, duration: Duration) -> Self {
        self.counted_from = Instant::now() + warm_up;
        self.until = self.counted_from + duration;
        self
    }

    /// Looks once for the packet in flight, and sends the next one when it has come. Answers with what was measured once
    /// time is up.
    pub(super) fn step(&mut self) -> Option<Latencies> {
        while self.guest.used(TRANSMIT).is_some() {}
        let came = self.guest.used(RECEIVE);
        for ring in [TRANSMIT, RECEIVE] {
            self.guest.mute(ring);
        }
        if came.is_some() {
            // The device takes buffers in the order in which they were posted, so any free one will do.
            self.post(1);
        }
        let now = Instant::now();
        if let Some(sent_at) = self.sent_at {
            let took = now.duration_since(sent_at);
            if came.is_none() && took < LOST_AFTER {
                return None;
            }
            if now > self.counted_from {
                match came {
                    Some(_) => self
                        .latencies
                        .ns
                        .saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX)),
                    None => self.latencies.lost += 1,
                }
            }
        }
        if now >= self.until {
            return Some(self.latencies.clone());
        }
        let at = self.guest.data_start();
        let piece = Piece { address: at, bytes: HEADER_BYTES + self.frame_bytes, writable: false };
        self.offer(TRANSMIT, piece);
        self.sent_at = Some(Instant::now());
        None
    }

    fn post(&mut self, buffer: u64) {
        let address = self.guest.data_start() + buffer * u64::from(BUFFER_BYTES);
        self.offer(RECEIVE, Piece { address, bytes: BUFFER_BYTES, writable: true });
    }

    /// Without a kick: the device polls.
    fn offer(&mut self, ring: usize, piece: Piece) {
        self.guest.offer_silently(ring, &[piece]);
    }
}
