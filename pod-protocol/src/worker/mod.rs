//! The data-plane thread that both engines' frontends and backends run: it polls while there is work and for a while
//! after, then sleeps until a file descriptor, a doorbell or a message wakes it.

mod handle;
mod patience;
mod sources;
mod task;
mod turned;
mod turning;

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cxl_channel::doorbell::DoorbellListener;

use self::handle::Mailbox;
pub use self::handle::{Reply, WorkerGone, WorkerHandle};
use self::patience::Patience;
pub use self::sources::{Sources, Token};
pub use self::task::{Progress, Task};
pub use self::turned::Turned;
use self::turning::Turner;
pub(crate) use self::turning::{TurnWatch, Workers};
use crate::config::{RunSection, Wakeup};
use crate::fence::Fence;

/// Looking at file descriptors costs a system call, so an idle worker that polls does so every so many turns, and a busy
/// one after this time.
const TURNS_PER_LOOK_IDLE: u32 = 8;
const LOOK_EVERY_BUSY: Duration = Duration::from_micros(100);

/// A worker that polls without end, on a core of its own, pauses between its looks after so long without work. Each look takes
/// some of the pool's bandwidth from those who have work: pauses halve that. What comes first after such a silence waits
/// half a pause longer on average.
const REST_AFTER: Duration = Duration::from_millis(1);
const REST: Duration = Duration::from_nanos(440);

/// Steps in which a worker without doorbells sleeps. They double from the first to the last while nothing comes.
const NAP_FIRST: Duration = Duration::from_micros(50);
const NAP_LAST: Duration = Duration::from_millis(1);

/// How a worker waits.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// What wakes it.
    pub wakeup: Wakeup,
    /// How long it goes on polling after its last work.
    pub busy_poll: Duration,
    /// How long it does while others have in hand what it has begun, as long as that ends within this time.
    pub poll_in_flight: Duration,
    /// A core of its own, on which it polls always.
    pub cpu: Option<usize>,
    /// Ends it when the endpoint is fenced. The endpoint that this belongs to also watches whether the worker comes round.
    pub fence: Option<Fence>,
}

impl WorkerConfig {
    /// As the host's configuration says.
    pub fn new(run: &RunSection, cpu: Option<usize>, fence: Fence) -> Self {
        let RunSection { wakeup, .. } = *run;
        let (busy_poll, poll_in_flight) = (run.busy_poll(), run.poll_in_flight());
        Self { wakeup, busy_poll, poll_in_flight, cpu, fence: Some(fence) }
    }
}

/// A worker that did not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the worker {name}: {what}")]
pub struct SpawnError {
    name: String,
    what: &'static str,
    source: io::Error,
}

/// A data-plane thread.
pub struct Worker<T: Task> {
    config: WorkerConfig,
    doorbell: Option<DoorbellListener>,
    sources: Sources,
    mailbox: Arc<Mailbox<T::Message>>,
    task: T,
    patience: Patience,
    /// The last one to go: a task that cannot be dropped is stuck, too.
    turner: Turner,
}

