//! A driver that sends as fast as it can: from memory that lies in the pool, which `dpdk-testpmd` cannot have, or TCP that is still to be
//! segmented, which it does not send. It has a thread of its own, or is run from the thread that serves the port.
//!
//! It does for each packet what testpmd does: a new Ethernet header and what follows it, and a new descriptor.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use cxl_pool::Area;
use vhost_frontend::mock::MockGuest;
use vhost_net_cxl::offloads::Offloads;
use vhost_net_cxl::vnet_header::{HEADER_BYTES, VnetHeader};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

use crate::cores;

const TRANSMIT: usize = 1;
const RING_SIZE: u16 = 256;
/// Buffers are as far apart, or a multiple of it.
const BUFFER_BYTES: u64 = 2048;
/// A device that has taken nothing for so long sleeps, and has to be woken.
const PATIENCE: Duration = Duration::from_micros(200);
const NO_INTERRUPT: u16 = 1;

/// What it needs of guest memory to send frames of so many bytes.
pub(super) fn memory_bytes(frame_bytes: u32) -> u64 {
    // And the rings, in whole huge pages.
    (u64::from(RING_SIZE) * buffer_bytes(frame_bytes) + (128 << 10)).next_multiple_of(2 << 20)
}

fn buffer_bytes(frame_bytes: u32) -> u64 {
    (HEADER_BYTES as u64 + u64::from(frame_bytes)).next_multiple_of(BUFFER_BYTES)
}

/// A frame that is sent again and again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// The virtio-net header and those of the packet.
    front: Vec<u8>,
    bytes: u32,
    features: u64,
}

/// Payload of each segment of a TCP connection over a link of 1500 B.
pub(super) const SEGMENT_BYTES: u16 = 1448;
/// Of Ethernet, IPv4 and TCP, without and with time stamps.
const TCP_FRONT_BYTES: u16 = 14 + 20 + 20;
const SEGMENTS: u32 = 44;

impl Frame {
    /// Of UDP.
    pub(super) fn datagram(mac: [u8; 6], bytes: u32) -> Self {
        let mut front = VnetHeader::default().to_bytes().to_vec();
        front.extend(ethernet(mac));
        front.extend([0x45]);
        front.resize(HEADER_BYTES + 42, 0);
        Self { front, bytes, features: 0 }
    }

