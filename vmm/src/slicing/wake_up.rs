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

    /// The smallest window that costs no more than slicing may, or the longest there is.
    pub fn window(self) -> Duration {
        let fits = |window: &Duration| self.overhead(*window) <= OVERHEAD_MAX;
        WINDOWS.into_iter().find(fits).unwrap_or(WINDOWS[WINDOWS.len() - 1])
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
    fn it_can_be_measured() {
        assert!(WakeUp::measure().cost < Duration::from_secs(1));
    }
}
