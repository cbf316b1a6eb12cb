//! What a controller knows of one endpoint.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cxl_channel::doorbell::Doorbell;
use cxl_channel::{Incoming, RequestId};
use cxl_pool::{EndpointId, FenceLine, Found, Generation, Grant, Hello, Layout, Memory, Record, ReplicaId};

use super::event::{CommandFailure, CommandId, JoinRequest, PortError, PortEvent};
use crate::answer::{Answer, Refusal};
use crate::commands::Command;
use crate::link::{Link, decode};
use crate::liveness::{look_own, read_beat};
use crate::protocol::Protocol;
use crate::reports::Report;

/// How long a command may stay unanswered.
pub(super) const COMMAND_DEADLINE: Duration = Duration::from_secs(30);

/// More messages than this are not taken from an endpoint before it is others' turn.
const MESSAGES_PER_TURN: usize = 64;

/// Who writes grants: the controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Office {
    pub(super) replica: ReplicaId,
    pub(super) incarnation: u64,
    pub(super) term: u64,
    pub(super) protocol: Protocol,
}

/// What the slot's hello and heartbeat showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// Not looked at yet.
    Unknown,
    /// No hello.
    Absent,
    /// Since the port was opened there is a hello that cannot be read: whoever wrote it may live and hold something.
    Hidden { since: Duration, silent: bool },
    /// A hello, and a heartbeat that has not moved yet.
    Seen { hello: Hello, beat: u64, moved: Duration, silent: bool },
    /// It lives, or did a moment ago.
    Alive { hello: Hello, beat: u64, moved: Duration, silent: bool },
}

struct Conversation<M: Memory> {
    link: Link<M>,
    generation: Generation,
    unanswered: BTreeMap<RequestId, CommandId>,
}

pub(super) struct Peer<M: Memory> {
    endpoint: EndpointId,
    life: Life,
    conversation: Option<Conversation<M>>,
    /// The incarnation that was fenced last: it gets no further grant.
    fenced_incarnation: Option<u64>,
    /// Messages of it.
    not_understood: u64,
}

impl<M: Memory> Peer<M> {
    pub(super) fn new(endpoint: EndpointId) -> Self {
        Self {
            endpoint,
            life: Life::Unknown,
            conversation: None,
            fenced_incarnation: None,
            not_understood: 0,
        }
    }

    /// Looks at the slot, after having watched for so long in all.
    pub(super) fn sweep(
        &mut self,
        memory: &M,
        layout: &Layout,
        ours: Protocol,
        (silent_after, watched): (Duration, Duration),
        events: &mut impl Extend<PortEvent>,
    ) {
        let endpoint = self.endpoint;
        let hello = match Hello::find(memory, layout.hello(endpoint)) {
            Found::Record(hello) if hello.incarnation != 0 => hello,
            Found::Record(_) | Found::Unreadable => {
                self.cannot_be_read(silent_after, watched, events);
                return;
            }
            Found::Nothing => {
                if self.life != Life::Absent {
                    self.life = Life::Absent;
                    self.disconnect(events);
                    events.extend([PortEvent::Gone { endpoint }]);
                }
                return;
            }
        };
        let beat = read_beat(memory, layout.heartbeat(endpoint));
        match &mut self.life {
            Life::Alive { hello: known, beat: last, moved, silent }
                if known.incarnation == hello.incarnation =>
            {
                if beat == *last {
                    notice_silence(endpoint, *moved, silent, silent_after, watched, events);
                    return;
                }
                (*last, *moved) = (beat, watched);
                if std::mem::take(silent) {
                    events.extend([PortEvent::Back { endpoint }]);
                }
            }
            Life::Seen { hello: known, beat: last, moved, silent }
                if known.incarnation == hello.incarnation =>
            {
                if beat == *last {
                    notice_silence(endpoint, *moved, silent, silent_after, watched, events);
                    return;
                }
                self.life = Life::Alive { hello, beat, moved: watched, silent: false };
                self.appeared(hello, ours, events);
            }
            life => {
                let replaced = matches!(life, Life::Alive { .. });
                *life = Life::Seen { hello, beat, moved: watched, silent: false };
                if replaced {
                    self.disconnect(events);
                    events.extend([PortEvent::Gone { endpoint }]);
                }
            }
        }
    }

