//! The bytes that all devices of a VM at a frontend may move together.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{as_f64, whole};

/// Times are kept in sixteenths of a nanosecond: a short message takes less than one at the rates of a fabric, and so 36 years fit.
const TICKS_PER_US: f64 = 16_000.0;

/// A byte budget that several workers take from without waiting for each other. It has the rules of a [`ByteBudget`](mem_channel::ByteBudget), but is kept as the time at which it
/// will be full (a generic cell rate algorithm), which is one word.
///
/// Each device has a budget of its own as well, for about the whole share of its VM while it is the only one that moves anything. Of
/// several that are quiet and burst together each would have a share; together they have one.
#[derive(Debug)]
pub(super) struct VmBudget {
    /// In bytes/s, as an IEEE 754 number; infinite: no limit.
    rate: AtomicU64,
    /// When a whole T_W is saved up.
    full_at: AtomicU64,
    /// In bytes: what moved unasked and has yet to be paid for.
    unasked: AtomicU64,
}

impl Default for VmBudget {
    /// No limit yet.
    fn default() -> Self {
        let rate = AtomicU64::new(f64::INFINITY.to_bits());
        Self { rate, full_at: AtomicU64::new(0), unasked: AtomicU64::new(0) }
    }
}

impl VmBudget {
    /// Begins anew with this rate, and a whole T_W saved up.
    pub(super) fn begin(&self, rate: f64) {
        self.rate.store(rate.to_bits(), Ordering::Relaxed);
        self.full_at.store(0, Ordering::Relaxed);
        self.unasked.store(0, Ordering::Relaxed);
    }

    /// Changes the rate, in bytes/s; infinite for no limit. What is missing stays as many bytes.
    pub(super) fn limit(&self, rate: f64, now_us: f64) {
        let before = f64::from_bits(self.rate.swap(rate.to_bits(), Ordering::Relaxed));
        let now = ticks(now_us);
        let scale = before / rate;
        if scale.is_finite() && scale > 0.0 && (scale - 1.0).abs() > f64::EPSILON {
            let scaled = |full_at: u64| {
                let missing = full_at.checked_sub(now)?;
                Some(now.saturating_add(whole(as_f64(missing) * scale)))
            };
            // One that is full stays so.
            let _ = self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, scaled);
        }
    }

    /// Whether nothing is limited.
    #[inline]
    pub(super) fn is_free(&self) -> bool {
        self.rate().is_infinite()
    }

    /// Takes so many bytes, if they are there.
    pub(super) fn admit(&self, bytes: u64, window_us: f64, now_us: f64) -> bool {
        self.take(bytes, window_us, now_us, true)
    }

    /// Takes so many bytes, whether they are there or not.
    pub(super) fn force(&self, bytes: u64, window_us: f64, now_us: f64) {
        self.take(bytes, window_us, now_us, false);
    }

    /// Takes note of bytes that nobody asked for. They are paid for with what is taken later.
    pub(super) fn charge(&self, bytes: u64, window_us: f64, now_us: f64) {
        let (rate, now) = (self.rate(), ticks(now_us));
        if rate.is_infinite() {
            return;
        }
        // Until now what could not be saved up paid for earlier ones, and for these it does not.
        let before = self.full_at.fetch_max(now, Ordering::Relaxed);
        let spare = whole(rate * us(now.saturating_sub(before)) / 1e6);
        let most = whole(rate * window_us / 1e6);
        let owed = |unasked: u64| Some(unasked.saturating_sub(spare).saturating_add(bytes).min(most));
        let _ = self.unasked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, owed);
    }

    /// After what time, in µs, so many bytes are there; infinite at a rate of 0.
    pub(super) fn wait_us(&self, bytes: u64, window_us: f64, now_us: f64) -> f64 {
        let rate = self.rate();
        if rate.is_infinite() {
            return 0.0;
        }
        let needed = cost(bytes, rate).min(ticks(window_us));
        let there = self.full_at.load(Ordering::Relaxed).saturating_add(needed);
        if rate > 0.0 { us(there.saturating_sub(ticks(now_us) + ticks(window_us))) } else { f64::INFINITY }
    }

    /// In bytes/s; infinite if nothing is limited.
    pub(super) fn rate(&self) -> f64 {
        f64::from_bits(self.rate.load(Ordering::Relaxed))
    }

    fn take(&self, bytes: u64, window_us: f64, now_us: f64, asks: bool) -> bool {
        let rate = self.rate();
        if rate.is_infinite() || rate <= 0.0 {
            return rate > 0.0;
        }
        let (now, window, cost) = (ticks(now_us), ticks(window_us), self::cost(bytes, rate));
        let owed = self.unasked.load(Ordering::Relaxed);
        // What is paid of it by time in which nothing could be saved up, and by this message.
        let paid = |full_at: u64| {
            let spare = if owed == 0 { 0 } else { whole(rate * us(now.saturating_sub(full_at)) / 1e6) };
            (spare, owed.saturating_sub(spare).min(bytes))
        };
        let taken = self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full_at| {
            let from = full_at.max(now);
            if asks && from - now + cost.min(window) > window {
                return None;
            }
            let full = from.saturating_add(cost);
            let (_, unasked) = paid(full_at);
            if unasked == 0 {
                return Some(full);
            }
            // What others sent is no reason to be in debt by more than a T_W.
            Some(full.saturating_add(self::cost(unasked, rate)).min(full.max(now + 2 * window)))
        });
        if let Ok(full_at) = taken
            && owed > 0
        {
            let (spare, unasked) = paid(full_at);
            let left = |owed: u64| Some(owed.saturating_sub(spare.saturating_add(unasked)));
            let _ = self.unasked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left);
        }
        taken.is_ok()
    }
}

