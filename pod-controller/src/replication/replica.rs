//! The life of one replica: it follows, or leads while it is elected.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cxl_pool::{CoherenceMode, ControllerHello, Memory, Pool, Record, ReplicaId, SoftwareMemory};
use openraft::ServerState;
use pod_protocol::controller::PortWaker;
use pod_protocol::protocol::Spoken;
use pod_protocol::replicas::ReplicaPortError;
use pod_state::State;

use super::admission::{Register, stay_member};
use super::beginning::{begin, retire};
use super::change::{Change, LogOwner, Raft};
use super::clerk::clerk;
use super::colleagues::Colleagues;
use super::elections::elect_above;
use super::exchange::{AnyExchange, Exchange, others};
use super::forwarding::{FORWARD_MAX, forward};
use super::log::{Log, LogFile};
use super::machine::Machine;
use super::network::Network;
use super::outside::{Outside, give_up_offices, lease, stand_unasked};
use super::post::{Answer, Outbox, Post, Question};
use super::proposer::Proposer;
use super::raft_config::{raft_config, trusted_for};
use super::renewal::{renew_log, trim_log};
use super::roll::Roll;
use super::tcp::{TcpError, Trust};
use crate::config::{Config, ReplicationSection};
use crate::controller::{
    AnyTenure, ControllerError, Desk, End, Handle, Keeper, Request, SeenTerms, SubmitError,
};
use crate::store::{Recovered, Store, StoreError};

/// What a follower waits for between looks whether it leads; it is woken before.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long the newly elected waits until it knows everything that was decided before.
const CATCH_UP_MAX: Duration = Duration::from_secs(2);
/// How long whoever ceased to lead waits before it leads again.
const LEAD_AGAIN: Duration = Duration::from_millis(20);
/// How often a follower asks what leases wait for.
const WAITING_EVERY: Duration = Duration::from_millis(250);
/// How long Raft may take to end.
const END_MAX: Duration = Duration::from_secs(2);

/// Why a replica cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ReplicationError {
    /// It does not lead any more.
    #[error("this replica does not lead any more: {0}")]
    Deposed(String),
    /// Its log cannot be kept any more.
    #[error("this controller replica cannot go on: {0}; the others go on while they are a majority")]
    Ended(String),
    /// The log.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The connection to the others.
    #[error(transparent)]
    Port(#[from] ReplicaPortError),
    /// The network.
    #[error(transparent)]
    Tcp(#[from] TcpError),
    /// A thread or a descriptor.
    #[error("cannot start a controller replica")]
    Resources(#[source] std::io::Error),
    /// Raft does not take its configuration.
    #[error("the section [replication] makes no sense: {0}")]
    Config(String),
    /// One outside of the pod cannot begin.
    #[error(
        "replication.outside = true: a replica outside of the pod cannot begin the pod's replicated life, since it does not reach the \
         pool. Start one that does with --bootstrap, and this one without"
    )]
    BeginsOutside,
    /// Others have begun already.
    #[error(
        "this pool has controller replicas already: replica {0} has led it. Start this one without --bootstrap and it \
         joins them; if they are gone for good, erase the pool and begin anew"
    )]
    BegunAlready(ReplicaId),
}

/// What all parts of a replica share.
pub(super) struct Standing {
    pub(super) owner: LogOwner,
    pub(super) me: ReplicaId,
    pub(super) raft: Raft,
    pub(super) machine: Machine,
    pub(super) post: Post,
    /// Of one that does not reach the pool.
    pub(super) outside: Option<Outside>,
    /// For how long it may rely on what a majority said, while it leads.
    pub(super) trusted: Duration,
    /// The term for which this replica is elected; 0 for none.
    pub(super) elected: AtomicU64,
    /// The term in which it acts as a leader; 0 for none.
    pub(super) leading: AtomicU64,
}

