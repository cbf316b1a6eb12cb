//! How much of a device a volume may use, and how much it is sure to get.
//!
//! Virtual scheduling (GCRA): for each rate, the moment at which the volume would be due if it kept to it. A request is
//! in time if that moment lies no further ahead than the burst.

use pod_protocol::objects::Qos;

const SECOND_NS: u64 = 1_000_000_000;
/// What a request takes at least of the bytes that a volume is sure to get.
const MINIMUM_COST_BYTES: u64 = 4096;
/// How much longer than before a lower rate makes wait for what began earlier, at most.
const LONGER_NS_MAX: u64 = SECOND_NS;
/// How far beyond a minimum somebody may have come who has not forfeited it.
const BEYOND_MINIMUM_NS: u64 = SECOND_NS / 100;

/// One rate.
#[derive(Debug, Clone, Copy)]
struct Rate {
    per_second: u64,
    burst_ns: u64,
    due_ns: u64,
}

impl Rate {
    fn new(per_second: u64, burst_ns: u64) -> Self {
        Self { per_second, burst_ns, due_ns: 0 }
    }

    /// Goes on from where another rate was: what began then has yet to be paid for.
    fn go_on_from(&mut self, before: Self, now_ns: u64) {
        let owed_ns = before.due_ns.saturating_sub(now_ns);
        if before.per_second == self.per_second || owed_ns == 0 {
            self.due_ns = before.due_ns;
            return;
        }
        let scaled = u128::from(owed_ns) * u128::from(before.per_second) / u128::from(self.per_second.max(1));
        let scaled = u64::try_from(scaled).unwrap_or(u64::MAX);
        self.due_ns = now_ns.saturating_add(scaled.min(owed_ns.saturating_add(LONGER_NS_MAX)));
    }

    /// From when on something more is in time.
    fn in_time_from(&self) -> u64 {
        self.due_ns.saturating_sub(self.burst_ns)
    }

    fn take(&mut self, amount: u64, now_ns: u64) {
        let cost = u128::from(amount) * u128::from(SECOND_NS) / u128::from(self.per_second.max(1));
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        self.due_ns = self.due_ns.max(now_ns).saturating_add(cost);
    }

    /// The same of a minimum: whoever had more while there was enough for all is sure of it all the same, as soon as the last request
    /// is paid for.
    fn take_sure(&mut self, amount: u64, now_ns: u64) {
        self.due_ns = self.due_ns.min(now_ns.saturating_add(BEYOND_MINIMUM_NS));
        self.take(amount, now_ns);
    }
}

/// A volume's rates.
#[derive(Debug, Clone, Default)]
pub(super) struct Throttle {
    qos: Qos,
    requests: Option<Rate>,
    bytes: Option<Rate>,
    minimum_requests: Option<Rate>,
    minimum_bytes: Option<Rate>,
}

impl Throttle {
    pub(super) fn new(qos: Qos) -> Self {
        let burst_ns = u64::from(qos.burst_ms) * (SECOND_NS / 1000);
        let rate = |per_second: Option<u64>| per_second.map(|per_second| Rate::new(per_second, burst_ns));
        Self {
            requests: rate(qos.iops),
            bytes: rate(qos.bytes_per_second),
            // What was not used of them is not saved up.
            minimum_requests: qos.minimum_iops.map(|per_second| Rate::new(per_second, 0)),
            minimum_bytes: qos.minimum_bytes_per_second.map(|per_second| Rate::new(per_second, 0)),
            qos,
        }
    }

    /// Takes a new setting over. What began before still counts: whoever changes it again and again, or something else of it, does not
    /// lift the limit.
    pub(super) fn set(&mut self, qos: Qos, now_ns: u64) {
        if self.qos == qos {
            return;
        }
        let before = std::mem::replace(self, Self::new(qos));
        for (rate, before) in [
            (&mut self.requests, before.requests),
            (&mut self.bytes, before.bytes),
            (&mut self.minimum_requests, before.minimum_requests),
            (&mut self.minimum_bytes, before.minimum_bytes),
        ] {
            if let (Some(rate), Some(before)) = (rate, before) {
                rate.go_on_from(before, now_ns);
            }
        }
    }

    /// Whether the time matters at all.
    pub(super) fn needs_clock(&self) -> bool {
        let rates = [&self.requests, &self.bytes, &self.minimum_requests, &self.minimum_bytes];
        rates.into_iter().any(Option::is_some)
    }

    /// When the next request may begin, if not now.
    pub(super) fn waits_until(&self, now_ns: u64) -> Option<u64> {
        let rates = self.requests.iter().chain(&self.bytes);
        rates.map(Rate::in_time_from).max().filter(|&from| from > now_ns)
    }

    /// Whether it has had less than it is sure to get.
    pub(super) fn is_below_minimum(&self, now_ns: u64) -> bool {
        let mut minima = self.minimum_requests.iter().chain(&self.minimum_bytes);
        minima.any(|minimum| minimum.in_time_from() <= now_ns)
    }

