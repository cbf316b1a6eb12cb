//! Knowing when to stop. The controller takes back what an endpoint holds by writing a newer fence generation into a
//! line of the pool; whoever acts on a device looks at it at least every `fence-ms`. A hello that is not the endpoint's own any
//! more means the same: to the controller its life is over.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cxl_pool::{FenceLine, Hello, LineOffset, Memory, Record};
use rustix::time::{ClockId, clock_gettime};

use crate::liveness;
pub use crate::liveness::Usurper;
use crate::worker::Workers;

/// The endpoint was fenced, or has lost its slot: stop using everything it held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fenced: what this endpoint held is not its own any more")]
pub struct Fenced;

/// Reads the newest fence generation from the pool. Hides the kind of memory, so that [`Fence`] has no parameter.
trait Look: Send + Sync {
    /// The newest generation in the line of any controller replica that says something to this life. Nothing while one of them is being written or is
    /// damaged, or before any was written.
    fn generation(&self) -> Option<u64>;

    /// Who has the endpoint's slot, if it is not this life.
    fn usurper(&self) -> Option<Usurper>;
}

/// The line of each controller replica. Whoever of them leads fences in its own.
struct LinesInPool<M> {
    memory: M,
    lines: Vec<Line>,
    /// Where the endpoint's own hello is.
    hello: LineOffset,
    /// Which life of the endpoint looks.
    incarnation: u64,
}

struct Line {
    at: LineOffset,
    /// One that was readable once has to stay so. Replicas that never led have written none.
    written: AtomicBool,
}

impl<M: Memory> Look for LinesInPool<M> {
    fn generation(&self) -> Option<u64> {
        let mut newest = None;
        for line in &self.lines {
            match FenceLine::look(&self.memory, line.at) {
                Some(seen) => {
                    line.written.store(true, Ordering::Relaxed);
                    // What was for another life is none of ours: whoever wrote it may not have known yet that this one lives.
                    let generation = if seen.concerns(self.incarnation) { seen.generation } else { 0 };
                    newest = newest.max(Some(generation));
                }
                None if line.written.load(Ordering::Relaxed) => return None,
                None => {}
            }
        }
        newest
    }

    fn usurper(&self) -> Option<Usurper> {
        liveness::usurper::<Hello, M>(&self.memory, self.hello, self.incarnation)
    }
}

struct Watch {
    lines: Box<dyn Look>,
    limit: Duration,
    started: SinceBoot,
    /// When anyone last looked, in nanoseconds since `started`.
    looked_ns: AtomicU64,
    /// The generation that came with the grant; [`NOT_GRANTED`] before the first.
    granted: AtomicU64,
    /// Whether the hello is in the pool.
    announced: AtomicBool,
    fenced: AtomicBool,
    usurper: Mutex<Option<Usurper>>,
    /// Those that act.
    workers: Workers,
    hearing: Hearing,
}

/// Whether what the controller said while the endpoint stood still has been heard. It may have taken something away, without a fence.
#[derive(Default)]
struct Hearing {
    /// How often the control thread was done with all that the controller had said.
    rounds: AtomicU64,
    /// The round after which everything is known that was said before the endpoint went on.
    due: AtomicU64,
    /// Until when that is waited for at most, in nanoseconds since the watch started.
    until_ns: AtomicU64,
}

/// A moment by a clock that also goes on while the host is suspended: the controller's does meanwhile, and what was held may be
/// another's when the host wakes up.
#[derive(Clone, Copy, Debug)]
struct SinceBoot(Duration);

impl SinceBoot {
    fn now() -> Self {
        // It never stands before 0.
        Self(Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default())
    }

    fn elapsed(self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }
}

/// What a look showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Fine,
    Newer,
    Usurped,
    Unreadable,
}

const NOT_GRANTED: u64 = u64::MAX;

/// How long nobody acts at most because the control thread has not heard yet what was said meanwhile: it may wait for a device, or for a
/// controller that is not there any more.
const HEARS_WITHIN: Duration = Duration::from_secs(1);

/// How often to try while the line is just being written.
const LOOKS_MAX: u32 = 3;

/// Tells whether the endpoint still holds what it was given. One per worker; clones share what they saw.
#[derive(Clone)]
pub struct Fence(Arc<Watch>);