/// How long it takes to save up so many bytes.
fn cost(bytes: u64, rate: f64) -> u64 {
    whole((as_f64(bytes) / rate * 1e6 * TICKS_PER_US).ceil())
}

fn ticks(us: f64) -> u64 {
    whole(us * TICKS_PER_US)
}

fn us(ticks: u64) -> f64 {
    as_f64(ticks) / TICKS_PER_US
}

#[cfg(test)]
mod tests {
    use mem_channel::ByteBudget;
    use proptest::prelude::*;

    use super::*;

    const T_W_US: f64 = 100.0;

    /// 100 kB.
    fn budget() -> VmBudget {
        let budget = VmBudget::default();
        budget.limit(1e9, 0.0);
        budget
    }

    #[test]
    fn at_most_one_window_is_saved_up_and_what_is_too_large_is_paid_back() {
        let budget = budget();
        assert!(budget.admit(100_000, T_W_US, 1e6) && !budget.admit(1000, T_W_US, 1e6));
        assert!((budget.wait_us(1000, T_W_US, 1e6) - 1.0).abs() < 1e-3);
        assert!(budget.admit(1000, T_W_US, 1e6 + 1.001));
        assert!(budget.admit(150_000, T_W_US, 2e6), "a whole T_W was saved up");
        assert!(!budget.admit(1, T_W_US, 2e6 + 50.0) && budget.admit(1, T_W_US, 2e6 + 51.0));
    }

    #[test]
    fn what_is_forced_is_paid_back_as_well() {
        let budget = budget();
        for _ in 0..3 {
            budget.force(100_000, T_W_US, 0.0);
        }
        assert!((budget.wait_us(0, T_W_US, 0.0) - 200.0).abs() < 1e-3);
        // At a tenth of the rate the same bytes take ten times as long.
        budget.limit(1e8, 0.0);
        assert!((budget.wait_us(0, T_W_US, 0.0) - 2900.0).abs() < 1e-3);
        budget.limit(f64::INFINITY, 0.0);
        assert!(budget.is_free() && budget.admit(u64::MAX, T_W_US, 0.0));
        budget.limit(0.0, 0.0);
        assert!(!budget.admit(0, T_W_US, 1e9) && budget.wait_us(1, T_W_US, 1e9).is_infinite());
    }

    #[test]
    fn a_steady_stream_of_what_came_unasked_leaves_half_of_the_rate() {
        let (budget, mut admitted) = (budget(), 0);
        for round in 0..1000 {
            let now_us = f64::from(round) * 10.0;
            budget.charge(20_000, T_W_US, now_us);
            if budget.admit(10_000, T_W_US, now_us) {
                admitted += 10_000;
            }
        }
        assert!((4_000_000..6_000_000).contains(&admitted), "{admitted}");
    }

    proptest! {
        /// It admits what a budget of one device does, but for what is lost where times are rounded.
        #[test]
        fn it_keeps_the_rules_of_a_budget_of_one_device(
            asked in prop::collection::vec((0_u32..200, 1_u64..200_000, prop::bool::weighted(0.2)), 1..100),
        ) {
            let (vm, mut one) = (budget(), ByteBudget::new(T_W_US, 0.0));
            one.set_rate(1e9, 0.0);
            let (mut now_us, mut came) = (0.0, false);
            for (pause_us, bytes, is_unasked) in asked {
                now_us += f64::from(pause_us);
                came |= is_unasked;
                if is_unasked {
                    vm.charge(bytes, T_W_US, now_us);
                    one.charge(bytes, now_us);
                    continue;
                }
                let (theirs, ours) = (one.wait_us(bytes, now_us), vm.wait_us(bytes, T_W_US, now_us));
                // What came unasked is not a debt of more than one T_W.
                prop_assert!(ours <= theirs + 0.2 && (came || ours >= theirs - 0.2), "{ours} us, not {theirs}");
                if one.admit(bytes, now_us) {
                    vm.force(bytes, T_W_US, now_us);
                }
            }
        }
    }
}
