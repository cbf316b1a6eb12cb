//! A packet to be sent whose payload stays where it is: in guest memory that lies in the pool.
//!
//! Its buffer in the transmit area has two halves, and its message is marked `more`:
//!
//! ```text
//! byte   0..256   the first bytes of the packet: virtio-net header, Ethernet header and what follows
//! byte 256..512   up to 16 ranges of the pool with the rest of it, in order, as many as it takes:
//!                 where (8 bytes, an offset in the pool), how long (8 bytes), little-endian
//! ```
//!
//! What is checked, and what decides where a packet goes, lies in the first half, which the guest cannot write. The backend
//! takes ranges only from the memory that is leased to the instance. It may read them until it has completed the
//! packet, so the guest gets its descriptors back no earlier.

use cxl_pool::{Area, ByteOffset, LINE_BYTES, Memory};

use crate::nic::Piece;

/// Bytes of the packet that lie in its buffer.
pub const FRONT_BYTES: u32 = 256;
/// Length of the buffer. Shorter packets are not scattered: they take no more than that when they are copied.
pub const BUFFER_BYTES: u32 = 512;
/// Ranges of one packet.
pub const RANGES_MAX: usize = (BUFFER_BYTES - FRONT_BYTES) as usize / RANGE_BYTES;
/// Pieces of one packet: its front and its ranges.
pub const PIECES_MAX: usize = RANGES_MAX + 1;
const RANGE_BYTES: usize = 16;
/// Length of the longest list.
pub const LIST_BYTES_MAX: u64 = (BUFFER_BYTES - FRONT_BYTES) as u64;
/// So many ranges are in the first line of a list. Few packets have more.
const RANGES_PER_LINE: usize = LINE_BYTES / RANGE_BYTES;

/// Where the list of a packet begins whose buffer begins at `buffer`.
#[inline]
pub fn list(buffer: ByteOffset) -> ByteOffset {
    buffer.saturating_add(FRONT_BYTES.into())
}

/// Whether the list of a packet of `bytes` bytes is longer than its first line, which was invalidated.
#[inline]
pub fn is_long<M: Memory>(memory: &M, buffer: ByteOffset, bytes: u32) -> bool {
    let lengths = (0..RANGES_PER_LINE).map(|index| memory.load(range(buffer, index).saturating_add(8)));
    lengths.fold(0, u64::saturating_add) < u64::from(bytes.saturating_sub(FRONT_BYTES))
}

/// Where a range of a packet is listed.
#[inline]
fn range(buffer: ByteOffset, index: usize) -> ByteOffset {
    list(buffer).saturating_add((index * RANGE_BYTES) as u64)
}

/// Writes the list of `ranges` to `into`, and returns its length.
pub fn write_list(ranges: &[(ByteOffset, u32)], into: &mut [u8]) -> usize {
    for ((at, bytes), entry) in ranges.iter().zip(into.chunks_exact_mut(RANGE_BYTES)) {
        let (start, length) = entry.split_at_mut(RANGE_BYTES / 2);
        start.copy_from_slice(&at.get().to_le_bytes());
        length.copy_from_slice(&u64::from(*bytes).to_le_bytes());
    }
    ranges.len() * RANGE_BYTES
}

