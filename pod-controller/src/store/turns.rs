//! Who writes next where one writes at a time: whoever is waited for, before whoever has time.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Knows how many wait to write.
#[derive(Debug, Default)]
pub(super) struct Turns {
    waiting: Mutex<u32>,
    none: Condvar,
}

/// Somebody waits to write, for as long as this is there.
#[derive(Debug)]
pub(super) struct Waiting<'a>(&'a Turns);

impl Turns {
    fn count(&self) -> MutexGuard<'_, u32> {
        // A number is right whoever panicked.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on somebody waits.
    pub(super) fn wait(&self) -> Waiting<'_> {
        *self.count() += 1;
        Waiting(self)
    }

    /// Returns once nobody waits.
    pub(super) fn let_others(&self) {
        let waiting = self.none.wait_while(self.count(), |waiting| *waiting > 0);
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut count = self.0.count();
        *count -= 1;
        if *count == 0 {
            self.0.none.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_time_lets_all_others_go_first() {
        let turns = Turns::default();
        turns.let_others();
        let (first, second) = (turns.wait(), turns.wait());
        let waits = std::sync::atomic::AtomicBool::new(true);
        std::thread::scope(|scope| {
            let aside = scope.spawn(|| {
                turns.let_others();
                assert!(!waits.load(std::sync::atomic::Ordering::Acquire), "somebody waits");
            });
            drop(first);
            std::thread::yield_now();
            waits.store(false, std::sync::atomic::Ordering::Release);
            drop(second);
            aside.join().expect("nobody waits any more");
        });
    }
}
