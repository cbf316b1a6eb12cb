//! SSD drivers.
//!
//! A driver carries out [`Command`]s on its device and touches the pool only where they say. It never waits: commands
//! go in as long as it has room, outcomes are collected later, and a file descriptor tells a sleeping worker that there
//! are some. It knows nothing of volumes, leases or channels; the backend has checked everything before.

mod bounce;
mod config;
mod discards;
mod file;
mod fixed_buffers;
mod label;
mod medium;
mod null;
mod open_file;
mod uring;
mod verifier;
mod vhost_user;
mod volatile;

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

use cxl_pool::{Area, ByteOffset, Pool};

#[cfg(test)]
pub(crate) use bounce::Bounce;
pub use config::{DriverKind, SsdConfig, parse_size};
pub use file::FileSsd;
pub use label::{LABEL_BYTES, Label, LabelError};
pub(crate) use label::{NewTable, Store};
pub use null::NullSsd;
pub(crate) use vhost_user::SCRATCH_BYTES;
pub use vhost_user::{Scratch, VhostUserSsd};
pub use volatile::VolatileCacheOptions;

use crate::message::Operation;
use crate::segments::Segment;

/// The backend's name for a command in flight: small numbers, so that drivers may index with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CommandId(pub u32);

/// One thing to do. Offset and length lie within the device and are multiples of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// Comes back with the outcome.
    pub id: CommandId,
    /// What to do.
    pub operation: Operation,
    /// The write must have reached the medium when it completes.
    pub force_unit_access: bool,
    /// Zeroes may be written by giving the range back.
    pub may_unmap: bool,
    /// Where on the device.
    pub offset_bytes: u64,
    /// How many bytes.
    pub length_bytes: u64,
    /// Where the data lies in the pool, for reads and writes in one piece.
    pub data: ByteOffset,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was done.
    Done,
    /// The device failed.
    Failed,
    /// The device cannot do this.
    Unsupported,
}

/// A command that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Which one.
    pub id: CommandId,
    /// How.
    pub outcome: Outcome,
}

/// The driver has no room for another command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Its size.
    pub size_bytes: u64,
    /// Offsets and lengths are multiples of this: 512 or 4096.
    pub block_bytes: u32,
}

/// A device of this host.
pub trait Ssd: Send {
    /// Which driver this is.
    fn driver(&self) -> &'static str;

    /// What the device is.
    fn geometry(&self) -> Geometry;

    /// What a discard has to be a multiple of, with its offset, to have any effect, if the device says so. Others are carried out as well
    /// as can be.
    fn discard_granularity_bytes(&self) -> Option<u32> {
        None
    }

    /// Commands have their data in these areas of the pool, until others are named: so a driver may prepare them.
    fn set_areas(&mut self, _areas: &[Area]) {}

    /// Accepts a command. It may not begin before [`Ssd::kick`].
    fn submit(&mut self, command: Command) -> Result<(), Full>;

    /// Accepts a read or a write whose data lies in several segments, each of them whole blocks, together as long as the command.
    fn submit_list(&mut self, command: Command, segments: &[Segment]) -> Result<(), Full>;

    /// Begins what was submitted.
    fn kick(&mut self);

    /// Collects what ended.
    fn reap(&mut self, into: &mut Vec<Finished>);

    /// Readable when [`Ssd::reap`] would find something. None while nothing would tell: the device must be kicked and
    /// looked at again as long as commands are in flight. It is always the same descriptor.
    fn event(&self) -> Option<BorrowedFd<'_>>;

    /// Whether the data of commands stays out of this host's cache, because the device accesses the pool past it or not at
    /// all. Then nothing is invalidated before a write, nor flushed after a read.
    fn bypasses_cache(&self) -> bool {
        false
    }

    /// Whether what a read of so many bytes brings is not in this host's cache when it has ended, though other data is. Then it is not
    /// flushed after it.
    fn reads_past_cache(&self, _length_bytes: u64) -> bool {
        false
    }

    /// Whether zeros that may be unmapped are known to be written here, as data is.
    fn writes_zeroes(&self) -> bool {
        false
    }

