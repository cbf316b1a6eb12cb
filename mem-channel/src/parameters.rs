//! The transport's constants.

use crate::MemChannelError;
use crate::error::check;

/// Constants of the transport, the same on every host of a pod.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// T_W, the scheduling window, in µs. The paper runs 100 µs, for 1.7 % of overhead (§4.3, §5.6).
    pub t_w_us: f64,
    /// K, the sampling window after which shares are computed anew, in µs; at least T_W.
    pub k_us: f64,
    /// A run time below this is saved up for a later window instead, in µs: waking up for less is waste.
    pub t_r_min_us: f64,
    /// g of Eq. 6: how much of the newest load signal the load factor takes up; above 0, at most 1.
    pub g: f64,
    /// δ: the load factor above which an element is congested; between 0 and 1.
    pub delta: f64,
    /// λ, for each second, in parts of the element's highest capacity: how fast capacity grows back.
    pub lambda_per_s: f64,
    /// Below this part of an element's highest capacity its estimate never falls: α, F and C of zero are traps.
    pub least_capacity: f64,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            t_w_us: 100.0,
            k_us: 1000.0,
            t_r_min_us: 1.0,
            g: 0.5,
            delta: 0.1,
            lambda_per_s: 100.0,
            least_capacity: 0.5,
        }
    }
}

impl Parameters {
    /// Checks every range.
    pub fn validate(&self) -> Result<(), MemChannelError> {
        let positive = |value: f64| value.is_finite() && value > 0.0;
        check("T_W", self.t_w_us, "a positive number of µs", positive(self.t_w_us))?;
        check("K", self.k_us, "at least T_W", self.k_us.is_finite() && self.k_us >= self.t_w_us)?;
        check(
            "the least T_R",
            self.t_r_min_us,
            "between 0 and T_W",
            (0.0..=self.t_w_us).contains(&self.t_r_min_us),
        )?;
        check("g", self.g, "above 0 and at most 1", self.g > 0.0 && self.g <= 1.0)?;
        check("δ", self.delta, "between 0 and 1", self.delta > 0.0 && self.delta < 1.0)?;
        check("λ", self.lambda_per_s, "a positive number", positive(self.lambda_per_s))?;
        check(
            "the least capacity",
            self.least_capacity,
            "above 0 and at most 1",
            self.least_capacity > 0.0 && self.least_capacity <= 1.0,
        )
    }
}