    /// A hello that cannot be read is no leave: its writer may act until it sees that itself. What it holds is not given on before it
    /// was fenced, as from one whose heartbeat stands still. It may also be a new life that is just writing.
    fn cannot_be_read(
        &mut self,
        silent_after: Duration,
        watched: Duration,
        events: &mut impl Extend<PortEvent>,
    ) {
        let endpoint = self.endpoint;
        match &mut self.life {
            Life::Seen { moved: since, silent, .. }
            | Life::Alive { moved: since, silent, .. }
            | Life::Hidden { since, silent } => {
                if notice_silence(endpoint, *since, silent, silent_after, watched, events) {
                    tracing::warn!(%endpoint, "its hello in the pool cannot be read: it counts as silent");
                }
            }
            life @ Life::Unknown => *life = Life::Hidden { since: watched, silent: false },
            // Nobody was there to hold anything.
            Life::Absent => {}
        }
    }

    /// How much longer it is to be watched until it counts as silent, should its heartbeat not move again.
    pub(super) fn silent_in(&self, silent_after: Duration, watched: Duration) -> Option<Duration> {
        match &self.life {
            Life::Alive { moved, silent: false, .. } => Some((*moved + silent_after).saturating_sub(watched)),
            _ => None,
        }
    }

    fn appeared(&self, hello: Hello, ours: Protocol, events: &mut impl Extend<PortEvent>) {
        let endpoint = self.endpoint;
        events.extend([match ours.with(hello.protocol.into()) {
            Ok(_) => PortEvent::Appeared { endpoint, incarnation: hello.incarnation, pid: hello.pid },
            Err(why) => PortEvent::Incompatible { endpoint, why },
        }]);
    }

    /// What the daemon speaks that has the slot, dead or alive.
    pub(super) fn spoken(&self) -> Option<Protocol> {
        match &self.life {
            Life::Seen { hello, .. } | Life::Alive { hello, .. } => Some(hello.protocol.into()),
            Life::Unknown | Life::Absent | Life::Hidden { .. } => None,
        }
    }

    /// Whether a daemon has the slot whose heartbeat moved when it was looked at last.
    pub(super) fn is_alive(&self) -> bool {
        matches!(self.life, Life::Alive { silent: false, .. })
    }

    /// How many messages of daemons in this slot said nothing that is known here.
    pub(super) fn not_understood(&self) -> u64 {
        self.not_understood
    }

    /// Begins a conversation with whoever lives there now.
    pub(super) fn grant(
        &mut self,
        memory: &M,
        layout: &Layout,
        office: Office,
        doorbell: Doorbell,
        events: &mut impl Extend<PortEvent>,
    ) -> Result<(), PortError> {
        let endpoint = self.endpoint;
        let Life::Alive { hello, .. } = self.life else {
            return Err(PortError::Absent(endpoint));
        };
        let protocol = office
            .protocol
            .with(hello.protocol.into())
            .map_err(|why| PortError::Incompatible { endpoint, why })?;
        let replica = office.replica;
        let at = layout.grant(replica, endpoint);
        let before = look_own::<Grant, M>(memory, at);
        // A controller that was restarted after it fenced does not remember, nor what another replica did, but the pool
        // does.
        let written = Written::look(memory, layout, replica, endpoint);
        let granted = written.granted(hello.incarnation);
        let revoked = granted.is_some_and(|granted| granted < written.fenced(hello.incarnation));
        if revoked || self.fenced_incarnation == Some(hello.incarnation) {
            return Err(PortError::Fenced(endpoint));
        }
        // What was for another life since then is not to look like a fence of this one.
        let fence_generation = granted.unwrap_or_else(|| written.newest());
        self.disconnect(events);
        if look_own::<FenceLine, M>(memory, layout.fence(replica, endpoint)).is_none() {
            // The endpoint must be able to read it from the first grant on.
            FenceLine { generation: fence_generation, term: office.term, incarnation: hello.incarnation }
                .publish(memory, layout.fence(replica, endpoint));
        }
        let generation = match before {
            Some(grant) => grant.control_generation,
            // None was given, or the line is damaged: the rings know which generation they had.
            None => Link::generation(
                memory,
                layout.ring_to_endpoint(replica, endpoint),
                layout.ring_from_endpoint(replica, endpoint),
            ),
        };
        let generation = generation.next();
        let mut link = Link::open(
            memory,
            layout.ring_to_endpoint(replica, endpoint),
            layout.ring_from_endpoint(replica, endpoint),
            generation,
            doorbell,
            protocol,
        );
        Grant {
            endpoint_incarnation: hello.incarnation,
            controller_incarnation: office.incarnation,
            term: office.term,
            fence_generation,
            control_generation: generation,
        }
        .publish(memory, at);
        // Visible before the bell rings.
        memory.full_fence();
        link.ring();
        self.conversation = Some(Conversation { link, generation, unanswered: BTreeMap::new() });
        Ok(())
    }

