//! How replicas become members, and cease to be.

use std::collections::BTreeSet;
use std::time::Duration;

use cxl_pool::ReplicaId;
use serde::{Deserialize, Serialize};

use super::change::{LogOwner, Member, Raft};
use super::post::{Answer, Post, Question};

/// How often a replica asks that is no member yet.
const ASK_EVERY: Duration = Duration::from_millis(300);
/// How long it takes at most to send a new member everything.
const ADMISSION_MAX: Duration = Duration::from_mins(1);
/// How long an answer is waited for. Whoever was asked may have died since, and another one leads; who is asked twice admits once.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// For how many looks in a row a member hears of no leader before it asks whether it is one still.
const LEADERLESS_MAX: u32 = 10;
/// How often it is said that nobody answers.
const SAY_EVERY: u32 = 100;

/// What became of a dismissal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Dismissal {
    Done,
    /// There is no such member.
    NoMember,
    /// It is the only one.
    Last,
}

/// Who may change the members: one at a time.
pub(super) struct Register {
    raft: Raft,
    turn: tokio::sync::Mutex<()>,
}

impl Register {
    pub(super) fn new(raft: Raft) -> Self {
        Self { raft, turn: tokio::sync::Mutex::new(()) }
    }

    /// Makes the owner of a log a member, in the place of a log that this replica had before.
    pub(super) async fn admit(&self, replica: ReplicaId, owner: LogOwner) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        if self.voters().contains(&owner) {
            return Ok(());
        }
        tracing::info!(%replica, "becomes a member");
        let admission = async {
            let learning = self.raft.add_learner(owner, Member { replica }, true).await;
            learning.map_err(|error| error.to_string())?;
            let mut voters = self.voters();
            voters.retain(|voter| self.replica_of(*voter) != Some(replica));
            voters.insert(owner);
            let change = self.raft.change_membership(voters, false).await;
            change.map(|_| ()).map_err(|error| error.to_string())
        };
        let outcome = tokio::time::timeout(ADMISSION_MAX, admission).await;
        outcome.unwrap_or_else(|_| Err("it did not get everything in time".to_owned()))
    }

    /// The others do not count on this replica any more.
    pub(super) async fn dismiss(&self, replica: ReplicaId) -> Result<Dismissal, String> {
        let _turn = self.turn.lock().await;
        let mut voters = self.voters();
        let before = voters.len();
        voters.retain(|voter| self.replica_of(*voter) != Some(replica));
        if voters.len() == before {
            return Ok(Dismissal::NoMember);
        }
        if voters.is_empty() {
            return Ok(Dismissal::Last);
        }
        tracing::info!(%replica, "is no member any more");
        let dismissal = self.raft.change_membership(voters, false);
        let outcome = tokio::time::timeout(ADMISSION_MAX, dismissal).await;
        let outcome = outcome.map_err(|_| "no majority of the others answers".to_owned())?;
        outcome.map(|_| Dismissal::Done).map_err(|error| error.to_string())
    }

    fn voters(&self) -> BTreeSet<LogOwner> {
        self.raft.metrics().borrow().membership_config.voter_ids().collect()
    }

    fn replica_of(&self, owner: LogOwner) -> Option<ReplicaId> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        metrics.membership_config.membership().get_node(&owner).map(|member| member.replica)
    }
}

/// Asks the others whenever this replica is no member, or hears of no leader: it may have been dismissed while it was away.
pub(super) async fn stay_member(raft: Raft, post: Post, owner: LogOwner, others: Vec<ReplicaId>) {
    let mut asked: u32 = 0;
    let mut leaderless: u32 = 0;
    loop {
        let (is_member, is_led) = {
            let metrics = raft.metrics();
            let metrics = metrics.borrow();
            let mut voters = metrics.membership_config.voter_ids();
            (voters.any(|voter| voter == owner), metrics.current_leader.is_some())
        };
        leaderless = if is_led { 0 } else { leaderless.saturating_add(1) };
        if is_member && leaderless < LEADERLESS_MAX {
            asked = 0;
            tokio::time::sleep(ASK_EVERY).await;
            continue;
        }
        for other in &others {
            match post.ask(*other, Question::Admit { owner }, ANSWER_MAX).await {
                Ok(Answer::Admitted) => break,
                Ok(Answer::Failed(reason)) => tracing::warn!(replica = %other, reason, "not admitted yet"),
                Ok(_) | Err(_) => {}
            }
        }
        asked = asked.wrapping_add(1);
        if asked % SAY_EVERY == 10 {
            tracing::warn!(
                "no controller replica that leads has answered: this one waits, for a majority to run or to become a \
                 member; to begin a pod with replicas, start one of them once with --bootstrap"
            );
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}
