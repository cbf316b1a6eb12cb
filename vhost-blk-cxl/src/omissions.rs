//! What makes buffers change hands safely is left out, one thing at a time, wherever the engine does it; something that a
//! guest sees, or a rule of the memory, must break.
//!
//! Both sides are turned by hand, and what comes when follows from the seed alone.

mod given_on;
mod ram;
mod spread;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cxl_channel::RingPlacement;
use cxl_pool::simulated::{Faults, Mutilation, Omission, OmittingMemory, Random, SimulatedPool};
use cxl_pool::{
    Area, ByteOffset, EndpointId, FileIdentity, Generation, HostId, LineCount, LineOffset, Memory, Role,
};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, PlaceNumber, VolumeId};
use pod_protocol::objects::{ChannelObject, DiskObject, Engine, Priority, Qos, Route, VolumeObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::{Progress, Task, Turned};
use vhost_frontend::PoolRam;
use vhost_frontend::mock::{MockGuest, Piece};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::{Bytes, GuestAddress};

use self::ram::{Drive, Ram};
use crate::backend::{BackendTask, Device, Message as ToBackend, QUEUE_DEPTH, Sharing, Watch};
use crate::frontend::{FrontendTask, Message as ToFrontend};

const FRONTEND: HostId = HostId::new(1);
const BACKEND: HostId = HostId::new(2);

const POOL_BYTES: u64 = 8 << 20;
/// As small as an area may be.
const AREA_BYTES: u64 = 4 << 20;
const DISK_BYTES: usize = 512 << 10;
const SECTOR: usize = 512;
/// What predecessors left in the caches of both hosts.
const LEFT_BYTES: usize = 64 << 10;
/// More than what either side takes in a turn.
const REQUESTS_MAX: u64 = 240;
const REQUEST_BYTES: usize = 2 * HALF_BYTES as usize;
/// Requests that have a place, at least as many.
const REQUESTS_ROOM: u64 = 256;
const HALF_BYTES: u32 = 512;
/// Where the guest has its memory in the pool.
const RAM_ADDRESS: u64 = 0x4000_0000;
/// Bytes of guest memory for a request: its header and status, and its data behind them.
const PLACE_BYTES: u64 = 2 << 10;
const SLOTS: u32 = 256;
const T_IN: u32 = 0;
const T_OUT: u32 = 1;

/// Where a guest has the data of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lies {
    /// Elsewhere: it is copied.
    Outside,
    /// In the pool, in one piece.
    InPool,
    /// In the pool, in two.
    Scattered,
}

type Shared<T> = Arc<Mutex<Turned<T>>>;

/// Gives one side a turn, unless it is just having one.
fn turn<T: Task>(side: &Shared<T>) -> Progress {
    side.try_lock().map_or(Progress::Idle, |mut side| side.turn())
}

/// A guest with a disk, and both sides that serve it.
struct Scene {
    random: Random,
    pool: SimulatedPool,
    memory: [OmittingMemory; 2],
    frontend: Shared<FrontendTask<OmittingMemory>>,
    backend: Shared<BackendTask<OmittingMemory>>,
    guest: MockGuest,
    volume: VolumeObject,
    /// What of the pool is the guest's memory. Its bytes are the simulated pool's: no file has them.
    ram: Area,
    /// Of each place.
    lies: Vec<Lies>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        // They hold each other.
        self.memory.iter().for_each(|memory| memory.interruption().clear());
    }
}

pub(crate) fn objects(data_area: Area, ram: Area) -> (DiskObject, VolumeObject) {
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
        serial: "1".to_owned(),
        size_bytes: DISK_BYTES as u64,
        block_bytes: 512,
        discard_granularity_bytes: None,
        read_only: false,
        queues: 1,
        data_area,
        ram_area: Some(ram),
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
        start_bytes: 0,
        size_bytes: DISK_BYTES as u64,
        read_only: false,
        generation: route.generation,
        channel: route.channel,
        data_area,
        ram_area: Some(ram),
        instance: InstanceId::new(1),
        qos: Qos::default(),
        priority: Priority::DEFAULT,
    };
    (disk, volume)
}

