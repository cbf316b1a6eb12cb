//! Warnings that a guest can cause as often as it likes.

use std::time::{Duration, Instant};

/// There is one warning in this time at most.
const EVERY: Duration = Duration::from_secs(10);

/// When there was one last.
#[derive(Debug, Default)]
pub(super) struct Seldom {
    at: Option<Instant>,
    left_out: u64,
}

impl Seldom {
    /// Whether it is time for one: then how many were left out since the last one.
    pub(super) fn is_due(&mut self, now: Instant) -> Option<u64> {
        if self.at.is_some_and(|at| now.duration_since(at) < EVERY) {
            self.left_out += 1;
            return None;
        }
        self.at = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_counted() {
        let (mut seldom, began) = (Seldom::default(), Instant::now());
        assert_eq!(seldom.is_due(began), Some(0));
        for ms in 0..1000 {
            assert_eq!(seldom.is_due(began + Duration::from_millis(ms)), None);
        }
        assert_eq!(seldom.is_due(began + EVERY), Some(1000));
        assert_eq!(seldom.is_due(began + EVERY), None);
        assert_eq!(seldom.is_due(began + 2 * EVERY), Some(1));
    }
}
