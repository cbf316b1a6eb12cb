//! A file of redb, and what can be wrong with it.

use std::panic::UnwindSafe;
use std::path::{Path, PathBuf};
use std::time::Instant;

use redb::ReadableDatabase;

use super::slow_disk::SlowDisk;
use super::turns::Turns;
use super::{Damage, StoreError, seal};

/// A database that only this process has.
#[derive(Debug)]
pub(crate) struct Database {
    path: PathBuf,
    redb: redb::Database,
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
            let redb = redb::Database::create(path).map_err(|error| opening(path, error))?;
            let (slow_disk, turns) = (SlowDisk::default(), Turns::default());
            read(Self { path: path.to_path_buf(), redb, slow_disk, turns })
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
    pub(crate) fn on(disk: impl redb::StorageBackend) -> Result<Self, StoreError> {
        let path = PathBuf::from("a disk that is made up");
        let redb = redb::Builder::new().create_with_backend(disk).map_err(|error| opening(&path, error))?;
        Ok(Self { path, redb, slow_disk: SlowDisk::default(), turns: Turns::default() })
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
        self.write_with(redb::Durability::Immediate, true, body)
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
        self.write_with(redb::Durability::Immediate, false, body)
    }

    /// As [`Database::write`], and may be lost with the power, as a whole.
    pub(crate) fn write_for_now<T>(
        &self,
        body: impl FnOnce(&redb::WriteTransaction) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        self.write_with(redb::Durability::None, true, body)
    }

    /// A value as it is written.
    pub(crate) fn sealed(&self, value: &impl serde::Serialize) -> Result<Vec<u8>, StoreError> {
        seal(value).map_err(|damage| self.failed(damage.into()))
    }

    fn write_with<T>(
        &self,
        durability: redb::Durability,
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
            // After a crash, damage to what was written last looks like a write that was cut off, and the database goes back to
            // what was there before, which is to forget what was acknowledged. Of two phases it knows that they ended.
            transaction.set_two_phase_commit(true);
            let value = body(&transaction)?;
            let began = Instant::now();
            let committed = transaction.commit();
            self.slow_disk.note(&self.path, began, Instant::now());
            committed?;
            Ok(value)
        })();
        result.map_err(|failure| self.failed(failure))
    }

    fn failed(&self, failure: Failure) -> StoreError {
        let path = self.path.clone();
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
