//! Which transaction was the last that is known to stand.
//!
//! A commit waits for the disk once. After a crash the database then takes damage to its newest transaction for a write that was cut off,
//! and goes back to the one before: it would forget what was acknowledged. So each transaction counts, and when it stands its number
//! is written beside the database, for which nobody waits. A mark is never ahead of what stands, so a database whose
//! number is lower has lost something.
//!
//! The mark lies in the first page of the file, behind the 320 bytes that the database uses of it: a copy of the file has the mark that belongs
//! to it. Older versions neither read nor write it, and what they commit in two phases needs none.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use redb::{ReadableTable, StorageBackend, TableDefinition, TableError, WriteTransaction};

use super::Damage;
use super::database::Failure;

/// Where it lies, in bytes from the start of the file: twice, written in turn, each in a sector of its own. Of two one is whole whenever the
/// power fails.
const PLACES: [u64; 2] = [1024, 2048];
/// How long it is: these letters, the number, and a checksum of both.
const BYTES: usize = 20;
const LETTERS: &[u8; 8] = b"wadimark";
/// What is shorter has no first page.
const PAGE_BYTES: u64 = 4096;

/// How many transactions there were that are for good.
const COUNT: TableDefinition<(), u64> = TableDefinition::new("transactions");

/// The mark of a file.
#[derive(Debug)]
pub(super) struct Mark {
    disk: Arc<dyn StorageBackend>,
    newest: Mutex<Newest>,
}

/// Which transaction is marked, and in which of the places.
#[derive(Clone, Copy, Debug)]
struct Newest {
    count: u64,
    place: usize,
}

/// What is in one of the places.
enum Content {
    Nothing,
    Mark(u64),
    Damaged,
}

impl Mark {
    /// Seeks the mark of a file. None, if it never had one or has lost it.
    pub(super) fn find(disk: &Arc<dyn StorageBackend>) -> Result<Option<(Self, u64)>, Failure> {
        if disk.len().map_err(of_disk)? < PAGE_BYTES {
            return Ok(None);
        }
        let mut newest: Option<Newest> = None;
        let mut damaged = 0;
        for (place, at) in PLACES.into_iter().enumerate() {
            let mut bytes = [0; BYTES];
            disk.read(at, &mut bytes).map_err(of_disk)?;
            match Content::of(&bytes) {
                Content::Nothing => {}
                Content::Damaged => damaged += 1,
                Content::Mark(count) if newest.is_some_and(|newest| newest.count >= count) => {}
                Content::Mark(count) => newest = Some(Newest { count, place }),
            }
        }
        match newest {
            Some(newest) => {
                let mark = Self { disk: Arc::clone(disk), newest: Mutex::new(newest) };
                Ok(Some((mark, newest.count)))
            }
            // While one is written the other one is whole.
            None if damaged == PLACES.len() => Err(lost().into()),
            None => Ok(None),
        }
    }

    /// Gives a file its first mark, before anything depends on it.
    pub(super) fn begin(disk: Arc<dyn StorageBackend>) -> Result<Self, Failure> {
        let newest = Newest { count: 0, place: 0 };
        newest.write(&*disk).and_then(|()| disk.sync_data()).map_err(of_disk)?;
        Ok(Self { disk, newest: Mutex::new(newest) })
    }

    /// This transaction stands. If it cannot be marked, it stands all the same.
    pub(super) fn note(&self, count: u64) {
        // Each number by itself is right whoever panicked.
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if count <= newest.count {
            return;
        }
        let next = Newest { count, place: 1 - newest.place };
        match next.write(&*self.disk) {
            Ok(()) => *newest = next,
            Err(error) => tracing::warn!("the last transaction that stands could not be marked: {error}"),
        }
    }
}

impl Newest {
    fn write(self, disk: &dyn StorageBackend) -> io::Result<()> {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(LETTERS);
        bytes[8..16].copy_from_slice(&self.count.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..16]).to_le_bytes();
        bytes[16..].copy_from_slice(&checksum);
        disk.write(PLACES[self.place], &bytes)
    }
}

impl Content {
    fn of(bytes: &[u8; BYTES]) -> Self {
        if bytes.iter().all(|byte| *byte == 0) {
            return Self::Nothing;
        }
        let (said, checksum) = bytes.split_at(16);
        let count =
            said.strip_prefix(LETTERS).and_then(|count| count.try_into().ok()).map(u64::from_le_bytes);
        match count {
            Some(count) if crc32fast::hash(said).to_le_bytes() == checksum => Self::Mark(count),
            _ => Self::Damaged,
        }
    }
}

/// Counts a transaction, as a part of it.
pub(super) fn count(transaction: &WriteTransaction) -> Result<u64, Failure> {
    let mut table = transaction.open_table(COUNT)?;
    let count = table.get(())?.map_or(0, |count| count.value()) + 1;
    table.insert((), count)?;
    Ok(count)
}

/// How many transactions there were. None, if none was counted.
pub(super) fn counted(transaction: &redb::ReadTransaction) -> Result<Option<u64>, Failure> {
    match transaction.open_table(COUNT) {
        Ok(table) => Ok(table.get(())?.map(|count| count.value())),
        Err(TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What is wrong with a file that should have a mark.
pub(super) fn lost() -> Damage {
    Damage::new("it does not say any more which transaction was the last that stood")
}

/// What is wrong with a file that has fewer transactions than its mark says.
pub(super) fn behind(counted: u64, marked: u64) -> Damage {
    Damage::new(format!(
        "what was written last is gone: {counted} transactions are there, and {marked} stood"
    ))
}

fn of_disk(error: io::Error) -> Failure {
    redb::Error::Io(error).into()
}
