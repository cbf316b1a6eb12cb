//! What a replica answers others.

use std::sync::Arc;

use cxl_pool::ReplicaId;

use super::admission::Register;
use super::change::{LogOwner, Raft};
use super::post::{Answer, Clerk, Question};
use super::replica::{Standing, leads};
use crate::controller::{Handle, SubmitError};

/// Answers other replicas.
pub(super) fn clerk(standing: Arc<Standing>, handle: Handle, register: Arc<Register>) -> Clerk {
    Arc::new(move |from, question| {
        let (standing, handle, register) = (Arc::clone(&standing), handle.clone(), Arc::clone(&register));
        Box::pin(async move { answer(&standing, &handle, &register, from, question).await })
    })
}

async fn answer(
    standing: &Standing,
    handle: &Handle,
    register: &Register,
    from: ReplicaId,
    question: Question,
) -> Answer {
    let failed = |error: String| Answer::Failed(error);
    match question {
        Question::Append { .. } | Question::Vote { .. } | Question::Snapshot { .. } => {
            answer_for_raft(&standing.raft, standing.owner, question).await
        }
        Question::Submit { .. }
        | Question::Waiting
        | Question::Admit { .. }
        | Question::Dismiss { .. }
        | Question::TryDismissing { .. }
            if !leads(standing) =>
        {
            Answer::NotLeading
        }
        Question::Submit { command } => match handle.submit(*command).await {
            Ok(()) => Answer::Submitted(Ok(handle.view().state.index)),
            Err(SubmitError::Refused(refusal)) => Answer::Submitted(Err(refusal)),
            Err(error) => failed(error.to_string()),
        },
        Question::Waiting => {
            let view = handle.view();
            Answer::Waiting((view.state.index, view.waiting.clone()))
        }
        Question::Admit { owner } => match register.admit(from, owner).await {
            Ok(()) => Answer::Admitted,
            Err(reason) => failed(reason),
        },
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
