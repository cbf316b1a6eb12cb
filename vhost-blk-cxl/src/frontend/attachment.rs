//! What the controller is told of the VMM at a disk's socket, and of what its driver chose.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pod_protocol::endpoint::Reporter;
use pod_protocol::reports::Report;

/// Says at once that a VMM comes or goes, and with the next telemetry what a driver chose: a guest may change its mind as often as it
/// likes, and everything that the controller is told it writes down.
#[derive(Debug)]
pub(crate) struct Attachment {
    reporter: Option<Reporter>,
    unsaid: Mutex<Option<Report>>,
}

impl Attachment {
    /// Without a reporter nobody is told anything.
    pub(super) fn new(reporter: Option<Reporter>) -> Self {
        Self { reporter, unsaid: Mutex::default() }
    }

    /// Says how things are.
    pub(super) fn say(&self, report: Report) {
        // Until it is said, so that nobody says something older after it.
        let mut unsaid = self.lock();
        *unsaid = None;
        self.tell(report);
    }

    /// The same, but not now. Only the last one is said.
    pub(super) fn say_soon(&self, report: Report) {
        *self.lock() = Some(report);
    }

    /// Says what has yet to be said.
    pub(super) fn catch_up(&self) {
        let mut unsaid = self.lock();
        if let Some(report) = unsaid.take() {
            self.tell(report);
        }
    }

    fn tell(&self, report: Report) {
        if let Some(reporter) = &self.reporter {
            reporter.report(report);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Report>> {
        // Nothing panics while it holds the lock.
        self.unsaid.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
