//! Questions and answers among replicas.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use cxl_pool::ReplicaId;
use openraft::error::{InstallSnapshotError, RaftError};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use pod_protocol::controller::PortWaker;
use pod_protocol::replicas::ReplicaPortError;
use pod_state::{Command, Refusal};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::admission::Dismissal;
use super::change::{LogOwner, Replicated};
use super::exchange::Exchange;
use crate::rest::Seen;
use crate::view::Waiting;

/// How long the thread sleeps at most; it is woken before when there is something to do.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// How often it is said of a replica that something cannot be sent to it.
const WARN_EVERY: Duration = Duration::from_mins(1);

/// What a replica asks another one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Question {
    /// Of Raft, to whoever has this log: another one must not answer in its place.
    Append { to: LogOwner, request: AppendEntriesRequest<Replicated> },
    /// Of Raft.
    Vote { to: LogOwner, request: VoteRequest<LogOwner> },
    /// Of Raft.
    Snapshot { to: LogOwner, request: InstallSnapshotRequest<Replicated> },
    /// Whoever leads is to carry this out.
    Submit { command: Box<Command> },
    /// What leases wait for, which only the leader knows.
    Waiting,
    /// What the leader answers to a `GET` of this path. Replicas of earlier versions leave it unanswered.
    Look { path: String },
    /// Whoever leads is to make the owner of this log a member.
    Admit {
        owner: LogOwner,
        /// See [`Member`](super::change::Member).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        outside: Option<u16>,
    },
    /// Whoever leads is to have this replica not be a member any more.
    Dismiss { replica: ReplicaId },
    /// What would become of a dismissal. Replicas of earlier versions leave it unanswered.
    TryDismissing { replica: ReplicaId },
}

