//! A frontend and a backend in one process, with a mock guest on top and a test in place of the controller.

#![allow(dead_code, reason = "every test file uses another part of it")]
#![allow(unreachable_pub, reason = "a test has no public interface")]
#![allow(clippy::cast_possible_truncation, reason = "small numbers, chosen by tests")]

pub mod column_move;
pub mod drives;
pub mod file_bench;
pub mod history;
pub mod in_line;
pub mod in_pool;
pub mod loop_device;
pub mod mirror;
pub mod mirror_move;
pub mod one_host;
pub mod ram;
pub mod restarts;
pub mod side;
pub mod stirring;
pub mod witness;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cxl_channel::RingPlacement;
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{Area, EndpointId, FileIdentity, Generation, HostId, LineCount, LineOffset, Memory, Role};
use pod_protocol::config::Wakeup;
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, PlaceNumber, VolumeId};
use pod_protocol::objects::{
    ChannelObject, DiskObject, Engine, Object, ObjectId, Priority, Qos, Route, VolumeObject,
};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::telemetry::{LeaseTelemetry, Telemetry};
use pod_protocol::worker::WorkerConfig;
pub use vhost_blk_cxl::backend::{Backend, OpenedSsd};
use vhost_blk_cxl::frontend::Frontend;
use vhost_blk_cxl::ssd::Ssd;
use vhost_frontend::mock::{MockGuest, Piece};
use vm_memory::{Bytes, GuestAddress};

/// Long enough for anything that happens at all.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Long enough to believe that something does not happen.
pub const QUIET: Duration = Duration::from_millis(100);

pub const SECTOR: u64 = 512;
pub const VOLUME_BYTES: u64 = 8 << 20;
pub const VOLUME_START: u64 = 1 << 20;
pub const DATA_BYTES: u64 = 8 << 20;
pub const SLOTS: u32 = 64;

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;
/// What a status byte is before the device wrote it.
pub const UNTOUCHED: u8 = 0xaa;

pub const T_IN: u32 = 0;
pub const T_OUT: u32 = 1;
pub const T_FLUSH: u32 = 4;
pub const T_GET_ID: u32 = 8;
pub const T_DISCARD: u32 = 11;
pub const T_WRITE_ZEROES: u32 = 13;

/// All features but those that the device does not offer.
pub const ALL_FEATURES: u64 = u64::MAX;

/// Where things lie, and what the controller would say.
pub struct Pod<M: Memory> {
    pub frontend_memory: M,
    pub backend_memory: M,
    pub run: RunDirectory,
    pub data: Area,
    pub disk: DiskObject,
    pub volume: VolumeObject,
    pub generation: u32,
    /// Of the channel's rings.
    pub slots: u32,
    pub frontend: Option<Frontend>,
    pub backend: Option<Backend>,
    /// Of a pool in which the guest's memory may lie.
    /// Hears what the backend reports.
    pub reporter: Option<Reporter>,
    pub pool_file: Option<FileIdentity>,
    directory: tempfile::TempDir,
}

pub fn endpoint(host: u16, role: Role) -> EndpointId {
    EndpointId::new(HostId::new(host), role)
}

