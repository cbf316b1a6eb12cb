//! Guests without a VM that do as much as they are let, to see how devices and paths are shared.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vhost_frontend::mock::{MockGuest, Piece};
use vm_memory::{Bytes, GuestAddress};

/// Of each request a part of the guest's memory.
const PLACE_BYTES: u64 = 32 << 10;
/// An answer that takes longer has been lost.
const ANSWER: Duration = Duration::from_secs(20);
/// How long shares may take until they are as they should be, on a machine that does much else.
const PATIENCE: Duration = Duration::from_mins(1);
/// For how long bytes are counted at a time.
const WINDOW: Duration = Duration::from_millis(1500);

const VIRTIO_NET_HEADER_BYTES: usize = 12;
/// Of an Ethernet frame with an MTU of 1500.
const FRAME_BYTES: usize = 1514;
const READ_BYTES: u32 = 16 << 10;
/// What of a disk is read, again and again.
const DISK_BYTES: u64 = 8 << 20;

/// How much a guest wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Appetite {
    /// As much as there is.
    Hungry,
    /// One request at a time, and pauses between them.
    Modest,
    /// As much as there is for 10 ms, and nothing for as long.
    Bursts,
}

/// What a guest does with its device.
trait Device: Send + 'static {
    /// How many requests it has in flight at most.
    const DEPTH: u64;
    /// What each of them moves.
    const BYTES: u64;
    /// The ring that it uses.
    const RING: usize;

    /// Asks for something, with this part of the memory.
    fn offer(&mut self, guest: &mut MockGuest, start: u64) -> u16;

    /// Looks at how that ended.
    fn check(&mut self, guest: &MockGuest, start: u64);
}

