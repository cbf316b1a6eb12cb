//! What is written on a thread of its own while the controller goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::length::Length;

/// A snapshot that is being written, and what comes of it: nothing, if it was ended before it was done.
#[derive(Debug)]
pub(super) struct Aside<T, E> {
    thread: JoinHandle<Result<Option<T>, E>>,
    ends: Arc<AtomicBool>,
    /// What of the log it takes the place of.
    covers: Length,
}

/// Says whether it is to end.
pub(super) type Ends<'a> = &'a dyn Fn() -> bool;

impl<T: Send + 'static, E: Send + 'static> Aside<T, E> {
    /// Begins.
    pub(super) fn begin(
        covers: Length,
        job: impl FnOnce(Ends<'_>) -> Result<Option<T>, E> + Send + 'static,
    ) -> std::io::Result<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ends);
        let job = move || job(&|| seen.load(Ordering::Acquire));
        let thread = std::thread::Builder::new().name("snapshot".to_owned()).spawn(job)?;
        Ok(Self { thread, ends, covers })
    }

    /// Whether it is over.
    pub(super) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Has it end soon.
    pub(super) fn end(&self) {
        self.ends.store(true, Ordering::Release);
    }

    /// Waits until it is over. Says what came of it, and what of the log it takes the place of.
    pub(super) fn outcome(self) -> Result<Option<(T, Length)>, E> {
        match self.thread.join() {
            Ok(outcome) => Ok(outcome?.map(|made| (made, self.covers))),
            // As if it had been done here.
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}
