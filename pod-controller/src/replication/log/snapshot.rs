//! The newest snapshot in a replica's log, and how the log is cut off that it takes the place of. Both are done in pieces, so that
//! entries are appended meanwhile.

use std::sync::{Arc, MutexGuard, PoisonError};

use openraft::{Entry, LogId};
use redb::ReadableTable;
use serde::{Deserialize, Serialize};

use super::{
    ENTRIES, FACTS, FORMAT, FORMAT_IN_PARTS, LogFile, LogOwner, Meta, Replicated, SNAPSHOT, of_a_log,
};
use crate::store::{Failure, LOG_LEAST, Length, StoreError, parts, seal, unseal};

/// The fact that says where a snapshot in parts is.
const IN_PARTS: &str = "snapshot in parts";

/// How much is done at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) part_bytes: usize,
    /// How many entries are removed from the log.
    pub(crate) purged: usize,
    /// How many changes a log has at least before a snapshot is made.
    pub(crate) log_least: u64,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { part_bytes: parts::PART_BYTES, purged: 512, log_least: LOG_LEAST }
    }
}

/// How long the log is since somebody was told to make a snapshot, and how long the last snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extent {
    log: Length,
    snapshot_bytes: u64,
}

impl Extent {
    pub(super) fn after_snapshot(snapshot_bytes: u64) -> Self {
        Self { log: Length::default(), snapshot_bytes }
    }

    pub(super) fn add(&mut self, bytes: usize) {
        self.log.add(bytes);
    }

    pub(super) fn extend(&mut self, more: Self) {
        self.log.changes += more.log.changes;
        self.log.bytes += more.log.bytes;
    }
}

/// Which parts a snapshot has.
#[derive(Serialize, Deserialize)]
struct InParts {
    number: u64,
    parts: u64,
    checksum: u32,
    meta: Meta,
}

impl LogFile {
    pub(super) fn extent(&self) -> MutexGuard<'_, Extent> {
        // Numbers are right whoever panicked.
        self.extent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is time for a snapshot. It is said once, and again when the log is too long for the next one.
    pub(in crate::replication) fn take_outgrown(&self) -> bool {
        let mut extent = self.extent();
        let outgrown = extent.log.outgrows(extent.snapshot_bytes, self.sizes.log_least);
        if outgrown {
            extent.log = Length::default();
        }
        outgrown
    }

    /// The newest snapshot.
    pub(crate) fn snapshot(&self) -> Result<Option<(Meta, String)>, StoreError> {
        self.read(|transaction| {
            let Some(InParts { number, parts, checksum, meta }) = in_parts(transaction)? else {
                return whole(transaction);
            };
            let data = parts::joined(transaction, number, parts)?;
            let data =
                String::from_utf8(data).ok().filter(|data| crc32fast::hash(data.as_bytes()) == checksum);
            Ok(Some((meta, data.ok_or_else(parts::wrong_checksum)?)))
        })
    }

    /// What the newest snapshot is of.
    pub(super) fn snapshot_meta(&self) -> Result<Option<Meta>, StoreError> {
        self.read(|transaction| match in_parts(transaction)? {
            Some(there) => Ok(Some(there.meta)),
            None => Ok(whole(transaction)?.map(|(meta, _)| meta)),
        })
    }

    /// Keeps a snapshot in place of an older one. One that was built while a newer one came from another replica is of no use any
    /// more: the log begins after that.
    pub(crate) async fn keep_snapshot(
        &self,
        meta: &Meta,
        data: &str,
        protocol_minor: u16,
    ) -> Result<(), StoreError> {
        let _alone = self.keeping.lock().await;
        if self.snapshot_meta()?.is_some_and(|kept| kept.last_log_id > meta.last_log_id) {
            return Ok(());
        }
        if parts::is_in_parts(data.len(), self.sizes.part_bytes, protocol_minor) {
            self.keep_in_parts(meta, data).await?;
        } else {
            let sealed = self.database.sealed(&(meta, data)).map_err(of_a_log)?;
            self.write_aside(|transaction| {
                transaction.open_table(SNAPSHOT)?.insert((), sealed.as_slice())?;
                let mut facts = transaction.open_table(FACTS)?;
                facts.insert("format", seal(&FORMAT)?.as_slice())?;
                facts.remove(IN_PARTS)?;
                parts::remove_all(transaction)
            })?;
        }
        self.extent().snapshot_bytes = data.len() as u64;
        Ok(())
    }

