//! Recent events: the last 10 000, for whoever asks for them or follows them.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pod_api::{Event, EventList};
use pod_state::Effect;
use tokio::sync::watch;

/// How many events are kept.
pub const EVENTS_MAX: usize = 10_000;

/// What is told of these effects, at this time of day in ms, after the event with the number `last`.
pub(crate) fn told_of(effects: &[Effect], last: u64, time_ms: u64) -> Vec<Event> {
    let told = effects.iter().filter_map(|effect| match effect {
        Effect::Event { kind, subject, message } => Some((*kind, subject.clone(), message.clone())),
        Effect::Clear(_) | Effect::Fence { .. } => None,
    });
    let numbered = (last + 1..).zip(told);
    let event = |(sequence, (kind, subject, message))| Event { sequence, time_ms, kind, subject, message };
    numbered.map(event).collect()
}

/// See the [module](self).
#[derive(Debug)]
pub struct Journal {
    events: Mutex<VecDeque<Event>>,
    last: watch::Sender<u64>,
}

impl Journal {
    /// Begins with the events of earlier lives.
    pub fn new(events: Vec<Event>) -> Self {
        let last = events.last().map_or(0, |event| event.sequence);
        let mut events = VecDeque::from(events);
        events.drain(..events.len().saturating_sub(EVENTS_MAX));
        Self { events: Mutex::new(events), last: watch::Sender::new(last) }
    }

    /// The sequence number of the newest event.
    pub fn last(&self) -> u64 {
        *self.last.borrow()
    }

    /// The sequence number of the oldest event that is kept once `more` events were added.
    pub fn first_after(&self, more: usize) -> u64 {
        (self.last() + more as u64 + 1).saturating_sub(EVENTS_MAX as u64)
    }

    /// Adds events, whose sequence numbers go on from [`Journal::last`]. What is there already is not added again.
    pub fn add(&self, added: Vec<Event>) {
        let Some(last) = added.last().map(|event| event.sequence) else { return };
        let mut events = self.lock();
        let known = events.back().map_or(0, |event| event.sequence);
        if last <= known {
            return;
        }
        events.extend(added.into_iter().filter(|event| event.sequence > known));
        let excess = events.len().saturating_sub(EVENTS_MAX);
        events.drain(..excess);
        drop(events);
        self.last.send_replace(last);
    }

    /// The events after a sequence number, `limit` at most, oldest first.
    pub fn after(&self, sequence: u64, limit: usize) -> EventList {
        let events = self.lock();
        let first = events.front().map_or_else(|| self.last() + 1, |event| event.sequence);
        let start = events.partition_point(|event| event.sequence <= sequence);
        let last = events.back().map_or(first.saturating_sub(1), |event| event.sequence);
        EventList { events: events.iter().skip(start).take(limit).cloned().collect(), first, last }
    }

    /// Tells when there are newer events.
    pub fn follow(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Event>> {
        // A list of events is whole after every step, whoever panicked.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use pod_api::EventKind;

    use super::*;

    fn event(sequence: u64) -> Event {
        let (subject, message) = (String::new(), String::new());
        Event { sequence, time_ms: 0, kind: EventKind::LinkUp, subject, message }
    }

    #[test]
    fn last_ten_thousand_are_kept() {
        let journal = Journal::new((1..=5).map(event).collect());
        journal.add((6..=EVENTS_MAX as u64 + 3).map(event).collect());
        let list = journal.after(0, usize::MAX);
        assert_eq!((list.first, list.events.len()), (4, EVENTS_MAX));
        assert_eq!(list.last, EVENTS_MAX as u64 + 3);
        assert_eq!(journal.after(0, 0).last, list.last, "it is known without them");
        assert_eq!(journal.first_after(0), 4);
        assert_eq!(journal.after(EVENTS_MAX as u64 + 2, 10).events, [event(EVENTS_MAX as u64 + 3)]);
        assert!(journal.after(u64::MAX, 10).events.is_empty());
    }

    #[test]
    fn empty_journal_says_where_it_will_begin() {
        let empty = EventList { events: Vec::new(), first: 1, last: 0 };
        assert_eq!(Journal::new(Vec::new()).after(0, 10), empty);
    }
}
