//! The bytes that a VM's queues may move.
//!
//! A sleeping vCPU does not stop requests that are already queued, so these bytes are limited where they are admitted: at the
//! frontends.

/// A byte budget: rate w·α, at most one T_W of it saved up.
///
/// Whatever the VM does, and as long as the rate stays: of messages that are at most w·α·T_W long it admits no more than w·α·(K + T_W) bytes in
/// any interval K, which is less than the bound of §4.5, w·α·K·(1 + 2·T_W/K). Longer ones are better cut. One that cannot be is admitted when a
/// whole T_W is saved up; what it is too large by is paid back before anything else is admitted, and any interval has at most w·α·K and that message:
/// up to 2·w·α·T_W it is within the bound, too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ByteBudget {
    /// In bytes/s; infinite: no limit.
    rate: f64,
    t_w_us: f64,
    /// In bytes; below 0 what was admitted ahead.
    balance: f64,
    at_us: f64,
    refused_since_us: Option<f64>,
    held_us: f64,
}

impl ByteBudget {
    /// No limit yet.
    pub fn new(t_w_us: f64, now_us: f64) -> Self {
        Self {
            rate: f64::INFINITY,
            t_w_us,
            balance: 0.0,
            at_us: now_us,
            refused_since_us: None,
            held_us: 0.0,
        }
    }

    /// Changes the rate, w·α in bytes/s; infinite for no limit, and what is no number counts as 0.
    pub fn set_rate(&mut self, rate: f64, now_us: f64) {
        self.refill(now_us);
        let was_free = self.rate.is_infinite();
        self.rate = rate.max(0.0);
        // What was saved up is worth at most one T_W at the new rate; debts stay.
        self.balance = if was_free { self.depth() } else { self.balance.min(self.depth()) };
    }

    /// The rate in bytes/s.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// Whether the queues may move this many bytes now; if so, they are taken from the budget. Time that goes back counts as
    /// standing still.
    #[inline]
    pub fn admit(&mut self, bytes: u64, now_us: f64) -> bool {
        if self.rate.is_infinite() {
            self.open(now_us);
            return true;
        }
        let admitted = self.has_room(bytes, now_us);
        if admitted {
            self.balance -= crate::mchannel::exact(bytes);
            self.open(now_us);
        } else if self.refused_since_us.is_none() {
            self.refused_since_us = Some(now_us);
        }
        admitted
    }

    /// Whether the queues may move this many bytes now, all of which stay in the budget.
    #[inline]
    pub fn has_room(&mut self, bytes: u64, now_us: f64) -> bool {
        self.refill(now_us);
        let most = self.depth();
        self.rate.is_infinite() || self.rate > 0.0 && self.balance >= crate::mchannel::exact(bytes).min(most)
    }

    /// Takes so many bytes, whether they are there or not: what something else has let move. What is missing is paid back.
    #[inline]
    pub fn take(&mut self, bytes: u64, now_us: f64) {
        if self.rate.is_finite() {
            self.refill(now_us);
            self.balance -= crate::mchannel::exact(bytes);
        }
        self.open(now_us);
    }

    /// After what time, in µs from `now_us`, so many bytes can be admitted; infinite at a rate of 0.
    pub fn wait_us(&self, bytes: u64, now_us: f64) -> f64 {
        if self.rate.is_infinite() {
            return 0.0;
        }
        if self.rate <= 0.0 {
            return f64::INFINITY;
        }
        let passed_us = (now_us - self.at_us).max(0.0);
        let missing = crate::mchannel::exact(bytes).min(self.depth()) - self.balance;
        if missing <= 0.0 { 0.0 } else { (missing / self.rate * 1e6 - passed_us).max(0.0) }
    }

    /// How much of the time since the last call the queues were not held back, in µs, of `elapsed_us`: for
    /// [`Measured::queue_open_us`](crate::Measured::queue_open_us).
    pub fn take_open_us(&mut self, elapsed_us: f64, now_us: f64) -> f64 {
        if let Some(since_us) = self.refused_since_us.as_mut() {
            self.held_us += (now_us - *since_us).max(0.0);
            *since_us = now_us;
        }
        (elapsed_us - std::mem::take(&mut self.held_us)).clamp(0.0, elapsed_us.max(0.0))
    }

    fn depth(&self) -> f64 {
        self.rate * self.t_w_us / 1e6
    }

    fn open(&mut self, now_us: f64) {
        if let Some(since_us) = self.refused_since_us.take() {
            self.held_us += (now_us - since_us).max(0.0);
        }
    }