    /// Takes back everything that this life was granted. Where another one has the slot by now there is nothing to take back: that
    /// has it only since the one before is dead. Returns the newest fence generation.
    pub(super) fn fence(
        &mut self,
        memory: &M,
        layout: &Layout,
        office: Office,
        (incarnation, mut doorbell): (u64, Doorbell),
        events: &mut impl Extend<PortEvent>,
    ) -> u64 {
        let endpoint = self.endpoint;
        let generation = Written::look(memory, layout, office.replica, endpoint).newest();
        let other = Hello::look(memory, layout.hello(endpoint))
            .filter(|hello| hello.incarnation != 0 && hello.incarnation != incarnation);
        if let Some(other) = other {
            tracing::info!(%endpoint, "not fenced: life {incarnation:016x} is over, {:016x} has its slot", other.incarnation);
            return generation;
        }
        let generation = generation + 1;
        FenceLine { generation, term: office.term, incarnation }
            .publish(memory, layout.fence(office.replica, endpoint));
        // From here on the holder's time runs, so it must be visible.
        memory.full_fence();
        self.fenced_incarnation = Some(incarnation);
        self.disconnect(events);
        // It looks by itself soon enough, but this is quicker.
        doorbell.ring();
        generation
    }

    /// Queues a command, or says at once that it will not be sent.
    pub(super) fn send(
        &mut self,
        id: CommandId,
        command: &Command,
        now: Instant,
        events: &mut impl Extend<PortEvent>,
    ) {
        let sent = match &mut self.conversation {
            None => Err(CommandFailure::Disconnected),
            Some(conversation) if command.since_minor() > conversation.link.protocol().minor => {
                let spoken = conversation.link.protocol();
                Err(CommandFailure::NotSent(format!(
                    "{} speaks version {spoken}, which lacks it",
                    self.endpoint
                )))
            }
            Some(conversation) => conversation
                .link
                .request(command, now + COMMAND_DEADLINE)
                .map(|request| {
                    conversation.unanswered.insert(request, id);
                })
                .map_err(CommandFailure::NotSent),
        };
        if let Err(failure) = sent {
            events.extend([PortEvent::Answered {
                endpoint: self.endpoint,
                command: id,
                result: Err(failure),
            }]);
        }
    }

    /// Sends what was queued.
    pub(super) fn flush(&mut self) {
        if let Some(conversation) = &mut self.conversation {
            conversation.link.flush();
        }
    }

    pub(super) fn answer(&mut self, request: JoinRequest, answer: Answer) {
        // An answer to a join of an older conversation is for nobody.
        if let Some(conversation) =
            self.conversation.as_mut().filter(|conversation| conversation.generation == request.generation)
        {
            conversation.link.respond(request.id, answer);
        }
    }

