use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Instant;

use cxl_pool::{EndpointId, Pool, ReplicaId};
use pod_api::{self as api, Event};
use pod_protocol::controller::{PortError, PortWaker};
use pod_protocol::protocol::{Protocol, Spoken};
use pod_protocol::telemetry::Telemetry;
use pod_state::{Command, Refusal, RefusalKind, State};
use tokio::sync::{oneshot, watch};

use crate::balance::{BalancePolicy, LoadHistory, LoadPicture};
use crate::config::Config;
use crate::journal::Journal;
use crate::replication::Sight;
use crate::rest::Seen;
use crate::view::{PoolFacts, View, Waiting};

/// Where to answer a wish.
pub(crate) type Reply = oneshot::Sender<Result<(), SubmitError>>;

/// A wish from outside, and where to answer.
pub(crate) enum Request {
    Apply {
        command: Command,
        reply: Reply,
    },
    /// Look around: who leads may be another one now.
    Look,
    Stop,
}

/// Where the controller's thread gets wishes from, and shows what it knows. Of several controllers each has one for all
/// its life, leading or not.
pub(crate) struct Desk {
    requests: mpsc::Receiver<Request>,
    pub(crate) shared: Arc<Shared>,
    pub(super) waker: PortWaker,
}

impl Desk {
    pub(crate) fn new(
        pool: &Pool,
        config: &Config,
        state: &State,
        events: Vec<Event>,
    ) -> Result<(Self, Handle), PortError> {
        let facts = PoolFacts::new(&config.pool.path, pool.superblock());
        Self::over((facts, Spoken::new(pool)), config, state, events)
    }

    /// Of one that does not reach the pool.
    pub(crate) fn outside(
        config: &Config,
        state: &State,
        events: Vec<Event>,
    ) -> Result<(Self, Handle), PortError> {
        let facts = PoolFacts::outside(&config.pool.path);
        Self::over((facts, Spoken::nowhere()), config, state, events)
    }

    fn over(
        (facts, spoken): (PoolFacts, Spoken),
        config: &Config,
        state: &State,
        events: Vec<Event>,
    ) -> Result<(Self, Handle), PortError> {
        let sockets = config.run_directory().sockets();
        let load = LoadHistory::new(config.balance_policy()).picture(Instant::now());
        let view = View::new(state, facts, sockets);
        let spoken = (config.run.protocol, spoken);
        let shared = Arc::new(Shared::new(Journal::new(events), view, load, spoken));
        let (sender, requests) = mpsc::channel();
        let waker = PortWaker::new()?;
        let handle = Handle { requests: sender, waker: waker.clone(), shared: Arc::clone(&shared) };
        Ok((Self { requests, shared, waker }, handle))
    }

    pub(crate) fn requests(&self) -> &mpsc::Receiver<Request> {
        &self.requests
    }

    /// Nothing is served any more.
    pub(crate) fn note_end(&self) {
        self.shared.stopped.store(true, Ordering::Release);
    }
}

/// Several controllers, as one of them sees them.
pub(crate) trait Peers: Send + Sync + std::fmt::Debug {
    /// All of them.
    fn list(&self) -> Vec<api::Controller>;
    /// Has one of them not be a member any more.
    fn remove(&self, replica: ReplicaId) -> Removal;
    /// Says whether it would be removed.
    fn try_removing(&self, replica: ReplicaId) -> Removal;
    /// What the one that leads answers to a `GET` of this path, if that is another one.
    fn look(&self, path: &str) -> Look;
    /// Whether one of them leads, and whether that is this one: a leader that a majority does not answer leads nobody.
    fn office(&self) -> Office;
}

/// Who decides in a pod, as one of its controllers sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Office {
    /// Somebody does.
    pub has_leader: bool,
    /// This one does.
    pub leads: bool,
}

/// What becomes of a removal.
pub(crate) type Removal = Pin<Box<dyn Future<Output = Result<(), SubmitError>> + Send>>;

/// What becomes of a look.
pub(crate) type Look = Pin<Box<dyn Future<Output = Option<Seen>> + Send>>;

