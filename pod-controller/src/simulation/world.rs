//! The world of a simulated controller: daemons that live, die, freeze and answer late, and a store that survives.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::{Area, EndpointId, HostId, Role};
use pod_protocol::commands::{Command as Order, Version};
use pod_protocol::controller::{CommandFailure, PortError, PortEvent};
use pod_protocol::ids::RegionId;
use pod_protocol::reports::{Join, Report};
use pod_state::model::check_touched;
use pod_state::{Command, Effect, Refusal, Region, RegionUse, Regions, State};

use super::Broken;
use super::daemon::{Mail, areas_of};
use super::physical::Physical;
use crate::controller::Sample;
use crate::controller::world::World;
use crate::reconcile::Reconciler;

/// How long a controller waits for an answer.
const ANSWER_WITHIN_US: u64 = 1_000_000;
/// The bound that daemons keep: after this long, on their own clock, they look at their fence before they act.
pub(super) const FENCE_US: u64 = 250_000;
pub(super) const SILENT_AFTER_US: u64 = 200_000;
/// A log is replaced by a snapshot after so many commands.
const LOG_MAX: usize = 64;

pub(super) type Event = PortEvent<u64, (EndpointId, u64)>;

/// What is going to happen.
#[derive(Debug)]
pub(super) enum Happening {
    /// An order arrives.
    Arrives(EndpointId, Box<Mail>),
    /// A word of a daemon arrives at the controller of this term, over this connection.
    Says(EndpointId, u64, Event),
    /// Nobody has answered an order.
    Late(EndpointId, u64, u64),
    /// A daemon learns that it was granted a connection.
    Granted(EndpointId, u64),
    /// A daemon of this incarnation does what it may before it has to look at its fence again, and then looks.
    ActsAndLooks(EndpointId, u64),
    /// A process is started.
    Starts(EndpointId),
    /// A frozen process goes on.
    Thaws(EndpointId, u64),
    /// A link comes up again, or a failed NIC is opened again.
    Mended(HostId, String),
    /// A controller is started.
    ControllerStarts,
}

/// What a controller's port remembers of an endpoint; it is lost with the controller.
#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    /// It has been looked at.
    seen: bool,
    incarnation: Option<u64>,
    silent: bool,
    appeared: bool,
}

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
    peers: BTreeMap<EndpointId, Peer>,
    events: VecDeque<Event>,
    connections: BTreeMap<EndpointId, u64>,
    unanswered: BTreeMap<u64, EndpointId>,
    pub(super) crash_at_commit: Option<bool>,
    pub(super) replies: Vec<(u64, Result<(), Refusal>)>,
    published: BTreeMap<u64, (RegionId, Area)>,
    /// All that was ever said to be published of them.
    table: BTreeMap<RegionId, Region>,
    /// How often something was published.
    publications: u64,
    // Of all lives.
    next_ticket: u64,
    next_connection: u64,
    snapshot: Vec<u8>,
    log: Vec<Command>,
}

impl Simulated {
    pub(super) fn new(physical: Physical, start: Instant, broken: Option<Broken>, state: &State) -> Self {
        Self {
            physical,
            start,
            broken,
            peers: BTreeMap::new(),
            events: VecDeque::new(),
            connections: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            crash_at_commit: None,
            replies: Vec::new(),
            published: BTreeMap::new(),
            table: BTreeMap::new(),
            publications: 0,
            next_ticket: 0,
            next_connection: 0,
            snapshot: serde_json::to_vec(state).expect("a state is JSON"),
            log: Vec::new(),
        }
    }