impl Fence {
    /// Watches the fence lines at these places, one of each controller replica, for the life of the endpoint that has this incarnation
    /// and, once it is [announced](Self::announced), its hello at this place; `limit` is how long one may act without having looked.
    pub(crate) fn new<M: Memory>(
        memory: M,
        lines: impl IntoIterator<Item = LineOffset>,
        limit: Duration,
        (incarnation, hello): (u64, LineOffset),
    ) -> Self {
        let lines = lines.into_iter().map(|at| Line { at, written: AtomicBool::new(false) }).collect();
        Self(Arc::new(Watch {
            lines: Box::new(LinesInPool { memory, lines, hello, incarnation }),
            limit,
            started: SinceBoot::now(),
            looked_ns: AtomicU64::new(0),
            granted: AtomicU64::new(NOT_GRANTED),
            announced: AtomicBool::new(false),
            fenced: AtomicBool::new(false),
            usurper: Mutex::new(None),
            workers: Workers::default(),
            hearing: Hearing::default(),
        }))
    }

    /// The workers of the endpoint.
    pub(crate) fn workers(&self) -> &Workers {
        &self.0.workers
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
        match self.read_line() {
            Seen::Fine => {}
            // One that could not be read for all that time does not tell whether we still hold anything.
            Seen::Newer | Seen::Usurped | Seen::Unreadable => self.0.fenced.store(true, Ordering::Release),
        }
        self.outcome()
    }

    /// Whether the endpoint may act on what it was told before: it is not fenced, and after it stood still for `fence-ms` and longer it has
    /// heard what the controller said meanwhile. As costly as [`check`](Self::check).
    pub fn may_act(&self) -> bool {
        self.check().is_ok() && !self.has_to_hear()
    }

    /// Whether the endpoint stood still, and has not heard yet what the controller said meanwhile.
    pub(crate) fn has_to_hear(&self) -> bool {
        let hearing = &self.0.hearing;
        let (rounds, due) = (hearing.rounds.load(Ordering::Acquire), hearing.due.load(Ordering::Acquire));
        rounds < due && nanoseconds(self.0.started.elapsed()) < hearing.until_ns.load(Ordering::Acquire)
    }

    /// The control thread is done with everything that it was told so far.
    pub(crate) fn heard_everything(&self) {
        self.0.hearing.rounds.fetch_add(1, Ordering::AcqRel);
    }

    /// Nobody has looked for too long: everybody stood still, the control thread, too.
    fn stood_still(&self, until: Duration) {
        let hearing = &self.0.hearing;
        let rounds = hearing.rounds.load(Ordering::Acquire);
        // Without a control thread there is nobody who hears.
        if rounds == 0 {
            return;
        }
        hearing.until_ns.fetch_max(nanoseconds(until + HEARS_WITHIN), Ordering::AcqRel);
        // It may have been at the end of a round.
        hearing.due.fetch_max(rounds + 2, Ordering::AcqRel);
    }

    /// Looks into the pool now.
    pub(crate) fn look(&self) -> Result<(), Fenced> {
        if matches!(self.read_line(), Seen::Newer | Seen::Usurped) {
            self.0.fenced.store(true, Ordering::Release);
        }
        self.outcome()
    }

    /// The hello of this life is in the pool: from here on it has to stay there.
    pub(crate) fn announced(&self) {
        self.0.announced.store(true, Ordering::Release);
    }

