//! What an element can carry, from its congestion signals (§4.3, Eq. 6; Algorithm 1, lines 21–26).

use crate::error::check;
use crate::{MemChannelError, Parameters};

/// From this multiple of C on, F makes shares fall fast enough by itself. Just at C it does not: an overloaded element carries
/// what it can, so that F is C and demands look as if they fitted, and only a lower C gets its queues drained.
const FALLING: f64 = 1.05;

/// What an element carried a moment ago it can carry now, or nearly so: C is not cut below this part of it, however often
/// somebody's bursts overload it.
const CARRIES: f64 = 0.85;

/// How much of that is forgotten in each K: the element may have become slower.
const FORGOTTEN: f64 = 0.005;

/// The estimate of an element's transmission capacity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    highest: f64,
    value: f64,
    load: f64,
    /// F, the highest of late.
    carried: f64,
}

impl Capacity {
    /// An element that carries at most this many bytes/s; taken for free until a signal says otherwise.
    pub fn new(highest_bytes_per_s: f64) -> Result<Self, MemChannelError> {
        let good = highest_bytes_per_s.is_finite() && highest_bytes_per_s > 0.0;
        check("an element's capacity", highest_bytes_per_s, "a positive number of bytes/s", good)?;
        Ok(Self { highest: highest_bytes_per_s, value: highest_bytes_per_s, load: 0.0, carried: 0.0 })
    }

    /// C_v in bytes/s.
    pub fn get(&self) -> f64 {
        self.value
    }

    /// The most that it may ever be, in bytes/s.
    pub fn highest(&self) -> f64 {
        self.highest
    }

    /// l, the load factor, from 0 to 1.
    pub fn load(&self) -> f64 {
        self.load
    }

    /// Eq. 6: takes up a signal L, the part of responses with moderate or severe overload, or the part of time with
    /// backpressure at the egress port.
    pub fn observe(&mut self, overloaded_part: f64, parameters: &Parameters) {
        if overloaded_part.is_finite() {
            self.load = (1.0 - parameters.g) * self.load + parameters.g * overloaded_part.clamp(0.0, 1.0);
        }
    }

    /// Lines 21–26: `rate` is F_v in bytes/s, `load` the highest load factor that any host knows.
    ///
    /// Multiplicative decrease while the element is congested although the share does not fall (F < C, or about C); additive increase
    /// else. Line 26 of the listing takes the **greater** of C and the highest capacity, so C could never fall below it nor
    /// be held by it: the smaller is meant.
    pub fn adjust(&mut self, rate: f64, load: f64, parameters: &Parameters) {
        let Parameters { delta, lambda_per_s, k_us, least_capacity, .. } = *parameters;
        if load > delta {
            if rate < self.value * FALLING {
                self.value *= 1.0 - (load.min(1.0) - delta) / (2.0 * (1.0 - delta));
            }
        } else {
            self.value += lambda_per_s * self.highest * (delta - load) * k_us / 1e6;
        }
        // Hosts sum up over a K of their own each. Where one gains what another one loses it can be in F twice, and F above all that
        // the element can carry.
        self.carried = rate.min(self.highest).max(self.carried * (1.0 - FORGOTTEN));
        let least = (self.highest * least_capacity).max(CARRIES * self.carried).min(self.highest);
        self.value = self.value.clamp(least, self.highest);
    }

