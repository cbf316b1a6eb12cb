//! A state that an etcd keeps: the log of changes since a snapshot, under a prefix of its own.
//!
//! | key | value |
//! |---|---|
//! | `leader` | who the controller is; gone with its lease |
//! | `term` | the term of office, counted up by whoever becomes the controller |
//! | `head` | how far the log goes, and which snapshot it follows |
//! | `log/SEQUENCE/PART` | a change; large ones have several parts |
//! | `snapshot/NUMBER/PART` | what the log had led to |
//!
//! Whatever a controller writes it writes on condition that `term` and `head` are as it left them. So of two controllers
//! one can write, whatever they believe of leases; and a change whose answer was lost can be sent again: if it had been
//! made, `head` is what it made of it.

mod address;
mod error;
mod gateway;
mod link;
mod login;
mod office;
mod snapshot;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use pod_api::Event;
use pod_state::{Command, State};
use serde::{Deserialize, Serialize};

use super::{Damage, Length, Recovered, StoreError, seal, unseal};
use crate::journal::EVENTS_MAX;
use crate::replication::{Change, Known, Outcome};
use gateway::{Compare, KeyValue, Operation, Transacted, Transaction};
use link::Place;
use office::Office;
use snapshot::{Writing, Written};

pub use address::{EtcdAddress, ParseEtcdAddressError};
pub use error::EtcdError;
pub use link::EtcdCredentials;
pub(crate) use link::EtcdLink;
pub use login::EtcdUser;
pub(crate) use office::Loss;

/// The format of the values below; another one is refused.
const FORMAT: u64 = 1;
/// How large a value is at most: etcd refuses requests above 1.5 MiB, and answers of several are to stay below 4 MiB.
const PART_BYTES: usize = 256 << 10;
/// How many values are asked for at once.
const PARTS_PER_ANSWER: i64 = 8;

/// How far the log goes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    format: u64,
    term: u64,
    /// The last change; 0 before the first one.
    sequence: u64,
    snapshot: Option<Snapshot>,
}

/// A snapshot that is whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Snapshot {
    number: u64,
    /// The last change that is in it.
    sequence: u64,
    parts: usize,
}

/// What can be read of every format.
#[derive(Deserialize)]
struct Format {
    format: u64,
}

/// The state's place in etcd, for as long as nobody else takes it.
#[derive(Debug)]
pub(crate) struct EtcdStore {
    link: Arc<EtcdLink>,
    office: Office,
    head: Head,
    revision: i64,
    events: VecDeque<Event>,
    /// Nothing that is in the log is to stay there.
    renews: bool,
    /// The head with a snapshot of which it is not known whether it was kept.
    open: Option<Head>,
    /// What was logged since the newest snapshot.
    log: Length,
    snapshot_bytes: u64,
    writing: Option<Writing>,
}

impl EtcdStore {
    /// Becomes the one who writes there, in a term of office that is larger than all before and than `earlier`.
    pub(crate) fn open(link: &Arc<EtcdLink>, earlier: u64) -> Result<(Self, Recovered), StoreError> {
        Self::open_beside(link, earlier, |time, _| {
            std::thread::sleep(time);
            true
        })
    }

    /// As [`EtcdStore::open`], for who has other duties: `pause` passes some time while another controller counts as there, which the
    /// text says, and says whether to go on waiting.
    pub(crate) fn open_beside(
        link: &Arc<EtcdLink>,
        earlier: u64,
        pause: impl FnMut(Duration, &str) -> bool,
    ) -> Result<(Self, Recovered), StoreError> {
        let term = |place: &Place, found: Option<&KeyValue>| Ok(read_head(place, found)?.0.term);
        let office = Office::take(link, earlier, term, pause)?;
        let (head, revision) = office.head(|found| read_head(&link.place, found))?;
        let (link, events) = (Arc::clone(link), VecDeque::new());
        let mut store = Self {
            link,
            office,
            head,
            revision,
            events,
            renews: false,
            open: None,
            log: Length::default(),
            snapshot_bytes: 0,
            writing: None,
        };
        let known = store.read()?;
        store.events.clone_from(&known.events);
        let recovered =
            Recovered { state: known.state, events: known.events.into(), term: store.office.term() };
        Ok((store, recovered))
    }

    /// Says when somebody else has taken the place.
    pub(crate) fn loss(&self) -> Arc<Loss> {
        self.office.loss()
    }

    /// Keeps what a pod begins with.
    pub(crate) fn begin(&mut self, state: &State, events: Vec<Event>) -> Result<(), StoreError> {
        let change = Change::Begin { state: Box::new(state.clone()), events: events.clone(), terms: 0 };
        self.append(&change)?;
        self.events = events.into();
        Ok(())
    }

