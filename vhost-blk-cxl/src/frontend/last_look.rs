//! How long others have had to answer.

use std::time::{Duration, Instant};

use crate::message::{Completion, Status};

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

/// For how long what a place has may wait there for the volume's rates: its backend says so with every answer.
#[derive(Debug, Default)]
pub(super) struct Throttled(Duration);

impl Throttled {
    /// An answer came.
    pub(super) fn answered(&mut self, completion: &Completion) {
        // What was refused did not begin, and says nothing.
        if completion.status == Status::Ok {
            self.0 = Duration::from_millis(completion.throttled_ms.into());
        }
    }

    /// For how much of the time that has passed the place has to account.
    pub(super) fn accounts_for(&mut self, passed: Duration) -> Duration {
        let excused = passed.min(self.0);
        self.0 -= excused;
        passed.saturating_sub(excused)
    }
}
