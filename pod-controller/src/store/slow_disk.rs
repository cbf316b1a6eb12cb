//! Says that the disk under the state is slow, and what to do.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What takes longer than this is slow: a disk that flushes its cache takes some ten milliseconds at worst, and a leader that
/// cannot write for so long soon loses its office.
const SLOW: Duration = Duration::from_millis(200);
/// No more is said in this time, however many writes are slow.
const PAUSE: Duration = Duration::from_mins(1);

/// Notices writes that took long.
#[derive(Debug, Default)]
pub(super) struct SlowDisk(Mutex<Noticed>);

#[derive(Debug, Default)]
struct Noticed {
    said_at: Option<Instant>,
    /// Slow writes of which nothing was said, and the longest of them.
    unsaid: u32,
    longest: Duration,
}

impl SlowDisk {
    /// A write to this file began then and has ended now.
    pub(super) fn note(&self, path: &Path, began: Instant, now: Instant) {
        let took = now.saturating_duration_since(began);
        if took <= SLOW {
            return;
        }
        // What it counts is right whoever panicked.
        let due = self.0.lock().unwrap_or_else(PoisonError::into_inner).due(took, now);
        if let Some((writes, longest)) = due {
            tracing::warn!(
                path = %path.display(),
                writes,
                longest_ms = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX),
                "the disk is slow, and every change waits for it: give the state a disk of its own, or see who keeps this one busy; \
                 with replicas, heartbeat-ms and election-ms should be well above what a write takes"
            );
        }
    }
}

impl Noticed {
    /// Counts a slow write; how many there were, and the longest, if it is time to say so.
    fn due(&mut self, took: Duration, now: Instant) -> Option<(u32, Duration)> {
        self.unsaid = self.unsaid.saturating_add(1);
        self.longest = self.longest.max(took);
        if self.said_at.is_some_and(|said| now.saturating_duration_since(said) < PAUSE) {
            return None;
        }
        let due = (self.unsaid, self.longest);
        *self = Self { said_at: Some(now), ..Self::default() };
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_writes_are_counted_and_told_now_and_then() {
        let began = Instant::now();
        let at = |seconds: u64| began + Duration::from_secs(seconds);
        let ms = Duration::from_millis;
        let mut noticed = Noticed::default();
        assert_eq!(noticed.due(ms(300), at(0)), Some((1, ms(300))));
        assert_eq!(noticed.due(ms(900), at(1)), None);
        assert_eq!(noticed.due(ms(400), at(59)), None);
        assert_eq!(noticed.due(ms(500), at(60)), Some((3, ms(900))));
        assert_eq!(noticed.due(ms(250), at(200)), Some((1, ms(250))));
    }

    #[test]
    fn what_is_quick_is_not_noticed() {
        let (disk, began) = (SlowDisk::default(), Instant::now());
        disk.note(Path::new("/state"), began, began + SLOW);
        assert_eq!(disk.0.lock().unwrap().said_at, None);
        disk.note(Path::new("/state"), began, began + SLOW * 2);
        assert!(disk.0.lock().unwrap().said_at.is_some());
    }
}
