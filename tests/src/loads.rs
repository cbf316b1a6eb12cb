//! Guests without a VM that do as much as they are let, to see how devices and paths are shared.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vhost_frontend::mock::{MockGuest, Piece};
use vm_memory::{Bytes, GuestAddress};

use crate::steady;
pub use crate::steady::near;

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
/// What frames of guests are marked as: a type for experiments.
pub(crate) const FRAME_TYPE: u16 = 0x88b5;
/// Where in a frame its number lies, of 8 bytes, little-endian.
pub(crate) const FRAME_NUMBER_AT: usize = 14;
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

/// A request that a guest has asked for and got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Before it was asked for.
    pub asked: Instant,
    /// After it was answered.
    pub answered: Instant,
    /// What it moved.
    pub bytes: u64,
}

/// The most bytes that moved within an interval of this length, whenever it began, as far as the guest can tell: those of requests that
/// were asked for and answered within it. No pause of the guest's makes that more than what was let move then.
pub fn most_within(interval: Duration, moved: &[Moved]) -> u64 {
    let mut moved = moved.to_vec();
    moved.sort_by_key(|it| it.asked);
    let after = |start: usize| {
        let end = moved[start].asked + interval;
        let asked_for = moved[start..].iter().take_while(|it| it.asked <= end);
        asked_for.filter(|it| it.answered <= end).map(|it| it.bytes).sum()
    };
    (0..moved.len()).map(after).max().unwrap_or(0)
}

/// A guest at work.
#[derive(Debug)]
pub struct Load {
    appetite: Arc<AtomicU8>,
    stop: Arc<AtomicBool>,
    count: Arc<Count>,
    thread: JoinHandle<()>,
}

/// What a guest has moved.
#[derive(Debug, Default)]
struct Count {
    bytes: AtomicU64,
    /// Each request, if somebody wants to know.
    each: Mutex<Option<Vec<Moved>>>,
}

impl Load {
    /// One that reads the first 8 MiB of its disk again and again.
    pub fn disk(socket: &str) -> Self {
        Self::start(socket, 1, 0, Disk { sector: 0 })
    }

    /// One that sends frames from this address to nobody that is there. They are numbered from 0 on.
    pub fn nic(socket: &str, mac: [u8; 6]) -> Self {
        Self::start(socket, 2, 0, Nic { mac, next: 0 })
    }

    fn start<D: Device>(socket: &str, rings: u16, features: u64, mut device: D) -> Self {
        let appetite = Arc::new(AtomicU8::new(Appetite::Hungry as u8));
        let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(Count::default()));
        let socket = socket.to_owned();
        let (wanted, stopped, counted) = (Arc::clone(&appetite), Arc::clone(&stop), Arc::clone(&count));
        let thread = thread::spawn(move || {
            let mut guest = MockGuest::new(4 << 20, rings, 128);
            guest.connect(socket.as_ref(), features);
            work(&mut guest, &mut device, &wanted, &stopped, &counted);
        });
        Self { appetite, stop, count, thread }
    }

    /// Has it want another amount from now on.
    pub fn go_on(&self, appetite: Appetite) {
        self.appetite.store(appetite as u8, Ordering::Relaxed);
    }

    /// What it has moved.
    pub fn bytes(&self) -> u64 {
        self.count.bytes.load(Ordering::Relaxed)
    }

    /// Each request that it got since this was called last; from the first call on it keeps them.
    pub fn each(&self) -> Vec<Moved> {
        let mut each = self.count.each.lock().unwrap_or_else(PoisonError::into_inner);
        each.replace(Vec::new()).unwrap_or_default()
    }

    /// Ends it, once all that it asked for was answered.
    pub fn stop(self) {
        self.end();
    }

    /// As [`Load::stop`] for one that sends frames; returns how many it has sent.
    pub fn stop_sending(self) -> u64 {
        self.end().bytes.load(Ordering::Relaxed) / FRAME_BYTES as u64
    }

    fn end(self) -> Arc<Count> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("a guest that ends in order");
        self.count
    }
}

fn work<D: Device>(
    guest: &mut MockGuest,
    device: &mut D,
    appetite: &AtomicU8,
    stop: &AtomicBool,
    count: &Count,
) {
    let began = Instant::now();
    let start = guest.data_start();
    let mut places: Vec<u64> = (0..D::DEPTH).map(|place| start + place * PLACE_BYTES).collect();
    let mut in_flight: Vec<(u16, u64, Instant)> = Vec::new();
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
            let asked = Instant::now();
            in_flight.push((device.offer(guest, place), place, asked));
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
        let found =
            in_flight.iter().position(|(head, ..)| *head == used.head).expect("each is answered once");
        let (_, place, asked) = in_flight.swap_remove(found);
        device.check(guest, place);
        places.push(place);
        count.bytes.fetch_add(D::BYTES, Ordering::Relaxed);
        if let Some(each) = &mut *count.each.lock().unwrap_or_else(PoisonError::into_inner) {
            each.push(Moved { asked, answered: Instant::now(), bytes: D::BYTES });
        }
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
    /// The number of its next frame.
    next: u64,
}

impl Device for Nic {
    const DEPTH: u64 = 64;
    const BYTES: u64 = FRAME_BYTES as u64;
    const RING: usize = 1;

    fn offer(&mut self, guest: &mut MockGuest, start: u64) -> u16 {
        let mut packet = [0; VIRTIO_NET_HEADER_BYTES + FRAME_BYTES];
        let frame = &mut packet[VIRTIO_NET_HEADER_BYTES..];
        // An address that nobody has.
        frame[..6].copy_from_slice(&[2, 0xff, 0xff, 0xff, 0xff, 0xff]);
        frame[6..12].copy_from_slice(&self.mac);
        frame[12..14].copy_from_slice(&FRAME_TYPE.to_be_bytes());
        frame[FRAME_NUMBER_AT..FRAME_NUMBER_AT + 8].copy_from_slice(&self.next.to_le_bytes());
        self.next += 1;
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

/// Waits until what guests move, in bytes/s, is as it should be in two windows in a row.
///
/// # Panics
/// If it never is.
pub fn until(what: &str, loads: &[Load], is_so: impl Fn(&[f64]) -> bool) {
    steady::converge(what, PATIENCE, || rates(loads), is_so);
}

/// Judges what guests that fill a path of this capacity move on average of several windows, once shares have come about; see [`steady::judge`].
///
/// # Panics
/// If a guest moves something else than it should.
pub fn judge(what: &str, loads: &[Load], capacity: f64, expected: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    steady::judge(what, PATIENCE, capacity, || rates(loads), expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for_before_or_answered_after_an_interval_is_not_in_it() {
        let began = Instant::now();
        let at = |ms: u64| began + Duration::from_millis(ms);
        let moved = |asked, answered, bytes| Moved { asked: at(asked), answered: at(answered), bytes };
        let all = [moved(0, 4, 1), moved(12, 30, 100), moved(2, 9, 2), moved(3, 13, 4), moved(3, 14, 8)];
        let most = |ms| most_within(Duration::from_millis(ms), &all);
        assert_eq!(
            [most(3), most(4), most(9), most(10), most(11), most(14), most(60)],
            [0, 1, 3, 4, 12, 15, 115]
        );
        assert_eq!(most_within(Duration::from_secs(1), &[]), 0);
    }
}