impl Standing {
    /// It does not act as a leader any more, and shows what others changed before it noticed: while it leads, what it shows
    /// is its own work's alone, and the next change may be long in coming. What daemons do they tell another one from now on.
    pub(super) fn resign(&self, handle: &Handle) {
        self.leading.store(0, Ordering::Release);
        handle.forget_measured();
        handle.catch_up(self.machine.sight(handle.journal().last()), || !leads(self));
    }
}

/// One of several controllers.
pub struct Replica {
    /// None outside of the pod.
    pool: Option<Arc<Pool>>,
    config: Config,
    standing: Arc<Standing>,
    handle: Handle,
    desk: Desk,
    /// Its certificates, where others are reached over the network.
    trust: Option<Arc<Trust>>,
    /// The first change of all and the state file that it was taken from, where this replica is to begin.
    begin: Option<(Change, Option<Store>)>,
    /// It ends before it is told to where another process is this replica.
    carrier: Option<JoinHandle<Result<(), ReplicaPortError>>>,
    runtime: tokio::runtime::Runtime,
}

impl Replica {
    /// Takes the replica's place, outside of the pod where there is no pool. With `bootstrap` it begins the pod's replicated life, as the
    /// only one at first, with the state file of a single controller if there is one.
    pub fn open(
        pool: Option<&Arc<Pool>>,
        config: &Config,
        section: &ReplicationSection,
        bootstrap: bool,
    ) -> Result<(Self, Handle), ControllerError> {
        let Some(pool) = pool else {
            if bootstrap {
                return Err(ReplicationError::BeginsOutside.into());
            }
            return Self::open_over(None::<(&Arc<Pool>, &SoftwareMemory)>, config, section, false);
        };
        match pool.superblock().mode {
            CoherenceMode::Software => {
                Self::open_over(Some((pool, &pool.software())), config, section, bootstrap)
            }
            CoherenceMode::Hardware => {
                Self::open_over(Some((pool, &pool.hardware())), config, section, bootstrap)
            }
        }
    }

