//! vCPUs that are held to a part of their time, and what must be true of them.

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
