//! How long a log may be.

/// How many changes a log has at least before a snapshot is made.
pub(crate) const LOG_LEAST: u64 = 256;
/// A log takes at least this part of what its snapshot takes before the next one is made: of a large state, all of it is not written
/// again for a few changes, and a start has not much more to read than without a log.
const LOG_SHARE: u64 = 8;

/// How much there is in a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Length {
    pub(crate) changes: u64,
    pub(crate) bytes: u64,
}

impl Length {
    /// Whether a snapshot should take its place, where the last one took so much, and there are so many changes at least.
    pub(crate) fn outgrows(self, snapshot_bytes: u64, least: u64) -> bool {
        self.changes >= least && self.bytes >= snapshot_bytes / LOG_SHARE
    }

    /// One more change.
    pub(crate) fn add(&mut self, bytes: usize) {
        self.changes += 1;
        self.bytes += bytes as u64;
    }

    /// What comes after the first of it.
    pub(crate) fn after(self, first: Self) -> Self {
        let changes = self.changes.saturating_sub(first.changes);
        Self { changes, bytes: self.bytes.saturating_sub(first.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_state_is_written_again_for_many_changes_and_a_small_one_for_some() {
        let log = |changes| Length { changes, bytes: changes * 1000 };
        assert!(!log(LOG_LEAST - 1).outgrows(0, LOG_LEAST));
        assert!(log(LOG_LEAST).outgrows(1 << 20, LOG_LEAST));
        assert!(!log(LOG_LEAST).outgrows(130 << 20, LOG_LEAST));
        assert!(!log(16_000).outgrows(130 << 20, LOG_LEAST));
        assert!(log(20_000).outgrows(130 << 20, LOG_LEAST));
        assert_eq!(log(20_000).after(log(19_999)), log(1));
    }
}
