//! vCPUs that are held to a part of their time, and what must be true of them.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use vmm::slicing::{Actuator as _, Duty, ShimActuator, VcpuUse};

/// How often an order is renewed.
const RENEW_EVERY: Duration = Duration::from_millis(100);

/// Renews an order while `work` goes on.
///
/// # Panics
/// If an order is not taken, and as `work` does.
pub fn hold<T>(shim: &mut ShimActuator, duty: Duty, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let renewing = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                if let Err(error) = shim.set(duty) {
                    panic!("the order is not taken: {error}");
                }
                thread::sleep(RENEW_EVERY);
            }
        });
        let result = catch_unwind(AssertUnwindSafe(work));
        over.store(true, Ordering::Release);
        if let Err(panic) = renewing.join() {
            resume_unwind(panic);
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// No vCPU ran for more than its share, from 0 to 1, what one window may carry, and what was forgiven, however late timers and wake-ups
/// were; and it slept once in a window at most, until the next one. How long that is on a busy host depends on when in its window it got to run.
///
/// # Panics
/// If that is not so.
pub fn assert_no_more_than(share: f64, window: Duration, vcpus: &[VcpuUse]) {
    for vcpu in vcpus {
        let most = vcpu.elapsed.mul_f64(share) + 2 * window + vcpu.forgiven;
        assert!(vcpu.ran <= most, "{vcpu:?}");
        assert!(vcpu.slept <= vcpu.elapsed, "{vcpu:?}");
        // It begins and ends somewhere in a window.
        let windows = u64::try_from(vcpu.elapsed.as_nanos() / window.as_nanos()).unwrap_or(u64::MAX);
        assert!(vcpu.sleeps <= windows.saturating_add(2), "{vcpu:?}");
        let window = i64::try_from(window.as_nanos()).unwrap_or(i64::MAX);
        assert!((-window..=window).contains(&vcpu.carry_ns), "{vcpu:?}");
    }
}

/// A while in which vCPUs that always want to run are held.
#[derive(Debug)]
pub struct Span {
    /// What each did until it began, and for how long it had waited.
    before: Vec<(VcpuUse, Duration)>,
}

impl Span {
    /// Begins now, with what an actuator says.
    pub fn begin(usage: impl Fn() -> Vec<VcpuUse>) -> Self {
        // Nothing that passes between two looks is taken from what they waited.
        let waits: Vec<Duration> = usage().iter().map(|vcpu| waited(vcpu.thread)).collect();
        Self { before: usage().into_iter().zip(waits).collect() }
    }

    /// Of the time since then in which it did not wait for a processor, each ran for its share, from 0 to 1, but for `slack`: so it is on a busy host, too. Not
    /// for vCPUs that a quota holds: what that keeps them from running counts as waiting.
    ///
    /// # Panics
    /// If that is not so, or too little time has passed to tell.
    pub fn assert_no_less_than(&self, share: f64, slack: Duration, usage: &[VcpuUse]) {
        assert_eq!(usage.len(), self.before.len(), "they are the same ones");
        for (vcpu, (before, waited_before)) in usage.iter().zip(&self.before) {
            let did = vcpu.since(before);
            let waited = waited(vcpu.thread).saturating_sub(*waited_before);
            let least = did.elapsed.saturating_sub(waited).mul_f64(share);
            eprintln!("{} ran for {:.1?} of {least:.1?}, and waited for {waited:.1?}", did.thread, did.ran);
            assert!(
                vcpu.thread == before.thread && did.elapsed.mul_f64(share) > 2 * slack,
                "too soon: {did:?}"
            );
            assert!(did.ran + slack >= least, "too little: {did:?}, and waited for {waited:?}");
        }
    }
}

/// For how long a thread wanted to run, and others did.
fn waited(thread: u32) -> Duration {
    let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).unwrap_or_default();
    Duration::from_nanos(
        text.split_whitespace().nth(1).and_then(|waited| waited.parse().ok()).unwrap_or_default(),
    )
}

/// Whether this machine limits the processor time of threads: the processor controller is mounted, and this process is in a group that has it.
pub fn has_quota() -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    mounts.lines().any(|mount| {
        let fields: Vec<&str> = mount.split(' ').collect();
        let [_, place, kind, options, ..] = fields[..] else { return false };
        let mut options = options.split(',');
        match kind {
            "cgroup" => options.any(|option| option == "cpu"),
            "cgroup2" => groups.lines().filter_map(|group| group.strip_prefix("0::")).any(|group| {
                let controllers = fs::read_to_string(format!("{place}{group}/cgroup.controllers"));
                controllers.is_ok_and(|controllers| controllers.split_whitespace().any(|it| it == "cpu"))
            }),
            _ => false,
        }
    })
}
