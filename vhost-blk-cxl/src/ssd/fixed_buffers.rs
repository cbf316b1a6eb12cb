//! Buffers in the pool that the kernel keeps at hand.
#![allow(unsafe_code)] // the kernel is given addresses, which it uses as long as they are registered

use std::io;

use cxl_pool::{Area, ByteOffset, LineCount, Pool};
use io_uring::IoUring;
use tracing::{info, warn};

/// Pieces that are registered at a time. The kernel's own limit is 16384.
const PIECES_MAX: u16 = 4096;
/// Pieces that an area is cut into, unless they would be shorter than [`PIECE_BYTES_MIN`].
const PIECES_PER_AREA: u64 = 32;
/// Registering a piece of this length takes less than a millisecond.
const PIECE_BYTES_MIN: u64 = 4 << 20;
/// The kernel takes no longer ones.
const PIECE_BYTES_MAX: u64 = 1 << 30;

/// The areas that commands have their data in, cut into pieces, each of which is registered as a *fixed buffer* with the
/// ring when it is used for the first time.
///
/// For direct I/O on any other memory the kernel looks up, pins and releases every page with every request. A registered
/// piece stays pinned: what of the pool is never used for I/O is neither pinned nor given memory. Where the kernel refuses,
/// everything works without.
pub(super) struct FixedBuffers {
    ssd: String,
    areas: Vec<Registered>,
    /// Numbers of the ring's table that are not in use.
    free: Vec<u16>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The ring has no table yet.
    New,
    Usable,
    /// The kernel refused, and was not asked again.
    Refused,
}

struct Registered {
    area: Area,
    piece_bytes: u64,
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Unused,
    /// Under this number.
    Registered(u16),
}

impl Registered {
    fn new(area: Area) -> Self {
        let piece_bytes =
            (area.bytes() / PIECES_PER_AREA).next_power_of_two().clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
        // A pool is mapped, so its size in pieces fits.
        let count = usize::try_from(area.bytes().div_ceil(piece_bytes)).unwrap_or(0);
        Self { area, piece_bytes, pieces: vec![Piece::Unused; count] }
    }

    /// The piece that has all of these bytes, if one has.
    fn piece(&self, at: ByteOffset, bytes: u64) -> Option<usize> {
        let from = at.get() - self.area.start_byte().get();
        let piece = from / self.piece_bytes;
        let whole = (from + bytes.max(1) - 1) / self.piece_bytes == piece;
        usize::try_from(piece).ok().filter(|_| whole)
    }

    fn lines(&self, piece: usize) -> Area {
        let start = self.area.start_byte().get() + piece as u64 * self.piece_bytes;
        let end = self.area.end().bytes().get().min(start + self.piece_bytes);
        Area::new(ByteOffset::new(start).line(), LineCount::covering(end - start))
    }
}

impl FixedBuffers {
    /// None yet, for the ring of this device.
    pub(super) fn new(ssd: &str) -> Self {
        Self { ssd: ssd.to_owned(), areas: Vec::new(), free: Vec::new(), state: State::New }
    }

    /// From now on commands have their data in these areas only. Of others the kernel lets go as soon as it is done with
    /// what it has.
    pub(super) fn set_areas(&mut self, ring: &IoUring, areas: &[Area]) {
        for gone in self.areas.extract_if(.., |known| !areas.contains(&known.area)) {
            for piece in gone.pieces {
                let Piece::Registered(number) = piece else { continue };
                // SAFETY: nothing is registered, in the place of what was.
                let emptied = unsafe { register(ring, number, std::ptr::null_mut(), 0) };
                // Else it stays pinned until the ring goes, and its number is not used again.
                if emptied.is_ok() {
                    self.free.push(number);
                }
            }
        }
        for &area in areas {
            if self.areas.iter().all(|known| known.area != area) {
                self.areas.push(Registered::new(area));
            }
        }
        self.areas.sort_by_key(|known| known.area.start);
    }

    /// The number under which the kernel has all of these bytes, if it has.
    pub(super) fn find(&mut self, ring: &IoUring, pool: &Pool, at: ByteOffset, bytes: u32) -> Option<u16> {
        let bytes = u64::from(bytes);
        let after = self.areas.partition_point(|known| known.area.start_byte() <= at);
        let known = self.areas[..after].last().filter(|known| known.area.contains(at, bytes))?;
        let piece = known.piece(at, bytes)?;
        match known.pieces[piece] {
            Piece::Registered(number) => Some(number),
            Piece::Unused if self.state == State::Refused => None,
            Piece::Unused => {
                let lines = known.lines(piece);
                let number = self.register(ring, pool, lines)?;
                self.areas[after - 1].pieces[piece] = Piece::Registered(number);
                Some(number)
            }
        }
    }

