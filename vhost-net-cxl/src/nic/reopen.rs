//! A NIC whose driver failed is opened again, on a thread of its own: opening may take a while, and the packets of the
//! other NICs do not wait for it.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::{Nic, NicError};

/// The longest pause between two attempts.
pub const PAUSE_MAX: Duration = Duration::from_secs(30);
/// A NIC that has worked for this long begins with the shortest pause again.
const GOOD_AFTER: Duration = Duration::from_mins(1);

/// Opens the NIC of this name, watched and ready to be started.
pub type Open = Box<dyn FnMut(&str) -> Result<Box<dyn Nic>, NicError> + Send>;
/// Takes a NIC that was opened again.
pub type Take = Box<dyn FnMut(Box<dyn Nic>) + Send>;

/// Asks for NICs to be opened again.
#[derive(Clone, Debug)]
pub struct Reopening(Sender<String>);

impl Reopening {
    /// Starts the thread, which lives as long as this and its clones. A NIC is tried after `pauses[name]` first, and
    /// then after twice as long each time, up to [`PAUSE_MAX`]; one without a pause is left as it is.
    pub fn start(
        pauses: BTreeMap<String, Duration>,
        mut open: Open,
        mut take: Take,
    ) -> std::io::Result<Self> {
        let (sender, failed) = mpsc::channel::<String>();
        std::thread::Builder::new().name("nic-reopen".to_owned()).spawn(move || {
            let mut schedule = Schedule::new(pauses);
            loop {
                let now = Instant::now();
                while let Some(nic) = schedule.next_due(now) {
                    match open(&nic) {
                        Ok(opened) => {
                            schedule.opened(&nic, Instant::now());
                            take(opened);
                        }
                        Err(error) => {
                            tracing::debug!(%error, "the NIC cannot be opened again yet");
                            schedule.failed(&nic, Instant::now());
                        }
                    }
                }
                let wait = schedule.next().map(|due| due.saturating_duration_since(Instant::now()));
                match failed.recv_timeout(wait.unwrap_or(PAUSE_MAX)) {
                    Ok(nic) => schedule.failed(&nic, Instant::now()),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
        Ok(Self(sender))
    }

    /// Asks for a NIC to be opened again.
    pub fn failed(&self, nic: &str) {
        // The thread ends only when nobody can ask any more.
        let _ = self.0.send(nic.to_owned());
    }
}

/// When to try which NIC.
#[derive(Debug)]
struct Schedule {
    pauses: BTreeMap<String, Duration>,
    due: BTreeMap<String, Instant>,
    /// The next pause of a NIC, and since when it works.
    history: BTreeMap<String, (Duration, Option<Instant>)>,
}

impl Schedule {
    fn new(pauses: BTreeMap<String, Duration>) -> Self {
        Self { pauses, due: BTreeMap::new(), history: BTreeMap::new() }
    }

    /// A NIC that failed, or whose attempt failed.
    fn failed(&mut self, nic: &str, now: Instant) {
        let Some(first) = self.pauses.get(nic).copied().filter(|pause| !pause.is_zero()) else { return };
        let (pause, good_since) = self.history.get(nic).copied().unwrap_or((first, None));
        let was_good = good_since.is_some_and(|since| now.saturating_duration_since(since) >= GOOD_AFTER);
        let pause = if was_good { first } else { pause };
        self.due.insert(nic.to_owned(), now + pause);
        self.history.insert(nic.to_owned(), ((2 * pause).min(PAUSE_MAX).max(first), None));
    }

    fn opened(&mut self, nic: &str, now: Instant) {
        if let Some((_, good_since)) = self.history.get_mut(nic) {
            *good_since = Some(now);
        }
    }

    fn next(&self) -> Option<Instant> {
        self.due.values().min().copied()
    }

    fn next_due(&mut self, now: Instant) -> Option<String> {
        let nic = self.due.iter().find(|(_, due)| **due <= now).map(|(nic, _)| nic.clone())?;
        self.due.remove(&nic);
        Some(nic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule() -> Schedule {
        Schedule::new(BTreeMap::from([
            ("nic0".to_owned(), Duration::from_secs(1)),
            ("never".to_owned(), Duration::ZERO),
        ]))
    }

    #[test]
    fn pauses_double_up_to_a_limit_and_begin_anew_after_good_times() {
        let mut schedule = schedule();
        let mut now = Instant::now();
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            schedule.failed("nic0", now);
            assert_eq!(schedule.next(), Some(now + Duration::from_secs(seconds)));
            now += Duration::from_secs(seconds);
            assert_eq!(schedule.next_due(now).as_deref(), Some("nic0"));
        }
        schedule.opened("nic0", now);
        // It fails again at once: that was no good time.
        schedule.failed("nic0", now + Duration::from_secs(2));
        assert_eq!(schedule.next(), Some(now + Duration::from_secs(32)));
        now += Duration::from_secs(32);
        assert_eq!(schedule.next_due(now).as_deref(), Some("nic0"));
        schedule.opened("nic0", now);
        now += GOOD_AFTER;
        schedule.failed("nic0", now);
        assert_eq!(schedule.next(), Some(now + Duration::from_secs(1)));
    }

    #[test]
    fn a_nic_without_a_pause_is_left_alone() {
        let mut schedule = schedule();
        schedule.failed("never", Instant::now());
        schedule.failed("unknown", Instant::now());
        assert_eq!(schedule.next(), None);
    }
}