/// An endpoint's last telemetry.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When it came.
    pub at: Instant,
    /// What it says.
    pub telemetry: Telemetry,
}

/// What the controller's thread shows to others.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) journal: Journal,
    pub(super) view: watch::Sender<Arc<View>>,
    /// Its end was seen. What is asked before it began waits for it.
    pub(super) stopped: AtomicBool,
    /// Why whoever keeps what is decided does not, where that is so.
    store_away: Mutex<Option<String>>,
    /// The other controllers, where there are any.
    peers: OnceLock<Arc<dyn Peers>>,
    telemetry: Mutex<BTreeMap<EndpointId, Sample>>,
    load: Mutex<LoadPicture>,
    /// What is done about loads, by whoever leads.
    balance: Mutex<BalancePolicy>,
    /// What this controller speaks, and where it is seen what others speak.
    spoken: (Protocol, Spoken),
    /// Messages of daemons that said nothing that is known here.
    pub(super) not_understood: AtomicU64,
}

impl Shared {
    pub(super) fn new(journal: Journal, view: View, load: LoadPicture, spoken: (Protocol, Spoken)) -> Self {
        Self {
            journal,
            view: watch::Sender::new(Arc::new(view)),
            stopped: AtomicBool::new(false),
            store_away: Mutex::default(),
            peers: OnceLock::new(),
            telemetry: Mutex::default(),
            balance: Mutex::new(load.policy),
            load: Mutex::new(load),
            spoken,
            not_understood: AtomicU64::new(0),
        }
    }

    /// Shows a state with what leases wait for, and after that what was told on the way to it: whoever hears of an event finds its
    /// outcome in the view.
    pub(crate) fn show(&self, state: Arc<State>, waiting: Waiting, told: Vec<Event>) {
        self.view.send_modify(|view| *view = Arc::new(view.updated(state, waiting)));
        self.journal.add(told);
    }

    fn store_away(&self) -> MutexGuard<'_, Option<String>> {
        // It is put in whole, whoever panicked.
        self.store_away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn telemetry(&self) -> MutexGuard<'_, BTreeMap<EndpointId, Sample>> {
        // Each sample is put in whole, whoever panicked.
        self.telemetry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn balance(&self) -> MutexGuard<'_, BalancePolicy> {
        // A policy is put in whole, whoever panicked.
        self.balance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn load(&self) -> MutexGuard<'_, LoadPicture> {
        // A picture is put in whole, whoever panicked.
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a command was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The state machine refused it.
    #[error("{0}")]
    Refused(Refusal),
    /// There is no controller any more.
    #[error("the controller is stopping")]
    Stopping,
    /// Of several controllers none leads.
    #[error(
        "none of the controller replicas leads: a majority of them has to run and to reach each other; try again soon"
    )]
    NoLeader,
    /// The same, and of those that can lead none is reached.
    #[error(
        "none of the controller replicas that this one reaches can lead: it is outside of the pod, and of those that reach the pool none \
         is connected ({0}); start one of them, or see that the network lets it through"
    )]
    NoLeaderOutside(String),
    /// Whoever was to keep it was lost meanwhile.
    #[error(
        "it is open whether this was done, since another controller leads by now or etcd does not answer: look, or send it \
         again with the same Idempotency-Key"
    )]
    Unknown,
    /// Nothing can be kept now.
    #[error("{0}")]
    StoreAway(String),
}

impl SubmitError {
    /// A replica cannot be removed, since it is no member.
    pub(crate) fn no_replica(replica: impl Display) -> Self {
        let detail = format!("there is no controller replica {replica}");
        Self::Refused(Refusal { kind: RefusalKind::NotFound, detail })
    }

    /// A replica cannot be removed, since it is the only member.
    pub(crate) fn only_replica(replica: impl Display) -> Self {
        let detail = format!("controller replica {replica} is the only one: it cannot be removed");
        Self::Refused(Refusal { kind: RefusalKind::Busy, detail })
    }

    /// Nobody leads, and these are not reached, which could.
    pub(crate) fn no_leader_outside(unreached: &[ReplicaId]) -> Self {
        let names: Vec<String> = unreached.iter().map(|replica| format!("replica {replica}")).collect();
        Self::NoLeaderOutside(names.join(", "))
    }

