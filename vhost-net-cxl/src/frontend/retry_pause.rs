//! How long packets wait that a backend was not ready for.

use std::time::{Duration, Instant};

/// The first time: a frontend may hear of a failover sooner than the backend that takes over, and that by no more than this as a rule.
const SOONEST: Duration = Duration::from_micros(125);
/// In the long run: a backend that is not ready for long is not asked all the time.
pub(super) const LONGEST: Duration = Duration::from_millis(2);
/// What is given back so long after the last pause began has nothing to do with it.
const FORGOTTEN_AFTER: Duration = Duration::from_millis(10);

/// Each pause is twice as long as the one before it, as long as they follow each other.
#[derive(Debug)]
pub(super) struct RetryPause {
    next: Duration,
    last_began: Option<Instant>,
}

impl RetryPause {
    pub(super) fn new() -> Self {
        Self { next: SOONEST, last_began: None }
    }

    /// The pause that begins now.
    pub(super) fn begin(&mut self, now: Instant) -> Duration {
        let follows = |last: Instant| now.saturating_duration_since(last) < FORGOTTEN_AFTER;
        let pause = if self.last_began.is_some_and(follows) { self.next } else { SOONEST };
        (self.next, self.last_began) = ((pause * 2).min(LONGEST), Some(now));
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_they_are_long_and_begin_anew_after_a_while() {
        let (mut pause, mut now) = (RetryPause::new(), Instant::now());
        let mut begin = |after: Duration| {
            now += after;
            pause.begin(now).as_micros()
        };
        let pauses: Vec<u128> = (0..6).map(|_| begin(Duration::from_millis(3))).collect();
        assert_eq!(pauses, [125, 250, 500, 1000, 2000, 2000]);
        assert_eq!(begin(FORGOTTEN_AFTER), 125);
        assert_eq!(begin(Duration::ZERO), 250);
    }
}
