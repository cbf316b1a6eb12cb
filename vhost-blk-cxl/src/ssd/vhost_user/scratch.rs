//! Memory beside the pool that a target is given: what is read and written there is of no guest.

use std::fs::File;
use std::io;
use std::sync::{Mutex, PoisonError};

use cxl_pool::ByteOffset;
use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use super::connection::RING_ADDRESS;

/// How much is read or written at a time.
pub(crate) const SCRATCH_BYTES: usize = 64 << 10;
/// Where the target finds it, behind the ring.
pub(super) const SCRATCH_ADDRESS: u64 = RING_ADDRESS + (1 << 30);

/// The memory, which stays the same for each connection to the target.
#[derive(Debug)]
pub struct Scratch {
    file: File,
    region: MmapRegion<()>,
    turn: Mutex<()>,
}

impl Scratch {
    /// Where a command finds it: an offset behind any pool, which only a target understands that shares it.
    pub(crate) const AT: ByteOffset = ByteOffset::new(SCRATCH_ADDRESS);

    pub(super) fn new() -> io::Result<Self> {
        let (file, region) = shared_memory("wadi-vhost-user-scratch", SCRATCH_BYTES)?;
        Ok(Self { file, region, turn: Mutex::new(()) })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Has a piece of at most [`SCRATCH_BYTES`] written by `write`, with zeros behind it up to a multiple of `block_bytes`: it is told how
    /// many bytes that are. Others wait for their turn.
    pub(crate) fn write_out<R>(&self, piece: &[u8], block_bytes: u32, write: impl FnOnce(u64) -> R) -> R {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let length = piece.len().next_multiple_of(block_bytes as usize);
        let mut padded = piece.to_vec();
        padded.resize(length, 0);
        // It fits: blocks are of 4 KiB at most, of which the whole is a multiple.
        let put = self.region.as_volatile_slice().write_slice(&padded, 0);
        debug_assert!(put.is_ok());
        write(length as u64)
    }

    /// What a command has read into it.
    pub(super) fn take(&self, into: &mut [u8]) {
        let read = self.region.as_volatile_slice().read_slice(into, 0);
        debug_assert!(read.is_ok());
    }
}

/// Memory that nobody can shorten under a mapping.
pub(super) fn shared_memory(name: &str, bytes: usize) -> io::Result<(File, MmapRegion<()>)> {
    let file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(bytes as u64)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let region =
        MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), bytes).map_err(io::Error::other)?;
    Ok((file, region))
}
