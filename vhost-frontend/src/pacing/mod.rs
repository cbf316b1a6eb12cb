//! Holding what a VM's queues move to and from the pool to its share of the fabric.
//!
//! A [`Meter`] has a thread that measures every K what each device moved, exchanges sums with the other frontends of the pod
//! over lines of the pool, and computes shares with the code of [`mem_channel`]. A [`Pacer`] holds one device to its share: the
//! engine's worker asks it before it takes a request or packet from a virtqueue. A [`Pacing`] is what both have of a device.
//!
//! What the vCPUs of a VM load and store by themselves no frontend sees: an agent on the host (`vmm slice --share fair`) tells the
//! meter, and is told for how long they may run ([`pod_protocol::vcpus`]). They count as one more device of the VM.
//!
//! A device without a [`Pacer`] costs its worker one branch.

#[cfg(test)]
mod agent_tests;
mod agents;
#[cfg(test)]
mod bound_tests;
mod meter;
mod metered;
mod pacer;
mod plan;
mod round;
mod signal;
#[cfg(test)]
mod signal_tests;
#[cfg(test)]
mod tests;
mod timer;
#[cfg(test)]
mod vcpu_tests;
mod vcpus;
mod vm_budget;

pub use meter::Meter;
pub use pacer::{Pacer, Way};
pub use timer::PaceTimer;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use vm_budget::VmBudget;

/// Wakes the meter when something moves after a silence.
#[derive(Debug)]
pub(crate) struct Waker {
    silent: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Waker {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { silent: AtomicBool::new(false), thread: OnceLock::new() })
    }

    /// Time since some moment in the past, in µs. It is the same moment for all processes of this host, which share byte budgets.
    pub(crate) fn now_us() -> f64 {
        // The kernel's clock does not stand before its beginning.
        Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default().as_secs_f64() * 1e6
    }

    /// This thread is woken from now on.
    pub(crate) fn is_thread(&self, thread: Thread) {
        // There is one.
        let _ = self.thread.set(thread);
    }

    /// Calls of [`Waker::moved`] wake the thread from now on. Look once more before it sleeps.
    pub(crate) fn fall_silent(&self) {
        self.silent.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn wake(&self) {
        self.silent.store(false, Ordering::Relaxed);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Something was counted since the last call.
    fn moved(&self) {
        // Between the count and this look the meter may fall silent: then it sees the count. Both look after they have written.
        fence(Ordering::SeqCst);
        if self.silent.load(Ordering::Relaxed) {
            self.wake();
        }
    }
}

/// What a device moved, and how much it may move: counted by its worker, decided by the meter.
#[derive(Debug)]
pub struct Pacing {
    waker: Arc<Waker>,
    bytes: AtomicU64,
    messages: AtomicU64,
    /// For how long it was held back until the last time that it was not, in µs.
    held_us: AtomicU64,
    /// Since when it is held back, in µs as [`Waker::now_us`] has it; 0 while it is not.
    held_since_us: AtomicU64,
    /// What it may move in bytes/s, as an IEEE 754 number; infinite if that is not limited.
    rate: AtomicU64,
    /// T_W in µs, as such a number.
    window_us: AtomicU64,
    /// What all devices of its VM on this host may move together.
    vm: Arc<VmBudget>,
    /// What of that is this one's whatever the others do, in bytes/s, as such a number.
    sure: AtomicU64,
}

impl Pacing {
    /// Of a device of the VM that `vm` is for.
    fn new(waker: Arc<Waker>, vm: Arc<VmBudget>, window_us: f64) -> Arc<Self> {
        Arc::new(Self {
            waker,
            bytes: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            held_us: AtomicU64::new(0),
            held_since_us: AtomicU64::new(0),
            rate: AtomicU64::new(f64::INFINITY.to_bits()),
            window_us: AtomicU64::new(window_us.to_bits()),
            vm,
            sure: AtomicU64::new(f64::INFINITY.to_bits()),
        })
    }

    /// Bytes and messages that moved so far.
    pub(crate) fn moved(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::Relaxed), self.messages.load(Ordering::Relaxed))
    }

    /// For how long it was held back so far, in µs.
    pub(crate) fn held_us(&self, now_us: f64) -> f64 {
        // In this order: what ends meanwhile is counted twice rather than never, and once only in the end.
        let since = self.held_since_us.load(Ordering::Acquire);
        let held = as_f64(self.held_us.load(Ordering::Relaxed));
        if since == 0 { held } else { held + (now_us - as_f64(since)).max(0.0) }
    }

    pub(crate) fn limit(&self, rate: f64) {
        self.rate.store(rate.to_bits(), Ordering::Relaxed);
    }

    /// Its VM may move so much with as many devices on this host, of which this is one.
    fn limit_together(&self, rate: f64, devices: usize, now_us: f64) {
        // One that is alone has a budget of its own: what others do not take from costs no more than a look.
        let vm = if devices > 1 { rate } else { f64::INFINITY };
        self.vm.limit(vm, now_us);
        self.sure.store((vm / as_f64(devices as u64)).to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn set_window(&self, window_us: f64) {
        self.window_us.store(window_us.to_bits(), Ordering::Relaxed);
    }

    #[inline]
    fn count(&self, bytes: u64, messages: u64) {
        // One writer: a locked instruction for each would be a waste.
        self.bytes.store(self.bytes.load(Ordering::Relaxed).wrapping_add(bytes), Ordering::Relaxed);
        self.messages.store(self.messages.load(Ordering::Relaxed).wrapping_add(messages), Ordering::Relaxed);
    }

    fn hold(&self, now_us: f64) {
        if self.held_since_us.load(Ordering::Relaxed) == 0 {
            self.held_since_us.store(whole(now_us).max(1), Ordering::Release);
        }
    }

    fn release(&self, now_us: f64) {
        let since = self.held_since_us.load(Ordering::Relaxed);
        if since != 0 {
            let held = whole(now_us).saturating_sub(since);
            self.held_us.store(self.held_us.load(Ordering::Relaxed).wrapping_add(held), Ordering::Relaxed);
            self.held_since_us.store(0, Ordering::Release);
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "µs since a daemon began, or bytes of a short time, are below 2^53"
)]
pub(crate) fn as_f64(number: u64) -> f64 {
    number as f64
}

/// The whole number below; out of range it is the nearest there is.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
pub(crate) fn whole(number: f64) -> u64 {
    number as u64
}
