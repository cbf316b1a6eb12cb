//! How other threads speak to a worker.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The worker has ended: it was stopped or fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker has ended")]
pub struct WorkerGone;

/// Where a worker puts its answer to [`WorkerHandle::call`].
#[derive(Debug)]
pub struct Reply<R>(pub(super) SyncSender<R>);

impl<R> Reply<R> {
    /// Answers. Never blocks; if the caller is gone, the answer is dropped.
    pub fn send(self, answer: R) {
        let _ = self.0.try_send(answer);
    }
}

/// What the handles and the worker's thread share.
pub(super) struct Mailbox<M> {
    queue: Mutex<Queue<M>>,
    /// Says that looking into the queue is worth a lock.
    pending: AtomicBool,
    /// An eventfd, readable while there may be something in the queue.
    pub(super) waker: OwnedFd,
}

struct Queue<M> {
    messages: VecDeque<M>,
    stopping: bool,
    closed: bool,
}

/// What the mailbox held.
pub(super) struct Delivery<M> {
    pub(super) messages: VecDeque<M>,
    pub(super) stopping: bool,
}

impl<M> Mailbox<M> {
    pub(super) fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Self {
            queue: Mutex::new(Queue { messages: VecDeque::new(), stopping: false, closed: false }),
            pending: AtomicBool::new(false),
            waker: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Queue<M>> {
        // Nothing panics while it holds the lock, and each change to the queue is whole.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, mut next: impl FnMut()) {
        next();
        // It fails only when the counter is full, and then the worker has been woken already. The flag comes second: a
        // worker that saw it first could clear both before the eventfd is written, which nobody would clear again, and
        // a worker with an eventfd that stays readable never sleeps.
        let _ = rustix::io::write(&self.waker, &1_u64.to_ne_bytes());
        next();
        // Release: who sees the flag sees the queue; the lock orders the rest.
        self.pending.store(true, Ordering::Release);
    }

    fn push(&self, message: M) -> Result<(), WorkerGone> {
        self.push_stepwise(message, || ())
    }

    /// Calls `next` before each step that others can tell from the one before it.
    fn push_stepwise(&self, message: M, mut next: impl FnMut()) -> Result<(), WorkerGone> {
        next();
        {
            let mut queue = self.lock();
            if queue.closed {
                return Err(WorkerGone);
            }
            queue.messages.push_back(message);
        }
        self.wake(next);
        Ok(())
    }

    fn stop(&self) {
        self.lock().stopping = true;
        self.wake(|| ());
    }

    pub(super) fn pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Takes everything. The flag and the eventfd are cleared first, so that what comes later sets them again.
    pub(super) fn take(&self) -> Delivery<M> {
        self.take_stepwise(|| ())
    }

    /// Calls `next` before each step that others can tell from the one before it.
    fn take_stepwise(&self, mut next: impl FnMut()) -> Delivery<M> {
        next();
        // The flag before the eventfd, as neither may be down while the eventfd stays readable: whoever wakes us between the two
        // raises the flag again. SeqCst keeps the order.
        self.pending.store(false, Ordering::SeqCst);
        next();
        let _ = rustix::io::read(&self.waker, &mut [0; 8]);
        next();
        let mut queue = self.lock();
        Delivery { messages: std::mem::take(&mut queue.messages), stopping: queue.stopping }
    }

    /// Refuses further messages and drops what is queued, so that those who wait for an answer learn that none comes.
    pub(super) fn close(&self) {
        let left = {
            let mut queue = self.lock();
            queue.closed = true;
            std::mem::take(&mut queue.messages)
        };
        drop(left);
    }
}

struct Owner<M> {
    mailbox: Arc<Mailbox<M>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<M> Owner<M> {
    fn stop(&self) {
        self.mailbox.stop();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            // A task that holds a handle to its own worker cannot wait for itself.
            && thread.thread().id() != thread::current().id()
        {
            // A panic of the worker has been reported by its thread already.
            let _ = thread.join();
        }
    }
}

impl<M> Drop for Owner<M> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Speaks to a worker. The worker ends when it is stopped or when its last handle is dropped.
pub struct WorkerHandle<M>(Arc<Owner<M>>);

impl<M> WorkerHandle<M> {
    pub(super) fn new(mailbox: Arc<Mailbox<M>>, thread: JoinHandle<()>) -> Self {
        Self(Arc::new(Owner { mailbox, thread: Mutex::new(Some(thread)) }))
    }

    /// Sends a message; the worker wakes if it sleeps. Messages of one thread arrive in the order of sending.
    pub fn send(&self, message: M) -> Result<(), WorkerGone> {
        self.0.mailbox.push(message)
    }

    /// Sends a message that carries a place for the answer, and waits for it.
    pub fn call<R>(&self, make_message: impl FnOnce(Reply<R>) -> M) -> Result<R, WorkerGone> {
        let (sender, receiver) = sync_channel(1);
        self.send(make_message(Reply(sender)))?;
        receiver.recv().map_err(|_| WorkerGone)
    }

