use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cxl_pool::regions::{self, Purpose, RegionEntry, RegionState, TableVersion};
use cxl_pool::{EndpointId, Memory, ReplicaId};
use pod_protocol::commands::Version;
use pod_protocol::controller::{CommandFailure, CommandId, JoinRequest, PortError, PortEvent};
use pod_protocol::reports::{Join, Report};
use tokio::sync::oneshot;

use super::handle::{Request, Sample};
use super::{Controller, ControllerError};
use crate::api::{Event, EventKind};
use crate::reconcile::Answer;
use crate::state::{self, Command, DeviceId, Effect, Lease, Presence, Refusal, RegionUse, State};
use crate::view::Waiting as LeasesWaiting;

/// How long the thread sleeps at most; it is woken before when there is something to do.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// How much is gathered into one commit.
const COMMANDS_PER_TURN_MAX: usize = 256;
/// How many events of the port are heard in one turn, so that the API is not kept waiting.
const EVENTS_PER_TURN_MAX: usize = 4096;

/// Who waits for what becomes of a command.
enum Waiting {
    Nobody,
    Api(oneshot::Sender<Result<(), Refusal>>),
    Join { endpoint: EndpointId, request: JoinRequest },
}

/// Commands that came in one turn, in their order.
#[derive(Default)]
struct Inbox {
    commands: Vec<(Command, Waiting)>,
    events: Vec<Effect>,
    stop: bool,
}

impl Inbox {
    fn add(&mut self, command: Command) {
        self.commands.push((command, Waiting::Nobody));
    }

    fn tell(&mut self, kind: EventKind, subject: String, message: String) {
        self.events.push(Effect::Event { kind, subject, message });
    }
}

impl<M: Memory> Controller<M> {
    /// Runs until it is [told to stop](super::Handle::stop), or until the state cannot be kept any more.
    pub fn run(mut self) -> Result<(), ControllerError> {
        let shared = Arc::clone(&self.shared);
        let result = self.turn_until_stopped();
        shared.stopped.store(true, Ordering::Release);
        result
    }

    fn turn_until_stopped(&mut self) -> Result<(), ControllerError> {
        loop {
            let now = Instant::now();
            let mut inbox = self.gather(now);
            let stop = std::mem::take(&mut inbox.stop);
            self.carry_out(inbox)?;
            if stop {
                return Ok(());
            }
            self.show(Instant::now());
            let now = Instant::now();
            self.watch_absent(now);
            self.watch_drains(now);
            let dues = self.fences.values().chain(self.graces.values()).map(|(_, due)| *due);
            let due = dues.chain(self.retry_at).chain(self.next_of_links()).min();
            self.port.wait(due.map_or(SLEEP_MAX, |due| due.saturating_duration_since(now).min(SLEEP_MAX)));
        }
    }

    fn gather(&mut self, now: Instant) -> Inbox {
        let mut inbox = Inbox::default();
        while inbox.commands.len() < COMMANDS_PER_TURN_MAX {
            match self.requests.try_recv() {
                Ok(Request::Apply { command, reply }) => inbox.commands.push((command, Waiting::Api(reply))),
                Ok(Request::Stop) | Err(TryRecvError::Disconnected) => {
                    inbox.stop = true;
                    break;
                }
                Err(TryRecvError::Empty) => break,
            }
        }
        for _ in 0..EVENTS_PER_TURN_MAX {
            let Some(event) = self.port.poll(now) else { break };
            self.hear(event, now, &mut inbox);
        }
        let over: Vec<(EndpointId, u64)> = self
            .fences
            .iter()
            .filter(|(_, (_, due))| *due <= now)
            .map(|(id, (life, _))| (*id, *life))
            .collect();
        for (endpoint, incarnation) in over {
            self.fences.remove(&endpoint);
            inbox.add(Command::FenceExpired { endpoint, incarnation });
        }
        for (endpoint, (incarnation, due)) in &self.graces {
            if *due <= now {
                inbox.add(Command::GraceExpired { endpoint: *endpoint, incarnation: *incarnation });
            }
        }
        for command in self.due_links(now) {
            inbox.add(command);
        }
        self.stale |= self.retry_at.is_some_and(|at| at <= now);
        inbox
    }