    /// What is in the endpoint's slot, if it was seen to be something else than the hello of this life.
    pub(crate) fn usurper(&self) -> Option<Usurper> {
        *self.0.usurper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_line(&self) -> Seen {
        // The time from before the look: a pause between the two must count as not having looked.
        let before = self.0.started.elapsed();
        // To the controller a life whose hello is gone has left: what it held may be another's already.
        if self.0.announced.load(Ordering::Acquire)
            && let Some(usurper) = self.0.lines.usurper()
        {
            // Whoever was seen first is told of, but for nobody.
            let mut seen = self.0.usurper.lock().unwrap_or_else(PoisonError::into_inner);
            if !matches!(*seen, Some(Usurper::Process(_))) {
                *seen = Some(usurper);
            }
            return Seen::Usurped;
        }
        let granted = self.0.granted.load(Ordering::Acquire);
        let generation = (0..LOOKS_MAX).find_map(|_| self.0.lines.generation());
        // Before the first grant there is nothing to lose, and the line may never have been written.
        if generation.is_none() && granted != NOT_GRANTED {
            return Seen::Unreadable;
        }
        let last = Duration::from_nanos(self.0.looked_ns.load(Ordering::Acquire));
        if before.saturating_sub(last) > self.0.limit {
            // Known before anybody can take the look for recent.
            self.stood_still(before);
        }
        self.0.looked_ns.fetch_max(nanoseconds(before), Ordering::AcqRel);
        if generation.is_some_and(|generation| generation > granted) { Seen::Newer } else { Seen::Fine }
    }

    fn outcome(&self) -> Result<(), Fenced> {
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

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").field("fenced", &self.0.fenced).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use cxl_pool::ByteOffset;
    use cxl_pool::HostId;
    use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};

    use super::*;

    const AT: LineOffset = LineOffset::new(3);
    /// Of another replica.
    const OTHER: LineOffset = LineOffset::new(9);
    /// Where its hello is.
    const HELLO: LineOffset = LineOffset::new(16);
    /// The life that looks.
    const LIFE: u64 = 7;

    /// The controller's view of the pool, and a fence on another host that nobody but the test looks at.
    fn fence(limit: Duration) -> (SimulatedMemory, Fence) {
        let pool = SimulatedPool::new(11, 1 << 12);
        (pool.host(HostId::new(1)), fence_in(&pool, limit))
    }

    fn fence_in(pool: &SimulatedPool, limit: Duration) -> Fence {
        Fence::new(pool.host(HostId::new(2)), [OTHER, AT], limit, (LIFE, HELLO))
    }

    fn publish(memory: &SimulatedMemory, generation: u64) {
        publish_for(memory, AT, LIFE, generation);
    }

    fn publish_for(memory: &SimulatedMemory, at: LineOffset, incarnation: u64, generation: u64) {
        FenceLine { generation, term: 1, incarnation }.publish(memory, at);
        memory.full_fence();
    }

    #[test]
    fn nothing_is_fenced_before_the_first_grant() {
        let (controller, fence) = fence(Duration::ZERO);
        assert_eq!(fence.check(), Ok(()));
        publish(&controller, 9);
        assert_eq!(fence.look(), Ok(()));
        fence.granted(9);
        assert_eq!(fence.look(), Ok(()));
    }

    #[test]
    fn newer_generation_fences_at_the_next_look_and_for_good() {
        let (controller, fence) = fence(Duration::from_hours(1));
        publish(&controller, 1);
        fence.granted(1);
        publish(&controller, 2);
        assert_eq!(fence.check(), Ok(()), "nobody has looked since");
        assert_eq!(fence.look(), Err(Fenced));
        assert_eq!(fence.clone().check(), Err(Fenced));
        fence.granted(2);
        assert_eq!(fence.check(), Err(Fenced));
    }

    #[test]
    fn a_fence_for_another_life_is_none() {
        let (controller, fence) = fence(Duration::ZERO);
        publish(&controller, 3);
        fence.granted(3);
        publish_for(&controller, OTHER, LIFE - 1, 4);
        assert_eq!(fence.look(), Ok(()));
        assert_eq!(fence.check(), Ok(()));
        publish_for(&controller, AT, LIFE - 1, 5);
        assert_eq!(fence.look(), Ok(()), "also in the line of whoever granted it");
        publish_for(&controller, OTHER, LIFE, 6);
        assert_eq!(fence.look(), Err(Fenced));
    }

    #[test]
    fn a_fence_of_a_controller_that_does_not_say_for_whom_is_for_all() {
        let (controller, fence) = fence(Duration::ZERO);
        publish(&controller, 3);
        fence.granted(3);
        publish_for(&controller, OTHER, 0, 4);
        assert_eq!(fence.look(), Err(Fenced));
    }

    #[test]
    fn worker_looks_itself_when_nobody_has_for_too_long() {
        let (controller, fence) = fence(Duration::from_millis(1));
        publish(&controller, 1);
        fence.granted(1);
        publish(&controller, 2);
        thread::sleep(Duration::from_millis(2));
        assert_eq!(fence.check(), Err(Fenced));
    }

    #[test]
    fn who_stood_still_acts_once_it_has_heard_what_was_said_meanwhile() {
        let (controller, fence) = fence(Duration::from_millis(1));
        publish(&controller, 1);
        fence.granted(1);
        assert_eq!(fence.look(), Ok(()));
        thread::sleep(Duration::from_millis(2));
        assert!(fence.may_act(), "there is no control thread");
        fence.heard_everything();
        for looks in [Fence::look, Fence::check] {
            thread::sleep(Duration::from_millis(2));
            assert_eq!(looks(&fence), Ok(()));
            assert!(fence.has_to_hear());
            fence.heard_everything();
            assert!(fence.has_to_hear(), "that may have been what it was at before");
            fence.heard_everything();
            assert!(!fence.has_to_hear());
        }
    }

    #[test]
    fn who_hears_nothing_goes_on_after_a_while() {
        let (controller, fence) = fence(Duration::from_millis(1));
        publish(&controller, 1);
        fence.granted(1);
        fence.heard_everything();
        thread::sleep(Duration::from_millis(2));
        assert!(!fence.may_act());
        // Nobody looks meanwhile, as nobody did before.
        thread::sleep(HEARS_WITHIN);
        assert!(!fence.has_to_hear());
    }

    #[test]
    fn later_grant_with_a_newer_generation_tells_of_a_fence_that_was_missed() {
        let (controller, fence) = fence(Duration::from_hours(1));
        publish(&controller, 1);
        fence.granted(1);
        fence.granted(1);
        assert_eq!(fence.check(), Ok(()));
        fence.granted(2);
        assert_eq!(fence.check(), Err(Fenced));
    }

    #[test]
    fn line_that_cannot_be_read_for_too_long_fences() {
        let (controller, fence) = fence(Duration::from_millis(1));
        publish(&controller, 1);
        fence.granted(1);
        assert_eq!(fence.look(), Ok(()));
        controller.store(ByteOffset::new(AT.bytes().get()), 77);
        controller.write_back(AT.bytes(), 64);
        controller.full_fence();
        thread::sleep(Duration::from_millis(5));
        assert_eq!(fence.check(), Err(Fenced));
    }

    fn announce(memory: &SimulatedMemory, incarnation: u64) {
        Hello { incarnation, pid: 42, protocol: (1, 1), started_unix_ms: 0 }.publish(memory, HELLO);
        memory.full_fence();
    }

    /// On another kernel, while this one stood still: nobody fenced it.
    #[test]
    fn a_slot_that_another_life_has_is_lost() {
        let pool = SimulatedPool::new(11, 1 << 12);
        let (own, other) = (pool.host(HostId::new(2)), pool.host(HostId::new(3)));
        let [looks, acts] = [Duration::from_hours(1), Duration::ZERO].map(|limit| fence_in(&pool, limit));
        assert_eq!(looks.look(), Ok(()), "it has not said that it is there");
        announce(&own, LIFE);
        for fence in [&looks, &acts] {
            fence.announced();
            assert_eq!(fence.look(), Ok(()));
            assert_eq!(fence.check(), Ok(()));
        }
        announce(&other, LIFE + 1);
        assert_eq!(looks.look(), Err(Fenced));
        assert_eq!(acts.check(), Err(Fenced), "a worker sees it before it acts");
        assert_eq!(acts.usurper(), Some(Usurper::Process(42)));
    }

    #[test]
    fn a_slot_that_another_life_had_is_lost() {
        let pool = SimulatedPool::new(11, 1 << 12);
        let fence = fence_in(&pool, Duration::from_hours(1));
        announce(&pool.host(HostId::new(2)), LIFE);
        fence.announced();
        assert_eq!(fence.look(), Ok(()));
        let other = pool.host(HostId::new(3));
        announce(&other, LIFE + 1);
        Hello::erase(&other, HELLO);
        other.full_fence();
        assert_eq!(fence.look(), Err(Fenced));
        assert_eq!(fence.usurper(), Some(Usurper::Nobody));
        announce(&other, LIFE + 2);
        assert_eq!(fence.look(), Err(Fenced));
        assert_eq!(fence.usurper(), Some(Usurper::Process(42)), "there is somebody by now");
    }
}
