//! The thread around the state machine: it hears the endpoints and the API, commits, and then acts.
//!
//! Each turn gathers what came, applies it to a copy of the state, commits, and only then lets anything out: effects,
//! answers, objects. A controller that dies in between has said nothing that it does not know after its restart.

mod handle;
mod links;
mod turn;

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use cxl_pool::{EndpointId, HardwareMemory, Layout, Memory, Pool, SoftwareMemory};
use pod_protocol::controller::{CommandId, ControllerPort, PortError};
use pod_protocol::ids::{LeaseGeneration, LeaseId};

use crate::api::EventKind;
use crate::config::Config;
use crate::journal::Journal;
use crate::link_policy::LinkHistory;
use crate::reconcile::Reconciler;
use crate::state::{Command, Effect, Presence, Refusal, State};
use crate::store::{Recovered, Store, StoreError};
use crate::view::{PoolFacts, View};

pub use handle::{Handle, Sample, SubmitError};
use handle::{Request, Shared};

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
    port: ControllerPort<M>,
    memory: M,
    layout: Layout,
    store: Store,
    state: State,
    term: u64,
    reconciler: Reconciler<CommandId>,
    shared: Arc<Shared>,
    requests: mpsc::Receiver<Request>,
    /// The lives that were granted, which a join is about.
    granted: BTreeMap<EndpointId, u64>,
    /// When those who are being fenced must have stopped.
    fences: BTreeMap<EndpointId, (u64, Instant)>,
    fence_wait: Duration,
    /// Until when storage backends that are away are waited for.
    graces: BTreeMap<EndpointId, (u64, Instant)>,
    blk_grace: Duration,
    links: LinkHistory,
    /// Until when leases that were moved receive from the NIC that they left.
    drains: BTreeMap<LeaseId, (LeaseGeneration, Instant)>,
    drain: Duration,
    retry_at: Option<Instant>,
    /// Whether something changed that endpoints or viewers have yet to see.
    stale: bool,
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
        let shared = Arc::new(Shared::new(Journal::new(recovered.events), View::new(&state, facts, sockets)));
        let (sender, requests) = mpsc::channel();
        let handle = Handle::new(sender, port.waker(), Arc::clone(&shared));
        let mut controller = Self {
            port,
            memory,
            layout: pool.layout().clone(),
            store,
            state,
            term: recovered.term,
            reconciler: Reconciler::default(),
            shared,
            requests,
            granted: BTreeMap::new(),
            fences: BTreeMap::new(),
            fence_wait: config.fence_wait(),
            graces: BTreeMap::new(),
            blk_grace: config.blk_grace(),
            links: LinkHistory::new(config.link_policy()),
            drains: BTreeMap::new(),
            drain: config.drain(),
            retry_at: None,
            stale: true,
        };
        controller.resume(begun)?;
        Ok((controller, handle))
    }

    /// Finishes what the last life began: whoever it was fencing is fenced again.
    fn resume(&mut self, mut effects: Vec<Effect>) -> Result<(), ControllerError> {
        let fencing: Vec<EndpointId> = self
            .state
            .endpoints
            .iter()
            .filter(|(_, endpoint)| endpoint.presence == Presence::Fencing)
            .map(|(id, _)| *id)
            .collect();
        for endpoint in fencing {
            self.act(&Effect::Fence(endpoint));
        }
        let message = format!("term {}, {} commands so far", self.term, self.state.index);
        let event =
            Effect::Event { kind: EventKind::ControllerStarted, subject: "controller".to_owned(), message };
        effects.insert(0, event);
        self.commit(&[], &effects, &self.state.clone())?;
        self.publish_regions();
        Ok(())
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
