//! What Raft is told of terms.

use std::time::Duration;

use openraft::raft::{VoteRequest, VoteResponse};
use openraft::{CommittedLeaderId, LogId, Vote};
use tokio::time::Instant;

use super::change::LogOwner;
use super::replica::{ReplicationError, Standing};

/// How long a leader may take to give up an office: for a moment after an election nobody else may stand for one.
const RESIGN_MAX: Duration = Duration::from_secs(65);
/// How often it is tried.
const TRY_EVERY: Duration = Duration::from_millis(10);

/// Has this replica, which is elected for a term, give that up, and whoever is elected next be elected for a larger term than `above`.
///
/// The logs of all replicas may have been restored from backups, and daemons obey nobody whose term is not larger than those that they
/// have seen. A replica that hears of a vote in a later term votes in none before that any more, and remembers it: so it is told of one,
/// for a candidate that there is not.
pub(super) async fn elect_above(
    standing: &Standing,
    elected: u64,
    above: u64,
) -> Result<(), ReplicationError> {
    let since = Instant::now();
    let term = above.max(elected).saturating_add(1);
    loop {
        let answer = vote_for_nobody(standing, term).await?;
        if answer.vote_granted {
            return Ok(());
        }
        if answer.vote.leader_id().term > elected || since.elapsed() > RESIGN_MAX {
            return Err(ReplicationError::Deposed("another one was elected meanwhile".to_owned()));
        }
        tokio::time::sleep(TRY_EVERY).await;
    }
}

/// Has this replica vote in a term for a candidate that there is not, unless it has heard of somebody who leads just now, or has voted in
/// such a term.
pub(super) async fn vote_for_nobody(
    standing: &Standing,
    term: u64,
) -> Result<VoteResponse<LogOwner>, ReplicationError> {
    let nobody = !standing.owner;
    // As much of the log as anybody can have.
    let last = LogId::new(CommittedLeaderId::new(term, standing.owner), u64::MAX);
    let answer = standing.raft.vote(VoteRequest::new(Vote::new(term, nobody), Some(last))).await;
    answer.map_err(|error| ReplicationError::Ended(error.to_string()))
}