    /// Counts the time for which storage backends are away. A controller that was restarted counts anew: while it was
    /// away it could not see them.
    fn watch_absent(&mut self, now: Instant) {
        let awaited: BTreeMap<EndpointId, u64> = self.state.awaited().collect();
        self.graces.retain(|id, (life, _)| awaited.get(id) == Some(life));
        for (id, life) in awaited {
            self.graces.entry(id).or_insert((life, now + self.blk_grace));
        }
    }

    fn hear(&mut self, event: PortEvent, now: Instant, inbox: &mut Inbox) {
        match event {
            // An earlier life of ours decided it, but may have ended before the fence was up.
            PortEvent::Appeared { endpoint, incarnation, .. }
                if self.state.is_fenced(endpoint, incarnation) =>
            {
                self.act(&Effect::Fence(endpoint));
            }
            PortEvent::Appeared { endpoint, incarnation, .. } => {
                match self.port.grant(endpoint) {
                    Ok(()) => {
                        self.granted.insert(endpoint, incarnation);
                    }
                    // It will see its fence and start anew, or it is gone already.
                    Err(error @ (PortError::Fenced(_) | PortError::Absent(_))) => {
                        tracing::info!(%endpoint, "not granted: {error}");
                    }
                    Err(error) => tracing::error!(%endpoint, "not granted: {error}"),
                }
            }
            PortEvent::Joined { endpoint, request, join } => self.hear_join(endpoint, request, join, inbox),
            PortEvent::Report { endpoint, report } => self.hear_report(endpoint, report, now, inbox),
            PortEvent::Answered { endpoint, command, result } => {
                self.hear_answer(endpoint, command, result, now, inbox);
            }
            PortEvent::Silent { endpoint, .. } => {
                if self.presence(endpoint) == Some(Presence::Joined) {
                    inbox.add(Command::Silent { endpoint });
                }
            }
            PortEvent::Back { endpoint } => {
                if self.presence(endpoint) == Some(Presence::Silent) {
                    inbox.add(Command::Back { endpoint });
                }
            }
            PortEvent::Gone { endpoint } => {
                self.reconciler.disconnected(endpoint);
                self.granted.remove(&endpoint);
                self.fences.remove(&endpoint);
                self.shared.telemetry().remove(&endpoint);
                self.stale = true;
                if self.presence(endpoint).is_some_and(|presence| !presence.is_over()) {
                    inbox.add(Command::Gone { endpoint });
                }
            }
        }
    }

    fn presence(&self, endpoint: EndpointId) -> Option<Presence> {
        self.state.endpoints.get(&endpoint).map(|known| known.presence)
    }

    fn hear_join(&mut self, endpoint: EndpointId, request: JoinRequest, join: Join, inbox: &mut Inbox) {
        let Some(incarnation) = self.granted.get(&endpoint).copied() else {
            self.port.answer(request, Err("it was not granted anything: join again".to_owned()));
            return;
        };
        let command = Command::Join { endpoint, incarnation, join };
        inbox.commands.push((command, Waiting::Join { endpoint, request }));
    }

    fn hear_report(&mut self, endpoint: EndpointId, report: Report, now: Instant, inbox: &mut Inbox) {
        // Whoever has not joined, or was fenced, has nothing to say.
        if !self.reconciler.is_connected(endpoint) {
            return;
        }
        let owned = |name: String| DeviceId { host: endpoint.host, name };
        let owns = |state: &State, device: &DeviceId| {
            state.devices.get(device).is_some_and(|known| known.role() == endpoint.role)
        };
        match report {
            Report::Join(_) => {}
            Report::Telemetry(telemetry) => {
                self.shared.telemetry().insert(endpoint, Sample { at: now, telemetry });
            }
            Report::Link { device, up, reason } => {
                let device = owned(device);
                if owns(&self.state, &device) {
                    let verdict = if up { None } else { self.note_loss(&device, now) };
                    inbox.add(Command::Link { device, up, reason });
                    if let Some(command) = verdict {
                        inbox.add(command);
                    }
                }
            }
            Report::DeviceFailed { device, reason } => {
                let device = owned(device);
                if owns(&self.state, &device) {
                    let verdict = self.note_loss(&device, now);
                    inbox.add(Command::DeviceFailed { device, reason });
                    if let Some(command) = verdict {
                        inbox.add(command);
                    }
                }
            }
            Report::DeviceBack { device: report } => {
                let device = owned(report.name().to_owned());
                if owns(&self.state, &device) {
                    inbox.add(Command::DeviceBack { device, report });
                }
            }
            Report::VolumeWiped { device, volume } => {
                inbox.add(Command::VolumeWiped { device: owned(device), volume });
            }
            Report::ReplicaFailed { lease, replica, epoch, reason } => {
                inbox.add(Command::ReplicaFailed { endpoint, lease, replica, epoch, reason });
            }
            Report::ReplicaSynced { lease, replica, epoch } => {
                inbox.add(Command::ReplicaSynced { endpoint, lease, replica, epoch });
            }
            Report::ReplicaLeft { lease, replica, epoch } => {
                inbox.add(Command::ReplicaLeft { endpoint, lease, replica, epoch });
            }
            Report::Attachment { lease, connected, running, write_through } => {
                inbox.add(Command::Attachment { endpoint, lease, connected, running, write_through });
            }
        }
    }

