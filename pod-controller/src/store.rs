//! What survives a restart: a snapshot of the state, the commands since, and recent events, in one file.
//!
//! Every value carries a checksum, so that a damaged file is noticed and not obeyed.

use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::Event;
use crate::state::{Command, State};

/// The format of the values below; another one is refused.
const FORMAT: u64 = 1;
/// How many commands to replay at most.
const LOG_MAX: u64 = 256;

const NUMBERS: TableDefinition<&str, u64> = TableDefinition::new("numbers");
const SNAPSHOT: TableDefinition<(), &[u8]> = TableDefinition::new("snapshot");
const LOG: TableDefinition<u64, &[u8]> = TableDefinition::new("log");
const EVENTS: TableDefinition<u64, &[u8]> = TableDefinition::new("events");

/// The state file.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    database: Database,
    logged: u64,
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
    /// Replicas have taken over from it.
    #[error(
        "the state file {} was handed over to controller replicas, which know more by now: keep [replication] in the \
         configuration; to begin a new pod, move the file away",
        path.display()
    )]
    HandedOver {
        /// Which file.
        path: PathBuf,
    },
    /// It was written by another version.
    #[error("the state file {} has format {found}, and this controller reads {FORMAT}: use the version that wrote it", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// It cannot be read or written.
    #[error("cannot use the state file {}: {reason}; check the directory, the permissions and the free space", path.display())]
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
        refuse_what_is_no_database(path)?;
        without_panics(path, || Self::open_database(path))
    }

    fn open_database(path: &Path) -> Result<(Self, Recovered), StoreError> {
        let database = Database::create(path).map_err(|error| opening(path, error))?;
        let mut store = Self { path: path.to_path_buf(), database, logged: 0 };
        let term = store.begin_term()?;
        let events = store.read_events()?;
        let state = store.read_state()?;
        Ok((store, Recovered { state, events, term }))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps commands and events for good, together. `first_event` and later ones are kept, older ones forgotten.
    pub fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        events: &[Event],
        first_event: u64,
        state: &State,
    ) -> Result<(), StoreError> {
        let snapshot = self.logged + commands.len() as u64 > LOG_MAX;
        let written = self.write(|transaction| {
            {
                let mut log = transaction.open_table(LOG)?;
                if snapshot {
                    log.retain(|_, _| false)?;
                    transaction.open_table(SNAPSHOT)?.insert((), seal(state)?.as_slice())?;
                } else {
                    for (index, command) in commands {
                        log.insert(index, seal(command)?.as_slice())?;
                    }
                }
                let mut table = transaction.open_table(EVENTS)?;
                for event in events {
                    table.insert(event.sequence, seal(event)?.as_slice())?;
                }
                table.retain_in(..first_event, |_, _| false)?;
            }
            Ok(())
        });
        written.map(|()| self.logged = if snapshot { 0 } else { self.logged + commands.len() as u64 })
    }

    /// Keeps a whole state instead of the commands that led to it.
    pub fn keep_snapshot(&mut self, state: &State) -> Result<(), StoreError> {
        self.write(|transaction| {
            transaction.open_table(LOG)?.retain(|_, _| false)?;
            transaction.open_table(SNAPSHOT)?.insert((), seal(state)?.as_slice())?;
            Ok(())
        })?;
        self.logged = 0;
        Ok(())
    }

    /// From now on replicas have the state: a controller without them, which would go on from an old one, is refused.
    pub fn hand_over(self) -> Result<(), StoreError> {
        self.write(|transaction| {
            transaction.open_table(NUMBERS)?.insert("handed over", 1)?;
            Ok(())
        })
    }

    fn begin_term(&mut self) -> Result<u64, StoreError> {
        let mut term = 0;
        let mut format = FORMAT;
        let mut handed_over = false;
        self.write(|transaction| {
            let mut numbers = transaction.open_table(NUMBERS)?;
            handed_over = numbers.get("handed over")?.is_some();
            format = numbers.get("format")?.map_or(FORMAT, |found| found.value());
            if format == FORMAT {
                term = numbers.get("term")?.map_or(0, |found| found.value()) + 1;
                numbers.insert("format", FORMAT)?;
                numbers.insert("term", term)?;
            }
            Ok(())
        })?;
        if handed_over {
            Err(StoreError::HandedOver { path: self.path.clone() })
        } else if format == FORMAT {
            Ok(term)
        } else {
            Err(StoreError::Format { path: self.path.clone(), found: format })
        }
    }

    fn read_state(&mut self) -> Result<Option<State>, StoreError> {
        let mut state = None;
        let mut commands: Vec<(u64, Command)> = Vec::new();
        self.write(|transaction| {
            state = match transaction.open_table(SNAPSHOT)?.get(())? {
                Some(sealed) => Some(unseal::<State>(sealed.value())?),
                None => None,
            };
            for entry in transaction.open_table(LOG)?.iter()? {
                let (index, sealed) = entry?;
                commands.push((index.value(), unseal(sealed.value())?));
            }
            Ok(())
        })?;
        self.logged = commands.len() as u64;
        let damaged = |reason: String| StoreError::Damaged { path: self.path.clone(), reason };
        let Some(mut state) = state else {
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
        let mut events = Vec::new();
        let result = (|| {
            let transaction = self.database.begin_read()?;
            let table = match transaction.open_table(EVENTS) {
                Ok(table) => table,
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            for entry in table.iter()? {
                events.push(unseal(entry?.1.value())?);
            }
            Ok(())
        })();
        result.map_err(|error| self.failed(error)).map(|()| events)
    }

    fn write(
        &self,
        body: impl FnOnce(&redb::WriteTransaction) -> Result<(), Failure>,
    ) -> Result<(), StoreError> {
        let result = (|| {
            let transaction = self.database.begin_write()?;
            body(&transaction)?;
            transaction.commit()?;
            Ok(())
        })();
        result.map_err(|error| self.failed(error))
    }

    fn failed(&self, failure: Failure) -> StoreError {
        failure.of(&self.path)
    }
}

pub(crate) enum Failure {
    Database(Box<redb::Error>),
    Damaged(String),
}

impl Failure {
    pub(crate) fn of(self, path: &Path) -> StoreError {
        let path = path.to_path_buf();
        match self {
            Self::Damaged(reason) => StoreError::Damaged { path, reason },
            Self::Database(error) => match *error {
                redb::Error::Corrupted(reason) => StoreError::Damaged { path, reason },
                redb::Error::Io(error) => StoreError::Io { path, reason: error.to_string() },
                other => StoreError::Damaged { path, reason: other.to_string() },
            },
        }
    }
}

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Database(Box::new(error.into()))
    }
}

