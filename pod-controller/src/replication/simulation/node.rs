//! One replica: a disk that stays, a clock of its own, and one process after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cxl_pool::simulated::Random;
use cxl_pool::{Pool, ReplicaId};
use openraft::RaftMetrics;
use pod_protocol::controller::PortWaker;
use pod_protocol::protocol::{Protocol, Spoken};
use pod_state::{Command, State};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::super::admission::Register;
use super::super::change::{Change, LogOwner, Member, Replicated};
use super::super::clerk::clerk;
use super::super::colleagues::Colleagues;
use super::super::log::{Log, LogFile};
use super::super::machine::Machine;
use super::super::network::Network;
use super::super::outside::Outside;
use super::super::post::{Clerk, Outbox, Post};
use super::super::raft_config::{raft_config, trusted_for};
use super::super::replica::{Standing, attend};
use super::super::roll::Roll;
use super::Broken;
use super::disk::Disk;
use super::group::Size;
use super::leader::Pod;
use super::net::{Net, Wire};
use super::office::Office;
use super::storage::{WatchedLog, WatchedMachine, Witness};
use crate::config::{Config, ReplicationSection};
use crate::controller::{Desk, Handle, SubmitError};
use crate::store::StoreError;
use crate::view::View;

const HEARTBEAT_MS: u64 = 40;
const ELECTION_MS: u64 = 240;
/// How many entries are kept that a snapshot has too.
const ENTRIES_KEPT: u64 = 8;

/// What all replicas share.
pub(super) struct Surroundings {
    pub(super) pool: Pool,
    pub(super) config: Config,
    pub(super) net: Net,
    pub(super) pod: Pod,
    pub(super) witness: Witness,
    pub(super) size: Size,
    pub(super) broken: Option<Broken>,
    pub(super) state: State,
}

pub(super) struct Node {
    pub(super) replica: u16,
    pub(super) disk: Disk,
    pub(super) life: Option<Life>,
    /// Whose log it is, or a new one will be.
    pub(super) owner: LogOwner,
    /// How fast its clock goes, in thousandths of true time.
    pub(super) pace_permille: u64,
    passed_permille: u64,
    /// It does nothing until then, by true time.
    pub(super) still_until_ms: u64,
    /// When it is started again.
    pub(super) starts_at_ms: u64,
    pub(super) lives: u64,
    /// It begins the pod's replicated life.
    pub(super) begins: bool,
    /// Its log was made, and is there.
    has_log: bool,
    random: Random,
}

/// A process.
pub(super) struct Life {
    pub(super) runtime: Runtime,
    pub(super) standing: Arc<Standing>,
    pub(super) handle: Handle,
    pub(super) views: watch::Receiver<Arc<View>>,
    pub(super) metrics: watch::Receiver<RaftMetrics<LogOwner, Member>>,
    pub(super) register: Arc<Register>,
    desk: Desk,
    outbox: Outbox,
    clerk: Clerk,
    wire: Wire,
    pub(super) office: Office,
}

/// Why a process does not start or does not go on.
#[derive(Debug)]
pub(super) enum End {
    /// As it does when its disk is full or its power fails.
    Fails,
    /// As it never should.
    Wrong(String),
}

impl Node {
    pub(super) fn new(seed: u64, replica: u16, broken: Option<Broken>) -> Self {
        let mut random = Random::new(seed ^ (u64::from(replica) << 32));
        let disk = Disk::new(random.bits(), broken == Some(Broken::ForgetsWhatItKept));
        let (owner, pace_permille) = (random.bits().max(1), 850 + random.below(300));
        Self {
            replica,
            disk,
            life: None,
            owner,
            pace_permille,
            passed_permille: 0,
            still_until_ms: 0,
            starts_at_ms: 0,
            lives: 0,
            begins: false,
            has_log: false,
            random,
        }
    }

    /// Starts a process.
    pub(super) fn start(&mut self, around: &Surroundings) -> Result<(), End> {
        self.lives += 1;
        let opened = LogFile::open_on(self.disk.mount(), self.owner, around.size.sizes);
        if opened.is_err() && !self.has_log {
            // It failed while it was made: nothing was in it, and its operator moves it away.
            self.disk.replace();
            return Err(End::Fails);
        }
        let file = Arc::new(opened.map_err(|error| match error {
            StoreError::Io { .. } => End::Fails,
            _ if self.disk.is_faulty() => End::Fails,
            other => End::Wrong(format!("replica {}: {other}", self.replica)),
        })?);
        self.owner = file.owner();
        self.has_log = true;
        let life = self.begin_life(around, file)?;
        self.life = Some(life);
        around.net.set_there(self.replica, true);
        Ok(())
    }

