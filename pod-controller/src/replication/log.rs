//! A replica's log, its promises and its newest snapshot, in one file.
//!
//! Every value carries a checksum. A log that is damaged anywhere is refused as a whole: cut off, it would lack what
//! others count on.

mod snapshot;

use std::fmt::Debug;
use std::ops::{Bound, Range, RangeBounds};
use std::path::Path;
use std::sync::{Arc, Mutex};

use openraft::storage::{LogFlushed, RaftLogStorage};
use openraft::{
    AnyError, Entry, LogId, LogState, OptionalSend, RaftLogReader, SnapshotMeta, StorageError,
    StorageIOError, Vote,
};
use redb::{ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::change::{LogOwner, Member, Replicated};
use crate::store::{Database, Failure, StoreError, seal, unseal};
use snapshot::Extent;
pub(crate) use snapshot::Sizes;

/// The format of the values below; another one is refused.
const FORMAT: u64 = 1;
/// The format where the snapshot is in parts.
const FORMAT_IN_PARTS: u64 = 2;

/// How many bytes of entries another replica is sent at once, if it is more than one. Raft waits one heartbeat for the answer.
const APPEND_BYTES: usize = 64 << 10;

const FACTS: TableDefinition<&str, &[u8]> = TableDefinition::new("replica");
const ENTRIES: TableDefinition<u64, &[u8]> = TableDefinition::new("replicated log");
const SNAPSHOT: TableDefinition<(), &[u8]> = TableDefinition::new("replicated snapshot");

pub(crate) type Meta = SnapshotMeta<LogOwner, Member>;

/// The file.
#[derive(Debug)]
pub(crate) struct LogFile {
    database: Database,
    owner: LogOwner,
    coming: watch::Sender<Coming>,
    extent: Mutex<Extent>,
    sizes: Sizes,
    /// Whoever keeps a snapshot, one after the other.
    keeping: tokio::sync::Mutex<()>,
}

/// A snapshot of another replica that is to take the place of what is in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coming {
    /// There is none under way.
    Nothing,
    /// It is being received, or about to be kept.
    Soon,
    /// It could not be kept.
    Failed,
}

/// Shares a [`LogFile`] with Raft.
#[derive(Clone, Debug)]
pub(crate) struct Log(pub(crate) Arc<LogFile>);

