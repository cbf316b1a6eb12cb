//! The third choice: vCPUs are not touched. What they load and store is counted, and the frontends let the machine's queues move what that leaves
//! of its share (I/O pacing, `vhost-frontend/src/pacing`).

use std::time::{Duration, Instant};

use super::{Actuator, Duty, VcpuUse, schedstat};
use crate::VmmError;

/// Looks at vCPU threads, and does nothing to them.
#[derive(Debug)]
pub struct PacingActuator {
    threads: Vec<Seen>,
}

/// A thread when it was seen first.
#[derive(Debug)]
struct Seen {
    thread: u32,
    at: Instant,
    ran: Duration,
}

impl Seen {
    fn begin(thread: u32) -> Self {
        Self { thread, at: Instant::now(), ran: schedstat::times(thread).unwrap_or_default().ran }
    }
}

impl PacingActuator {
    /// For these threads.
    pub fn new(threads: &[u32]) -> Self {
        Self { threads: threads.iter().copied().map(Seen::begin).collect() }
    }
}

impl Actuator for PacingActuator {
    fn name(&self) -> &'static str {
        "pacing"
    }

    fn holds(&self) -> bool {
        false
    }

    fn set(&mut self, duty: Duty) -> Result<Duration, VmmError> {
        Ok(Duration::from_nanos(duty.window_ns))
    }

    fn exact_over(&self) -> Duration {
        Duration::ZERO
    }

    fn follow(&mut self, threads: &[u32]) -> Result<(), VmmError> {
        self.threads.retain(|seen| threads.contains(&seen.thread));
        let known: Vec<u32> = self.threads.iter().map(|seen| seen.thread).collect();
        self.threads.extend(threads.iter().filter(|it| !known.contains(it)).copied().map(Seen::begin));
        Ok(())
    }

    fn usage(&self) -> Result<Vec<VcpuUse>, VmmError> {
        let used = |seen: &Seen| {
            let ran = schedstat::times(seen.thread)?.ran.saturating_sub(seen.ran);
            Some(VcpuUse { thread: seen.thread, elapsed: seen.at.elapsed(), ran, ..VcpuUse::default() })
        };
        Ok(self.threads.iter().filter_map(used).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_looked_at_and_left_alone() {
        let own = std::process::id();
        let mut pacing = PacingActuator::new(&[own, u32::MAX]);
        assert!(!pacing.holds());
        pacing.set(super::super::duty(0.01, Duration::from_millis(10))).unwrap();
        let [used] = pacing.usage().unwrap()[..] else { panic!("the other one has ended") };
        assert_eq!((used.thread, used.slept, used.sleeps), (own, Duration::ZERO, 0));
        pacing.follow(&[u32::MAX]).unwrap();
        assert_eq!(pacing.usage().unwrap(), []);
    }
}