    async fn keep_in_parts(&self, meta: &Meta, data: &str) -> Result<(), StoreError> {
        let kept = self.read(in_parts)?;
        let number = kept.map_or(0, |kept| kept.number) + 1;
        // An attempt that was not finished may have left some.
        let mut count = 0;
        for part in data.as_bytes().chunks(self.sizes.part_bytes) {
            parts::put(&self.database, number, count, part).map_err(of_a_log)?;
            count += 1;
            tokio::task::yield_now().await;
        }
        let checksum = crc32fast::hash(data.as_bytes());
        let there = InParts { number, parts: count as u64, checksum, meta: meta.clone() };
        self.write_aside(|transaction| {
            let mut facts = transaction.open_table(FACTS)?;
            facts.insert("format", seal(&FORMAT_IN_PARTS)?.as_slice())?;
            facts.insert(IN_PARTS, seal(&there)?.as_slice())?;
            transaction.open_table(SNAPSHOT)?.remove(())?;
            Ok(())
        })?;
        // What of the one before is left when the process ends, the next one removes.
        while parts::remove_some_others(&self.database, number).map_err(of_a_log)? {
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Cuts off the first entries of those up to one. Says whether there are more.
    pub(super) fn purge_some(&self, last: LogId<LogOwner>) -> Result<bool, StoreError> {
        let mut more = false;
        self.write_aside(|transaction| {
            let mut facts = transaction.open_table(FACTS)?;
            let before = facts.get("purged")?.map(|sealed| unseal::<LogId<LogOwner>>(sealed.value()));
            let mut entries = transaction.open_table(ENTRIES)?;
            let goes_on = entries.last()?.is_some_and(|(index, _)| index.value() > last.index);
            // A log that ends before it must not go on after it: all of that goes at once.
            let upto = if goes_on {
                let mut first = entries.range(..=last.index)?;
                let step = first.nth(self.sizes.purged - 1).transpose()?;
                step.map(|(_, sealed)| unseal::<Entry<Replicated>>(sealed.value())).transpose()?
            } else {
                None
            };
            let upto = upto.map_or(last, |entry| entry.log_id);
            more = upto < last;
            entries.retain_in(..=upto.index, |_, _| false)?;
            let purged = before.transpose()?.map_or(upto, |before| before.max(upto));
            facts.insert("purged", seal(&purged)?.as_slice())?;
            Ok(())
        })?;
        Ok(more)
    }

    /// Cuts off what is left of that.
    pub(super) async fn purge_rest(self: Arc<Self>, last: LogId<LogOwner>) {
        loop {
            tokio::task::yield_now().await;
            match self.purge_some(last) {
                Ok(true) => {}
                Ok(false) => return,
                // Nor can entries be appended any more, which ends the replica.
                Err(error) => {
                    tracing::warn!("{error}");
                    return;
                }
            }
        }
    }

    fn write_aside(
        &self,
        body: impl FnOnce(&redb::WriteTransaction) -> Result<(), Failure>,
    ) -> Result<(), StoreError> {
        self.database.write_aside(body).map_err(of_a_log)
    }
}

fn in_parts(transaction: &redb::ReadTransaction) -> Result<Option<InParts>, Failure> {
    let sealed = transaction.open_table(FACTS)?.get(IN_PARTS)?;
    Ok(sealed.map(|sealed| unseal(sealed.value())).transpose()?)
}

fn whole(transaction: &redb::ReadTransaction) -> Result<Option<(Meta, String)>, Failure> {
    let sealed = transaction.open_table(SNAPSHOT)?.get(())?;
    Ok(sealed.map(|sealed| unseal(sealed.value())).transpose()?)
}