pub(crate) fn opening(path: &Path, error: redb::DatabaseError) -> StoreError {
    let path = path.to_path_buf();
    match error {
        redb::DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path },
        redb::DatabaseError::Storage(redb::StorageError::Io(error))
            if error.kind() != std::io::ErrorKind::InvalidData =>
        {
            StoreError::Io { path, reason: error.to_string() }
        }
        other => StoreError::Damaged { path, reason: other.to_string() },
    }
}

/// The database panics on some kinds of damage. Nothing of it is used after that.
pub(crate) fn without_panics<T>(
    path: &Path,
    body: impl FnOnce() -> Result<T, StoreError> + std::panic::UnwindSafe,
) -> Result<T, StoreError> {
    std::panic::catch_unwind(body).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        let reason = said.or_else(|| panic.downcast_ref::<&str>().map(|said| (*said).to_owned()));
        let reason = reason.unwrap_or_else(|| "it cannot be read".to_owned());
        Err(StoreError::Damaged { path: path.to_path_buf(), reason })
    })
}

/// A database begins with a magic number. What is shorter or begins otherwise is somebody else's file: it is not
/// touched.
pub(crate) fn refuse_what_is_no_database(path: &Path) -> Result<(), StoreError> {
    const MAGIC: &[u8] = b"redb";
    let unusable =
        |error: std::io::Error| StoreError::Io { path: path.to_path_buf(), reason: error.to_string() };
    let begin = match std::fs::File::open(path) {
        Ok(file) => {
            if !file.metadata().map_err(unusable)?.is_file() {
                return Err(StoreError::Io {
                    path: path.to_path_buf(),
                    reason: "it is no regular file".to_owned(),
                });
            }
            let mut begin = Vec::new();
            std::io::Read::read_to_end(&mut std::io::Read::take(file, MAGIC.len() as u64), &mut begin)
                .map_err(unusable)?;
            begin
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(unusable(error)),
    };
    // An empty file is what a creation that was cut short leaves behind.
    if begin.is_empty() || begin == MAGIC {
        return Ok(());
    }
    Err(StoreError::Damaged { path: path.to_path_buf(), reason: "it does not begin like one".to_owned() })
}

/// Checksum, then JSON.
pub(crate) fn seal<T: Serialize>(value: &T) -> Result<Vec<u8>, Failure> {
    let mut sealed = vec![0; 4];
    serde_json::to_writer(&mut sealed, value).map_err(|error| Failure::Damaged(error.to_string()))?;
    let checksum = crc32fast::hash(&sealed[4..]).to_le_bytes();
    sealed[..4].copy_from_slice(&checksum);
    Ok(sealed)
}

pub(crate) fn unseal<T: DeserializeOwned>(sealed: &[u8]) -> Result<T, Failure> {
    let damaged = || Failure::Damaged("a checksum is wrong".to_owned());
    let (checksum, json) = sealed.split_first_chunk::<4>().ok_or_else(damaged)?;
    if crc32fast::hash(json) != u32::from_le_bytes(*checksum) {
        return Err(damaged());
    }
    serde_json::from_slice(json).map_err(|error| Failure::Damaged(error.to_string()))
}

#[cfg(test)]
mod tests;
