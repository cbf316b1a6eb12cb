//! Who answers whoever leads.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;

use super::change::LogOwner;

/// When each member was last asked something that it answered. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Roll(Arc<Mutex<BTreeMap<LogOwner, Instant>>>);

impl Roll {
    /// This member answered what it was asked then.
    pub(super) fn note(&self, owner: LogOwner, asked: Instant) {
        let mut answered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = answered.entry(owner).or_insert(asked);
        *last = asked.max(*last);
    }

    /// Whether this member answered something that it was asked since.
    pub(super) fn has_answered(&self, owner: LogOwner, since: Instant) -> bool {
        // Each is put in whole, whoever panicked.
        let answered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        answered.get(&owner).is_some_and(|asked| *asked >= since)
    }
}