    /// The controller's memory is gone; what it kept comes back.
    pub(super) fn recover(&mut self) -> State {
        self.peers.clear();
        self.events.clear();
        self.connections.clear();
        self.unanswered.clear();
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

    /// A conversation ends: nobody will answer what was said in it.
    fn disconnect(&mut self, endpoint: EndpointId) {
        self.connections.remove(&endpoint);
        let lost: Vec<u64> =
            self.unanswered.iter().filter(|(_, to)| **to == endpoint).map(|(ticket, _)| *ticket).collect();
        for command in lost {
            self.unanswered.remove(&command);
            let result = Err(CommandFailure::Disconnected);
            self.events.push_back(PortEvent::Answered { endpoint, command, result });
        }
    }

    /// Looks at every slot of the pool.
    pub(super) fn sweep(&mut self) {
        let mut gone = Vec::new();
        for daemon in self.physical.daemons.values() {
            let endpoint = daemon.id;
            let peer = self.peers.entry(endpoint).or_default();
            if daemon.left {
                // Also when it left while no controller ran.
                if !peer.seen || peer.incarnation.is_some() {
                    *peer = Peer { seen: true, ..Peer::default() };
                    gone.push(endpoint);
                }
                continue;
            }
            if peer.incarnation != Some(daemon.incarnation) {
                if peer.appeared {
                    gone.push(endpoint);
                }
                *peer = Peer { seen: true, incarnation: Some(daemon.incarnation), ..Peer::default() };
            } else if let Some(still) = self.physical.still.get(&endpoint) {
                if !peer.silent && self.physical.now_us.saturating_sub(*still) >= SILENT_AFTER_US {
                    peer.silent = true;
                    self.events.push_back(PortEvent::Silent { endpoint, for_ms: 200 });
                }
            } else if !peer.appeared {
                peer.appeared = true;
                peer.silent = false;
                let incarnation = daemon.incarnation;
                self.events.push_back(PortEvent::Appeared { endpoint, incarnation, pid: 1 });
            } else if std::mem::take(&mut peer.silent) {
                self.events.push_back(PortEvent::Back { endpoint });
            }
        }
        for endpoint in gone {
            self.disconnect(endpoint);
            self.events.push_back(PortEvent::Gone { endpoint });
        }
    }

    /// Lets the next thing happen that is due until then; the time is then its time.
    pub(super) fn next_until(&mut self, until_us: u64) -> Option<Happening> {
        let first = self.physical.agenda.first_entry().filter(|entry| entry.key().0 <= until_us)?;
        let (due, _) = *first.key();
        let what = first.remove();
        self.physical.now_us = due;
        Some(what)
    }

    pub(super) fn happens(&mut self, what: Happening, state: &State) {
        let physical = &mut self.physical;
        match what {
            Happening::Arrives(id, mail) => physical.arrives(id, *mail),
            Happening::Says(id, connection, event) => {
                if self.connections.get(&id) == Some(&connection) {
                    if let PortEvent::Answered { command, .. } = &event
                        && self.unanswered.remove(command).is_none()
                    {
                        physical.seen.late += 1;
                        return;
                    }
                    self.events.push_back(event);
                } else {
                    physical.seen.lost += 1;
                }
            }
            Happening::Late(endpoint, connection, command) => {
                if self.connections.get(&endpoint) == Some(&connection)
                    && self.unanswered.remove(&command).is_some()
                {
                    let result = Err(CommandFailure::Unanswered);
                    self.events.push_back(PortEvent::Answered { endpoint, command, result });
                }
            }
            Happening::Granted(endpoint, connection) => {
                if self.connections.get(&endpoint) != Some(&connection) {
                    return;
                }
                if physical.daemons[&endpoint].frozen {
                    // It reads its grant when it goes on.
                    physical.schedule(5000, Happening::Granted(endpoint, connection));
                    return;
                }
                let devices = physical.devices_of(endpoint);
                let Some(daemon) = physical.daemons.get_mut(&endpoint).filter(|it| it.is_running()) else {
                    return;
                };
                daemon.begin(connection);
                let join = Join {
                    host_name: format!("h{}", endpoint.host.get()),
                    software: "simulated 1".to_owned(),
                    pid: 1,
                    devices,
                    memory_failures: Vec::new(),
                };
                physical
                    .says(endpoint, PortEvent::Joined { endpoint, request: (endpoint, connection), join });
            }
            Happening::ActsAndLooks(id, incarnation) => {
                let daemon = &physical.daemons[&id];
                if daemon.is_running() && daemon.incarnation == incarnation {
                    physical.act(id, state);
                    physical.look(id);
                }
            }
            Happening::Starts(id) => physical.start(id),
            Happening::Thaws(id, incarnation) => {
                let daemon = &physical.daemons[&id];
                if daemon.alive && daemon.incarnation == incarnation {
                    physical.thaw(id, state);
                }
            }
            Happening::Mended(..) | Happening::ControllerStarts => unreachable!("the pod does that"),
        }
    }

    fn regions_of(&self, order: &Order) -> Vec<(RegionId, Area)> {
        let Order::Apply { object, .. } = order else { return Vec::new() };
        let place = |area: Area| self.published.get(&area.start.get()).copied();
        areas_of(object).into_iter().filter_map(place).collect()
    }

    /// Whether nobody has anything to hear.
    pub(super) fn is_calm(&self) -> bool {
        self.events.is_empty()
    }

    /// Who has yet to answer, or to be heard.
    pub(super) fn restless(&self) -> Option<String> {
        let (ticket, endpoint) = self.unanswered.first_key_value()?;
        Some(format!(
            "{endpoint} has yet to answer order {ticket} of {}; events: {:?}",
            self.next_ticket, self.events
        ))
    }
}

impl World for Simulated {
    type Ticket = u64;
    type Request = (EndpointId, u64);
    type Reply = u64;
    type Error = Crash;

    fn poll(&mut self, _now: Instant) -> Option<Event> {
        loop {
            let event = self.events.pop_front()?;
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
            return Some(event);
        }
    }

