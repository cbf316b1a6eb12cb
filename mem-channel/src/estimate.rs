//! Access rate and demand (§4.3, Eq. 3).

/// r'_c = n·S / T_W: the rate of a window, in bytes/s; nothing for a window without length.
pub fn measured_rate(bytes: f64, t_w_us: f64) -> Option<f64> {
    per_second(bytes, t_w_us)
}

/// D'_c = n·S / T_R: what the mchannel would move if it were never stopped, in bytes/s. Nothing if it did not run: that says
/// nothing about what it wants. (Lines 3–4 of Algorithm 1 divide rate and demand the other way round.)
pub fn measured_demand(bytes: f64, t_r_us: f64) -> Option<f64> {
    per_second(bytes, t_r_us)
}

fn per_second(bytes: f64, us: f64) -> Option<f64> {
    let rate = bytes.max(0.0) / us * 1e6;
    (us > 0.0 && rate.is_finite()).then_some(rate)
}

/// An exponential average over windows of any length (Eq. 3). The first value is taken as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Average {
    value: f64,
    begun: bool,
}

impl Average {
    /// The average; 0 before the first value.
    pub fn get(&self) -> f64 {
        self.value
    }

    /// Eq. 3, where `decay` is e^(−T_W/K): see [`decay`](Self::decay).
    pub fn update(&mut self, measured: f64, decay: f64) {
        self.value = if self.begun { (1.0 - decay) * measured + decay * self.value } else { measured };
        self.begun = true;
    }

    /// e^(−T/K): what is left of an old value after a window of T.
    pub fn decay(t_us: f64, k_us: f64) -> f64 {
        (-t_us.max(0.0) / k_us).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_bytes_per_second() {
        // 1000 lines in a window of 100 µs of which the mchannel ran 25 µs.
        assert_eq!(measured_rate(64_000.0, 100.0), Some(640e6));
        assert_eq!(measured_demand(64_000.0, 25.0), Some(2560e6));
    }

    #[test]
    fn who_did_not_run_shows_no_demand() {
        assert_eq!(measured_demand(0.0, 0.0), None);
        assert_eq!(measured_demand(64.0, -1.0), None);
        assert_eq!(measured_demand(f64::NAN, 1.0), Some(0.0), "what is no number counts as nothing");
    }

    #[test]
    fn an_average_forgets_as_eq_3_says() {
        let mut average = Average::default();
        average.update(100.0, 0.5);
        average.update(0.0, Average::decay(1000.0, 1000.0));
        assert!((average.get() - 100.0 / std::f64::consts::E).abs() < 1e-9);
        // Ten windows of T_W forget as much as one of 10 T_W.
        let mut fine = Average::default();
        fine.update(100.0, 0.5);
        for _ in 0..10 {
            fine.update(0.0, Average::decay(100.0, 1000.0));
        }
        assert!((fine.get() - average.get()).abs() < 1e-9);
    }
}