impl<T: Task + 'static> Worker<T> {
    /// Starts a thread of this name (at most 15 bytes of it are seen) that runs the task. Without a doorbell only its
    /// own file descriptors and messages wake it early.
    pub fn spawn(
        name: &str,
        config: WorkerConfig,
        doorbell: impl Into<Option<DoorbellListener>>,
        task: T,
    ) -> Result<WorkerHandle<T::Message>, SpawnError> {
        let failed = |what| {
            let name = name.to_owned();
            move |source| SpawnError { name, what, source }
        };
        let doorbell = doorbell.into();
        let mut sources = Sources::new().map_err(failed("no epoll"))?;
        let mailbox = Arc::new(Mailbox::new().map_err(failed("no eventfd"))?);
        sources.add_any(&mailbox.waker, Token::MESSAGES).map_err(failed("its eventfd cannot be watched"))?;
        if let Some(doorbell) = &doorbell {
            sources.add_any(doorbell, Token::DOORBELL).map_err(failed("its doorbell cannot be watched"))?;
        }
        let workers = config.fence.as_ref().map(Fence::workers).cloned().unwrap_or_default();
        let turner = workers.add(name);
        let patience = Patience::new(config.poll_in_flight);
        let mailbox_here = Arc::clone(&mailbox);
        let worker = Self { config, doorbell, sources, mailbox: mailbox_here, task, patience, turner };
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || worker.run())
            .map_err(failed("no thread"))?;
        Ok(WorkerHandle::new(mailbox, thread))
    }

    fn run(mut self) {
        // Closes the mailbox also when the task panics: nobody must wait for an answer that never comes.
        let _closing = CloseOnDrop(Arc::clone(&self.mailbox));
        if let Some(cpu) = self.config.cpu {
            pin(cpu);
        }
        while self.stretch().is_continue() {}
    }

    /// Polls until the busy-poll time is over, then sleeps until woken, napping in between where nothing would wake it.
    fn stretch(&mut self) -> ControlFlow<()> {
        let mut last_work = Instant::now();
        let mut last_look = last_work;
        let mut idle_turns = 0;
        let mut rests = false;
        let mut has_answered = false;
        let mut nap = NAP_FIRST;
        loop {
            self.turner.turns();
            self.deliver()?;
            if self.has_to_hear() {
                // What is to be done may have been taken away meanwhile: the control thread says so first, by messages.
                thread::yield_now();
                continue;
            }
            let progress = self.task.turn();
            if progress != Progress::Idle {
                last_work = Instant::now();
                self.patience.works(last_work);
                rests = false;
                has_answered |= progress == Progress::Answered;
                nap = NAP_FIRST;
                if last_work.duration_since(last_look) >= LOOK_EVERY_BUSY {
                    last_look = last_work;
                    self.look();
                }
                continue;
            }
            if std::mem::take(&mut has_answered) && self.config.cpu.is_none() {
                thread::yield_now();
                continue;
            }
            idle_turns += 1;
            if idle_turns >= TURNS_PER_LOOK_IDLE {
                idle_turns = 0;
                if self.look() {
                    last_work = Instant::now();
                    rests = false;
                    continue;
                }
                rests = last_work.elapsed() >= REST_AFTER;
                if self.config.cpu.is_none() {
                    // Who has work comes before who waits for some: perhaps the very guest or peer that we wait for.
                    thread::yield_now();
                }
            }
            if self.config.cpu.is_some() || self.polls(last_work) {
                // Not only a pause: looks at a line that are made ahead of their turn keep the peer from writing to it. A
                // message takes half as long to a core that waits for each look before the next one.
                std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
                std::hint::spin_loop();
                if rests {
                    rest();
                }
                continue;
            }
            if self.sleep(nap) {
                return ControlFlow::Continue(());
            }
            nap = (nap * 2).min(NAP_LAST);
        }
    }

    /// Whether to look again at once after the last work was then, instead of sleeping.
    fn polls(&mut self, last_work: Instant) -> bool {
        let waited = last_work.elapsed();
        waited < self.config.busy_poll || self.task.awaits() && self.patience.polls(waited, last_work)
    }

    /// Hands over messages, and ends the worker when it was stopped or fenced.
    fn deliver(&mut self) -> ControlFlow<()> {
        if self.fenced() {
            return ControlFlow::Break(());
        }
        if self.mailbox.pending() {
            let delivery = self.mailbox.take();
            for message in delivery.messages {
                self.task.message(message, &mut self.sources);
                self.turner.turns();
            }
            if delivery.stopping {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    /// Passes on what is readable. Returns whether anything was.
    fn look(&mut self) -> bool {
        let ready = self.sources.look();
        for &token in ready {
            match token {
                // Its flag says the same, and taking the messages clears it.
                Token::MESSAGES => {}
                Token::DOORBELL => {
                    if let Some(doorbell) = &mut self.doorbell {
                        doorbell.drain();
                    }
                }
                token => self.task.ready(token),
            }
        }
        !ready.is_empty()
    }

    /// Sleeps, for one nap where no peer would ring. Returns whether something woke us.
    fn sleep(&mut self, nap: Duration) -> bool {
        let nap = match self.config.wakeup {
            Wakeup::Socket => None,
            Wakeup::Poll => Some(nap),
        };
        let woken = if self.task.prepare_sleep() && !self.mailbox.pending() {
            self.turner.rests();
            let woken = self.sources.sleep(nap);
            self.turner.turns();
            woken
        } else {
            true
        };
        self.task.resume();
        if woken && !self.fenced() && !self.has_to_hear() {
            self.look();
        }
        woken
    }

    /// Whether it stood still, with all of the daemon, and the control thread has not heard yet what the controller said meanwhile.
    fn has_to_hear(&self) -> bool {
        self.config.fence.as_ref().is_some_and(Fence::has_to_hear)
    }

    fn fenced(&self) -> bool {
        self.config.fence.as_ref().is_some_and(|fence| fence.check().is_err())
    }
}

struct CloseOnDrop<M>(Arc<Mailbox<M>>);

impl<M> Drop for CloseOnDrop<M> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Lets the time between two looks pass. Not asleep: that would take a hundred times as long.
fn rest() {
    let until = Instant::now() + REST;
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// Moves the calling thread to one core. A core that does not exist costs speed, not correctness.
fn pin(cpu: usize) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut cpus = CpuSet::new();
    let outcome = if cpu < CpuSet::MAX_CPU {
        cpus.set(cpu);
        sched_setaffinity(None, &cpus).map_err(io::Error::from)
    } else {
        Err(io::ErrorKind::InvalidInput.into())
    };
    if let Err(error) = outcome {
        tracing::warn!(cpu, %error, "the worker stays unpinned: this core cannot be used");
    }
}

#[cfg(test)]
mod tests;
