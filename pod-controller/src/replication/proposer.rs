//! The leader's commits.

use std::time::{Duration, Instant};

use openraft::error::{ClientWriteError, RaftError};
use pod_api::Event;
use pod_state::{Command, State};

use super::change::{Change, Member, Outcome, Raft};
use super::replica::{ReplicationError, catch_up};

/// How long a majority may take. After that it is open whether the change will be made, and the leader begins anew from
/// what is certain.
const COMMIT_MAX: Duration = Duration::from_secs(5);

/// Has changes made by all replicas.
pub(crate) struct Proposer {
    raft: Raft,
    runtime: tokio::runtime::Handle,
    /// See [`trusted_for`](super::raft_config::trusted_for).
    trusted: Duration,
}

impl Proposer {
    pub(super) fn new(raft: Raft, runtime: tokio::runtime::Handle, trusted: Duration) -> Self {
        Self { raft, runtime, trusted }
    }

    /// Returns once a majority has it in its log. `state` is the one that the commands lead to. What can be done `meanwhile` is done
    /// while the others are waited for.
    pub(crate) fn commit(
        &self,
        commands: &[(u64, &Command)],
        events: &[Event],
        state: &State,
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Result<(), ReplicationError> {
        let (raft, change) = (self.raft.clone(), Change::turn(commands, events, state));
        let proposed = self.runtime.spawn(async move { propose(&raft, change).await });
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        self.runtime
            .block_on(proposed)
            .unwrap_or_else(|error| Err(ReplicationError::Ended(error.to_string())))
    }

    /// Who votes.
    pub(crate) fn voters(&self) -> Vec<Member> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        let members = metrics.membership_config.membership();
        members.voter_ids().filter_map(|owner| members.get_node(&owner).cloned()).collect()
    }

    /// Returns once it is certain that no other one leads, and that none will before this one has had the time to do what takes
    /// none. What a leader writes to the pool before its commit is where nobody is who knows as much as it does: another one may
    /// have put somebody there.
    pub(crate) fn confirm(&self) -> Result<(), ReplicationError> {
        let since = Instant::now();
        loop {
            let asked = Instant::now();
            self.runtime.block_on(confirm(&self.raft))?;
            if is_fresh(self.trusted, asked, Instant::now()) {
                return Ok(());
            }
            if since.elapsed() > COMMIT_MAX {
                return Err(ReplicationError::Deposed(
                    "a majority of the replicas answers too late".to_owned(),
                ));
            }
        }
    }

    pub(super) fn propose(&self, change: Change) -> Result<(), ReplicationError> {
        self.runtime.block_on(propose(&self.raft, change))
    }
}

/// Returns once a majority has said that this one leads still.
pub(super) async fn confirm(raft: &Raft) -> Result<(), ReplicationError> {
    catch_up(raft).await
}

/// Whether nobody else can have been elected since a majority was asked, whose word is trusted for so long.
pub(super) fn is_fresh(trusted: Duration, asked: Instant, now: Instant) -> bool {
    now.saturating_duration_since(asked) < trusted
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