    fn begin_life(&mut self, around: &Surroundings, file: Arc<LogFile>) -> Result<Life, End> {
        let wrong = |error: String| End::Wrong(format!("replica {}: {error}", self.replica));
        let (me, owner) = (ReplicaId::new(self.replica), self.owner);
        let machine = Machine::open(Arc::clone(&file)).map_err(|error| wrong(error.to_string()))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime");
        let (post, outbox) = Post::new(PortWaker::new().expect("a descriptor"));
        let roll = Roll::default();
        let network = Network { post: post.clone(), me: owner, roll: roll.clone() };
        let section = ReplicationSection {
            // Each waits longer than the one before it, unless they are to stand for election at once.
            replica: if around.size.restless { 0 } else { self.replica },
            log: None,
            outside: self.is_outside(around),
            heartbeat_ms: HEARTBEAT_MS,
            election_ms: ELECTION_MS,
            tcp: None,
        };
        let mut config = raft_config(&section).expect("good");
        // Raft draws from between these, by dice of its own.
        let span = config.election_timeout_max - config.election_timeout_min;
        config.election_timeout_min += self.random.below(span);
        config.election_timeout_max = config.election_timeout_min + 1;
        config.max_in_snapshot_log_to_keep = ENTRIES_KEPT;
        // So that one is sent in pieces.
        config.snapshot_max_chunk_size = around.size.chunk_bytes;
        let log = WatchedLog { log: Log(file), broken: around.broken };
        let watched = WatchedMachine {
            replica: self.replica,
            machine: machine.clone(),
            witness: around.witness.clone(),
            broken: around.broken,
        };
        let raft = runtime.block_on(openraft::Raft::<Replicated>::new(
            owner,
            Arc::new(config),
            network,
            log,
            watched,
        ));
        let raft =
            raft.map_err(|error| if self.disk.is_faulty() { End::Fails } else { wrong(error.to_string()) })?;
        let known = machine.look(Clone::clone);
        let mut begin = None;
        if self.begins && known.state.is_none() {
            let members = [(owner, Member::in_pod(me))];
            let initialized = runtime.block_on(raft.initialize(std::collections::BTreeMap::from(members)));
            initialized.map_err(|error| wrong(error.to_string()))?;
            let state = Box::new(around.state.clone());
            begin = Some(Change::Begin { state, events: Vec::new(), terms: 0 });
        }
        let state = known.state.unwrap_or_else(|| around.state.clone());
        let desk = if self.is_outside(around) {
            Desk::outside(&around.config, &state, known.events.into())
        } else {
            Desk::new(&around.pool, &around.config, &state, known.events.into())
        };
        let (desk, handle) = desk.expect("descriptors");
        let (elected, leading) = (AtomicU64::new(0), AtomicU64::new(0));
        let outside = self.is_outside(around).then(|| Outside::new(Protocol::CURRENT.minor));
        let trusted = trusted_for(&section);
        let standing =
            Standing { owner, me, raft: raft.clone(), machine, post, outside, trusted, elected, leading };
        let standing = Arc::new(standing);
        let register = Arc::new(Register::new(raft, roll));
        let spoken = Spoken::new(&around.pool);
        let colleagues =
            Colleagues { standing: Arc::clone(&standing), register: Arc::clone(&register), spoken };
        handle.set_peers(Arc::new(colleagues));
        let others = (0..around.size.replicas).filter(|other| *other != self.replica).map(ReplicaId::new);
        attend(runtime.handle(), &standing, &handle, others.collect());
        Ok(Life {
            clerk: clerk(Arc::clone(&standing), handle.clone(), Arc::clone(&register)),
            register,
            wire: Wire { net: around.net.clone(), me: self.replica },
            office: Office::new(begin, around.pod.clone(), around.size.gathered_max, around.broken),
            views: handle.views(),
            metrics: standing.raft.metrics(),
            runtime,
            standing,
            handle,
            desk,
            outbox,
        })
    }

    /// Whether it is outside of the pod.
    pub(super) const fn is_outside(&self, around: &Surroundings) -> bool {
        self.replica >= around.size.replicas - around.size.outside
    }

    /// Lets one millisecond of true time pass. An error says why its process is over.
    pub(super) fn pass(&mut self, now_ms: u64) -> Result<(), End> {
        let Some(life) = &mut self.life else { return Ok(()) };
        if self.still_until_ms > now_ms {
            return Ok(());
        }
        self.passed_permille += self.pace_permille;
        let passed_ms = self.passed_permille / 1000;
        self.passed_permille %= 1000;
        if passed_ms == 0 {
            return Ok(());
        }
        let goes_on = life.pass(passed_ms);
        self.still_until_ms = now_ms + self.disk.take_busy_ms();
        match goes_on {
            _ if self.disk.has_failed() => Err(End::Fails),
            Ok(()) => Ok(()),
            Err(_) if self.disk.is_faulty() => Err(End::Fails),
            Err(error) => Err(End::Wrong(format!("replica {} ends: {error}", self.replica))),
        }
    }

    /// Ends its process. What it wrote is there, unless the power fails with it.
    pub(super) fn kill(&mut self, around: &Surroundings, power: bool) {
        if power {
            self.disk.lose_power();
        } else {
            self.disk.unmount();
        }
        self.life = None;
        around.net.set_there(self.replica, false);
    }

    /// Its log is lost, and with it who it was.
    pub(super) fn lose_log(&mut self, around: &Surroundings) {
        self.kill(around, true);
        self.disk.replace();
        self.has_log = false;
        self.owner = self.random.bits().max(1);
    }

    /// The term for which it is elected, for all it knows; 0 for none.
    pub(super) fn elected(&self) -> u64 {
        self.life.as_ref().map_or(0, |life| life.standing.elected.load(Ordering::Acquire))
    }
}

impl Life {
    fn pass(&mut self, passed_ms: u64) -> Result<(), String> {
        let (post, runtime) = (&self.standing.post, &self.runtime);
        post.carry_some(&self.outbox, &mut self.wire, &self.clerk, runtime.handle());
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(passed_ms)).await });
        if let Err(error) = &self.metrics.borrow().running_state {
            return Err(error.to_string());
        }
        let step = self.office.step(runtime, &self.standing, (&self.desk, &self.handle));
        step.map_err(|error| error.to_string())
    }

    /// Asks it to have a command carried out.
    pub(super) fn submit(&self, command: Command) -> JoinHandle<Result<(), SubmitError>> {
        let handle = self.handle.clone();
        self.runtime.spawn(async move { handle.submit(command).await })
    }

    /// Asks it to have a replica not be a member any more.
    pub(super) fn dismiss(&self, replica: u16) {
        let handle = self.handle.clone();
        // Whoever is not answered looks at the members, as the group does.
        drop(self.runtime.spawn(async move { handle.remove_controller(replica).await }));
    }
}
