//! What is shown of the replicas.

use std::sync::Arc;
use std::time::Duration;

use cxl_pool::ReplicaId;
use pod_api as api;
use pod_protocol::protocol::{Protocol, Spoken};

use super::admission::{Dismissal, Register};
use super::change::Member;
use super::post::{Answer, PostError, Question};
use super::replica::{Standing, leader, leads};
use crate::controller::{Look, Office, Peers, Removal, SubmitError};

/// How long a removal may take.
const REMOVAL_MAX: Duration = Duration::from_secs(30);
/// The first minor of the protocol in which whoever leads shows others something. Before, the question is not understood.
const SHOWS_SINCE: u16 = 1;
/// How long whoever leads may take to show something: it shows one after the other, and lists of the largest pods take most of a second.
const LOOK_MAX: Duration = Duration::from_secs(5);
/// How long it may take to say what would become of one.
const TRY_MAX: Duration = Duration::from_secs(20);

/// The replicas, as one of them sees them.
pub(super) struct Colleagues {
    pub(super) standing: Arc<Standing>,
    pub(super) register: Arc<Register>,
    pub(super) spoken: Spoken,
}

impl std::fmt::Debug for Colleagues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Colleagues").field("me", &self.standing.me).finish_non_exhaustive()
    }
}

impl Peers for Colleagues {
    fn list(&self) -> Vec<api::Controller> {
        let leader = leader(&self.standing);
        let metrics = self.standing.raft.metrics();
        let metrics = metrics.borrow();
        let members = metrics.membership_config.membership();
        let last = metrics.last_log_index.map_or(0, |index| index + 1);
        let behind = |owner| {
            let matched = metrics.replication.as_ref()?.get(&owner)?;
            Some(last.saturating_sub(matched.map_or(0, |id| id.index + 1)))
        };
        let protocol = |member: &Member| {
            let outside = member.outside.map(Protocol::of_minor);
            Some(outside.or_else(|| self.spoken.by_replica(member.replica))?.to_string())
        };
        // While that changes, those before: until the change has ended nothing is decided without a majority of them.
        let voters = members.get_joint_config().first().into_iter().flatten().copied();
        let mut controllers: Vec<api::Controller> = voters
            .filter_map(|owner| {
                let member = members.get_node(&owner)?;
                Some(api::Controller {
                    replica: member.replica.get(),
                    leads: metrics.current_leader == Some(owner) && leader == Some(member.replica),
                    answers: owner == self.standing.owner,
                    outside: !member.is_in_pod(),
                    behind_changes: behind(owner),
                    protocol: protocol(member),
                })
            })
            .collect();
        controllers.sort_by_key(|controller| controller.replica);
        controllers
    }

    fn office(&self) -> Office {
        let leads = self.standing.outside.is_none() && self.register.is_followed();
        let follows = leader(&self.standing).is_some_and(|leader| leader != self.standing.me);
        Office { has_leader: leads || follows, leads }
    }

    fn look(&self, path: &str) -> Look {
        let (standing, path) = (Arc::clone(&self.standing), path.to_owned());
        Box::pin(async move {
            let minor =
                standing.machine.look(|known| known.state.as_ref().map(|it| it.options.protocol_minor));
            let leader = leader(&standing).filter(|leader| *leader != standing.me)?;
            if minor < Some(SHOWS_SINCE) {
                return None;
            }
            match standing.post.ask(leader, Question::Look { path }, LOOK_MAX).await {
                Ok(Answer::Seen(seen)) => seen,
                _ => None,
            }
        })
    }

    fn remove(&self, replica: ReplicaId) -> Removal {
        let (standing, register) = (Arc::clone(&self.standing), Arc::clone(&self.register));
        Box::pin(async move {
            let dismissal = if leads(&standing) {
                register.dismiss(replica).await.map_err(|_| SubmitError::Unknown)?
            } else {
                ask_leader(&standing, Question::Dismiss { replica }, REMOVAL_MAX).await?
            };
            outcome(replica, dismissal)
        })
    }

    fn try_removing(&self, replica: ReplicaId) -> Removal {
        let (standing, register) = (Arc::clone(&self.standing), Arc::clone(&self.register));
        let known = known(&self.list(), replica);
        Box::pin(async move {
            known?;
            let dismissal = if leads(&standing) {
                register.try_dismissing(replica).await.map_err(|_| SubmitError::NoLeader)?
            } else {
                match ask_leader(&standing, Question::TryDismissing { replica }, TRY_MAX).await {
                    // It may be of a version that does not know the question.
                    Err(SubmitError::Unknown) => Dismissal::Done,
                    asked => asked?,
                }
            };
            outcome(replica, dismissal)
        })
    }
}

async fn ask_leader(
    standing: &Standing,
    question: Question,
    patience: Duration,
) -> Result<Dismissal, SubmitError> {
    let leader = leader(standing).ok_or(SubmitError::NoLeader)?;
    match standing.post.ask(leader, question, patience).await {
        Ok(Answer::Dismissed(dismissal)) => Ok(dismissal),
        Ok(Answer::NotLeading) | Err(PostError::NotConnected(_)) => Err(SubmitError::NoLeader),
        Ok(_) | Err(PostError::Unanswered(_) | PostError::Lost(_)) => Err(SubmitError::Unknown),
    }
}

/// Whether a replica could be removed, as far as this one knows.
fn known(members: &[api::Controller], replica: ReplicaId) -> Result<(), SubmitError> {
    if !members.iter().any(|it| it.leads) {
        return Err(SubmitError::NoLeader);
    }
    if !members.iter().any(|it| it.replica == replica.get()) {
        return Err(SubmitError::no_replica(replica));
    }
    if members.len() == 1 { Err(SubmitError::only_replica(replica)) } else { Ok(()) }
}

fn outcome(replica: ReplicaId, dismissal: Dismissal) -> Result<(), SubmitError> {
    match dismissal {
        Dismissal::Done => Ok(()),
        Dismissal::NoMember => Err(SubmitError::no_replica(replica)),
        Dismissal::Last => Err(SubmitError::only_replica(replica)),
        Dismissal::NoneInPod => Err(SubmitError::none_in_pod(replica)),
        Dismissal::TooFew(silent) => Err(SubmitError::too_few_replicas(replica, &silent)),
    }
}
