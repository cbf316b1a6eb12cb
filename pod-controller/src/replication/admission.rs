//! How replicas become members, and cease to be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cxl_pool::ReplicaId;
use openraft::ChangeMembers;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::change::{LogOwner, Member, Raft};
use super::post::{Answer, Question};
use super::replica::{Standing, leader};
use super::roll::Roll;

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
/// Within so many heartbeats a member that lives has answered one, and within this time, whatever is longer.
const ANSWERS_WITHIN: (u32, Duration) = (10, Duration::from_secs(1));
/// How often is looked whether it has.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What became of a dismissal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Dismissal {
    Done,
    /// There is no such member.
    NoMember,
    /// It is the only one.
    Last,
    /// Too few would be left that answer: these do not.
    TooFew(Vec<ReplicaId>),
    /// None would be left that answers and can lead.
    NoneInPod,
}

/// Who may change the members: one at a time.
pub(super) struct Register {
    raft: Raft,
    roll: Roll,
    turn: tokio::sync::Mutex<()>,
}

impl Register {
    pub(super) fn new(raft: Raft, roll: Roll) -> Self {
        Self { raft, roll, turn: tokio::sync::Mutex::new(()) }
    }

    /// Makes the owner of a log a member, in the place of a log that this replica had before.
    pub(super) async fn admit(&self, member: Member, owner: LogOwner) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        self.check_elected()?;
        let replica = member.replica;
        if is_member(&self.raft, owner) {
            return self.describe(member, owner).await;
        }
        tracing::info!(%replica, "becomes a member");
        let admission = async {
            let learning = self.raft.add_learner(owner, member.clone(), true).await;
            learning.map_err(|error| error.to_string())?;
            self.describe(member, owner).await?;
            // A change that was not ended, since whoever led it died, ends with this one.
            let mut voters = self.agreed_voters();
            voters.retain(|voter| self.replica_of(*voter) != Some(replica));
            voters.insert(owner);
            let change = self.raft.change_membership(voters, false).await;
            change.map(|_| ()).map_err(|error| error.to_string())
        };
        let outcome = tokio::time::timeout(ADMISSION_MAX, admission).await;
        outcome.unwrap_or_else(|_| Err("it did not get everything in time".to_owned()))
    }

    /// Has all know this of a member, such as that it is outside of the pod now.
    async fn describe(&self, member: Member, owner: LogOwner) -> Result<(), String> {
        if is_known_as(&self.raft, owner, &member) {
            return Ok(());
        }
        let change = ChangeMembers::SetNodes(BTreeMap::from([(owner, member)]));
        let change = tokio::time::timeout(ADMISSION_MAX, self.raft.change_membership(change, true));
        let outcome = change.await.map_err(|_| "no majority answers".to_owned())?;
        outcome.map(|_| ()).map_err(|error| error.to_string())
    }

    /// The others do not count on this replica any more.
    pub(super) async fn dismiss(&self, replica: ReplicaId) -> Result<Dismissal, String> {
        let _turn = self.turn.lock().await;
        let voters = match self.voters_without(replica).await? {
            Ok(voters) => voters,
            Err(refused) => return Ok(refused),
        };
        tracing::info!(%replica, "is no member any more");
        let dismissal = self.raft.change_membership(voters, false);
        let outcome = tokio::time::timeout(ADMISSION_MAX, dismissal).await;
        let outcome = outcome.map_err(|_| "no majority of the others answers".to_owned())?;
        outcome.map(|_| Dismissal::Done).map_err(|error| error.to_string())
    }

    /// Says what would become of a dismissal.
    pub(super) async fn try_dismissing(&self, replica: ReplicaId) -> Result<Dismissal, String> {
        let _turn = self.turn.lock().await;
        Ok(self.voters_without(replica).await?.err().unwrap_or(Dismissal::Done))
    }

    /// Who votes once this replica is dismissed, or why it cannot be.
    async fn voters_without(
        &self,
        replica: ReplicaId,
    ) -> Result<Result<BTreeSet<LogOwner>, Dismissal>, String> {
        // Whoever was to go by a change that was not ended goes: a log that is lost would stay for good beside that which took its place.
        let before = self.agreed_voters();
        let mut after = before.clone();
        after.retain(|voter| self.replica_of(*voter) != Some(replica));
        if after.len() == before.len() {
            return Ok(Err(Dismissal::NoMember));
        }
        if after.is_empty() {
            return Ok(Err(Dismissal::Last));
        }
        let since = Instant::now();
        Ok(match self.too_few_answer([&before, &after]).await? {
            None if !after.iter().any(|voter| self.can_lead(*voter, since)) => Err(Dismissal::NoneInPod),
            None => Ok(after),
            Some(silent) => Err(Dismissal::TooFew(silent)),
        })
    }

    /// Who of the last of these sets does not answer, unless a majority of each answers what it is asked from now on. A change of members
    /// holds from when it is in the leader's log: if those whom it counts on could not agree to it, nothing could be agreed upon any
    /// more, not even to undo it.
    async fn too_few_answer(&self, sets: [&BTreeSet<LogOwner>; 2]) -> Result<Option<Vec<ReplicaId>>, String> {
        let since = Instant::now();
        let within = self.answers_within();
        loop {
            let me = self.check_elected()?;
            let answers = |voter: &&LogOwner| **voter == me || self.roll.has_answered(**voter, since);
            if sets.iter().all(|voters| voters.iter().filter(answers).count() * 2 > voters.len()) {
                return Ok(None);
            }
            if since.elapsed() >= within {
                let silent = sets[1].iter().filter(|voter| !answers(voter));
                return Ok(Some(silent.filter_map(|voter| self.replica_of(*voter)).collect()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Whether this member reaches the pool, and is this one or has answered since.
    fn can_lead(&self, voter: LogOwner, since: Instant) -> bool {
        let is_in_pod = {
            let metrics = self.raft.metrics();
            let metrics = metrics.borrow();
            metrics.membership_config.membership().get_node(&voter).is_some_and(Member::is_in_pod)
        };
        is_in_pod && (self.elected() == Some(voter) || self.roll.has_answered(voter, since))
    }

    /// Whether this replica leads, and a majority of the members has answered it lately.
    pub(super) fn is_followed(&self) -> bool {
        let Some(me) = self.elected() else { return false };
        let since = Instant::now().checked_sub(self.answers_within());
        let answers = |voter: &&LogOwner| {
            **voter == me || since.is_none_or(|since| self.roll.has_answered(**voter, since))
        };
        let voters = self.voters();
        voters.iter().filter(answers).count() * 2 > voters.len()
    }

    /// Within which time a member that lives answers.
    fn answers_within(&self) -> Duration {
        let (heartbeats, least) = ANSWERS_WITHIN;
        least.max(Duration::from_millis(self.raft.config().heartbeat_interval) * heartbeats)
    }

    /// Whether somebody becomes a member, or ceases to be one, as far as this replica goes.
    #[cfg(test)]
    pub(super) fn is_busy(&self) -> bool {
        self.turn.try_lock().is_err()
    }

    /// Whose log this replica has, if it leads. One that has been dismissed says for a moment that it does; Raft holds no longer that it may
    /// change members, and fails at that.
    fn elected(&self) -> Option<LogOwner> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        let is_voter = |me: &LogOwner| metrics.membership_config.voter_ids().any(|voter| voter == *me);
        Some(metrics.id).filter(|me| metrics.current_leader == Some(*me) && is_voter(me))
    }

    /// Fails if this replica does not lead.
    fn check_elected(&self) -> Result<LogOwner, String> {
        self.elected().ok_or_else(|| "this replica does not lead any more".to_owned())
    }

    fn voters(&self) -> BTreeSet<LogOwner> {
        self.raft.metrics().borrow().membership_config.voter_ids().collect()
    }

    /// Who votes once the change of members that is under way has ended, if there is one.
    fn agreed_voters(&self) -> BTreeSet<LogOwner> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        let sets = metrics.membership_config.membership().get_joint_config();
        sets.last().cloned().unwrap_or_default()
    }

    fn replica_of(&self, owner: LogOwner) -> Option<ReplicaId> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        metrics.membership_config.membership().get_node(&owner).map(|member| member.replica)
    }
}

/// Whether the owner of a log is a member, and no change of members is under way: while one is, nothing is decided without a majority of
/// those before it as well.
fn is_member(raft: &Raft, owner: LogOwner) -> bool {
    let metrics = raft.metrics();
    let metrics = metrics.borrow();
    let sets = metrics.membership_config.membership().get_joint_config();
    matches!(sets.as_slice(), [voters] if voters.contains(&owner))
}

/// Whether all know this of the owner of a log.
fn is_known_as(raft: &Raft, owner: LogOwner, member: &Member) -> bool {
    let metrics = raft.metrics();
    let metrics = metrics.borrow();
    metrics.membership_config.membership().get_node(&owner) == Some(member)
}

/// Asks the others whenever this replica is no member, or is known as something that it is not, or hears of no leader: it may have been dismissed while it was away. So it does
/// while a change of members is under way, for whoever led that may have died: the next leader ends it then.
pub(super) async fn stay_member(standing: Arc<Standing>, member: Member, others: Vec<ReplicaId>) {
    let (raft, post, owner) = (&standing.raft, &standing.post, standing.owner);
    let mut asked: u32 = 0;
    let mut leaderless: u32 = 0;
    loop {
        let is_led = leader(&standing).is_some();
        leaderless = if is_led { 0 } else { leaderless.saturating_add(1) };
        let is_known = is_member(raft, owner) && is_known_as(raft, owner, &member);
        if is_known && leaderless < LEADERLESS_MAX {
            asked = 0;
            tokio::time::sleep(ASK_EVERY).await;
            continue;
        }
        for other in &others {
            let question = Question::Admit { owner, outside: member.outside };
            match post.ask(*other, question, ANSWER_MAX).await {
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
