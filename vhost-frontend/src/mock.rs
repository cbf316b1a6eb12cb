//! A guest and its VMM for tests, without a VM: memory, split rings, and a vhost-user connection to a device.
//!
//! It does what a well-behaved VMM does, QEMU's habits included: the in-flight region outlives the connection, and
//! after a reconnection rings go on at the used index. The guest on top of it is as badly behaved as the test wants:
//! descriptors, chains and ring fields can be anything.
//!
//! Everything panics on failure: it is made for tests.

#![allow(clippy::cast_possible_truncation)] // small numbers, chosen by tests

mod log;

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures, VhostUserVringAddrFlags,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT,
    VRING_DESC_F_WRITE,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub use self::log::DirtyPages;
use self::log::MockLog;
use crate::{GuestMemory, Ring, RingParts};

/// Where guest memory begins. Not at 0, so that a forgotten address is not one.
const RAM_START: u64 = 0x10_0000;
/// Where the VMM believes that it mapped it.
const VMM_OFFSET: u64 = 0x7f00_0000_0000;
/// Bytes that each ring occupies: enough for 1024 entries.
const RING_BYTES: u64 = 0x8000;

/// A piece of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Guest physical address.
    pub address: u64,
    /// Length.
    pub bytes: u32,
    /// The device writes it.
    pub writable: bool,
}

/// A descriptor as it stands in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RawDescriptor {
    /// Guest physical address.
    pub address: u64,
    /// Length.
    pub bytes: u32,
    /// VRING_DESC_F_*
    pub flags: u16,
    /// The next descriptor.
    pub next: u16,
}

/// What the device gave back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// The chain's head.
    pub head: u16,
    /// Bytes that it says it wrote.
    pub written: u32,
}

/// The driver's side of a ring.
#[derive(Debug)]
pub struct MockRing {
    size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    next_available: u16,
    next_used: u16,
    free: Vec<u16>,
    indirect: bool,
    event_index: bool,
    kick: EventFd,
    call: EventFd,
    epoll: Epoll,
}

/// A guest with a device.
pub struct MockGuest {
    file: File,
    file_offset: u64,
    memory: Arc<GuestMemoryMmap<()>>,
    bytes: u64,
    rings: Vec<MockRing>,
    frontend: Option<Frontend>,
    features: u64,
    inflight: Option<(VhostUserInflight, OwnedFd)>,
    log: Option<MockLog>,
}

impl MockGuest {
    /// A guest with this much memory and this many rings.
    pub fn new(bytes: u64, rings: u16, ring_size: u16) -> Self {
        let file: File = rustix::fs::memfd_create("mock-guest", MemfdFlags::CLOEXEC).unwrap().into();
        file.set_len(bytes).unwrap();
        Self::in_file(file, 0, bytes, rings, ring_size)
    }

