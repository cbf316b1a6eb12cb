//! What makes buffers change hands safely is left out, one thing at a time, wherever the engine does it; something that a
//! guest sees, or a rule of the memory, must break.

use std::path::Path;
use std::sync::{Arc, Mutex, TryLockError};

use cxl_channel::RingPlacement;
use cxl_pool::simulated::{Faults, Mutilation, Omission, OmittingMemory, Random, SimulatedPool};
use cxl_pool::{Area, HostId, LineCount, Memory};
use pod_protocol::objects::{NicPolicy, Object, PortObject, RegistrationObject, RegistrationState};
use vhost_net_cxl::ethernet::announcement;
use vhost_net_cxl::nic::null::NullNic;
use vhost_net_cxl::nic::{BATCH_FRAMES, NicConfig};

use crate::guest::{Guest, ram_area};
use crate::pod::{
    NIC, POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, connect, lease, mac, port,
    registration, route, settle,
};

const BUFFER_BYTES: u32 = 2048;
const FRAMES: u32 = 120;
/// As `connect` has it.
const CHANNEL_SLOTS: u32 = 512;

/// Two guests of one NIC that echoes: what they send to each other stays in the backend, the rest comes back.
struct Scene {
    pool: SimulatedPool,
    memory: [OmittingMemory; 2],
    frontend: Arc<Mutex<TestFrontend<OmittingMemory>>>,
    backend: Arc<Mutex<TestBackend<OmittingMemory>>>,
    guests: [Guest; 2],
}

impl Drop for Scene {
    fn drop(&mut self) {
        // They hold each other.
        self.memory.iter().for_each(|memory| memory.interruption().clear());
    }
}

/// Gives one side a turn, unless it is just having one.
fn turn(side: &Mutex<impl Turn>) {
    match side.try_lock() {
        Ok(mut side) => _ = side.turn_once(),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Poisoned(_)) => panic!("one side panicked"),
    }
}

/// What has been put into the ring of one side leaves its cache now and then before it is published, as it may.
fn leaving(pool: &SimulatedPool, seed: u64, frontend: bool, one_in: u64) -> impl FnMut() + Send + use<> {
    let cache = pool.host(HostId::new(if frontend { 1 } else { 2 }));
    let ring = channel(1, 1, CHANNEL_SLOTS, frontend).outgoing;
    let mut random = Random::new(seed);
    move || {
        if random.one_in(one_in) {
            cache.write_back(ring.start.bytes(), RingPlacement::lines(ring.slots, 2).bytes());
        }
    }
}

fn transmit_area(number: u32) -> Area {
    area(8 + 4 * u64::from(number), 1)
}

/// Few buffers, so that each is used again and again.
fn receive_area() -> Area {
    Area::new(area(32, 1).start, LineCount::new(600 * u64::from(BUFFER_BYTES) / 64))
}

/// A NIC whose device bypasses the backend's cache does so with every second seed; with two of five both guests are in a VLAN.
fn scene(seed: u64, omission: &Omission) -> Scene {
    let pool = SimulatedPool::new(seed, POOL_BYTES);
    let host = |number| omission.in_memory(pool.host(HostId::new(number)));
    let memory = [host(1), host(2)];
    // The first guest's memory lies in the pool with two of three seeds: what it stores goes through its host's caches.
    let first = if seed.is_multiple_of(3) {
        Guest::new(64)
    } else {
        Guest::in_simulated_pool(&pool.host(HostId::new(1)), 64)
    };
    let pool_file = first.pool_file;
    let mut frontend = TestFrontend::new(&memory[0]).with_pool_file(pool_file);
    let mut backend = if seed.is_multiple_of(2) {
        TestBackend::new(&memory[1], "mode = 'echo'", receive_area())
    } else {
        let table = format!("name = '{NIC}'\ndriver = 'null'\nmode = 'echo'\ncache-bypassing = true");
        let config = NicConfig::parse(&table.parse().expect("TOML")).expect("valid");
        TestBackend::with_nic(
            &memory[1],
            Box::new(NullNic::new(&config, pool.device(HostId::new(2)))),
            receive_area(),
        )
    };
    connect(&mut frontend, &mut backend, 1);
    let mut guests = [first, Guest::new(64)];
    // The second one wants whole checksums, which the backend then completes in the buffer.
    let plain = all_features() & !vhost_net_cxl::offloads::Offloads::ALL.features();
    let policy = NicPolicy { vlan: (seed % 5 < 2).then_some(10), ..NicPolicy::default() };
    for (number, guest) in (1..).zip(&mut guests) {
        let registration = registration(number, 1, 1, RegistrationState::Active, transmit_area(number));
        let ram_area = pool_file.filter(|_| number == 1).map(|_| ram_area());
        backend.apply(Object::Registration(RegistrationObject {
            ram_area,
            policy: policy.clone(),
            ..registration
        }));
        let port = port(number, transmit_area(number), route(1, 1), None);
        frontend.apply(Object::Port(PortObject { ram_area, ..port }));
        guest.post(64, BUFFER_BYTES);
        frontend.start(number, guest, if number == 1 { all_features() } else { plain });
    }
    settle(&mut [&mut frontend, &mut backend]);
    let (frontend, backend) = (Arc::new(Mutex::new(frontend)), Arc::new(Mutex::new(backend)));
    // While one side is having its turn, the other one may have several.
    let (there, here) = (Arc::clone(&backend), Arc::clone(&frontend));
    let (mut leaves, mut leaves_too) = (leaving(&pool, seed, true, 8), leaving(&pool, seed, false, 8));
    memory[0].interruption().set(move || {
        leaves();
        turn(&there);
    });
    memory[1].interruption().set(move || {
        leaves_too();
        turn(&here);
    });
    Scene { pool, memory, frontend, backend, guests }
}

