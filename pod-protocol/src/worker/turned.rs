//! A task without a thread.

use std::io;
use std::sync::mpsc::{TryRecvError, sync_channel};

use super::handle::Reply;
use super::sources::Sources;
use super::task::{Progress, Task};

/// A task that is turned by whoever has it, so that nothing depends on threads and clocks: what a seed decides, it replays. For
/// tests.
pub struct Turned<T: Task> {
    task: T,
    sources: Sources,
}

impl<T: Task> Turned<T> {
    /// Takes the place of the thread.
    pub fn new(task: T) -> io::Result<Self> {
        Ok(Self { task, sources: Sources::new()? })
    }

    /// Hands over a message.
    pub fn send(&mut self, message: T::Message) {
        self.task.message(message, &mut self.sources);
    }

    /// Hands over a message and turns the task until it has answered, but not for ever: then there is no answer.
    pub fn call<R>(&mut self, make_message: impl FnOnce(Reply<R>) -> T::Message) -> Option<R> {
        const TURNS_MAX: u32 = 10_000;
        let (sender, receiver) = sync_channel(1);
        self.send(make_message(Reply(sender)));
        for _ in 0..TURNS_MAX {
            match receiver.try_recv() {
                Ok(answer) => return Some(answer),
                Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => _ = self.turn(),
            }
        }
        None
    }

    /// Lets the task do a bounded amount of work.
    pub fn turn(&mut self) -> Progress {
        self.task.turn()
    }
}
