//! A driver that sends as fast as it can, from memory that lies in the pool: `dpdk-testpmd` can have no such memory.
//!
//! It does for each packet what testpmd does: a new Ethernet header and what follows it, and a new descriptor.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use cxl_pool::Area;
use vhost_frontend::mock::MockGuest;
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, VolatileSlice};

use crate::cores;

const TRANSMIT: usize = 1;
const RING_SIZE: u16 = 256;
const HEADER_BYTES: u32 = 12;
const BUFFER_BYTES: u64 = 2048;
/// The virtio-net header, and Ethernet, IPv4 and UDP headers.
const FRONT_BYTES: usize = 12 + 42;
/// A device that has taken nothing for so long sleeps, and has to be woken.
const PATIENCE: Duration = Duration::from_micros(200);
const NO_INTERRUPT: u16 = 1;

/// What it needs of guest memory.
pub(super) const MEMORY_BYTES: u64 = 2 << 20;

/// A driver at work.
pub(super) struct Flood {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Flood {
    /// Begins to send on this socket, from this core, as a guest whose memory is this part of the pool.
    pub(super) fn start(
        socket: PathBuf,
        (pool, ram): (File, Area),
        mac: [u8; 6],
        frame_bytes: u32,
        core: usize,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let start = ram.start_byte().get();
            let mut guest = MockGuest::in_file(pool, start, MEMORY_BYTES, 2, RING_SIZE);
            guest.connect(&socket, 1 << VIRTIO_F_VERSION_1);
            cores::pin(core)?;
            let outcome = send(&mut guest, mac, frame_bytes, &stopped);
            guest.disconnect();
            outcome
        });
        Self { stop, thread: Some(thread) }
    }

    /// Ends it, and says how it went.
    pub(super) fn stop(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it stops once")?;
        thread.join().map_err(|_| anyhow!("the driver could not connect"))?
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

fn front(mac: [u8; 6]) -> [u8; FRONT_BYTES] {
    let mut front = [0; FRONT_BYTES];
    front[12..18].copy_from_slice(&[2, 0, 0, 0, 0, 0xee]);
    front[18..24].copy_from_slice(&mac);
    front[24..26].copy_from_slice(&[8, 0]);
    front[26] = 0x45;
    front
}

fn send(guest: &mut MockGuest, mac: [u8; 6], frame_bytes: u32, stop: &AtomicBool) -> Result<()> {
    let memory = guest.memory().clone();
    let data = guest.data_start();
    let ring = guest.ring(TRANSMIT);
    let whole = |at: u64, bytes: usize| -> Result<VolatileSlice<'_>> {
        memory.get_slice(GuestAddress(at), bytes).context("a place in the guest's memory")
    };
    let entries = usize::from(RING_SIZE);
    let table = whole(ring.descriptor_table(), 16 * entries)?;
    let available = whole(ring.available_ring(), 4 + 2 * entries)?;
    let used = whole(ring.used_ring(), 4 + 8 * entries)?;
    let buffers = whole(data, entries * usize::try_from(BUFFER_BYTES)?)?;
    memory.write_obj(NO_INTERRUPT.to_le(), GuestAddress(ring.available_ring()))?;
    // The device gives buffers back in order: the one in slot i of the ring is always number i.
    for index in 0..RING_SIZE {
        available.write_obj(index.to_le(), 4 + 2 * usize::from(index))?;
    }
    let front = front(mac);
    let (mut offered, mut seen) = (0_u16, 0_u16);
    let mut moved = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let room = RING_SIZE - offered.wrapping_sub(seen);
        for _ in 0..room {
            let slot = offered % RING_SIZE;
            let at = u64::from(slot) * BUFFER_BYTES;
            let buffer = buffers.subslice(usize::try_from(at)?, FRONT_BYTES)?;
            buffer.copy_from(&front);
            let descriptor = [data + at, u64::from(HEADER_BYTES + frame_bytes)];
            table.subslice(16 * usize::from(slot), 16)?.copy_from(&descriptor);
            offered = offered.wrapping_add(1);
        }
        if room > 0 {
            available.store(offered.to_le(), 2, Ordering::Release)?;
        }
        let now: u16 = used.load(2, Ordering::Acquire)?;
        if now == seen {
            if moved.elapsed() > PATIENCE {
                ring.kick();
                moved = Instant::now();
            }
        } else {
            seen = now;
            moved = Instant::now();
        }
    }
    Ok(())
}
