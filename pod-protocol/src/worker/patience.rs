//! How long a worker polls for what others have in hand.

use std::time::{Duration, Instant};

/// Waits that are slept through, at most, before one is polled for again.
const SLEPT_MAX: u32 = 64;

/// Whether it pays to poll until something comes, while requests are out or in a device.
///
/// To be woken takes as long as a quick device takes. So while what is awaited comes within a limit, a worker polls until then. Where
/// it took longer, polling was in vain, be it that the device is slow or that others have the core: from then on the worker sleeps, until
/// some waits have ended in time, more of them each time that polling is in vain again. A slow device so costs one
/// stretch of polling, and not one for each request.
#[derive(Debug)]
pub(super) struct Patience {
    limit: Duration,
    /// So many waits that end in time are slept through before one is polled for.
    to_sleep: u32,
    /// So many are next time.
    then: u32,
    /// The last work before what is waited for.
    since: Option<Instant>,
}

impl Patience {
    /// Polls so long at most. At first it is taken for worth it.
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, to_sleep: 0, then: 1, since: None }
    }

    /// Whether to go on polling for what others have in hand, when it is so long that there was work, then.
    pub(super) fn polls(&mut self, waited: Duration, last_work: Instant) -> bool {
        self.since.get_or_insert(last_work);
        self.to_sleep == 0 && waited < self.limit
    }

    /// There is work again.
    #[inline]
    pub(super) fn works(&mut self, now: Instant) {
        if let Some(since) = self.since.take() {
            self.ended(now.duration_since(since) <= self.limit);
        }
    }

    fn ended(&mut self, in_time: bool) {
        match (self.to_sleep, in_time) {
            (0, true) => self.then = 1,
            (0, false) => (self.to_sleep, self.then) = (self.then, (self.then * 2).min(SLEPT_MAX)),
            (_, true) => self.to_sleep -= 1,
            (_, false) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(200);

    /// Waits for so long. Returns whether it polled.
    fn wait(patience: &mut Patience, us: u64) -> bool {
        let start = Instant::now();
        let polled = patience.polls(Duration::ZERO, start);
        // It woke for something else, and waits on.
        patience.polls(Duration::from_micros(us / 2), start + Duration::from_micros(us / 2));
        patience.works(start + Duration::from_micros(us));
        polled
    }

    #[test]
    fn it_polls_up_to_its_limit() {
        let now = Instant::now();
        let mut patience = Patience::new(LIMIT);
        assert!(patience.polls(Duration::ZERO, now));
        assert!(patience.polls(Duration::from_micros(199), now));
        assert!(!patience.polls(LIMIT, now));
        assert!(!Patience::new(Duration::ZERO).polls(Duration::ZERO, now), "it is switched off");
    }

    #[test]
    fn what_takes_too_long_is_slept_for_until_something_comes_in_time() {
        let mut patience = Patience::new(LIMIT);
        assert!(wait(&mut patience, 200) && wait(&mut patience, 201));
        assert!((0..1000).all(|_| !wait(&mut patience, 5000)), "a slow device");
        // Work that nothing was waited for says nothing.
        patience.works(Instant::now());
        assert!(!wait(&mut patience, 200));
        assert!(wait(&mut patience, 200) && wait(&mut patience, 200));
    }

    #[test]
    fn the_more_often_it_is_in_vain_the_less_often_it_is_tried() {
        let mut patience = Patience::new(LIMIT);
        for slept in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert!(wait(&mut patience, 3000), "others have the core");
            assert!((0..slept).all(|_| !wait(&mut patience, 100)), "{slept}");
        }
        assert!(wait(&mut patience, 100), "it has the core again");
        assert!(wait(&mut patience, 3000) && !wait(&mut patience, 100) && wait(&mut patience, 100));
    }
}
