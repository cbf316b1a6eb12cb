//! What a follower is asked for, the leader carries out.

use std::sync::Arc;
use std::time::Duration;

use cxl_pool::ReplicaId;
use pod_state::Command;

use super::machine::Machine;
use super::outside::nobody_leads;
use super::post::{Answer, PostError, Question};
use super::replica::{Standing, leader, leads};
use crate::controller::{Handle, Reply, SubmitError};

/// How long a follower looks for a leader that carries out a command, and how long that one may take.
pub(super) const FORWARD_MAX: Duration = Duration::from_secs(4);
/// The longest that all of it takes: to look, to have it carried out, and to hear of it.
pub(crate) const FORWARDED_MAX: Duration = FORWARD_MAX.saturating_mul(3);
/// How often it looks.
const FORWARD_AGAIN: Duration = Duration::from_millis(20);

/// Has the leader carry out what this replica was asked for.
pub(super) async fn forward(standing: Arc<Standing>, handle: Handle, command: Command, reply: Reply) {
    let patience = tokio::time::Instant::now() + FORWARD_MAX;
    while tokio::time::Instant::now() < patience {
        let leader = leader(&standing);
        if leader == Some(standing.me) {
            handle.submit_for(command, reply);
            return;
        }
        if let Some(leader) = leader {
            let question = Question::Submit { command: Box::new(command.clone()) };
            let answer = tokio::select! {
                // An answer counts, whatever became of who gave it.
                biased;
                answer = standing.post.ask(leader, question, FORWARD_MAX) => answer,
                // It may have carried it out before it was lost.
                () = lost(&standing, leader) => Err(PostError::Unanswered(leader)),
            };
            match answer {
                Ok(Answer::Submitted(Ok(index))) => {
                    wait_for(&standing.machine, index).await;
                    handle.catch_up(standing.machine.sight(handle.journal().last()), || !leads(&standing));
                    // A client that went away needs no answer.
                    let _ = reply.send(Ok(()));
                    return;
                }
                Ok(Answer::Submitted(Err(refusal))) => {
                    let _ = reply.send(Err(SubmitError::Refused(refusal)));
                    return;
                }
                // It was not carried out, nor will it be.
                Ok(Answer::NotLeading) | Err(PostError::NotConnected(_)) => {}
                Ok(_) | Err(PostError::Unanswered(_) | PostError::Lost(_)) => {
                    let _ = reply.send(Err(SubmitError::Unknown));
                    return;
                }
            }
        }
        tokio::time::sleep(FORWARD_AGAIN).await;
    }
    // As above.
    let _ = reply.send(Err(nobody_leads(&standing).await));
}

/// Waits until this one does not lead any more.
async fn lost(standing: &Standing, whom: ReplicaId) {
    let mut metrics = standing.raft.metrics();
    loop {
        if leader(standing) != Some(whom) {
            return;
        }
        // One outside of the pod is told by nobody.
        if let Ok(Err(_)) = tokio::time::timeout(FORWARD_AGAIN, metrics.changed()).await {
            return;
        }
    }
}

/// Waits until a change is known here too.
async fn wait_for(machine: &Machine, index: u64) {
    let mut changes = machine.changes();
    let arriving = async {
        while machine.index() < index {
            if changes.changed().await.is_err() {
                return;
            }
        }
    };
    // One that is cut off answers late: the change was made all the same.
    let _ = tokio::time::timeout(FORWARD_MAX, arriving).await;
}
