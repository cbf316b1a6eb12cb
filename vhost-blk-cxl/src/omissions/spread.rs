//! Disks in several places: what is copied from one to another, what is marked in the logs of intents, and what begins anew
//! because a place is gone.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cxl_channel::RingPlacement;
use cxl_pool::simulated::{Faults, Omission, OmittingMemory, Random, SimulatedPool};
use cxl_pool::{Area, EndpointId, Generation, HostId, LINE_BYTES, LineCount, LineOffset, Memory, Role};
use pod_protocol::ids::{ChannelId, LeaseGeneration, PlaceNumber, VolumeId};
use pod_protocol::objects::{ChannelObject, DiskObject, Engine, ReplicaObject, Route, VolumeObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::{Progress, Turned};
use vhost_frontend::mock::MockGuest;
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::{Bytes, GuestAddress};

use super::{
    AREA_BYTES, Drive, HALF_BYTES, PLACE_BYTES, POOL_BYTES, REQUEST_BYTES, Ram, SECTOR, SLOTS, Shared, T_IN,
    T_OUT, ToBackend, ToFrontend, device, objects, offer, status, turn,
};
use crate::backend::BackendTask;
use crate::frontend::FrontendTask;
use crate::intent_log::{self, IntentLog};

pub(super) const FRONTEND: HostId = HostId::new(1);
/// Four regions that are copied each by itself, each with a mark of its own.
const REGION_BYTES: usize = 256 << 10;
const DISK_BYTES: usize = 4 * REGION_BYTES;
const UNIT_BYTES: u64 = 64 << 10;
/// The rings of all lives lie before it.
const DATA_LINE: u64 = 8192;
const REQUESTS_MAX: u64 = 60;

pub(super) fn backend_host(index: usize) -> HostId {
    HostId::new(u16::try_from(index).unwrap() + 2)
}

/// A guest with a disk on several devices, and all that serve it.
pub(super) struct Spread {
    random: Random,
    pub(super) pool: SimulatedPool,
    omission: Omission,
    pub(super) disk: DiskObject,
    volume: VolumeObject,
    pub(super) drives: Vec<Arc<Drive>>,
    /// How often everything began.
    life: u32,
    frontend: Option<Shared<FrontendTask<OmittingMemory>>>,
    pub(super) backends: Vec<Shared<BackendTask<OmittingMemory>>>,
    memory: Vec<OmittingMemory>,
    guest: MockGuest,
    /// What the guest should find.
    holds: Vec<u8>,
}

impl Drop for Spread {
    fn drop(&mut self) {
        self.end();
    }
}

impl Spread {
    pub(super) fn new(seed: u64, omission: &Omission, drives: Vec<Vec<u8>>) -> Self {
        let mut random = Random::new(!seed);
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let area = Area::new(LineOffset::new(DATA_LINE), LineCount::covering(AREA_BYTES));
        let (disk, volume) = objects(area, area);
        let replica = |index: usize| ReplicaObject {
            number: u32::try_from(index).unwrap(),
            ssd: format!("{}/ssd0", backend_host(index)),
            route: route(index),
            place: PlaceNumber::FIRST,
            in_sync: true,
            away: false,
            leaving: false,
        };
        let replicas: Vec<ReplicaObject> = (0..drives.len()).map(replica).collect();
        let disk = DiskObject {
            size_bytes: DISK_BYTES as u64,
            ram_area: None,
            route: route(0),
            replicas,
            epoch: 1,
            ..disk
        };
        let volume = VolumeObject { size_bytes: DISK_BYTES as u64, ram_area: None, ..volume };
        let holds = drives[0][..DISK_BYTES].to_vec();
        // Whoever had the area on the frontend's host left its lines anywhere, and the cache has not let go of all of them.
        let predecessor = pool.host(FRONTEND);
        for _ in 0..2000 {
            let line = LineOffset::new(DATA_LINE + random.below(AREA_BYTES / LINE_BYTES as u64));
            predecessor.write(line.bytes(), &[0xee; LINE_BYTES]);
        }
        Self {
            random,
            pool,
            omission: omission.clone(),
            disk,
            volume,
            drives: drives.into_iter().map(|bytes| Arc::new(Drive::new(bytes))).collect(),
            life: 0,
            frontend: None,
            backends: Vec::new(),
            memory: Vec::new(),
            guest: MockGuest::new(32 << 20, 1, 1024),
            holds,
        }
    }

    /// Everything begins, after all that there was has died.
    pub(super) fn begin(&mut self) {
        self.end();
        let hosts = (0..self.drives.len()).map(backend_host);
        for host in std::iter::once(FRONTEND).chain(hosts) {
            self.pool.crash(host);
            self.memory.push(self.omission.in_memory(self.pool.host(host)));
        }
        let run = RunDirectory::new(Path::new("/nonexistent"));
        let task = frontend_of(self.memory[0].clone());
        let mut frontend = Turned::new(task).unwrap();
        for index in 0..self.drives.len() {
            let memory = self.memory[index + 1].clone();
            let ram = Ram::new(
                &self.drives[index],
                (&memory, self.pool.host(backend_host(index))),
                self.random.bits(),
            );
            let devices = vec![device(ram.read_early_by(&self.pool, FRONTEND))];
            let task = BackendTask::new(memory, run.clone(), false, devices, None, Arc::default());
            let mut backend = Turned::new(task).unwrap();
            let lines = RingPlacement::lines(SLOTS, 8).get();
            let number = u64::from(self.life) * 3 + index as u64;
            let rings = [0, 1].map(|direction| RingPlacement {
                start: LineOffset::new((number * 2 + direction) * lines),
                slots: SLOTS,
            });
            rings[0].clear(&self.memory[0]);
            rings[1].clear(&self.memory[index + 1]);
            let object = |host, role, outgoing, incoming| ChannelObject {
                id: route(index).channel,
                engine: Engine::Blk,
                peer: EndpointId::new(host, role),
                generation: Generation::new(self.life + 1),
                outgoing,
                incoming,
                receives: None,
            };
            let here = object(FRONTEND, Role::BlkFrontend, rings[1], rings[0]);
            backend.call(|opened| ToBackend::Channel(here, opened)).unwrap().unwrap();
            let there = object(backend_host(index), Role::BlkBackend, rings[0], rings[1]);
            frontend.call(|opened| ToFrontend::Channel(there, opened)).unwrap().unwrap();
            let volume = Box::new(VolumeObject { channel: route(index).channel, ..self.volume.clone() });
            let intent_log = self.disk.stripe_bytes.is_none().then_some(DISK_BYTES as u64);
            let told = |done| ToBackend::Volume {
                object: volume,
                device: 0,
                intent_log,
                counters: Arc::default(),
                done,
            };
            backend.call(told).unwrap();
            self.backends.push(Arc::new(Mutex::new(backend)));
        }
        let (object, lease) = (Box::new(self.disk.clone()), self.disk.lease);
        let (counters, writeback) = (Arc::default(), Arc::default());
        frontend.send(ToFrontend::Disk { object, counters, writeback, pool_ram: None });
        self.guest = MockGuest::new(32 << 20, 1, 1024);
        let ring = self.guest.device_ring(0, 1 << VIRTIO_F_VERSION_1);
        frontend.send(ToFrontend::RingStarted(lease, Box::new(ring)));
        self.frontend = Some(Arc::new(Mutex::new(frontend)));
        self.life += 1;
        self.interrupt();
    }

    /// Everything dies.
    fn end(&mut self) {
        // They hold each other.
        self.memory.iter().for_each(|memory| memory.interruption().clear());
        self.backends.clear();
        self.frontend = None;
        self.memory.clear();
    }

    /// The frontend's process dies, and nothing else. What it has dirty lies anywhere.
    pub(super) fn frontend_dies(&mut self) {
        self.memory.iter().for_each(|memory| memory.interruption().clear());
        self.frontend = None;
        self.pool.crash(FRONTEND);
    }

    /// Another process on that host.
    pub(super) fn new_frontend(&self, host: HostId) -> FrontendTask<OmittingMemory> {
        frontend_of(self.omission.in_memory(self.pool.host(host)))
    }

    pub(super) fn turn_backends(&self) {
        self.backends.iter().for_each(|backend| _ = turn(backend));
    }

    /// While one has its turn, another one may have several.
    fn interrupt(&mut self) {
        let one_in = [1, 3, 20, 1000][usize::try_from(self.random.below(4)).unwrap()];
        let (there, mut random) = (self.backends.clone(), Random::new(self.random.bits()));
        self.memory[0].interruption().set(move || {
            if random.one_in(one_in) {
                turn(&there[usize::try_from(random.below(there.len() as u64)).unwrap()]);
            }
        });
        for memory in &self.memory[1..] {
            let (here, mut random) = (self.frontend.clone().unwrap(), Random::new(self.random.bits()));
            memory.interruption().set(move || {
                if random.one_in(one_in) {
                    turn(&here);
                }
            });
        }
    }

    pub(super) fn turn_one(&mut self) -> bool {
        let chosen = usize::try_from(self.random.below(self.backends.len() as u64 + 1)).unwrap();
        let progress = match self.backends.get(chosen) {
            Some(backend) => turn(backend),
            None => turn(self.frontend.as_ref().unwrap()),
        };
        progress == Progress::Busy
    }

    /// Until nobody has anything to do, several times in a row.
    fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..200_000 {
            quiet = if self.turn_one() { 0 } else { quiet + 1 };
            if quiet > 200 {
                return;
            }
        }
        panic!("it never comes to rest");
    }

    /// The controller says how the disk is now.
    fn tell(&mut self) {
        self.disk.epoch += 1;
        let object = Box::new(self.disk.clone());
        let mut frontend = self.frontend.as_ref().unwrap().lock().unwrap();
        frontend.call(|done| ToFrontend::Update(object, done)).unwrap();
    }

    fn halves(&self, place: u64) -> [u64; 2] {
        let data = self.guest.data_start() + place * PLACE_BYTES + 1024;
        [data, data + u64::from(HALF_BYTES)]
    }

    /// Offers requests of one kind for these places of the disk, each of a request's length.
    pub(super) fn offer(&mut self, kind: u32, at: &[usize]) -> VecDeque<u16> {
        let mut heads = VecDeque::new();
        for (place, at) in (0..).zip(at) {
            let words = std::iter::repeat_with(|| self.random.bits());
            let data: Vec<u8> = words.flat_map(u64::to_le_bytes).take(REQUEST_BYTES).collect();
            let halves = self.halves(place);
            self.guest.memory().write_slice(&data, GuestAddress(halves[0])).unwrap();
            if kind == T_OUT {
                self.holds[*at..*at + REQUEST_BYTES].copy_from_slice(&data);
            }
            heads.push_back(offer(&mut self.guest, place, (kind, (*at / SECTOR) as u64), halves));
        }
        heads
    }

    /// Waits for the answers to as many requests, and looks at what was read.
    fn finish(&mut self, kind: u32, at: &[usize]) {
        let mut left = at.len();
        for _ in 0..200_000 {
            self.turn_one();
            while self.guest.used(0).is_some() {
                left -= 1;
            }
            if left > 0 {
                continue;
            }
            for (place, at) in (0..).zip(at) {
                assert_eq!(status(&self.guest, place), 0, "request {place} failed");
                let mut found = vec![0; REQUEST_BYTES];
                let data = GuestAddress(self.halves(place)[0]);
                self.guest.memory().read_slice(&mut found, data).unwrap();
                let right = kind == T_OUT || found == self.holds[*at..*at + REQUEST_BYTES];
                assert!(right, "{at} reads as something else");
            }
            return;
        }
        panic!("{left} of {} requests are not answered", at.len());
    }

    pub(super) fn carry_out(&mut self, kind: u32, at: &[usize]) {
        self.offer(kind, at);
        self.finish(kind, at);
    }

    /// Places of the disk that do not meet.
    pub(super) fn places(&mut self, count: u64) -> Vec<usize> {
        let apart = if count > REQUESTS_MAX { 5 } else { 13 };
        let first = self.random.below((DISK_BYTES / REQUEST_BYTES) as u64 - count * apart);
        (0..count).map(|number| usize::try_from(first + number * apart).unwrap() * REQUEST_BYTES).collect()
    }

    fn write_and_read(&mut self) {
        for _ in 0..2 {
            let count = 1 + self.random.below(REQUESTS_MAX);
            let places = self.places(count);
            self.carry_out(T_OUT, &places);
            self.carry_out(T_IN, &places);
        }
    }

    fn replicas_are_alike(&self) {
        let [one, other] = [0, 1].map(|index| self.drives[index].bytes()[..DISK_BYTES].to_vec());
        assert!(one == self.holds, "the first replica has something else than the guest wrote");
        assert!(other == self.holds, "the second replica has something else than the first one");
    }

    /// What was written is marked on each replica: whoever serves the disk next believes that.
    fn is_marked(&self, at: usize) {
        for drive in &self.drives {
            let log: [u8; intent_log::LENGTH] = drive.bytes()[DISK_BYTES..].try_into().unwrap();
            let log = IntentLog::decode(&log, self.volume.volume).expect("a log that can be read").0;
            let mut units = log.units(at as u64, REQUEST_BYTES as u64);
            assert!(units.all(|unit| log.marked.contains(unit)), "{at} was written and is not marked");
        }
    }

    /// An old log that says that nothing was being written, wherever in the area one may be put.
    fn strew_old_logs(&mut self) {
        let mut log = IntentLog::of_unknown(self.volume.volume, DISK_BYTES as u64, vec![0, 1]);
        log.marked.clear();
        let (area, before) = (self.disk.data_area, self.pool.host(HostId::new(9)));
        before.invalidate(area.start_byte(), area.bytes());
        before.full_fence();
        for at in (0..AREA_BYTES).step_by(intent_log::LENGTH) {
            before.write(area.start_byte().saturating_add(at), &log.encode(1));
        }
        before.flush(area.start_byte(), area.bytes());
        before.full_fence();
    }
}

