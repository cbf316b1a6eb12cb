//! From a descriptor chain to a request.
//!
//! The driver may cut header, data and status byte into descriptors as it likes. The chain has been checked for its
//! form; what it says is checked here, against the disk: nothing out of bounds is ever sent to a backend.

use vhost_frontend::{Chain, ChainReader, GuestMemory};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::device::{ID_BYTES, SECTOR_BYTES, TRANSFER_BYTES_MAX, range_sectors_max};
use crate::message::Operation;

/// type, reserved, sector.
pub(crate) const HEADER_BYTES: u64 = 16;
/// sector, number of sectors, flags.
const RANGE_BYTES: u64 = 16;

/// What the parser must know of a disk.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Its size.
    pub size_bytes: u64,
    /// Its logical block.
    pub block_bytes: u32,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// What a guest asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parsed {
    /// Something for the backend. Data of a write begins after the header.
    Operation {
        /// What to do.
        operation: Operation,
        /// Where on the disk.
        offset_bytes: u64,
        /// How many bytes of it.
        length_bytes: u64,
        /// Zeroes may be written by giving the range back.
        may_unmap: bool,
    },
    /// The disk's id, to be written to the first bytes of the writable part.
    Id,
    /// To be answered at once.
    Refused(Refusal),
}

/// Why a request is answered without asking the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// There is no room for a status: it cannot be answered.
    NoStatus,
    /// VIRTIO_BLK_S_IOERR.
    IoError,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported,
}

/// Reads a request.
pub fn parse(memory: &GuestMemory, chain: &Chain, shape: Shape) -> Parsed {
    if chain.writable_bytes() == 0 {
        return Parsed::Refused(Refusal::NoStatus);
    }
    let mut reader = ChainReader::new(memory, chain.readable());
    let mut header = [0; 16];
    if reader.read(&mut header).is_err() {
        return Parsed::Refused(Refusal::IoError);
    }
    let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
    let sector = u64::from_le_bytes(sector);
    // Data that the device reads, and room for data that it writes; the last writable byte is the status.
    let (out_bytes, in_bytes) = (reader.left(), chain.writable_bytes() - 1);
    match u32::from_le_bytes([t0, t1, t2, t3]) {
        VIRTIO_BLK_T_IN if out_bytes == 0 => transfer(Operation::Read, sector, in_bytes, shape),
        VIRTIO_BLK_T_OUT if in_bytes == 0 => transfer(Operation::Write, sector, out_bytes, shape),
        VIRTIO_BLK_T_FLUSH => Parsed::Operation {
            operation: Operation::Flush,
            offset_bytes: 0,
            length_bytes: 0,
            may_unmap: false,
        },
        VIRTIO_BLK_T_GET_ID if out_bytes == 0 && in_bytes >= u64::from(ID_BYTES) => Parsed::Id,
        VIRTIO_BLK_T_DISCARD => range(&mut reader, true, shape),
        VIRTIO_BLK_T_WRITE_ZEROES => range(&mut reader, false, shape),
        VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_GET_ID => Parsed::Refused(Refusal::IoError),
        _ => Parsed::Refused(Refusal::Unsupported),
    }
}

fn transfer(operation: Operation, sector: u64, length_bytes: u64, shape: Shape) -> Parsed {
    let refused = Parsed::Refused(Refusal::IoError);
    if length_bytes == 0 || length_bytes > TRANSFER_BYTES_MAX || operation.writes() && shape.read_only {
        return refused;
    }
    match bounded(sector, length_bytes, shape) {
        Some(offset_bytes) => Parsed::Operation { operation, offset_bytes, length_bytes, may_unmap: false },
        None => refused,
    }
}

/// The offset of a range that lies within the disk and on its blocks.
fn bounded(sector: u64, length_bytes: u64, shape: Shape) -> Option<u64> {
    let block = u64::from(shape.block_bytes);
    let offset = sector.checked_mul(SECTOR_BYTES)?;
    let end = offset.checked_add(length_bytes)?;
    (end <= shape.size_bytes && offset.is_multiple_of(block) && length_bytes.is_multiple_of(block))
        .then_some(offset)
}

fn range(reader: &mut ChainReader<'_>, discard: bool, shape: Shape) -> Parsed {
    let refused = Parsed::Refused(Refusal::IoError);
    if shape.read_only {
        return refused;
    }
    // One range is what the configuration space allows.
    let mut bytes = [0; 16];
    if reader.left() != RANGE_BYTES || reader.read(&mut bytes).is_err() {
        return refused;
    }
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = bytes;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
    let flags = u32::from_le_bytes([f0, f1, f2, f3]);
    let unmap = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
    let known = if discard { 0 } else { unmap };
    if flags & !known != 0 {
        return Parsed::Refused(Refusal::Unsupported);
    }
    if sectors == 0 || sectors > range_sectors_max(discard) {
        return refused;
    }
    let length_bytes = u64::from(sectors) * SECTOR_BYTES;
    let operation = if discard { Operation::Discard } else { Operation::WriteZeroes };
    match bounded(sector, length_bytes, shape) {
        Some(offset_bytes) => {
            Parsed::Operation { operation, offset_bytes, length_bytes, may_unmap: flags & unmap != 0 }
        }
        None => refused,
    }
}
