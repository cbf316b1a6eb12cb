//! What survives a restart: a snapshot of the state, the commands since, and recent events, in one file, or in an
//! [etcd].
//!
//! Every value carries a checksum, so that a damaged file is noticed and not obeyed.

mod aside;
mod database;
pub mod etcd;
mod length;
mod mark;
pub(crate) mod parts;
mod sealed;
mod slow_disk;
mod snapshot;
mod tried;
mod turns;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pod_api::Event;
use pod_state::{Command, State};
use redb::{ReadableTable, TableDefinition};
use snapshot::Writing;

pub(crate) use database::{Database, Failure};
pub(crate) use length::{LOG_LEAST, Length};
pub(crate) use sealed::{Damage, seal, unseal};

/// The format of the values below; another one is refused.
const FORMAT: u64 = 1;
/// The format where the snapshot is in parts.
const FORMAT_IN_PARTS: u64 = 2;

const NUMBERS: TableDefinition<&str, u64> = TableDefinition::new("numbers");
const SNAPSHOT: TableDefinition<(), &[u8]> = TableDefinition::new("snapshot");
const LOG: TableDefinition<u64, &[u8]> = TableDefinition::new("log");
const EVENTS: TableDefinition<u64, &[u8]> = TableDefinition::new("events");

/// The state file.
#[derive(Debug)]
pub struct Store {
    database: Arc<Database>,
    /// What was logged since the newest snapshot.
    log: Length,
    snapshot_bytes: u64,
    /// The last snapshot that was written in parts.
    number: u64,
    part_bytes: usize,
    writing: Option<Writing>,
}

/// What a state file held.
#[derive(Debug)]
pub struct Recovered {
    /// The state; none in a new file.
    pub state: Option<State>,
    /// The events, oldest first.
    pub events: Vec<Event>,
    /// This start's term of office: larger than all before.
    pub term: u64,
}

/// Why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it.
    #[error("the state file {} is in use by another controller: stop that one first", path.display())]
    InUse {
        /// Which file.
        path: PathBuf,
    },
    /// It is no state file, or a damaged one.
    #[error(
        "the state file {} is damaged or no state file ({reason}): restore it from a backup, or move it away to begin \
         a new pod",
        path.display()
    )]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// It is no log of a replica, or a damaged one. What it acknowledged the others have too.
    #[error(
        "the log {} of this controller replica is damaged or no such log ({reason}): if the others run, move it away and \
         start this one again, and it gets everything from them; if none does, restore it from a backup",
        path.display()
    )]
    LogDamaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Replicas or an etcd have taken over from it.
    #[error(
        "the state file {} was handed over to controller replicas or to etcd, which know more by now: keep [replication] or \
         the store in the configuration; to begin a new pod, move the file away",
        path.display()
    )]
    HandedOver {
        /// Which file.
        path: PathBuf,
    },
    /// It was written by another version.
    #[error("the state file {} has format {found}, and this controller reads {FORMAT_IN_PARTS} at most: use the version that wrote it", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// An etcd has it.
    #[error(transparent)]
    Etcd(#[from] etcd::EtcdError),
    /// It cannot be read or written.
    #[error("cannot use {}: {reason}; check the directory, the permissions and the free space", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What happened.
        reason: String,
    },
}

impl Store {
    /// Opens or creates the state file and counts a new term of office.
    pub fn open(path: &Path) -> Result<(Self, Recovered), StoreError> {
        Database::open(path, Self::read)
    }

    fn read(database: Database) -> Result<(Self, Recovered), StoreError> {
        let mut store = Self {
            database: Arc::new(database),
            log: Length::default(),
            snapshot_bytes: 0,
            number: 0,
            part_bytes: parts::PART_BYTES,
            writing: None,
        };
        let term = store.begin_term()?;
        let events = store.read_events()?;
        let state = store.read_state()?;
        Ok((store, Recovered { state, events, term }))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.database.path()
    }

    /// Keeps commands and events for good, together. `first_event` and later ones are kept, older ones forgotten. After what follows
    /// from the commands is done, [`tidy`](Self::tidy) sees to the log. What can be done `meanwhile` is done while the disk writes.
    pub fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        events: &[Event],
        first_event: u64,
        state: &State,
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Result<(), StoreError> {
        self.note_written()?;
        // Of what an older version may not know nothing is left in the log.
        let lowers = commands.iter().any(|(_, command)| command.may_lower_protocol());
        let whole = if lowers {
            self.stop_writing()?;
            Some(self.database.sealed(state)?)
        } else {
            None
        };
        let logged: Vec<&(u64, &Command)> = commands.iter().filter(|_| whole.is_none()).collect();
        let sealed = logged.iter().map(|(_, command)| self.database.sealed(command));
        let sealed: Vec<Vec<u8>> = sealed.collect::<Result<_, _>>()?;
        let write = |transaction: &redb::WriteTransaction| {
            if let Some(whole) = &whole {
                snapshot::keep_whole(transaction, whole, state.index)?;
            } else {
                let mut log = transaction.open_table(LOG)?;
                for ((index, _), sealed) in logged.iter().zip(&sealed) {
                    log.insert(index, sealed.as_slice())?;
                }
            }
            let mut table = transaction.open_table(EVENTS)?;
            for event in events {
                table.insert(event.sequence, seal(event)?.as_slice())?;
            }
            table.retain_in(..first_event, |_, _| false)?;
            Ok(())
        };
        // Whoever writes a snapshot takes a core: for one thread more the disk would be reached later.
        match meanwhile.filter(|_| !self.is_writing()) {
            Some(meanwhile) => self.database.write_while(write, meanwhile)?,
            None => self.database.write(write)?,
        }
        for one in &sealed {
            self.log.add(one.len());
        }
        if let Some(whole) = whole {
            self.begin_log_after(&whole);
        }
        Ok(())
    }