    /// A guest whose memory is this part of a file.
    pub fn in_file(file: File, file_offset: u64, bytes: u64, rings: u16, ring_size: u16) -> Self {
        assert!(ring_size <= 1024 && ring_size.is_power_of_two());
        let part = FileOffset::new(file.try_clone().unwrap(), file_offset);
        let ranges = [(GuestAddress(RAM_START), bytes as usize, Some(part))];
        let memory = Arc::new(GuestMemoryMmap::from_ranges_with_files(ranges).unwrap());
        let rings = (0..u64::from(rings))
            .map(|index| MockRing::new(RAM_START + index * RING_BYTES, ring_size))
            .collect();
        Self {
            file,
            file_offset,
            memory,
            bytes,
            rings,
            frontend: None,
            features: 0,
            inflight: None,
            log: None,
        }
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemoryMmap<()> {
        &self.memory
    }

    /// The first address that no ring occupies.
    pub fn data_start(&self) -> u64 {
        RAM_START + self.rings.len() as u64 * RING_BYTES
    }

    /// The first address behind its memory.
    pub fn end(&self) -> u64 {
        RAM_START + self.bytes
    }

    /// The device's side of a ring, polled, for a device that runs without a socket.
    pub fn device_ring(&self, index: u16, features: u64) -> Ring {
        let ring = &self.rings[usize::from(index)];
        let low = |address: u64| Some(u32::try_from(address).expect("the guest is small"));
        let mut queue = Queue::new(ring.size).unwrap();
        queue.set_size(ring.size);
        queue.set_desc_table_address(low(ring.descriptors), Some(0));
        queue.set_avail_ring_address(low(ring.available), Some(0));
        queue.set_used_ring_address(low(ring.used), Some(0));
        queue.set_ready(true);
        Ring::new(RingParts {
            index,
            queue,
            memory: GuestMemory::from(GuestMemoryMmap::clone(&self.memory)),
            kick: None,
            call: Arc::default(),
            error: None,
            features,
            inflight: None,
        })
    }

    /// A ring.
    pub fn ring(&mut self, index: usize) -> &mut MockRing {
        &mut self.rings[index]
    }

    /// Connects to a device, wanting these features, and starts all rings. A guest that was connected before goes on
    /// where it was.
    pub fn connect(&mut self, path: &Path, wanted: u64) {
        self.negotiate(path, wanted);
        self.start_rings();
    }

    /// Connects without starting the rings.
    pub fn negotiate(&mut self, path: &Path, wanted: u64) {
        self.frontend = None;
        let began = Instant::now();
        let mut frontend = loop {
            match Frontend::connect(path, self.rings.len() as u64) {
                Ok(frontend) => break frontend,
                Err(error) => assert!(began.elapsed() < Duration::from_secs(20), "cannot connect: {error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        let wanted = wanted & !VhostUserVirtioFeatures::LOG_ALL.bits();
        self.features = offered & (wanted | 1 << 32 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits());
        // Who agrees on STATUS has to tell the device's status before it starts.
        let protocol = frontend.get_protocol_features().unwrap() - VhostUserProtocolFeatures::STATUS;
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(self.features).unwrap();
        frontend.set_mem_table(&[self.memory_region()]).unwrap();
        if protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            if self.inflight.is_none() {
                let size = self.rings.first().map_or(1, |ring| ring.size);
                let wanted = VhostUserInflight::new(0, 0, self.rings.len() as u16, size);
                let (described, file) = frontend.get_inflight_fd(&wanted).unwrap();
                self.inflight = Some((described, file.into()));
            }
            let (described, file) = self.inflight.as_ref().unwrap();
            frontend.set_inflight_fd(described, file.as_raw_fd()).unwrap();
        }
        self.frontend = Some(frontend);
    }

    /// Whether a device accepts its memory. It is not connected afterwards.
    pub fn can_share_memory(&self, path: &Path) -> bool {
        let mut frontend = Frontend::connect(path, self.rings.len() as u64).unwrap();
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        let protocol = frontend.get_protocol_features().unwrap() - VhostUserProtocolFeatures::STATUS;
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(offered).unwrap();
        frontend.set_mem_table(&[self.memory_region()]).is_ok()
    }

    fn memory_region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: RAM_START,
            memory_size: self.bytes,
            userspace_addr: RAM_START + VMM_OFFSET,
            mmap_offset: self.file_offset,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// Starts all rings at their used index.
    pub fn start_rings(&mut self) {
        let (features, memory) = (self.features, Arc::clone(&self.memory));
        for index in 0..self.rings.len() {
            let ring = &mut self.rings[index];
            ring.indirect = features & 1 << VIRTIO_RING_F_INDIRECT_DESC != 0;
            ring.event_index = features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
            let (size, used) = (ring.size, ring.used_index(&memory));
            let frontend = self.frontend.as_mut().unwrap();
            frontend.set_vring_num(index, size).unwrap();
            frontend.set_vring_base(index, used).unwrap();
            self.set_ring_addresses(index);
            let frontend = self.frontend.as_mut().unwrap();
            let ring = &self.rings[index];
            frontend.set_vring_call(index, &ring.call).unwrap();
            frontend.set_vring_kick(index, &ring.kick).unwrap();
            frontend.set_vring_enable(index, true).unwrap();
        }
    }

    fn set_ring_addresses(&mut self, index: usize) {
        let ring = &self.rings[index];
        let flags = VhostUserVringAddrFlags::VHOST_VRING_F_LOG.bits();
        let config = VringConfigData {
            queue_max_size: ring.size,
            queue_size: ring.size,
            flags: if self.logs() { flags } else { 0 },
            desc_table_addr: ring.descriptors + VMM_OFFSET,
            used_ring_addr: ring.used + VMM_OFFSET,
            avail_ring_addr: ring.available + VMM_OFFSET,
            log_addr: self.logs().then_some(ring.used),
        };
        self.frontend.as_mut().unwrap().set_vring_addr(index, &config).unwrap();
    }

    /// The vhost-user connection.
    pub fn frontend(&mut self) -> &mut Frontend {
        self.frontend.as_mut().unwrap()
    }

    /// The features agreed on.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Stops a ring; returns its base.
    pub fn stop_ring(&mut self, index: usize) -> u32 {
        self.frontend().get_vring_base(index).unwrap()
    }

    /// Cuts the connection.
    pub fn disconnect(&mut self) {
        self.frontend = None;
    }

    /// Reads the configuration space.
    pub fn config(&mut self, size: u32) -> Vec<u8> {
        let empty = vec![0; size as usize];
        self.frontend().get_config(0, size, VhostUserConfigFlags::WRITABLE, &empty).unwrap().1
    }

    /// Writes to the configuration space.
    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) {
        self.frontend().set_config(offset, VhostUserConfigFlags::WRITABLE, bytes).unwrap();
    }

    /// Offers a chain on a ring and kicks. Returns its head. An indirect table, where agreed on and `table` is given,
    /// goes there.
    pub fn offer(&mut self, ring: usize, pieces: &[Piece], table: Option<u64>) -> u16 {
        let memory = Arc::clone(&self.memory);
        let ring = &mut self.rings[ring];
        let head = ring.add(&memory, pieces, table);
        ring.publish(&memory, head);
        ring.kick();
        head
    }

    /// As [`MockGuest::offer`] without a kick, for a device that polls.
    pub fn offer_silently(&mut self, ring: usize, pieces: &[Piece]) -> u16 {
        let memory = Arc::clone(&self.memory);
        let ring = &mut self.rings[ring];
        let head = ring.add(&memory, pieces, None);
        ring.publish(&memory, head);
        head
    }

    /// Wants no signal for what is in flight on a ring: it is polled. Holds until the next look at it.
    pub fn mute(&mut self, ring: usize) {
        let ring = &self.rings[ring];
        ring.set_used_event(&self.memory, ring.next_used.wrapping_add(1 << 14));
    }

    /// Waits for the next chain that the device gives back on a ring.
    pub fn wait_used(&mut self, ring: usize, patience: Duration) -> Option<Used> {
        let memory = Arc::clone(&self.memory);
        self.rings[ring].wait_used(&memory, patience)
    }

    /// The next chain that the device gave back on a ring.
    pub fn used(&mut self, ring: usize) -> Option<Used> {
        let memory = Arc::clone(&self.memory);
        self.rings[ring].used(&memory)
    }
}

impl MockRing {
    fn new(start: u64, size: u16) -> Self {
        let call = EventFd::new(EFD_NONBLOCK).unwrap();
        let epoll = Epoll::new().unwrap();
        epoll.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0)).unwrap();
        Self {
            size,
            descriptors: start,
            available: start + 0x4000,
            used: start + 0x5000,
            next_available: 0,
            next_used: 0,
            free: (0..size).rev().collect(),
            indirect: false,
            event_index: false,
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call,
            epoll,
        }
    }

