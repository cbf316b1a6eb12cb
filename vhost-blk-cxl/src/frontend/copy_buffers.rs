//! Buffers for regions on their way from one place to another.
//!
//! They are kept apart from those of the guest's requests. Requests may wait for a copy, which must not wait for them in turn; and
//! copies follow each other for as long as there is something to copy, so that a long request would never find what they take.

use vhost_frontend::{Buffer, BufferArea};

use super::regions::REGION_BYTES;

/// Regions that a disk copies at a time.
pub(super) const COPIES_MAX: usize = 2;
/// What they take of the disk's area.
pub(super) const COPIES_BYTES: u64 = COPIES_MAX as u64 * REGION_BYTES;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct CopyBuffers {
    free: Vec<Buffer>,
    /// How many copies have.
    taken: usize,
}

impl CopyBuffers {
    /// Takes what is missing, as far as it is there: at first all, later in place of what was lost.
    pub(super) fn replenish(&mut self, area: &mut BufferArea) {
        while self.free.len() + self.taken < COPIES_MAX
            && let Ok(bytes) = u32::try_from(REGION_BYTES)
            && let Some(buffer) = area.alloc(bytes)
        {
            self.free.push(buffer);
        }
    }

    /// One for a copy.
    pub(super) fn take(&mut self, area: &mut BufferArea) -> Option<Buffer> {
        self.replenish(area);
        let buffer = self.free.pop()?;
        self.taken += 1;
        Some(buffer)
    }

    /// A copy is over.
    pub(super) fn give_back(&mut self, buffer: Buffer) {
        self.taken -= 1;
        self.free.push(buffer);
    }

    /// A copy is over whose buffer a backend may still fill. Whoever waits for that backend gives it back to the area.
    pub(super) fn lose(&mut self) {
        self.taken -= 1;
    }

    /// Nothing is copied any more but what is being copied now.
    pub(super) fn give_up(&mut self, area: &mut BufferArea) {
        self.free.drain(..).for_each(|buffer| area.free(buffer));
    }
}
