//! The log and the machine as Raft gets them here: the real ones, with somebody who watches, and broken on purpose if wished.

use std::fmt::Debug;
use std::io::Cursor;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use openraft::storage::{LogFlushed, RaftLogStorage, RaftStateMachine, Snapshot};
use openraft::{
    Entry, EntryPayload, LogId, LogState, OptionalSend, RaftLogReader, StorageError, StoredMembership, Vote,
};
use pod_state::Command;

use super::super::change::{Change, LogOwner, Member, Outcome, Replicated};
use super::super::log::{Log, Meta};
use super::super::machine::Machine;
use super::Broken;
use super::oracle::Oracle;

/// Has all that machines do looked at, at the moment when they do it.
#[derive(Clone, Debug, Default)]
pub(super) struct Witness(Arc<Mutex<Oracle>>);

impl Witness {
    /// Whoever looks at it.
    pub(super) fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A log that may forget its vote.
pub(super) struct WatchedLog {
    pub(super) log: Log,
    pub(super) broken: Option<Broken>,
}

impl RaftLogReader<Replicated> for WatchedLog {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry<Replicated>>, StorageError<LogOwner>> {
        self.log.try_get_log_entries(range).await
    }
}

impl RaftLogStorage<Replicated> for WatchedLog {
    type LogReader = Log;

    async fn get_log_state(&mut self) -> Result<LogState<Replicated>, StorageError<LogOwner>> {
        self.log.get_log_state().await
    }

    async fn get_log_reader(&mut self) -> Log {
        self.log.get_log_reader().await
    }

    async fn save_vote(&mut self, vote: &Vote<LogOwner>) -> Result<(), StorageError<LogOwner>> {
        if self.broken == Some(Broken::ForgetsItsVote) {
            return Ok(());
        }
        self.log.save_vote(vote).await
    }

    async fn read_vote(&mut self) -> Result<Option<Vote<LogOwner>>, StorageError<LogOwner>> {
        self.log.read_vote().await
    }

    async fn save_committed(
        &mut self,
        committed: Option<LogId<LogOwner>>,
    ) -> Result<(), StorageError<LogOwner>> {
        self.log.save_committed(committed).await
    }

    async fn read_committed(&mut self) -> Result<Option<LogId<LogOwner>>, StorageError<LogOwner>> {
        self.log.read_committed().await
    }

    async fn append<I>(
        &mut self,
        entries: I,
        callback: LogFlushed<Replicated>,
    ) -> Result<(), StorageError<LogOwner>>
    where
        I: IntoIterator<Item = Entry<Replicated>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        self.log.append(entries, callback).await
    }

    async fn truncate(&mut self, log_id: LogId<LogOwner>) -> Result<(), StorageError<LogOwner>> {
        self.log.truncate(log_id).await
    }

    async fn purge(&mut self, log_id: LogId<LogOwner>) -> Result<(), StorageError<LogOwner>> {
        self.log.purge(log_id).await
    }
}

/// A machine whose every step is told.
pub(super) struct WatchedMachine {
    pub(super) replica: u16,
    pub(super) machine: Machine,
    pub(super) witness: Witness,
    pub(super) broken: Option<Broken>,
}

impl RaftStateMachine<Replicated> for WatchedMachine {
    type SnapshotBuilder = Machine;

    async fn applied_state(
        &mut self,
    ) -> Result<(Option<LogId<LogOwner>>, StoredMembership<LogOwner, Member>), StorageError<LogOwner>> {
        self.machine.applied_state().await
    }

    async fn apply<I>(&mut self, entries: I) -> Result<Vec<Outcome>, StorageError<LogOwner>>
    where
        I: IntoIterator<Item = Entry<Replicated>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut outcomes = Vec::new();
        let entries: Vec<_> = entries.into_iter().collect();
        for entry in entries {
            let mut made = entry.clone();
            if self.broken == Some(Broken::TakesAnyBase)
                && let EntryPayload::Normal(Change::Turn { base, .. }) = &mut made.payload
            {
                *base = self.machine.index();
            }
            if self.broken == Some(Broken::SwapsCommands)
                && self.replica == 1
                && let EntryPayload::Normal(Change::Turn { commands, .. }) = &mut made.payload
                && let [Command::Request { .. }, Command::Request { .. }, ..] = commands.as_slice()
            {
                commands.swap(0, 1);
            }
            let outcome = self.machine.apply([made]).await?;
            for outcome in &outcome {
                let made = (&entry, *outcome);
                self.machine.look(|known| self.witness.oracle().applied(self.replica, made, known));
            }
            outcomes.extend(outcome);
        }
        Ok(outcomes)
    }

    async fn get_snapshot_builder(&mut self) -> Machine {
        self.machine.get_snapshot_builder().await
    }

    async fn begin_receiving_snapshot(&mut self) -> Result<Box<Cursor<Vec<u8>>>, StorageError<LogOwner>> {
        self.machine.begin_receiving_snapshot().await
    }

    async fn install_snapshot(
        &mut self,
        meta: &Meta,
        snapshot: Box<Cursor<Vec<u8>>>,
    ) -> Result<(), StorageError<LogOwner>> {
        self.machine.install_snapshot(meta, snapshot).await?;
        if let Some(log_id) = meta.last_log_id {
            let index = log_id.index;
            self.machine.look(|known| self.witness.oracle().installed(self.replica, index, known));
        }
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<Replicated>>, StorageError<LogOwner>> {
        self.machine.get_current_snapshot().await
    }
}
