//! A snapshot that is too long for one write: in parts, each written by itself, so that commits come in between.
//!
//! Nothing leads to parts that are not all there. Whoever writes says with the last transaction that they are.

use redb::{ReadableTable, TableDefinition, WriteTransaction};

use super::database::{Database, Failure};
use super::{Damage, StoreError};

/// How long a part is: what a commit may have to wait for.
pub(crate) const PART_BYTES: usize = 256 << 10;
/// How many keys are removed at once.
const REMOVED_AT_ONCE: usize = 256;
/// Controllers of a pod that speaks an older minor may be followed by one that knows snapshots in one piece only.
const PARTS_SINCE_MINOR: u16 = 1;

const PARTS: TableDefinition<(u64, u64), &[u8]> = TableDefinition::new("snapshot parts");

/// Whether a snapshot of so many bytes, of a pod that speaks this minor, is written in parts.
pub(crate) fn is_in_parts(bytes: usize, part_bytes: usize, protocol_minor: u16) -> bool {
    bytes > part_bytes && protocol_minor >= PARTS_SINCE_MINOR
}

/// Writes one part of a snapshot.
pub(crate) fn put(database: &Database, number: u64, part: usize, bytes: &[u8]) -> Result<(), StoreError> {
    database.write_aside(|transaction| {
        transaction.open_table(PARTS)?.insert((number, part as u64), bytes)?;
        Ok(())
    })
}

/// All parts of a snapshot, one after the other.
pub(crate) fn joined(
    transaction: &redb::ReadTransaction,
    number: u64,
    parts: u64,
) -> Result<Vec<u8>, Failure> {
    let missing = || Damage::new("a part of its snapshot is missing");
    let table = match transaction.open_table(PARTS) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return Err(missing().into()),
        Err(error) => return Err(error.into()),
    };
    let mut joined = Vec::new();
    for part in 0..parts {
        joined.extend_from_slice(table.get((number, part))?.ok_or_else(missing)?.value());
    }
    Ok(joined)
}

/// Removes the parts of all snapshots.
pub(crate) fn remove_all(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(PARTS)?.retain(|_, _| false)?;
    Ok(())
}

/// Removes some parts of other snapshots than one. Says whether there may be more.
pub(crate) fn remove_some_others(database: &Database, number: u64) -> Result<bool, StoreError> {
    database.write_aside(|transaction| {
        let mut table = transaction.open_table(PARTS)?;
        let mut others = Vec::new();
        let range = table.range((0, 0)..(number, 0))?.chain(table.range((number + 1, 0)..)?);
        for part in range.take(REMOVED_AT_ONCE) {
            others.push(part?.0.value());
        }
        for other in &others {
            table.remove(other)?;
        }
        Ok(others.len() == REMOVED_AT_ONCE)
    })
}

/// What a snapshot is whose checksum is another one.
pub(crate) fn wrong_checksum() -> Damage {
    Damage::new("a checksum is wrong")
}

/// Removes what a log has up to an index, some at a time.
pub(crate) fn remove_log(
    database: &Database,
    log: TableDefinition<'_, u64, &'static [u8]>,
    index: u64,
) -> Result<(), StoreError> {
    loop {
        let removed = database.write_aside(|transaction| {
            let mut table = transaction.open_table(log)?;
            let mut first = Vec::new();
            for entry in table.range(..=index)?.take(REMOVED_AT_ONCE) {
                first.push(entry?.0.value());
            }
            if let Some(last) = first.last() {
                table.retain_in(..=*last, |_, _| false)?;
            }
            Ok(first.len())
        })?;
        if removed < REMOVED_AT_ONCE {
            return Ok(());
        }
    }
}

/// Takes the second part of a snapshot away, or puts something wrong in its place.
#[cfg(test)]
pub(super) fn spoil(database: &Database, wrong: Option<&[u8]>) {
    let spoilt = database.write(|transaction| {
        let mut table = transaction.open_table(PARTS)?;
        let second = table.iter()?.nth(1).ok_or_else(|| Damage::new("it is in one piece"))??.0.value();
        match wrong {
            Some(wrong) => table.insert(second, wrong)?,
            None => table.remove(second)?,
        };
        Ok(())
    });
    spoilt.expect("written");
}