/// One side of the channel.
fn channel(peer: (HostId, Role), outgoing: RingPlacement, incoming: RingPlacement) -> ChannelObject {
    let peer = EndpointId::new(peer.0, peer.1);
    let (id, generation) = (ChannelId::new(1), Generation::new(1));
    ChannelObject { id, engine: Engine::Blk, peer, generation, outgoing, incoming, receives: None }
}

/// As the backend has it.
fn device(ssd: Ram) -> Device {
    Device {
        name: "ssd0".to_owned(),
        ssd: Box::new(ssd),
        counters: Arc::default(),
        failed: Arc::default(),
        gave_up: false,
        watch: Watch::new(None),
        sharing: Sharing::new(QUEUE_DEPTH),
    }
}

/// Has a guest offer a request, which is at a place of its memory and has its data in two halves elsewhere.
fn offer(guest: &mut MockGuest, place: u64, (kind, sector): (u32, u64), halves: [u64; 2]) -> u16 {
    let at = guest.data_start() + place * PLACE_BYTES;
    let mut header = kind.to_le_bytes().to_vec();
    header.extend(0_u32.to_le_bytes());
    header.extend(sector.to_le_bytes());
    let status = at + 64;
    guest.memory().write_slice(&header, GuestAddress(at)).unwrap();
    guest.memory().write_slice(&[0xaa], GuestAddress(status)).unwrap();
    let mut pieces = vec![Piece { address: at, bytes: 16, writable: false }];
    pieces.extend(halves.map(|address| Piece { address, bytes: HALF_BYTES, writable: kind == T_IN }));
    pieces.push(Piece { address: status, bytes: 1, writable: true });
    guest.offer_silently(0, &pieces)
}

/// What the guest was answered.
fn status(guest: &MockGuest, place: u64) -> u8 {
    let at = GuestAddress(guest.data_start() + place * PLACE_BYTES + 64);
    guest.memory().read_obj(at).unwrap()
}

impl Scene {
    fn new(seed: u64, omission: &Omission) -> Self {
        let mut random = Random::new(!seed);
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let lines = RingPlacement::lines(SLOTS, 8).get();
        let rings = [0, lines].map(|start| RingPlacement { start: LineOffset::new(start), slots: SLOTS });
        let data = Area::new(LineOffset::new(4 * lines), LineCount::covering(AREA_BYTES));
        // A page may be mapped.
        let behind = data.start.saturating_add(data.lines).get().next_multiple_of(64);
        let ram = Area::new(LineOffset::new(behind), LineCount::covering(REQUESTS_ROOM * PLACE_BYTES));
        // Predecessors on both hosts have used the area and died: what they wrote may leave the caches at any time.
        for host in [FRONTEND, BACKEND] {
            let memory = pool.host(host);
            if host == FRONTEND {
                memory.write(data.start_byte(), &vec![0xee; LEFT_BYTES]);
            }
            memory.read(data.start_byte(), &mut [0; 4096]);
            pool.crash(host);
        }
        let memory = [FRONTEND, BACKEND].map(|host| omission.in_memory(pool.host(host)));
        rings[0].clear(&memory[0]);
        rings[1].clear(&memory[1]);
        let run = RunDirectory::new(Path::new("/nonexistent"));
        let drive = Arc::new(Drive::new(vec![0; DISK_BYTES]));
        let device = device(Ram::new(&drive, (&memory[1], pool.host(BACKEND)), random.bits()));
        let task =
            BackendTask::new(memory[1].clone(), run.clone(), false, vec![device], None, Arc::default());
        let mut backend = Turned::new(task).unwrap();
        let task = FrontendTask::new(memory[0].clone(), run, false, Arc::default(), None);
        let mut frontend = Turned::new(task).unwrap();
        let (disk, volume) = objects(data, ram);
        let object = channel((FRONTEND, Role::BlkFrontend), rings[1], rings[0]);
        backend.call(|opened| ToBackend::Channel(object, opened)).unwrap().unwrap();
        let object = channel((BACKEND, Role::BlkBackend), rings[0], rings[1]);
        frontend.call(|opened| ToFrontend::Channel(object, opened)).unwrap().unwrap();
        let mut guest = MockGuest::new(32 << 20, 1, 1024);
        let file = tempfile::tempfile().unwrap();
        file.set_len(POOL_BYTES).unwrap();
        guest.add_memory(RAM_ADDRESS, &file, ram.start_byte().get(), ram.bytes());
        let pool_ram = PoolRam { file: FileIdentity::of(&file).unwrap(), leased: Some(ram) };
        let lease = disk.lease;
        frontend.send(ToFrontend::Disk {
            object: Box::new(disk),
            counters: Arc::default(),
            writeback: Arc::default(),
            pool_ram: Some(pool_ram),
        });
        frontend
            .send(ToFrontend::RingStarted(lease, Box::new(guest.device_ring(0, 1 << VIRTIO_F_VERSION_1))));
        let (frontend, backend) = (Arc::new(Mutex::new(frontend)), Arc::new(Mutex::new(backend)));
        let mut scene =
            Self { random, pool, memory, frontend, backend, guest, volume, ram, lies: Vec::new() };
        scene.scatter();
        scene.interrupt();
        scene
    }

