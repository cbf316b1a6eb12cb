//! How many requests somebody may send: a bucket of tokens for each, filled at a steady rate.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How many are counted apart. Those who have not sent anything for longest are forgotten first.
const CLIENTS_MAX: usize = 1024;

pub(super) struct Rates {
    per_second: f64,
    buckets: BTreeMap<String, (f64, Instant)>,
}

impl Rates {
    /// So many per second, and as many at once.
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second: per_second.into(), buckets: BTreeMap::new() }
    }

    /// Lets one more request pass, or says after which time there may be one.
    pub(super) fn take(&mut self, key: &str, now: Instant) -> Result<(), Duration> {
        if !self.buckets.contains_key(key) {
            self.make_room(now);
        }
        let (left, at) = self.buckets.entry(key.to_owned()).or_insert((self.per_second, now));
        let filled = now.saturating_duration_since(*at).as_secs_f64() * self.per_second;
        *left = (*left + filled).min(self.per_second);
        *at = now;
        if *left >= 1.0 {
            *left -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - *left) / self.per_second))
    }

    fn make_room(&mut self, now: Instant) {
        if self.buckets.len() < CLIENTS_MAX {
            return;
        }
        // A bucket that is full again says nothing.
        self.buckets.retain(|_, (_, at)| now.saturating_duration_since(*at) < Duration::from_secs(1));
        while self.buckets.len() >= CLIENTS_MAX {
            let oldest = self.buckets.iter().min_by_key(|(_, (_, at))| *at).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { return };
            self.buckets.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_pass_and_floods_wait() {
        let (mut rates, began) = (Rates::new(10), Instant::now());
        let passed = |rates: &mut Rates, key: &str, at: u64| {
            (0..100).filter(|_| rates.take(key, began + Duration::from_millis(at)).is_ok()).count()
        };
        assert_eq!(passed(&mut rates, "a", 0), 10);
        assert_eq!(passed(&mut rates, "b", 0), 10, "others have their own");
        assert_eq!(passed(&mut rates, "a", 500), 5);
        assert_eq!(passed(&mut rates, "a", 60_000), 10, "no more is saved up");
        let wait = rates.take("a", began + Duration::from_mins(1)).expect_err("empty");
        assert!(wait > Duration::ZERO && wait <= Duration::from_millis(100), "{wait:?}");
        for number in 0..3000 {
            let _ = rates.take(&number.to_string(), began + Duration::from_mins(1));
        }
        assert!(rates.buckets.len() <= CLIENTS_MAX);
    }
}
