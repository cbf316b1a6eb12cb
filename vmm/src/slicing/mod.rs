//! Holding the vCPUs of a machine that runs to a part of their time (MemChannel §4.3).
//!
//! An [`Actuator`] does it; [`choose`] takes the best that a machine allows, and says why. Sliced is what a guest loads and stores
//! by itself. What its queues move is not: that is limited where the queues are served.
//!
//! [`VcpuThreads`] says which threads are vCPUs, also of those that are plugged in later.
//!
//! A [`Counter`] counts what the vCPUs load and store, and [`RunTimes`] for how long they could: what the pod needs to know to say how
//! large a part that should be. [`GuestRam`] says whether that goes over the fabric.

mod carry;
mod cgroup;
mod choice;
mod control;
mod counter;
mod guard;
mod guest_ram;
mod pacing;
mod run_time;
mod schedstat;
mod share;
mod shim;
mod vcpu_threads;
mod wake_up;
mod watch;

use std::time::Duration;

pub use cgroup::{CgroupActuator, Hierarchy};
pub use choice::{Choice, Kind, choose};
pub use control::ControlFile;
pub use counter::{Counter, RESCTRL, Resctrl};
pub use guest_ram::GuestRam;
pub use pacing::PacingActuator;
pub use run_time::{Ran, RunTimes};
pub use share::Share;
pub use shim::{ShimActuator, find_shim};
pub use vcpu_slicing::Duty;
pub use vcpu_threads::VcpuThreads;
pub use wake_up::{WINDOWS, WakeUp};
pub use watch::Watch;

use crate::VmmError;

/// For how long an order holds when nobody renews it. A machine whose agent died runs freely after that.
pub const HOLDS_FOR: Duration = Duration::from_secs(1);

/// What one vCPU thread did while it was sliced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VcpuUse {
    /// Its id.
    pub thread: u32,
    /// For how long it has been sliced.
    pub elapsed: Duration,
    /// How much of that it ran, in processor time.
    pub ran: Duration,
    /// How much of that it was put to sleep; waiting for other reasons is not in it.
    pub slept: Duration,
    /// How often it was put to sleep.
    pub sleeps: u64,
    /// How often that had to be tried again, because it held something.
    pub retries: u64,
    /// In how many windows that did not succeed at all.
    pub missed: u64,
    /// Run time that is carried into the next window, in ns; below 0 what it ran too long.
    pub carry_ns: i64,
    /// What it ran too long and is not carried, because that would be more than a window.
    pub forgiven: Duration,
    /// How often its account was looked at.
    pub looks: u64,
    /// How many windows there were.
    pub windows: u64,
    /// The sum over windows of the squared difference between obtained and requested share, in parts per million.
    pub squares: u64,
}

impl VcpuUse {
    /// What it did since an earlier look.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            thread: self.thread,
            elapsed: self.elapsed.saturating_sub(before.elapsed),
            ran: self.ran.saturating_sub(before.ran),
            slept: self.slept.saturating_sub(before.slept),
            sleeps: self.sleeps.saturating_sub(before.sleeps),
            retries: self.retries.saturating_sub(before.retries),
            missed: self.missed.saturating_sub(before.missed),
            carry_ns: self.carry_ns,
            forgiven: self.forgiven.saturating_sub(before.forgiven),
            looks: self.looks.saturating_sub(before.looks),
            windows: self.windows.saturating_sub(before.windows),
            squares: self.squares.saturating_sub(before.squares),
        }
    }

    /// The standard deviation of a window's share, in points; none where windows are not seen one by one.
    pub fn spread_points(&self) -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "for people")]
        (self.windows > 0).then(|| (self.squares as f64 / self.windows as f64).sqrt() / 10.0)
    }
}

/// A way to hold vCPUs to a part of their time.
pub trait Actuator {
    /// What it is called.
    fn name(&self) -> &'static str;

    /// Whether it holds vCPUs at all. One that does not leaves it to the frontends to hold what the machine's queues move.
    fn holds(&self) -> bool {
        true
    }

    /// Orders it, for [`HOLDS_FOR`] at least; renewed before that it goes on without a gap. Full duty frees the vCPUs, and need not be
    /// renewed. Returns the window that is really used.
    fn set(&mut self, duty: Duty) -> Result<Duration, VmmError>;

    /// Over which time at least what vCPUs ran is what was ordered. Whoever looks at less of it, and orders by that, is misled.
    fn exact_over(&self) -> Duration;

    /// vCPUs were plugged in or unplugged: holds these threads from the next order on, and no others. What is known of those that stay
    /// goes on.
    fn follow(&mut self, threads: &[u32]) -> Result<(), VmmError>;

    /// What the vCPU threads did since they were sliced first.
    fn usage(&self) -> Result<Vec<VcpuUse>, VmmError>;
}

/// No vCPU runs for less than this part of its time: QEMU waits for each of them now and then.
const LEAST_PART: f64 = 0.001;

/// A part of a window, with both in ns; `part` is from 0 to 1, and so small a one that QEMU could not go on is made larger.
pub fn duty(part: f64, window: Duration) -> Duty {
    let window_ns = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a part of the window, which is far below 2^52 ns"
    )]
    let run_ns = (window_ns as f64 * part.clamp(LEAST_PART, 1.0)).round() as u64;
    Duty { run_ns, window_ns }
}

/// Something about slicing that failed.
fn failed(reason: String) -> VmmError {
    VmmError::Slicing { reason }
}
