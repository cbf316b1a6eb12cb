//! The thread around the state machine: it hears the endpoints and the API, commits, and then acts.
//!
//! Each turn gathers what came, applies it, commits, and only then lets anything out: effects, answers, objects. A controller that
//! dies in between has said nothing that it does not know after its restart.

pub(crate) mod conductor;
mod etcd;
mod handle;
pub(crate) mod inbox;
mod keeper;
mod links;
#[cfg(test)]
mod listener;
mod load;
mod pool_world;
mod region_table;
mod telling;
mod terms;
pub(crate) mod world;

use std::collections::BTreeSet;
use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use cxl_pool::{CoherenceMode, HardwareMemory, Memory, Pool, ReplicaId, SoftwareMemory};
use pod_api::EventKind;
use pod_protocol::controller::{ControllerPort, PortError};
use pod_state::{Command, Effect, Options, Refusal, State};
use serde_json::Value;

use crate::config::Config;
use crate::replication::ReplicationError;
use crate::store::{Recovered, Store, StoreError};

pub use conductor::{Conductor, Delays};
pub use etcd::EtcdController;
#[cfg(test)]
pub(crate) use handle::Shared;
pub(crate) use handle::{Desk, Look, Peers, Removal, Reply, Request};
pub use handle::{Handle, Office, Sample, SubmitError};
pub(crate) use keeper::Keeper;
use pool_world::PoolWorld;
pub use region_table::RegionTable;
pub(crate) use terms::SeenTerms;
pub use world::{Meanwhile, World};

/// How long the thread sleeps at most; it is woken before when there is something to do.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// How much is gathered into one commit.
const WISHES_PER_TURN_MAX: usize = 256;

/// Why a controller cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The state file.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The port to the endpoints.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The other replicas.
    #[error(transparent)]
    Replication(#[from] ReplicationError),
    /// The pool is not the state's.
    #[error("{0}")]
    Pool(Refusal),
}

/// One term of office: a controller's thread from when it leads until it does not.
pub(crate) struct Tenure<M: Memory> {
    conductor: Conductor<PoolWorld<M>>,
    /// Whoever leads anew gives no host up for dead before this.
    cautious_until: Option<Instant>,
    detect: Duration,
}

/// Why a term of office ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It was told to.
    Stopped,
    /// Another replica leads now.
    Deposed,
}

impl<M: Memory> Tenure<M> {
    /// Takes the controller's place in the pool, with what was kept. Kept for another pool, it is refused, unless the
    /// configuration says to adopt this one.
    pub(crate) fn open(
        pool: &Pool,
        memory: M,
        config: &Config,
        (mut keeper, recovered): (Keeper, Recovered),
        (replica, desk): (ReplicaId, &Desk),
    ) -> Result<Self, ControllerError> {
        let mut options = config.options(Some(pool));
        // Whoever else has the pool is noticed before anything is kept.
        let protocol = config.run.protocol;
        let office = (replica, recovered.term, protocol);
        let (layout, run) = (pool.layout(), config.run_directory());
        let mut port = ControllerPort::open_replica(layout, memory.clone(), run, office, desk.waker.clone())?;
        let detect = config.detect();
        let cautious = (!matches!(keeper, Keeper::File(_))).then(|| detect.max(config.fence_wait()));
        port.set_silent_after(cautious.unwrap_or(detect));
        port.set_doorbells(config.run.wakeup == pod_protocol::config::Wakeup::Socket);
        let mut state = if let Some(state) = recovered.state {
            state
        } else {
            let state = State::new(options.clone());
            keeper.begin(&state)?;
            state
        };
        // No more than this controller knows; what daemons know it has yet to see.
        options.protocol_minor = state.options.protocol_minor.min(protocol.minor);
        let mut begun = Vec::new();
        if state.options != options {
            begun.extend(other_settings(&state.options, &options));
            let mut changed = state.clone();
            let adopted =
                options.pool != state.options.pool && config.controller.adopt_pool == Some(options.pool);
            let command =
                if adopted { Command::AdoptPool { options } } else { Command::Configure { options } };
            begun.extend(changed.apply(&command).map_err(ControllerError::Pool)?);
            keeper.configured(&command, &changed)?;
            state = changed;
        }

        let shared = Arc::clone(&desk.shared);
        let layout = pool.layout().clone();
        let table = RegionTable::new(&layout, replica);
        let world = PoolWorld { port, memory, layout, keeper, table, shared, unseen: Vec::new() };
        let delays =
            Delays { fence: config.fence_wait(), blk_grace: config.blk_grace(), drain: config.drain() };
        let policies = (delays, config.link_policy(), config.balance_policy());
        let told = desk.shared.journal.after(0, usize::MAX).events;
        let mut conductor = Conductor::new(world, state, recovered.term, policies);
        conductor.remember(&told, (Instant::now(), pool_world::time_ms()));
        conductor.resume(begun, Instant::now())?;
        Ok(Self { conductor, cautious_until: cautious.map(|wait| Instant::now() + wait), detect })
    }

    /// Serves until told to stop, or for as long as it is elected.
    pub(crate) fn serve(
        &mut self,
        requests: &mpsc::Receiver<Request>,
        elected: impl Fn() -> bool,
    ) -> Result<End, ControllerError> {
        loop {
            if !elected() {
                return Ok(End::Deposed);
            }
            self.conductor.world.port.check()?;
            let (wishes, stop) = wishes(requests);
            let due = self.conductor.turn(wishes, Instant::now())?;
            if stop {
                return Ok(End::Stopped);
            }
            let now = Instant::now();
            let port = &mut self.conductor.world.port;
            if self.cautious_until.is_some_and(|until| until <= now) {
                self.cautious_until = None;
                port.set_silent_after(self.detect);
            }
            let sleep = due.map_or(SLEEP_MAX, |due| due.saturating_duration_since(now).min(SLEEP_MAX));
            port.wait(sleep);
        }
    }
}

