//! What must hold after every step, whatever goes wrong.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use openraft::{Entry, EntryPayload, LogId};
use pod_state::model::{Apart, Changed};
use pod_state::{Command, State};

use super::super::change::{Change, LogOwner, Outcome, Replicated};
use super::super::machine::Known;
use crate::simulation::relief::Moves;

/// What is compared where all have applied the same.
#[derive(Clone, Debug)]
enum Compared {
    /// All that is known.
    All,
    /// What a change touched, and the events that it tells: all of a large pod takes too long.
    Changed(Box<Changed>, usize),
}

/// Of what is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Digest {
    state: u64,
    events: u64,
}

impl Compared {
    fn of(&self, known: &Known) -> Digest {
        let state = known.state.as_ref().map_or(0, |state| self.of_state(state));
        let last = match self {
            Self::All => usize::MAX,
            Self::Changed(_, events) => *events,
        };
        let mut events = DefaultHasher::new();
        let told = known.events.iter().rev().take(last);
        told.for_each(|event| (event.sequence, &event.message).hash(&mut events));
        Digest { state, events: events.finish() }
    }

    fn of_state(&self, state: &State) -> u64 {
        match self {
            // As replicas keep it: one that cannot be written fails the test.
            Self::All => digest(&serde_json::to_vec(state).expect("a state is JSON")),
            Self::Changed(changed, _) => changed.digest(state),
        }
    }
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// What stands at an index of the log for good.
#[derive(Debug)]
struct Committed {
    log_id: LogId<LogOwner>,
    /// Of the entry.
    entry: u64,
    compared: Compared,
    /// Of what it led to.
    led_to: Digest,
}

/// Knows what was committed, who led, and what was promised.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// After each entry only that is compared which it changed.
    pub(super) compares_changes: bool,
    committed: BTreeMap<u64, Committed>,
    /// What it leads to.
    pub(super) known: Known,
    /// The state at each of its indices: what is compared of it, and its digest.
    states: BTreeMap<u64, (Compared, u64)>,
    leaders: BTreeMap<u64, LogOwner>,
    /// How often what has this key was done.
    done: BTreeMap<String, u64>,
    /// What was answered not to be done, now or later.
    never: BTreeMap<String, String>,
    pub(super) voids: u64,
    apart: Apart,
    /// What moved off devices that did too much, where daemons tell what they do.
    pub(super) moves: Option<Moves>,
    /// Machines have done something since it was asked.
    pub(super) has_news: bool,
    /// The first thing that a machine did wrong.
    pub(super) violation: Option<String>,
}

impl Oracle {
    /// A machine has applied something: what others have there, or what comes next.
    pub(super) fn applied(
        &mut self,
        replica: u16,
        (entry, outcome): (&Entry<Replicated>, Outcome),
        found: &Known,
    ) {
        self.has_news = true;
        if let Err(what) = self.compare(replica, (entry, outcome), found) {
            self.violation.get_or_insert(what);
        }
    }

    /// A snapshot has taken the place of all that a machine knew.
    pub(super) fn installed(&mut self, replica: u16, index: u64, found: &Known) {
        self.has_news = true;
        let what = match self.committed.get(&index) {
            Some(known) if known.led_to == known.compared.of(found) => return,
            Some(_) => "that others do not have",
            None => "which nobody has applied",
        };
        self.violation.get_or_insert(format!("replica {replica} got a snapshot of {index}, {what}"));
    }

    fn compare(
        &mut self,
        replica: u16,
        (entry, outcome): (&Entry<Replicated>, Outcome),
        found: &Known,
    ) -> Result<(), String> {
        let (log_id, index) = (entry.log_id, entry.log_id.index);
        // Of a snapshot the log says nothing any more, but somebody applied what is in it.
        let entry_digest = digest(&serde_json::to_vec(&entry.payload).expect("an entry is JSON"));
        if let Some(known) = self.committed.get(&index) {
            if known.log_id != log_id || known.entry != entry_digest {
                return Err(format!(
                    "replica {replica} has {log_id} committed where others have {}: one of both is lost",
                    known.log_id
                ));
            }
            if known.led_to != known.compared.of(found) {
                return Err(format!("replica {replica} differs from others after {log_id}"));
            }
            return Ok(());
        }
        let next = self.committed.last_key_value().map_or(0, |(last, _)| last + 1);
        if index != next {
            return Err(format!("replica {replica} applied {index}, and nobody has applied {next}"));
        }
        let before = self.known.state.as_ref().map(|state| state.index);
        let mut told = 0;
        if let EntryPayload::Normal(change) = &entry.payload {
            self.change(change, outcome)?;
            if let Change::Turn { events, .. } = change {
                told = events.len();
            }
        }
        let compared = match self.known.state.as_mut().filter(|_| self.compares_changes) {
            Some(state) => Compared::Changed(Box::new(Changed::take(state)), told),
            None => Compared::All,
        };
        let led_to = compared.of(&self.known);
        if led_to != compared.of(found) {
            return Err(format!("replica {replica} made something else of {log_id} than it says"));
        }
        if let Some(state) = &self.known.state {
            match self.states.get(&state.index) {
                Some((Compared::All, known)) if *known != led_to.state => {
                    return Err(format!("there are two states with index {}", state.index));
                }
                Some((Compared::Changed(..), _)) if before != Some(state.index) => {
                    return Err(format!("there are two states with index {}", state.index));
                }
                Some(_) => {}
                None => drop(self.states.insert(state.index, (compared.clone(), led_to.state))),
            }
        }
        self.committed.insert(index, Committed { log_id, entry: entry_digest, compared, led_to });
        Ok(())
    }