    /// While one side is having its turn, the other one may have several.
    fn interrupt(&mut self) {
        let one_in = [1, 3, 20, 1000][usize::try_from(self.random.below(4)).unwrap()];
        let (there, mut random) = (Arc::clone(&self.backend), Random::new(self.random.bits()));
        self.memory[0].interruption().set(move || {
            if random.one_in(one_in) {
                turn(&there);
            }
        });
        let (here, mut random) = (Arc::clone(&self.frontend), Random::new(self.random.bits()));
        self.memory[1].interruption().set(move || {
            if random.one_in(one_in) {
                turn(&here);
            }
        });
    }

    /// The backend hears of the volume: at first, or when requests are there already.
    fn give_volume(&self) {
        let (object, device, counters) = (Box::new(self.volume.clone()), 0, Arc::default());
        let mut backend = self.backend.lock().unwrap();
        backend.call(|done| ToBackend::Volume { object, device, intent_log: None, counters, done }).unwrap();
    }

    fn offer(&mut self, place: u64, kind: u32, sector: u64) -> u16 {
        let halves = self.halves(place);
        offer(&mut self.guest, place, (kind, sector), halves)
    }

    /// Where the halves of a request's data are, as the guest sees it.
    fn halves(&self, place: u64) -> [u64; 2] {
        let in_pool = RAM_ADDRESS + place * PLACE_BYTES;
        let half = u64::from(HALF_BYTES);
        match self.lies[usize::try_from(place).unwrap()] {
            Lies::Outside => {
                let data = self.guest.data_start() + place * PLACE_BYTES + 1024;
                [data, data + half]
            }
            Lies::InPool => [in_pool, in_pool + half],
            // The second before the first, and not beside it.
            Lies::Scattered => [in_pool + 1024, in_pool],
        }
    }

    /// The place of guest memory in the pool, if it is there.
    fn in_pool(&self, address: u64) -> Option<ByteOffset> {
        let offset = address.checked_sub(RAM_ADDRESS)?;
        Some(self.ram.start_byte().saturating_add(offset))
    }

    /// The guest stores data: through its host's cache, which is the frontend's.
    fn put(&self, place: u64, data: &[u8]) {
        for (address, half) in self.halves(place).into_iter().zip(data.chunks(HALF_BYTES as usize)) {
            match self.in_pool(address) {
                Some(at) => self.memory[0].write(at, half),
                None => self.guest.memory().write_slice(half, GuestAddress(address)).unwrap(),
            }
        }
    }

    /// The guest looks at data.
    fn get(&self, place: u64) -> Vec<u8> {
        let mut data = vec![0; REQUEST_BYTES];
        for (address, half) in self.halves(place).into_iter().zip(data.chunks_mut(HALF_BYTES as usize)) {
            match self.in_pool(address) {
                Some(at) => self.memory[0].read(at, half),
                None => self.guest.memory().read_slice(half, GuestAddress(address)).unwrap(),
            }
        }
        data
    }

    /// The guest has the data of its next requests anywhere.
    fn scatter(&mut self) {
        let choices = [Lies::Outside, Lies::InPool, Lies::Scattered];
        let any = || choices[usize::try_from(self.random.below(3)).unwrap()];
        self.lies = std::iter::repeat_with(any).take(usize::try_from(REQUESTS_ROOM).unwrap()).collect();
    }

