//! The leader's commits.

use std::time::Duration;

use cxl_pool::ReplicaId;
use openraft::error::{ClientWriteError, RaftError};
use pod_api::Event;
use pod_state::{Command, State};

use super::change::{Change, Outcome, Raft};
use super::replica::ReplicationError;

/// How long a majority may take. After that it is open whether the change will be made, and the leader begins anew from
/// what is certain.
const COMMIT_MAX: Duration = Duration::from_secs(5);

/// Has changes made by all replicas.
pub(crate) struct Proposer {
    raft: Raft,
    runtime: tokio::runtime::Handle,
}

impl Proposer {
    pub(super) fn new(raft: Raft, runtime: tokio::runtime::Handle) -> Self {
        Self { raft, runtime }
    }

    /// Returns once a majority has it in its log. `state` is the one that the commands lead to.
    pub(crate) fn commit(
        &self,
        commands: &[(u64, &Command)],
        events: &[Event],
        state: &State,
    ) -> Result<(), ReplicationError> {
        self.propose(Change::turn(commands, events, state))
    }

    /// Who votes.
    pub(crate) fn voters(&self) -> Vec<ReplicaId> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        let members = metrics.membership_config.membership();
        members.voter_ids().filter_map(|owner| Some(members.get_node(&owner)?.replica)).collect()
    }

    pub(super) fn propose(&self, change: Change) -> Result<(), ReplicationError> {
        self.runtime.block_on(propose(&self.raft, change))
    }
}

/// Returns once a majority has the change in its log, and it was made.
pub(super) async fn propose(raft: &Raft, change: Change) -> Result<(), ReplicationError> {
    let deposed = |reason: &str| Err(ReplicationError::Deposed(reason.to_owned()));
    match tokio::time::timeout(COMMIT_MAX, raft.client_write(change)).await {
        Ok(Ok(written)) if written.data == Outcome::Done => Ok(()),
        Ok(Ok(_)) => deposed("another change came before"),
        Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(_)))) => {
            deposed("another replica leads now")
        }
        Ok(Err(RaftError::APIError(error @ ClientWriteError::ChangeMembershipError(_)))) => {
            deposed(&error.to_string())
        }
        Ok(Err(RaftError::Fatal(error))) => Err(ReplicationError::Ended(error.to_string())),
        Err(_) => deposed("no majority of the replicas answers"),
    }
}
