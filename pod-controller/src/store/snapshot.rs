//! Snapshots of the state file, made beside what is committed meanwhile.

use std::sync::Arc;

use pod_state::State;
use redb::WriteTransaction;

use super::aside::{Aside, Ends};
use super::database::{Database, Failure};
use super::{FORMAT, FORMAT_IN_PARTS, LOG, LOG_LEAST, NUMBERS, SNAPSHOT, Store, StoreError, parts};

/// Where a snapshot in parts begins.
const NUMBER: &str = "snapshot number";
const COUNT: &str = "snapshot parts";

/// Returns how many bytes it took.
pub(super) type Writing = Aside<u64, StoreError>;

/// What a snapshot is made of.
struct Job {
    database: Arc<Database>,
    state: Arc<State>,
    number: u64,
    part_bytes: usize,
}

impl Store {
    /// Does what takes long and nobody waits for, after the state that was kept last has been acted upon: once the log has outgrown the
    /// snapshot before it, a new one takes its place, written while more is committed.
    pub fn tidy(&mut self, state: &Arc<State>) {
        if self.log.outgrows(self.snapshot_bytes, LOG_LEAST) {
            self.begin_snapshot(state);
        }
    }

    /// Whether a snapshot is being written.
    pub fn is_writing(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| !writing.is_over())
    }

    /// Begins to write a snapshot of the state that was kept last, unless one is being written.
    pub fn begin_snapshot(&mut self, state: &Arc<State>) {
        if self.writing.is_some() {
            return;
        }
        self.number += 1;
        let (database, state) = (Arc::clone(&self.database), Arc::clone(state));
        let job = Job { database, state, number: self.number, part_bytes: self.part_bytes };
        match Aside::begin(self.log, move |ends| job.write(ends)) {
            Ok(writing) => self.writing = Some(writing),
            // The next commit tries again.
            Err(error) => tracing::warn!("the log of the state file grows: {error}"),
        }
    }

    /// Hears what became of the snapshot that was being written, if it is over.
    pub(super) fn note_written(&mut self) -> Result<(), StoreError> {
        match self.writing.take_if(|writing| writing.is_over()) {
            Some(writing) => self.ended(writing),
            None => Ok(()),
        }
    }

    /// Waits until no snapshot is being written. One that is not done comes to nothing.
    pub(super) fn stop_writing(&mut self) -> Result<(), StoreError> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        writing.end();
        self.ended(writing)
    }

    fn ended(&mut self, writing: Writing) -> Result<(), StoreError> {
        if let Some((bytes, covered)) = writing.outcome()? {
            self.snapshot_bytes = bytes;
            self.log = self.log.after(covered);
        }
        Ok(())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Err(error) = self.stop_writing() {
            tracing::warn!("no snapshot was kept: {error}");
        }
    }
}

impl Job {
    fn write(self, ends: Ends<'_>) -> Result<Option<u64>, StoreError> {
        let Self { database, state, number, part_bytes } = self;
        let (index, minor) = (state.index, state.options.protocol_minor);
        let sealed = database.sealed(&*state)?;
        // Others need not wait for the end of this to have the copy back.
        drop(state);
        let bytes = sealed.len() as u64;
        if !parts::is_in_parts(sealed.len(), part_bytes, minor) {
            database.write_aside(|transaction| keep_whole(transaction, &sealed, index))?;
            return Ok(Some(bytes));
        }
        let mut count = 0;
        for part in sealed.chunks(part_bytes) {
            if ends() {
                return Ok(None);
            }
            parts::put(&database, number, count, part)?;
            count += 1;
        }
        database.write_aside(|transaction| {
            let mut numbers = transaction.open_table(NUMBERS)?;
            for (name, value) in [("format", FORMAT_IN_PARTS), (NUMBER, number), (COUNT, count as u64)] {
                numbers.insert(name, value)?;
            }
            transaction.open_table(SNAPSHOT)?.remove(())?;
            Ok(())
        })?;
        // What of it is left when the process ends, the next snapshot removes.
        parts::remove_log(&database, LOG, index)?;
        while parts::remove_some_others(&database, number)? {}
        Ok(Some(bytes))
    }
}

/// Keeps a snapshot in one piece, as older versions know it, in place of what led to it.
pub(super) fn keep_whole(transaction: &WriteTransaction, sealed: &[u8], index: u64) -> Result<(), Failure> {
    transaction.open_table(LOG)?.retain_in(..=index, |_, _| false)?;
    transaction.open_table(SNAPSHOT)?.insert((), sealed)?;
    let mut numbers = transaction.open_table(NUMBERS)?;
    numbers.insert("format", FORMAT)?;
    numbers.remove(COUNT)?;
    // Some may be of a snapshot that was not finished.
    parts::remove_all(transaction)
}

/// The number of the last snapshot in parts, and the newest snapshot as it was written, if there is one.
pub(super) fn read(transaction: &redb::ReadTransaction) -> Result<(u64, Option<Vec<u8>>), Failure> {
    let numbers = transaction.open_table(NUMBERS)?;
    let number = numbers.get(NUMBER)?.map_or(0, |number| number.value());
    if let Some(count) = numbers.get(COUNT)? {
        return Ok((number, Some(parts::joined(transaction, number, count.value())?)));
    }
    let whole = transaction.open_table(SNAPSHOT)?.get(())?.map(|sealed| sealed.value().to_vec());
    Ok((number, whole))
}