    fn open_over<M: Memory>(
        pool: Option<(&Arc<Pool>, &M)>,
        config: &Config,
        section: &ReplicationSection,
        bootstrap: bool,
    ) -> Result<(Self, Handle), ControllerError> {
        let me = ReplicaId::new(section.replica);
        let file = Arc::new(LogFile::open(&config.replica_log()).map_err(ReplicationError::from)?);
        let owner = file.owner();
        let machine = Machine::open(Arc::clone(&file)).map_err(ReplicationError::from)?;
        let waker = PortWaker::new()?;
        let known_pool = machine.look(|known| known.state.as_ref().map(|state| state.options.pool));
        let exchange = match pool {
            Some((pool, memory)) => AnyExchange::open(pool, memory, config, section, &waker)?,
            None => AnyExchange::open_outside(config, section, &waker, known_pool)?,
        };
        if let Some((pool, memory)) = pool {
            // Nobody else is this replica, so a hello as the controller is from a life of it that was killed: the next
            // election need not watch whether it beats.
            ControllerHello::erase(memory, pool.layout().controller(me));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("raft")
            .enable_all()
            .build()
            .map_err(ReplicationError::Resources)?;
        let (post, outbox) = Post::new(waker);
        let roll = Roll::default();
        let network = Network { post: post.clone(), me: owner, roll: roll.clone() };
        let raft = runtime
            .block_on(openraft::Raft::new(
                owner,
                Arc::new(raft_config(section)?),
                network,
                Log(file),
                machine.clone(),
            ))
            .map_err(|error| ReplicationError::Ended(error.to_string()))?;
        let known = machine.look(Clone::clone);
        let begin = match pool {
            _ if known.state.is_some() => {
                retire(&config.controller.state)?;
                None
            }
            Some(pool) => runtime.block_on(begin(pool, config, (me, owner), &raft, bootstrap))?,
            None => None,
        };
        let pool = pool.map(|(pool, _)| pool);
        let state = known.state.unwrap_or_else(|| State::new(config.options(pool.map(AsRef::as_ref))));
        let (desk, handle) = match pool {
            Some(pool) => Desk::new(pool, config, &state, known.events.into())?,
            None => Desk::outside(config, &state, known.events.into())?,
        };
        let standing = Arc::new(Standing {
            owner,
            me,
            raft,
            machine,
            post,
            outside: pool.is_none().then(|| Outside::new(config.run.protocol.minor)),
            trusted: trusted_for(section),
            elected: AtomicU64::new(0),
            leading: AtomicU64::new(0),
        });
        let mut replica = Self {
            pool: pool.map(Arc::clone),
            config: config.clone(),
            standing,
            handle: handle.clone(),
            desk,
            trust: exchange.trust(),
            begin,
            carrier: None,
            runtime,
        };
        let others = others(replica.pool.as_deref(), section);
        match exchange {
            AnyExchange::Pool(rings) => replica.start(rings, outbox, roll, others)?,
            AnyExchange::Tcp(connections) => replica.start(connections, outbox, roll, others)?,
        }
        Ok((replica, handle))
    }

    /// What reads anew the certificates that it shows to other replicas, if there are any.
    pub(crate) fn reload_certificates(&self) -> Option<impl Fn() + Send + Sync + use<>> {
        let trust = self.trust.clone()?;
        Some(move || trust.reload())
    }

    /// Starts what goes on beside leading and following.
    fn start(
        &mut self,
        exchange: impl Exchange + Send + 'static,
        outbox: Outbox,
        roll: Roll,
        others: Vec<ReplicaId>,
    ) -> Result<(), ControllerError> {
        let (standing, runtime) = (&self.standing, self.runtime.handle().clone());
        let register = Arc::new(Register::new(standing.raft.clone(), roll));
        let spoken = self.pool.as_deref().map_or_else(Spoken::nowhere, Spoken::new);
        let colleagues =
            Colleagues { standing: Arc::clone(standing), register: Arc::clone(&register), spoken };
        self.handle.set_peers(Arc::new(colleagues));
        let clerk = clerk(Arc::clone(standing), self.handle.clone(), register);
        let post = standing.post.clone();
        let carrier = std::thread::Builder::new()
            .name("post".to_owned())
            .spawn({
                let runtime = runtime.clone();
                move || post.carry(&outbox, exchange, &clerk, &runtime)
            })
            .map_err(ReplicationError::Resources)?;
        self.carrier = Some(carrier);
        attend(&runtime, standing, &self.handle, others);
        Ok(())
    }

    /// Runs until it is [told to stop](Handle::stop), or until its log cannot be kept any more.
    pub fn run(mut self) -> Result<(), ControllerError> {
        let outcome = self.follow_and_lead();
        self.desk.note_end();
        let raft = self.standing.raft.clone();
        // What it has not done by then it will never do.
        let _ = self.runtime.block_on(async { tokio::time::timeout(END_MAX, raft.shutdown()).await });
        self.standing.post.stop();
        if let Some(carrier) = self.carrier.take() {
            // Its panic ended the process, and what it ended with is told already.
            let _ = carrier.join();
        }
        self.runtime.shutdown_background();
        outcome
    }

    fn follow_and_lead(&mut self) -> Result<(), ControllerError> {
        loop {
            self.is_still_itself()?;
            let metrics = self.standing.raft.metrics().borrow().clone();
            if let Err(error) = metrics.running_state {
                return Err(ReplicationError::Ended(error.to_string()).into());
            }
            let elected = self.standing.elected.load(Ordering::Acquire);
            if elected != 0 {
                match self.lead(elected) {
                    Ok(End::Stopped) => return Ok(()),
                    Ok(End::Deposed) => tracing::info!(elected, "this replica does not lead any more"),
                    Err(ControllerError::Replication(ReplicationError::Deposed(reason))) => {
                        tracing::warn!(elected, reason, "this replica does not lead any more");
                        if self.turn_away() {
                            return Ok(());
                        }
                    }
                    Err(error) => return Err(error),
                }
                self.standing.resign(&self.handle);
                // Elected still, it begins anew, but not at once and again.
                std::thread::sleep(LEAD_AGAIN);
                continue;
            }
            match self.desk.requests().recv_timeout(LOOK_EVERY) {
                Ok(Request::Apply { command, reply }) => {
                    let forwarding = forward(Arc::clone(&self.standing), self.handle.clone(), command, reply);
                    self.runtime.spawn(forwarding);
                }
                Ok(Request::Look) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Ok(Request::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Fails once another process is this replica.
    fn is_still_itself(&mut self) -> Result<(), ReplicationError> {
        match self.carrier.take_if(|carrier| carrier.is_finished()).map(JoinHandle::join) {
            // It is not told to stop before the end, and its panic ends the process.
            None | Some(Ok(Ok(())) | Err(_)) => Ok(()),
            Some(Ok(Err(error))) => Err(error.into()),
        }
    }

    /// Answers those who wait that nobody leads. Says whether to stop.
    fn turn_away(&self) -> bool {
        loop {
            match self.desk.requests().try_recv() {
                Ok(Request::Apply { reply, .. }) => {
                    // A client that went away needs no answer.
                    let _ = reply.send(Err(SubmitError::NoLeader));
                }
                Ok(Request::Look) => {}
                Ok(Request::Stop) | Err(mpsc::TryRecvError::Disconnected) => return true,
                Err(mpsc::TryRecvError::Empty) => return false,
            }
        }
    }

    /// Leads for as long as it is elected for this term.
    fn lead(&mut self, elected: u64) -> Result<End, ControllerError> {
        let elected_at = Instant::now();
        let standing = Arc::clone(&self.standing);
        // One outside of the pod is elected for no term as far as this thread goes.
        let Some(pool) = self.pool.clone() else { return Ok(End::Deposed) };
        // Before it is certain that this one leads: what is seen is of earlier terms then, unless the logs were restored.
        let seen = SeenTerms::of_pool(&pool, standing.me);
        self.runtime.block_on(know_all(&standing.raft))?;
        let proposer = Proposer::new(standing.raft.clone(), self.runtime.handle().clone(), standing.trusted);
        if standing.machine.look(|known| known.state.is_none()) {
            let Some((begin, file)) = self.begin.take() else {
                return Err(ReplicationError::Ended(
                    "it was ended before it had begun: start it once more with --bootstrap".to_owned(),
                )
                .into());
            };
            proposer.propose(begin)?;
            if let Some(file) = file {
                file.hand_over()?;
            }
            // Who joins later gets it in pieces, as a snapshot: it may be too long for one message in time.
            let kept = self.runtime.block_on(standing.raft.trigger().snapshot());
            kept.map_err(|error| ReplicationError::Ended(error.to_string()))?;
        }
        let terms = standing.machine.look(|known| known.terms);
        let sight = standing.machine.sight(self.handle.journal().last());
        let term = terms + elected;
        if seen.outrank(term, sight.state.as_ref().map_or(0, |state| state.index)) {
            let above = seen.highest().saturating_sub(terms);
            self.runtime.block_on(elect_above(&standing, elected, above))?;
            return Ok(End::Deposed);
        }
        let state = sight.state.as_deref().cloned();
        self.handle.catch_up(sight, || true);
        let recovered = Recovered { state, events: Vec::new(), term };
        standing.leading.store(elected, Ordering::Release);
        let keeper = Keeper::Replicas(proposer);
        let is_over = || self.carrier.as_ref().is_some_and(JoinHandle::is_finished);
        let still = || standing.elected.load(Ordering::Acquire) == elected && !is_over();
        tracing::info!(
            term,
            "this replica leads, {:.1} ms after its election",
            elected_at.elapsed().as_secs_f64() * 1e3
        );
        let office = (standing.me, &self.desk);
        let mut tenure = AnyTenure::open(&pool, &self.config, (keeper, recovered), office)?;
        tenure.serve(self.desk.requests(), still)
    }
}

/// Starts what a replica does whether it leads or follows.
pub(super) fn attend(
    runtime: &tokio::runtime::Handle,
    standing: &Arc<Standing>,
    handle: &Handle,
    others: Vec<ReplicaId>,
) {
    let (raft, member) = (standing.raft.clone(), Outside::member(standing.outside.as_ref(), standing.me));
    if member.is_in_pod() {
        runtime.spawn(watch_election(Arc::clone(standing), handle.clone()));
    } else {
        runtime.spawn(give_up_offices(Arc::clone(standing)));
        runtime.spawn(stand_unasked(Arc::clone(standing)));
    }
    runtime.spawn(show_what_is_known(Arc::clone(standing), handle.clone()));
    runtime.spawn(show_what_leases_wait_for(Arc::clone(standing), handle.clone()));
    runtime.spawn(renew_log(raft.clone(), standing.machine.renewals()));
    runtime.spawn(trim_log(raft.clone(), standing.machine.clone()));
    runtime.spawn(stay_member(Arc::clone(standing), member, others));
}

/// Returns once the newly elected knows everything that was decided before.
pub(super) async fn catch_up(raft: &Raft) -> Result<(), ReplicationError> {
    match tokio::time::timeout(CATCH_UP_MAX, raft.ensure_linearizable()).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(ReplicationError::Deposed(error.to_string())),
        Err(_) => Err(ReplicationError::Deposed("no majority of the replicas answers".to_owned())),
    }
}

/// Returns once the newly elected knows everything that its log has, too. One that was restarted in its term leads at once, and may not
/// remember how far that was decided: what is there beyond that comes before all that it decides now.
pub(super) async fn know_all(raft: &Raft) -> Result<(), ReplicationError> {
    catch_up(raft).await?;
    let last = raft.metrics().borrow().last_log_index;
    let applied = raft.wait(Some(CATCH_UP_MAX)).applied_index_at_least(last, "what the log has").await;
    applied.map(|_| ()).map_err(|error| ReplicationError::Deposed(error.to_string()))
}

pub(super) fn leads(standing: &Standing) -> bool {
    standing.leading.load(Ordering::Acquire) != 0
}

/// Who leads. Not one outside of the pod that is elected to give others its log.
pub(super) fn leader(standing: &Standing) -> Option<ReplicaId> {
    let is_led = standing.outside.as_ref().is_none_or(|outside| outside.is_led(lease(&standing.raft)));
    let metrics = standing.raft.metrics();
    let metrics = metrics.borrow();
    let owner = metrics.current_leader.filter(|_| is_led)?;
    let member = metrics.membership_config.membership().get_node(&owner)?;
    member.is_in_pod().then_some(member.replica)
}

/// Tells the thread that leads or follows which of both it is to do.
async fn watch_election(standing: Arc<Standing>, handle: Handle) {
    let mut metrics = standing.raft.metrics();
    loop {
        let (elected, running) = {
            let metrics = metrics.borrow_and_update();
            let running = metrics.running_state.is_ok();
            let leads =
                metrics.state == ServerState::Leader && metrics.current_leader == Some(standing.owner);
            (if leads && running { metrics.current_term } else { 0 }, running)
        };
        let before = standing.elected.swap(elected, Ordering::AcqRel);
        if before != elected || !running {
            handle.look();
        }
        if metrics.changed().await.is_err() || !running {
            return;
        }
    }
}

/// A follower shows what the log leads to.
pub(super) async fn show_what_is_known(standing: Arc<Standing>, handle: Handle) {
    let mut changes = standing.machine.changes();
    while changes.changed().await.is_ok() {
        if !leads(&standing) {
            handle.catch_up(standing.machine.sight(handle.journal().last()), || !leads(&standing));
        }
    }
}

async fn show_what_leases_wait_for(standing: Arc<Standing>, handle: Handle) {
    loop {
        tokio::time::sleep(WAITING_EVERY).await;
        let Some(leader) = leader(&standing).filter(|leader| *leader != standing.me) else { continue };
        if let Ok(Answer::Waiting(waiting)) = standing.post.ask(leader, Question::Waiting, FORWARD_MAX).await
        {
            handle.show_waiting(&waiting, || !leads(&standing));
        }
    }
}