/// Adds the pieces of a packet of `bytes` bytes, whose buffer begins at `buffer` and was invalidated, to `pieces`. False, and
/// only some of them or none, unless all of them lie in `ram` and are together as long as the packet.
#[inline]
pub fn pieces<M: Memory>(
    memory: &M,
    buffer: ByteOffset,
    bytes: u32,
    ram: Area,
    mut push: impl FnMut(Piece),
) -> bool {
    let Some(mut left) = bytes.checked_sub(FRONT_BYTES) else { return false };
    push(Piece { at: buffer, bytes: FRONT_BYTES });
    for index in 0..RANGES_MAX {
        if left == 0 {
            return true;
        }
        let entry = range(buffer, index);
        let (at, length) = (memory.load(entry), memory.load(entry.saturating_add(8)));
        let Some(piece) = u32::try_from(length).ok().filter(|length| (1..=left).contains(length)) else {
            return false;
        };
        if !ram.contains(ByteOffset::new(at), length) {
            return false;
        }
        push(Piece { at: ByteOffset::new(at), bytes: piece });
        left -= piece;
    }
    left == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use cxl_pool::simulated::SimulatedPool;
    use cxl_pool::{HostId, LineCount, LineOffset};
    use proptest::prelude::*;

    const BUFFER: ByteOffset = ByteOffset::new(4096);

    fn ram() -> Area {
        Area::new(LineOffset::new(1024), LineCount::new(1024))
    }

    fn read(list: &[(u64, u32)], bytes: u32) -> (bool, Vec<Piece>) {
        let pool = SimulatedPool::new(1, 1 << 20);
        let memory = pool.host(HostId::new(1));
        let ranges: Vec<_> = list.iter().map(|(at, bytes)| (ByteOffset::new(*at), *bytes)).collect();
        let mut raw = [0xff; 256];
        let length = write_list(&ranges, &mut raw);
        assert_eq!(length, 16 * list.len());
        memory.write(BUFFER.saturating_add(256), &raw);
        let mut pieces = Vec::new();
        let whole = super::pieces(&memory, BUFFER, bytes, ram(), |piece| pieces.push(piece));
        (whole, pieces)
    }

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let list: Vec<(u64, u32)> = (0..16).map(|index| (65_536 + 128 * index, 100)).collect();
        let (whole, pieces) = read(&list, 256 + 1600);
        assert!(whole);
        assert_eq!(pieces.len(), PIECES_MAX);
        assert_eq!(pieces[0], Piece { at: BUFFER, bytes: 256 });
        assert!(
            pieces[1..]
                .iter()
                .zip(&list)
                .all(|(piece, (at, bytes))| { (piece.at.get(), piece.bytes) == (*at, *bytes) })
        );
        assert!(!read(&list, 256 + 1601).0, "more than sixteen ranges");
    }

    #[test]
    fn ranges_outside_of_the_leased_memory_are_refused() {
        for (at, bytes) in [
            (0, 100),
            (65_535, 100),
            (131_072 - 99, 100),
            (131_072, 100),
            (u64::MAX, 100),
            (u64::MAX - 99, 100),
            (4096, 100),
        ] {
            assert!(!read(&[(at, bytes)], 256 + bytes).0, "{at} {bytes}");
        }
        assert!(read(&[(131_072 - 100, 100)], 356).0);
    }

    #[test]
    fn a_list_that_is_not_as_long_as_its_packet_is_refused() {
        assert!(!read(&[(65_536, 100)], 256 + 99).0, "too long");
        assert!(!read(&[(65_536, 0), (65_536, 100)], 256 + 100).0, "an empty range");
        assert!(!read(&[], 255).0, "all of the packet is in front");
        assert!(!read(&[(65_536, u32::MAX)], 256 + 100).0);
    }

    proptest! {
        #[test]
        fn whatever_is_taken_is_leased_and_as_long_as_the_packet(raw: [u8; 256], bytes in 0..70_000u32) {
            let pool = SimulatedPool::new(1, 1 << 20);
            let memory = pool.host(HostId::new(1));
            memory.write(BUFFER.saturating_add(256), &raw);
            let mut pieces = Vec::new();
            if super::pieces(&memory, BUFFER, bytes, ram(), |piece| pieces.push(piece)) {
                prop_assert_eq!(pieces.iter().map(|piece| piece.bytes).sum::<u32>(), bytes);
            }
            for piece in pieces.iter().skip(1) {
                prop_assert!(ram().contains(piece.at, u64::from(piece.bytes)));
            }
        }
    }
}
