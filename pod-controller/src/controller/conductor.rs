//! What follows from what is heard. It knows the time only as an argument and the world only as a [`World`], so that a
//! simulated pod runs it too.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cxl_pool::EndpointId;
use pod_api::{Event, EventKind};
use pod_protocol::commands::Version;
use pod_protocol::controller::{CommandFailure, PortError, PortEvent};
use pod_protocol::ids::{LeaseGeneration, LeaseId};
use pod_protocol::reports::{Join, Report};
use pod_state::{Command, DeviceId, Effect, Presence, Refusal, Shadow, State};

use super::handle::Sample;
use super::inbox::{Decided, Inbox, Waiting};
use super::telling::Told;
use super::world::World;
use crate::balance::{BalancePolicy, LoadHistory};
use crate::config::fence_wait;
use crate::link_policy::{LinkHistory, LinkPolicy};
use crate::reconcile::{Answer, Reconciler};

/// How often it is looked what the members of the pod speak.
const PROTOCOL_EVERY: Duration = Duration::from_millis(100);
/// How many events of the port are heard in one turn, so that the API is not kept waiting.
const EVENTS_PER_TURN_MAX: usize = 4096;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Delays {
    /// Until whoever was fenced must have stopped, unless it has said that it takes longer.
    pub fence: Duration,
    /// For how long guests wait for a storage backend that is away.
    pub blk_grace: Duration,
    /// For how long a lease that was moved receives from the NIC that it left.
    pub drain: Duration,
}

/// The controller's conduct: state, and what it waits for.
pub struct Conductor<W: World> {
    pub(crate) world: W,
    pub(crate) state: State,
    term: u64,
    pub(super) reconciler: Reconciler<W::Ticket>,
    /// What others see.
    pub(super) shadow: Shadow,
    /// The lives that were granted, which a join is about.
    granted: BTreeMap<EndpointId, u64>,
    /// When those who are being fenced must have stopped.
    pub(super) fences: BTreeMap<EndpointId, (u64, Instant)>,
    /// Until when storage backends that are away are waited for.
    pub(super) graces: BTreeMap<EndpointId, (u64, Instant)>,
    pub(super) links: LinkHistory,
    pub(super) load: LoadHistory,
    /// Until when leases that were moved receive from the NIC that they left.
    pub(super) drains: BTreeMap<LeaseId, (LeaseGeneration, Instant)>,
    pub(super) delays: Delays,
    pub(super) retry_at: Option<Instant>,
    /// When it is looked again what the members of the pod speak.
    protocol_due: Option<Instant>,
    /// Whether something changed that endpoints or viewers have yet to see.
    pub(super) stale: bool,
    /// Who was told something that it must not hear before it is kept.
    pub(super) told_ahead: Option<Told>,
}

impl<W: World> Conductor<W> {
    /// With what was kept.
    pub fn new(
        world: W,
        state: State,
        term: u64,
        (delays, link_policy, balance): (Delays, LinkPolicy, BalancePolicy),
    ) -> Self {
        Self {
            world,
            state,
            term,
            reconciler: Reconciler::default(),
            shadow: Shadow::default(),
            granted: BTreeMap::new(),
            fences: BTreeMap::new(),
            graces: BTreeMap::new(),
            links: LinkHistory::new(link_policy),
            load: LoadHistory::new(balance),
            drains: BTreeMap::new(),
            delays,
            retry_at: None,
            protocol_due: None,
            stale: true,
            told_ahead: None,
        }
    }

    /// What was told before, when it is `now` and this time of day in ms.
    pub(crate) fn remember(&mut self, told: &[Event], (now, time_ms): (Instant, u64)) {
        self.load.remember(told.iter(), &self.state, (now, time_ms));
    }

    /// Everything that is known.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// What is around it.
    pub fn world_mut(&mut self) -> &mut W {
        &mut self.world
    }

