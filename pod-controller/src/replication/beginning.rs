//! How the replicated life of a pod begins.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use cxl_pool::{Memory, Pool, ReplicaId, regions};
use pod_state::State;

use super::change::{Change, LogOwner, Member, Raft};
use super::replica::ReplicationError;
use crate::config::Config;
use crate::controller::{ControllerError, SeenTerms};
use crate::store::{Recovered, Store, StoreError};

/// Prepares the first change of all, where this replica is to begin.
pub(super) async fn begin<M: Memory>(
    (pool, memory): (&Arc<Pool>, &M),
    config: &Config,
    (me, owner): (ReplicaId, LogOwner),
    raft: &Raft,
    bootstrap: bool,
) -> Result<Option<(Change, Option<Store>)>, ControllerError> {
    if !bootstrap {
        return Ok(None);
    }
    let ended = |error: String| ReplicationError::Ended(error);
    let initialized = raft.is_initialized().await.map_err(|error| ended(error.to_string()))?;
    if !initialized {
        let writer = regions::newest(memory, pool.layout()).map(|(replica, _)| replica);
        if let Some(other) = writer.filter(|writer| *writer != me) {
            return Err(ReplicationError::BegunAlready(other).into());
        }
    }
    let path = &config.controller.state;
    let (file, recovered) = if path.exists() {
        let (file, recovered) = Store::open(path)?;
        (Some(file), recovered)
    } else {
        (None, Recovered { state: None, events: Vec::new(), term: 0 })
    };
    let state = Box::new(recovered.state.unwrap_or_else(|| State::new(config.options(Some(pool)))));
    let terms = recovered.term.max(SeenTerms::look(memory, pool.layout(), me).highest());
    let change = Change::Begin { state, events: recovered.events, terms };
    if !initialized {
        let members = BTreeMap::from([(owner, Member::in_pod(me))]);
        raft.initialize(members).await.map_err(|error| ended(error.to_string()))?;
    }
    Ok(Some((change, file)))
}

/// A state file that is left from before there were replicas is not to be used again.
pub(super) fn retire(path: &Path) -> Result<(), StoreError> {
    if !path.exists() {
        return Ok(());
    }
    match Store::open(path) {
        Ok((file, _)) => file.hand_over(),
        Err(StoreError::HandedOver { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}
