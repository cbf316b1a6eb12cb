//! What a leader sees and touches: daemons, which all replicas reach, clients, and the log, in which what it decided stands only after
//! others have had time to write it down.

use std::cell::{RefCell, RefMut};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::{EndpointId, LineOffset};
use pod_api::Event;
use pod_protocol::commands::{Command as Order, Version};
use pod_protocol::controller::PortError;
use pod_protocol::ids::RegionId;
use pod_state::model::check_touched;
use pod_state::{Command, Effect, Refusal, Regions, State};
use tokio::runtime::Handle as Spawner;
use tokio::task::JoinHandle;

use super::super::change::{Change, Raft};
use super::super::proposer::{confirm, is_fresh, propose};
use super::super::replica::ReplicationError;
use super::Broken;
use crate::controller::world::{Meanwhile, World};
use crate::controller::{Reply, Sample, Shared, SubmitError};
use crate::journal::told_of;
use crate::reconcile::Reconciler;
use crate::simulation::physical::Physical;
use crate::simulation::port::{Event as PortEvent, Port};

/// The daemons, and what is between them and the controllers, as all share it.
#[derive(Clone, Debug)]
pub(super) struct Pod(Rc<RefCell<Physical>>, Instant);

impl Pod {
    pub(super) fn new(physical: Physical) -> Self {
        Self(Rc::new(RefCell::new(physical)), Instant::now())
    }

    pub(super) fn physical(&self) -> RefMut<'_, Physical> {
        self.0.borrow_mut()
    }

    /// The time, as clocks show it whose drift is bounded.
    pub(super) fn now(&self) -> Instant {
        self.1 + Duration::from_micros(self.0.borrow().now_us)
    }

    /// The time of day.
    pub(super) fn time_ms(&self) -> u64 {
        self.0.borrow().now_us / 1000
    }
}

type Written = JoinHandle<Result<(), ReplicationError>>;

/// What becomes of a commit.
enum Commit {
    /// Before these rings are cleared, it has to be certain that this one leads.
    Confirms {
        task: Written,
        asked: Instant,
        rings: Vec<LineOffset>,
        change: Change,
    },
    Proposed(Written),
}

/// What a [`Conductor`](crate::controller::conductor::Conductor) is given that leads.
pub(super) struct Leading {
    pub(super) pod: Pod,
    pub(super) port: Port,
    pub(super) shared: Arc<Shared>,
    pub(super) raft: Raft,
    /// For how long a majority's word counts.
    trusted: Duration,
    pub(super) spawner: Spawner,
    pub(super) broken: Option<Broken>,
    /// Events that are committed, or are about to be, and not shown yet.
    pub(super) unseen: Vec<Event>,
    commit: Option<Commit>,
    /// The last state of which any daemon was told something.
    pub(super) told: u64,
}

impl Leading {
    pub(super) fn new(
        pod: Pod,
        term: u64,
        (shared, raft, trusted): (Arc<Shared>, Raft, Duration),
        spawner: Spawner,
        broken: Option<Broken>,
    ) -> Self {
        let port = Port::new(term);
        Self { pod, port, shared, raft, trusted, spawner, broken, unseen: Vec::new(), commit: None, told: 0 }
    }

    /// Whether what was to be committed is; none while that is open. What is to be waited for is waited for in `runtime`.
    pub(super) fn committed(
        &mut self,
        runtime: &tokio::runtime::Runtime,
    ) -> Option<Result<(), ReplicationError>> {
        match self.commit.take() {
            None => return Some(Ok(())),
            Some(Commit::Proposed(task)) if task.is_finished() => return Some(finished(runtime, task)),
            Some(Commit::Confirms { task, asked, rings, change }) if task.is_finished() => {
                if let Err(error) = finished(runtime, task) {
                    return Some(Err(error));
                }
                if is_fresh(self.trusted, asked, self.pod.now()) {
                    self.clear(&rings);
                    self.propose(change);
                } else {
                    self.confirm(rings, change);
                }
            }
            waits => self.commit = waits,
        }
        None
    }

