//! Raft's messages, as questions to other replicas.

use std::time::Duration;

use cxl_pool::ReplicaId;
use openraft::error::{
    Infallible, InstallSnapshotError, NetworkError, RPCError, RaftError, RemoteError, Timeout, Unreachable,
};
use openraft::network::{Backoff, RPCOption, RPCTypes, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use openraft::{LogId, Vote};
use tokio::time::Instant;

use super::change::{LogOwner, Member, Replicated};
use super::post::{Answer, Asked, Post, PostError, Question};
use super::roll::Roll;

/// How long to wait before a replica is tried again that is not there.
const RETRY_EVERY: Duration = Duration::from_millis(50);

/// How long entries may be under way before they are sent again. Raft asks again after each heartbeat, and drops who waits.
const UNDER_WAY_MAX: Duration = Duration::from_secs(5);

/// Makes connections.
pub(crate) struct Network {
    pub(crate) post: Post,
    pub(crate) me: LogOwner,
    /// Who answers this replica while it leads is noted here.
    pub(crate) roll: Roll,
}

/// To one member.
pub(crate) struct Connection {
    post: Post,
    me: LogOwner,
    owner: LogOwner,
    replica: ReplicaId,
    roll: Roll,
    /// Survives that Raft drops whoever waits for the answer.
    under_way: Option<UnderWay>,
}

/// Entries that were sent and have not been answered.
struct UnderWay {
    vote: Vote<LogOwner>,
    before: Option<LogId<LogOwner>>,
    last: LogId<LogOwner>,
    asked: Asked,
    since: Instant,
}

impl UnderWay {
    /// Whether these entries begin with those that are under way, so that the answer to them says something of these.
    fn begins(&self, request: &AppendEntriesRequest<Replicated>) -> bool {
        self.since.elapsed() < UNDER_WAY_MAX
            && (self.vote, self.before) == (request.vote, request.prev_log_id)
            && request.entries.iter().any(|entry| entry.log_id == self.last)
    }
}

/// An answer that is none.
#[derive(Debug, thiserror::Error)]
#[error("controller replica {replica}: {reason}")]
struct Odd {
    replica: ReplicaId,
    reason: String,
}

type Failed<E> = RPCError<LogOwner, Member, RaftError<LogOwner, E>>;

impl RaftNetworkFactory<Replicated> for Network {
    type Network = Connection;

    async fn new_client(&mut self, target: LogOwner, node: &Member) -> Connection {
        let (post, roll) = (self.post.clone(), self.roll.clone());
        Connection { post, me: self.me, owner: target, replica: node.replica, roll, under_way: None }
    }
}

impl Connection {
    async fn ask<E: std::error::Error>(
        &self,
        question: Question,
        action: RPCTypes,
        patience: Duration,
    ) -> Result<Answer, Failed<E>> {
        let outcome = self.post.ask(self.replica, question, patience).await;
        outcome.map_err(|error| self.failed(&error, action, patience))
    }

    fn failed<E: std::error::Error>(
        &self,
        error: &PostError,
        action: RPCTypes,
        patience: Duration,
    ) -> Failed<E> {
        match error {
            PostError::NotConnected(_) => Unreachable::new(error).into(),
            PostError::Lost(_) => NetworkError::new(error).into(),
            PostError::Unanswered(_) => {
                Timeout { action, id: self.me, target: self.owner, timeout: patience }.into()
            }
        }
    }

    /// Sends entries, unless they are under way already: sent again with each heartbeat, what takes longer would never be
    /// answered, and would keep back what comes after it. Returns the answer, to the entries up to which one, and since when it
    /// was awaited.
    async fn append(
        &mut self,
        request: AppendEntriesRequest<Replicated>,
        last: LogId<LogOwner>,
        patience: Duration,
    ) -> Result<(Answer, LogId<LogOwner>, Instant), Failed<Infallible>> {
        self.under_way.take_if(|under_way| !under_way.begins(&request));
        let under_way = self.under_way.get_or_insert_with(|| {
            let (vote, before, since) = (request.vote, request.prev_log_id, Instant::now());
            let question = Question::Append { to: self.owner, request };
            UnderWay { vote, before, last, asked: self.post.put_question(self.replica, question), since }
        });
        let (last, since) = (under_way.last, under_way.since);
        let outcome = under_way.asked.answer(patience).await;
        if !matches!(outcome, Err(PostError::Unanswered(_))) {
            self.under_way = None;
        }
        match outcome {
            Ok(answer) => Ok((answer, last, since)),
            Err(error) => Err(self.failed(&error, RPCTypes::AppendEntries, patience)),
        }
    }

    fn odd<E: std::error::Error>(&self, answer: Answer) -> Failed<E> {
        let reason = match answer {
            Answer::Failed(reason) => reason,
            other => format!("it answered something else: {other:?}"),
        };
        NetworkError::new(&Odd { replica: self.replica, reason }).into()
    }
}

impl RaftNetwork<Replicated> for Connection {
    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<Replicated>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<LogOwner>, RPCError<LogOwner, Member, RaftError<LogOwner>>> {
        let patience = option.hard_ttl();
        let last = request.entries.last().map(|entry| entry.log_id);
        let (answer, answered, asked) = if let Some(last) = last {
            let (answer, answered, asked) = self.append(request, last, patience).await?;
            (answer, Some(answered), asked)
        } else {
            let (asked, question) = (Instant::now(), Question::Append { to: self.owner, request });
            (self.ask(question, RPCTypes::AppendEntries, patience).await?, None, asked)
        };
        match answer {
            Answer::Append(response) => {
                self.roll.note(self.owner, asked);
                Ok(match response {
                    // There are more of them by now than when it was asked.
                    AppendEntriesResponse::Success if answered != last => {
                        AppendEntriesResponse::PartialSuccess(answered)
                    }
                    response => response,
                })
            }
            other => Err(self.odd(other)),
        }
    }

    async fn install_snapshot(
        &mut self,
        request: InstallSnapshotRequest<Replicated>,
        option: RPCOption,
    ) -> Result<InstallSnapshotResponse<LogOwner>, Failed<InstallSnapshotError>> {
        let question = Question::Snapshot { to: self.owner, request };
        match self.ask(question, RPCTypes::InstallSnapshot, option.hard_ttl()).await? {
            Answer::Snapshot(Ok(response)) => Ok(response),
            Answer::Snapshot(Err(error)) => Err(RemoteError::new(self.owner, error).into()),
            other => Err(self.odd(other)),
        }
    }

    async fn vote(
        &mut self,
        request: VoteRequest<LogOwner>,
        option: RPCOption,
    ) -> Result<VoteResponse<LogOwner>, RPCError<LogOwner, Member, RaftError<LogOwner>>> {
        let question = Question::Vote { to: self.owner, request };
        match self.ask(question, RPCTypes::Vote, option.hard_ttl()).await? {
            Answer::Vote(response) => Ok(response),
            other => Err(self.odd(other)),
        }
    }

    fn backoff(&self) -> Backoff {
        Backoff::new(std::iter::repeat(RETRY_EVERY))
    }
}