impl<M: Memory> Pod<M> {
    /// A pod whose data begins at this line.
    pub fn new(frontend_memory: M, backend_memory: M, start: LineOffset) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(directory.path());
        run.prepare().unwrap();
        // Behind some room for rings.
        let data = Area::new(LineOffset::new(start.get() + 16384), LineCount::covering(DATA_BYTES));
        let lease = LeaseId::new(7).unwrap();
        let route = Route { channel: ChannelId::new(1), generation: LeaseGeneration::new(1) };
        let disk = DiskObject {
            lease,
            instance: InstanceId::new(1),
            instance_name: "vm0".to_owned(),
            device: "vol0".to_owned(),
            socket: "vm0-vol0.sock".to_owned(),
            vmm_listens: false,
            volume: VolumeId::new(1),
            serial: "wadi-volume-0001-of-many".to_owned(),
            size_bytes: VOLUME_BYTES,
            block_bytes: 512,
            discard_granularity_bytes: None,
            read_only: false,
            queues: 2,
            data_area: data,
            ram_area: None,
            route,
            replicas: Vec::new(),
            stripe_bytes: None,
            beside: None,
            number: None,
            epoch: 0,
            failed: false,
            write_through: false,
            untold: false,
            incoming: false,
        };
        let volume = VolumeObject {
            lease,
            place: PlaceNumber::FIRST,
            volume: VolumeId::new(1),
            ssd: "ssd0".to_owned(),
            start_bytes: VOLUME_START,
            size_bytes: VOLUME_BYTES,
            read_only: false,
            generation: route.generation,
            channel: route.channel,
            data_area: data,
            ram_area: None,
            instance: InstanceId::new(1),
            qos: Qos::default(),
            priority: Priority::DEFAULT,
        };
        Self {
            frontend_memory,
            backend_memory,
            run,
            data,
            disk,
            volume,
            generation: 0,
            slots: SLOTS,
            frontend: None,
            backend: None,
            pool_file: None,
            reporter: None,
            directory,
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.run.sockets().join(&self.disk.socket)
    }

    pub fn worker() -> WorkerConfig {
        let busy_poll = Duration::from_micros(20);
        WorkerConfig { wakeup: Wakeup::Socket, busy_poll, poll_in_flight: busy_poll, cpu: None, fence: None }
    }

    pub fn start_frontend(&mut self) {
        self.frontend = None;
        let bell = DoorbellListener::bind(&self.run.data_doorbell(endpoint(1, Role::BlkFrontend))).unwrap();
        let memory = self.frontend_memory.clone();
        let frontend =
            Frontend::start(memory, self.run.clone(), Self::worker(), Some(bell), None, self.pool_file);
        self.frontend = Some(frontend.unwrap());
    }

    /// The frontend's process dies: nothing of it completes a request any more.
    pub fn crash_frontend(&mut self) {
        std::mem::forget(self.frontend.take());
        for (directory, is_its) in [(self.run.sockets(), ""), (self.run.doorbells(), "frontend")] {
            let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
            for path in paths.filter(|path| path.to_string_lossy().contains(is_its)) {
                std::fs::remove_file(path).unwrap();
            }
        }
    }

    pub fn start_backend(&mut self, ssd: Box<dyn Ssd>) {
        self.start_backend_with(vec![OpenedSsd::new("ssd0", ssd)]);
    }

    pub fn start_backend_with(&mut self, ssds: Vec<OpenedSsd>) {
        self.backend = None;
        let bell = DoorbellListener::bind(&self.run.data_doorbell(endpoint(2, Role::BlkBackend))).unwrap();
        let memory = self.backend_memory.clone();
        let backend =
            Backend::start(memory, self.run.clone(), Self::worker(), Some(bell), ssds, self.reporter.clone());
        self.backend = Some(backend.unwrap());
    }

    /// Hands out the channel in a new generation, at a new place, to whoever is there.
    pub fn new_channel(&mut self) {
        self.next_channel();
        self.apply_channel().unwrap();
    }

    /// A new generation of the channel, of which nobody knows yet.
    pub fn next_channel(&mut self) {
        self.generation += 1;
        let [to_backend, to_frontend] = self.rings();
        to_backend.clear(&self.frontend_memory);
        to_frontend.clear(&self.backend_memory);
    }

    fn rings(&self) -> [RingPlacement; 2] {
        let lines = RingPlacement::lines(self.slots, 8).get();
        let start = self.data.start.get() - 16384 + u64::from(self.generation - 1) * 2 * lines;
        assert!(start + 2 * lines <= self.data.start.get(), "the test asks for too many generations");
        [start, start + lines].map(|start| RingPlacement { start: LineOffset::new(start), slots: self.slots })
    }