    /// Keeps commands and events for good, together. After what follows from the commands is done, [`tidy`](Self::tidy) sees to the log.
    pub(crate) fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        events: &[Event],
        state: &State,
    ) -> Result<(), StoreError> {
        self.append(&Change::turn(commands, events, state))?;
        self.events.extend(events.iter().cloned());
        let excess = self.events.len().saturating_sub(EVENTS_MAX);
        self.events.drain(..excess);
        self.renews |= commands.iter().any(|(_, command)| command.may_lower_protocol());
        if self.renews {
            match self.keep_snapshot(state) {
                Ok(()) => self.renews = false,
                // What was to be kept is. The next change tries again.
                Err(error) => tracing::warn!("the log in etcd grows: {error}"),
            }
        }
        Ok(())
    }

    /// Makes certain that nobody else has taken the place. Whoever comes waits until this one has not been heard of for as long as its
    /// lease lasts.
    pub(crate) fn confirm(&self) -> Result<(), StoreError> {
        Ok(self.office.head(|_| Ok(()))?)
    }

    fn append(&mut self, change: &Change) -> Result<(), StoreError> {
        self.settle()?;
        let written = self.take_written();
        let sequence = self.head.sequence + 1;
        let sealed = seal(change).map_err(|damage| self.damaged(damage.to_string()))?;
        let place = Arc::clone(&self.link.place);
        let (_, mut last) =
            self.write_parts(&sealed, |part| place.log(sequence, part), &place.log(sequence + 1, 0))?;
        let mut head = Head { term: self.office.term(), sequence, ..self.head.clone() };
        if let Some(Written { snapshot, .. }) = &written {
            last.extend(self.replaced_by(snapshot));
            head.snapshot = Some(snapshot.clone());
        }
        self.write_head(head, last)?;
        if let Some(Written { bytes, covers, .. }) = written {
            (self.log, self.snapshot_bytes) = (self.log.after(covers), bytes);
        }
        self.log.add(sealed.len());
        Ok(())
    }

    fn keep_snapshot(&mut self, state: &State) -> Result<(), StoreError> {
        self.stop_writing();
        let (place, sequence) = (Arc::clone(&self.link.place), self.head.sequence);
        let number = self.next_number();
        let known = Known { state: Some(state.clone()), events: self.events.clone(), terms: 0 };
        let sealed = seal(&known).map_err(|damage| self.damaged(damage.to_string()))?;
        let (parts, mut operations) =
            self.write_parts(&sealed, |part| place.snapshot(number, part), &place.snapshot(number + 1, 0))?;
        let snapshot = Snapshot { number, sequence, parts };
        operations.extend(self.replaced_by(&snapshot));
        let head = Head { snapshot: Some(snapshot), ..self.head.clone() };
        let written = self.write_head(head.clone(), operations);
        if matches!(written, Err(StoreError::Etcd(EtcdError::Away { open: true, .. }))) {
            self.open = Some(head);
        }
        written.map(|()| (self.log, self.snapshot_bytes) = (Length::default(), sealed.len() as u64))
    }

    fn next_number(&self) -> u64 {
        self.head.snapshot.as_ref().map_or(0, |before| before.number) + 1
    }

    /// Removes what a snapshot takes the place of.
    fn replaced_by(&self, snapshot: &Snapshot) -> [Operation; 2] {
        let place = &self.link.place;
        [
            Operation::delete(&place.snapshot(0, 0), &place.snapshot(snapshot.number, 0)),
            Operation::delete(&place.log(0, 0), &place.log(snapshot.sequence + 1, 0)),
        ]
    }

    /// Sees what became of a snapshot whose answer was lost. What is still under way of it comes to nothing after this: the head has
    /// another revision then, whether it was made or not.
    fn settle(&mut self) -> Result<(), StoreError> {
        if self.open.is_none() {
            return Ok(());
        }
        match self.write_head(self.head.clone(), Vec::new()) {
            Ok(()) => {
                self.open = None;
                Ok(())
            }
            // The change that waits for this was not sent.
            Err(StoreError::Etcd(EtcdError::Away { place, reason, advice, .. })) => {
                Err(EtcdError::Away { place, reason, advice, open: false }.into())
            }
            Err(other) => Err(other),
        }
    }

    /// Writes all parts but the last one, to which nothing leads yet. Returns how many there are, and what is left to do
    /// at once with what leads to them: the last part, and to remove what an attempt that failed may have left.
    fn write_parts(
        &self,
        sealed: &[u8],
        key: impl Fn(usize) -> String,
        end: &str,
    ) -> Result<(usize, Vec<Operation>), StoreError> {
        let parts: Vec<&[u8]> = sealed.chunks(PART_BYTES).collect();
        let mut last = Vec::new();
        for (part, bytes) in parts.iter().enumerate() {
            let put = Operation::put(&key(part), bytes);
            if part + 1 == parts.len() {
                last.push(put);
                last.push(Operation::delete(&key(parts.len()), end));
            } else {
                let answer = self.transact(vec![put])?;
                if !answer.succeeded {
                    return Err(self.taken_over(&answer));
                }
            }
        }
        Ok((parts.len(), last))
    }

    fn write_head(&mut self, head: Head, mut operations: Vec<Operation>) -> Result<(), StoreError> {
        let sealed = seal(&head).map_err(|damage| self.damaged(damage.to_string()))?;
        let key = &self.link.place.head;
        operations.push(Operation::put(key, &sealed));
        let answer = self.transact(operations)?;
        (self.head, self.revision) = if answer.succeeded {
            (head, answer.header.revision.0)
        } else {
            // Made by an earlier attempt whose answer was lost?
            let found = answer.found(key).ok_or_else(|| self.taken_over(&answer))?;
            let head = if found.value.0 == sealed {
                head
            } else {
                let open = self.open.clone().ok_or_else(|| self.taken_over(&answer))?;
                let theirs = seal(&open).map_err(|damage| self.damaged(damage.to_string()))?;
                if found.value.0 != theirs {
                    return Err(self.taken_over(&answer));
                }
                open
            };
            (head, found.mod_revision.0)
        };
        Ok(())
    }

    fn transact(&self, success: Vec<Operation>) -> Result<Transacted, StoreError> {
        let place = &self.link.place;
        let compare = vec![self.office.held(), Compare::unchanged(&place.head, self.revision)];
        let failure = vec![Operation::get(&place.head), Operation::get(&place.leader)];
        Ok(self.link.transact(&Transaction { compare, success, failure })?)
    }

    fn taken_over(&self, answer: &Transacted) -> StoreError {
        if self.revision != 0 && answer.found(&self.link.place.head).is_none() {
            return self.gone();
        }
        self.office.taken_over(answer.found(&self.link.place.leader)).into()
    }

    /// There is nothing, although there was.
    pub(crate) fn gone(&self) -> StoreError {
        self.damaged("what this controller kept there is gone")
    }

    fn damaged(&self, reason: impl Into<String>) -> StoreError {
        self.link.damaged(reason).into()
    }

    /// Reads what there is.
    fn read(&mut self) -> Result<Known, StoreError> {
        let (place, head) = (Arc::clone(&self.link.place), self.head.clone());
        let (mut known, first) = match &head.snapshot {
            Some(Snapshot { number, sequence, parts }) => {
                let found = self.link.range(&place.snapshot(*number, 0), &place.snapshot(number + 1, 0))?;
                if found.len() != *parts {
                    return Err(
                        self.damaged(format!("{} of {parts} parts of its snapshot are there", found.len()))
                    );
                }
                let sealed = joined(&found);
                self.snapshot_bytes = sealed.len() as u64;
                (unseal::<Known>(&sealed).map_err(|damage| self.damaged(damage.to_string()))?, sequence + 1)
            }
            None => (Known::default(), 1),
        };
        let found = self.link.range(&place.log(first, 0), &place.log(head.sequence + 1, 0))?;
        let mut rest = found.as_slice();
        for sequence in first..=head.sequence {
            let prefix = place.log_of(sequence);
            let parts = rest.iter().take_while(|part| part.key.0.starts_with(prefix.as_bytes())).count();
            if parts == 0 {
                return Err(self.damaged(format!("change {sequence} is missing")));
            }
            let (entry, after) = rest.split_at(parts);
            rest = after;
            let sealed = joined(entry);
            self.log.add(sealed.len());
            let change = unseal::<Change>(&sealed).map_err(|damage| self.damaged(damage.to_string()))?;
            match known.change(change) {
                Ok(Outcome::Done) => {}
                Ok(Outcome::Void) => {
                    return Err(self.damaged(format!("change {sequence} is not of the state before it")));
                }
                Err(reason) => return Err(self.damaged(reason)),
            }
        }
        Ok(known)
    }
}

fn joined(parts: &[KeyValue]) -> Vec<u8> {
    parts.iter().flat_map(|part| part.value.0.iter().copied()).collect()
}

/// The head, and its revision; 0 where there is none.
fn read_head(place: &Place, found: Option<&KeyValue>) -> Result<(Head, i64), EtcdError> {
    let Some(found) = found else { return Ok((Head { format: FORMAT, ..Head::default() }, 0)) };
    let place = || place.to_string();
    let damaged = |damage: Damage| EtcdError::Damaged { place: place(), reason: damage.to_string() };
    let Format { format } = unseal(&found.value.0).map_err(damaged)?;
    if format != FORMAT {
        return Err(EtcdError::Format { place: place(), found: format });
    }
    let head = unseal(&found.value.0).map_err(damaged)?;
    Ok((head, found.mod_revision.0))
}

#[cfg(test)]
mod tests;
