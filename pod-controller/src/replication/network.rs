//! Raft's messages, as questions to other replicas.

use std::time::Duration;

use cxl_pool::ReplicaId;
use openraft::error::{
    InstallSnapshotError, NetworkError, RPCError, RaftError, RemoteError, Timeout, Unreachable,
};
use openraft::network::{Backoff, RPCOption, RPCTypes, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use tokio::time::Instant;

use super::change::{LogOwner, Member, Replicated};
use super::post::{Answer, Post, PostError, Question};
use super::roll::Roll;

/// How long to wait before a replica is tried again that is not there.
const RETRY_EVERY: Duration = Duration::from_millis(50);

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
        Connection { post, me: self.me, owner: target, replica: node.replica, roll }
    }
}

impl Connection {
    async fn ask<E: std::error::Error>(
        &self,
        question: Question,
        action: RPCTypes,
        patience: Duration,
    ) -> Result<Answer, Failed<E>> {
        match self.post.ask(self.replica, question, patience).await {
            Ok(answer) => Ok(answer),
            Err(error @ PostError::NotConnected(_)) => Err(Unreachable::new(&error).into()),
            Err(PostError::Unanswered(_)) => {
                Err(Timeout { action, id: self.me, target: self.owner, timeout: patience }.into())
            }
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
        let question = Question::Append { to: self.owner, request };
        let asked = Instant::now();
        match self.ask(question, RPCTypes::AppendEntries, option.hard_ttl()).await? {
            Answer::Append(response) => {
                self.roll.note(self.owner, asked);
                Ok(response)
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