    fn grant(&mut self, endpoint: EndpointId) -> Result<(), PortError> {
        let fence = self.physical.fences.get(&endpoint).copied().unwrap_or(0);
        let Some(daemon) = self.physical.daemons.get_mut(&endpoint).filter(|daemon| daemon.alive) else {
            return Err(PortError::Absent(endpoint));
        };
        if self.peers.get(&endpoint).is_none_or(|peer| peer.incarnation != Some(daemon.incarnation)) {
            return Err(PortError::Absent(endpoint));
        }
        if daemon.granted && daemon.granted_fence < fence {
            return Err(PortError::Fenced(endpoint));
        }
        daemon.granted = true;
        daemon.granted_fence = fence;
        self.disconnect(endpoint);
        self.next_connection += 1;
        self.connections.insert(endpoint, self.next_connection);
        let connection = self.next_connection;
        self.physical.send(endpoint, false, Happening::Granted(endpoint, connection));
        Ok(())
    }

    fn send(&mut self, to: EndpointId, order: &Order) -> u64 {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        let Some(connection) = self.connections.get(&to).copied() else {
            let result = Err(CommandFailure::Disconnected);
            self.events.push_back(PortEvent::Answered { endpoint: to, command: ticket, result });
            return ticket;
        };
        self.unanswered.insert(ticket, to);
        let mail = Mail { connection, ticket, order: order.clone(), regions: self.regions_of(order) };
        self.physical.send(to, false, Happening::Arrives(to, Box::new(mail)));
        self.physical.schedule(ANSWER_WITHIN_US, Happening::Late(to, connection, ticket));
        ticket
    }

    fn answer(&mut self, (endpoint, connection): (EndpointId, u64), answer: Result<(), String>) {
        let Some(daemon) = self.physical.daemons.get_mut(&endpoint) else { return };
        if daemon.connection == connection && daemon.alive {
            if answer.is_ok() {
                daemon.joined = true;
                daemon.joined_us = self.physical.now_us;
            } else {
                self.physical.kill(endpoint);
                self.physical.schedule(50_000, Happening::Starts(endpoint));
            }
        }
    }

    fn fence(&mut self, endpoint: EndpointId) -> Result<Instant, PortError> {
        *self.physical.fences.entry(endpoint).or_default() += 1;
        self.disconnect(endpoint);
        let daemon = &self.physical.daemons[&endpoint];
        let incarnation = daemon.incarnation;
        // It looked a moment ago, and either hears the bell or goes on for as long as its clock lets it.
        let looked = self.physical.random.below(10_000);
        let now = self.physical.now_us;
        if let Some(daemon) = self.physical.daemons.get_mut(&endpoint).filter(|daemon| !daemon.frozen) {
            daemon.looked_us = now.saturating_sub(looked);
        }
        let may_act = self.physical.may_act_for(&self.physical.daemons[&endpoint]);
        let after =
            if self.physical.random.once_in(2) { self.physical.random.below(may_act) } else { may_act };
        self.physical.schedule(after, Happening::ActsAndLooks(endpoint, incarnation));
        Ok(self.instant())
    }

    fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        _effects: &[Effect],
        state: &State,
    ) -> Result<(), Crash> {
        check_touched(state);
        if self.crash_at_commit == Some(false) {
            return Err(Crash);
        }
        self.log.extend(commands.iter().map(|(_, command)| (*command).clone()));
        if self.log.len() > LOG_MAX.max(state.leases.len() / 4) {
            self.snapshot = serde_json::to_vec(state).expect("a state is JSON");
            self.log.clear();
        }
        if self.crash_at_commit == Some(true) { Err(Crash) } else { Ok(()) }
    }

    fn publish_regions(&mut self, _version: Version, regions: &Regions, changed: Option<BTreeSet<RegionId>>) {
        if let Some(changed) = changed {
            for id in changed {
                let now = regions.get(id);
                let old = match now {
                    Some(region) => self.table.insert(id, region.clone()),
                    None => self.table.remove(&id),
                };
                // Another one may be there by now.
                if let Some(start) = old.map(|old| old.area.start.get())
                    && self.published.get(&start).is_some_and(|(there, _)| *there == id)
                {
                    self.published.remove(&start);
                }
                if let Some(it) = now.filter(|region| region.usage == RegionUse::InUse) {
                    self.published.insert(it.area.start.get(), (it.id, it.area));
                }
            }
        } else {
            self.table = regions.iter().map(|region| (region.id, region.clone())).collect();
            let in_use = regions.iter().filter(|region| region.usage == RegionUse::InUse);
            self.published = in_use.map(|it| (it.area.start.get(), (it.id, it.area))).collect();
        }
        // To compare all takes as long as there are regions.
        self.publications += 1;
        if self.publications.is_multiple_of(self.table.len().div_ceil(400).max(1) as u64) {
            assert!(self.table.values().eq(regions.iter()), "a region changed, and nobody was told");
        }
    }

    fn show(&mut self, _state: Arc<State>, _reconciler: &Reconciler<u64>) {}

    fn reply(&mut self, to: u64, answer: Result<(), Refusal>) {
        self.replies.push((to, answer));
    }

    fn sample(&mut self, _endpoint: EndpointId, _sample: Option<Sample>) {}
}