    /// Descriptors that are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Where its descriptor table begins.
    pub fn descriptor_table(&self) -> u64 {
        self.descriptors
    }

    /// Writes a descriptor, whatever it is.
    pub fn write_descriptor(&self, memory: &GuestMemoryMmap<()>, index: u16, descriptor: RawDescriptor) {
        write_descriptor(memory, self.descriptors, index, descriptor);
    }

    /// Writes the pieces as descriptors; they stay unseen until [`MockRing::publish`].
    pub fn add(&mut self, memory: &GuestMemoryMmap<()>, pieces: &[Piece], table: Option<u64>) -> u16 {
        if let Some(table) = table.filter(|_| self.indirect) {
            let head = self.free.pop().expect("a free descriptor");
            let indices: Vec<u16> = (0..pieces.len() as u16).collect();
            write_chain(memory, table, &indices, pieces);
            let bytes = 16 * pieces.len() as u32;
            let flags = VRING_DESC_F_INDIRECT as u16;
            self.write_descriptor(memory, head, RawDescriptor { address: table, bytes, flags, next: 0 });
            return head;
        }
        let indices: Vec<u16> = pieces.iter().map(|_| self.free.pop().expect("a free descriptor")).collect();
        write_chain(memory, self.descriptors, &indices, pieces);
        indices[0]
    }

