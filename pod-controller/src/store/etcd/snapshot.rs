//! Snapshots in etcd, written beside the changes that are made meanwhile.
//!
//! Their parts are written on condition that nobody else has come: the head, which every change writes, need not be as it was. Nothing
//! leads to them until the head of a later change does.

use std::sync::Arc;

use pod_state::State;
use serde::Serialize;

use super::gateway::{Compare, Operation, Transaction};
use super::{EtcdStore, PART_BYTES, Snapshot};
use crate::replication::Knowledge;
use crate::store::aside::{Aside, Ends};
use crate::store::etcd::link::EtcdLink;
use crate::store::{LOG_LEAST, Length, StoreError, seal};

/// Where a snapshot is, and how many bytes it takes.
pub(super) type Writing = Aside<(Snapshot, u64), StoreError>;

/// A snapshot of which all parts are there.
pub(super) struct Written {
    pub(super) snapshot: Snapshot,
    pub(super) bytes: u64,
    /// What of the log it takes the place of.
    pub(super) covers: Length,
}

impl EtcdStore {
    /// Does what takes long and nobody waits for, after the state that was kept last has been acted upon: once the log has outgrown the
    /// snapshot before it, a new one is written while more is committed.
    pub(crate) fn tidy(&mut self, state: &Arc<State>) {
        if self.writing.is_some() || self.renews || !self.log.outgrows(self.snapshot_bytes, LOG_LEAST) {
            return;
        }
        let (link, held, state) = (Arc::clone(&self.link), self.office.held(), Arc::clone(state));
        let (number, sequence) = (self.next_number(), self.head.sequence);
        let events = self.events.clone();
        let begun = Aside::begin(self.log, move |ends| {
            let sealed = sealed(&link, &Knowledge { state: Some(&state), events: &events, terms: 0 })?;
            drop(state);
            write(&link, &held, (number, sequence), &sealed, ends)
        });
        match begun {
            Ok(writing) => self.writing = Some(writing),
            // The next change tries again.
            Err(error) => tracing::warn!("the log in etcd grows: {error}"),
        }
    }

    /// A snapshot that is whole, and to which the next head is to lead.
    pub(super) fn take_written(&mut self) -> Option<Written> {
        let writing = self.writing.take_if(|writing| writing.is_over())?;
        match writing.outcome() {
            Ok(written) => written.map(|((snapshot, bytes), covers)| Written { snapshot, bytes, covers }),
            // What was to be kept is.
            Err(error) => {
                tracing::warn!("the log in etcd grows: {error}");
                None
            }
        }
    }

    /// Waits until no snapshot is being written. Nothing comes of one that was.
    pub(super) fn stop_writing(&mut self) {
        if let Some(writing) = self.writing.take() {
            writing.end();
            if let Err(error) = writing.outcome() {
                tracing::debug!("no snapshot was kept: {error}");
            }
        }
    }
}

impl Drop for EtcdStore {
    fn drop(&mut self) {
        self.stop_writing();
    }
}

fn sealed(link: &EtcdLink, value: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    seal(value).map_err(|damage| link.damaged(damage.to_string()).into())
}

/// Writes all parts, and removes what a longer one that was not finished may have left.
fn write(
    link: &EtcdLink,
    held: &Compare,
    (number, sequence): (u64, u64),
    sealed: &[u8],
    ends: Ends<'_>,
) -> Result<Option<(Snapshot, u64)>, StoreError> {
    let place = &link.place;
    let transact = |operation: Operation| -> Result<bool, StoreError> {
        let compare = vec![held.clone()];
        let transaction = Transaction { compare, success: vec![operation], failure: Vec::new() };
        // Whoever has come instead is noticed by the next change.
        Ok(link.transact(&transaction)?.succeeded)
    };
    let mut parts = 0;
    for bytes in sealed.chunks(PART_BYTES) {
        if ends() || !transact(Operation::put(&place.snapshot(number, parts), bytes))? {
            return Ok(None);
        }
        parts += 1;
    }
    if !transact(Operation::delete(&place.snapshot(number, parts), &place.snapshot(number + 1, 0)))? {
        return Ok(None);
    }
    Ok(Some((Snapshot { number, sequence, parts }, sealed.len() as u64)))
}
