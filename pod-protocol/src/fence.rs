//! Knowing when to stop. The controller takes back what an endpoint holds by writing a newer fence generation into a
//! line of the pool; whoever acts on a device looks at it at least every `fence-ms`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cxl_pool::{FenceLine, LineOffset, Memory, Record};

/// The endpoint was fenced: stop using everything it held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fenced: the controller took back what this endpoint held")]
pub struct Fenced;

/// Reads the newest fence generation from the pool. Hides the kind of memory, so that [`Fence`] has no parameter.
trait Look: Send + Sync {
    /// The generation, unless the line is being written, is damaged or was never written.
    fn generation(&self) -> Option<u64>;
}

struct LineInPool<M> {
    memory: M,
    at: LineOffset,
}

impl<M: Memory> Look for LineInPool<M> {
    fn generation(&self) -> Option<u64> {
        FenceLine::look(&self.memory, self.at).map(|line| line.generation)
    }
}

struct Watch {
    line: Box<dyn Look>,
    limit: Duration,
    started: Instant,
    /// When anyone last looked, in nanoseconds since `started`.
    looked_ns: AtomicU64,
    /// The generation that came with the grant; [`NOT_GRANTED`] before the first.
    granted: AtomicU64,
    fenced: AtomicBool,
}

const NOT_GRANTED: u64 = u64::MAX;

/// How often to try while the line is just being written.
const LOOKS_MAX: u32 = 3;

/// Tells whether the endpoint still holds what it was given. One per worker; clones share what they saw.
#[derive(Clone)]
pub struct Fence(Arc<Watch>);

impl Fence {
    /// Watches the fence line at this place; `limit` is how long one may act without having looked.
    pub(crate) fn new<M: Memory>(memory: M, at: LineOffset, limit: Duration) -> Self {
        Self(Arc::new(Watch {
            line: Box::new(LineInPool { memory, at }),
            limit,
            started: Instant::now(),
            looked_ns: AtomicU64::new(0),
            granted: AtomicU64::new(NOT_GRANTED),
            fenced: AtomicBool::new(false),
        }))
    }

    /// Whether the endpoint may act. Call it before acting, at least once per turn: it costs a clock reading, and looks
    /// into the pool itself when nobody has for `fence-ms`, as after a pause of the whole process.
    pub fn check(&self) -> Result<(), Fenced> {
        if self.0.fenced.load(Ordering::Acquire) {
            return Err(Fenced);
        }
        let looked = Duration::from_nanos(self.0.looked_ns.load(Ordering::Acquire));
        if self.0.started.elapsed().saturating_sub(looked) <= self.0.limit {
            return Ok(());
        }
        self.look()?;
        // The line could not be read for all that time, so nobody knows whether we still hold anything.
        let looked = Duration::from_nanos(self.0.looked_ns.load(Ordering::Acquire));
        if self.0.started.elapsed().saturating_sub(looked) > self.0.limit {
            self.0.fenced.store(true, Ordering::Release);
            return Err(Fenced);
        }
        Ok(())
    }

    /// Looks into the pool now.
    pub(crate) fn look(&self) -> Result<(), Fenced> {
        // The time from before the look: a pause between the two must count as not having looked.
        let before_ns = u64::try_from(self.0.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let granted = self.0.granted.load(Ordering::Acquire);
        let generation = (0..LOOKS_MAX).find_map(|_| self.0.line.generation());
        // Before the first grant there is nothing to lose, and the line may never have been written.
        if generation.is_some() || granted == NOT_GRANTED {
            if generation.is_some_and(|generation| generation > granted) {
                self.0.fenced.store(true, Ordering::Release);
            }
            self.0.looked_ns.fetch_max(before_ns, Ordering::AcqRel);
        }
        if self.0.fenced.load(Ordering::Acquire) { Err(Fenced) } else { Ok(()) }
    }

    /// A grant came with this fence generation. The first one counts: a newer one later means that the endpoint was
    /// fenced in between, however briefly, and once fenced it stays so.
    pub(crate) fn granted(&self, generation: u64) {
        let first =
            self.0.granted.compare_exchange(NOT_GRANTED, generation, Ordering::AcqRel, Ordering::Acquire);
        if first.is_err_and(|granted| generation > granted) {
            self.0.fenced.store(true, Ordering::Release);
        }
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").field("fenced", &self.0.fenced).finish_non_exhaustive()
    }
}
