//! From a share to the time that a VM's vCPUs run (Eqs. 5 and 7).

use crate::Parameters;

/// T_R / T_W = min(w_c·α_c, D_c) / D_c (Eq. 7; Eq. 5 with a weight of 1), from 0 to 1. Who wants nothing runs all the time.
pub fn run_part(share: f64, demand: f64) -> f64 {
    if demand <= share || demand <= 0.0 { 1.0 } else { (share / demand).max(0.0) }
}

/// Turns parts of windows into run times, and carries what a window ran too long or too short into the next ones, so that the
/// long-run share is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunTime {
    part: f64,
    carry_us: f64,
}

impl RunTime {
    /// Run freely, until told otherwise.
    pub fn new() -> Self {
        Self { part: 1.0, carry_us: 0.0 }
    }

    /// What is owed to the mchannel (or by it, below 0) from earlier windows, in µs; at most T_W.
    pub fn carry_us(&self) -> f64 {
        self.carry_us
    }

    /// A window of `elapsed_us` is over, of which it ran `run_us`; `part` is for the next one. Returns its T_R in µs.
    pub fn next(&mut self, part: f64, elapsed_us: f64, run_us: f64, parameters: &Parameters) -> f64 {
        let &Parameters { t_w_us, t_r_min_us, .. } = parameters;
        if self.part >= 1.0 || part >= 1.0 {
            // Who was not, or is no longer held back neither owes nor is owed.
            self.carry_us = 0.0;
        } else {
            let owed = self.part * elapsed_us - run_us;
            self.carry_us = (self.carry_us + owed).clamp(-t_w_us, t_w_us);
        }
        self.part = part.clamp(0.0, 1.0);
        let t_r_us = (self.part * t_w_us + self.carry_us).clamp(0.0, t_w_us);
        if t_r_us < t_r_min_us { 0.0 } else { t_r_us }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_parts() {
        assert!((run_part(2.0, 8.0) - 0.25).abs() < 1e-12);
        assert!((run_part(8.0, 2.0) - 1.0).abs() < 1e-12);
        assert!((run_part(0.0, 0.0) - 1.0).abs() < 1e-12, "no demand is no reason to sleep");
        assert!((run_part(f64::INFINITY, 5.0) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_long_run_share_is_exact_although_windows_run_late() {
        let parameters = Parameters::default();
        let (mut run_time, mut ran, mut total) = (RunTime::new(), 0.0, 0.0);
        let mut t_r = run_time.next(0.3, 100.0, 100.0, &parameters);
        for window in 0..1000 {
            // The thread stops up to 7 µs late, and windows are up to 3 µs too long.
            let (late, long) = (f64::from(window % 8), f64::from(window % 4));
            let run = if t_r > 0.0 { t_r + late } else { 0.0 };
            (ran, total) = (ran + run, total + 100.0 + long);
            t_r = run_time.next(0.3, 100.0 + long, run, &parameters);
            assert!(run_time.carry_us().abs() <= parameters.t_w_us);
        }
        assert!((ran / total - 0.3).abs() < 0.001, "{}", ran / total);
    }

    #[test]
    fn at_most_one_window_is_carried_and_nothing_from_before_it_was_held() {
        let parameters = Parameters::default();
        let mut run_time = RunTime::new();
        run_time.next(0.3, 100.0, 100.0, &parameters);
        // It could not be stopped for ten windows.
        for _ in 0..10 {
            assert!(run_time.next(0.3, 100.0, 100.0, &parameters) <= 0.0);
        }
        assert!((run_time.carry_us() + 100.0).abs() < 1e-9, "{}", run_time.carry_us());
        // Nor did it want to run for as many.
        for _ in 0..10 {
            run_time.next(0.3, 100.0, 0.0, &parameters);
        }
        assert!((run_time.carry_us() - 100.0).abs() < 1e-9, "{}", run_time.carry_us());
        run_time.next(1.0, 100.0, 100.0, &parameters);
        let t_r = run_time.next(0.3, 100.0, 100.0, &parameters);
        assert!((t_r - 30.0).abs() < 1e-9, "who was free neither owes nor is owed: {t_r}");
    }

    #[test]
    fn too_little_to_wake_up_for_is_saved_up() {
        let parameters = Parameters::default();
        let mut run_time = RunTime::new();
        let (mut t_r, mut ran, mut slept) = (0.0, 0.0, 0);
        run_time.next(0.002, 100.0, 100.0, &parameters);
        for _ in 0..1000 {
            ran += t_r;
            slept += u32::from(t_r <= 0.0);
            t_r = run_time.next(0.002, 100.0, t_r, &parameters);
            assert!(t_r <= 0.0 || t_r >= parameters.t_r_min_us, "{t_r}");
        }
        assert!((ran - 200.0).abs() < 2.0, "ran {ran} µs of 100 ms");
        assert!(slept > 700, "in {slept} windows it never woke up");
    }
}