/// What was asked for, and whether to stop after that.
fn wishes(requests: &mpsc::Receiver<Request>) -> (Vec<(Command, Reply)>, bool) {
    let mut wishes = Vec::new();
    while wishes.len() < WISHES_PER_TURN_MAX {
        match requests.try_recv() {
            Ok(Request::Apply { command, reply }) => wishes.push((command, reply)),
            Ok(Request::Look) => {}
            Ok(Request::Stop) | Err(TryRecvError::Disconnected) => return (wishes, true),
            Err(TryRecvError::Empty) => break,
        }
    }
    (wishes, false)
}

/// Tells which settings are other ones than those that the pod went by, as after a change of the file, or where another replica's file
/// does not say the same.
fn other_settings(before: &Options, now: &Options) -> Option<Effect> {
    // That another pool is adopted is told by itself.
    if before.pool != now.pool {
        return None;
    }
    // What the members of the pod know is no setting.
    let now = Options { protocol_minor: before.protocol_minor, ..now.clone() };
    let (before, now) = (serde_json::to_value(before).ok()?, serde_json::to_value(now).ok()?);
    let mut changes = Vec::new();
    note_changes("", &before, &now, &mut changes);
    if changes.is_empty() {
        return None;
    }
    let message = format!(
        "it goes by other settings than the controller before: {}; all controllers of a pod should be told the same",
        changes.join(", ")
    );
    tracing::warn!("{message}");
    Some(Effect::Event { kind: EventKind::ControllerStarted, subject: "controller".to_owned(), message })
}

fn note_changes(key: &str, before: &Value, now: &Value, changes: &mut Vec<String>) {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => {
            let keys: BTreeSet<_> = before.keys().chain(now.keys()).collect();
            for key in keys {
                let [before, now] = [before, now].map(|all| all.get(key).unwrap_or(&Value::Null));
                note_changes(key, before, now, changes);
            }
        }
        _ if before != now => changes.push(format!("{} {now}, not {before}", key.replace('_', "-"))),
        _ => {}
    }
}

/// A term of office over whatever memory the pool says it is.
pub(crate) enum AnyTenure {
    /// Over memory that hosts do not see coherently.
    Software(Box<Tenure<SoftwareMemory>>),
    /// Over coherent memory.
    Hardware(Box<Tenure<HardwareMemory>>),
}

impl AnyTenure {
    /// As [`Tenure::open`].
    pub(crate) fn open(
        pool: &Pool,
        config: &Config,
        kept: (Keeper, Recovered),
        office: (ReplicaId, &Desk),
    ) -> Result<Self, ControllerError> {
        Ok(match pool.superblock().mode {
            CoherenceMode::Software => {
                Self::Software(Box::new(Tenure::open(pool, pool.software(), config, kept, office)?))
            }
            CoherenceMode::Hardware => {
                Self::Hardware(Box::new(Tenure::open(pool, pool.hardware(), config, kept, office)?))
            }
        })
    }

    /// As [`Tenure::serve`].
    pub(crate) fn serve(
        &mut self,
        requests: &mpsc::Receiver<Request>,
        elected: impl Fn() -> bool,
    ) -> Result<End, ControllerError> {
        match self {
            Self::Software(tenure) => tenure.serve(requests, elected),
            Self::Hardware(tenure) => tenure.serve(requests, elected),
        }
    }
}

/// The only controller of a pod, before its thread runs.
pub struct Controller {
    tenure: AnyTenure,
    desk: Desk,
}

impl Controller {
    /// Takes the controller's place in the pool, with what was [kept](Store::open). Kept for another pool, it is
    /// refused, unless the configuration says to adopt this one.
    pub fn open(
        pool: &Pool,
        config: &Config,
        (mut store, mut recovered): (Store, Recovered),
    ) -> Result<(Self, Handle), ControllerError> {
        recovered.term = SeenTerms::of_pool(pool, ReplicaId::default()).above(recovered.term);
        store.keep_term(recovered.term)?;
        let events = std::mem::take(&mut recovered.events);
        let state = recovered.state.clone().unwrap_or_else(|| State::new(config.options(Some(pool))));
        let (desk, handle) = Desk::new(pool, config, &state, events)?;
        let office = (ReplicaId::default(), &desk);
        let tenure = AnyTenure::open(pool, config, (Keeper::File(store), recovered), office)?;
        Ok((Self { tenure, desk }, handle))
    }

    /// Runs until it is [told to stop](Handle::stop), or until the state cannot be kept any more.
    pub fn run(mut self) -> Result<(), ControllerError> {
        let result = self.tenure.serve(self.desk.requests(), || true);
        self.desk.note_end();
        result.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use pod_state::PlacementPolicy;
    use pod_state::model::options;

    use super::*;

    #[test]
    fn settings_that_are_other_ones_are_told() {
        let before = options(64);
        let told = |now: &Options| match other_settings(&before, now) {
            Some(Effect::Event { message, .. }) => Some(message),
            _ => None,
        };
        assert_eq!(told(&Options { protocol_minor: 1, ..before.clone() }), None);
        let placement = PlacementPolicy {
            prove_failover: !before.placement.prove_failover,
            nic_overcommit_percent: 300,
            ..before.placement
        };
        let message = told(&Options { placement, disk_queues: 7, ..before.clone() }).unwrap();
        for part in
            ["prove-failover false, not true", "nic-overcommit-percent 300, not 100", "disk-queues 7, not "]
        {
            assert!(message.contains(part), "{message}");
        }
    }
}