impl LogFile {
    /// Opens or creates it.
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        let owner = uuid::Uuid::new_v4().as_u64_pair().0.max(1);
        Database::open(path, |database| Self::begin(database, owner, Sizes::default())).map_err(of_a_log)
    }

    /// The same on a disk that is made up. A new log gets this owner.
    #[cfg(test)]
    pub(crate) fn open_on(
        disk: impl redb::StorageBackend,
        owner: LogOwner,
        sizes: Sizes,
    ) -> Result<Self, StoreError> {
        let database = Database::on(disk).map_err(of_a_log)?;
        Self::begin(database, owner, sizes).map_err(of_a_log)
    }

    /// A new log gets this owner.
    fn begin(database: Database, owner: LogOwner, sizes: Sizes) -> Result<Self, StoreError> {
        let mut file = Self {
            database,
            owner: 0,
            coming: watch::Sender::new(Coming::Nothing),
            extent: Mutex::default(),
            sizes,
            keeping: tokio::sync::Mutex::default(),
        };
        let format = file.database.write(|transaction| {
            transaction.open_table(ENTRIES)?;
            transaction.open_table(SNAPSHOT)?;
            let mut facts = transaction.open_table(FACTS)?;
            let format = facts.get("format")?.map(|sealed| unseal::<u64>(sealed.value())).transpose()?;
            if format.is_none() {
                facts.insert("format", seal(&FORMAT)?.as_slice())?;
                facts.insert("owner", seal(&owner)?.as_slice())?;
            }
            Ok(format)
        })?;
        let path = file.path().to_path_buf();
        if let Some(found) = format.filter(|found| ![FORMAT, FORMAT_IN_PARTS].contains(found)) {
            return Err(StoreError::Format { path, found });
        }
        let damaged = |reason: &str| StoreError::Damaged { path: path.clone(), reason: reason.to_owned() };
        file.owner = file.fact("owner")?.ok_or_else(|| damaged("it does not say whose it is"))?;
        file.check(damaged)?;
        Ok(file)
    }

    /// Reads all of it once: what is damaged is to be known before anything is promised.
    fn check(&self, damaged: impl Fn(&str) -> StoreError) -> Result<(), StoreError> {
        self.fact::<Vote<LogOwner>>("vote")?;
        self.fact::<Option<LogId<LogOwner>>>("committed")?;
        let snapshot = self.snapshot()?;
        let purged = self.fact::<LogId<LogOwner>>("purged")?;
        if purged.is_some() && snapshot.is_none() {
            return Err(damaged("its snapshot is missing"));
        }
        let last = snapshot.as_ref().and_then(|(meta, _)| meta.last_log_id);
        if snapshot.is_some() && last < purged {
            return Err(damaged("its snapshot is older than its first entry"));
        }
        let mut extent = Extent::after_snapshot(snapshot.map_or(0, |(_, data)| data.len() as u64));
        let mut next = purged.map(|id| id.index + 1);
        self.read(|transaction| {
            for entry in transaction.open_table(ENTRIES)?.iter()? {
                let sealed = entry?.1;
                let index = unseal::<Entry<Replicated>>(sealed.value())?.log_id.index;
                if next.unwrap_or(0) != index {
                    return Ok(Err(damaged(&format!("entry {} is missing", next.unwrap_or(0)))));
                }
                next = Some(index + 1);
                if last.is_none_or(|last| index > last.index) {
                    extent.add(sealed.value().len());
                }
            }
            Ok(Ok(()))
        })??;
        *self.extent() = extent;
        Ok(())
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.database.path()
    }

    /// Whose log it is.
    pub(crate) fn owner(&self) -> LogOwner {
        self.owner
    }

    /// A snapshot is being received.
    pub(crate) fn expect_snapshot(&self) {
        self.coming.send_replace(Coming::Soon);
    }

    /// It was kept, or could not be.
    pub(crate) fn snapshot_came(&self, kept: bool) {
        self.coming.send_replace(if kept { Coming::Nothing } else { Coming::Failed });
    }

    /// Waits until there is a snapshot in the place of what ends with this entry. Raft has the log cut off at once and the snapshot
    /// kept beside that: if the process died in between, what is in neither would be lost.
    async fn wait_for_snapshot(&self, last: LogId<LogOwner>) -> Result<(), StoreError> {
        let mut coming = self.coming.subscribe();
        while *coming.borrow_and_update() == Coming::Soon {
            if self.snapshot_meta()?.is_some_and(|meta| meta.last_log_id >= Some(last)) {
                return Ok(());
            }
            if coming.changed().await.is_err() {
                break;
            }
        }
        if *coming.borrow() == Coming::Failed {
            let reason = "a snapshot could not be kept".to_owned();
            return Err(StoreError::Io { path: self.path().to_path_buf(), reason });
        }
        Ok(())
    }

    fn entries(&self, range: impl RangeBounds<u64>) -> Result<Vec<Entry<Replicated>>, StoreError> {
        let range: (Bound<u64>, Bound<u64>) = (range.start_bound().cloned(), range.end_bound().cloned());
        self.read(|transaction| {
            let mut entries = Vec::new();
            for entry in transaction.open_table(ENTRIES)?.range(range)? {
                entries.push(unseal(entry?.1.value())?);
            }
            Ok(entries)
        })
    }

    /// The first of these: as many as are not longer than that together, and at least one.
    fn first_entries(
        &self,
        range: Range<u64>,
        limit_bytes: usize,
    ) -> Result<Vec<Entry<Replicated>>, StoreError> {
        self.read(|transaction| {
            let (mut entries, mut bytes) = (Vec::new(), 0);
            for entry in transaction.open_table(ENTRIES)?.range(range)? {
                let sealed = entry?.1;
                bytes += sealed.value().len();
                if bytes > limit_bytes && !entries.is_empty() {
                    break;
                }
                entries.push(unseal(sealed.value())?);
            }
            Ok(entries)
        })
    }

    fn fact<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StoreError> {
        self.read(|transaction| match transaction.open_table(FACTS)?.get(name)? {
            Some(sealed) => Ok(Some(unseal(sealed.value())?)),
            None => Ok(None),
        })
    }

    fn keep_fact<T: Serialize>(&self, name: &str, fact: &T) -> Result<(), StoreError> {
        self.write(|transaction| {
            transaction.open_table(FACTS)?.insert(name, seal(fact)?.as_slice())?;
            Ok(())
        })
    }

    fn read<T>(
        &self,
        body: impl FnOnce(&redb::ReadTransaction) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        self.database.read(body).map_err(of_a_log)
    }

    fn write(
        &self,
        body: impl FnOnce(&redb::WriteTransaction) -> Result<(), Failure>,
    ) -> Result<(), StoreError> {
        self.database.write(body).map_err(of_a_log)
    }
}

/// What to do about a damaged log is not what to do about a damaged state file.
fn of_a_log(error: StoreError) -> StoreError {
    match error {
        StoreError::Damaged { path, reason } => StoreError::LogDamaged { path, reason },
        other => other,
    }
}

pub(crate) fn cause(error: &StoreError) -> AnyError {
    AnyError::new(error)
}

impl RaftLogReader<Replicated> for Log {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry<Replicated>>, StorageError<LogOwner>> {
        self.0.entries(range).map_err(|error| StorageIOError::read_logs(cause(&error)).into())
    }

    async fn limited_get_log_entries(
        &mut self,
        start: u64,
        end: u64,
    ) -> Result<Vec<Entry<Replicated>>, StorageError<LogOwner>> {
        let entries = self.0.first_entries(start..end, APPEND_BYTES);
        entries.map_err(|error| StorageIOError::read_logs(cause(&error)).into())
    }
}