    /// Moves half way towards what the hosts think on average, in bytes/s: all see the same signals, in the end.
    pub fn agree(&mut self, mean: f64) {
        if mean.is_finite() && mean > 0.0 {
            self.value = f64::midpoint(self.value, mean.min(self.highest));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMETERS: Parameters = Parameters {
        t_w_us: 100.0,
        k_us: 1000.0,
        t_r_min_us: 1.0,
        g: 0.5,
        delta: 0.2,
        lambda_per_s: 50.0,
        least_capacity: 0.1,
    };

    #[test]
    fn the_load_factor_follows_eq_6() {
        let mut capacity = Capacity::new(100.0).unwrap();
        capacity.observe(1.0, &PARAMETERS);
        capacity.observe(0.5, &PARAMETERS);
        assert!((capacity.load() - 0.5).abs() < 1e-12);
        capacity.observe(f64::NAN, &PARAMETERS);
        assert!((capacity.load() - 0.5).abs() < 1e-12);
        capacity.observe(7.0, &PARAMETERS);
        assert!((capacity.load() - 0.75).abs() < 1e-12, "there is no more than all");
    }

    #[test]
    fn capacity_falls_when_congested_and_grows_back_but_never_above_the_highest() {
        let mut capacity = Capacity::new(100.0).unwrap();
        capacity.adjust(50.0, 1.0, &PARAMETERS);
        assert!((capacity.get() - 50.0).abs() < 1e-9, "at a load of 1 it halves");
        capacity.adjust(55.0, 1.0, &PARAMETERS);
        assert!((capacity.get() - 50.0).abs() < 1e-9, "F > C: the share is falling anyway");
        capacity.adjust(40.0, 0.0, &PARAMETERS);
        assert!((capacity.get() - 51.0).abs() < 1e-9, "λ·(δ − l)·K");
        // With line 26 as listed, the decrease above would already be gone, and nothing would stop the growth here.
        for _ in 0..1000 {
            capacity.adjust(40.0, 0.0, &PARAMETERS);
        }
        assert!((capacity.get() - 100.0).abs() < 1e-9);
    }

    /// All that it can carry passes through it, and what waits before it is not in F: a share that follows C/F would stay.
    #[test]
    fn an_overloaded_element_that_carries_c_is_taken_to_carry_less() {
        for rate in [100.0, 104.0] {
            let mut capacity = Capacity::new(100.0).unwrap();
            capacity.adjust(rate, 1.0, &PARAMETERS);
            assert!((capacity.get() - 85.0).abs() < 1e-9, "at {rate}: {}", capacity.get());
        }
    }

    #[test]
    fn what_no_host_can_mean_changes_nothing() {
        let mut capacity = Capacity::new(100.0).unwrap();
        for mean in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            capacity.agree(mean);
        }
        assert!((capacity.get() - 100.0).abs() < 1e-9);
        capacity.agree(60.0);
        assert!((capacity.get() - 80.0).abs() < 1e-9, "half way");
        capacity.adjust(10.0, 3.0, &PARAMETERS);
        assert!((capacity.get() - 40.0).abs() < 1e-9, "a load is 1 at most");
    }

    #[test]
    fn what_was_carried_is_a_floor_that_sinks() {
        let mut capacity = Capacity::new(100.0).unwrap();
        capacity.adjust(80.0, 1.0, &PARAMETERS);
        assert!((capacity.get() - 68.0).abs() < 1e-9);
        for _ in 0..2000 {
            capacity.adjust(10.0, 1.0, &PARAMETERS);
        }
        assert!((capacity.get() - 10.0).abs() < 1e-9, "the element did become slower: {}", capacity.get());
    }

    #[test]
    fn more_than_the_element_can_carry_was_not_carried() {
        // F of two hosts that summed up at different moments. Taken as it is, the estimate could not fall for a hundred K.
        let mut capacity = Capacity::new(100.0).unwrap();
        capacity.adjust(130.0, 1.0, &PARAMETERS);
        for _ in 0..10 {
            capacity.adjust(90.0, 1.0, &PARAMETERS);
        }
        assert!(capacity.get() < 86.0, "{}", capacity.get());
    }

    #[test]
    fn capacity_never_falls_to_nothing() {
        let mut capacity = Capacity::new(100.0).unwrap();
        for _ in 0..1000 {
            capacity.adjust(0.0, 1.0, &PARAMETERS);
        }
        assert!((capacity.get() - 10.0).abs() < 1e-9);
    }

    #[test]
    fn a_capacity_must_be_a_positive_number() {
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Capacity::new(wrong).is_err());
        }
    }
}