    /// As much of TCP as fits IPv4 and is a whole number of segments: 64 KiB less 1.8, which whoever comes last is to segment.
    pub(super) fn unsegmented(mac: [u8; 6]) -> Self {
        let header = VnetHeader {
            flags: 1,
            gso_type: 1,
            header_bytes: TCP_FRONT_BYTES,
            gso_bytes: SEGMENT_BYTES,
            checksum_start: 14 + 20,
            checksum_offset: 16,
            buffers: 0,
        };
        let bytes = u32::from(TCP_FRONT_BYTES) + SEGMENTS * u32::from(SEGMENT_BYTES);
        let total = u16::try_from(bytes - 14).unwrap_or(u16::MAX).to_be_bytes();
        let mut front = header.to_bytes().to_vec();
        front.extend(ethernet(mac));
        front.extend([0x45, 0, total[0], total[1], 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        // From port 1 to port 2; its header is of 20 bytes, and it acknowledges.
        front.extend([0, 1, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
        Self { front, bytes, features: Offloads::CHECKSUM.union(Offloads::TSO4).features() }
    }

    /// Its length, without the virtio-net header.
    pub(super) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// It and its virtio-net header.
    pub(super) fn whole(&self) -> Vec<u8> {
        let mut whole = self.front.clone();
        whole.resize(HEADER_BYTES + usize::try_from(self.bytes).unwrap_or(0), 0);
        whole
    }
}

fn ethernet(mac: [u8; 6]) -> [u8; 14] {
    let mut header = [2, 0, 0, 0, 0, 0xee, 0, 0, 0, 0, 0, 0, 8, 0];
    header[6..12].copy_from_slice(&mac);
    header
}

/// Where the guest has its memory.
pub(super) enum GuestMemory {
    /// In this part of the pool.
    Pool(File, Area),
    /// Elsewhere.
    Own,
}

/// A port and its driver.
pub(super) struct Stream {
    guest: MockGuest,
    memory: GuestMemoryMmap<()>,
    frame: Frame,
    offered: u16,
    seen: u16,
    /// When the device last took something.
    moved: Instant,
}

impl Stream {
    /// Connects to a device.
    pub(super) fn connect(socket: &Path, memory: GuestMemory, frame: Frame) -> Result<Self> {
        let bytes = memory_bytes(frame.bytes);
        let mut guest = match memory {
            GuestMemory::Pool(pool, ram) => {
                MockGuest::in_file(pool, ram.start_byte().get(), bytes, 2, RING_SIZE)
            }
            GuestMemory::Own => MockGuest::new(bytes, 2, RING_SIZE),
        };
        guest.connect(socket, 1 << VIRTIO_F_VERSION_1 | frame.features);
        let (memory, available) = (guest.memory().clone(), guest.ring(TRANSMIT).available_ring());
        memory.write_obj(NO_INTERRUPT.to_le(), GuestAddress(available))?;
        // The device gives buffers back in order: the one in slot i of the ring is always number i.
        for index in 0..RING_SIZE {
            memory.write_obj(index.to_le(), GuestAddress(available + 4 + 2 * u64::from(index)))?;
        }
        Ok(Self { guest, memory, frame, offered: 0, seen: 0, moved: Instant::now() })
    }

    /// Offers as many frames as there is room for, and looks once for what the device gives back.
    pub(super) fn step(&mut self) -> Result<()> {
        if self.offered.wrapping_sub(self.seen) < RING_SIZE {
            self.offer()?;
        }
        let ring = self.guest.ring(TRANSMIT);
        let now: u16 = self.memory.load(GuestAddress(ring.used_ring() + 2), Ordering::Acquire)?;
        if now != self.seen {
            self.seen = now;
            self.moved = Instant::now();
        } else if self.moved.elapsed() > PATIENCE {
            ring.kick();
            self.moved = Instant::now();
        }
        Ok(())
    }

    fn offer(&mut self) -> Result<()> {
        let Self { guest, memory, frame, offered, seen, .. } = self;
        let data = guest.data_start();
        let ring = guest.ring(TRANSMIT);
        let whole = |at: u64, bytes: usize| -> Result<VolatileSlice<'_>> {
            memory.get_slice(GuestAddress(at), bytes).context("a place in the guest's memory")
        };
        let entries = usize::from(RING_SIZE);
        let table = whole(ring.descriptor_table(), 16 * entries)?;
        let buffer_bytes = buffer_bytes(frame.bytes);
        let buffers = whole(data, entries * usize::try_from(buffer_bytes)?)?;
        let chain_bytes = HEADER_BYTES as u64 + u64::from(frame.bytes);
        while offered.wrapping_sub(*seen) < RING_SIZE {
            let slot = *offered % RING_SIZE;
            let at = u64::from(slot) * buffer_bytes;
            let buffer = buffers.subslice(usize::try_from(at)?, frame.front.len())?;
            buffer.copy_from(&frame.front);
            let descriptor = [data + at, chain_bytes];
            table.subslice(16 * usize::from(slot), 16)?.copy_from(&descriptor);
            *offered = offered.wrapping_add(1);
        }
        memory.store(offered.to_le(), GuestAddress(ring.available_ring() + 2), Ordering::Release)?;
        Ok(())
    }

    /// Lets go of the device.
    pub(super) fn disconnect(mut self) {
        self.guest.disconnect();
    }
}

/// A driver at work in a thread of its own.
pub(super) struct Flood {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Flood {
    /// Begins to send, from this core.
    pub(super) fn start(mut stream: Stream, core: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            cores::pin(core)?;
            let mut outcome = Ok(());
            while outcome.is_ok() && !stopped.load(Ordering::Relaxed) {
                outcome = stream.step();
            }
            stream.disconnect();
            outcome
        });
        Self { stop, thread: Some(thread) }
    }

    /// Ends it, and says how it went.
    pub(super) fn stop(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it stops once")?;
        thread.join().map_err(|_| anyhow!("the driver panicked"))?
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Whoever drops it has another error to report.
            let _ = thread.join();
        }
    }
}
