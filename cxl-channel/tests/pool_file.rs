//! Channels over a real pool file: two threads, each with a mapping of its own, as two daemons would have.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use cxl_channel::doorbell::{Doorbell, DoorbellListener};
use cxl_channel::{Receiver, RingPlacement, Sender, Wake};
use cxl_pool::{CoherenceMode, CreateOptions, Generation, Memory, Pool};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const MESSAGES: u64 = 300_000;
const SLOTS: u32 = 256;
const GENERATION: Generation = Generation::new(1);
const PATIENCE: Duration = Duration::from_mins(1);

struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new(mode: CoherenceMode) -> Self {
        let place = Self { directory: tempfile::tempdir_in("/dev/shm").unwrap() };
        let options = CreateOptions {
            size_bytes: Some(16 << 20),
            host_slots: 2,
            replica_slots: 1,
            mode,
            ..CreateOptions::default()
        };
        Pool::create(&place.pool(), &options).unwrap();
        place
    }

    fn pool(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    fn doorbell(&self) -> PathBuf {
        self.directory.path().join("doorbell.sock")
    }
}

fn placement(pool: &Pool) -> RingPlacement {
    RingPlacement { start: pool.layout().data().start, slots: SLOTS }
}

fn message<const WORDS: usize>(number: u64) -> [u64; WORDS] {
    std::array::from_fn(|word| number.wrapping_mul(0x9e37_79b9 + word as u64) & !(1 << 63))
}

fn send_all<M: Memory, const WORDS: usize>(memory: M, placement: RingPlacement, doorbell: &Path) {
    let mut doorbell = Doorbell::connect(doorbell);
    let mut sender = Sender::<M, WORDS>::begin(memory, placement, GENERATION);
    let deadline = Instant::now() + PATIENCE;
    let mut number = 0;
    while number < MESSAGES {
        if sender.send(message(number)).is_ok() {
            number += 1;
        } else {
            assert!(Instant::now() < deadline, "stuck at message {number}");
            thread::yield_now();
        }
        // Publishes after bursts of changing length, and pauses at times, for the receiver to fall asleep.
        if (number % 97 == 0 || number == MESSAGES || sender.free() == 0) && sender.publish() == Wake::Needed
        {
            doorbell.ring();
        }
        if number % 30_011 == 0 {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

fn receive_all<M: Memory, const WORDS: usize>(
    memory: M,
    placement: RingPlacement,
    doorbell: &DoorbellListener,
) {
    let mut receiver = Receiver::<M, WORDS>::open(memory, placement, GENERATION);
    let deadline = Instant::now() + PATIENCE;
    let (mut number, mut sleeps) = (0, 0);
    while number < MESSAGES {
        assert!(Instant::now() < deadline, "stuck at message {number}");
        if let Some(found) = receiver.receive() {
            assert!(found == message(number), "message {number} arrived as {found:x?}");
            number += 1;
        } else if !receiver.ready() {
            thread::yield_now();
        } else if receiver.announce_sleep() {
            sleeps += 1;
            let timeout = Timespec { tv_sec: 20, tv_nsec: 0 };
            let ready = poll(&mut [PollFd::new(doorbell, PollFlags::IN)], Some(&timeout)).unwrap();
            assert_eq!(ready, 1, "nobody rang though {number} of {MESSAGES} messages had come");
            doorbell.drain();
            receiver.wake();
        }
    }
    assert!(sleeps > 0, "the test is to show sleep, too");
}

fn cross<M: Memory, const WORDS: usize>(mode: CoherenceMode, memory: fn(&Pool) -> M) {
    let place = Place::new(mode);
    let [sending, receiving] = [(); 2].map(|()| Pool::open(&place.pool()).unwrap());
    let listener = DoorbellListener::bind(&place.doorbell()).unwrap();
    thread::scope(|scope| {
        let doorbell = place.doorbell();
        scope.spawn(move || send_all::<M, WORDS>(memory(&sending), placement(&sending), &doorbell));
        receive_all::<M, WORDS>(memory(&receiving), placement(&receiving), &listener);
    });
}

#[test]
fn software_coherence_16_bytes() {
    cross::<_, 2>(CoherenceMode::Software, Pool::software);
}

#[test]
fn software_coherence_64_bytes() {
    cross::<_, 8>(CoherenceMode::Software, Pool::software);
}

#[test]
fn hardware_coherence_16_bytes() {
    cross::<_, 2>(CoherenceMode::Hardware, Pool::hardware);
}

#[test]
fn hardware_coherence_64_bytes() {
    cross::<_, 8>(CoherenceMode::Hardware, Pool::hardware);
}
