//! The in-flight region, which a VMM keeps for the engine while that restarts.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Error, Result};
use vm_memory::{FileOffset, MmapRegion};

use super::{Connection, refused};
use crate::inflight::{InflightQueue, region_bytes};
use crate::memory::file_holds;
use crate::notes::{NOTES_BYTES, Notes};
use crate::ring::OthersOwe;

/// The in-flight region of this connection.
#[derive(Debug)]
pub(super) struct Inflight {
    region: Arc<MmapRegion<()>>,
    queues: u16,
    size: u16,
}

impl Connection {
    /// Makes a region for a VMM that has none yet.
    pub(super) fn make_inflight(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        let bytes = (region_bytes(queues, size) + NOTES_BYTES) as u64;
        let file = inflight_file(bytes).map_err(Error::ReqHandlerError)?;
        let described = VhostUserInflight::new(bytes, 0, queues, size);
        let ours = file.try_clone().map_err(Error::ReqHandlerError)?;
        self.map_inflight(&described, ours)?;
        Ok((described, file))
    }

    /// Maps the region that the VMM has.
    pub(super) fn map_inflight(&mut self, described: &VhostUserInflight, file: File) -> Result<()> {
        if self.runs_rings() {
            return Err(refused("the in-flight region cannot change while rings run"));
        }
        let (queues, size) = (described.num_queues, described.queue_size);
        let needs = region_bytes(queues, size);
        let bytes = usize::try_from(described.mmap_size).map_err(refused)?;
        if bytes < needs {
            return Err(refused(format!(
                "an in-flight region of {bytes} bytes, {queues} queues of {size} need {needs}"
            )));
        }
        if !file_holds(&file, described.mmap_offset, described.mmap_size) {
            return Err(refused("an in-flight region that reaches beyond the end of its file"));
        }
        let region =
            MmapRegion::from_file(FileOffset::new(file, described.mmap_offset), bytes).map_err(refused)?;
        self.inflight = Some(Inflight { region: Arc::new(region), queues, size });
        Ok(())
    }

    /// Whether of rings that do not run while this one starts a predecessor may have left requests in flight.
    pub(super) fn others_owe(&self, index: u16) -> Result<OthersOwe> {
        let mut found = OthersOwe::Nothing;
        let others = (0..).zip(&self.vrings).filter(|(other, vring)| *other != index && !vring.running);
        for (other, vring) in others {
            // It starts, since the VMM has said already how it kicks there.
            if vring.kick_known && vring.addresses.is_some() {
                if self.inflight_queue(other, vring.size)?.is_some_and(|queue| queue.has_marks()) {
                    return Ok(OthersOwe::Starting);
                }
            } else if self.has_marks(other) {
                found = OthersOwe::Undescribed;
            }
        }
        Ok(found)
    }

    /// Whether there are marks of a ring of which the VMM has not said how long it is: the record has room for one of any length. A
    /// part that nobody could begin from says nothing.
    fn has_marks(&self, index: u16) -> bool {
        let size = self.inflight.as_ref().map_or(0, |inflight| inflight.size);
        self.inflight_queue(index, size).is_ok_and(|queue| queue.is_some_and(|queue| queue.has_marks()))
    }

    /// What an engine notes for its successor, if there is room for it.
    pub(super) fn notes(&self) -> Option<Notes> {
        let inflight = self.inflight.as_ref()?;
        Notes::open(Arc::clone(&inflight.region), region_bytes(inflight.queues, inflight.size))
    }

    /// The part of the region that is ring `index`'s, of `size` descriptors, if there is a region.
    pub(super) fn inflight_queue(&self, index: u16, size: u16) -> Result<Option<InflightQueue>> {
        let Some(inflight) = &self.inflight else { return Ok(None) };
        let region = Arc::clone(&inflight.region);
        InflightQueue::open(region, inflight.queues, inflight.size, index, size)
            .map(Some)
            .map_err(|error| refused(error.to_string()))
    }
}

/// Memory for an in-flight region that nobody can shorten under our mapping.
fn inflight_file(bytes: u64) -> io::Result<File> {
    let memory = rustix::fs::memfd_create("wadi-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memory, bytes)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory.into())
}