    fn channel(&self, peer: EndpointId, outgoing: RingPlacement, incoming: RingPlacement) -> ChannelObject {
        let (id, engine) = (self.disk.route.channel, Engine::Blk);
        let generation = Generation::new(self.generation);
        ChannelObject { id, engine, peer, generation, outgoing, incoming, receives: None }
    }

    /// The channel as the frontend is told of it, for a test that takes its place.
    pub fn channel_at_frontend(&self) -> ChannelObject {
        let [to_backend, to_frontend] = self.rings();
        self.channel(endpoint(2, Role::BlkBackend), to_backend, to_frontend)
    }

    /// Says (again) which channel there is.
    pub fn apply_channel(&mut self) -> Result<(), String> {
        self.apply_channel_at_backend()?;
        self.apply_channel_at_frontend()
    }

    /// The same to the backend only.
    pub fn apply_channel_at_backend(&mut self) -> Result<(), String> {
        let [to_backend, to_frontend] = self.rings();
        let object = self.channel(endpoint(1, Role::BlkFrontend), to_frontend, to_backend);
        self.backend.as_mut().map_or(Ok(()), |backend| backend.apply(Object::Channel(object)))
    }

    /// The same to the frontend only: the backend goes on with what came over the last one.
    pub fn apply_channel_at_frontend(&mut self) -> Result<(), String> {
        let object = Object::Channel(self.channel_at_frontend());
        self.frontend.as_mut().map_or(Ok(()), |frontend| frontend.apply(object))
    }

    /// The backend's host was written off.
    pub fn remove_channel(&mut self) {
        let channel = ObjectId::Channel(self.disk.route.channel);
        self.frontend.as_mut().unwrap().remove(channel).unwrap();
    }

    /// Hands out the lease in a new generation, as after a restart of the frontend.
    pub fn new_lease_generation(&mut self) {
        let next = self.volume.generation.next();
        self.volume.generation = next;
        self.disk.route.generation = next;
    }

    pub fn apply_volume(&mut self) {
        let volume = self.volume.clone();
        self.backend.as_mut().unwrap().apply(Object::Volume(volume)).unwrap();
    }

    pub fn apply_disk(&mut self) {
        let disk = self.disk.clone();
        self.frontend.as_mut().unwrap().apply(Object::Disk(disk)).unwrap();
    }

    /// Everything from scratch, with this device.
    pub fn start(&mut self, ssd: Box<dyn Ssd>) {
        self.start_backend(ssd);
        self.start_frontend();
        self.new_channel();
        self.apply_volume();
        self.apply_disk();
    }

    /// The frontend ends, and with it the connection to the VMM. Its successor has the lease in a new generation, and is given the guest's
    /// rings as they are.
    pub fn restart_frontend(&mut self, guest: &mut MockGuest) {
        self.frontend = None;
        guest.disconnect();
        self.start_frontend();
        self.new_lease_generation();
        self.apply_volume();
        self.new_channel();
        self.apply_disk();
        guest.connect(&self.socket(), ALL_FEATURES);
    }

    pub fn frontend_lease(&mut self) -> LeaseTelemetry {
        lease(self.frontend.as_mut().unwrap().telemetry())
    }

    pub fn backend_lease(&mut self) -> LeaseTelemetry {
        lease(self.backend.as_mut().unwrap().telemetry())
    }
}

fn lease(telemetry: Telemetry) -> LeaseTelemetry {
    telemetry.leases.into_iter().next().expect("one lease")
}

/// A block driver on the mock guest, one request at a time or many.
pub struct Driver {
    pub guest: MockGuest,
}

/// Where a request keeps its parts in guest memory.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub header: u64,
    pub data: u64,
    pub status: u64,
}

/// Bytes of guest memory that a request may use.
pub const PLACE_BYTES: u64 = 1 << 20;
/// How many requests have places.
pub const PLACES: u64 = 64;

