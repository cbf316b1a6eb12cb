//! Whether workers come round. One that waits for ever in a call of a driver, or turns in circles, answers nobody, while its daemon
//! beats and counts as before.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// At most so much of the time between two looks counts: whoever stood still as a whole, or waited long for a core, takes nobody for
/// stuck who did so, too.
const LOOK_COUNTS_MAX: Duration = Duration::from_millis(20);

/// A worker with nothing to do that waits to be woken, and one that has ended.
const RESTING: u64 = 0;

/// Which turn a worker is in. In lines of its own: it is written at each turn.
#[derive(Default)]
#[repr(align(128))]
struct Stamp(AtomicU64);

/// The worker's side.
pub(super) struct Turner {
    stamp: Arc<Stamp>,
    turn: u64,
}

impl Turner {
    /// One more turn begins.
    pub(super) fn turns(&mut self) {
        self.turn += 1;
        self.stamp.0.store(self.turn, Ordering::Relaxed);
    }

    /// The worker waits for something to do.
    pub(super) fn rests(&self) {
        self.stamp.0.store(RESTING, Ordering::Relaxed);
    }
}

impl Drop for Turner {
    fn drop(&mut self) {
        self.rests();
    }
}

/// The workers of a daemon. Clones are the same ones.
#[derive(Clone, Default)]
pub(crate) struct Workers(Arc<Mutex<Vec<Watched>>>);

struct Watched {
    name: String,
    stamp: Arc<Stamp>,
    /// Its turn at the last look, and for how long it has been that one.
    seen: u64,
    still: Duration,
}

impl Workers {
    /// One more, which rests until its first turn.
    pub(super) fn add(&self, name: &str) -> Turner {
        let stamp = Arc::<Stamp>::default();
        let watched = Watched {
            name: name.to_owned(),
            stamp: Arc::clone(&stamp),
            seen: RESTING,
            still: Duration::ZERO,
        };
        self.with(|all| all.push(watched));
        Turner { stamp, turn: 0 }
    }

    /// The name of one that has been in the same turn for so long, as far as somebody was there to see it. `since` is when it was looked last.
    fn stuck(&self, since: Duration, patience: Duration) -> Option<String> {
        let counts = since.min(LOOK_COUNTS_MAX);
        self.with(|all| {
            let mut stuck = None;
            for it in all {
                let turn = it.stamp.0.load(Ordering::Relaxed);
                let same = turn != RESTING && turn == it.seen;
                it.still = if same { it.still + counts } else { Duration::ZERO };
                it.seen = turn;
                if it.still >= patience {
                    stuck = Some(it.name.clone());
                }
            }
            stuck
        })
    }

    fn with<R>(&self, act: impl FnOnce(&mut Vec<Watched>) -> R) -> R {
        // Each is put in and changed whole, whoever panicked.
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").finish_non_exhaustive()
    }
}

/// Looks again and again whether workers come round.
#[derive(Debug)]
pub(crate) struct TurnWatch {
    workers: Workers,
    patience: Option<Duration>,
    looked: Instant,
}

impl TurnWatch {
    /// Of these workers; without patience none is ever taken for stuck.
    pub(crate) fn new(workers: Workers, patience: Option<Duration>, now: Instant) -> Self {
        Self { workers, patience, looked: now }
    }

    /// The name of a worker that is stuck.
    pub(crate) fn look(&mut self, now: Instant) -> Option<String> {
        let since = now.duration_since(std::mem::replace(&mut self.looked, now));
        self.workers.stuck(since, self.patience?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);
    const OFTEN: Duration = Duration::from_millis(10);
    /// A look less than that.
    const NEARLY: Duration = Duration::from_millis(4990);

    /// Looks often for so long, and calls `between` before each look.
    fn look_for(
        watch: &mut TurnWatch,
        now: &mut Instant,
        time: Duration,
        mut between: impl FnMut(),
    ) -> Option<String> {
        let end = *now + time;
        while *now < end {
            *now += OFTEN;
            between();
            if let Some(name) = watch.look(*now) {
                return Some(name);
            }
        }
        None
    }

    #[test]
    fn only_who_stays_in_a_turn_for_too_long_is_stuck() {
        let (workers, mut now) = (Workers::default(), Instant::now());
        let mut watch = TurnWatch::new(workers.clone(), Some(PATIENCE), now);
        let (mut other, mut stuck) = (workers.add("other"), workers.add("stuck"));
        stuck.turns();
        assert_eq!(look_for(&mut watch, &mut now, NEARLY, || other.turns()), None);
        stuck.turns();
        assert_eq!(look_for(&mut watch, &mut now, PATIENCE, || other.turns()), None, "it came round");
        assert_eq!(look_for(&mut watch, &mut now, PATIENCE, || other.turns()).as_deref(), Some("stuck"));
        stuck.turns();
        assert_eq!(watch.look(now), None);
    }

    #[test]
    fn who_rests_or_has_ended_is_not_stuck() {
        let (workers, mut now) = (Workers::default(), Instant::now());
        let mut watch = TurnWatch::new(workers.clone(), Some(PATIENCE), now);
        let (mut resting, mut ended) = (workers.add("resting"), workers.add("ended"));
        resting.turns();
        resting.rests();
        ended.turns();
        drop(ended);
        assert_eq!(look_for(&mut watch, &mut now, 2 * PATIENCE, || ()), None);
        resting.turns();
        assert_eq!(look_for(&mut watch, &mut now, NEARLY, || ()), None, "it has just woken up");
    }

    #[test]
    fn time_in_which_nobody_looked_does_not_count() {
        let (workers, mut now) = (Workers::default(), Instant::now());
        let mut watch = TurnWatch::new(workers.clone(), Some(PATIENCE), now);
        let mut worker = workers.add("worker");
        worker.turns();
        for _ in 0..100 {
            now += 2 * PATIENCE;
            assert_eq!(watch.look(now), None);
        }
    }

    #[test]
    fn without_patience_nobody_is_stuck() {
        let (workers, mut now) = (Workers::default(), Instant::now());
        let mut watch = TurnWatch::new(workers.clone(), None, now);
        let mut worker = workers.add("worker");
        worker.turns();
        assert_eq!(look_for(&mut watch, &mut now, 10 * PATIENCE, || ()), None);
    }
}
