//! Waiting for what must come to be.

use std::thread;
use std::time::{Duration, Instant};

/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Looks until there is something.
///
/// # Panics
/// When there is nothing for a minute.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        thread::sleep(LOOK_EVERY);
    }
}

/// Looks until it is so.
///
/// # Panics
/// When it is not so for a minute.
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    until(what, || is_so().then_some(()));
}
