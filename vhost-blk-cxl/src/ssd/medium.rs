//! What carries out the `file` driver's steps.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;

use cxl_pool::{Area, Pool};

use super::discards::Way;
use super::uring::{Engine, Step};
use super::volatile::{VolatileCache, VolatileCacheOptions};
use crate::segments::Segment;

/// Whether data goes into the pool, or out of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// A read.
    In,
    /// A write, which must have reached the medium when it ends, or not.
    Out { force_unit_access: bool },
}

/// The kernel, or a drive with a cache that forgets.
#[allow(clippy::large_enum_variant)] // there is one per device, and the kernel's is on the fast path
pub(super) enum Medium {
    /// The kernel.
    Kernel(Engine),
    /// For tests of what is left after a power failure.
    Volatile(Box<VolatileCache>),
}

impl Medium {
    /// A medium with room for `depth` steps at a time.
    pub(super) fn new(
        ssd: &str,
        file: File,
        direct: bool,
        pool: Pool,
        depth: u32,
        cache: Option<VolatileCacheOptions>,
    ) -> io::Result<Self> {
        Ok(match cache {
            None => Self::Kernel(Engine::new(ssd, file, direct, pool, depth)?),
            Some(options) => Self::Volatile(Box::new(VolatileCache::new(file, &pool, options)?)),
        })
    }

    /// From now on steps have their data in these areas only.
    pub(super) fn set_areas(&mut self, areas: &[Area]) {
        match self {
            Self::Kernel(engine) => engine.set_areas(areas),
            Self::Volatile(_) => {}
        }
    }

    /// Queues a step. No more than `depth` of them may be in flight.
    pub(super) fn push(&mut self, id: u32, step: Step) {
        match self {
            Self::Kernel(engine) => engine.push(id, step),
            Self::Volatile(cache) => cache.push(id, step),
        }
    }

    /// Queues a step whose data lies in several places. It may end when a part of it is done.
    pub(super) fn push_list(
        &mut self,
        id: u32,
        at: u64,
        direction: Direction,
        mut segments: impl Iterator<Item = Segment>,
    ) {
        match self {
            Self::Kernel(engine) => engine.push_list(id, at, direction, segments),
            // One by one: it is in no hurry.
            Self::Volatile(cache) => {
                if let Some(Segment { start: data, bytes }) = segments.next() {
                    let step = match direction {
                        Direction::In => Step::Read { at, bytes, data },
                        Direction::Out { force_unit_access } => {
                            Step::Write { at, bytes, data, force_unit_access }
                        }
                    };
                    cache.push(id, step);
                }
            }
        }
    }

    /// Hands over what was queued.
    pub(super) fn submit(&mut self) {
        match self {
            Self::Kernel(engine) => engine.submit(),
            Self::Volatile(cache) => cache.submit(),
        }
    }

    /// The next step that ended, with its result as system calls return it.
    pub(super) fn completed(&mut self) -> Option<(u32, i32)> {
        match self {
            Self::Kernel(engine) => engine.completed(),
            Self::Volatile(cache) => cache.completed(),
        }
    }

    /// Readable when a step has ended; none while something that was queued was not handed over.
    pub(super) fn event(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Kernel(engine) => engine.has_submitted().then(|| engine.event()),
            Self::Volatile(cache) => Some(cache.event()),
        }
    }

    /// Whether steps are carried out without waiting for a device.
    pub(super) fn is_in_memory(&self) -> bool {
        match self {
            Self::Kernel(engine) => engine.is_in_memory(),
            Self::Volatile(_) => false,
        }
    }

    /// How discards are to be carried out.
    pub(super) fn way_of_discards(&self) -> Way {
        match self {
            Self::Kernel(engine) => engine.way_of_discards(),
            // It brings zeros to what lies behind it.
            Self::Volatile(_) => Way::Holes { block_bytes: 0 },
        }
    }

    /// Whether none of what a read of this length brings is in this host's cache.
    pub(super) fn reads_past_cache(&self, bytes: u64) -> bool {
        match self {
            Self::Kernel(engine) => engine.reads_past_cache(bytes),
            Self::Volatile(_) => false,
        }
    }

    /// Differs from that of the predecessor if what it acknowledged and did not flush may be lost; none where that
    /// takes a restart of the host.
    pub(super) fn write_verifier(&self) -> Option<u64> {
        match self {
            Self::Kernel(_) => None,
            Self::Volatile(cache) => Some(cache.write_verifier()),
        }
    }
}