    fn hear_answer(
        &mut self,
        endpoint: EndpointId,
        command: CommandId,
        result: Result<(), CommandFailure>,
        now: Instant,
        inbox: &mut Inbox,
    ) {
        self.stale = true;
        let refused = matches!(result, Err(CommandFailure::Refused(_)));
        let result = result.map_err(|failure| failure.to_string());
        match self.reconciler.answered(endpoint, command, result, now) {
            Answer::Fine => {}
            Answer::Scrubbed(region) => {
                if let Some(incarnation) = self.granted.get(&endpoint).copied() {
                    inbox.add(Command::Scrubbed { endpoint, incarnation, region });
                }
            }
            Answer::Refused { what, reason } => {
                let name = self.state.endpoint_name(endpoint);
                tracing::warn!(endpoint = name, "could not {what}: {reason}");
                if refused {
                    inbox.tell(EventKind::CommandFailed, name, format!("it could not {what}: {reason}"));
                }
            }
        }
    }

    /// Applies what came, commits it, and lets it out.
    fn carry_out(&mut self, inbox: Inbox) -> Result<(), ControllerError> {
        if inbox.commands.is_empty() && inbox.events.is_empty() {
            return Ok(());
        }
        let mut next = self.state.clone();
        let mut effects = inbox.events;
        let mut logged = Vec::new();
        let mut answers = Vec::new();
        for (command, waiting) in inbox.commands {
            let before = next.clone();
            let result = next.apply(&command);
            let answer = match result {
                Ok(more) => {
                    // What changes nothing is not worth a commit.
                    let index = next.index;
                    next.index = before.index;
                    if next == before && more.is_empty() {
                        next = before;
                    } else {
                        next.index = index;
                        logged.push((index, command));
                        effects.extend(more);
                    }
                    Ok(())
                }
                Err(refusal) => Err(refusal),
            };
            answers.push((waiting, answer));
        }
        if let Some(refused) = answers.iter().find_map(|(waiting, answer)| match (waiting, answer) {
            (Waiting::Join { endpoint, .. }, Err(refusal)) => Some((*endpoint, refusal.to_string())),
            _ => None,
        }) {
            let (endpoint, message) = refused;
            effects.push(Effect::Event {
                kind: EventKind::JoinRefused,
                subject: endpoint.to_string(),
                message,
            });
        }
        if !logged.is_empty() || !effects.is_empty() {
            let commands: Vec<(u64, &Command)> =
                logged.iter().map(|(index, command)| (*index, command)).collect();
            self.commit(&commands, &effects, &next)?;
            let regions_changed = self.state.regions != next.regions;
            self.state = next;
            self.stale = true;
            if regions_changed {
                self.publish_regions();
            }
            for effect in &effects {
                self.act(effect);
            }
        }
        for (waiting, answer) in answers {
            self.answer(waiting, answer);
        }
        Ok(())
    }

