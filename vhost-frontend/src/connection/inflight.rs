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
        let bytes = region_bytes(queues, size) as u64;
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

    /// Whether of a ring that starts after this one, since the VMM has said already how it kicks there, a predecessor may have left
    /// requests in flight.
    pub(super) fn others_owe(&self, index: u16) -> Result<bool> {
        for (other, vring) in (0..).zip(&self.vrings) {
            let starts = !vring.running && vring.kick_known && vring.addresses.is_some();
            if other != index
                && starts
                && self.inflight_queue(other, vring.size)?.is_some_and(|queue| queue.has_marks())
            {
                return Ok(true);
            }
        }
        Ok(false)
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
