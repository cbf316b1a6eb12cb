//! What the replicated log leads to: the state, and recent events.

use std::collections::{BTreeSet, VecDeque};
use std::io::Cursor;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use openraft::storage::{RaftStateMachine, Snapshot};
use openraft::{
    AnyError, Entry, EntryPayload, LogId, OptionalSend, RaftSnapshotBuilder, StorageError, StorageIOError,
    StoredMembership,
};
use pod_api::Event;
use pod_protocol::ids::LeaseId;
use pod_state::{Shadow, State};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::change::{Change, LogOwner, Member, Outcome, Replicated};
use super::log::{LogFile, Meta, cause};
use crate::journal::EVENTS_MAX;
use crate::store::StoreError;

/// What a log of changes leads to: what all replicas know.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Known {
    /// The state; none before [`Change::Begin`].
    pub(crate) state: Option<State>,
    /// Recent events, oldest first.
    pub(crate) events: VecDeque<Event>,
    /// How many terms of office there were before there were replicas.
    pub(crate) terms: u64,
}

/// What is [`Known`], as it is written.
#[derive(Serialize)]
pub(crate) struct Knowledge<'a> {
    pub(crate) state: Option<&'a State>,
    pub(crate) events: &'a VecDeque<Event>,
    pub(crate) terms: u64,
}

impl Known {
    /// Makes a change, or says why it cannot be made although it was decided.
    pub(crate) fn change(&mut self, change: Change) -> Result<Outcome, String> {
        match change {
            // A second one comes from a beginner that did not hear what became of its first.
            Change::Begin { .. } if self.state.is_some() => return Ok(Outcome::Void),
            Change::Begin { state, events, terms } => {
                *self = Self { state: Some(*state), events: events.into(), terms };
            }
            Change::Turn { base, commands, events } => {
                let Some(state) = self.state.as_mut().filter(|state| state.index == base) else {
                    return Ok(Outcome::Void);
                };
                // Without commands the index stays, so what was told already is told again.
                let last = self.events.back().map_or(0, |event| event.sequence);
                if commands.is_empty() && events.first().is_some_and(|event| event.sequence <= last) {
                    return Ok(Outcome::Void);
                }
                for command in &commands {
                    state.apply(command).map_err(|refusal| {
                        format!("command {} of the log is refused here: {refusal}", state.index + 1)
                    })?;
                }
                self.events.extend(events);
            }
        }
        let excess = self.events.len().saturating_sub(EVENTS_MAX);
        self.events.drain(..excess);
        Ok(Outcome::Done)
    }
}

#[derive(Debug)]
struct Applied {
    last: Option<LogId<LogOwner>>,
    membership: StoredMembership<LogOwner, Member>,
    known: Known,
    /// What others have of the state.
    shadow: Shadow,
    /// The index of the state since which the shadow notes which leases change.
    noted_since: u64,
}

impl Applied {
    fn new(
        last: Option<LogId<LogOwner>>,
        membership: StoredMembership<LogOwner, Member>,
        known: Known,
    ) -> Self {
        Self { last, membership, known, shadow: Shadow::default(), noted_since: u64::MAX }
    }

    /// Without copying all of the state.
    fn copy(&mut self) -> Option<Arc<State>> {
        let Self { known, shadow, .. } = self;
        known.state.as_mut().map(|state| shadow.of(state))
    }
}

/// What is known at one moment, for those who look.
#[derive(Debug)]
pub(crate) struct Sight {
    /// The state, if there is one.
    pub(crate) state: Option<Arc<State>>,
    /// The leases that may be other ones than in a state of this index or a later one, if that is known.
    pub(crate) leases: Option<(u64, BTreeSet<LeaseId>)>,
    /// Events that whoever looks has not seen, oldest first.
    pub(crate) events: Vec<Event>,
}

/// Shared between Raft and those who look.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    applied: Arc<Mutex<Applied>>,
    file: Arc<LogFile>,
    changes: Arc<watch::Sender<u64>>,
    renewals: Arc<watch::Sender<u64>>,
}

impl Machine {
    /// As the newest snapshot says; the log follows from there.
    pub(crate) fn open(file: Arc<LogFile>) -> Result<Self, StoreError> {
        let mut applied = Applied::new(None, StoredMembership::default(), Known::default());
        if let Some((meta, data)) = file.snapshot()? {
            let known = serde_json::from_str(&data).map_err(|error| StoreError::LogDamaged {
                path: file.path().to_path_buf(),
                reason: format!("its snapshot: {error}"),
            })?;
            applied = Applied::new(meta.last_log_id, meta.last_membership, known);
        }
        let (changes, renewals) = (Arc::new(watch::Sender::new(0)), Arc::new(watch::Sender::new(0)));
        Ok(Self { applied: Arc::new(Mutex::new(applied)), file, changes, renewals })
    }

