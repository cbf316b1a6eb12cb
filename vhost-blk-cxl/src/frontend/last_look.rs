//! How long others have had to answer.

use std::time::{Duration, Instant};

/// What the time between two looks counts for at most. Where more has passed, we were the ones who hung.
const STEP_MAX: Duration = Duration::from_secs(1);

/// When those who keep requests were looked at.
#[derive(Debug, Default)]
pub(super) struct LastLook {
    at: Option<Instant>,
    /// Answers were taken since.
    pub(super) heard: bool,
}

impl LastLook {
    /// How long they have had to answer since the look before, if their answers were taken meanwhile.
    pub(super) fn passed(&mut self, now: Instant) -> Duration {
        let before = self.at.replace(now).filter(|_| std::mem::take(&mut self.heard));
        before.map_or(Duration::ZERO, |before| now.duration_since(before).min(STEP_MAX))
    }
}