/// What it is answered.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Of Raft.
    Append(AppendEntriesResponse<LogOwner>),
    /// Of Raft.
    Vote(VoteResponse<LogOwner>),
    /// Of Raft.
    Snapshot(Result<InstallSnapshotResponse<LogOwner>, RaftError<LogOwner, InstallSnapshotError>>),
    /// It was carried out, and the state has this index since, or it was refused.
    Submitted(Result<u64, Refusal>),
    /// What leases wait for, in the state with this index.
    Waiting((u64, Waiting)),
    /// What was to be shown; none where there is no such thing, or too much of it.
    Seen(Option<Seen>),
    /// It is a member.
    Admitted,
    /// What became of a dismissal, or would.
    Dismissed(Dismissal),
    /// It does not lead.
    NotLeading,
    /// It failed, or may have.
    Failed(String),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Letter {
    Question { id: u64, question: Question },
    Answer { id: u64, answer: Answer },
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PostError {
    /// It may have arrived or not.
    #[error("controller replica {0} did not answer in time")]
    Unanswered(ReplicaId),
    /// It did not arrive.
    #[error("controller replica {0} is not connected")]
    NotConnected(ReplicaId),
    /// It may have arrived or not, and will not be answered.
    #[error("controller replica {0} was restarted before it answered, or the connection to it was lost")]
    Lost(ReplicaId),
}

type Answering = Pin<Box<dyn Future<Output = Answer> + Send>>;
/// Answers questions of other replicas.
pub(crate) type Clerk = Arc<dyn Fn(ReplicaId, Question) -> Answering + Send + Sync>;

/// Whoever waits for an answer.
struct Waits {
    to: ReplicaId,
    /// What was lost on the way there before the question was sent, once it was.
    losses: Option<u64>,
    sender: oneshot::Sender<Result<Answer, PostError>>,
}

type Unanswered = Mutex<HashMap<u64, Waits>>;

fn of(unanswered: &Unanswered) -> MutexGuard<'_, HashMap<u64, Waits>> {
    // Each is put in and taken out whole, whoever panicked.
    unanswered.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For asking. Clones share the post.
#[derive(Clone)]
pub(crate) struct Post {
    outgoing: mpsc::Sender<(ReplicaId, Letter)>,
    waker: PortWaker,
    unanswered: Arc<Unanswered>,
    last: Arc<AtomicU64>,
    /// When it was said that something could not be sent.
    warned: Arc<Mutex<HashMap<ReplicaId, Instant>>>,
    stopping: Arc<AtomicBool>,
}

/// A question that was put. It is forgotten with this: whoever asked may be gone before there is an answer.
pub(super) struct Asked {
    id: u64,
    to: ReplicaId,
    answer: oneshot::Receiver<Result<Answer, PostError>>,
    unanswered: Arc<Unanswered>,
}

impl Asked {
    /// Waits for the answer. While there is none, it can be waited for again.
    pub(super) async fn answer(&mut self, patience: Duration) -> Result<Answer, PostError> {
        match tokio::time::timeout(patience, &mut self.answer).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(PostError::NotConnected(self.to)),
            Err(_) => Err(PostError::Unanswered(self.to)),
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        of(&self.unanswered).remove(&self.id);
    }
}

/// The end of it that goes to its thread.
pub(crate) struct Outbox(mpsc::Receiver<(ReplicaId, Letter)>);

impl Post {
    pub(crate) fn new(waker: PortWaker) -> (Self, Outbox) {
        let (outgoing, outbox) = mpsc::channel();
        // Anywhere: what is asked before a restart may be answered after it, and must not pass for the answer to something else.
        let last = Arc::new(AtomicU64::new(Uuid::new_v4().as_u64_pair().1));
        let (unanswered, warned, stopping) = (Arc::default(), Arc::default(), Arc::default());
        (Self { outgoing, waker, unanswered, last, warned, stopping }, Outbox(outbox))
    }

    /// Asks another replica.
    pub(crate) async fn ask(
        &self,
        to: ReplicaId,
        question: Question,
        patience: Duration,
    ) -> Result<Answer, PostError> {
        self.put_question(to, question).answer(patience).await
    }

    /// Asks another replica, and leaves it to the caller when to wait for the answer.
    pub(super) fn put_question(&self, to: ReplicaId, question: Question) -> Asked {
        let id = self.last.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        self.unanswered().insert(id, Waits { to, losses: None, sender });
        self.put((to, Letter::Question { id, question }));
        Asked { id, to, answer, unanswered: Arc::clone(&self.unanswered) }
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.waker.wake();
    }

    fn put(&self, letter: (ReplicaId, Letter)) {
        // Without the thread there is nobody to answer: whoever asks waits in vain.
        let _ = self.outgoing.send(letter);
        self.waker.wake();
    }

    fn unanswered(&self) -> MutexGuard<'_, HashMap<u64, Waits>> {
        of(&self.unanswered)
    }

    /// Carries letters until told to stop, or for as long as the process is this replica. Questions are answered on the runtime.
    pub(super) fn carry(
        &self,
        outbox: &Outbox,
        mut exchange: impl Exchange,
        clerk: &Clerk,
        runtime: &tokio::runtime::Handle,
    ) -> Result<(), ReplicaPortError> {
        while !self.stopping.load(Ordering::Acquire) {
            self.carry_some(outbox, &mut exchange, clerk, runtime);
            exchange.check()?;
            exchange.wait(SLEEP_MAX);
        }
        Ok(())
    }

    /// Carries the letters that there are now.
    pub(super) fn carry_some(
        &self,
        Outbox(outbox): &Outbox,
        exchange: &mut impl Exchange,
        clerk: &Clerk,
        runtime: &tokio::runtime::Handle,
    ) {
        while let Ok((to, letter)) = outbox.try_recv() {
            if matches!(letter, Letter::Question { id, .. } if !self.unanswered().contains_key(&id)) {
                // Nobody waits for its answer any more.
                continue;
            }
            self.send(exchange, to, &letter);
        }
        let now = Instant::now();
        while let Some((from, message)) = exchange.poll(now) {
            match serde_json::from_slice(&message) {
                Ok(Letter::Question { id, question }) => {
                    let (post, answering) = (self.clone(), clerk(from, question));
                    runtime.spawn(async move {
                        let answer = answering.await;
                        post.put((from, Letter::Answer { id, answer }));
                    });
                }
                Ok(Letter::Answer { id, answer }) => {
                    if let Some(waiting) = self.unanswered().remove(&id) {
                        // It gave up waiting.
                        let _ = waiting.sender.send(Ok(answer));
                    }
                }
                Err(error) => tracing::debug!(%from, %error, "a message of another replica is dropped"),
            }
        }
        self.give_up_lost(exchange);
    }

    /// Tells those who wait for answers that cannot come any more.
    fn give_up_lost(&self, exchange: &impl Exchange) {
        let mut unanswered = self.unanswered();
        let is_lost = |waits: &Waits| waits.losses.is_some_and(|losses| losses != exchange.losses(waits.to));
        for (_, waits) in unanswered.extract_if(|_, waits| is_lost(waits)) {
            // As above.
            let _ = waits.sender.send(Err(PostError::Lost(waits.to)));
        }
    }

    /// Whether nothing was said of that replica for a while: what is not sent to it is asked again and again.
    fn may_warn_of(&self, replica: ReplicaId, now: Instant) -> bool {
        // Each is put in whole, whoever panicked.
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.get(&replica).is_some_and(|at| now.saturating_duration_since(*at) < WARN_EVERY) {
            return false;
        }
        warned.insert(replica, now);
        true
    }

    fn send(&self, exchange: &mut impl Exchange, to: ReplicaId, letter: &Letter) {
        if let Letter::Question { id, .. } = letter
            && let Some(waits) = self.unanswered().get_mut(id)
        {
            waits.losses = Some(exchange.losses(to));
        }
        let sent = serde_json::to_vec(letter).map_err(|error| error.to_string());
        let sent = sent.and_then(|bytes| {
            exchange.send(to, bytes).map_err(|error| match error {
                ReplicaPortError::NotConnected { .. } => String::new(),
                other => other.to_string(),
            })
        });
        if let Err(reason) = sent {
            if !reason.is_empty() && self.may_warn_of(to, Instant::now()) {
                tracing::warn!(%to, reason, "a message to another replica is not sent");
            }
            if let Letter::Question { id, .. } = letter {
                // Dropping it tells.
                self.unanswered().remove(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A replica that was restarted at once may be answered what it asked before.
    #[test]
    fn answers_to_another_life_fit_no_question_of_this_one() {
        let life = || {
            let (post, outbox) = Post::new(PortWaker::new().expect("a descriptor"));
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
            let asking = post.ask(ReplicaId::new(1), Question::Waiting, Duration::ZERO);
            let outcome = runtime.expect("a runtime").block_on(asking);
            assert!(matches!(outcome, Err(PostError::Unanswered(_))), "{outcome:?}");
            match outbox.0.try_recv() {
                Ok((_, Letter::Question { id, .. })) => id,
                _ => panic!("no question was put"),
            }
        };
        assert_ne!(life(), life());
    }

    #[test]
    fn what_cannot_be_sent_is_warned_of_now_and_then() {
        let (post, _outbox) = Post::new(PortWaker::new().expect("a descriptor"));
        let (now, [one, other]) = (Instant::now(), [1, 2].map(ReplicaId::new));
        assert!(post.may_warn_of(one, now) && post.may_warn_of(other, now));
        assert!(!post.may_warn_of(one, now + WARN_EVERY / 2));
        assert!(post.may_warn_of(one, now + WARN_EVERY));
    }

    #[test]
    fn a_question_is_forgotten_with_whoever_asks() {
        let (post, outbox) = Post::new(PortWaker::new().expect("a descriptor"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime").block_on(async {
            let asking = post.ask(ReplicaId::new(1), Question::Waiting, Duration::MAX);
            // Whoever asks gives up first, as Raft does.
            let outcome = tokio::time::timeout(Duration::ZERO, asking).await;
            assert!(outcome.is_err(), "{outcome:?}");
        });
        assert!(outbox.0.try_recv().is_ok(), "it was put");
        assert_eq!(post.unanswered().len(), 0);
    }
}
