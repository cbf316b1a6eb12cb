//! Dirty logging as the VMM switches it: by a feature bit, by a flag of each vring, and by the log that it shares.

use tracing::info;
use vhost::vhost_user::Result;
use vhost::vhost_user::message::VhostUserVirtioFeatures;

use super::{Connection, refused};
use crate::dirty_log::{DirtyLog, DirtyLogError};
use crate::memory::GuestMemory;

/// Whatever is written to the guest's memory is to be logged.
pub(super) const LOG_ALL: u64 = VhostUserVirtioFeatures::LOG_ALL.bits();

impl Connection {
    /// The log, while anything is logged. Everything is then: a used ring too many costs the VMM a page.
    pub(super) fn logging(&self) -> Option<&DirtyLog> {
        self.log.as_ref().filter(|_| self.wants_log())
    }

    /// Whether what is written now would be lost on the way to the other host. QEMU, whose device comes back while it moves its
    /// guest, starts the rings before it shares the log.
    pub(super) fn lacks_log(&self) -> bool {
        self.log.is_none() && self.wants_log()
    }

    fn wants_log(&self) -> bool {
        let rings = || self.vrings.iter().filter_map(|vring| vring.addresses).any(|ring| ring.logged);
        self.features & LOG_ALL != 0 || rings()
    }

    pub(super) fn guest_memory(&self) -> GuestMemory {
        self.memory.snapshot().with_log(self.logging().cloned())
    }

    /// Makes a change, and tells the worker if by it logging begins, ends or goes elsewhere. When this returns, whatever
    /// is written is logged as the VMM wants it, and every ring runs for which all is known.
    pub(super) fn changing_log(&mut self, change: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let before = self.logging().cloned();
        change(self)?;
        self.log_covers_memory()?;
        let same = match (&before, self.logging()) {
            (Some(before), Some(now)) => before.is(now),
            (None, None) => true,
            _ => false,
        };
        if !same {
            info!(device = self.spec.name, logged = self.logging().is_some(), "dirty logging changed");
            self.memory_changed();
        }
        // Some may have waited for the log, or for its being wanted no more.
        (0..u32::from(self.spec.queues)).try_for_each(|index| self.start(index))
    }

    /// Logs to this from now on.
    pub(super) fn log_to(&mut self, log: DirtyLog) -> Result<()> {
        let before = self.log.clone();
        self.changing_log(|connection| {
            connection.log = Some(log);
            Ok(())
        })?;
        // A VMM that starts its device again while it moves the guest starts the rings first, and looks no more at the log that it
        // shared before.
        if let (Some(before), Some(log)) = (before, &self.log) {
            log.absorb(&before);
        }
        Ok(())
    }

    /// What cannot be logged would be lost on the way to the other host.
    pub(super) fn log_covers_memory(&self) -> Result<()> {
        let end = self.memory.end();
        match self.logging().map(DirtyLog::covers) {
            Some(covers) if covers < end => Err(refused(DirtyLogError::TooShort { covers, end })),
            _ => Ok(()),
        }
    }
}