    /// Of the disk of another program: what its first so many bytes hold, or all of it if it is smaller, and memory through which the
    /// program can be told to write. To be asked before it is given anything else to do. None of other devices.
    fn read_beginning(&mut self, _bytes: u64) -> Option<io::Result<(Vec<u8>, Arc<Scratch>)>> {
        None
    }

    /// A number that changes when writes that were acknowledged and not flushed may have been lost, as NFS's write
    /// verifier does. Frontends then fail the next flush, which would otherwise vouch for them.
    fn write_verifier(&self) -> u64;

    /// Why the device cannot be used. As long as it says so everything fails; one that comes back, which is the same device then, says so
    /// no longer.
    fn failure(&self) -> Option<&str>;
}

/// Opens a device as the host's configuration describes it. What is to be known of its losses when it is opened again, before the
/// host is started anew, is noted in the file `losses`, if there is one.
pub fn open(config: &SsdConfig, pool: &Pool, losses: Option<PathBuf>) -> Result<Box<dyn Ssd>, OpenError> {
    Ok(match &config.driver {
        DriverKind::File { path, size_bytes, volatile_cache: None } => {
            let ssd = FileSsd::open(&config.name, path, *size_bytes, pool)?;
            match losses {
                Some(losses) => Box::new(ssd.noting_losses_in(losses)),
                None => Box::new(ssd),
            }
        }
        DriverKind::File { path, size_bytes, volatile_cache: Some(seed) } => {
            let cache = VolatileCacheOptions::new(*seed);
            Box::new(FileSsd::open_volatile(&config.name, path, *size_bytes, pool, cache)?)
        }
        DriverKind::VhostUser { socket, patience } => {
            let ssd = VhostUserSsd::connect(&config.name, socket, pool)?.waiting_for(*patience);
            match losses {
                Some(losses) => Box::new(ssd.noting_losses_in(losses)),
                None => Box::new(ssd),
            }
        }
        DriverKind::Null { size_bytes } => Box::new(NullSsd::new(*size_bytes)),
    })
}

/// A device that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// An operation on its file failed.
    #[error("ssd {ssd}: cannot {what} {path}: {source}")]
    Io {
        /// Its name.
        ssd: String,
        /// What was tried.
        what: &'static str,
        /// Its file.
        path: String,
        /// Why not.
        source: std::io::Error,
    },
    /// Another process has it.
    #[error("ssd {ssd}: {path} is locked by another process: stop it, or give this host another device")]
    Locked {
        /// Its name.
        ssd: String,
        /// Its file.
        path: String,
    },
    /// It is a block device that is in use.
    #[error(
        "ssd {ssd}: {path} is in use, or a partition of it, or the device that it is a partition of: it is mounted, a member of a RAID or of a \
         mapped device (see `lsblk {path}`), or another process has it; give this host another device"
    )]
    Claimed {
        /// Its name.
        ssd: String,
        /// Its file.
        path: String,
    },
    /// The file does not exist, and no size was given to create it with.
    #[error("ssd {ssd}: {path} does not exist: create it, or say with `size = \"8G\"` how large it shall be")]
    Missing {
        /// Its name.
        ssd: String,
        /// Its file.
        path: String,
    },
    /// It is neither a file nor a block device.
    #[error("ssd {ssd}: {path} is neither a file nor a block device")]
    NotADisk {
        /// Its name.
        ssd: String,
        /// Its file.
        path: String,
    },
    /// It has no room for a single block.
    #[error("ssd {ssd}: {path} has {size_bytes} bytes: give it at least one block of {block_bytes}")]
    TooSmall {
        /// Its name.
        ssd: String,
        /// Its file.
        path: String,
        /// Its size.
        size_bytes: u64,
        /// Its block.
        block_bytes: u32,
    },
}

impl OpenError {
    /// Whether requests of a process of before may still be under way there, which fill or read memory of the pool.
    pub fn may_hide_requests(&self) -> bool {
        match self {
            Self::Locked { .. } | Self::Claimed { .. } => true,
            Self::Io { source, .. } => source.kind() == std::io::ErrorKind::TimedOut,
            Self::Missing { .. } | Self::NotADisk { .. } | Self::TooSmall { .. } => false,
        }
    }

    /// Whether the same device may be opened later, with the same configuration.
    pub fn may_pass(&self) -> bool {
        !matches!(self, Self::NotADisk { .. })
    }
}