impl RaftLogStorage<Replicated> for Log {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Replicated>, StorageError<LogOwner>> {
        let read = || -> Result<_, StoreError> {
            let purged: Option<LogId<LogOwner>> = self.0.fact("purged")?;
            let last = self.0.read(|transaction| match transaction.open_table(ENTRIES)?.last()? {
                Some((_, sealed)) => Ok(Some(unseal::<Entry<Replicated>>(sealed.value())?.log_id)),
                None => Ok(None),
            })?;
            Ok(LogState { last_purged_log_id: purged, last_log_id: last.or(purged) })
        };
        read().map_err(|error| StorageIOError::read_logs(cause(&error)).into())
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote<LogOwner>) -> Result<(), StorageError<LogOwner>> {
        self.0.keep_fact("vote", vote).map_err(|error| StorageIOError::write_vote(cause(&error)).into())
    }

    async fn read_vote(&mut self) -> Result<Option<Vote<LogOwner>>, StorageError<LogOwner>> {
        self.0.fact("vote").map_err(|error| StorageIOError::read_vote(cause(&error)).into())
    }

    async fn save_committed(
        &mut self,
        committed: Option<LogId<LogOwner>>,
    ) -> Result<(), StorageError<LogOwner>> {
        // A hint: what is lost of it with the power is committed again. So it does not wait for the disk.
        let kept = self.0.database.write_for_now(|transaction| {
            transaction.open_table(FACTS)?.insert("committed", seal(&committed)?.as_slice())?;
            Ok(())
        });
        kept.map_err(|error| StorageIOError::write_logs(cause(&of_a_log(error))).into())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId<LogOwner>>, StorageError<LogOwner>> {
        let committed: Result<Option<Option<LogId<LogOwner>>>, StoreError> = self.0.fact("committed");
        committed.map(Option::flatten).map_err(|error| StorageIOError::read_logs(cause(&error)).into())
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
        let mut more = Extent::default();
        let written = self.0.write(|transaction| {
            let mut table = transaction.open_table(ENTRIES)?;
            for entry in entries {
                let sealed = seal(&entry)?;
                more.add(sealed.len());
                table.insert(entry.log_id.index, sealed.as_slice())?;
            }
            Ok(())
        });
        match written {
            Ok(()) => {
                self.0.extent().extend(more);
                callback.log_io_completed(Ok(()));
                Ok(())
            }
            Err(error) => {
                callback.log_io_completed(Err(std::io::Error::other(error.to_string())));
                Err(StorageIOError::write_logs(cause(&error)).into())
            }
        }
    }

    async fn truncate(&mut self, log_id: LogId<LogOwner>) -> Result<(), StorageError<LogOwner>> {
        let cut = self.0.write(|transaction| {
            transaction.open_table(ENTRIES)?.retain_in(log_id.index.., |_, _| false)?;
            Ok(())
        });
        cut.map_err(|error| StorageIOError::write_logs(cause(&error)).into())
    }

    async fn purge(&mut self, log_id: LogId<LogOwner>) -> Result<(), StorageError<LogOwner>> {
        let there = self.0.wait_for_snapshot(log_id).await;
        there.map_err(|error| StorageIOError::write_logs(cause(&error)))?;
        let purged = self.0.purge_some(log_id);
        if purged.map_err(|error| StorageIOError::write_logs(cause(&error)))? {
            tokio::spawn(Arc::clone(&self.0).purge_rest(log_id));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use openraft::{CommittedLeaderId, EntryPayload};

    use super::*;
    use crate::replication::change::Change;

    #[test]
    fn what_is_sent_at_once_is_bounded_in_bytes_but_at_least_one_entry() {
        let disk = redb::backends::InMemoryBackend::new();
        let file = Arc::new(LogFile::open_on(disk, 1, Sizes::default()).expect("a new log"));
        let bytes = [APPEND_BYTES / 3, APPEND_BYTES / 3, APPEND_BYTES / 3, 2 * APPEND_BYTES, 1, 1];
        let written = file.write(|transaction| {
            let mut table = transaction.open_table(ENTRIES)?;
            for (index, bytes) in (1..).zip(bytes) {
                let event = pod_api::Event {
                    sequence: index,
                    time_ms: 0,
                    kind: pod_api::EventKind::ControllerStarted,
                    subject: String::new(),
                    message: "x".repeat(bytes),
                };
                let change = Change::Turn { base: 0, commands: Vec::new(), events: vec![event] };
                let log_id = LogId::new(CommittedLeaderId::new(1, 1), index);
                let entry = Entry::<Replicated> { log_id, payload: EntryPayload::Normal(change) };
                table.insert(index, seal(&entry)?.as_slice())?;
            }
            Ok(())
        });
        written.expect("written");
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let mut log = Log(file);
        let mut sent = |start, end| -> Vec<u64> {
            let entries = runtime.block_on(log.limited_get_log_entries(start, end)).expect("read");
            entries.iter().map(|entry| entry.log_id.index).collect()
        };
        assert_eq!(sent(1, 7), [1, 2]);
        assert_eq!(sent(3, 7), [3]);
        assert_eq!(sent(4, 7), [4], "however long it is");
        assert_eq!(sent(5, 7), [5, 6]);
        assert_eq!(sent(5, 6), [5], "no more than was asked for");
    }
}
