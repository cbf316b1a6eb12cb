//! What a VMM does while it moves its guest: it shares a log and looks at it now and then.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::VhostUserVirtioFeatures;
use vhost::{VhostBackend as _, VhostUserDirtyLogRegion};
use vm_memory::{Bytes as _, GuestAddress};

use super::{MockGuest, RAM_START, RING_BYTES};
use crate::dirty_log::LOG_PAGE_BYTES;

const PAGE: usize = LOG_PAGE_BYTES as usize;
/// The pages of a ring that the guest writes: its descriptors and the available ring.
const GUEST_PAGES: u64 = 5;

pub(super) struct MockLog {
    file: File,
    on: bool,
    /// The guest's memory when it was last looked at.
    seen: Vec<u8>,
}

/// Pages of guest memory, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirtyPages {
    /// Those that changed since the last look, but for those of rings that the guest writes itself.
    pub changed: BTreeSet<u64>,
    /// Those that were logged since the last look.
    pub logged: BTreeSet<u64>,
}

impl DirtyPages {
    /// What changed and would be lost on the way to another host.
    pub fn lost(&self) -> Vec<u64> {
        self.changed.difference(&self.logged).copied().collect()
    }
}

impl MockGuest {
    /// Begins to log what the device writes, as QEMU does it while rings run: the log, the feature, the rings.
    pub fn start_logging(&mut self) {
        self.share_log(self.log_bytes()).unwrap();
        let features = self.features | VhostUserVirtioFeatures::LOG_ALL.bits();
        self.frontend().set_features(features).unwrap();
        (0..self.rings.len()).for_each(|ring| self.set_ring_addresses(ring));
    }

    /// Connects to a device, and begins to log what it writes as QEMU does it where the device comes back while its guest moves: the
    /// feature, the rings, the log. `meanwhile` happens before there is a log.
    pub fn connect_logging(&mut self, path: &Path, wanted: u64, meanwhile: impl FnOnce(&mut Self)) {
        self.negotiate(path, wanted);
        let features = self.features | VhostUserVirtioFeatures::LOG_ALL.bits();
        self.frontend().set_features(features).unwrap();
        self.start_rings();
        meanwhile(self);
        self.share_log(self.log_bytes()).unwrap();
    }

    /// Ends it, as QEMU does it when the guest stays after all.
    pub fn stop_logging(&mut self) {
        self.log.as_mut().expect("something is logged").on = false;
        let features = self.features;
        self.frontend().set_features(features).unwrap();
        (0..self.rings.len()).for_each(|ring| self.set_ring_addresses(ring));
    }

    /// How long a log has to be.
    pub fn log_bytes(&self) -> u64 {
        self.end().div_ceil(8 * LOG_PAGE_BYTES)
    }

    /// Shares a new log of this many bytes, or finds that the device does not want it.
    pub fn share_log(&mut self, bytes: u64) -> vhost::Result<()> {
        let file: File = rustix::fs::memfd_create("mock-log", MemfdFlags::CLOEXEC).unwrap().into();
        file.set_len(bytes).unwrap();
        let handle = file.as_raw_fd();
        let region = VhostUserDirtyLogRegion { mmap_size: bytes, mmap_offset: 0, mmap_handle: handle };
        // What waits for the log is written as soon as it is there.
        let seen = self.image();
        self.frontend().set_log_base(0, Some(region))?;
        self.log = Some(MockLog { file, on: true, seen });
        Ok(())
    }

    /// What happened since the last look, or since the log was shared. Let the device be quiet meanwhile.
    pub fn dirty_pages(&mut self) -> DirtyPages {
        let now = self.image();
        let rings = self.rings.len() as u64 * RING_BYTES;
        let log = self.log.as_mut().expect("something was logged");
        let before = std::mem::replace(&mut log.seen, now);
        let pairs = (RAM_START..).step_by(PAGE).zip(log.seen.chunks(PAGE).zip(before.chunks(PAGE)));
        let guests = |at: u64| {
            let offset = at - RAM_START;
            offset < rings && offset % RING_BYTES < GUEST_PAGES * LOG_PAGE_BYTES
        };
        let changed = pairs.filter(|(at, (now, before))| now != before && !guests(*at));
        let mut bits = vec![0; log.file.metadata().unwrap().len() as usize];
        log.file.read_exact_at(&mut bits, 0).unwrap();
        log.file.write_all_at(&vec![0; bits.len()], 0).unwrap();
        let is_set = |page: &u64| bits[(page / 8) as usize] >> (page % 8) & 1 == 1;
        DirtyPages {
            changed: changed.map(|(at, _)| at / LOG_PAGE_BYTES).collect(),
            logged: (0..bits.len() as u64 * 8).filter(is_set).collect(),
        }
    }

    /// A device that is met anew knows of no log.
    pub(super) fn forget_log(&mut self) {
        self.log.iter_mut().for_each(|log| log.on = false);
    }

    pub(super) fn logs(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.on)
    }

    fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.bytes as usize];
        self.memory.read_slice(&mut image, GuestAddress(RAM_START)).unwrap();
        image
    }
}