    fn clear(&self, rings: &[LineOffset]) {
        let mut physical = self.pod.physical();
        for ring in rings {
            physical.clear(*ring);
        }
    }

    fn confirm(&mut self, rings: Vec<LineOffset>, change: Change) {
        let raft = self.raft.clone();
        let task = self.spawner.spawn(async move { confirm(&raft).await });
        self.commit = Some(Commit::Confirms { task, asked: self.pod.now(), rings, change });
    }

    fn propose(&mut self, change: Change) {
        let (raft, lies) = (self.raft.clone(), self.broken == Some(Broken::AnswersWhatIsVoid));
        let task = self.spawner.spawn(async move {
            match propose(&raft, change).await {
                Err(ReplicationError::Deposed(why)) if lies && why == "another change came before" => Ok(()),
                outcome => outcome,
            }
        });
        self.commit = Some(Commit::Proposed(task));
    }
}

/// What became of a task that is over.
pub(super) fn finished(runtime: &tokio::runtime::Runtime, task: Written) -> Result<(), ReplicationError> {
    runtime.block_on(task).unwrap_or_else(|error| Err(ReplicationError::Ended(error.to_string())))
}

impl World for Leading {
    type Ticket = u64;
    type Request = (EndpointId, u64);
    type Reply = Reply;
    type Error = ReplicationError;

    fn poll(&mut self, _now: Instant) -> Option<PortEvent> {
        self.port.events.pop_front()
    }

    fn grant(&mut self, endpoint: EndpointId) -> Result<(), PortError> {
        self.port.grant(&mut self.pod.physical(), endpoint)
    }

    fn send(&mut self, to: EndpointId, order: &Order) -> u64 {
        self.port.send(&mut self.pod.physical(), to, order)
    }

    fn let_hear(&mut self, to: EndpointId) {
        let last = self.port.let_hear(&mut self.pod.physical(), to);
        self.told = self.told.max(last.unwrap_or(0));
    }

    fn answer(&mut self, request: (EndpointId, u64), answer: Result<(), String>) {
        self.pod.physical().join_answered(request, &answer);
    }

    fn fence(&mut self, endpoint: EndpointId, incarnation: u64) -> Result<Instant, PortError> {
        self.port.fence(&mut self.pod.physical(), endpoint, incarnation);
        Ok(self.pod.now())
    }

    /// Begins to: see [`Leading::committed`].
    fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        effects: &[Effect],
        state: &State,
        meanwhile: Option<Meanwhile<'_, u64>>,
    ) -> Result<(), ReplicationError> {
        check_touched(state);
        if let Some(meanwhile) = meanwhile {
            let (port, pod) = (&mut self.port, &self.pod);
            meanwhile(&mut |to, order| port.send(&mut pod.physical(), to, order));
        }
        let rings: Vec<LineOffset> =
            effects.iter().filter_map(Effect::cleared).map(|ring| ring.start).collect();
        let last = self.unseen.last().map_or_else(|| self.shared.journal.last(), |event| event.sequence);
        let mut events = told_of(effects, last, self.pod.time_ms());
        let change = Change::turn(commands, &events, state);
        if rings.is_empty() {
            self.propose(change);
        } else {
            self.confirm(rings, change);
        }
        self.unseen.append(&mut events);
        Ok(())
    }

    fn publish_regions(&mut self, _version: Version, regions: &Regions, changed: Option<BTreeSet<RegionId>>) {
        self.port.publish(regions, changed);
    }

    fn show(&mut self, state: Arc<State>, reconciler: &Reconciler<u64>) {
        self.shared.show(state, reconciler.waiting(), std::mem::take(&mut self.unseen));
    }

    fn reply(&mut self, to: Reply, answer: Result<(), Refusal>) {
        // A client that went away needs no answer.
        let _ = to.send(answer.map_err(SubmitError::Refused));
    }

    fn sample(&mut self, _endpoint: EndpointId, _sample: Option<Sample>) {}
}
