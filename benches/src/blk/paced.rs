//! A device with a service time: so slow that devices are the limit, and not the cores of the machine that stands in for them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use vhost_blk_cxl::segments::Segment;
use vhost_blk_cxl::ssd::{Command, CommandId, Finished, Full, Geometry, LABEL_BYTES, Outcome, Ssd};

/// What it carries out at a time.
const PARALLEL: u32 = 16;
/// How long each command takes, whatever its length.
const SERVICE: Duration = Duration::from_millis(1);
/// How many it holds.
const DEPTH: usize = 1024;

/// Moves no data, and takes its time for that.
pub(super) struct PacedSsd {
    geometry: Geometry,
    timer: OwnedFd,
    /// When each of those that serve is free.
    free: [Instant; PARALLEL as usize],
    /// In the order in which they end, which is that in which they came.
    waiting: VecDeque<(Instant, CommandId)>,
    /// Writes to where tables and logs of intents are.
    logged: Arc<AtomicU64>,
}

impl PacedSsd {
    /// A device that counts writes to what volumes leave free at its beginning.
    pub(super) fn new(size_bytes: u64, logged: &Arc<AtomicU64>) -> Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self {
            geometry: Geometry { size_bytes, block_bytes: 4096 },
            timer: timerfd_create(TimerfdClockId::Monotonic, flags).context("cannot make a timer")?,
            free: [Instant::now(); PARALLEL as usize],
            waiting: VecDeque::with_capacity(DEPTH),
            logged: Arc::clone(logged),
        })
    }

    /// Requests per second that it can do.
    pub(super) fn per_second() -> f64 {
        f64::from(PARALLEL) / SERVICE.as_secs_f64()
    }

    fn arm(&self) {
        let Some((first, _)) = self.waiting.front() else { return };
        // Zero would turn it off.
        let left = first.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let value =
            Itimerspec { it_interval: Timespec::default(), it_value: left.try_into().unwrap_or_default() };
        // If that fails, the run ends for want of answers.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value);
    }
}

impl Ssd for PacedSsd {
    fn driver(&self) -> &'static str {
        "paced"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, command: Command) -> Result<(), Full> {
        if self.waiting.len() == DEPTH {
            return Err(Full);
        }
        if command.operation.writes() && command.offset_bytes < LABEL_BYTES {
            self.logged.fetch_add(1, Ordering::Relaxed);
        }
        let now = Instant::now();
        let Some(next) = self.free.iter_mut().min() else { return Err(Full) };
        *next = now.max(*next) + SERVICE;
        self.waiting.push_back((*next, command.id));
        Ok(())
    }

    fn submit_list(&mut self, command: Command, _segments: &[Segment]) -> Result<(), Full> {
        self.submit(command)
    }

    fn kick(&mut self) {
        self.arm();
    }

    fn reap(&mut self, into: &mut Vec<Finished>) {
        let now = Instant::now();
        let before = into.len();
        while let Some(&(end, id)) = self.waiting.front()
            && end <= now
        {
            into.push(Finished { id, outcome: Outcome::Done });
            self.waiting.pop_front();
        }
        if into.len() > before {
            let _ = rustix::io::read(&self.timer, &mut [0; 8]);
            self.arm();
        }
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }

    fn bypasses_cache(&self) -> bool {
        true
    }

    fn write_verifier(&self) -> u64 {
        0
    }

    fn failure(&self) -> Option<&str> {
        None
    }
}