fn frontend_of(memory: OmittingMemory) -> FrontendTask<OmittingMemory> {
    FrontendTask::new(memory, RunDirectory::new(Path::new("/nonexistent")), false, Arc::default(), None)
}

fn route(index: usize) -> Route {
    let channel = ChannelId::new(u32::try_from(index).unwrap() + 1);
    Route { channel, generation: LeaseGeneration::new(1) }
}

/// A device with regions of zeros, and with some that are nearly so.
fn sparse() -> Vec<u8> {
    let mut bytes = vec![0; DISK_BYTES + intent_log::LENGTH];
    for region in [1, 3] {
        bytes[region * REGION_BYTES + 9 * LINE_BYTES] = 7;
    }
    bytes
}

/// A device with a log that says that replicas do not differ.
pub(super) fn in_sync() -> Vec<u8> {
    let mut log = IntentLog::of_unknown(VolumeId::new(1), DISK_BYTES as u64, vec![0, 1]);
    log.marked.clear();
    let mut bytes: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 5).to_le_bytes()[0]).collect();
    bytes.extend(log.encode(1));
    bytes
}

fn other() -> Vec<u8> {
    vec![0xdd; DISK_BYTES + intent_log::LENGTH]
}

/// Nothing is known of the replicas, so one is brought in line with the other. Then a write reaches one of them only, and everything
/// dies: by the log, that is made good.
fn mirrored(seed: u64, omission: &Omission) {
    let mut scene = Spread::new(seed, omission, vec![sparse(), other()]);
    scene.begin();
    scene.settle();
    scene.replicas_are_alike();
    scene.write_and_read();
    let at = scene.places(1);
    scene.carry_out(T_OUT, &at);
    scene.settle();
    scene.replicas_are_alike();
    scene.is_marked(at[0]);
    scene.drives[1].hold(true);
    scene.offer(T_OUT, &at);
    scene.settle();
    let is_there =
        scene.drives[0].bytes()[at[0]..at[0] + REQUEST_BYTES] == scene.holds[at[0]..at[0] + REQUEST_BYTES];
    assert!(is_there, "the first replica has it");
    scene.end();
    scene.drives[1].hold(false);
    for host in [FRONTEND, backend_host(0), backend_host(1)] {
        // All that they had left in their caches is scrubbed.
        scene.pool.crash(host);
        cxl_pool::regions::scrub(&scene.pool.host(host), scene.disk.data_area);
    }
    scene.strew_old_logs();
    scene.begin();
    scene.carry_out(T_IN, &at);
    scene.settle();
    scene.replicas_are_alike();
    assert_eq!(scene.pool.faults(), Faults::default());
}

