//! What is shown of the controller: a state at one moment, turned into the API's types.

mod balance;
mod conditions;
mod devices;
mod explanation;
mod hosts;
mod instances;
mod mchannels;
mod pool;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cxl_pool::Superblock;
use pod_protocol::ids::LeaseId;
use pod_state::{Command, Lease, Refusal, State};
use serde::{Deserialize, Serialize};

pub(crate) use mchannels::run_ratio;
pub(crate) use pool::{purpose, region_state};

/// A state at one moment.
#[derive(Clone, Debug)]
pub struct View {
    /// The state.
    pub state: Arc<State>,
    /// What leases wait for that a VMM cannot use yet.
    pub waiting: Waiting,
    /// The pool.
    pub facts: PoolFacts,
    /// Where vhost-user sockets lie.
    sockets: PathBuf,
}

/// What leases wait for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Until a VMM can use them where they are.
    pub here: BTreeMap<LeaseId, String>,
    /// Until a VMM can be started where their instance moves to.
    pub incoming: BTreeMap<LeaseId, String>,
}

/// What does not change of a pool.
#[derive(Clone, Debug)]
pub struct PoolFacts {
    path: String,
    /// None where the pool is not reached: then the state says all that is known of it.
    reached: Option<Reached>,
}

#[derive(Clone, Debug)]
struct Reached {
    uuid: String,
    coherence: String,
    size_bytes: u64,
}

impl PoolFacts {
    /// From where it is and what it says of itself.
    pub fn new(path: &Path, superblock: &Superblock) -> Self {
        Self {
            path: path.display().to_string(),
            reached: Some(Reached {
                uuid: superblock.uuid.to_string(),
                coherence: superblock.mode.to_string(),
                size_bytes: superblock.size_bytes,
            }),
        }
    }

    /// Of one that is not reached from here.
    pub fn outside(path: &Path) -> Self {
        Self { path: path.display().to_string(), reached: None }
    }
}

impl View {
    /// A view in which nothing is ready yet.
    pub fn new(state: &State, facts: PoolFacts, sockets: PathBuf) -> Self {
        let all = || state.leases.keys().map(|lease| (*lease, "its daemons to join".to_owned())).collect();
        let waiting = Waiting { here: all(), incoming: all() };
        Self { state: Arc::new(state.clone()), waiting, facts, sockets }
    }

    /// The version of the whole: grows with every change of anything.
    pub fn version(&self) -> String {
        self.state.index.to_string()
    }

    /// Which pool it is.
    fn pool_uuid(&self) -> String {
        let reached = self.facts.reached.as_ref();
        reached.map_or_else(|| self.state.options.pool.to_string(), |pool| pool.uuid.clone())
    }

    /// What would be if this were carried out. Nothing is.
    pub fn after(&self, command: &Command) -> Result<Self, Refusal> {
        let mut state = State::clone(&self.state);
        state.apply(command)?;
        let mut waiting = self.waiting.clone();
        for lease in state.leases.keys().filter(|lease| !self.state.leases.contains_key(lease)) {
            waiting.here.insert(*lease, "being created in earnest".to_owned());
        }
        Ok(self.updated(Arc::new(state), waiting))
    }

    /// The same pool later, as a follower sees it: what leases wait for that are new or have changed, it has yet to hear. `changed` are
    /// those that may have since a state of that index.
    #[must_use]
    pub fn followed(&self, state: &Arc<State>, changed: Option<&(u64, BTreeSet<LeaseId>)>) -> Self {
        let mut waiting = self.waiting.clone();
        let mut hear = |id: LeaseId, lease: &Lease| {
            if self.state.leases.get(&id) != Some(lease) {
                let reason = || "the controller that leads to say so".to_owned();
                waiting.here.entry(id).or_insert_with(reason);
                waiting.incoming.entry(id).or_insert_with(reason);
            }
        };
        match changed.filter(|(since, _)| *since <= self.state.index) {
            Some((_, changed)) => {
                let there = changed.iter().filter_map(|id| Some((*id, state.leases.get(id)?)));
                there.for_each(|(id, lease)| hear(id, lease));
            }
            None => state.leases.iter().for_each(|(id, lease)| hear(*id, lease)),
        }
        let same = self.state.index == state.index;
        self.updated(Arc::clone(if same { &self.state } else { state }), waiting)
    }

    /// The same pool later: after more commands, or as many.
    #[must_use]
    pub fn updated(&self, state: Arc<State>, waiting: Waiting) -> Self {
        Self { state, waiting, facts: self.facts.clone(), sockets: self.sockets.clone() }
    }
}
