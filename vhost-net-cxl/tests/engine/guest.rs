//! A guest's memory and virtio-net driver, as simple as they can be.

use std::fs::File;
use std::sync::{Arc, Mutex};

use cxl_pool::{Area, ByteOffset, FileIdentity, Memory};
use vhost_frontend::{DirtyLog, GuestMemory, InflightQueue, Ring, RingParts, region_bytes};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, MmapRegion};

use crate::pod::area;

pub(crate) const MEMORY_BYTES: usize = 32 << 20;
/// Room for one queue's rings, and for its buffers behind them.
pub(crate) const QUEUE_BYTES: u64 = 16 << 20;
pub(crate) const RINGS_BYTES: u64 = 64 << 10;
/// Where in a queue's part its used ring lies.
pub(crate) const USED_RING: u64 = 0xa000;
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// Stores bytes at an offset of the pool.
type Store = Box<dyn Fn(ByteOffset, &[u8])>;

/// A guest with a receive queue (0) and a transmit queue (1).
pub(crate) struct Guest {
    pub(crate) memory: GuestMemory,
    pub(crate) receive: DriverQueue,
    pub(crate) transmit: DriverQueue,
    /// Device and inode number of the file that part of its memory lies in.
    pub(crate) pool_file: Option<FileIdentity>,
    /// What it stores to that part, where another memory plays the pool.
    store: Option<Store>,
}

/// The part of the pool that a guest may have as its memory.
pub(crate) fn ram_area() -> Area {
    area(64, 16)
}

fn store<M: Memory>(host: &M) -> Store {
    let host = host.clone();
    Box::new(move |at, bytes| host.write(at, bytes))
}