    /// Keeps a whole state instead of the commands that led to it.
    pub fn keep_snapshot(&mut self, state: &State) -> Result<(), StoreError> {
        self.stop_writing()?;
        let whole = self.database.sealed(state)?;
        self.database.write(|transaction| snapshot::keep_whole(transaction, &whole, state.index))?;
        self.begin_log_after(&whole);
        Ok(())
    }

    fn begin_log_after(&mut self, whole: &[u8]) {
        (self.log, self.snapshot_bytes) = (Length::default(), whole.len() as u64);
    }

    /// From now on replicas or an etcd have the state: a controller without them, which would go on from an old one, is refused.
    pub fn hand_over(mut self) -> Result<(), StoreError> {
        self.stop_writing()?;
        self.database.write(|transaction| {
            transaction.open_table(NUMBERS)?.insert("handed over", 1)?;
            Ok(())
        })
    }

    /// This is the term of office, larger than the one that was counted: what comes next is larger still.
    pub(crate) fn keep_term(&mut self, term: u64) -> Result<(), StoreError> {
        self.database.write(|transaction| {
            let mut numbers = transaction.open_table(NUMBERS)?;
            if numbers.get("term")?.is_none_or(|kept| kept.value() < term) {
                numbers.insert("term", term)?;
            }
            Ok(())
        })
    }

    fn begin_term(&mut self) -> Result<u64, StoreError> {
        let path = || self.path().to_path_buf();
        self.database.write(|transaction| {
            let mut numbers = transaction.open_table(NUMBERS)?;
            if numbers.get("handed over")?.is_some() {
                return Ok(Err(StoreError::HandedOver { path: path() }));
            }
            let format = numbers.get("format")?.map_or(FORMAT, |found| found.value());
            if ![FORMAT, FORMAT_IN_PARTS].contains(&format) {
                return Ok(Err(StoreError::Format { path: path(), found: format }));
            }
            let term = numbers.get("term")?.map_or(0, |found| found.value()) + 1;
            numbers.insert("format", format)?;
            numbers.insert("term", term)?;
            transaction.open_table(SNAPSHOT)?;
            transaction.open_table(LOG)?;
            Ok(Ok(term))
        })?
    }

    fn read_state(&mut self) -> Result<Option<State>, StoreError> {
        let (number, snapshot, commands, log) = self.database.read(|transaction| {
            let (number, sealed) = snapshot::read(transaction)?;
            let snapshot = match sealed {
                Some(sealed) => Some((unseal::<State>(&sealed)?, sealed.len() as u64)),
                None => None,
            };
            let known = snapshot.as_ref().map_or(0, |(state, _)| state.index);
            let (mut commands, mut log): (Vec<(u64, Command)>, _) = (Vec::new(), Length::default());
            // What comes before a snapshot has yet to be removed.
            for entry in transaction.open_table(LOG)?.range(known + 1..)? {
                let (index, sealed) = entry?;
                log.add(sealed.value().len());
                commands.push((index.value(), unseal(sealed.value())?));
            }
            Ok((number, snapshot, commands, log))
        })?;
        (self.number, self.log) = (number, log);
        self.snapshot_bytes = snapshot.as_ref().map_or(0, |(_, bytes)| *bytes);
        let damaged = |reason: String| StoreError::Damaged { path: self.path().to_path_buf(), reason };
        let Some((mut state, _)) = snapshot else {
            return if commands.is_empty() {
                Ok(None)
            } else {
                Err(damaged("its snapshot is missing".to_owned()))
            };
        };
        for (index, command) in commands {
            if index != state.index + 1 {
                return Err(damaged(format!("command {} is missing", state.index + 1)));
            }
            state
                .apply(&command)
                .map_err(|refusal| damaged(format!("command {index} does not replay: {refusal}")))?;
        }
        Ok(Some(state))
    }

    fn read_events(&self) -> Result<Vec<Event>, StoreError> {
        self.database.read(|transaction| {
            let table = match transaction.open_table(EVENTS) {
                Ok(table) => table,
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
                Err(error) => return Err(error.into()),
            };
            let mut events = Vec::new();
            for entry in table.iter()? {
                events.push(unseal(entry?.1.value())?);
            }
            Ok(events)
        })
    }
}

#[cfg(test)]
mod tests;
