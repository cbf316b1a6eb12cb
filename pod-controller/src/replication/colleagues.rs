//! What is shown of the replicas.

use std::sync::Arc;
use std::time::Duration;

use cxl_pool::ReplicaId;
use pod_api as api;
use pod_protocol::protocol::Spoken;

use super::admission::{Dismissal, Register};
use super::post::{Answer, PostError, Question};
use super::replica::{Standing, leader, leads};
use crate::controller::{Peers, Removal, SubmitError};

/// How long a removal may take.
const REMOVAL_MAX: Duration = Duration::from_secs(30);

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
        let metrics = self.standing.raft.metrics();
        let metrics = metrics.borrow();
        let members = metrics.membership_config.membership();
        let last = metrics.last_log_index.map_or(0, |index| index + 1);
        let behind = |owner| {
            let matched = metrics.replication.as_ref()?.get(&owner)?;
            Some(last.saturating_sub(matched.map_or(0, |id| id.index + 1)))
        };
        let protocol = |replica| Some(self.spoken.by_replica(replica)?.to_string());
        let mut controllers: Vec<api::Controller> = members
            .voter_ids()
            .filter_map(|owner| {
                Some(api::Controller {
                    replica: members.get_node(&owner)?.replica.get(),
                    leads: metrics.current_leader == Some(owner),
                    answers: owner == self.standing.owner,
                    behind_changes: behind(owner),
                    protocol: protocol(members.get_node(&owner)?.replica),
                })
            })
            .collect();
        controllers.sort_by_key(|controller| controller.replica);
        controllers
    }

    fn remove(&self, replica: ReplicaId) -> Removal {
        let (standing, register) = (Arc::clone(&self.standing), Arc::clone(&self.register));
        Box::pin(async move {
            let outcome = if leads(&standing) {
                register.dismiss(replica).await.map_err(|_| SubmitError::Unknown)?
            } else {
                let leader = leader(&standing).ok_or(SubmitError::NoLeader)?;
                match standing.post.ask(leader, Question::Dismiss { replica }, REMOVAL_MAX).await {
                    Ok(Answer::Dismissed(dismissal)) => dismissal,
                    Ok(Answer::NotLeading) | Err(PostError::NotConnected(_)) => {
                        return Err(SubmitError::NoLeader);
                    }
                    Ok(_) | Err(PostError::Unanswered(_)) => return Err(SubmitError::Unknown),
                }
            };
            match outcome {
                Dismissal::Done => Ok(()),
                Dismissal::NoMember => Err(SubmitError::no_replica(replica)),
                Dismissal::Last => Err(SubmitError::only_replica(replica)),
            }
        })
    }
}