    /// Like [`WorkerHandle::call`], for answers that may take long: after `patience` there is none, and what the worker
    /// says later is not heard.
    pub fn call_within<R>(
        &self,
        patience: Duration,
        make_message: impl FnOnce(Reply<R>) -> M,
    ) -> Result<Option<R>, WorkerGone> {
        let (sender, receiver) = sync_channel(1);
        self.send(make_message(Reply(sender)))?;
        match receiver.recv_timeout(patience) {
            Ok(answer) => Ok(Some(answer)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(WorkerGone),
        }
    }

    /// Ends the worker, after the messages sent before, and waits until its task is gone.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// Whether the worker has ended, by itself or because it was fenced or stopped.
    pub fn is_gone(&self) -> bool {
        self.0.mailbox.lock().closed
    }
}

impl<M> Clone for WorkerHandle<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M> fmt::Debug for WorkerHandle<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerHandle").field("gone", &self.is_gone()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Condvar;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(mailbox: &Mailbox<u32>) -> bool {
        let mut watched = [PollFd::new(&mailbox.waker, PollFlags::IN)];
        poll(&mut watched, Some(&Timespec::default())).unwrap() > 0
    }

    /// Who of several threads takes the next step, for each step.
    struct Schedule {
        turns: Vec<usize>,
        taken: Mutex<usize>,
        changed: Condvar,
    }

    impl Schedule {
        /// Runs a thread's steps at its turns. It calls what it is handed before each step.
        fn run(&self, me: usize, steps: impl FnOnce(&mut dyn FnMut())) {
            let mut in_step = false;
            steps(&mut || {
                self.end_step(std::mem::replace(&mut in_step, true));
                let taken = self.taken.lock().unwrap();
                let mine = self.changed.wait_while(taken, |taken| self.turns[*taken] != me).unwrap();
                drop(mine);
            });
            self.end_step(in_step);
        }

        fn end_step(&self, in_step: bool) {
            *self.taken.lock().unwrap() += usize::from(in_step);
            self.changed.notify_all();
        }
    }

    /// All orders in which threads can take their steps, of which each has so many left.
    fn orders(left: [usize; 3]) -> Vec<Vec<usize>> {
        if left == [0; 3] {
            return vec![Vec::new()];
        }
        let mut all = Vec::new();
        for first in (0..3).filter(|&thread| left[thread] > 0) {
            let mut then = left;
            then[first] -= 1;
            all.extend(orders(then).iter().map(|order| [&[first], &order[..]].concat()));
        }
        all
    }

    #[test]
    fn in_whatever_order_two_push_and_the_worker_takes_it_gets_all_and_sleeps_again() {
        let orders = orders([3; 3]);
        assert_eq!(orders.len(), 1680);
        for turns in orders {
            let mailbox = Mailbox::new().unwrap();
            let schedule = Schedule { turns, taken: Mutex::new(0), changed: Condvar::new() };
            let mut messages = Vec::new();
            thread::scope(|scope| {
                for pusher in [1, 2] {
                    let (mailbox, schedule) = (&mailbox, &schedule);
                    scope.spawn(move || {
                        schedule.run(pusher, |next| mailbox.push_stepwise(0, next).unwrap());
                    });
                }
                schedule.run(0, |next| messages.extend(mailbox.take_stepwise(next).messages));
            });
            while mailbox.pending() {
                messages.extend(mailbox.take().messages);
            }
            assert_eq!(messages.len(), 2, "{:?}", schedule.turns);
            assert!(!is_readable(&mailbox), "it never sleeps again: {:?}", schedule.turns);
        }
    }

    #[test]
    fn a_mailbox_that_was_emptied_wakes_nobody() {
        const ROUNDS: u32 = 20_000;
        let mailbox = Mailbox::new().unwrap();
        let (go, gone) = (AtomicBool::new(false), AtomicBool::new(false));
        let wait_for = |flag: &AtomicBool| {
            while !flag.swap(false, Ordering::AcqRel) {
                thread::yield_now();
            }
        };
        let mut stuck = 0;
        thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    wait_for(&go);
                    mailbox.push(round).unwrap();
                    gone.store(true, Ordering::Release);
                }
            });
            for _ in 0..ROUNDS {
                go.store(true, Ordering::Release);
                let mut taken = Vec::new();
                while taken.is_empty() {
                    if mailbox.pending() {
                        taken.extend(mailbox.take().messages);
                    }
                }
                wait_for(&gone);
                // The flag may be up once more: then the next look clears both.
                stuck += u32::from(!mailbox.pending() && is_readable(&mailbox));
            }
        });
        assert_eq!(stuck, 0, "of {ROUNDS} times the worker would not have slept again");
    }
}
