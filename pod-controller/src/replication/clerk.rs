//! What a replica answers others.

use std::sync::Arc;

use cxl_pool::ReplicaId;
use openraft::raft::AppendEntriesResponse;

use super::admission::Register;
use super::change::{LogOwner, Member, Raft};
use super::elections::stand_for;
use super::post::{Answer, Clerk, Question};
use super::replica::{Standing, leads};
use crate::controller::{Handle, SubmitError};
use crate::rest::Looks;

/// Answers other replicas.
pub(super) fn clerk(standing: Arc<Standing>, handle: Handle, register: Arc<Register>) -> Clerk {
    let looks = Looks::default();
    Arc::new(move |from, question| {
        let (standing, handle, register) = (Arc::clone(&standing), handle.clone(), Arc::clone(&register));
        let looks = looks.clone();
        Box::pin(async move { answer(standing, (&handle, &looks), &register, from, question).await })
    })
}

async fn answer(
    standing: Arc<Standing>,
    (handle, looks): (&Handle, &Looks),
    register: &Register,
    from: ReplicaId,
    question: Question,
) -> Answer {
    let failed = |error: String| Answer::Failed(error);
    match question {
        Question::Append { .. } | Question::Snapshot { .. } => {
            let answer = answer_for_raft(&standing.raft, standing.owner, question).await;
            let refused =
                matches!(&answer, Answer::Append(AppendEntriesResponse::HigherVote(_)) | Answer::Failed(_));
            if let Some(outside) = standing.outside.as_ref().filter(|_| !refused) {
                outside.note_leader();
            }
            answer
        }
        Question::Vote { ref request, .. } => {
            if let Some(outside) = &standing.outside {
                outside.note_candidate();
            }
            let asked = (request.vote.leader_id().term, request.last_log_id);
            let answer = answer_for_raft(&standing.raft, standing.owner, question).await;
            if let Answer::Vote(answer) = &answer {
                // Whoever asked does not wait for that.
                tokio::spawn(stand_for(standing, from, asked, answer.clone()));
            }
            answer
        }
        Question::Submit { .. }
        | Question::Waiting
        | Question::Look { .. }
        | Question::Admit { .. }
        | Question::Dismiss { .. }
        | Question::TryDismissing { .. }
            if !leads(&standing) =>
        {
            Answer::NotLeading
        }
        Question::Submit { command } => match handle.submit(*command).await {
            Ok(()) => Answer::Submitted(Ok(handle.view().state.index)),
            Err(SubmitError::Refused(refusal)) => Answer::Submitted(Err(refusal)),
            // Nothing was done: whoever asks may look for another one that leads.
            Err(SubmitError::NoLeader | SubmitError::NoLeaderOutside(_)) => Answer::NotLeading,
            Err(error) => failed(error.to_string()),
        },
        Question::Waiting => {
            let view = handle.view();
            Answer::Waiting((view.state.index, view.waiting.clone()))
        }
        Question::Look { path } => Answer::Seen(looks.answer(handle, &path).await),
        Question::Admit { owner, outside } => {
            match register.admit(Member { replica: from, outside }, owner).await {
                Ok(()) => Answer::Admitted,
                Err(reason) => failed(reason),
            }
        }
        Question::Dismiss { replica } => match register.dismiss(replica).await {
            Ok(dismissal) => Answer::Dismissed(dismissal),
            Err(reason) => failed(reason),
        },
        Question::TryDismissing { replica } => match register.try_dismissing(replica).await {
            Ok(dismissal) => Answer::Dismissed(dismissal),
            Err(reason) => failed(reason),
        },
    }
}

/// Answers what Raft asks.
pub(super) async fn answer_for_raft(raft: &Raft, owner: LogOwner, question: Question) -> Answer {
    match question {
        Question::Append { to, .. } | Question::Vote { to, .. } | Question::Snapshot { to, .. }
            if to != owner =>
        {
            Answer::Failed("it has another log now".to_owned())
        }
        Question::Append { request, .. } => match raft.append_entries(request).await {
            Ok(response) => Answer::Append(response),
            Err(error) => Answer::Failed(error.to_string()),
        },
        Question::Vote { request, .. } => match raft.vote(request).await {
            Ok(response) => Answer::Vote(response),
            Err(error) => Answer::Failed(error.to_string()),
        },
        Question::Snapshot { request, .. } => Answer::Snapshot(raft.install_snapshot(request).await),
        _ => Answer::Failed("it is not for Raft".to_owned()),
    }
}
