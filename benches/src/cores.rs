//! The two cores that a benchmark runs on, and how far apart they are just now.
//!
//! On virtual machines two virtual CPUs wander between cores that share a cache and cores that do not, which changes
//! cache-bound results up to fourfold within seconds. So each measurement is tagged with what a line transfer cost just
//! before and after it, and only equal tags are compared.

use std::fmt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Below this a line moves between cores that share a cache.
const NEAR_NS: f64 = 100.0;
/// A probe takes the fastest of so many batches: a batch during which other work took a core says nothing.
const BATCHES: u64 = 10;
const ROUND_TRIPS: u64 = 1000;

/// Two cores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cores {
    pub(crate) receiver: usize,
    pub(crate) sender: usize,
}

/// How far apart the cores were during a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Distance {
    Near,
    Far,
    /// It changed meanwhile: compared with nothing.
    Mixed,
}

impl fmt::Display for Distance {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Near => "near",
            Self::Far => "far",
            Self::Mixed => "mixed",
        })
    }
}

impl Distance {
    pub(crate) fn of(before_ns: f64, after_ns: f64) -> Self {
        match (before_ns < NEAR_NS, after_ns < NEAR_NS) {
            (true, true) => Self::Near,
            (false, false) => Self::Far,
            _ => Self::Mixed,
        }
    }
}

impl Cores {
    /// The first two that this process may use.
    pub(crate) fn choose() -> Result<Self> {
        let allowed = sched_getaffinity(None).context("cannot ask which cores may be used")?;
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        match (cores.next(), cores.next()) {
            (Some(receiver), Some(sender)) => Ok(Self { receiver, sender }),
            _ => bail!("this benchmark needs two cores: run it without taskset, or on a machine with more"),
        }
    }

    /// The other way round.
    pub(crate) fn turned(self) -> Self {
        Self { receiver: self.sender, sender: self.receiver }
    }

    /// What it costs to move a line from one core to the other, one way, in ns.
    pub(crate) fn line_transfer_ns(self) -> Result<f64> {
        let line = AtomicU64::new(0);
        let turns = BATCHES * ROUND_TRIPS;
        // Waiting, not spinning, until the other thread is on its core: it begins on this one.
        let started_together = Barrier::new(2);
        let fastest = thread::scope(|scope| -> Result<Duration> {
            let answering = scope.spawn(|| -> Result<()> {
                let pinned = pin(self.sender);
                started_together.wait();
                for turn in 0..turns {
                    while line.load(Ordering::Acquire) != 2 * turn + 1 {
                        std::hint::spin_loop();
                    }
                    line.store(2 * turn + 2, Ordering::Release);
                }
                pinned
            });
            let pinned = pin(self.receiver);
            started_together.wait();
            let mut fastest = Duration::MAX;
            let mut started = Instant::now();
            for turn in 0..turns {
                line.store(2 * turn + 1, Ordering::Release);
                while line.load(Ordering::Acquire) != 2 * turn + 2 {
                    std::hint::spin_loop();
                }
                if (turn + 1).is_multiple_of(ROUND_TRIPS) {
                    fastest = fastest.min(started.elapsed());
                    started = Instant::now();
                }
            }
            answering.join().map_err(|_| anyhow::anyhow!("the probing thread panicked"))??;
            pinned.map(|()| fastest)
        })?;
        #[allow(clippy::cast_precision_loss, reason = "both are far below 2^53")]
        Ok(fastest.as_nanos() as f64 / (2 * ROUND_TRIPS) as f64)
    }
}

/// Keeps the calling thread on a core.
pub(crate) fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).with_context(|| format!("cannot run on core {core}"))
}

/// Lets the calling thread run on both cores: what it starts begins where it may.
pub(crate) fn unpin(cores: Cores) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cores.receiver);
    set.set(cores.sender);
    sched_setaffinity(None, &set).context("cannot run on both cores")
}

/// How many threads of the machine had work lately, if there were so many that it would disturb a benchmark.
pub(crate) fn busy() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    let load: f64 = text.split_whitespace().next()?.parse().ok()?;
    (load > 0.5).then_some(load)
}
