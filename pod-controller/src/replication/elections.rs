//! What Raft is told of terms.

use std::sync::Arc;
use std::time::Duration;

use cxl_pool::ReplicaId;
use openraft::raft::{VoteRequest, VoteResponse};
use openraft::{CommittedLeaderId, LogId, ServerState, Vote};
use tokio::time::Instant;

use super::change::LogOwner;
use super::outside::lease;
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

/// Another replica asked for a vote in this term, with a log that ends there, and was answered so. Where it was refused for what is missing
/// in its log, this one stands for election in its place, unless somebody leads.
///
/// Whoever asks votes for itself, and so for nobody else in that term. Raft has it wait longer the next time, but not longer than others
/// wait whose numbers are higher: without this they would ask after it in each term, and nobody would be elected, for good.
pub(super) async fn stand_for(
    standing: Arc<Standing>,
    asker: ReplicaId,
    (term, last): (u64, Option<LogId<LogOwner>>),
    answer: VoteResponse<LogOwner>,
) {
    let is_short = !answer.vote_granted && answer.last_log_id > last;
    // Of a vote in a later term it hears by that answer, and waits.
    if !is_short || answer.vote.leader_id().term > term {
        return;
    }
    let (raft, outside) = (&standing.raft, &standing.outside);
    let may_stand = || outside.as_ref().is_none_or(|outside| outside.may_stand(lease(raft)));
    let Some(turn) = turn(&standing, asker).filter(|_| may_stand()) else { return };
    // Several that stood at once would vote for themselves.
    tokio::time::sleep(Duration::from_millis(raft.config().heartbeat_interval) * turn).await;
    let is_idle = {
        let metrics = raft.metrics();
        let metrics = metrics.borrow();
        metrics.vote == answer.vote && metrics.state != ServerState::Leader
    };
    if !is_idle || !may_stand() {
        return;
    }
    // In a later term than that one. Raft's end is told by its state.
    let Ok(own) = vote_for_nobody(&standing, term).await else { return };
    let is_candidate = !own.vote.is_committed() && own.vote.leader_id().term == term;
    if !own.vote_granted && !is_candidate {
        return;
    }
    if let Some(outside) = outside {
        outside.note_stand();
    }
    tracing::info!(%asker, "it lacks what may be committed: this replica stands for election, to give it to the others");
    let _ = raft.trigger().elect().await;
}

/// How many members stand for election before this one in place of one that asks: those that can lead first. None where none of both can.
fn turn(standing: &Standing, asker: ReplicaId) -> Option<u32> {
    let metrics = standing.raft.metrics();
    let metrics = metrics.borrow();
    let members = metrics.membership_config.membership();
    let me = (standing.outside.is_some(), standing.me);
    let mut before = 0;
    for (_, member) in members.nodes() {
        if member.replica != asker {
            before += u32::from((!member.is_in_pod(), member.replica) < me);
        } else if !member.is_in_pod() && standing.outside.is_some() {
            return None;
        }
    }
    Some(before)
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