impl Guest {
    pub(crate) fn new(size: u16) -> Self {
        let memory: GuestMemoryMmap<()> =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).expect("memory");
        Self::with_memory(memory, size)
    }

    /// A guest on this host, and the part of the pool that is leased to it: with every other seed its transmit queue lies there, so that the same
    /// test shows both ways in which packets travel. Of two of each, the VMM of one keeps a record of what is in flight.
    pub(crate) fn of_seed<M: Memory>(seed: u64, host: &M, size: u16) -> (Self, Option<Area>) {
        let (mut guest, ram_area) = if seed.is_multiple_of(2) {
            (Self::new(size), None)
        } else {
            (Self::in_simulated_pool(host, size), Some(ram_area()))
        };
        if seed & 2 != 0 {
            guest.receive.keep_record();
            guest.transmit.keep_record();
        }
        (guest, ram_area)
    }

    fn with_memory(memory: GuestMemoryMmap<()>, size: u16) -> Self {
        let memory = GuestMemory::from(memory);
        let queue = |index| DriverQueue::new(memory.clone(), index, size);
        Self { receive: queue(0), transmit: queue(1), memory, pool_file: None, store: None }
    }

    /// A guest whose transmit queue, with the buffers, lies in [`ram_area`] of the pool in `file`.
    pub(crate) fn in_pool_file(file: &File, size: u16) -> Self {
        let start = ram_area().start_byte().get();
        let part = FileOffset::new(file.try_clone().expect("a descriptor"), start);
        let half = usize::try_from(QUEUE_BYTES).expect("small");
        let memory = GuestMemoryMmap::from_ranges_with_files([
            (GuestAddress(0), half, None),
            (GuestAddress(QUEUE_BYTES), half, Some(part)),
        ]);
        let pool_file = Some(FileIdentity::of(file).expect("its identity"));
        Self { pool_file, ..Self::with_memory(memory.expect("memory"), size) }
    }

    /// The same where the pool is simulated: what the guest stores goes into the caches of its host, which has this memory.
    pub(crate) fn in_simulated_pool<M: Memory>(host: &M, size: u16) -> Self {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(host.size_bytes()).expect("its length");
        Self { store: Some(store(host)), ..Self::in_pool_file(&file, size) }
    }

    /// Goes on after its host's process was killed: this is the host's memory as the next process has it.
    pub(crate) fn outlive<M: Memory>(&mut self, host: &M) {
        self.store = self.store.is_some().then(|| store(host));
    }

    /// Stores something in the transmit queue's part.
    pub(crate) fn store(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).expect("in memory");
        if let Some(store) = &self.store {
            store(ram_area().start_byte().saturating_add(at - QUEUE_BYTES), bytes);
        }
    }

    /// Lets what devices write from now on be logged. Rings that run already do not know of it.
    pub(crate) fn log(&mut self, log: &DirtyLog) {
        self.memory = self.memory.with_log(Some(log.clone()));
        for queue in [&mut self.receive, &mut self.transmit] {
            queue.memory = self.memory.clone();
        }
    }

    /// All of its memory.
    pub(crate) fn image(&self) -> Vec<u8> {
        let mut image = vec![0; MEMORY_BYTES];
        self.memory.read_slice(&mut image, GuestAddress(0)).expect("all of it");
        image
    }

    /// Offers `count` receive buffers of `bytes` each.
    pub(crate) fn post(&mut self, count: u16, bytes: u32) {
        for _ in 0..count {
            let slot = self.receive.free_head().expect("a free descriptor");
            let at = self.receive.buffer(slot, bytes);
            self.receive.offer(&[(slot, at, bytes, WRITE)]);
        }
    }

    /// Offers a packet: a header of 12 bytes and a frame, in one descriptor or in two, by turns. False when the queue is full.
    pub(crate) fn send(&mut self, header: &[u8], frame: &[u8]) -> bool {
        let Some(head) = self.transmit.free_pair() else { return false };
        let at = self.transmit.buffer(head, 70_000);
        self.store(at, header);
        self.store(at + header.len() as u64, frame);
        let header_bytes = u32::try_from(header.len()).expect("short");
        let frame_bytes = u32::try_from(frame.len()).expect("short");
        if self.transmit.offered.is_multiple_of(2) {
            self.transmit.offer(&[(head, at, header_bytes + frame_bytes, 0)]);
            return true;
        }
        let second = (head + 1, at + u64::from(header_bytes), frame_bytes, 0);
        self.transmit.offer(&[(head, at, header_bytes, NEXT), second]);
        true
    }

    /// As [`Guest::send`], in so many pieces that do not follow each other in memory, which an indirect table names.
    pub(crate) fn send_in_pieces(&mut self, header: &[u8], frame: &[u8], pieces: usize) -> bool {
        const GAP: usize = 8;
        let Some(head) = self.transmit.free_pair() else { return false };
        let (at, table) = (self.transmit.buffer(head, 70_000), self.transmit.buffer(head + 1, 70_000));
        let packet = [header, frame].concat();
        let step = packet.len().div_ceil(pieces);
        let parts: Vec<&[u8]> = packet.chunks(step).collect();
        for (number, part) in parts.iter().enumerate() {
            let here = at + u64::try_from(number * (step + GAP)).expect("small");
            self.store(here, part);
            let next = u16::try_from(number + 1).expect("few");
            let flags = if number + 1 < parts.len() { NEXT } else { 0 };
            let mut raw = [0_u8; 16];
            raw[..8].copy_from_slice(&here.to_le_bytes());
            raw[8..12].copy_from_slice(&u32::try_from(part.len()).expect("short").to_le_bytes());
            raw[12..14].copy_from_slice(&flags.to_le_bytes());
            raw[14..].copy_from_slice(&next.to_le_bytes());
            self.store(table + 16 * u64::try_from(number).expect("few"), &raw);
        }
        let table_bytes = 16 * u32::try_from(parts.len()).expect("few");
        self.transmit.offer(&[(head, table, table_bytes, INDIRECT)]);
        true
    }

    /// Takes the packets that have arrived: header and frame. Posts their buffers again.
    pub(crate) fn received(&mut self, buffer_bytes: u32) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut packets = Vec::new();
        let mut used = self.receive.used().into_iter();
        while let Some((head, length)) = used.next() {
            let mut packet = self.receive.content(head, buffer_bytes, length);
            let count = u16::from_le_bytes([packet[10], packet[11]]);
            assert!(count >= 1);
            let mut heads = vec![head];
            for _ in 1..count {
                let (head, length) = used.next().expect("all buffers of a packet arrive together");
                packet.extend(self.receive.content(head, buffer_bytes, length));
                heads.push(head);
            }
            for head in heads {
                let at = self.receive.buffer(head, buffer_bytes);
                self.receive.offer(&[(head, at, buffer_bytes, WRITE)]);
            }
            let frame = packet.split_off(12);
            packets.push((packet, frame));
        }
        packets
    }
}

/// The driver's side of one split queue.
pub(crate) struct DriverQueue {
    memory: GuestMemory,
    index: u16,
    size: u16,
    offered: u16,
    seen: u16,
    free: Vec<bool>,
    /// The VMM's region for what is in flight.
    record: Option<Arc<MmapRegion<()>>>,
}

impl DriverQueue {
    fn new(memory: GuestMemory, index: u16, size: u16) -> Self {
        Self { memory, index, size, offered: 0, seen: 0, free: vec![true; usize::from(size)], record: None }
    }

    fn keep_record(&mut self) {
        self.record = Some(Arc::new(MmapRegion::new(region_bytes(1, self.size)).expect("memory")));
    }

    fn base(&self) -> u64 {
        u64::from(self.index) * QUEUE_BYTES
    }

    fn available(&self) -> u64 {
        self.base() + 0x8000
    }

    fn used_ring(&self) -> u64 {
        self.base() + USED_RING
    }

    /// The device's side, from the beginning or from where a predecessor stopped.
    pub(crate) fn ring(&self, features: u64, next_available: u16) -> Ring {
        self.ring_as(self.index, features, next_available)
    }