    /// Takes in what the endpoint said, and sends what was queued. Returns whether the connection is still being made.
    pub(super) fn converse(&mut self, now: Instant, events: &mut impl Extend<PortEvent>) -> bool {
        let endpoint = self.endpoint;
        let Some(conversation) = &mut self.conversation else { return false };
        let connecting = !conversation.link.ready();
        // One that says something all the time must not keep us from the others.
        for _ in 0..MESSAGES_PER_TURN {
            let Some(incoming) = conversation.link.poll(now) else { break };
            let event = match incoming {
                Incoming::Request { id, payload } => match decode::<Report>(&payload) {
                    Ok(Report::Join(join)) => {
                        let request = JoinRequest { endpoint, generation: conversation.generation, id };
                        PortEvent::Joined { endpoint, request, join }
                    }
                    Ok(_) => {
                        let reason = "only a join is a request".to_owned();
                        conversation.link.respond(id, Err(reason.into()));
                        continue;
                    }
                    Err(not_understood) => {
                        self.not_understood += 1;
                        conversation.link.respond(id, Err(Refusal::NotUnderstood { not_understood }));
                        continue;
                    }
                },
                Incoming::Notification { payload } => match decode::<Report>(&payload) {
                    Ok(report) => PortEvent::Report { endpoint, report },
                    Err(reason) => {
                        self.not_understood += 1;
                        tracing::debug!(%endpoint, %reason, "a report is dropped");
                        continue;
                    }
                },
                Incoming::Response { id, payload } => {
                    let Some(command) = conversation.unanswered.remove(&id) else { continue };
                    let answer = decode::<Answer>(&payload).unwrap_or_else(|error| Err(error.into()));
                    let result = answer.map_err(CommandFailure::from);
                    PortEvent::Answered { endpoint, command, result }
                }
                Incoming::Expired { id } => {
                    let Some(command) = conversation.unanswered.remove(&id) else { continue };
                    PortEvent::Answered { endpoint, command, result: Err(CommandFailure::Unanswered) }
                }
            };
            events.extend([event]);
        }
        conversation.link.flush();
        connecting
    }

    /// Whether nothing came meanwhile, so that sleeping is safe.
    pub(super) fn announce_sleep(&mut self) -> bool {
        self.conversation.as_mut().is_none_or(|conversation| conversation.link.announce_sleep())
    }

    pub(super) fn wake(&mut self) {
        if let Some(conversation) = &mut self.conversation {
            conversation.link.wake();
        }
    }

    fn disconnect(&mut self, events: &mut impl Extend<PortEvent>) {
        let endpoint = self.endpoint;
        let unanswered =
            self.conversation.take().map(|conversation| conversation.unanswered).unwrap_or_default();
        events.extend(unanswered.into_values().map(|command| PortEvent::Answered {
            endpoint,
            command,
            result: Err(CommandFailure::Disconnected),
        }));
    }
}

/// Says once that it is silent, and whether it said so.
fn notice_silence(
    endpoint: EndpointId,
    moved: Duration,
    silent: &mut bool,
    silent_after: Duration,
    watched: Duration,
    events: &mut impl Extend<PortEvent>,
) -> bool {
    let silence = watched.saturating_sub(moved);
    if *silent || silence < silent_after {
        return false;
    }
    *silent = true;
    let for_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
    events.extend([PortEvent::Silent { endpoint, for_ms }]);
    true
}

/// What all replicas wrote of who may act in a slot, as it lies in the pool, where it survives the controller.
struct Written {
    grants: Vec<Grant>,
    fences: Vec<FenceLine>,
}

impl Written {
    fn look<M: Memory>(memory: &M, layout: &Layout, replica: ReplicaId, endpoint: EndpointId) -> Self {
        let own_grant = look_own::<Grant, M>(memory, layout.grant(replica, endpoint));
        let own_fence = look_own::<FenceLine, M>(memory, layout.fence(replica, endpoint));
        let others = || layout.replicas().filter(|other| *other != replica);
        let grants = others().filter_map(|other| Grant::look(memory, layout.grant(other, endpoint)));
        let fences = others().filter_map(|other| FenceLine::look(memory, layout.fence(other, endpoint)));
        Self { grants: grants.chain(own_grant).collect(), fences: fences.chain(own_fence).collect() }
    }

    /// The newest fence generation of all.
    fn newest(&self) -> u64 {
        // Should a fence line be damaged, it was at least as new as the last grant.
        let granted = self.grants.iter().map(|grant| grant.fence_generation);
        self.fences.iter().map(|line| line.generation).chain(granted).max().unwrap_or(0)
    }

    /// The newest fence generation that is for this life.
    fn fenced(&self, incarnation: u64) -> u64 {
        let fences = self.fences.iter().filter(|line| line.concerns(incarnation));
        fences.map(|line| line.generation).max().unwrap_or(0)
    }

    /// The fence generation with which this life was first granted something, if it was.
    fn granted(&self, incarnation: u64) -> Option<u64> {
        let grants = self.grants.iter().filter(|grant| grant.endpoint_incarnation == incarnation);
        grants.map(|grant| grant.fence_generation).min()
    }
}