    /// Keeps commands and events for good. Rings are cleared before: nobody has them yet, and once the commit stands
    /// they count as made.
    pub(super) fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        effects: &[Effect],
        state: &State,
    ) -> Result<(), ControllerError> {
        let time_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let time_ms = u64::try_from(time_ms).unwrap_or(u64::MAX);
        let mut events = Vec::new();
        for effect in effects {
            match effect {
                Effect::Clear(ring) => ring.clear(&self.memory),
                Effect::Event { kind, subject, message } => {
                    let sequence = self.shared.journal.last() + events.len() as u64 + 1;
                    let (subject, message) = (subject.clone(), message.clone());
                    events.push(Event { sequence, time_ms, kind: *kind, subject, message });
                }
                Effect::Fence(_) => {}
            }
        }
        let first = self.shared.journal.first_after(events.len());
        self.store.commit(commands, &events, first, state)?;
        for event in &events {
            tracing::info!(subject = event.subject, "{}: {}", event.kind.word(), event.message);
        }
        self.shared.journal.add(events);
        Ok(())
    }

    pub(super) fn act(&mut self, effect: &Effect) {
        if let Effect::Fence(endpoint) = effect {
            match self.port.fence(*endpoint) {
                Ok(_) => {
                    let incarnation = self.state.endpoints.get(endpoint).map_or(0, |known| known.incarnation);
                    self.reconciler.disconnected(*endpoint);
                    self.fences.insert(*endpoint, (incarnation, Instant::now() + self.fence_wait));
                }
                Err(error) => tracing::error!(%endpoint, "cannot be fenced: {error}"),
            }
        }
    }

    fn answer(&mut self, waiting: Waiting, answer: Result<(), Refusal>) {
        match waiting {
            Waiting::Nobody => {}
            Waiting::Api(reply) => {
                // Whoever asks for the view after the answer finds the command's outcome in it.
                if answer.is_ok() {
                    self.show(Instant::now());
                }
                // A client that went away needs no answer.
                let _ = reply.send(answer);
            }
            Waiting::Join { endpoint, request } => {
                if answer.is_ok() {
                    self.reconciler.connected(endpoint);
                    self.stale = true;
                }
                self.port.answer(request, answer.map_err(|refusal| refusal.to_string()));
            }
        }
    }

    /// Tells endpoints what they should have, and others what is known.
    fn show(&mut self, now: Instant) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        let version = Version { term: self.term, index: self.state.index };
        let port = &mut self.port;
        let mut send = |endpoint, command: &pod_protocol::commands::Command| port.send(endpoint, command);
        self.retry_at = self.reconciler.pump(&self.state, version, now, &mut send);
        let (state, reconciler) = (&self.state, &self.reconciler);
        let waits = |lease: &Lease, frontend: Option<EndpointId>| {
            Some((lease.id, reconciler.waiting_for(state, lease, frontend?)?))
        };
        let leases = state.leases.values();
        let here = leases.clone().filter_map(|lease| waits(lease, state.frontend_of(lease)));
        let incoming = leases.filter_map(|lease| waits(lease, state.incoming_frontend(lease)));
        let waiting = LeasesWaiting { here: here.collect(), incoming: incoming.collect() };
        self.shared.view.send_modify(|view| *view = Arc::new(view.updated(&self.state, waiting)));
    }

    /// Projects the regions into the pool, for whoever looks at it without a controller.
    pub(super) fn publish_regions(&self) {
        let entries: Vec<RegionEntry> = self.state.regions.by_place().map(entry).collect();
        let version = TableVersion { term: self.term, index: self.state.index };
        if let Err(error) = regions::publish(&self.memory, &self.layout, ReplicaId::new(0), version, &entries)
        {
            tracing::error!("the region table in the pool is out of date: {error}");
        }
    }
}

fn entry(region: &state::Region) -> RegionEntry {
    RegionEntry {
        id: region.id.get(),
        area: region.area,
        holder: region.writer.host,
        purpose: match region.purpose {
            state::Purpose::Ring(_) => Purpose::Ring,
            state::Purpose::Transmit(_) => Purpose::TxArea,
            state::Purpose::Receive(_) => Purpose::RxArea,
            state::Purpose::Data(_) | state::Purpose::Nothing => Purpose::DataArea,
        },
        state: match region.usage {
            RegionUse::InUse => RegionState::Leased,
            RegionUse::Quarantined | RegionUse::Failed => RegionState::Quarantined,
        },
    }
}