/// A guest at work.
#[derive(Debug)]
pub struct Load {
    appetite: Arc<AtomicU8>,
    stop: Arc<AtomicBool>,
    bytes: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Load {
    /// One that reads the first 8 MiB of its disk again and again.
    pub fn disk(socket: &str) -> Self {
        Self::start(socket, 1, 0, Disk { sector: 0 })
    }

    /// One that sends frames from this address to nobody that is there.
    pub fn nic(socket: &str, mac: [u8; 6]) -> Self {
        Self::start(socket, 2, 0, Nic { mac })
    }

    fn start<D: Device>(socket: &str, rings: u16, features: u64, mut device: D) -> Self {
        let appetite = Arc::new(AtomicU8::new(Appetite::Hungry as u8));
        let (stop, bytes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let socket = socket.to_owned();
        let (wanted, stopped, count) = (Arc::clone(&appetite), Arc::clone(&stop), Arc::clone(&bytes));
        let thread = thread::spawn(move || {
            let mut guest = MockGuest::new(4 << 20, rings, 128);
            guest.connect(socket.as_ref(), features);
            work(&mut guest, &mut device, &wanted, &stopped, &count);
        });
        Self { appetite, stop, bytes, thread }
    }

    /// Has it want another amount from now on.
    pub fn go_on(&self, appetite: Appetite) {
        self.appetite.store(appetite as u8, Ordering::Relaxed);
    }

    /// What it has moved.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Ends it, once all that it asked for was answered.
    pub fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("a guest that ends in order");
    }
}

fn work<D: Device>(
    guest: &mut MockGuest,
    device: &mut D,
    appetite: &AtomicU8,
    stop: &AtomicBool,
    count: &AtomicU64,
) {
    let began = Instant::now();
    let start = guest.data_start();
    let mut places: Vec<u64> = (0..D::DEPTH).map(|place| start + place * PLACE_BYTES).collect();
    let mut in_flight: Vec<(u16, u64)> = Vec::new();
    loop {
        let appetite = appetite.load(Ordering::Relaxed);
        let is_modest = appetite == Appetite::Modest as u8;
        let rests =
            appetite == Appetite::Bursts as u8 && !(began.elapsed().as_millis() / 10).is_multiple_of(2);
        let wanted = match () {
            () if stop.load(Ordering::Relaxed) && in_flight.is_empty() => return,
            () if stop.load(Ordering::Relaxed) || rests => 0,
            () if is_modest => 1,
            () => D::DEPTH,
        };
        while (in_flight.len() as u64) < wanted {
            let place = places.pop().expect("as many as requests");
            in_flight.push((device.offer(guest, place), place));
        }
        let patience = match wanted {
            0 if in_flight.is_empty() => Duration::ZERO,
            0 => Duration::from_millis(5),
            _ => ANSWER,
        };
        let used = if patience.is_zero() { None } else { guest.wait_used(D::RING, patience) };
        let Some(used) = used else {
            assert!(patience < ANSWER, "a request is not answered");
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        let found = in_flight.iter().position(|(head, _)| *head == used.head).expect("each is answered once");
        let (_, place) = in_flight.swap_remove(found);
        device.check(guest, place);
        places.push(place);
        count.fetch_add(D::BYTES, Ordering::Relaxed);
        if is_modest {
            thread::sleep(Duration::from_millis(8));
        }
    }
}

struct Disk {
    sector: u64,
}

impl Disk {
    /// Where the header and the status of a request lie behind its data.
    const HEADER: u64 = READ_BYTES as u64;
    const STATUS: u64 = Self::HEADER + 1024;
}

impl Device for Disk {
    const DEPTH: u64 = 8;
    const BYTES: u64 = READ_BYTES as u64;
    const RING: usize = 0;

    /// A read as virtio-blk has it.
    fn offer(&mut self, guest: &mut MockGuest, start: u64) -> u16 {
        let (header, status) = (start + Self::HEADER, start + Self::STATUS);
        let mut words = [0; 16];
        words[8..].copy_from_slice(&self.sector.to_le_bytes());
        self.sector = (self.sector + u64::from(READ_BYTES) / 512) % (DISK_BYTES / 512);
        guest.memory().write_slice(&words, GuestAddress(header)).expect("in memory");
        guest.memory().write_slice(&[9], GuestAddress(status)).expect("in memory");
        let piece = |address, bytes, writable| Piece { address, bytes, writable };
        let pieces = [piece(header, 16, false), piece(start, READ_BYTES, true), piece(status, 1, true)];
        guest.offer(0, &pieces, None)
    }

    fn check(&mut self, guest: &MockGuest, start: u64) {
        let mut status = [9];
        guest.memory().read_slice(&mut status, GuestAddress(start + Self::STATUS)).expect("in memory");
        assert_eq!(status, [0], "an I/O error");
    }
}

struct Nic {
    mac: [u8; 6],
}

impl Device for Nic {
    const DEPTH: u64 = 64;
    const BYTES: u64 = FRAME_BYTES as u64;
    const RING: usize = 1;

    fn offer(&mut self, guest: &mut MockGuest, start: u64) -> u16 {
        let mut packet = [0; VIRTIO_NET_HEADER_BYTES + FRAME_BYTES];
        let frame = &mut packet[VIRTIO_NET_HEADER_BYTES..];
        // An address that nobody has, and a type for experiments.
        frame[..6].copy_from_slice(&[2, 0xff, 0xff, 0xff, 0xff, 0xff]);
        frame[6..12].copy_from_slice(&self.mac);
        frame[12..14].copy_from_slice(&[0x88, 0xb5]);
        guest.memory().write_slice(&packet, GuestAddress(start)).expect("in memory");
        let bytes = u32::try_from(packet.len()).expect("short");
        guest.offer(Self::RING, &[Piece { address: start, bytes, writable: false }], None)
    }

    fn check(&mut self, _guest: &MockGuest, _start: u64) {}
}

/// What each guest moved in a while, in bytes/s.
#[expect(clippy::cast_precision_loss, reason = "fewer than 2^53")]
fn rates(loads: &[Load]) -> Vec<f64> {
    let counts = || loads.iter().map(Load::bytes).collect::<Vec<_>>();
    let (before, began) = (counts(), Instant::now());
    thread::sleep(WINDOW);
    let (after, seconds) = (counts(), began.elapsed().as_secs_f64());
    assert!(loads.iter().all(|load| !load.thread.is_finished()), "a guest has given up");
    before.iter().zip(&after).map(|(before, after)| (after - before) as f64 / seconds).collect()
}

/// Waits until what guests move, in bytes/s, is as it should be. It soon is, unless the machine keeps them from moving what they may.
pub fn until(what: &str, loads: &[Load], is_so: impl Fn(&[f64]) -> bool) {
    let began = Instant::now();
    loop {
        let rates = rates(loads);
        eprintln!("{what}: {:.2?} MB/s", rates.iter().map(|rate| rate / 1e6).collect::<Vec<_>>());
        if is_so(&rates) {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "never: {what}; last {rates:?}");
    }
}

/// Whether a rate is within 5 % of another.
pub fn near(rate: f64, expected: f64) -> bool {
    (rate - expected).abs() <= 0.05 * expected
}
