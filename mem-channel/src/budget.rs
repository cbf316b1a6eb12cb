//! The bytes that a VM's queues may move.
//!
//! A sleeping vCPU does not stop requests that are already queued, so these bytes are limited where they are admitted: at the
//! frontends.

/// A byte budget: rate w·α, at most one T_W of it saved up.
///
/// Whatever the VM does, and as long as the rate stays: in any interval K it admits at most w·α·K·(1 + 2·T_W/K) bytes, the
/// bound of §4.5, if no message is larger than 2·w·α·T_W. (Of messages that are at most w·α·T_W it admits no more than
/// w·α·(K + T_W).) A larger message is admitted when a whole T_W is saved up; what it is too large by is paid back before
/// anything else is admitted.
///
/// What moves without being asked for is paid for as well, as far as that leaves the VM half of its rate: with each message that is
/// admitted at most as many such bytes are paid for as it has itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ByteBudget {
    /// In bytes/s; infinite: no limit.
    rate: f64,
    t_w_us: f64,
    /// In bytes; below 0 what was admitted ahead.
    balance: f64,
    /// In bytes, at most one T_W of them: what moved unasked and has yet to be paid for.
    unasked: f64,
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
            unasked: 0.0,
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
        self.unasked = self.unasked.min(self.depth());
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
            let bytes = crate::mchannel::exact(bytes);
            let paid = self.unasked.min(bytes);
            self.unasked -= paid;
            self.balance -= bytes + paid;
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

    /// Takes note of bytes that moved without being asked for, such as received packets. They are paid for with what is admitted
    /// later: others decide how many there are, and must not be able to silence the queues with them. Of those that nothing was admitted
    /// for at most one T_W is carried.
    pub fn charge(&mut self, bytes: u64, now_us: f64) {
        if self.rate.is_finite() {
            self.refill(now_us);
            self.unasked = (self.unasked + crate::mchannel::exact(bytes)).min(self.depth());
        }
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
                // What cannot be saved up pays as well.
                self.unasked = (self.unasked - (saved - self.balance)).max(0.0);
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
    fn what_came_unasked_is_paid_for_with_what_is_admitted() {
        let mut budget = budget();
        budget.charge(30_000, 0.0);
        assert!(budget.wait_us(100_000, 0.0).abs() < 1e-6, "it keeps nothing from being admitted");
        assert!(budget.admit(20_000, 0.0), "20 kB are paid with it, ");
        assert!(budget.admit(50_000, 0.0), "10 kB with this, ");
        assert!(!budget.admit(1, 0.0) && budget.admit(40_000, 40.0), "and nothing with the next");
        assert!(!budget.admit(1, 40.0));
    }

    #[test]
    fn of_what_came_unasked_a_window_at_most_is_carried() {
        let mut budget = budget();
        budget.charge(10_000_000, 0.0);
        assert!(budget.admit(100_000, 0.0));
        assert!((budget.wait_us(0, 0.0) - 100.0).abs() < 1e-6);
        assert!(budget.admit(50_000, 151.0));
        // Time in which nothing can be saved up pays for it.
        budget.charge(50_000, 1000.0);
        assert!(budget.admit(100_000, 1050.001) && budget.wait_us(0, 1050.001) < 1e-6);
    }

    #[test]
    fn a_steady_stream_of_what_came_unasked_leaves_half_of_the_rate() {
        // 64 kB do not fit a window of the second one.
        for (rate, came, bytes) in [(1e9, 20_000, 10_000_u32), (1e8, 2000, 65_536)] {
            let mut budget = ByteBudget::new(100.0, 0.0);
            budget.set_rate(rate, 0.0);
            let mut admitted = 0.0;
            for round in 0..1000 {
                let now_us = f64::from(round) * 10.0;
                budget.charge(came, now_us);
                if budget.admit(bytes.into(), now_us) {
                    admitted += f64::from(bytes);
                }
            }
            assert!(admitted >= 0.4 * rate * 0.01, "{admitted} at {rate}");
        }
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