    /// The same as the queue of another number.
    pub(crate) fn ring_as(&self, index: u16, features: u64, next_available: u16) -> Ring {
        let mut queue = Queue::new(self.size).expect("a power of two");
        let low = |address: u64| Some(u32::try_from(address).expect("low memory"));
        queue.set_size(self.size);
        queue.set_desc_table_address(low(self.base()), Some(0));
        queue.set_avail_ring_address(low(self.available()), Some(0));
        queue.set_used_ring_address(low(self.used_ring()), Some(0));
        queue.set_next_avail(next_available);
        let used: u16 = self.memory.read_obj(GuestAddress(self.used_ring() + 2)).expect("in memory");
        queue.set_next_used(used);
        queue.set_ready(true);
        let record = self.record.as_ref().map(Arc::clone);
        let inflight = record
            .map(|region| InflightQueue::open(region, 1, self.size, 0, self.size).expect("long enough"));
        Ring::new(RingParts {
            index,
            queue,
            memory: self.memory.clone(),
            kick: None,
            call: Arc::new(Mutex::new(None)),
            error: None,
            features,
            event_index_unknown: false,
            inflight,
            in_order: true,
        })
    }

    /// Where the buffer of a descriptor lies.
    pub(crate) fn buffer(&self, slot: u16, bytes: u32) -> u64 {
        let step = (QUEUE_BYTES - RINGS_BYTES) / u64::from(self.size);
        assert!(u64::from(bytes) <= 2 * step);
        self.base() + RINGS_BYTES + u64::from(slot) * step
    }

    fn free_head(&mut self) -> Option<u16> {
        let slot = self.free.iter().position(|free| *free)?;
        self.free[slot] = false;
        Some(u16::try_from(slot).expect("small"))
    }

    fn free_pair(&mut self) -> Option<u16> {
        let pair = self.free.chunks(2).position(|pair| pair == [true, true])?;
        self.free[2 * pair] = false;
        self.free[2 * pair + 1] = false;
        Some(u16::try_from(2 * pair).expect("small"))
    }

    /// Writes descriptors, given as (slot, address, bytes, flags), and offers the first; each leads to the next.
    pub(crate) fn offer(&mut self, descriptors: &[(u16, u64, u32, u16)]) {
        for (position, (slot, address, bytes, flags)) in descriptors.iter().enumerate() {
            let next = descriptors.get(position + 1).map_or(0, |next| next.0);
            let mut raw = [0u8; 16];
            raw[..8].copy_from_slice(&address.to_le_bytes());
            raw[8..12].copy_from_slice(&bytes.to_le_bytes());
            raw[12..14].copy_from_slice(&flags.to_le_bytes());
            raw[14..].copy_from_slice(&next.to_le_bytes());
            let at = self.base() + 16 * u64::from(*slot);
            self.memory.write_slice(&raw, GuestAddress(at)).expect("in memory");
            self.free[usize::from(*slot)] = false;
        }
        let place = self.available() + 4 + 2 * u64::from(self.offered % self.size);
        self.memory.write_obj(descriptors[0].0, GuestAddress(place)).expect("in memory");
        self.offered = self.offered.wrapping_add(1);
        self.memory.write_obj(self.offered, GuestAddress(self.available() + 2)).expect("in memory");
    }

    /// The head that was offered as number `index`, while that place of the ring was not used again.
    pub(crate) fn offered_head(&self, index: u16) -> u16 {
        let place = self.available() + 4 + 2 * u64::from(index % self.size);
        self.memory.read_obj(GuestAddress(place)).expect("in memory")
    }

    /// Lets a descriptor lead to another one.
    pub(crate) fn lead(&mut self, slot: u16, next: u16) {
        let at = self.base() + 16 * u64::from(slot) + 14;
        self.memory.write_obj(next, GuestAddress(at)).expect("in memory");
    }

    /// What the device has returned since the last look: heads and lengths.
    pub(crate) fn used(&mut self) -> Vec<(u16, u32)> {
        let index: u16 = self.memory.read_obj(GuestAddress(self.used_ring() + 2)).expect("in memory");
        let mut used = Vec::new();
        while self.seen != index {
            let at = self.used_ring() + 4 + 8 * u64::from(self.seen % self.size);
            let head: u32 = self.memory.read_obj(GuestAddress(at)).expect("in memory");
            let length: u32 = self.memory.read_obj(GuestAddress(at + 4)).expect("in memory");
            used.push((u16::try_from(head).expect("a head"), length));
            self.seen = self.seen.wrapping_add(1);
        }
        used
    }

    /// As [`DriverQueue::used`] for pairs of descriptors, which are free again.
    pub(crate) fn reclaim_pairs(&mut self) -> Vec<u16> {
        let heads: Vec<u16> = self.used().into_iter().map(|(head, _)| head).collect();
        for head in &heads {
            self.free[usize::from(*head)] = true;
            self.free[usize::from(*head) + 1] = true;
        }
        heads
    }

    /// What lies in a buffer.
    pub(crate) fn content(&self, head: u16, buffer_bytes: u32, length: u32) -> Vec<u8> {
        let mut content = vec![0; usize::try_from(length).expect("short")];
        self.memory
            .read_slice(&mut content, GuestAddress(self.buffer(head, buffer_bytes)))
            .expect("in memory");
        content
    }
}