    /// Finishes what the last life began: whoever it was fencing is fenced again.
    pub(crate) fn resume(&mut self, effects: Vec<Effect>, now: Instant) -> Result<(), W::Error> {
        let mut begun = self.begin(effects);
        self.keep(&mut begun, now)?;
        self.publish_regions();
        Ok(())
    }

    /// Fences again whoever the last life was fencing. What is told then is to be [kept](Self::keep) before anything else.
    pub(crate) fn begin(&mut self, mut effects: Vec<Effect>) -> Decided<W> {
        let fencing = self.state.endpoints.iter().filter(|(_, known)| known.presence == Presence::Fencing);
        let fencing: Vec<_> = fencing.map(|(id, known)| (*id, known.incarnation)).collect();
        for (endpoint, incarnation) in fencing {
            self.act(&Effect::Fence { endpoint, incarnation });
        }
        let message = format!("term {}, {} commands so far", self.term, self.state.index);
        let event =
            Effect::Event { kind: EventKind::ControllerStarted, subject: "controller".to_owned(), message };
        effects.insert(0, event);
        Decided { logged: Vec::new(), effects, answers: Vec::new(), regions_changed: true }
    }

    /// Hears what came, decides, commits, and lets it out. Returns when something is due next.
    pub fn turn(
        &mut self,
        wishes: Vec<(Command, W::Reply)>,
        now: Instant,
    ) -> Result<Option<Instant>, W::Error> {
        let mut decided = self.decide(wishes, now);
        self.keep(&mut decided, now)?;
        Ok(self.let_out(decided, now))
    }

    /// Hears what came, and decides. Nobody else knows of it yet.
    pub(crate) fn decide(&mut self, wishes: Vec<(Command, W::Reply)>, now: Instant) -> Decided<W> {
        let inbox = self.gather(wishes, now);
        self.carry_out(inbox, now)
    }

    pub(super) fn version(&self) -> Version {
        Version { term: self.term, index: self.state.index }
    }

