//! Completing a checksum that its sender left to others.

use cxl_pool::Memory;

use crate::nic::Piece;
use crate::vnet_header::{HEADER_BYTES, VnetHeader};

const CHUNK_BYTES: usize = 1024;
/// Where the UDP checksum lies in its header.
const UDP_CHECKSUM_OFFSET: u16 = 6;

/// Completes the checksum of a packet in `pieces`, all but the last of them of even length. The header must have been
/// checked against the packet. The field holds the sum of the pseudo header already, so it is summed like the rest.
pub(crate) fn complete<M: Memory>(memory: &M, pieces: &[Piece], header: VnetHeader) {
    let start = HEADER_BYTES as u64 + u64::from(header.checksum_start);
    let mut sum = 0u64;
    // Position within the packet, and whether the next byte is the low one of its word.
    let mut position = 0u64;
    let mut low = false;
    let mut chunk = [0; CHUNK_BYTES];
    for piece in pieces {
        let end = position + u64::from(piece.bytes);
        let mut at = position.max(start);
        while at < end {
            let bytes = usize::try_from(end - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let chunk = &mut chunk[..bytes];
            memory.read(piece.at.saturating_add(at - position), chunk);
            for byte in chunk {
                sum += if low { u64::from(*byte) } else { u64::from(*byte) << 8 };
                low = !low;
            }
            at += bytes as u64;
        }
        position = end;
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let mut value = !u16::try_from(sum).unwrap_or_default();
    if value == 0 && header.checksum_offset == UDP_CHECKSUM_OFFSET {
        // Zero says "none" to UDP; all ones is the same number.
        value = 0xffff;
    }
    let field = start + u64::from(header.checksum_offset);
    let [high, low] = value.to_be_bytes();
    write_byte(memory, pieces, field, high);
    write_byte(memory, pieces, field + 1, low);
}

fn write_byte<M: Memory>(memory: &M, pieces: &[Piece], position: u64, byte: u8) {
    let mut before = 0;
    for piece in pieces {
        let bytes = u64::from(piece.bytes);
        if position < before + bytes {
            memory.write(piece.at.saturating_add(position - before), &[byte]);
            return;
        }
        before += bytes;
    }
}
