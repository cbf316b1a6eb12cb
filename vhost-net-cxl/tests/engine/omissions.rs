//! What makes buffers change hands safely is left out, one thing at a time, wherever the engine does it; something that a
//! guest sees, or a rule of the memory, must break.

use std::path::Path;
use std::sync::{Arc, Mutex, TryLockError};

use cxl_pool::simulated::{Faults, Mutilation, Omission, OmittingMemory, SimulatedPool};
use cxl_pool::{Area, HostId, LineCount};
use pod_protocol::objects::{Object, PortObject, RegistrationObject, RegistrationState};
use vhost_net_cxl::nic::NicConfig;
use vhost_net_cxl::nic::null::NullNic;

use crate::guest::{Guest, ram_area};
use crate::pod::{
    NIC, POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, connect, mac, port, registration,
    route, settle,
};

const BUFFER_BYTES: u32 = 2048;
const FRAMES: u32 = 120;

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

fn transmit_area(number: u32) -> Area {
    area(8 + 4 * u64::from(number), 1)
}

/// Few buffers, so that each is used again and again.
fn receive_area() -> Area {
    Area::new(area(32, 1).start, LineCount::new(600 * u64::from(BUFFER_BYTES) / 64))
}

/// A NIC whose device bypasses the backend's cache does so with every second seed.
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
    for (number, guest) in (1..).zip(&mut guests) {
        let registration = registration(number, 1, 1, RegistrationState::Active, transmit_area(number));
        let ram_area = pool_file.filter(|_| number == 1).map(|_| ram_area());
        backend.apply(Object::Registration(RegistrationObject { ram_area, ..registration }));
        let port = port(number, transmit_area(number), route(1, 1), None);
        frontend.apply(Object::Port(PortObject { ram_area, ..port }));
        guest.post(64, BUFFER_BYTES);
        frontend.start(number, guest, if number == 1 { all_features() } else { plain });
    }
    settle(&mut [&mut frontend, &mut backend]);
    let (frontend, backend) = (Arc::new(Mutex::new(frontend)), Arc::new(Mutex::new(backend)));
    // While one side is having its turn, the other one may have several.
    let (there, here) = (Arc::clone(&backend), Arc::clone(&frontend));
    memory[0].interruption().set(move || turn(&there));
    memory[1].interruption().set(move || turn(&here));
    Scene { pool, memory, frontend, backend, guests }
}

fn frame(number: u32, to: u8) -> Vec<u8> {
    let bytes = 60 + (number as usize).wrapping_mul(2_654_435_761) % 1400;
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
    if lacks_checksum(number) {
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

/// The first guest sends to the second one and to the outside in turn; everything arrives, in order and unaltered.
fn frames_arrive(scene: &mut Scene) {
    let Scene { frontend, backend, guests, .. } = scene;
    let [mut echoed, mut crossed] = [0_u32, 0];
    let (mut sent, mut freed) = (0, 0);
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
        turn(frontend);
        turn(backend);
        for (_, got) in guests[0].received(BUFFER_BYTES) {
            let mut expected = frame(2 * echoed, 200);
            expected[..12].rotate_left(6);
            assert!(got == expected, "echoed frame {echoed} is wrong");
            echoed += 1;
        }
        for (_, got) in guests[1].received(BUFFER_BYTES) {
            assert!(got == finished(2 * crossed + 1), "frame {crossed} to the other guest is wrong");
            crossed += 1;
        }
        freed += guests[0].transmit.reclaim_pairs().len();
        if freed == FRAMES as usize && echoed + crossed == FRAMES {
            return;
        }
    }
    panic!("{sent} sent, {freed} freed, {echoed} echoed, {crossed} arrived at the other guest");
}

/// What a seed runs; it panics if something is noticed.
fn run(seed: u64, omission: &Omission) {
    let mut scene = scene(seed, omission);
    frames_arrive(&mut scene);
    assert_eq!(scene.pool.faults(), Faults::default());
}

#[test]
fn every_omission_in_the_engine_is_noticed() {
    Mutilation {
        target: "-p vhost-net-cxl --test engine",
        workspace: &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        source: "vhost-net-cxl/src",
        complete: 40,
        seeds: 500,
        excused: &[],
    }
    .prove(run);
}
