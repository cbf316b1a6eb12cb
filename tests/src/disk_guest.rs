//! A guest without a VM that writes to its disk, and knows what must be there.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use vhost_frontend::mock::{MockGuest, Piece};
use vm_memory::{Bytes as _, GuestAddress};

/// How many blocks it writes, from the beginning of its disk on. Of each at most one write is in flight.
pub const BLOCKS: usize = 48;
/// How long each is.
pub const BLOCK_BYTES: usize = 4096;

/// An answer that takes longer has been lost; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);
const SECTORS_PER_BLOCK: u64 = BLOCK_BYTES as u64 / 512;
/// What a block consists of, again and again: this, its version, its number and a word that is always the same.
const MAGIC: [u8; 8] = *b"\xd1written";
const STAMP_BYTES: usize = 32;
const HEADER_AT: u64 = BLOCK_BYTES as u64;
const STATUS_AT: u64 = HEADER_AT + 64;
/// Of the guest's memory, for each block.
const PLACE_BYTES: u64 = 2 * BLOCK_BYTES as u64;
const READ: u32 = 0;
const WRITE: u32 = 1;

/// What a block of this number holds in a version of it. The first 16 bytes are the same for all blocks, and the next 8 say which.
pub fn block(number: usize, version: u64) -> Vec<u8> {
    let mut stamp = MAGIC.to_vec();
    stamp.extend(version.to_le_bytes());
    stamp.extend((number as u64).to_le_bytes());
    stamp.extend([0x5a; 8]);
    stamp.repeat(BLOCK_BYTES / STAMP_BYTES)
}

/// How many requests ended how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Answers {
    /// They were carried out.
    pub done: usize,
    /// They were answered with an I/O error.
    pub failed: usize,
}

/// Dropping it ends it, whatever is in flight.
pub struct DiskGuest {
    guest: MockGuest,
    in_flight: HashMap<u16, usize>,
    /// The newest version of each block that it wrote, or is writing.
    newest: Vec<u64>,
    answers: Answers,
}

impl fmt::Debug for DiskGuest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskGuest").field("in_flight", &self.in_flight.len()).finish_non_exhaustive()
    }
}

impl DiskGuest {
    /// Connects to the socket of a disk.
    pub fn connect(socket: &str) -> Self {
        let mut guest = MockGuest::new(4 << 20, 1, 256);
        guest.connect(socket.as_ref(), 0);
        Self { guest, in_flight: HashMap::new(), newest: vec![0; BLOCKS], answers: Answers::default() }
    }

    /// The newest version of each block that it wrote, or is writing.
    pub fn newest(&self) -> &[u64] {
        &self.newest
    }

    /// How many requests have no answer yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Writes this version of all blocks, and waits for nothing.
    ///
    /// # Panics
    /// If something is in flight.
    pub fn begin_to_write(&mut self, version: u64) {
        assert!(self.in_flight.is_empty(), "{} requests are in flight", self.in_flight.len());
        for number in 0..BLOCKS {
            self.offer_write(number, version);
        }
    }

    /// Takes what was answered, and writes the next version of every block that is not being written.
    pub fn work(&mut self) {
        self.collect();
        let busy: Vec<usize> = self.in_flight.values().copied().collect();
        for number in (0..BLOCKS).filter(|number| !busy.contains(number)) {
            self.offer_write(number, self.newest[number] + 1);
        }
    }

    /// Waits until everything was answered, and says how it ended since this was asked last.
    ///
    /// # Panics
    /// If answers do not come.
    pub fn finish(&mut self) -> Answers {
        let began = Instant::now();
        while !self.in_flight.is_empty() {
            self.guest.wait(0, Duration::from_millis(5));
            self.collect();
            let left = self.in_flight.len();
            assert!(began.elapsed() < PATIENCE, "{left} requests are not answered");
        }
        std::mem::take(&mut self.answers)
    }

    /// Takes what was answered, and says how it ended since this was asked last.
    pub fn answers(&mut self) -> Answers {
        self.collect();
        std::mem::take(&mut self.answers)
    }

    /// Reads all blocks, and says which version each is.
    ///
    /// # Panics
    /// If something is in flight, a read fails, or a block is no version of itself.
    pub fn versions(&mut self) -> Vec<u64> {
        assert!(self.in_flight.is_empty(), "{} requests are in flight", self.in_flight.len());
        self.answers = Answers::default();
        for number in 0..BLOCKS {
            self.put(self.place(number), &[0xee; BLOCK_BYTES]);
            self.offer(number, READ);
        }
        assert_eq!(self.finish(), Answers { done: BLOCKS, failed: 0 });
        (0..BLOCKS).map(|number| version_of(number, &self.get(self.place(number), BLOCK_BYTES))).collect()
    }

    fn place(&self, number: usize) -> u64 {
        self.guest.data_start().next_multiple_of(BLOCK_BYTES as u64) + number as u64 * PLACE_BYTES
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.guest.memory().write_slice(bytes, GuestAddress(at)).expect("in memory");
    }

    fn get(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut got = vec![0; bytes];
        self.guest.memory().read_slice(&mut got, GuestAddress(at)).expect("in memory");
        got
    }

    fn offer_write(&mut self, number: usize, version: u64) {
        self.newest[number] = version;
        self.put(self.place(number), &block(number, version));
        self.offer(number, WRITE);
    }

    /// Offers a request as virtio-blk has it.
    fn offer(&mut self, number: usize, kind: u32) {
        let place = self.place(number);
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend((number as u64 * SECTORS_PER_BLOCK).to_le_bytes());
        self.put(place + HEADER_AT, &header);
        self.put(place + STATUS_AT, &[0xee]);
        let piece = |at, bytes, writable| Piece { address: place + at, bytes, writable };
        let data = piece(0, u32::try_from(BLOCK_BYTES).expect("small"), kind == READ);
        let pieces = [piece(HEADER_AT, 16, false), data, piece(STATUS_AT, 1, true)];
        let head = self.guest.offer(0, &pieces, None);
        self.in_flight.insert(head, number);
    }

    fn collect(&mut self) {
        while let Some(used) = self.guest.used(0) {
            let number = self.in_flight.remove(&used.head).expect("each is answered once");
            match self.get(self.place(number) + STATUS_AT, 1)[..] {
                [0] => self.answers.done += 1,
                [1] => self.answers.failed += 1,
                ref status => panic!("block {number}: {status:?} is no status"),
            }
        }
    }
}

/// Which version of a block this is.
///
/// # Panics
/// If it is none.
pub fn version_of(number: usize, bytes: &[u8]) -> u64 {
    let version = bytes[8..16].try_into().map(u64::from_le_bytes).expect("eight bytes");
    assert!(bytes == block(number, version), "block {number} is none of its versions: {:x?}", &bytes[..64]);
    version
}