/// Of the frames to the outside some are to be cut into several by the NIC.
fn is_long(number: u32) -> bool {
    matches!(number % 20, 4 | 8)
}

fn frame(number: u32, to: u8) -> Vec<u8> {
    let bytes = 60 + (number as usize).wrapping_mul(2_654_435_761) % 1400;
    let bytes = if is_long(number) { bytes + 3000 } else { bytes };
    let mut frame: Vec<u8> = (0..bytes).map(|place| (place + number as usize).to_le_bytes()[0]).collect();
    frame[..6].copy_from_slice(&mac(to).bytes());
    frame[6..12].copy_from_slice(&mac(1).bytes());
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

/// Where the checksum that a frame lacks begins to be summed, and where it lies.
const SUMMED_FROM: u8 = 34;
const CHECKSUM_OFFSET: u8 = 16;

/// Of the frames to the other guest every second one lacks its checksum.
fn lacks_checksum(number: u32) -> bool {
    number % 4 == 3
}

/// The virtio-net header that a frame is sent with (virtio 1.2, 5.1.6).
fn header(number: u32) -> [u8; 12] {
    if is_long(number) {
        // TCP over IPv4: 54 bytes of headers, and 1448 more in each.
        [1, 1, 54, 0, 0xa8, 5, SUMMED_FROM, 0, CHECKSUM_OFFSET, 0, 0, 0]
    } else if lacks_checksum(number) {
        [1, 0, 0, 0, 0, 0, SUMMED_FROM, 0, CHECKSUM_OFFSET, 0, 0, 0]
    } else {
        [0; 12]
    }
}

/// What arrives of a frame at the other guest, which takes none without its checksum.
fn finished(number: u32) -> Vec<u8> {
    let mut frame = frame(number, 2);
    if lacks_checksum(number) {
        let words = frame[SUMMED_FROM.into()..].chunks(2);
        let sum: u64 =
            words.map(|word| u64::from(word[0]) << 8 | word.get(1).map_or(0, |low| u64::from(*low))).sum();
        // Ones' complement: what is carried out comes in again (RFC 1071), twice at most for so few words.
        let sum = (0..3).fold(sum, |sum, _| (sum & 0xffff) + (sum >> 16));
        let sum = u16::try_from(sum).expect("folded");
        let at = usize::from(SUMMED_FROM + CHECKSUM_OFFSET);
        frame[at..at + 2].copy_from_slice(&(!sum).to_be_bytes());
    }
    frame
}

/// Whether this is an announcement that the NIC sent back.
fn comes_back(frame: &[u8]) -> bool {
    [1, 2].into_iter().any(|number| {
        let mut sent = announcement(mac(number));
        sent[..12].rotate_left(6);
        frame == sent
    })
}

/// How often the first guest's address is announced.
const ANNOUNCEMENTS: u32 = 5;

/// The first guest sends to the second one and to the outside in turn; everything arrives, in order and unaltered. Its address is
/// announced meanwhile, which the second one hears.
fn frames_arrive(scene: &mut Scene) {
    let Scene { frontend, backend, guests, .. } = scene;
    let [mut echoed, mut crossed] = [0_u32, 0];
    let (mut sent, mut freed) = (0, 0);
    let [mut asked, mut heard] = [0, 0];
    for round in 0..20_000 {
        // One to three at a time, so that announcements begin anywhere in a line of the ring.
        for _ in 0..=round % 3 {
            let to = if sent % 2 == 0 { 200 } else { 2 };
            let (header, frame) = (header(sent), frame(sent, to));
            let offer = |guest: &mut Guest| match sent % 5 {
                // Where they are lent, the list of so many takes more than a line.
                3 => guest.send_in_pieces(&header, &frame, 9),
                _ => guest.send(&header, &frame),
            };
            if sent < FRAMES && offer(&mut guests[0]) {
                sent += 1;
            }
        }
        if asked == heard && asked < ANNOUNCEMENTS && sent > 20 * asked {
            asked += 1;
            frontend.lock().expect("unpoisoned").task.announce(lease(1), mac(1));
        }
        turn(frontend);
        turn(backend);
        for (_, got) in guests[0].received(BUFFER_BYTES) {
            if comes_back(&got) {
                continue;
            }
            let mut expected = frame(2 * echoed, 200);
            expected[..12].rotate_left(6);
            assert!(got == expected, "echoed frame {echoed} is wrong");
            echoed += 1;
        }
        for (_, got) in guests[1].received(BUFFER_BYTES) {
            if got == announcement(mac(1)) {
                heard += 1;
                continue;
            }
            if comes_back(&got) {
                continue;
            }
            assert!(got == finished(2 * crossed + 1), "frame {crossed} to the other guest is wrong");
            crossed += 1;
        }
        freed += guests[0].transmit.reclaim_pairs().len();
        if freed == FRAMES as usize && echoed + crossed == FRAMES && heard == ANNOUNCEMENTS {
            return;
        }
    }
    panic!(
        "{sent} sent, {freed} freed, {echoed} echoed, {crossed} arrived at the other guest, {heard} announced"
    );
}

/// How long the frames of a source are, and how many are looked at.
const SOURCE_BYTES: usize = 1000;
const SOURCE_FRAMES: usize = 200;
/// How many reach the guest at a time. That many messages fill whole lines: after others a sender fences before it goes on, for speed.
const SOURCE_QUOTA: u32 = 32;
/// What the source fills at a time, and enough besides for nobody to be held back for the last ones.
const SOURCE_BUFFERS: u64 = BATCH_FRAMES as u64 + SOURCE_QUOTA as u64;

/// A source writes past the caches, as a device does, into buffers that somebody else has used each time before; its frames arrive unaltered.
fn frames_of_a_source_arrive(seed: u64, omission: &Omission) {
    let pool = SimulatedPool::new(seed, POOL_BYTES);
    let buffers =
        Area::new(receive_area().start, LineCount::new(SOURCE_BUFFERS * u64::from(BUFFER_BYTES) / 64));
    let memory = [1, 2].map(|number| omission.in_memory(pool.host(HostId::new(number))));
    let mut frontend = TestFrontend::new(&memory[0]);
    let nic = format!("mode = 'source'\ndestination = '{}'\nframe-bytes = {SOURCE_BYTES}", mac(1));
    let mut backend = TestBackend::new(&memory[1], &nic, buffers);
    connect(&mut frontend, &mut backend, 1);
    let registration = registration(1, 1, 1, RegistrationState::Active, transmit_area(1));
    backend
        .apply(Object::Registration(RegistrationObject { rx_quota_buffers: SOURCE_QUOTA, ..registration }));
    frontend.apply(Object::Port(port(1, transmit_area(1), route(1, 1), None)));
    let mut guest = Guest::new(64);
    guest.post(64, BUFFER_BYTES);
    frontend.start(1, &guest, all_features());
    let mut expected = [&mac(1).bytes()[..], &[6, 0, 0, 0, 0, 0, 0x88, 0xb5]].concat();
    expected.resize(SOURCE_BYTES, 0);
    let (frontend, backend) = (Arc::new(Mutex::new(frontend)), Arc::new(Mutex::new(backend)));
    // While the backend is having its turn, the frontend may have several.
    let here = Arc::clone(&frontend);
    let mut leaves = leaving(&pool, seed, false, 2);
    memory[1].interruption().set(move || {
        leaves();
        turn(&here);
    });
    let others = pool.host(HostId::new(3));
    let mut arrived = 0;
    for _ in 0..20_000 {
        // No frame is under way. What a device does not fill stays as it is here.
        memory[1].full_fence();
        for buffer in 0..SOURCE_BUFFERS {
            let at = buffers.start_byte().saturating_add(buffer * u64::from(BUFFER_BYTES));
            others.write(at, &[0xee; SOURCE_BYTES + 12]);
            others.flush(at, SOURCE_BYTES as u64 + 12);
        }
        others.full_fence();
        turn(&backend);
        // A look that finds what the cache held of a line has the next one see it.
        let mut idle = 0;
        while idle < 3 {
            idle = if frontend.lock().expect("unpoisoned").turn_once() { 0 } else { idle + 1 };
        }
        for (_, got) in guest.received(BUFFER_BYTES) {
            assert!(got == expected, "frame {arrived} of the source is wrong");
            arrived += 1;
        }
        if arrived >= SOURCE_FRAMES {
            memory[1].interruption().clear();
            return assert_eq!(pool.faults(), Faults::default());
        }
    }
    panic!("{arrived} frames of the source arrived");
}

/// What a seed runs; it panics if something is noticed.
fn run(seed: u64, omission: &Omission) {
    if seed % 7 > 4 {
        return frames_of_a_source_arrive(seed, omission);
    }
    let mut scene = scene(seed, omission);
    frames_arrive(&mut scene);
    assert_eq!(scene.pool.faults(), Faults::default());
}

#[test]
fn every_omission_in_the_engine_is_noticed() {
    Mutilation {
        target: "-p vhost-net-cxl --test engine",
        workspace: &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        sources: &["vhost-net-cxl/src", "vhost-frontend/src/copy.rs"],
        complete: 40,
        seeds: 500,
        excused: &[],
        unmet: &[
            ("backend/incoming.rs write_back: self.memory.store_fence()", "left out where it is called"),
            (
                "backend/incoming.rs write_back: self.memory.write_back(piece.at, u64::from(piece.bytes))",
                "left out where it is called",
            ),
        ],
    }
    .prove(run);
}