impl Driver {
    pub fn new(queues: u16, size: u16) -> Self {
        Self { guest: MockGuest::new(Self::ram_bytes(queues), queues, size) }
    }

    /// How much memory its guest needs.
    pub fn ram_bytes(queues: u16) -> u64 {
        let bytes = (PLACES + 1) * PLACE_BYTES + u64::from(queues) * 0x8000;
        bytes.next_multiple_of(4096)
    }

    pub fn connected<M: Memory>(pod: &Pod<M>) -> Self {
        Self::connected_to(&pod.socket(), pod.disk.queues)
    }

    pub fn connected_to(socket: &Path, queues: u16) -> Self {
        let mut driver = Self::new(queues, 128);
        driver.guest.connect(socket, ALL_FEATURES);
        driver
    }

    pub fn place(&self, index: u64) -> Place {
        assert!(index < PLACES);
        let start = self.guest.data_start().next_multiple_of(4096) + index * PLACE_BYTES;
        Place { header: start, status: start + 64, data: start + 4096 }
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.guest.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub fn read(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.guest.memory().read_slice(&mut read, GuestAddress(at)).unwrap();
        read
    }

    pub fn write_header(&self, place: Place, kind: u32, sector: u64) {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend(0u32.to_le_bytes());
        header.extend(sector.to_le_bytes());
        self.write(place.header, &header);
        self.write(place.status, &[UNTOUCHED]);
    }

    /// Header, data and status, each in one piece.
    pub fn pieces(place: Place, kind: u32, bytes: u32) -> Vec<Piece> {
        let mut pieces = vec![Piece { address: place.header, bytes: 16, writable: false }];
        if bytes > 0 {
            let writable = kind == T_IN || kind == T_GET_ID;
            pieces.push(Piece { address: place.data, bytes, writable });
        }
        pieces.push(Piece { address: place.status, bytes: 1, writable: true });
        pieces
    }

    /// Offers a request; its data for the device must be in place already.
    pub fn offer(&mut self, queue: usize, index: u64, kind: u32, sector: u64, bytes: u32) -> u16 {
        let place = self.place(index);
        self.write_header(place, kind, sector);
        self.guest.offer(queue, &Self::pieces(place, kind, bytes), None)
    }

    /// Waits for the answer to the only request in flight on a queue.
    pub fn answer(&mut self, queue: usize, index: u64, head: u16) -> (u8, u32) {
        let used = self.guest.wait_used(queue, PATIENCE).expect("an answer");
        assert_eq!(used.head, head);
        (self.status(index), used.written)
    }

    pub fn status(&self, index: u64) -> u8 {
        self.read(self.place(index).status, 1)[0]
    }

    /// Carries out one request.
    pub fn request(&mut self, kind: u32, sector: u64, bytes: u32) -> (u8, u32) {
        let head = self.offer(0, 0, kind, sector, bytes);
        self.answer(0, 0, head)
    }

    pub fn write_sectors(&mut self, sector: u64, data: &[u8]) -> u8 {
        self.write(self.place(0).data, data);
        self.request(T_OUT, sector, data.len() as u32).0
    }

    pub fn read_sectors(&mut self, sector: u64, bytes: u32) -> Vec<u8> {
        let place = self.place(0);
        self.write(place.data, &vec![0x55; bytes as usize]);
        assert_eq!(self.request(T_IN, sector, bytes), (OK, bytes + 1));
        self.read(place.data, bytes as usize)
    }

    pub fn range_request(&mut self, kind: u32, sector: u64, sectors: u32, flags: u32) -> u8 {
        let mut range = sector.to_le_bytes().to_vec();
        range.extend(sectors.to_le_bytes());
        range.extend(flags.to_le_bytes());
        self.write(self.place(0).data, &range);
        self.request(kind, 0, 16).0
    }
}

/// Waits until something holds.
pub fn eventually(mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "it never came to hold");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes that differ from place to place and from version to version.
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
        .collect()
}