    fn gather(&mut self, wishes: Vec<(Command, W::Reply)>, now: Instant) -> Inbox<W> {
        let commands = wishes.into_iter().map(|(command, reply)| (command, Waiting::Api(reply))).collect();
        let mut inbox = Inbox { commands, events: Vec::new() };
        for _ in 0..EVENTS_PER_TURN_MAX {
            let Some(event) = self.world.poll(now) else { break };
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
        self.due_load(now, &mut inbox);
        self.due_protocol(now, &mut inbox);
        if self.state.lacks_backups() {
            inbox.add(Command::nothing());
        }
        self.stale |= self.retry_at.is_some_and(|at| at <= now);
        inbox
    }

    /// Counts the time for which storage backends are away. A controller that was restarted counts anew: while it was
    /// away it could not see them.
    pub(super) fn watch_absent(&mut self, now: Instant) {
        let awaited: BTreeMap<EndpointId, u64> = self.state.awaited().collect();
        self.graces.retain(|id, (life, _)| awaited.get(id) == Some(life));
        for (id, life) in awaited {
            self.graces.entry(id).or_insert((life, now + self.delays.blk_grace));
        }
    }

    /// Has the pod speak what all of its members know. Where that is less than before, whoever knows no more takes part after
    /// that is certain.
    fn due_protocol(&mut self, now: Instant, inbox: &mut Inbox<W>) {
        let joins = inbox.commands.iter().any(|(command, _)| matches!(command, Command::Join { .. }));
        if !joins && self.protocol_due.is_some_and(|due| now < due) {
            return;
        }
        self.protocol_due = Some(now + PROTOCOL_EVERY);
        let before = self.state.protocol();
        if let Some(lowest) = self.world.lowest_protocol(&self.state).filter(|lowest| *lowest != before) {
            tracing::info!("the pod speaks version {lowest} of the protocol, and not {before} any more");
            inbox.commands.insert(0, (self.state.speaking(lowest.minor), Waiting::Nobody));
        }
    }

    fn hear(&mut self, event: PortEvent<W::Ticket, W::Request>, now: Instant, inbox: &mut Inbox<W>) {
        match event {
            // An earlier life of ours decided it, but may have ended before the fence was up.
            PortEvent::Appeared { endpoint, incarnation, .. }
                if self.state.is_fenced(endpoint, incarnation) =>
            {
                self.act(&Effect::Fence { endpoint, incarnation });
            }
            PortEvent::Appeared { endpoint, incarnation, .. } => {
                match self.world.grant(endpoint) {
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
            PortEvent::Incompatible { endpoint, why } => {
                let name = self.state.endpoint_name(endpoint);
                inbox.tell(EventKind::JoinRefused, name, why.to_string());
            }
            PortEvent::Joined { endpoint, request, join } => self.hear_join(endpoint, request, join, inbox),
            PortEvent::Report { endpoint, report } => self.hear_report(endpoint, report, now, inbox),
            PortEvent::Answered { endpoint, command, result } => {
                self.hear_answer(endpoint, command, result, now, inbox);
            }
            // What has become of it by then the commands before these decide: it may join, or be fenced, in this turn.
            PortEvent::Silent { endpoint, .. } => inbox.add(Command::Silent { endpoint }),
            PortEvent::Back { endpoint } => inbox.add(Command::Back { endpoint }),
            PortEvent::Gone { endpoint } => {
                self.reconciler.disconnected(endpoint);
                self.granted.remove(&endpoint);
                self.fences.remove(&endpoint);
                self.load.forget(endpoint);
                self.world.sample(endpoint, None);
                self.stale = true;
                inbox.add(Command::Gone { endpoint });
            }
        }
    }

    fn hear_join(&mut self, endpoint: EndpointId, request: W::Request, join: Join, inbox: &mut Inbox<W>) {
        let Some(incarnation) = self.granted.get(&endpoint).copied() else {
            self.world.answer(request, Err("it was not granted anything: join again".to_owned()));
            return;
        };
        if let Some(ms) = join.fence_ms
            && fence_wait(Duration::from_millis(ms)) > self.delays.fence
        {
            tracing::warn!(
                %endpoint,
                "its fence-ms is {ms}, and this controller's less: should it fall silent, others get what it had after that time; set the \
                 same in [run] on all hosts and of all controllers"
            );
        }
        self.note_working(endpoint.host, join.devices.iter());
        let command = Command::Join { endpoint, incarnation, join };
        inbox.commands.push((command, Waiting::Join { endpoint, incarnation, request }));
    }

    fn hear_report(&mut self, endpoint: EndpointId, report: Report, now: Instant, inbox: &mut Inbox<W>) {
        // Whoever has not joined, or was fenced, has nothing to say.
        if !self.reconciler.is_connected(endpoint) {
            return;
        }
        let owned = |name: String| DeviceId { host: endpoint.host, name: name.into() };
        let owns = |state: &State, device: &DeviceId| {
            state.devices.get(device).is_some_and(|known| known.role() == endpoint.role)
        };
        match report {
            Report::Join(_) => {}
            Report::Telemetry(telemetry) => {
                self.load.note(endpoint, now, &telemetry);
                self.world.sample(endpoint, Some(Sample { at: now, telemetry }));
            }
            Report::Link { device, up, reason } => {
                let device = owned(device);
                if owns(&self.state, &device) {
                    let verdict = if up {
                        self.links.works(&device);
                        None
                    } else {
                        self.note_loss(&device, now)
                    };
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
                    self.note_working(endpoint.host, std::iter::once(&report));
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
            Report::Attachment { lease, connected, running, write_through, untold } => {
                inbox.add(Command::Attachment { endpoint, lease, connected, running, write_through, untold });
            }
        }
    }

    fn hear_answer(
        &mut self,
        endpoint: EndpointId,
        command: W::Ticket,
        result: Result<(), CommandFailure>,
        now: Instant,
        inbox: &mut Inbox<W>,
    ) {
        self.stale = true;
        let refused = matches!(result, Err(CommandFailure::Refused(_) | CommandFailure::NotUnderstood(_)));
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

    /// Shows the regions to whoever looks at the pool without a controller.
    pub(crate) fn publish_regions(&mut self) {
        let changed = self.state.regions.take_unpublished();
        self.world.publish_regions(self.version(), &self.state.regions, changed);
    }

    /// Carries out what came.
    fn carry_out(&mut self, inbox: Inbox<W>, now: Instant) -> Decided<W> {
        let mut decided = Decided {
            logged: Vec::new(),
            effects: inbox.events,
            answers: Vec::new(),
            regions_changed: false,
        };
        for (command, waiting) in inbox.commands {
            // Nothing else takes the room of a backup that has yet to be chosen; another failure waits for none.
            if self.state.lacks_backups() && !command.tells_of_failure() {
                self.carry_out_one(Command::nothing(), Waiting::Nobody, &mut decided, now);
            }
            self.carry_out_one(command, waiting, &mut decided, now);
        }
        decided
    }

    fn carry_out_one(
        &mut self,
        command: Command,
        waiting: Waiting<W>,
        decided: &mut Decided<W>,
        now: Instant,
    ) {
        let were = self.may_leave(&command);
        let outcome = self.state.carry_out(&command);
        self.note_balanced((&command, &waiting), &were, outcome.is_err(), now);
        let answer = match outcome {
            Ok(outcome) => {
                decided.effects.extend(outcome.effects);
                if let Waiting::Events { done, .. } = &waiting {
                    decided.effects.push(done.clone());
                }
                decided.regions_changed |= outcome.regions_changed;
                // What changes nothing is not worth a commit.
                if outcome.changed {
                    decided.logged.push((self.state.index, command));
                }
                Ok(())
            }
            Err(refusal) => {
                decided.effects.extend(waiting.refused(&refusal));
                Err(refusal)
            }
        };
        decided.answers.push((waiting, answer));
    }

    /// How long this life of an endpoint may still act after its fence is visible: its host may keep a longer bound than this controller was told of.
    fn fence_wait(&self, endpoint: EndpointId, incarnation: u64) -> Duration {
        let known = self.state.endpoints.get(&endpoint).filter(|known| known.incarnation == incarnation);
        let bound = known.and_then(|known| known.fence_ms).map(Duration::from_millis);
        bound.map_or(self.delays.fence, |bound| fence_wait(bound).max(self.delays.fence))
    }

    pub(super) fn act(&mut self, effect: &Effect) {
        if let Effect::Fence { endpoint, incarnation } = effect {
            match self.world.fence(*endpoint, *incarnation) {
                Ok(visible) => {
                    // A newer life that is in its place by now is told on.
                    if self.granted.get(endpoint).is_none_or(|granted| granted == incarnation) {
                        self.reconciler.disconnected(*endpoint);
                        // Should it be joining just now, it is not told anything either.
                        self.granted.remove(endpoint);
                    }
                    let wait = self.fence_wait(*endpoint, *incarnation);
                    self.fences.insert(*endpoint, (*incarnation, visible + wait));
                }
                Err(error) => tracing::error!(%endpoint, "cannot be fenced: {error}"),
            }
        }
    }

    pub(super) fn answer(&mut self, waiting: Waiting<W>, answer: Result<(), Refusal>, now: Instant) {
        match waiting {
            Waiting::Nobody | Waiting::Events { .. } => {}
            Waiting::Api(reply) => {
                // Whoever asks for the view after the answer finds the command's outcome in it.
                if answer.is_ok() {
                    self.show(now);
                }
                self.world.reply(reply, answer);
            }
            Waiting::Join { endpoint, incarnation, request } => {
                // It may be gone by now, and another life in its place that has yet to join: that must not be told anything
                // before, since it would keep what nobody remembers having told it.
                if answer.is_ok() && self.granted.get(&endpoint) == Some(&incarnation) {
                    self.reconciler.connected(endpoint);
                    self.stale = true;
                }
                self.world.answer(request, answer.map_err(|refusal| refusal.to_string()));
            }
        }
    }
}

#[cfg(test)]
mod backups_tests;
#[cfg(test)]
mod tests;