    /// A replica cannot be removed, since those that would be left and answer are outside of the pod.
    pub(crate) fn none_in_pod(replica: impl Display) -> Self {
        let detail = format!(
            "controller replica {replica} cannot be removed: of the others none answers that reaches the pool, so nobody could lead; \
             start one of those first"
        );
        Self::Refused(Refusal { kind: RefusalKind::Busy, detail })
    }

    /// A replica cannot be removed, since of those that would be left these do not answer.
    pub(crate) fn too_few_replicas(replica: impl Display, silent: &[ReplicaId]) -> Self {
        let silent: Vec<String> = silent.iter().map(ToString::to_string).collect();
        let detail = format!(
            "controller replica {replica} cannot be removed now: without it no majority would be left that answers, and nothing could \
             be changed any more. Of the others these do not answer: {}; start them again first, or remove those that are gone for good",
            silent.join(", ")
        );
        Self::Refused(Refusal { kind: RefusalKind::Busy, detail })
    }
}

/// How others talk to the controller's thread.
#[derive(Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
    waker: PortWaker,
    shared: Arc<Shared>,
}

impl Handle {
    /// Has a command carried out; returns once it is committed and shown in the [view](Handle::view).
    pub async fn submit(&self, command: Command) -> Result<(), SubmitError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(Request::Apply { command, reply }).map_err(|_| SubmitError::Stopping)?;
        self.waker.wake();
        match answer.await {
            Ok(result) => result,
            // A single controller's thread drops none before its end.
            Err(_) if self.is_running() => Err(SubmitError::Unknown),
            Err(_) => Err(SubmitError::Stopping),
        }
    }

    /// Has a command carried out for somebody else.
    pub(crate) fn submit_for(&self, command: Command, reply: Reply) {
        // Whoever waits hears of the end, since the reply is dropped.
        let _ = self.requests.send(Request::Apply { command, reply });
        self.waker.wake();
    }

    /// Has the controller's thread see whether it leads.
    pub(crate) fn look(&self) {
        // A thread that ended leads nobody.
        let _ = self.requests.send(Request::Look);
        self.waker.wake();
    }

    /// Shows what the replicated log leads to, as long as this is the one to do so.
    pub(crate) fn catch_up(&self, sight: Sight, still: impl Fn() -> bool) {
        let Sight { state, leases, events } = sight;
        if let Some(state) = state {
            // Whoever looks meanwhile does not wait until all is compared.
            let before = self.view();
            let followed = before.followed(&state, leases.as_ref());
            self.shared.view.send_if_modified(|view| {
                let show = still() && state.index >= view.state.index;
                if show {
                    let is_next = Arc::ptr_eq(view, &before);
                    let next = if is_next { followed } else { view.followed(&state, leases.as_ref()) };
                    *view = Arc::new(next);
                }
                show
            });
        }
        // Whoever hears of an event finds its outcome in the view.
        self.shared.journal.add(events);
    }

    /// Shows what leases wait for, as the leader says; it says it of the state with this index.
    pub(crate) fn show_waiting(&self, (index, waiting): &(u64, Waiting), still: impl Fn() -> bool) {
        self.shared.view.send_if_modified(|view| {
            let show = still() && *index >= view.state.index && view.waiting != *waiting;
            if show {
                *view = Arc::new(view.updated(Arc::clone(&view.state), waiting.clone()));
            }
            show
        });
    }

    /// Ends the controller's thread.
    pub fn stop(&self) {
        // A thread that ended already needs no telling.
        let _ = self.requests.send(Request::Stop);
        self.waker.wake();
    }

    /// Whether the controller's thread serves, or is about to.
    pub fn is_running(&self) -> bool {
        !self.shared.stopped.load(Ordering::Acquire)
    }

    /// Who decides.
    pub fn office(&self) -> Office {
        let runs = self.is_running();
        let alone = Office { has_leader: runs, leads: runs };
        self.shared.peers.get().map_or(alone, |peers| peers.office())
    }

    /// Why what is decided cannot be kept, and what to do, as far as is known: an etcd that does not answer is noticed within seconds.
    pub fn store_away(&self) -> Option<String> {
        self.shared.store_away().clone()
    }

    /// Why whoever keeps what is decided does not; none if it does.
    pub(crate) fn set_store_away(&self, why: Option<String>) {
        *self.shared.store_away() = why;
    }

    /// What is known now.
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.shared.view.borrow())
    }

    /// Tells when something else is known.
    pub fn views(&self) -> watch::Receiver<Arc<View>> {
        self.shared.view.subscribe()
    }

    /// The controllers of the pod.
    pub fn controllers(&self) -> Vec<api::Controller> {
        let alone = || {
            let protocol = Some(self.shared.spoken.0.to_string());
            vec![api::Controller {
                replica: 0,
                leads: true,
                answers: true,
                outside: false,
                behind_changes: None,
                protocol,
            }]
        };
        self.shared.peers.get().map_or_else(alone, |peers| peers.list())
    }

    /// What the members of the pod say that they speak.
    pub fn spoken(&self) -> &Spoken {
        &self.shared.spoken.1
    }

    /// How many messages of daemons said nothing that is known here.
    pub fn not_understood(&self) -> u64 {
        self.shared.not_understood.load(Ordering::Relaxed)
    }

    /// Has a controller not be a member any more.
    pub async fn remove_controller(&self, replica: u16) -> Result<(), SubmitError> {
        self.peers()?.remove(ReplicaId::new(replica)).await
    }

    /// Whether [`remove_controller`](Handle::remove_controller) would, as things are now.
    pub async fn try_removing_controller(&self, replica: u16) -> Result<(), SubmitError> {
        self.peers()?.try_removing(ReplicaId::new(replica)).await
    }

    fn peers(&self) -> Result<&Arc<dyn Peers>, SubmitError> {
        self.shared.peers.get().ok_or_else(|| {
            let detail = "there is only this controller: it has no replicas".to_owned();
            SubmitError::Refused(Refusal { kind: RefusalKind::NotFound, detail })
        })
    }

    /// There are several controllers.
    pub(crate) fn set_peers(&self, peers: Arc<dyn Peers>) {
        // It is said once.
        let _ = self.shared.peers.set(peers);
    }

    /// Recent events.
    pub fn journal(&self) -> &Journal {
        &self.shared.journal
    }

    /// What passes through NICs, and what is done about it.
    pub fn load(&self) -> LoadPicture {
        self.shared.load().clone()
    }

    /// From now on this is done about loads, once this controller leads.
    pub fn set_balance(&self, policy: BalancePolicy) {
        *self.shared.balance() = policy;
        self.shared.load().policy = policy;
        self.look();
    }

    /// Forgets what was measured: whoever does not lead any more hears no daemon, and what it heard last would look as if it were so
    /// still, and older and older.
    pub(crate) fn forget_measured(&self) {
        self.shared.telemetry().clear();
        let policy = *self.shared.balance();
        *self.shared.load() = LoadHistory::new(policy).picture(Instant::now());
        self.shared.not_understood.store(0, Ordering::Relaxed);
    }

    /// Why nothing is measured here, where that is so, and whom to ask: daemons tell only whoever leads what passes through them.
    pub fn measures_nothing(&self) -> Option<String> {
        if self.office().leads {
            return None;
        }
        let leader = self.controllers().into_iter().find(|it| it.leads);
        Some(leader.map_or_else(
            || {
                "no controller replica leads now, so nobody knows what devices carry: ask again soon"
                    .to_owned()
            },
            |leader| {
                let replica = leader.replica;
                format!("what devices carry is not known here: ask controller replica {replica}, which leads")
            },
        ))
    }

    /// What another controller that leads answers to a `GET` of this path. None where there is none, or it does not answer.
    pub(crate) async fn look_at_leader(&self, path: &str) -> Option<Seen> {
        self.shared.peers.get()?.look(path).await
    }

    /// The last telemetry of every endpoint.
    pub fn telemetry(&self) -> BTreeMap<EndpointId, Sample> {
        self.shared.telemetry().clone()
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}
