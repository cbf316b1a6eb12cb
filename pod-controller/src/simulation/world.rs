//! The world of a simulated controller: daemons that live, die, freeze and answer late, and a store that survives.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::{EndpointId, Role};
use pod_protocol::commands::{Command as Order, Version};
use pod_protocol::controller::{PortError, PortEvent};
use pod_protocol::ids::RegionId;
use pod_protocol::reports::Report;
use pod_state::model::check_touched;
use pod_state::{Command, Effect, Refusal, Regions, State};

use super::Broken;
use super::happening::Happening;
use super::kinds::Kind;
use super::physical::Physical;
use super::port::{Event, Port};
use super::relief::Moves;
use crate::controller::Sample;
use crate::controller::world::{Meanwhile, World};
use crate::journal::told_of;
use crate::reconcile::Reconciler;

/// A log is replaced by a snapshot after so many commands.
const LOG_MAX: usize = 64;

/// Why a controller ended.
#[derive(Debug)]
pub(super) struct Crash;

/// What a [`Conductor`](crate::controller::conductor::Conductor) is given.
#[derive(Debug)]
pub(super) struct Simulated {
    pub(super) physical: Physical,
    start: Instant,
    broken: Option<Broken>,
    // Of one life of the controller.
    pub(super) port: Port,
    pub(super) crash_at_commit: Option<bool>,
    pub(super) replies: Vec<(u64, Result<(), Refusal>)>,
    // Of all lives.
    snapshot: Vec<u8>,
    log: Vec<Command>,
    /// After how many commands that were kept what they touched was checked.
    pub(super) checked: u64,
    /// What moved because devices did too much.
    pub(super) moves: Moves,
}

impl Simulated {
    pub(super) fn new(physical: Physical, start: Instant, broken: Option<Broken>, state: &State) -> Self {
        Self {
            physical,
            start,
            broken,
            port: Port::new(0),
            crash_at_commit: None,
            replies: Vec::new(),
            snapshot: serde_json::to_vec(state).expect("a state is JSON"),
            log: Vec::new(),
            checked: 0,
            moves: Moves::default(),
        }
    }

    /// The controller's memory is gone; what it kept comes back, for its next term.
    pub(super) fn recover(&mut self, term: u64) -> State {
        self.port = Port::new(term);
        self.replies.clear();
        self.crash_at_commit = None;
        if self.broken == Some(Broken::ForgetsTheLastCommand) {
            self.log.pop();
        }
        let mut state: State = serde_json::from_slice(&self.snapshot).expect("what was kept reads back");
        for command in &self.log {
            state.apply(command).expect("what was committed replays");
        }
        state
    }

    pub(super) fn instant(&self) -> Instant {
        self.start + Duration::from_micros(self.physical.now_us)
    }

    /// Looks at every slot of the pool.
    pub(super) fn sweep(&mut self) {
        self.port.sweep(&self.physical);
    }

    pub(super) fn happens(&mut self, what: Happening, state: &State) {
        let of_port =
            what.conversation().is_some_and(|(endpoint, connection)| self.port.has(endpoint, connection));
        self.physical.happens(what, of_port.then_some(&mut self.port), state);
    }

    /// Whether nobody has anything to hear.
    pub(super) fn is_calm(&self) -> bool {
        self.port.is_calm()
    }

    /// Who has yet to answer, or to be heard.
    pub(super) fn restless(&self) -> Option<String> {
        let (ticket, endpoint) = self.port.unanswered.first_key_value()?;
        Some(format!("{endpoint} has yet to answer order {ticket}; events: {:?}", self.port.events))
    }
}

impl World for Simulated {
    type Ticket = u64;
    type Request = (EndpointId, u64);
    type Reply = u64;
    type Error = Crash;

    fn poll(&mut self, _now: Instant) -> Option<Event> {
        loop {
            let mut event = self.port.events.pop_front()?;
            if self.broken == Some(Broken::DeafToLinks)
                && let PortEvent::Report { report: Report::Link { up: false, .. }, .. } = event
            {
                continue;
            }
            if self.broken == Some(Broken::DeafToSilence)
                && let PortEvent::Silent { endpoint, .. } = event
                && endpoint.role == Role::BlkBackend
            {
                continue;
            }
            if self.broken == Some(Broken::DeafToMemory)
                && let PortEvent::Joined { join, .. } = &mut event
            {
                join.memory_failures.clear();
            }
            return Some(event);
        }
    }

    fn grant(&mut self, endpoint: EndpointId) -> Result<(), PortError> {
        self.port.grant(&mut self.physical, endpoint)
    }

    fn send(&mut self, to: EndpointId, order: &Order) -> u64 {
        self.port.send(&mut self.physical, to, order)
    }

    fn let_hear(&mut self, to: EndpointId) {
        self.port.let_hear(&mut self.physical, to);
    }

    fn answer(&mut self, request: (EndpointId, u64), answer: Result<(), String>) {
        self.physical.join_answered(request, &answer);
    }

    fn fence(&mut self, endpoint: EndpointId, incarnation: u64) -> Result<Instant, PortError> {
        self.port.fence(&mut self.physical, endpoint, incarnation);
        Ok(self.instant())
    }

    fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        effects: &[Effect],
        state: &State,
        meanwhile: Option<Meanwhile<'_, u64>>,
    ) -> Result<(), Crash> {
        check_touched(state);
        if let Some(meanwhile) = meanwhile {
            let (port, physical) = (&mut self.port, &mut self.physical);
            meanwhile(&mut |to, order| port.send(physical, to, order));
        }
        self.checked += commands.len() as u64;
        for effect in effects {
            if let Effect::Clear(ring) = effect {
                self.physical.clear(ring.start);
            }
        }
        if self.crash_at_commit == Some(false) {
            self.checked -= commands.len() as u64;
            self.physical.seen.faults.note(Kind::CommitLost, true);
            return Err(Crash);
        }
        if self.physical.loads.is_some() {
            let told = told_of(effects, 0, self.physical.now_us / 1000);
            let commands = commands.iter().map(|(_, command)| *command);
            if let Err(what) = self.moves.note(commands, told, state) {
                self.physical.blame(|| what);
            }
        }
        self.log.extend(commands.iter().map(|(_, command)| (*command).clone()));
        if self.log.len() > LOG_MAX.max(state.leases.len() / 4) {
            self.snapshot = serde_json::to_vec(state).expect("a state is JSON");
            self.log.clear();
        }
        let dies = self.crash_at_commit == Some(true);
        self.physical.seen.faults.note(Kind::CommitUntold, dies);
        if dies { Err(Crash) } else { Ok(()) }
    }

    fn publish_regions(&mut self, _version: Version, regions: &Regions, changed: Option<BTreeSet<RegionId>>) {
        self.port.publish(regions, changed);
    }

    fn show(&mut self, _state: Arc<State>, _reconciler: &Reconciler<u64>) {}

    fn reply(&mut self, to: u64, answer: Result<(), Refusal>) {
        self.replies.push((to, answer));
    }

    fn sample(&mut self, _endpoint: EndpointId, _sample: Option<Sample>) {}
}
