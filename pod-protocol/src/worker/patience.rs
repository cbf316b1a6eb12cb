//! How long a worker polls for what others have in hand.

use std::time::{Duration, Instant};

/// Whether it pays to poll until something comes, while requests are out or in a device.
///
/// To be woken takes as long as a quick device takes. So while what is awaited comes within a limit, a worker polls until then. Where
/// it took longer, polling was in vain: from then on the worker sleeps, and looks how long it takes, until something has come in
/// time again. A slow device so costs one stretch of polling, and not one for each request.
#[derive(Debug)]
pub(super) struct Patience {
    limit: Duration,
    pays: bool,
    /// The last work before what is being slept for.
    since: Option<Instant>,
}

impl Patience {
    /// Polls so long at most. At first it is taken for worth it.
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, pays: true, since: None }
    }

    /// Whether to go on polling, so long after the last work, for what others have in hand.
    pub(super) fn polls(&self, waited: Duration) -> bool {
        self.pays && waited < self.limit
    }

    /// The worker is about to sleep while others have something in hand. Its last work was then.
    pub(super) fn sleeps(&mut self, last_work: Instant) {
        self.since.get_or_insert(last_work);
    }

    /// There is work again.
    #[inline]
    pub(super) fn works(&mut self, now: Instant) {
        if let Some(since) = self.since.take() {
            self.pays = now.duration_since(since) <= self.limit;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(200);

    fn after(start: Instant, us: u64) -> Instant {
        start + Duration::from_micros(us)
    }

    #[test]
    fn it_polls_up_to_its_limit() {
        let patience = Patience::new(LIMIT);
        assert!(patience.polls(Duration::ZERO));
        assert!(patience.polls(Duration::from_micros(199)));
        assert!(!patience.polls(LIMIT));
        assert!(!Patience::new(Duration::ZERO).polls(Duration::ZERO), "it is switched off");
    }

    #[test]
    fn what_takes_too_long_is_slept_for_until_something_comes_in_time() {
        let start = Instant::now();
        let mut patience = Patience::new(LIMIT);
        patience.sleeps(after(start, 10));
        // It woke for something else, and sleeps again.
        patience.sleeps(after(start, 200));
        patience.works(after(start, 211));
        assert!(!patience.polls(Duration::ZERO), "201 us");
        // Not slept for: it says nothing.
        patience.works(after(start, 212));
        assert!(!patience.polls(Duration::ZERO));
        patience.sleeps(after(start, 300));
        patience.works(after(start, 5300));
        assert!(!patience.polls(Duration::ZERO));
        patience.sleeps(after(start, 5300));
        patience.works(after(start, 5500));
        assert!(patience.polls(Duration::ZERO), "200 us");
    }
}
