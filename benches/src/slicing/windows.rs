//! What single windows of a thread's time are like, seen from outside.

use std::hint;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use perf_event::events::Software;
use perf_event::{Builder, Counter};

/// The processor time of a thread of any process, as it is at this moment: what `/proc` says of a thread that runs is as old as the last tick.
struct TaskClock(Counter);

impl TaskClock {
    fn of(thread: u32) -> Result<Self> {
        let mut builder =
            Builder::new().kind(Software::TASK_CLOCK).observe_pid(i32::try_from(thread)?).any_cpu();
        builder.include_kernel();
        let mut counter = builder.build().context(
            "cannot count a thread's processor time (perf_event_open): run as root, or lower kernel.perf_event_paranoid",
        )?;
        counter.enable()?;
        Ok(Self(counter))
    }

    fn read(&mut self) -> Result<Duration> {
        Ok(Duration::from_nanos(self.0.read()?))
    }
}

/// The standard deviation of the share that a thread gets of each `window`, in points, over so long a time. Where windows begin does not
/// matter for what is the same in each. `meanwhile` is called between them.
pub(super) fn spread_points(
    thread: u32,
    window: Duration,
    length: Duration,
    mut meanwhile: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let mut clock = TaskClock::of(thread)?;
    let (start, mut shares) = (Instant::now(), Vec::new());
    while shares.is_empty() || start.elapsed() < length {
        meanwhile()?;
        let (began, before) = (Instant::now(), clock.read()?);
        // Whoever sleeps wakes up late by a good part of a short window.
        while began.elapsed() < window {
            hint::spin_loop();
        }
        let ran = clock.read()?.saturating_sub(before);
        shares.push(ran.as_secs_f64() / began.elapsed().as_secs_f64() * 100.0);
    }
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    let count = shares.len() as f64;
    let mean = shares.iter().sum::<f64>() / count;
    Ok((shares.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / count).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_thread_that_runs_is_that_of_this_moment() {
        let mut clock =
            TaskClock::of(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()).unwrap();
        let before = clock.read().unwrap();
        let own = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let (began, ns) = (own(), |time: rustix::time::Timespec| time.tv_sec * 1_000_000_000 + time.tv_nsec);
        // Less than a tick.
        while ns(own()) - ns(began) < 300_000 {
            hint::spin_loop();
        }
        assert!(clock.read().unwrap().saturating_sub(before) >= Duration::from_micros(300));
    }
}
