//! For how long vCPUs could run: T_R, which makes of what they moved what they want to move (MemChannel, Eq. 3).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::VcpuUse;
use super::schedstat::{self, Times};

/// What vCPUs did in an interval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ran {
    /// How long it was.
    pub elapsed: Duration,
    /// How much of it they ran, or could have run.
    pub run: Duration,
    /// For how long they were put to sleep, summed over them.
    pub slept: Duration,
}

/// Looks at vCPU threads now and then.
#[derive(Debug)]
pub struct RunTimes {
    at: Instant,
    before: BTreeMap<u32, (Times, VcpuUse)>,
}

/// What one thread did, in parts of the time.
#[derive(Debug, Clone, Copy)]
struct Part {
    ran: f64,
    slept: f64,
    waited: f64,
}

impl Part {
    /// How much of the time it ran or could have run. One that always wants to run did so for `ran`; one that idles could have gone on
    /// whenever it was not kept from it. What a group's quota keeps a thread waiting the kernel counts as waiting, too: hence the greater.
    fn could_run(&self) -> f64 {
        self.ran.max(1.0 - self.slept - self.waited).clamp(0.0, 1.0)
    }
}

/// T_R/T_W of all together: of what they ran, each would have run so much more had it not been held. A vCPU that idles counts for as
/// little as it runs.
fn could_run(parts: &[Part]) -> f64 {
    let ran: f64 = parts.iter().map(|it| it.ran).sum();
    let wanted: f64 = parts.iter().filter(|it| it.ran > 0.0).map(|it| it.ran / it.could_run()).sum();
    if wanted > 0.0 { (ran / wanted).clamp(0.0, 1.0) } else { 1.0 }
}

impl RunTimes {
    /// Begins now.
    pub fn begin(threads: &[u32], usage: &[VcpuUse]) -> Self {
        let mut times = Self { at: Instant::now(), before: BTreeMap::new() };
        times.take(threads, usage, false);
        times
    }

    /// What the threads did since the last time. `usage` is what their actuator says, and `held` whether it held them all that time.
    pub fn take(&mut self, threads: &[u32], usage: &[VcpuUse], held: bool) -> Ran {
        let elapsed = std::mem::replace(&mut self.at, Instant::now());
        let elapsed = self.at.saturating_duration_since(elapsed);
        let (mut parts, mut slept) = (Vec::new(), Duration::ZERO);
        let mut now = BTreeMap::new();
        for thread in threads {
            let Some(times) = schedstat::times(*thread) else {
                // It was unplugged.
                continue;
            };
            let used = usage.iter().find(|it| it.thread == *thread).copied().unwrap_or_default();
            now.insert(*thread, (times, used));
            if let Some((times_before, used_before)) = self.before.get(thread) {
                let used = used.since(used_before);
                slept += used.slept;
                let ran = times.ran.saturating_sub(times_before.ran);
                let waited = times.waited.saturating_sub(times_before.waited);
                parts.push(part(elapsed, ran, waited, &used, held));
            }
        }
        self.before = now;
        Ran { elapsed, run: elapsed.mul_f64(could_run(&parts)), slept }
    }
}

/// What a thread did, by what the kernel and its actuator say. While it is held all the time, the actuator knows better than the clock
/// about which time it speaks: a sleep that has not ended yet is in none of its numbers.
fn part(elapsed: Duration, ran: Duration, waited: Duration, used: &VcpuUse, held: bool) -> Part {
    let of = |time: Duration, whole: Duration| {
        if whole.is_zero() { 0.0 } else { (time.as_secs_f64() / whole.as_secs_f64()).min(1.0) }
    };
    let waited = of(waited, elapsed);
    if held && !used.elapsed.is_zero() {
        Part { ran: of(used.ran, used.elapsed), slept: of(used.slept, used.elapsed), waited }
    } else {
        Part { ran: of(ran, elapsed), slept: of(used.slept, elapsed), waited }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
    }

    #[test]
    fn one_that_is_held_could_run_for_as_long_as_it_ran() {
        let held = Part { ran: 0.25, slept: 0.75, waited: 0.0 };
        near(could_run(&[held]), 0.25);
        // The kernel's quota: what it holds back it counts as waiting, too.
        near(could_run(&[Part { waited: 0.75, ..held }]), 0.25);
        // A host that does much else.
        near(could_run(&[Part { ran: 0.25, slept: 0.5, waited: 0.25 }]), 0.25);
    }

    #[test]
    fn one_that_idles_could_run_all_the_time() {
        let idle = Part { ran: 0.0, slept: 0.0, waited: 0.0 };
        near(could_run(&[idle]), 1.0);
        near(could_run(&[]), 1.0);
        near(could_run(&[Part { ran: 0.1, ..idle }]), 1.0);
        near(could_run(&[Part { ran: 0.1, slept: 0.2, waited: 0.1 }]), 0.7);
        // Beside one that is held it says nothing of what both want.
        near(could_run(&[Part { ran: 0.25, slept: 0.75, waited: 0.0 }, idle]), 0.25);
    }

    #[test]
    fn a_sleep_that_has_not_ended_is_in_no_number() {
        let ms = Duration::from_millis;
        let used = VcpuUse { elapsed: ms(80), ran: ms(20), slept: ms(60), ..VcpuUse::default() };
        let held = part(ms(100), ms(20), ms(0), &used, true);
        near(could_run(&[held]), 0.25);
        // It was held for a part of the time.
        let part = part(ms(100), ms(40), ms(0), &used, false);
        near(could_run(&[part]), 0.4);
    }

    #[test]
    fn own_thread_can_be_looked_at() {
        let own = std::process::id();
        let mut times = RunTimes::begin(&[own, u32::MAX], &[]);
        let ran = times.take(&[own], &[], false);
        assert!(ran.run <= ran.elapsed && ran.slept.is_zero());
    }
}