    fn register(&mut self, ring: &IoUring, pool: &Pool, lines: Area) -> Option<u16> {
        if self.state == State::New {
            match ring.submitter().register_buffers_sparse(PIECES_MAX.into()) {
                Ok(()) => {
                    self.free = (0..PIECES_MAX).rev().collect();
                    self.state = State::Usable;
                }
                Err(error) => return self.refused(&error),
            }
        }
        let number = self.free.pop()?;
        let bytes = usize::try_from(lines.bytes()).ok()?;
        // SAFETY: the lines are a part of the pool's mapping, which whoever has the ring keeps for longer.
        match unsafe { register(ring, number, pool.pointer(lines), bytes) } {
            Ok(()) => {
                info!(ssd = self.ssd, buffers = %lines, "registered with the kernel");
                Some(number)
            }
            Err(error) => self.refused(&error),
        }
    }

    fn refused(&mut self, error: &io::Error) -> Option<u16> {
        self.state = State::Refused;
        warn!(
            ssd = self.ssd, %error,
            "the kernel keeps no more buffers of the pool at hand, but looks them up for each request, which costs CPU time: if \
             this process may not lock so much memory, raise LimitMEMLOCK= of its unit, or `ulimit -l`; the pool must lie in \
             tmpfs, hugetlbfs or on a DAX device"
        );
        None
    }
}

/// Registers a buffer under a number, or none if it is null.
///
/// # Safety
///
/// The memory must stay mapped as long as the ring is used, and hold nothing that Rust has references to.
unsafe fn register(ring: &IoUring, number: u16, base: *mut u8, bytes: usize) -> io::Result<()> {
    let vector = libc::iovec { iov_base: base.cast(), iov_len: bytes };
    // SAFETY: the caller's.
    unsafe { ring.submitter().register_buffers_update(number.into(), &[vector], None) }
}

#[cfg(test)]
mod tests {
    use cxl_pool::{CreateOptions, LineOffset};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn pool() -> Pool {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = CreateOptions { size_bytes: Some(128 * MIB), ..CreateOptions::default() };
        // The mapping stays when the file goes.
        Pool::create(&directory.path().join("pool"), &options).unwrap()
    }

    fn area(from_mib: u64, mib: u64) -> Area {
        let lines = |mib: u64| LineCount::covering(mib * MIB);
        Area::new(LineOffset::new(lines(from_mib).get()), lines(mib))
    }

    #[test]
    fn pieces_are_registered_when_they_are_used_and_as_long_as_their_area_is_there() {
        let (ring, pool) = (IoUring::new(8).unwrap(), pool());
        let mut fixed = FixedBuffers::new("ssd0");
        let (one, other) = (area(16, 10), area(64, 32));
        let at = |area: Area, byte: u64| ByteOffset::new(area.start_byte().get() + byte);
        assert_eq!(fixed.find(&ring, &pool, at(one, 0), 4096), None, "nobody named it");
        fixed.set_areas(&ring, &[other, one]);
        let first = fixed.find(&ring, &pool, at(one, 0), 4096).unwrap();
        assert_eq!(fixed.find(&ring, &pool, at(one, 4 * MIB - 4096), 4096), Some(first));
        let second = fixed.find(&ring, &pool, at(one, 4 * MIB), 4096).unwrap();
        let last = fixed.find(&ring, &pool, at(one, 10 * MIB - 512), 512).unwrap();
        let far = fixed.find(&ring, &pool, at(other, 0), 1 << 20).unwrap();
        let mut numbers = [first, second, last, far];
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|pair| pair[0] != pair[1]), "{numbers:?}");
        for (start, bytes) in [
            (at(one, 4 * MIB - 4096), 8192),
            (at(one, 10 * MIB - 512), 1024),
            (ByteOffset::new(one.start_byte().get() - 512), 512),
            (at(other, 32 * MIB), 512),
        ] {
            assert_eq!(fixed.find(&ring, &pool, start, bytes), None, "{bytes} from {start:?}");
        }
        // Named again, it stays as it is; what is gone is found no more, and its numbers serve again.
        fixed.set_areas(&ring, &[one]);
        assert_eq!(fixed.find(&ring, &pool, at(one, 0), 4096), Some(first));
        assert_eq!(fixed.find(&ring, &pool, at(other, 0), 4096), None);
        assert_eq!(fixed.free.len(), usize::from(PIECES_MAX) - 3);
        fixed.set_areas(&ring, &[]);
        assert_eq!(fixed.free.len(), usize::from(PIECES_MAX));
        assert_eq!(fixed.state, State::Usable);
    }

    #[test]
    fn what_the_kernel_refuses_is_not_asked_for_again() {
        let pool = pool();
        let ring = IoUring::new(8).unwrap();
        // Somebody else's table is in the way.
        ring.submitter().register_buffers_sparse(4).unwrap();
        let mut fixed = FixedBuffers::new("ssd0");
        let whole = area(16, 16);
        fixed.set_areas(&ring, &[whole]);
        for _ in 0..2 {
            assert_eq!(fixed.find(&ring, &pool, whole.start_byte(), 4096), None);
            assert_eq!(fixed.state, State::Refused);
        }
        fixed.set_areas(&ring, &[]);
    }
}