    /// Makes a head available.
    pub fn publish(&mut self, memory: &GuestMemoryMmap<()>, head: u16) {
        let slot = self.available + 4 + 2 * u64::from(self.next_available % self.size);
        memory.write_obj(head.to_le(), GuestAddress(slot)).unwrap();
        self.set_available_index(memory, self.next_available.wrapping_add(1));
    }

    /// Sets the available index to anything.
    pub fn set_available_index(&mut self, memory: &GuestMemoryMmap<()>, index: u16) {
        self.next_available = index;
        memory.store(index.to_le(), GuestAddress(self.available + 2), Ordering::SeqCst).unwrap();
    }

    /// Notifies the device, if it wants to be.
    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    fn used_index(&self, memory: &GuestMemoryMmap<()>) -> u16 {
        u16::from_le(memory.load(GuestAddress(self.used + 2), Ordering::Acquire).unwrap())
    }

    fn used(&mut self, memory: &GuestMemoryMmap<()>) -> Option<Used> {
        if self.used_index(memory) == self.next_used {
            return None;
        }
        let slot = self.used + 4 + 8 * u64::from(self.next_used % self.size);
        let head = u32::from_le(memory.read_obj(GuestAddress(slot)).unwrap()) as u16;
        let written = u32::from_le(memory.read_obj(GuestAddress(slot + 4)).unwrap());
        self.next_used = self.next_used.wrapping_add(1);
        self.set_used_event(memory, self.next_used);
        self.release(memory, head);
        Some(Used { head, written })
    }

    /// Asks for a signal after the entry with this index.
    pub fn set_used_event(&self, memory: &GuestMemoryMmap<()>, index: u16) {
        let at = self.available + 4 + 2 * u64::from(self.size);
        memory.store(index.to_le(), GuestAddress(at), Ordering::SeqCst).unwrap();
    }

    /// Frees the descriptors of a chain.
    fn release(&mut self, memory: &GuestMemoryMmap<()>, head: u16) {
        let mut index = head;
        for _ in 0..self.size {
            self.free.push(index);
            let at = self.descriptors + 16 * u64::from(index);
            let flags = u16::from_le(memory.read_obj(GuestAddress(at + 12)).unwrap());
            if u32::from(flags) & VRING_DESC_F_NEXT == 0 {
                return;
            }
            index = u16::from_le(memory.read_obj(GuestAddress(at + 14)).unwrap());
        }
    }

    fn wait_used(&mut self, memory: &GuestMemoryMmap<()>, patience: Duration) -> Option<Used> {
        let began = Instant::now();
        loop {
            if let Some(used) = self.used(memory) {
                return Some(used);
            }
            let left = patience.checked_sub(began.elapsed())?;
            // The call, not the clock, wakes us: a lost signal is a failure.
            self.wait_call(left);
        }
    }

    fn wait_call(&self, timeout: Duration) {
        let mut events = [EpollEvent::default()];
        let timeout_ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX).max(1);
        let _ = self.epoll.wait(timeout_ms, &mut events);
        let _ = self.call.read();
    }

    /// Whether the device signalled since the last look.
    pub fn signalled(&self) -> bool {
        self.call.read().is_ok()
    }
}

fn write_chain(memory: &GuestMemoryMmap<()>, table: u64, indices: &[u16], pieces: &[Piece]) {
    for (position, (piece, &index)) in pieces.iter().zip(indices).enumerate() {
        let next = indices.get(position + 1).copied();
        let flags =
            if piece.writable { VRING_DESC_F_WRITE } else { 0 } | next.map_or(0, |_| VRING_DESC_F_NEXT);
        let descriptor = RawDescriptor {
            address: piece.address,
            bytes: piece.bytes,
            flags: flags as u16,
            next: next.unwrap_or(0),
        };
        write_descriptor(memory, table, index, descriptor);
    }
}

fn write_descriptor(memory: &GuestMemoryMmap<()>, table: u64, index: u16, descriptor: RawDescriptor) {
    let at = table + 16 * u64::from(index);
    memory.write_obj(descriptor.address.to_le(), GuestAddress(at)).unwrap();
    memory.write_obj(descriptor.bytes.to_le(), GuestAddress(at + 8)).unwrap();
    memory.write_obj(descriptor.flags.to_le(), GuestAddress(at + 12)).unwrap();
    memory.write_obj(descriptor.next.to_le(), GuestAddress(at + 14)).unwrap();
}
