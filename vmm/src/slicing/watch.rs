//! Asking a monitor the same thing again and again.

use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use pod_protocol::daemon::StopSignal;

use super::failed;
use crate::VmmError;

/// How often the monitor is asked.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Tells of what is another one than at the last look. A thread of its own looks: a monitor that somebody else talks to keeps that
/// thread waiting, and nobody else.
#[derive(Debug)]
pub struct Watch<T> {
    changes: Receiver<T>,
    stop: StopSignal,
}

impl<T: Clone + PartialEq + Send + 'static> Watch<T> {
    /// Looks until it is dropped; `known` is what there is now.
    pub(super) fn begin(
        name: &str,
        every: Duration,
        mut known: T,
        mut look: impl FnMut() -> Result<T, VmmError> + Send + 'static,
    ) -> Result<Self, VmmError> {
        let unwatched = |error: io::Error| failed(format!("the machine cannot be watched: {error}"));
        let stop = StopSignal::manual().map_err(unwatched)?;
        let (tell, changes) = channel();
        let told = stop.clone();
        let watch = move || {
            while !told.is_set() {
                // A monitor that does not answer has nothing new to tell.
                if let Ok(found) = look()
                    && found != known
                {
                    known.clone_from(&found);
                    if tell.send(found).is_err() {
                        return;
                    }
                }
                told.wait_for(every);
            }
        };
        thread::Builder::new().name(name.to_owned()).spawn(watch).map_err(unwatched)?;
        Ok(Self { changes, stop })
    }

    /// What there is now, if that has changed since the last call.
    pub fn changed(&self) -> Option<T> {
        self.changes.try_iter().last()
    }
}

impl<T> Drop for Watch<T> {
    fn drop(&mut self) {
        // A monitor may keep it waiting: it ends by itself.
        self.stop.stop();
    }
}
