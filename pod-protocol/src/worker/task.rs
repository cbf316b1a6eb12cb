//! What a worker runs.

use super::sources::{Sources, Token};

/// What a turn achieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Something moved: turn again at once.
    Busy,
    /// Something moved, and a guest got answers: once there is nothing to do, let it run, for it may need this very core.
    Answered,
    /// There was nothing to do.
    Idle,
}

/// The work of a data-plane thread. All of its calls come from that thread, one at a time.
///
/// The worker turns it while it is busy and for the configured time after, then lets it announce its sleep and waits.
pub trait Task: Send {
    /// What other threads may send it.
    type Message: Send;

    /// A message arrived. Messages arrive in the order in which they were sent, before the next turn.
    fn message(&mut self, message: Self::Message, sources: &mut Sources);

    /// Do a bounded amount of work.
    fn turn(&mut self) -> Progress;

    /// A watched file descriptor became readable. It is watched level-triggered: drain it, or be called again.
    fn ready(&mut self, token: Token);

    /// Whether somebody else has in hand what it has begun, such as a peer or a device, so that the end of that is its next work. The
    /// worker may poll for that longer than else. Asked when there is nothing to do.
    fn awaits(&self) -> bool {
        false
    }

    /// About to sleep: announce it on every receiver and ask queues for notifications, then look once more. True if
    /// nothing came meanwhile, so that sleeping is safe. [`Task::resume`] follows in either case.
    fn prepare_sleep(&mut self) -> bool;

    /// Awake again: withdraw what [`Task::prepare_sleep`] announced.
    fn resume(&mut self);
}