    /// A request began.
    pub(super) fn take(&mut self, bytes: u64, now_ns: u64) {
        if let Some(rate) = &mut self.requests {
            rate.take(1, now_ns);
        }
        if let Some(rate) = &mut self.minimum_requests {
            rate.take_sure(1, now_ns);
        }
        if let Some(rate) = &mut self.bytes {
            rate.take(bytes, now_ns);
        }
        if let Some(rate) = &mut self.minimum_bytes {
            // Who only flushes would come before others for ever.
            rate.take_sure(bytes.max(MINIMUM_COST_BYTES), now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many requests of this length begin in ten seconds, tried every millisecond.
    fn in_ten_seconds(qos: Qos, bytes: u64) -> u64 {
        let mut throttle = Throttle::new(qos);
        let mut begun = 0;
        for now in (0..10 * SECOND_NS).step_by(1_000_000) {
            while throttle.waits_until(now).is_none() {
                throttle.take(bytes, now);
                begun += 1;
            }
        }
        begun
    }

    #[test]
    fn rates_are_kept_and_bursts_come_on_top() {
        let qos = Qos { iops: Some(200), burst_ms: 500, ..Qos::default() };
        let begun = in_ten_seconds(qos, 4096);
        assert!((2100..=2102).contains(&begun), "{begun}");
        let qos = Qos { bytes_per_second: Some(1 << 20), burst_ms: 0, ..Qos::default() };
        let begun = in_ten_seconds(qos, 128 << 10);
        assert!((80..=81).contains(&begun), "{begun}");
        let both = Qos { iops: Some(1000), bytes_per_second: Some(1 << 20), burst_ms: 0, ..Qos::default() };
        let begun = in_ten_seconds(both, 4096);
        assert!((2500..=2561).contains(&begun), "the lower one counts: {begun}");
    }

    #[test]
    fn a_request_longer_than_a_second_may_move_is_served_and_paid_for() {
        let qos = Qos { bytes_per_second: Some(1000), burst_ms: 10, ..Qos::default() };
        let mut throttle = Throttle::new(qos);
        assert_eq!(throttle.waits_until(0), None);
        throttle.take(5000, 0);
        assert_eq!(throttle.waits_until(0), Some(4_990_000_000));
        assert_eq!(throttle.waits_until(4_990_000_000), None);
    }

    #[test]
    fn an_unused_minimum_is_not_saved_up() {
        let mut throttle = Throttle::new(Qos { minimum_iops: Some(10), ..Qos::default() });
        assert!(throttle.needs_clock() && throttle.waits_until(0).is_none());
        assert!(throttle.is_below_minimum(5 * SECOND_NS));
        throttle.take(0, 5 * SECOND_NS);
        assert!(!throttle.is_below_minimum(5 * SECOND_NS));
        assert!(throttle.is_below_minimum(5 * SECOND_NS + SECOND_NS / 10));
    }

    #[test]
    fn a_minimum_of_bytes_is_reached_by_bytes() {
        let qos = Qos { minimum_bytes_per_second: Some(1 << 20), ..Qos::default() };
        let mut throttle = Throttle::new(qos);
        assert!(throttle.needs_clock() && throttle.waits_until(0).is_none());
        // What moves nothing, such as a flush, brings it nearer by a little.
        throttle.take(0, 0);
        assert!(!throttle.is_below_minimum(0));
        throttle.take((512 << 10) - MINIMUM_COST_BYTES, 0);
        assert!(!throttle.is_below_minimum(SECOND_NS / 2 - 1));
        assert!(throttle.is_below_minimum(SECOND_NS / 2));
        assert_eq!(throttle.waits_until(0), None, "it is no limit");
        // Of both, it has had neither before it has had both.
        let mut throttle = Throttle::new(Qos { minimum_iops: Some(1), ..qos });
        throttle.take(512, 0);
        assert!(throttle.is_below_minimum(SECOND_NS / 100));
    }

    #[test]
    fn a_minimum_is_not_forfeited_by_having_had_more() {
        let qos = Qos { minimum_iops: Some(1000), minimum_bytes_per_second: Some(1 << 20), ..Qos::default() };
        let mut throttle = Throttle::new(qos);
        for request in 0..100_000 {
            throttle.take(4096, request * 10_000);
        }
        assert!(!throttle.is_below_minimum(SECOND_NS));
        assert!(throttle.is_below_minimum(SECOND_NS + 2 * BEYOND_MINIMUM_NS));
        throttle.set(Qos { iops: Some(5000), ..qos }, SECOND_NS);
        assert!(throttle.is_below_minimum(SECOND_NS + 2 * BEYOND_MINIMUM_NS));
        // It is kept on average.
        let mut begun = 0;
        for now in (0..10 * SECOND_NS).step_by(1_000_000) {
            while throttle.is_below_minimum(2 * SECOND_NS + now) {
                throttle.take(0, 2 * SECOND_NS + now);
                begun += 1;
            }
        }
        assert!((9_990..=10_001).contains(&begun), "{begun}");
    }

    #[test]
    fn another_setting_does_not_refill_it() {
        let qos = Qos { iops: Some(10), burst_ms: 0, ..Qos::default() };
        let mut throttle = Throttle::new(qos);
        (0..20).for_each(|_| throttle.take(0, 0));
        let due = Some(2 * SECOND_NS);
        assert_eq!(throttle.waits_until(0), due);
        throttle.set(qos, 0);
        assert_eq!(throttle.waits_until(0), due);
        // Something else of it.
        let qos = Qos { bytes_per_second: Some(1), minimum_iops: Some(1), ..qos };
        throttle.set(qos, SECOND_NS);
        assert_eq!(throttle.waits_until(SECOND_NS), due);
        // The second that is left of it is worth ten requests.
        throttle.set(Qos { iops: Some(20), ..qos }, SECOND_NS);
        assert_eq!(throttle.waits_until(SECOND_NS), Some(SECOND_NS + SECOND_NS / 2));
        throttle.set(Qos { iops: Some(10), ..qos }, SECOND_NS);
        assert_eq!(throttle.waits_until(SECOND_NS), due);
        // Nobody waits for hours because of what began at a higher rate.
        throttle.set(Qos { iops: Some(1), ..qos }, SECOND_NS);
        assert_eq!(throttle.waits_until(SECOND_NS), Some(SECOND_NS + SECOND_NS + LONGER_NS_MAX));
        throttle.set(Qos { iops: None, ..qos }, SECOND_NS);
        assert_eq!(throttle.waits_until(SECOND_NS), None);
    }
}
