//! Once packets flow, neither side allocates.

#[path = "engine/guest.rs"]
#[allow(dead_code, reason = "shared with the engine's other tests")]
mod guest;
#[path = "engine/pod.rs"]
#[allow(dead_code, reason = "shared with the engine's other tests")]
mod pod;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

use cxl_pool::{CoherenceMode, CreateOptions, Memory, Pool};
use pod_protocol::objects::{Object, PortObject, RegistrationObject, RegistrationState};

use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, mac, port, registration, route,
    settle,
};

/// Counts the allocations of a thread while that tells it to.
struct Counting;

thread_local! {
    // Of a kind that needs no allocation itself.
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTS.get() {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const QUEUE_SIZE: u16 = 128;
const BUFFER_BYTES: u32 = 2048;

fn turn(side: &mut dyn Turn) {
    COUNTS.set(true);
    side.turn_once();
    COUNTS.set(false);
}

/// Sends frames through an echoing NIC until `count` have come back; lengths differ.
fn echo<M: Memory>(
    frontend: &mut TestFrontend<M>,
    backend: &mut TestBackend<M>,
    guest: &mut Guest,
    count: u32,
) {
    let (mut sent, mut arrived) = (0, 0);
    for _ in 0..1_000_000 {
        if sent < count {
            let mut frame = vec![0; 60 + (sent as usize * 37) % 1400];
            frame[..6].copy_from_slice(&mac(200).bytes());
            frame[6..12].copy_from_slice(&mac(1).bytes());
            sent += u32::from(guest.send(&[0; 12], &frame));
        }
        turn(frontend);
        turn(backend);
        arrived += u32::try_from(guest.received(BUFFER_BYTES).len()).expect("few");
        guest.transmit.reclaim_pairs();
        if arrived == count {
            return;
        }
    }
    panic!("{arrived} of {count} frames came back");
}

fn allocations<M: Memory>(memory: &M, mut guest: Guest) -> u64 {
    let transmit_area = area(8, 8);
    let ram_area = guest.pool_file.map(|_| guest::ram_area());
    let mut frontend = TestFrontend::new(memory).with_pool_file(guest.pool_file);
    let mut backend = TestBackend::new(memory, "mode = 'echo'", area(32, 16));
    backend.apply(Object::Channel(channel(1, 1, 512, false)));
    let registration = registration(1, 1, 1, RegistrationState::Active, transmit_area);
    backend.apply(Object::Registration(RegistrationObject { ram_area, ..registration }));
    frontend.apply(Object::Channel(channel(1, 1, 512, true)));
    frontend.apply(Object::Port(PortObject { ram_area, ..port(1, transmit_area, route(1, 1), None) }));
    guest.post(QUEUE_SIZE, BUFFER_BYTES);
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);
    ALLOCATIONS.store(0, Ordering::Relaxed);
    echo(&mut frontend, &mut backend, &mut guest, 20_000);
    ALLOCATIONS.load(Ordering::Relaxed)
}

#[test]
fn no_packet_costs_an_allocation() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    for mode in [CoherenceMode::Hardware, CoherenceMode::Software] {
        let options =
            CreateOptions { size_bytes: Some(POOL_BYTES), mode, force: true, ..CreateOptions::default() };
        let path = directory.path().join("pool");
        let pool = Pool::create(&path, &options).expect("a pool");
        let file = File::options().read(true).write(true).open(&path).expect("the pool's file");
        for guest in [Guest::new(QUEUE_SIZE), Guest::in_pool_file(&file, QUEUE_SIZE)] {
            let in_pool = guest.pool_file.is_some();
            let count = match mode {
                CoherenceMode::Hardware => allocations(&pool.hardware(), guest),
                CoherenceMode::Software => allocations(&pool.software(), guest),
            };
            assert_eq!(count, 0, "{mode:?}, in the pool: {in_pool}");
        }
    }
    // The count itself works.
    COUNTS.set(true);
    let boxed = std::hint::black_box(Box::new(1u64));
    COUNTS.set(false);
    assert_eq!((*boxed, ALLOCATIONS.load(Ordering::Relaxed)), (1, 1));
}
