//! How loaded a device of the fabric is, as CXL 3 tells of it, and how that follows from what can be measured.

/// The four levels of load that a device tells of in each of its responses (CXL 3, "DevLoad").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DevLoad {
    /// It could do much more.
    #[default]
    Light,
    /// It is well used.
    Optimal,
    /// More is asked of it than it can do; queues grow.
    Moderate,
    /// Much more is.
    Severe,
}

impl DevLoad {
    /// All of them, from the lightest on.
    pub const ALL: [Self; 4] = [Self::Light, Self::Optimal, Self::Moderate, Self::Severe];

    /// From which multiple of the unloaded latency on each level but the first holds.
    ///
    /// Where responses queue before one server with a steady service time, a load takes 1 + s·ρ/(2·(1 − ρ)) times as long at utilisation ρ as on
    /// an idle path, where s is the part of the idle time that is service and not flight. With a third these are 60 %, 86 % and 95 % of what can be
    /// carried: below the first, queues are short; beyond the second each percent more costs more than it carries; at the last, they only grow.
    pub const FROM_RATIO: [f64; 3] = [1.25, 2.0, 4.0];

    /// By how many times longer a load takes than on an idle path.
    pub fn of_ratio(ratio: f64) -> Self {
        Self::above(ratio, Self::FROM_RATIO)
    }

    /// By how much of a device's queue is taken, or of the time it holds back its responses, from 0 to 1. Of a queue the first quarter is light load, and the last one
    /// severe overload.
    pub fn of_part(part: f64) -> Self {
        Self::above(part, [0.25, 0.5, 0.75])
    }

    fn above(value: f64, from: [f64; 3]) -> Self {
        Self::ALL[from.iter().filter(|least| value >= **least).count()]
    }

    /// Whether Eq. 6 counts a response with this level as one of congestion.
    pub const fn is_overload(self) -> bool {
        matches!(self, Self::Moderate | Self::Severe)
    }

    /// Its number in a response, from 0 to 3.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The level of this number; what is beyond the last one is the last one.
    pub fn of_number(number: u8) -> Self {
        Self::ALL[usize::from(number).min(Self::ALL.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_follow_from_latency_and_queues() {
        let levels = [1.0, 1.24, 1.25, 1.99, 2.0, 3.99, 4.0, 1e9, f64::NAN].map(DevLoad::of_ratio);
        assert_eq!(levels.map(DevLoad::number), [0, 0, 1, 1, 2, 2, 3, 3, 0]);
        assert_eq!([0.0, 0.25, 0.5, 0.75, 1.0].map(|part| DevLoad::of_part(part).number()), [0, 1, 2, 3, 3]);
        for level in DevLoad::ALL {
            assert_eq!(DevLoad::of_number(level.number()), level);
        }
        assert_eq!(DevLoad::of_number(9), DevLoad::Severe);
        assert!(DevLoad::ALL.map(DevLoad::is_overload) == [false, false, true, true]);
    }

    #[test]
    fn the_thresholds_are_at_the_utilisation_that_is_said() {
        // 1 + s·ρ/(2·(1 − ρ)) with s a third.
        for (from, utilisation) in DevLoad::FROM_RATIO.into_iter().zip([0.6, 6.0 / 7.0, 18.0 / 19.0]) {
            let ratio = 1.0 + utilisation / (1.0 - utilisation) / 6.0;
            assert!((ratio - from).abs() < 1e-9, "{ratio} at {utilisation}, not {from}");
        }
    }
}