    fn turn_one(&mut self) {
        if self.random.one_in(2) {
            turn(&self.frontend);
        } else {
            turn(&self.backend);
        }
    }

    /// Carries out requests of one kind, offered one after the other while both sides work, or all before. With how many the
    /// backend has no volume yet, it is given it then.
    fn carry_out(&mut self, kind: u32, sectors: &[u64], volume_comes: bool) {
        let hurry = self.random.one_in(2);
        let mut heads = VecDeque::new();
        for (place, sector) in (0..).zip(sectors) {
            heads.push_back(self.offer(place, kind, *sector));
            while !hurry && self.random.one_in(2) {
                self.turn_one();
            }
        }
        if volume_comes {
            (0..self.random.below(100)).for_each(|_| self.turn_one());
            self.give_volume();
        }
        let mut left = sectors.len();
        for _ in 0..100_000 {
            self.turn_one();
            while let Some(used) = self.guest.used(0) {
                assert!(heads.contains(&used.head), "an answer to nothing");
                left -= 1;
            }
            if left == 0 {
                for place in 0..sectors.len() as u64 {
                    assert_eq!(status(&self.guest, place), 0, "request {place} failed");
                }
                return;
            }
        }
        panic!("{left} of {} requests are not answered", sectors.len());
    }

    /// What was written is read, many times over the same buffers.
    fn data_stays_whole(&mut self) {
        let mut disk = vec![0_u8; DISK_BYTES];
        for round in 0..4 {
            // At first now and then as many as may be under way: then nothing more is taken from the channel before they begin.
            let all = round == 0 && self.random.one_in(3);
            let count = if all { u64::from(SLOTS) } else { 1 + self.random.below(REQUESTS_MAX) };
            let per_request = (REQUEST_BYTES / SECTOR) as u64;
            let first = self.random.below((DISK_BYTES / REQUEST_BYTES) as u64 - count);
            let sectors: Vec<u64> = (first..first + count).map(|place| place * per_request).collect();
            self.scatter();
            for (place, sector) in (0..).zip(&sectors) {
                let words = std::iter::repeat_with(|| self.random.bits());
                let data: Vec<u8> = words.flat_map(u64::to_le_bytes).take(REQUEST_BYTES).collect();
                self.put(place, &data);
                let at = usize::try_from(*sector).unwrap() * SECTOR;
                disk[at..at + REQUEST_BYTES].copy_from_slice(&data);
            }
            self.carry_out(T_OUT, &sectors, round == 0);
            self.scatter();
            for place in 0..count {
                self.put(place, &[0x55; REQUEST_BYTES]);
            }
            self.carry_out(T_IN, &sectors, false);
            for (place, sector) in (0..).zip(&sectors) {
                let read = self.get(place);
                let at = usize::try_from(*sector).unwrap() * SECTOR;
                assert!(read == disk[at..at + REQUEST_BYTES], "sector {sector} reads as something else");
            }
        }
    }
}

fn run(seed: u64, omission: &Omission) {
    // Those in several places take longer, and have fewer of the places in the source.
    if seed % 4 != 3 {
        return spread::run(seed, omission);
    }
    let mut scene = Scene::new(seed, omission);
    scene.data_stays_whole();
    assert_eq!(scene.pool.faults(), Faults::default());
}

const EXCUSED: [&str; 1] = [
    // Whoever accepts a channel's generation fences too, before anything is sent.
    "backend/task.rs is_ready: self.memory.full_fence()",
];

#[test]
fn every_omission_in_the_engine_is_noticed() {
    Mutilation {
        target: "-p vhost-blk-cxl --lib",
        workspace: &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        sources: &["vhost-blk-cxl/src", "vhost-frontend/src/copy.rs"],
        complete: 120,
        seeds: 1200,
        excused: &EXCUSED,
        unmet: &[
            ("frontend/flushed.rs flush: memory.flush(ByteOffset::new(self.start + unit * self.unit_bytes), self.unit_bytes)",
                "left out where it is called"),
        ],
    }
    .prove(run);
}
