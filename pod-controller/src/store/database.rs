//! A file of redb, and what can be wrong with it.

use std::fs::File;
use std::panic::UnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use redb::backends::FileBackend;
use redb::{Durability, ReadableDatabase, StorageBackend};

use super::mark::{self, Mark};
use super::slow_disk::SlowDisk;
use super::tried::{Shared, Tried};
use super::turns::Turns;
use super::{Damage, StoreError, seal};

/// A database that only this process has.
#[derive(Debug)]
pub(crate) struct Database {
    path: PathBuf,
    redb: redb::Database,
    mark: Mark,
    slow_disk: SlowDisk,
    turns: Turns,
}

impl Database {
    /// Opens or creates a file, and has it read. The database panics on some kinds of damage, which is an error like
    /// others; nothing of it is used after that.
    pub(crate) fn open<T>(
        path: &Path,
        read: impl FnOnce(Self) -> Result<T, StoreError> + UnwindSafe,
    ) -> Result<T, StoreError> {
        refuse_what_is_no_database(path)?;
        let opened = std::panic::catch_unwind(|| {
            let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
            let file = file.map_err(|error| failed(path, redb::Error::Io(error).into()))?;
            let disk = FileBackend::new(file).map_err(|error| opening(path, error))?;
            read(Self::begin(path, Arc::new(disk))?)
        });
        opened.unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().cloned();
            let reason = said.or_else(|| panic.downcast_ref::<&str>().map(|said| (*said).to_owned()));
            let reason = reason.unwrap_or_else(|| "it cannot be read".to_owned());
            Err(StoreError::Damaged { path: path.to_path_buf(), reason })
        })
    }

    /// Opens or creates one on a disk that is made up.
    #[cfg(test)]
    pub(crate) fn on(disk: impl StorageBackend) -> Result<Self, StoreError> {
        Self::begin(Path::new("a disk that is made up"), Arc::new(disk))
    }

    fn begin(path: &Path, disk: Arc<dyn StorageBackend>) -> Result<Self, StoreError> {
        let found = Mark::find(&disk).map_err(|failure| failed(path, failure))?;
        if let Some((_, marked)) = found {
            // Opened for good, it would be changed, and what is missing be forgotten.
            let tried =
                Tried::new(Arc::clone(&disk)).map_err(|error| failed(path, redb::Error::Io(error).into()))?;
            let tried = opened(path, tried)?;
            let counted = counted(path, &tried)?.unwrap_or(0);
            if counted < marked {
                return Err(failed(path, mark::behind(counted, marked).into()));
            }
        }
        let redb = opened(path, Shared(Arc::clone(&disk)))?;
        let mark = match found {
            Some((mark, _)) => mark,
            None if counted(path, &redb)?.is_some() => return Err(failed(path, mark::lost().into())),
            None => Mark::begin(disk).map_err(|failure| failed(path, failure))?,
        };
        let (slow_disk, turns) = (SlowDisk::default(), Turns::default());
        Ok(Self { path: path.to_path_buf(), redb, mark, slow_disk, turns })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads what belongs together.
    pub(crate) fn read<T>(
        &self,
        body: impl FnOnce(&redb::ReadTransaction) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        let result = (|| body(&self.redb.begin_read()?))();
        result.map_err(|failure| self.failed(failure))
    }

    /// Writes what belongs together; it is on the disk when this returns.
    pub(crate) fn write<T>(
        &self,
        body: impl FnOnce(&redb::WriteTransaction) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        self.write_with(Durability::Immediate, true, body)
    }

    /// As [`Database::write`], by a thread of its own, while this one does something else. It is done in any case.
    pub(crate) fn write_while<T: Send>(
        &self,
        body: impl Fn(&redb::WriteTransaction) -> Result<T, Failure> + Sync,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<T, StoreError> {
        let write = || self.write(&body);
        std::thread::scope(|scope| {
            let Ok(writer) = std::thread::Builder::new().name("commit".to_owned()).spawn_scoped(scope, write)
            else {
                // There are too many threads on this host: then it takes longer.
                meanwhile();
                return write();
            };
            meanwhile();
            writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// As [`Database::write`], of what may wait: whoever else has something to write goes first.
    pub(crate) fn write_aside<T>(
        &self,
        body: impl FnOnce(&redb::WriteTransaction) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        self.write_with(Durability::Immediate, false, body)
    }

    /// As [`Database::write`], and may be lost with the power, as a whole.
    pub(crate) fn write_for_now<T>(
        &self,
        body: impl FnOnce(&redb::WriteTransaction) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        self.write_with(Durability::None, true, body)
    }

    /// A value as it is written.
    pub(crate) fn sealed(&self, value: &impl serde::Serialize) -> Result<Vec<u8>, StoreError> {
        seal(value).map_err(|damage| self.failed(damage.into()))
    }

    fn write_with<T>(
        &self,
        durability: Durability,
        goes_first: bool,
        body: impl FnOnce(&redb::WriteTransaction) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        let result = (|| {
            let waiting = if goes_first {
                Some(self.turns.wait())
            } else {
                self.turns.let_others();
                None
            };
            let mut transaction = self.redb.begin_write()?;
            drop(waiting);
            transaction.set_durability(durability)?;
            let value = body(&transaction)?;
            let is_for_good = matches!(durability, Durability::Immediate);
            let count = if is_for_good { Some(mark::count(&transaction)?) } else { None };
            let began = Instant::now();
            let committed = transaction.commit();
            self.slow_disk.note(&self.path, began, Instant::now());
            committed?;
            if let Some(count) = count {
                self.mark.note(count);
            }
            Ok(value)
        })();
        result.map_err(|failure| self.failed(failure))
    }

    fn failed(&self, failure: Failure) -> StoreError {
        failed(&self.path, failure)
    }
}

fn failed(path: &Path, failure: Failure) -> StoreError {
    let path = path.to_path_buf();
    match failure {
        Failure::Damaged(damage) => StoreError::Damaged { path, reason: damage.to_string() },
        Failure::Database(error) => match *error {
            redb::Error::Corrupted(reason) => StoreError::Damaged { path, reason },
            redb::Error::Io(error) => StoreError::Io { path, reason: error.to_string() },
            // What is there is whole: the database only writes no more until it is opened again.
            redb::Error::PreviousIo => {
                let reason = "an earlier write failed; see the log before this".to_owned();
                StoreError::Io { path, reason }
            }
            other => StoreError::Damaged { path, reason: other.to_string() },
        },
    }
}

/// Why a transaction came to nothing.
pub(crate) enum Failure {
    Database(Box<redb::Error>),
    Damaged(Damage),
}

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Database(Box::new(error.into()))
    }
}

impl From<Damage> for Failure {
    fn from(damage: Damage) -> Self {
        Self::Damaged(damage)
    }
}

/// What the database makes of a file.
fn opened(path: &Path, disk: impl StorageBackend) -> Result<redb::Database, StoreError> {
    redb::Builder::new().create_with_backend(disk).map_err(|error| opening(path, error))
}

/// How many transactions are there.
fn counted(path: &Path, redb: &redb::Database) -> Result<Option<u64>, StoreError> {
    let counted = (|| mark::counted(&redb.begin_read()?))();
    counted.map_err(|failure| failed(path, failure))
}

fn opening(path: &Path, error: redb::DatabaseError) -> StoreError {
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

/// A database begins with a magic number. What is shorter or begins otherwise is somebody else's file: it is not
/// touched.
fn refuse_what_is_no_database(path: &Path) -> Result<(), StoreError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_meanwhile_is_done_whatever_becomes_of_the_write() {
        const TABLE: redb::TableDefinition<u8, u8> = redb::TableDefinition::new("numbers");
        let database = Database::on(redb::backends::InMemoryBackend::new()).expect("a new one");
        let mut done = 0;
        let write = |transaction: &redb::WriteTransaction| {
            transaction.open_table(TABLE)?.insert(1, 2)?;
            Ok(())
        };
        database.write_while(write, &mut || done += 1).expect("written");
        let read = database.read(|it| Ok(it.open_table(TABLE)?.get(1)?.map(|value| value.value())));
        assert_eq!((read.expect("read"), done), (Some(2), 1));
        let fail = |_: &_| -> Result<(), _> { Err(redb::Error::PreviousIo.into()) };
        database.write_while(fail, &mut || done += 1).expect_err("it fails");
        assert_eq!(done, 2);
    }

    #[test]
    fn what_follows_a_write_that_failed_is_no_damage() {
        let database = Database::on(redb::backends::InMemoryBackend::new()).expect("a new one");
        let failed: Result<(), StoreError> = database.write(|_| Err(redb::Error::PreviousIo.into()));
        assert!(matches!(&failed, Err(StoreError::Io { .. })), "{failed:?}");
    }
}