/// A replica that has reads is dropped: the other one is read in its place, into other buffers.
fn dropped(seed: u64, omission: &Omission) {
    let mut scene = Spread::new(seed, omission, vec![in_sync(), in_sync()]);
    scene.begin();
    let places = scene.places(REQUESTS_MAX);
    scene.carry_out(T_IN, &places[..2]);
    // Nobody's buffer is free again before others are needed.
    scene.drives.iter().for_each(|drive| drive.hold(true));
    scene.offer(T_IN, &places);
    scene.settle();
    let replica = &mut scene.disk.replicas[1];
    (replica.in_sync, replica.away) = (false, true);
    scene.tell();
    scene.drives[0].hold(false);
    let wait = scene.random.below(200);
    (0..wait).for_each(|_| _ = scene.turn_one());
    scene.drives[1].hold(false);
    scene.finish(T_IN, &places);
    scene.settle();
    assert_eq!(scene.pool.faults(), Faults::default());
}

/// A column moves to another device, and what it was about to read where it was begins anew.
fn moved(seed: u64, omission: &Omission) {
    let mut scene = Spread::new(seed, omission, vec![sparse(), sparse(), other()]);
    let column_bytes = DISK_BYTES / 2;
    scene.disk.stripe_bytes = Some(UNIT_BYTES);
    scene.disk.beside = scene.disk.replicas.pop().map(|beside| ReplicaObject { number: 0, ..beside });
    scene.volume.size_bytes = column_bytes as u64;
    let unit = usize::try_from(UNIT_BYTES).unwrap();
    let [one, two] = [0, 1].map(|index| scene.drives[index].bytes()[..column_bytes].to_vec());
    let units = one.chunks(unit).zip(two.chunks(unit));
    scene.holds = units.flat_map(|(one, two)| [one, two]).flatten().copied().collect();
    scene.begin();
    if seed.is_multiple_of(8) {
        scene.write_and_read();
    }
    scene.settle();
    let [from, to] = [0, 2].map(|index| scene.drives[index].bytes()[..column_bytes].to_vec());
    assert!(from == to, "the column is not where it moves to");
    // More than the buffers that copies had, which hold nothing dirty any more: all of them in the column that has moved.
    let places: Vec<usize> = scene.places(200).into_iter().map(|at| at - at / unit % 2 * unit).collect();
    scene.drives.iter().for_each(|drive| drive.hold(true));
    scene.offer(T_IN, &places);
    scene.settle();
    // It has moved, and leaves where it was.
    let beside = scene.disk.beside.take().unwrap();
    let left = std::mem::replace(&mut scene.disk.replicas[0], beside);
    scene.disk.route = scene.disk.replicas[0].route;
    scene.disk.beside = Some(ReplicaObject { leaving: true, ..left });
    scene.tell();
    scene.disk.beside = None;
    scene.tell();
    scene.drives[1].hold(false);
    scene.drives[2].hold(false);
    let wait = scene.random.below(200);
    (0..wait).for_each(|_| _ = scene.turn_one());
    scene.drives[0].hold(false);
    scene.finish(T_IN, &places);
    scene.settle();
    assert_eq!(scene.pool.faults(), Faults::default());
}

/// What a seed runs; it panics if something is noticed.
pub(super) fn run(seed: u64, omission: &Omission) {
    match seed % 4 {
        0 => moved(seed, omission),
        1 => mirrored(seed, omission),
        _ => dropped(seed, omission),
    }
}