    /// Looks at what is known.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Known) -> T) -> T {
        look(&self.applied().known)
    }

    /// What is known for others to read, and the events after this one.
    pub(crate) fn sight(&self, last_event: u64) -> Sight {
        let mut applied = self.applied();
        let state = applied.copy();
        let since =
            std::mem::replace(&mut applied.noted_since, state.as_ref().map_or(u64::MAX, |it| it.index));
        let leases = applied.shadow.take_leases().map(|leases| (since, leases));
        let newer = applied.known.events.iter().rev().take_while(|event| event.sequence > last_event);
        let mut events: Vec<Event> = newer.cloned().collect();
        events.reverse();
        Sight { state, leases, events }
    }

    /// The index of the state; 0 before there is one.
    pub(crate) fn index(&self) -> u64 {
        self.look(|known| known.state.as_ref().map_or(0, |state| state.index))
    }

    /// Tells when something else is known.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Tells up to which entry nothing should be left of the log, since a replica of an older version may have to read it.
    pub(crate) fn renewals(&self) -> watch::Receiver<u64> {
        self.renewals.subscribe()
    }

    fn applied(&self) -> MutexGuard<'_, Applied> {
        // Whoever panics while something is applied ends the process.
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Whether it is time for a snapshot.
    pub(super) fn take_outgrown(&self) -> bool {
        self.file.take_outgrown()
    }

    async fn install(&self, meta: &Meta, snapshot: Cursor<Vec<u8>>) -> Result<(), StorageError<LogOwner>> {
        let damaged = |error: AnyError| StorageIOError::read_snapshot(Some(meta.signature()), error);
        let data =
            String::from_utf8(snapshot.into_inner()).map_err(|error| damaged(AnyError::new(&error)))?;
        let known: Known = aside(|| serde_json::from_str(&data))
            .map_err(|error: serde_json::Error| damaged(AnyError::new(&error)))?;
        self.keep(meta, &data, known.state.as_ref()).await?;
        let applied = Applied::new(meta.last_log_id, meta.last_membership.clone(), known);
        let last = meta.last_log_id.map_or(0, |id| id.index);
        tracing::info!(last, bytes = data.len(), "what was decided before came as a snapshot");
        // What was there before takes its time to go.
        let before = std::mem::replace(&mut *self.applied(), applied);
        drop(before);
        self.tell();
        Ok(())
    }

    async fn keep(
        &self,
        meta: &Meta,
        data: &str,
        state: Option<&State>,
    ) -> Result<(), StorageError<LogOwner>> {
        let minor = state.map_or(0, |state| state.options.protocol_minor);
        let kept = self.file.keep_snapshot(meta, data, minor).await;
        kept.map_err(|error| StorageIOError::write_snapshot(Some(meta.signature()), cause(&error)).into())
    }
}

/// Does what takes long where others wait for this thread: another one does what they wait for.
fn aside<T>(work: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

impl RaftSnapshotBuilder<Replicated> for Machine {
    async fn build_snapshot(&mut self) -> Result<Snapshot<Replicated>, StorageError<LogOwner>> {
        let (meta, state, events, terms) = {
            let mut applied = self.applied();
            let index = applied.last.map_or(0, |id| id.index);
            let meta = Meta {
                last_log_id: applied.last,
                last_membership: applied.membership.clone(),
                snapshot_id: format!("{index}-{}", uuid::Uuid::new_v4()),
            };
            let state = applied.copy();
            (meta, state, applied.known.events.clone(), applied.known.terms)
        };
        let knowledge = Knowledge { state: state.as_deref(), events: &events, terms };
        let data = aside(|| serde_json::to_string(&knowledge))
            .map_err(|error| StorageIOError::read_state_machine(AnyError::new(&error)))?;
        self.keep(&meta, &data, state.as_deref()).await?;
        Ok(Snapshot { meta, snapshot: Box::new(Cursor::new(data.into_bytes())) })
    }
}

impl RaftStateMachine<Replicated> for Machine {
    type SnapshotBuilder = Self;

    async fn applied_state(
        &mut self,
    ) -> Result<(Option<LogId<LogOwner>>, StoredMembership<LogOwner, Member>), StorageError<LogOwner>> {
        let applied = self.applied();
        Ok((applied.last, applied.membership.clone()))
    }

    async fn apply<I>(&mut self, entries: I) -> Result<Vec<Outcome>, StorageError<LogOwner>>
    where
        I: IntoIterator<Item = Entry<Replicated>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let (mut outcomes, mut renewed) = (Vec::new(), None);
        {
            let mut applied = self.applied();
            for entry in entries {
                applied.last = Some(entry.log_id);
                if matches!(&entry.payload, EntryPayload::Normal(change) if change.may_lower_protocol()) {
                    renewed = Some(entry.log_id.index);
                }
                outcomes.push(match entry.payload {
                    EntryPayload::Blank => Outcome::Done,
                    EntryPayload::Membership(members) => {
                        applied.membership = StoredMembership::new(Some(entry.log_id), members);
                        Outcome::Done
                    }
                    EntryPayload::Normal(change) => applied.known.change(change).map_err(|reason| {
                        // Nor will a snapshot be kept that is under way: Raft ends.
                        self.file.snapshot_came(false);
                        StorageIOError::apply(entry.log_id, AnyError::error(reason))
                    })?,
                });
            }
        }
        self.tell();
        if let Some(index) = renewed {
            self.renewals.send_replace(index);
        }
        Ok(outcomes)
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn begin_receiving_snapshot(&mut self) -> Result<Box<Cursor<Vec<u8>>>, StorageError<LogOwner>> {
        self.file.expect_snapshot();
        Ok(Box::new(Cursor::new(Vec::new())))
    }

    async fn install_snapshot(
        &mut self,
        meta: &Meta,
        snapshot: Box<Cursor<Vec<u8>>>,
    ) -> Result<(), StorageError<LogOwner>> {
        let installed = self.install(meta, *snapshot).await;
        self.file.snapshot_came(installed.is_ok());
        installed
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<Replicated>>, StorageError<LogOwner>> {
        let kept = self.file.snapshot();
        let kept = kept.map_err(|error| StorageIOError::read_snapshot(None, cause(&error)))?;
        Ok(kept.map(|(meta, data)| Snapshot { meta, snapshot: Box::new(Cursor::new(data.into_bytes())) }))
    }
}

#[cfg(test)]
pub(super) mod tests;