    fn refill(&mut self, now_us: f64) {
        if now_us > self.at_us {
            if self.rate.is_finite() {
                let saved = self.balance + self.rate * (now_us - self.at_us) / 1e6;
                self.balance = saved.min(self.depth());
            }
            self.at_us = now_us;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 µs at 1 GB/s: 100 kB.
    fn budget() -> ByteBudget {
        let mut budget = ByteBudget::new(100.0, 0.0);
        budget.set_rate(1e9, 0.0);
        budget
    }

    #[test]
    fn at_most_one_window_is_saved_up() {
        let mut budget = budget();
        assert!(budget.admit(100_000, 1e6));
        assert!(!budget.admit(1000, 1e6));
        assert!((budget.wait_us(1000, 1e6) - 1.0).abs() < 1e-6);
        assert!(budget.admit(1000, 1e6 + 1.001));
    }

    #[test]
    fn a_message_larger_than_a_window_passes_and_is_paid_back() {
        let mut budget = budget();
        assert!(budget.admit(150_000, 0.0));
        assert!(!budget.admit(1, 50.0));
        assert!(budget.admit(1, 51.0));
    }

    #[test]
    fn what_is_taken_without_asking_is_paid_back() {
        let mut budget = budget();
        budget.take(250_000, 0.0);
        assert!((budget.wait_us(0, 0.0) - 150.0).abs() < 1e-6);
        assert!(!budget.admit(1, 150.0) && budget.admit(1, 150.002));
        budget.set_rate(f64::INFINITY, 200.0);
        budget.take(u64::MAX, 200.0);
        assert!(budget.admit(1, 200.0));
    }

    #[test]
    fn a_changed_rate_keeps_debts_but_no_savings() {
        let mut budget = budget();
        budget.set_rate(1e6, 1000.0);
        assert!(budget.admit(100, 1000.0) && !budget.admit(1, 1000.0));
        let mut budget = self::budget();
        budget.admit(150_000, 0.0);
        budget.set_rate(1e8, 0.0);
        assert!((budget.wait_us(0, 0.0) - 500.0).abs() < 1e-6);
    }

    #[test]
    fn what_passed_before_a_rate_changed_counts_at_the_rate_of_before() {
        let mut budget = budget();
        // 50 kB are owed, and paid back by the time the rate falls.
        assert!(budget.admit(150_000, 0.0));
        budget.set_rate(1e8, 50.0);
        assert!(budget.wait_us(0, 50.0) < 1e-6, "{}", budget.wait_us(0, 50.0));
        assert!((budget.wait_us(1000, 50.0) - 10.0).abs() < 1e-6);
        assert!((budget.wait_us(1000, 56.0) - 4.0).abs() < 1e-6, "some of the time has passed");
    }

    #[test]
    fn time_that_goes_back_stands_still() {
        let mut budget = budget();
        assert!(budget.admit(10_000, 1000.0));
        assert!(budget.admit(90_000, 0.0), "nothing is taken back");
        assert!(!budget.admit(1000, 1000.0), "and no time counts twice");
        assert!(budget.admit(1000, 1001.001));
    }

    #[test]
    fn no_limit_and_no_rate() {
        let mut budget = ByteBudget::new(100.0, 0.0);
        assert!(budget.admit(u64::MAX, 0.0));
        budget.set_rate(f64::NAN, 1.0);
        assert!(!budget.admit(0, 1e9) && budget.wait_us(1, 2.0).is_infinite());
    }

    #[test]
    fn time_held_back_is_told_once() {
        let mut budget = budget();
        budget.admit(100_000, 30.0);
        assert!(!budget.admit(40_000, 60.0));
        assert!((budget.take_open_us(100.0, 100.0) - 60.0).abs() < 1e-6);
        assert!(budget.admit(40_000, 110.0));
        assert!((budget.take_open_us(100.0, 200.0) - 90.0).abs() < 1e-6);
        assert!((budget.take_open_us(100.0, 300.0) - 100.0).abs() < 1e-6);
        // Of a window that was told shorter than it was, none is left.
        assert!(!budget.admit(200_000, 300.0) || !budget.admit(200_000, 300.0));
        assert!(budget.take_open_us(10.0, 400.0).abs() < 1e-6);
        // Who has no limit is not held back.
        budget.set_rate(f64::INFINITY, 400.0);
        assert!(budget.admit(200_000, 400.0));
        assert!((budget.take_open_us(100.0, 500.0) - 100.0).abs() < 1e-6);
    }
}
