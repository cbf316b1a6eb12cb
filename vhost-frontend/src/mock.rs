//! A guest and its VMM for tests, without a VM: memory, split rings, and a vhost-user connection to a device.
//!
//! It does what a well-behaved VMM does, QEMU's habits included: the in-flight region outlives the connection, and
//! after a reconnection rings go on at the used index. The guest on top of it is as badly behaved as the test wants:
//! descriptors, chains and ring fields can be anything.
//!
//! Everything panics on failure: it is made for tests.

#![allow(clippy::cast_possible_truncation)] // small numbers, chosen by tests

mod additional;
mod echo;
mod log;
mod ring;

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures, VhostUserVringAddrFlags,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

pub use self::echo::EchoGuest;
pub use self::log::DirtyPages;
use self::log::MockLog;
pub use self::ring::MockRing;
use crate::inflight::{InflightQueue, region_bytes};
use crate::{GuestMemory, Ring, RingParts};

/// Where guest memory begins. Not at 0, so that a forgotten address is not one.
const RAM_START: u64 = 0x10_0000;
/// Where the VMM believes that it mapped it.
const VMM_OFFSET: u64 = 0x7f00_0000_0000;
/// How long VMM and device may take to find each other.
const CONNECT_DEADLINE: Duration = Duration::from_secs(20);
/// Bytes that each ring occupies: enough for 1024 entries.
const RING_BYTES: u64 = 0x8000;

/// Of the device's status (virtio 1.2, 2.1).
const ACKNOWLEDGE: u64 = 1;
const DRIVER: u64 = 2;
const DRIVER_OK: u64 = 4;
const FEATURES_OK: u64 = 8;

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

/// A guest with a device.
pub struct MockGuest {
    file: File,
    file_offset: u64,
    memory: Arc<GuestMemoryMmap<()>>,
    bytes: u64,
    rings: Vec<MockRing>,
    frontend: Option<Frontend>,
    /// The same connection, for what the frontend cannot say.
    stream: Option<UnixStream>,
    tells_status: bool,
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
            stream: None,
            tells_status: false,
            features: 0,
            inflight: None,
            log: None,
        }
    }

    /// Gives the guest more memory: this part of a file, at this address. For a device that runs without a socket.
    pub fn add_memory(&mut self, address: u64, file: &File, file_offset: u64, bytes: u64) {
        let part = FileOffset::new(file.try_clone().unwrap(), file_offset);
        let mapped = MmapRegion::from_file(part, bytes as usize).unwrap();
        let region = GuestRegionMmap::new(mapped, GuestAddress(address)).unwrap();
        self.memory = Arc::new(self.memory.insert_region(Arc::new(region)).unwrap());
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
        self.device_ring_with(index, features, None)
    }

    /// The same, of which a predecessor took these requests and did not answer them.
    pub fn device_ring_owing(&self, index: u16, features: u64, heads: &[u16]) -> Ring {
        let size = self.rings[usize::from(index)].size;
        let region = Arc::new(MmapRegion::new(region_bytes(1, size)).unwrap());
        let open = || InflightQueue::open(Arc::clone(&region), 1, size, 0, size).unwrap();
        let mut taken = open();
        for &head in heads {
            taken.take(head);
        }
        self.device_ring_with(index, features, Some(open()))
    }

    fn device_ring_with(&self, index: u16, features: u64, inflight: Option<InflightQueue>) -> Ring {
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
            event_index_unknown: false,
            inflight,
            in_order: false,
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
        self.disconnect();
        let began = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) => assert!(began.elapsed() < CONNECT_DEADLINE, "cannot connect: {error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        self.negotiate_over(stream, wanted);
    }

    /// As [`MockGuest::connect`], with a device that connects to its VMM.
    pub fn accept(&mut self, listener: &UnixListener, wanted: u64) {
        self.disconnect();
        listener.set_nonblocking(true).unwrap();
        let began = Instant::now();
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) => assert!(began.elapsed() < CONNECT_DEADLINE, "no device connects: {error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        stream.set_nonblocking(false).unwrap();
        self.negotiate_over(stream, wanted);
        self.start_rings();
    }

    fn negotiate_over(&mut self, stream: UnixStream, wanted: u64) {
        self.stream = Some(stream.try_clone().unwrap());
        self.forget_log();
        let mut frontend = Frontend::from_stream(stream, self.rings.len() as u64);
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        let wanted = wanted & !VhostUserVirtioFeatures::LOG_ALL.bits();
        self.features = offered & (wanted | 1 << 32 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits());
        let protocol = frontend.get_protocol_features().unwrap();
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
        self.tells_status = protocol.contains(VhostUserProtocolFeatures::STATUS);
        if self.tells_status {
            // As QEMU does it: the driver found the device and they agree on features.
            assert!(self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK));
            assert_eq!(self.status(), Some(ACKNOWLEDGE | DRIVER | FEATURES_OK));
        }
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
        self.describe_rings();
        for index in 0..self.rings.len() {
            self.enable_ring(index, true);
        }
        if self.tells_status {
            assert!(self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK));
        }
    }

    /// Says of all rings what there is to say, as VMMs do before they enable the first one.
    pub fn describe_rings(&mut self) {
        (0..self.rings.len()).for_each(|index| self.describe_ring(index));
    }

    /// Says what there is to say of one, for a VMM that enables it before it describes the next.
    pub fn describe_ring(&mut self, index: usize) {
        let (features, memory) = (self.features, Arc::clone(&self.memory));
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

    /// The same connection once more, for what the frontend cannot say.
    pub fn stream(&self) -> UnixStream {
        self.stream.as_ref().unwrap().try_clone().unwrap()
    }

    /// The features agreed on.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Enables or disables a ring.
    pub fn enable_ring(&mut self, index: usize, enable: bool) {
        self.frontend().set_vring_enable(index, enable).unwrap();
    }

    /// Stops a ring; returns its base.
    pub fn stop_ring(&mut self, index: usize) -> u32 {
        self.frontend().get_vring_base(index).unwrap()
    }

    /// Cuts the connection.
    pub fn disconnect(&mut self) {
        self.stream = None;
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

    /// Waits for a signal on a ring.
    pub fn wait(&self, ring: usize, patience: Duration) {
        self.rings[ring].wait_call(patience);
    }

    /// The next chain that the device gave back on a ring.
    pub fn used(&mut self, ring: usize) -> Option<Used> {
        let memory = Arc::clone(&self.memory);
        self.rings[ring].used(&memory)
    }
}
