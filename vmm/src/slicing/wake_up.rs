//! How much a wake-up costs on this host, and which windows are worth it.

use std::thread;
use std::time::{Duration, Instant};

/// The windows that are chosen from.
pub const WINDOWS: [Duration; 7] = [
    Duration::from_micros(100),
    Duration::from_micros(200),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_millis(2),
    Duration::from_millis(5),
    Duration::from_millis(10),
];
/// The part of the time that slicing may cost (MemChannel §5.6).
const OVERHEAD_MAX: f64 = 0.017;
const ROUNDS: usize = 101;

/// What a wake-up costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WakeUp {
    /// By how much a sleep is longer than it was to be; the median.
    pub cost: Duration,
}

impl WakeUp {
    /// Measures it, on the calling thread, in some 10 ms.
    pub fn measure() -> Self {
        // The kernel may be 50 µs late, to wake up several at once, unless it is told not to be.
        let before = rustix::thread::current_timer_slack().ok();
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let wanted = Duration::from_micros(50);
        let mut late: Vec<Duration> = (0..ROUNDS)
            .map(|_| {
                let began = Instant::now();
                thread::sleep(wanted);
                began.elapsed().saturating_sub(wanted)
            })
            .collect();
        if let Some(before) = before {
            let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(before));
        }
        late.sort_unstable();
        Self { cost: late[ROUNDS / 2] }
    }

    /// Which part of the time windows of this length cost.
    pub fn overhead(self, window: Duration) -> f64 {
        self.cost.as_secs_f64() / window.as_secs_f64()
    }

    /// Whether windows of this length cost no more than slicing may.
    pub fn fits(self, window: Duration) -> bool {
        self.overhead(window) <= OVERHEAD_MAX
    }

    /// The smallest window that costs no more than slicing may, or the longest there is.
    pub fn window(self) -> Duration {
        let fitting = WINDOWS.into_iter().find(|window| self.fits(*window));
        fitting.unwrap_or(WINDOWS[WINDOWS.len() - 1])
    }

    /// For people: what windows of this length cost, with a warning if that is too much.
    pub fn describe(self, window: Duration) -> String {
        let (us, percent) = (window.as_micros(), 100.0 * self.overhead(window));
        let most = 100.0 * OVERHEAD_MAX;
        let warning = if self.fits(window) {
            String::new()
        } else {
            format!(": more than {most:.1} %, what is held runs for less than it should")
        };
        let cost_us = self.cost.as_secs_f64() * 1e6;
        format!(
            "windows of {us} us; a wake-up costs {cost_us:.1} us here, so {percent:.1} % of the time{warning}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_follow_the_cost() {
        let window = |us: u64| WakeUp { cost: Duration::from_micros(us) }.window();
        assert_eq!(window(1), Duration::from_micros(100), "on bare metal");
        assert_eq!(window(25), Duration::from_millis(2), "on a virtual machine");
        assert_eq!((window(33), window(35)), (Duration::from_millis(2), Duration::from_millis(5)), "1.7 %");
        assert_eq!(window(5000), Duration::from_millis(10), "where nothing fits");
    }

    #[test]
    fn windows_that_cost_too_much_are_told_of() {
        let cost = WakeUp { cost: Duration::from_micros(500) };
        let told = |us| cost.describe(Duration::from_micros(us));
        assert_eq!(told(50_000), "windows of 50000 us; a wake-up costs 500.0 us here, so 1.0 % of the time");
        assert!(told(10_000).contains("so 5.0 % of the time: more than 1.7 %"), "{}", told(10_000));
    }

    #[test]
    fn it_can_be_measured() {
        assert!(WakeUp::measure().cost < Duration::from_secs(1));
    }
}
