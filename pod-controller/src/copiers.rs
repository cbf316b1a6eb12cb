//! Has what no instance uses copied, where it has to be: see [`State::copiers_due`](pod_state::State::copiers_due).
//!
//! It asks for that as anybody might, beside the controller's thread: all volumes are looked at, and nobody is kept waiting meanwhile.

use std::time::Duration;

use tokio::time::MissedTickBehavior;

use crate::controller::Handle;

/// How often it is looked whether something has changed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Runs for as long as the controller does. One that does not lead leaves it to the one that does.
pub async fn run(handle: Handle) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // What was known when there was nothing to do, or nothing that could be done.
    let mut idle = None;
    loop {
        looks.tick().await;
        let view = handle.view();
        let known = view.state.index;
        if !handle.office().leads || idle == Some(known) {
            continue;
        }
        let Ok(due) = tokio::task::spawn_blocking(move || view.state.copiers_due()).await else { continue };
        let mut done = false;
        for command in due {
            match handle.submit(command.clone()).await {
                Ok(()) => done = true,
                // There may be no room for one more in the pool; it is tried again when something has changed.
                Err(error) => tracing::debug!(?command, "not done: {error}"),
            }
        }
        idle = (!done).then_some(known);
    }
}
