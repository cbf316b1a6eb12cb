//! A replica outside of the pod. It votes, and keeps and shows what the others do, but it does not reach the pool, through which whoever
//! leads speaks to daemons: so it never leads.
//!
//! What was committed last may be in its log alone, of those that are left, and then it gives its vote to nobody who knows less: nobody
//! could be elected any more; and whoever else is there may not know that it is a member, and ask for no vote. In such a case it
//! [stands for election](super::elections::stand_for) in place of others. Raft has whoever is elected give its log to all, and once one that
//! reaches the pool has everything, it gives its office up, in which it has decided nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cxl_pool::ReplicaId;
use openraft::{RaftMetrics, ServerState};
use tokio::time::Instant;

use super::change::{LogOwner, Member, Raft};
use super::elections::elect_above;
use super::post::{Answer, PostError, Question};
use super::replica::Standing;
use crate::controller::SubmitError;

/// For how many elections it leaves it to others to be elected after it stood in their place.
const STANDS_AGAIN: u32 = 8;
/// For how many elections whoever was heard counts as the one who leads.
const LED_FOR: u32 = 4;
/// How long others may take to say that they are there.
const THERE_MAX: Duration = Duration::from_secs(1);

/// What one knows that is outside of the pod.
#[derive(Debug)]
pub(super) struct Outside {
    /// The minor of the protocol that it speaks.
    minor: u16,
    elections: Mutex<Elections>,
}

#[derive(Debug, Default)]
struct Elections {
    /// When it heard of somebody who leads.
    led: Option<Instant>,
    /// When it was asked for a vote: somebody else stood for election.
    asked: Option<Instant>,
    /// When it stood in place of others.
    stood: Option<Instant>,
}

impl Outside {
    pub(super) fn new(minor: u16) -> Self {
        Self { minor, elections: Mutex::default() }
    }

    /// What the members know of the replica with this number, if it is outside.
    pub(super) fn member(outside: Option<&Self>, replica: ReplicaId) -> Member {
        Member { replica, outside: outside.map(|outside| outside.minor) }
    }

    /// Somebody who leads was heard.
    pub(super) fn note_leader(&self) {
        self.elections().led = Some(Instant::now());
    }

    /// Whether nobody leads, for all that was heard for so long, and it did not stand in place of others lately.
    pub(super) fn may_stand(&self, lease: Duration) -> bool {
        let elections = self.elections();
        is_past(elections.led, lease) && is_past(elections.stood, lease * STANDS_AGAIN)
    }

    /// Whether for long nobody led or wanted to, for all that was heard.
    fn is_forsaken(&self, lease: Duration) -> bool {
        let is_past = |since| is_past(since, lease * STANDS_AGAIN);
        let elections = self.elections();
        is_past(elections.led) && is_past(elections.asked) && is_past(elections.stood)
    }

    /// Somebody else stands for election.
    pub(super) fn note_candidate(&self) {
        self.elections().asked = Some(Instant::now());
    }

    /// It stands in place of others.
    pub(super) fn note_stand(&self) {
        self.elections().stood = Some(Instant::now());
    }

    /// Whether somebody leads, for all that is heard. Others find out that nobody does since they stand for election.
    pub(super) fn is_led(&self, lease: Duration) -> bool {
        self.elections().led.is_some_and(|led| led.elapsed() < lease * LED_FOR)
    }

