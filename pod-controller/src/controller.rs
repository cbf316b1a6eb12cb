//! The thread around the state machine: it hears the endpoints and the API, commits, and then acts.
//!
//! Each turn gathers what came, applies it to a copy of the state, commits, and only then lets anything out: effects,
//! answers, objects. A controller that dies in between has said nothing that it does not know after its restart.

pub(crate) mod conductor;
mod handle;
mod links;
mod load;
mod pool_world;
pub(crate) mod world;

use std::sync::atomic::Ordering;
use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use cxl_pool::{HardwareMemory, Memory, Pool, SoftwareMemory};
use pod_protocol::controller::{ControllerPort, PortError};

use crate::balance::LoadHistory;
use crate::config::Config;
use crate::journal::Journal;
use crate::state::{Command, Refusal, State};
use crate::store::{Recovered, Store, StoreError};
use crate::view::{PoolFacts, View};
use conductor::{Conductor, Delays};

pub use handle::{Handle, Sample, SubmitError};
use handle::{Request, Shared};
use pool_world::PoolWorld;

/// How long the thread sleeps at most; it is woken before when there is something to do.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// How much is gathered into one commit.
const WISHES_PER_TURN_MAX: usize = 256;

type Reply = tokio::sync::oneshot::Sender<Result<(), Refusal>>;

/// Why a controller cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The state file.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The port to the endpoints.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The pool is not the state's.
    #[error("{0}")]
    Pool(Refusal),
}

/// The controller's thread before it runs.
pub struct Controller<M: Memory> {
    conductor: Conductor<PoolWorld<M>>,
    requests: mpsc::Receiver<Request>,
}

impl<M: Memory> Controller<M> {
    /// Takes the controller's place in the pool, with what was [kept](Store::open). Kept for another pool, it is
    /// refused, unless the configuration says to adopt this one.
    pub fn open(
        pool: &Pool,
        memory: M,
        config: &Config,
        (mut store, recovered): (Store, Recovered),
    ) -> Result<(Self, Handle), ControllerError> {
        let options = config.options(pool);
        // Whoever else has the pool is noticed before anything is kept.
        let mut port = ControllerPort::open(pool, memory.clone(), config.run_directory(), recovered.term)?;
        port.set_silent_after(config.detect());
        port.set_doorbells(config.run.wakeup == pod_protocol::config::Wakeup::Socket);
        let mut state = if let Some(state) = recovered.state {
            state
        } else {
            let state = State::new(options.clone());
            store.keep_snapshot(&state)?;
            state
        };
        let mut begun = Vec::new();
        if state.options != options {
            let mut changed = state.clone();
            let adopted =
                options.pool != state.options.pool && config.controller.adopt_pool == Some(options.pool);
            let command =
                if adopted { Command::AdoptPool { options } } else { Command::Configure { options } };
            begun.extend(changed.apply(&command).map_err(ControllerError::Pool)?);
            store.keep_snapshot(&changed)?;
            state = changed;
        }

        let facts = PoolFacts::new(&config.pool.path, pool.superblock());
        let sockets = config.run_directory().sockets();
        let balance = config.balance_policy();
        let load = LoadHistory::new(balance).picture(Instant::now());
        let view = View::new(&state, facts, sockets);
        let shared = Arc::new(Shared::new(Journal::new(recovered.events), view, load));
        let (sender, requests) = mpsc::channel();
        let handle = Handle::new(sender, port.waker(), Arc::clone(&shared));
        let world =
            PoolWorld { port, memory, layout: pool.layout().clone(), store, shared: Arc::clone(&shared) };
        let delays =
            Delays { fence: config.fence_wait(), blk_grace: config.blk_grace(), drain: config.drain() };
        let policies = (delays, config.link_policy(), balance);
        let mut conductor = Conductor::new(world, state, recovered.term, policies);
        conductor.resume(begun)?;
        Ok((Self { conductor, requests }, handle))
    }

    /// Runs until it is [told to stop](Handle::stop), or until the state cannot be kept any more.
    pub fn run(mut self) -> Result<(), ControllerError> {
        let shared = Arc::clone(&self.conductor.world.shared);
        let result = self.turn_until_stopped();
        shared.stopped.store(true, Ordering::Release);
        result
    }

    fn turn_until_stopped(&mut self) -> Result<(), ControllerError> {
        loop {
            let (wishes, stop) = self.wishes();
            let due = self.conductor.turn(wishes, Instant::now())?;
            if stop {
                return Ok(());
            }
            let now = Instant::now();
            let sleep = due.map_or(SLEEP_MAX, |due| due.saturating_duration_since(now).min(SLEEP_MAX));
            self.conductor.world.port.wait(sleep);
        }
    }

    /// What was asked for, and whether to stop after that.
    fn wishes(&mut self) -> (Vec<(Command, Reply)>, bool) {
        let mut wishes = Vec::new();
        while wishes.len() < WISHES_PER_TURN_MAX {
            match self.requests.try_recv() {
                Ok(Request::Apply { command, reply }) => wishes.push((command, reply)),
                Ok(Request::Stop) | Err(TryRecvError::Disconnected) => return (wishes, true),
                Err(TryRecvError::Empty) => break,
            }
        }
        (wishes, false)
    }
}

/// A controller over whatever memory the pool says it is.
pub enum AnyController {
    /// Over memory that hosts do not see coherently.
    Software(Box<Controller<SoftwareMemory>>),
    /// Over coherent memory.
    Hardware(Box<Controller<HardwareMemory>>),
}

impl AnyController {
    /// As [`Controller::open`].
    pub fn open(
        pool: &Pool,
        config: &Config,
        kept: (Store, Recovered),
    ) -> Result<(Self, Handle), ControllerError> {
        Ok(match pool.superblock().mode {
            cxl_pool::CoherenceMode::Software => {
                let (controller, handle) = Controller::open(pool, pool.software(), config, kept)?;
                (Self::Software(Box::new(controller)), handle)
            }
            cxl_pool::CoherenceMode::Hardware => {
                let (controller, handle) = Controller::open(pool, pool.hardware(), config, kept)?;
                (Self::Hardware(Box::new(controller)), handle)
            }
        })
    }

    /// As [`Controller::run`].
    pub fn run(self) -> Result<(), ControllerError> {
        match self {
            Self::Software(controller) => controller.run(),
            Self::Hardware(controller) => controller.run(),
        }
    }
}