    /// Whether a machine knows the same state, where it is as far as any.
    pub(super) fn is_the_same(&self, replica: u16, state: &State) -> Result<bool, String> {
        match &self.known.state {
            Some(known) if known.index == state.index && known != state => Err(format!(
                "replica {replica} differs from others where the state has index {}",
                state.index
            )),
            known => Ok(known.as_ref().is_some_and(|known| known.index == state.index)),
        }
    }

    fn change(&mut self, change: &Change, outcome: Outcome) -> Result<(), String> {
        let made = self.known.change(change.clone())?;
        if made != outcome {
            return Err(format!("{change} is {outcome:?}, and should be {made:?}"));
        }
        if made == Outcome::Void {
            self.voids += 1;
            return Ok(());
        }
        let Change::Turn { commands, events, .. } = change else { return Ok(()) };
        for command in commands {
            let Command::Request { key: Some(key), .. } = command else { continue };
            let times = self.done.entry(key.key.clone()).or_default();
            *times += 1;
            if *times > 1 {
                return Err(format!("{} was done {times} times", key.key));
            }
            if let Some(why) = self.never.get(&key.key) {
                return Err(format!("{} was done, and the answer had been: {why}", key.key));
            }
        }
        if let Some(state) = &self.known.state {
            self.apart.check(state)?;
            if let Some(moves) = &mut self.moves {
                moves.note(commands.iter(), events.clone(), state)?;
            }
        }
        let sequences = || self.known.events.iter().map(|event| event.sequence);
        if sequences().zip(sequences().skip(1)).any(|(one, next)| next <= one) {
            return Err("an event was told twice".to_owned());
        }
        Ok(())
    }

    /// Somebody leads in a term.
    pub(super) fn leads(&mut self, term: u64, owner: LogOwner) -> Result<(), String> {
        match self.leaders.insert(term, owner) {
            Some(other) if other != owner => Err(format!("{owner} and {other} lead in term {term}")),
            _ => Ok(()),
        }
    }

    /// A client was told that what has this key is done.
    pub(super) fn promised(&self, key: &str) -> Result<(), String> {
        if self.done.contains_key(key) { Ok(()) } else { Err(format!("{key} was promised, and is not done")) }
    }

    /// A client was told that what has this key is not done, nor will be.
    pub(super) fn refused(&mut self, key: &str, why: &str) -> Result<(), String> {
        if self.done.contains_key(key) {
            return Err(format!("{key} is done, and the answer was: {why}"));
        }
        self.never.insert(key.to_owned(), why.to_owned());
        Ok(())
    }

    /// A replica has told daemons what they should have in a state with this index.
    pub(super) fn told(&self, replica: u16, index: u64) -> Result<(), String> {
        let committed = self.known.state.as_ref().map_or(0, |state| state.index);
        if index > committed {
            return Err(format!(
                "replica {replica} tells daemons of state {index}, and {committed} is the last one that is committed"
            ));
        }
        Ok(())
    }

    /// A replica shows this.
    pub(super) fn shown(&self, replica: u16, state: &State) -> Result<(), String> {
        // Before it knows anything, it shows an empty pod.
        let known = self.states.get(&state.index);
        if state.index == 0 || known.is_some_and(|(compared, known)| *known == compared.of_state(state)) {
            return Ok(());
        }
        Err(format!("replica {replica} shows a state with index {} that is not committed", state.index))
    }

    /// The last entry that anybody applied.
    pub(super) fn last(&self) -> Option<u64> {
        self.committed.last_key_value().map(|(last, _)| *last)
    }

    pub(super) fn leaders(&self) -> usize {
        self.leaders.len()
    }
}