    fn elections(&self) -> MutexGuard<'_, Elections> {
        // Each moment is put in whole, whoever panicked.
        self.elections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_past(since: Option<Instant>, long: Duration) -> bool {
    since.is_none_or(|since| since.elapsed() > long)
}

/// Stands for election where nobody else does, until Raft ends: those that reach the pool and are there may know nothing yet of what was
/// committed, and not that they are members.
pub(super) async fn stand_unasked(standing: Arc<Standing>) {
    let Some(outside) = &standing.outside else { return };
    let raft = &standing.raft;
    let lease = lease(raft);
    loop {
        tokio::time::sleep(lease).await;
        if raft.metrics().borrow().running_state.is_err() {
            return;
        }
        if !outside.is_forsaken(lease) || !could_be_elected(&standing).await || !outside.is_forsaken(lease) {
            continue;
        }
        outside.note_stand();
        tracing::info!("nobody stands for election: this replica does, to give what it knows to the others");
        let _ = raft.trigger().elect().await;
    }
}

/// Whether so many members are there that they are a majority together with this one, and none of them leads: alone it would only count up
/// terms, and depose whoever leads once it is heard again.
async fn could_be_elected(standing: &Standing) -> bool {
    let (sets, members): (Vec<_>, BTreeMap<LogOwner, ReplicaId>) = {
        let metrics = standing.raft.metrics();
        let metrics = metrics.borrow();
        let membership = metrics.membership_config.membership();
        let members = membership.nodes().map(|(owner, member)| (*owner, member.replica)).collect();
        (membership.get_joint_config().clone(), members)
    };
    let others = members.values().filter(|replica| **replica != standing.me);
    let asked: Vec<_> =
        others.map(|replica| (*replica, standing.post.put_question(*replica, Question::Waiting))).collect();
    let mut there = BTreeSet::from([standing.me]);
    for (replica, mut question) in asked {
        match question.answer(THERE_MAX).await {
            Ok(Answer::NotLeading) => drop(there.insert(replica)),
            Ok(_) => return false,
            Err(_) => {}
        }
    }
    let is_there = |owner: &&LogOwner| members.get(*owner).is_some_and(|replica| there.contains(replica));
    !sets.is_empty() && sets.iter().all(|set| set.iter().filter(is_there).count() * 2 > set.len())
}

/// For how long this one promises its vote to nobody else once it has heard of somebody who leads.
pub(super) fn lease(raft: &Raft) -> Duration {
    Duration::from_millis(raft.config().election_timeout_max)
}

/// Gives up each office for which this replica is elected, once it is not needed in it any more. Until Raft ends.
pub(super) async fn give_up_offices(standing: Arc<Standing>) {
    let mut metrics = standing.raft.metrics();
    loop {
        let over = {
            let metrics = metrics.borrow_and_update();
            if metrics.running_state.is_err() {
                return;
            }
            is_over(&metrics).then_some(metrics.current_term)
        };
        if let Some(term) = over {
            match elect_above(&standing, term, 0).await {
                Ok(()) => tracing::info!(term, "the others have what they lacked: one of them is to lead"),
                Err(error) => tracing::debug!(term, %error, "it was not needed any more"),
            }
        }
        if metrics.changed().await.is_err() {
            return;
        }
    }
}

/// Whether this one is elected, and one of those that can lead has all that it has.
fn is_over(metrics: &RaftMetrics<LogOwner, Member>) -> bool {
    let Some(replication) = metrics.replication.as_ref().filter(|_| metrics.state == ServerState::Leader)
    else {
        return false;
    };
    let members = metrics.membership_config.membership();
    let mut can_lead = metrics
        .membership_config
        .voter_ids()
        .filter(|voter| members.get_node(voter).is_some_and(Member::is_in_pod));
    can_lead.any(|voter| {
        let has = replication.get(&voter).copied().flatten();
        has.map(|id| id.index) >= metrics.last_log_index
    })
}

/// Why nothing is changed: nobody leads. One that is outside says so where none of those can be reached that could.
pub(super) async fn nobody_leads(standing: &Standing) -> SubmitError {
    if standing.outside.is_none() {
        return SubmitError::NoLeader;
    }
    let mut can_lead: Vec<ReplicaId> = {
        let metrics = standing.raft.metrics();
        let metrics = metrics.borrow();
        let members = metrics.membership_config.membership();
        members.nodes().filter(|(_, member)| member.is_in_pod()).map(|(_, member)| member.replica).collect()
    };
    can_lead.sort_unstable();
    let mut asked: Vec<_> =
        can_lead.iter().map(|replica| standing.post.put_question(*replica, Question::Waiting)).collect();
    for question in &mut asked {
        if !matches!(question.answer(THERE_MAX).await, Err(PostError::NotConnected(_))) {
            return SubmitError::NoLeader;
        }
    }
    if can_lead.is_empty() { SubmitError::NoLeader } else { SubmitError::no_leader_outside(&can_lead) }
}
