//! A frontend with a backend of an earlier version, which knows no lists of segments.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use cxl_channel::RingPlacement;
use cxl_pool::{
    Area, CreateOptions, EndpointId, Generation, HardwareMemory, HostId, LineCount, LineOffset, Memory, Pool,
    Role,
};
use pod_protocol::data_channel::DataChannel;
use pod_protocol::ids::{ChannelId, LeaseId, PlaceNumber};
use pod_protocol::objects::{ChannelObject, DiskObject, Engine, ReplicaObject, VolumeObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::Turned;
use vhost_frontend::PoolRam;
use vhost_frontend::mock::{MockGuest, Piece};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::{Bytes, GuestAddress};

use crate::backend::check::check;
use crate::frontend::{FrontendTask, Message};
use crate::message::{Operation, Request, Status, WORDS, Words};
use crate::omissions::objects;
use crate::ssd::Geometry;

const SLOTS: u32 = 256;
const AREA_BYTES: u64 = 4 << 20;
const RAM_BYTES: u64 = 16 << 20;
const DISK_BYTES: usize = 512 << 10;
/// Of each half of a request.
const HALF_BYTES: u32 = 128 << 10;
const PLACE_BYTES: u64 = 512 << 10;
const T_IN: u32 = 0;
const T_OUT: u32 = 1;

/// The other side, as far as a frontend sees of it.
struct Older {
    memory: HardwareMemory,
    data: DataChannel<HardwareMemory, WORDS>,
    volume: VolumeObject,
    disk: Vec<u8>,
    refused: usize,
    done: usize,
}

impl Older {
    fn turn(&mut self) {
        if !self.data.ready() {
            return;
        }
        while let Some(mut words) = self.data.receive() {
            // These it does not look at.
            words[6] = 0;
            let request = Request::decode(&words).unwrap();
            let answer = self.carry_out(&request);
            self.data.send(answer).unwrap();
            self.data.publish();
        }
    }

    fn carry_out(&mut self, request: &Request) -> Words {
        let device = Geometry { size_bytes: DISK_BYTES as u64, block_bytes: 512 };
        let mut words = if let Ok(at) = check(request, &[], &self.volume, None, device) {
            self.done += 1;
            let at = usize::try_from(at).unwrap();
            let place = &mut self.disk[at..at + usize::try_from(request.length_bytes).unwrap()];
            match request.operation {
                Operation::Read => self.memory.write(request.data_start(), place),
                Operation::Write => self.memory.read(request.data_start(), place),
                other => panic!("{other:?} was not asked for"),
            }
            request.completion(Status::Ok, request.length_bytes, 0).encode()
        } else {
            self.refused += 1;
            request.not_done(Status::IoError).encode()
        };
        // What it leaves as it is.
        words[4] = 0;
        words
    }
}

struct Scene {
    frontend: Turned<FrontendTask<HardwareMemory>>,
    older: Older,
    guest: MockGuest,
}

fn channel(peer: Role, outgoing: RingPlacement, incoming: RingPlacement) -> ChannelObject {
    let peer = EndpointId::new(HostId::new(1), peer);
    let (id, generation) = (ChannelId::new(1), Generation::new(1));
    ChannelObject { id, engine: Engine::Blk, peer, generation, outgoing, incoming, receives: None }
}

impl Scene {
    fn new() -> Self {
        Self::of(|_| {})
    }

    /// With a disk that is striped.
    fn striped() -> Self {
        Self::of(|disk| {
            let column = |number| ReplicaObject {
                number,
                ssd: format!("h1/ssd{number}"),
                route: disk.route,
                place: PlaceNumber::FIRST,
                in_sync: true,
                away: false,
                leaving: false,
            };
            // What is asked for lies in the first one.
            (disk.replicas, disk.stripe_bytes) = (vec![column(0), column(1)], Some(DISK_BYTES as u64));
        })
    }

    fn of(change: impl FnOnce(&mut DiskObject)) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = CreateOptions { size_bytes: Some(64 << 20), ..CreateOptions::default() };
        let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
        let memory = pool.hardware();
        let lines = RingPlacement::lines(SLOTS, 8).get();
        let first = pool.layout().data().start.get();
        let at = |lines| LineOffset::new(first + lines);
        let rings = [0, lines].map(|start| RingPlacement { start: at(start), slots: SLOTS });
        for ring in rings {
            ring.clear(&memory);
        }
        let data = Area::new(at((4 * lines).next_multiple_of(64)), LineCount::covering(AREA_BYTES));
        let ram = Area::new(data.start.saturating_add(data.lines), LineCount::covering(RAM_BYTES));
        let (mut disk, volume) = objects(data, ram);
        change(&mut disk);
        let run = RunDirectory::new(Path::new("/nonexistent"));
        let there = channel(Role::BlkFrontend, rings[1], rings[0]);
        let data = DataChannel::open(&memory, &there, &run).unwrap();
        let older =
            Older { memory: memory.clone(), data, volume, disk: vec![0; DISK_BYTES], refused: 0, done: 0 };
        let task = FrontendTask::new(memory, run, false, Arc::default(), None);
        let mut frontend = Turned::new(task).unwrap();
        let here = channel(Role::BlkBackend, rings[0], rings[1]);
        frontend.call(|opened| Message::Channel(here, opened)).unwrap().unwrap();
        let file = File::from(pool.fd().try_clone_to_owned().unwrap());
        let guest = MockGuest::in_file(file, ram.start_byte().get(), RAM_BYTES, 1, 256);
        let mut scene = Self { frontend, older, guest };
        scene.offer_disk(disk, PoolRam { file: pool.file_identity(), leased: Some(ram) });
        scene
    }

    fn offer_disk(&mut self, disk: DiskObject, pool_ram: PoolRam) {
        let lease: LeaseId = disk.lease;
        self.frontend.send(Message::Disk {
            object: Box::new(disk),
            counters: Arc::default(),
            writeback: Arc::default(),
            pool_ram: Some(pool_ram),
        });
        let ring = Box::new(self.guest.device_ring(0, 1 << VIRTIO_F_VERSION_1));
        self.frontend.send(Message::RingStarted(lease, ring));
    }

    fn place(&self, place: u64) -> u64 {
        self.guest.data_start().next_multiple_of(4096) + place * PLACE_BYTES
    }

    /// Where the halves of a request's data are.
    fn halves(&self, place: u64) -> [u64; 2] {
        let half = u64::from(HALF_BYTES);
        [self.place(place) + 4096 + half + 4096, self.place(place) + 4096]
    }

    /// Carries out so many requests at once, and returns how many lists were refused and how many requests done.
    fn carry_out(&mut self, kind: u32, count: u64) -> (usize, usize) {
        let before = (self.older.refused, self.older.done);
        for place in 0..count {
            let at = self.place(place);
            let mut header = kind.to_le_bytes().to_vec();
            header.extend([0; 4]);
            header.extend((place % 2 * 512).to_le_bytes());
            self.guest.memory().write_slice(&header, GuestAddress(at)).unwrap();
            self.guest.memory().write_slice(&[0xaa], GuestAddress(at + 64)).unwrap();
            let mut pieces = vec![Piece { address: at, bytes: 16, writable: false }];
            let writable = kind == T_IN;
            pieces.extend(self.halves(place).map(|address| Piece { address, bytes: HALF_BYTES, writable }));
            pieces.push(Piece { address: at + 64, bytes: 1, writable: true });
            self.guest.offer_silently(0, &pieces);
        }
        let mut left = count;
        for _ in 0..10_000 {
            self.frontend.turn();
            self.older.turn();
            while self.guest.used(0).is_some() {
                left -= 1;
            }
            if left == 0 {
                break;
            }
        }
        assert_eq!(left, 0, "not answered");
        for place in 0..count {
            let status: u8 = self.guest.memory().read_obj(GuestAddress(self.place(place) + 64)).unwrap();
            assert_eq!(status, 0, "request {place}");
        }
        (self.older.refused - before.0, self.older.done - before.1)
    }

    fn put(&self, place: u64, byte: u8) {
        for (address, byte) in self.halves(place).into_iter().zip([byte, !byte]) {
            let bytes = vec![byte; HALF_BYTES as usize];
            self.guest.memory().write_slice(&bytes, GuestAddress(address)).unwrap();
        }
    }

    fn holds(&self, place: u64, byte: u8) -> bool {
        self.halves(place).into_iter().zip([byte, !byte]).all(|(address, byte)| {
            let mut bytes = vec![0; HALF_BYTES as usize];
            self.guest.memory().read_slice(&mut bytes, GuestAddress(address)).unwrap();
            bytes.iter().all(|read| *read == byte)
        })
    }
}

#[test]
fn what_it_refuses_as_a_list_is_copied() {
    for mut scene in [Scene::new(), Scene::striped()] {
        copied(&mut scene);
    }
}

fn copied(scene: &mut Scene) {
    scene.put(0, 0x17);
    scene.put(1, 0x2a);
    assert_eq!(scene.carry_out(T_OUT, 2), (2, 2));
    // From now on it is not asked again.
    scene.put(0, 0);
    scene.put(1, 0);
    assert_eq!(scene.carry_out(T_IN, 2), (0, 2));
    assert!(scene.holds(0, 0x17) && scene.holds(1, 0x2a));
}

#[test]
fn more_than_there_are_buffers_for_waits_for_them() {
    let mut scene = Scene::new();
    scene.older.disk[..HALF_BYTES as usize].fill(0x17);
    scene.older.disk[HALF_BYTES as usize..2 * HALF_BYTES as usize].fill(!0x17);
    let count = 2 * AREA_BYTES / u64::from(2 * HALF_BYTES) - 4;
    assert_eq!(
        scene.carry_out(T_IN, count),
        (usize::try_from(count).unwrap(), usize::try_from(count).unwrap())
    );
    assert!((0..count).step_by(2).all(|place| scene.holds(place, 0x17)));
}
