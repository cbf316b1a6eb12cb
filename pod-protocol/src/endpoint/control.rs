//! The control thread: takes grants, obeys commands, sends reports and telemetry.

mod telling;
mod unheard;
mod unsent;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use cxl_channel::doorbell::DoorbellListener;
use cxl_channel::{Incoming, RequestId};
use cxl_pool::{Area, EndpointId, Grant, Layout, Memory, Pool, Record, ReplicaId, Role};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::unheard::Unheard;
use self::unsent::Unsent;
use super::ledger::Ledger;
use super::presence::Rounds;
use super::reporter::{Reporter, Standing};
use super::scrubbing::{Next, Scrubs, is_long};
use super::session::Session;
use super::version::Strangers;
use super::{Handler, RunError};
use crate::answer::{Answer, Refusal};
use crate::commands::Command;
use crate::daemon::{Exit, StopSignal};
use crate::fence::Fence;
use crate::ids::RegionId;
use crate::link::decode;
use crate::liveness::read_beat;
use crate::naps::Naps;
use crate::objects::{Object, ObjectId, TableObject};
use crate::protocol::{self, Protocol};
use crate::reports::{DeviceReport, Join, Report};
use crate::run_directory::RunDirectory;

/// How long the thread sleeps at most where the controller can ring, and where it cannot.
const SLEEP_WITH_DOORBELL: Duration = Duration::from_millis(100);
const SLEEP_WITHOUT_DOORBELL: Duration = Duration::from_millis(1);
/// While both ends accept a new generation nobody rings.
const SLEEP_IN_HANDSHAKE: Duration = Duration::from_millis(1);
/// After this long the handshake's other end is not in a hurry either.
const HANDSHAKE_HASTE: Duration = Duration::from_secs(1);
/// How long the controller's heartbeat may stand still before nothing is sent to it.
const CONTROLLER_SILENT_AFTER: Duration = Duration::from_secs(1);
/// A controller that is there grants well before this.
const SAY_WAITING_AFTER: Duration = Duration::from_secs(2);

/// What a control thread is made of.
pub(super) struct Parts<M: Memory> {
    pub(super) memory: M,
    pub(super) layout: Layout,
    pub(super) endpoint: EndpointId,
    pub(super) incarnation: u64,
    pub(super) run: RunDirectory,
    pub(super) doorbell: Option<DoorbellListener>,
    pub(super) join: Join,
    pub(super) handler: Box<dyn Handler>,
    pub(super) reporter: Reporter,
    pub(super) fence: Fence,
    pub(super) rounds: Rounds,
    pub(super) protocol: Protocol,
}

pub(super) struct ControlThread<M: Memory> {
    parts: Parts<M>,
    session: Option<Session<M>>,
    session_began: Instant,
    ledger: Ledger,
    standing: Standing,
    unsent: Unsent,
    /// What takes longer.
    scrubbing: Scrubs,
    /// Where VMs' memory is locked, if the pool is a file.
    pool: Option<Pool>,
    controller: ControllerPulse,
    strangers: Strangers,
    unheard: Unheard,
    /// What the whole pod speaks.
    pod: Protocol,
    /// Messages of controllers.
    not_understood: u64,
    telemetry_due: Instant,
    telemetry_sequence: u64,
    naps: Naps,
}

/// What is seen of the controller's heartbeat.
struct ControllerPulse {
    replica: ReplicaId,
    beat: u64,
    moved: Instant,
    silent: bool,
    /// Says "waiting" once.
    waiting_since: Option<Instant>,
}

impl<M: Memory> ControlThread<M> {
    pub(super) fn new(parts: Parts<M>) -> Self {
        let now = Instant::now();
        let replica = ReplicaId::default();
        let beat = read_beat(&parts.memory, parts.layout.controller_heartbeat(replica));
        Self {
            parts,
            session: None,
            session_began: now,
            ledger: Ledger::default(),
            standing: Standing::default(),
            unsent: Unsent::default(),
            scrubbing: Scrubs::new(),
            pool: None,
            controller: ControllerPulse {
                replica,
                beat,
                moved: now,
                silent: false,
                waiting_since: Some(now),
            },
            strangers: Strangers::new(now),
            unheard: Unheard::new(now),
            pod: Protocol::of_minor(0),
            not_understood: 0,
            telemetry_due: now,
            telemetry_sequence: 0,
            naps: Naps::new(SLEEP_WITHOUT_DOORBELL, now),
        }
    }

    /// Lets go of nothing that a VM on this host still has as its memory.
    pub(super) fn watch_guests(&mut self, pool: Pool) {
        self.pool = Some(pool);
    }

    pub(super) fn endpoint(&self) -> EndpointId {
        self.parts.endpoint
    }

    #[cfg(test)]
    pub(super) fn rounds(&self) -> &Rounds {
        &self.parts.rounds
    }

    pub(super) fn run_until(&mut self, stop: &StopSignal) -> Result<Exit, RunError> {
        loop {
            let now = Instant::now();
            if !self.may_go_on() {
                self.say_why_fenced();
                self.parts.handler.fenced();
                return Ok(Exit::Fenced);
            }
            if stop.is_set() {
                tracing::info!(endpoint = %self.parts.endpoint, "stopping");
                return Ok(Exit::Stopped);
            }
            self.watch_controller(now);
            self.take_grant(now);
            self.name_unheard(now);
            self.refuse_strangers(now)?;
            self.converse(now)?;
            self.scrub_on();
            self.collect_reports();
            self.send_reports(now);
            self.sleep(stop, now);
        }
    }

    /// Notes that the thread is not stuck, and tells whether it still holds what it was given. Also to be asked on the way, where one
    /// thing after the other is done that may take long: a daemon that gets on with it is alive.
    fn may_go_on(&self) -> bool {
        self.parts.rounds.note();
        self.parts.fence.check().is_ok()
    }

    fn say_why_fenced(&self) {
        let endpoint = self.parts.endpoint;
        match self.parts.fence.usurper() {
            None => tracing::error!(%endpoint, "fenced: the controller took everything back"),
            Some(usurper) => {
                tracing::error!(%endpoint, "this daemon stops: {usurper}. Each host needs an id of its own");
            }
        }
    }

    /// A new grant begins a new conversation. What is held stays as it is meanwhile. Of several controllers the one
    /// with the highest term counts, and an older one is never listened to again: it may not know yet that it was
    /// deposed.
    fn take_grant(&mut self, now: Instant) {
        let Parts { memory, layout, endpoint, incarnation, .. } = &self.parts;
        let grants = layout.replicas().filter_map(|replica| {
            let grant = Grant::look(memory, layout.grant(replica, *endpoint))?;
            (grant.endpoint_incarnation == *incarnation).then_some((replica, grant))
        });
        let Some((replica, grant)) = grants.max_by_key(|(_, grant)| grant.term) else { return };
        if self
            .session
            .as_ref()
            .is_some_and(|session| session.belongs_to(replica, &grant) || grant.term < session.grant.term)
        {
            return;
        }
        // Its hello was there before the grant, and is not any more once it has left.
        let Some(theirs) = protocol::of_grantor(memory, layout, replica, &grant) else { return };
        // It does not grant anything to whom it cannot speak to.
        let Ok(protocol) = self.parts.protocol.with(theirs) else { return };
        self.parts.fence.granted(grant.fence_generation);
        self.ledger.begin();
        let Parts { memory, layout, endpoint, run, .. } = &self.parts;
        self.session = Some(Session::new(memory, layout, *endpoint, (replica, grant, protocol), run, now));
        self.session_began = now;
        // It is asked for again.
        self.scrubbing.clear();
        if self.controller.replica != replica {
            let beat = read_beat(memory, layout.controller_heartbeat(replica));
            let waiting_since = None;
            self.controller = ControllerPulse { replica, beat, moved: now, silent: false, waiting_since };
        }
        self.controller.waiting_since = None;
        let generation = grant.control_generation;
        tracing::debug!(%endpoint, %replica, %generation, term = grant.term, %protocol, "granted");
    }

    /// Ends in place of waiting for ever for a controller that cannot be spoken to.
    fn refuse_strangers(&mut self, now: Instant) -> Result<(), RunError> {
        if self.session.is_some() {
            return Ok(());
        }
        let Parts { memory, layout, endpoint, protocol, .. } = &self.parts;
        match self.strangers.look(memory, layout, *protocol, now) {
            Some(why) => Err(RunError::Incompatible { endpoint: *endpoint, why }),
            None => Ok(()),
        }
    }

    /// Everything the controller said, and our join.
    fn converse(&mut self, now: Instant) -> Result<(), RunError> {
        let join = Report::Join(self.parts.join.clone());
        while self.may_go_on()
            && let Some(session) = &mut self.session
        {
            session.advance(&join, now);
            let Some(incoming) = session.link.poll(now) else { break };
            self.naps.spoke(now);
            match incoming {
                Incoming::Request { id, payload } => {
                    let command = decode(&payload).and_then(|command| self.known(command));
                    if let Ok(Command::Scrub { region, area, .. }) = command
                        && is_long(area)
                    {
                        self.scrubbing.ask(id, region, area);
                        continue;
                    }
                    let answer = match command {
                        Ok(command) => self.obey(command).map_err(Refusal::Refused),
                        Err(not_understood) => {
                            self.not_understood += 1;
                            Err(Refusal::NotUnderstood { not_understood })
                        }
                    };
                    self.answer(id, answer);
                }
                Incoming::Response { id, payload } => {
                    let answer = decode::<Answer>(&payload).unwrap_or_else(|error| Err(error.into()));
                    match session.answered(id, answer, now) {
                        Some(Ok(())) => self.joined(),
                        Some(Err(refusal)) => self.refused(refusal.to_string())?,
                        None => {}
                    }
                }
                Incoming::Expired { id } => session.expired(id, now),
                // Controllers send none in this version of the protocol.
                Incoming::Notification { .. } => self.not_understood += 1,
            }
        }
        if let Some(session) = &mut self.session {
            session.link.flush();
        }
        // A new controller has told everything only once it says so.
        if self.session.as_ref().is_none_or(Session::told_all) {
            self.parts.fence.heard_everything();
        }
        Ok(())
    }

    fn joined(&mut self) {
        tracing::info!(endpoint = %self.parts.endpoint, "joined the pod");
        self.telemetry_due = Instant::now();
        self.retell();
    }

    /// The controller may not know what was reported before: it says it all again.
    fn retell(&mut self) {
        self.unsent = self.standing.reports().cloned().collect();
    }

    fn refused(&mut self, reason: String) -> Result<(), RunError> {
        let endpoint = self.parts.endpoint;
        if self.ledger.is_empty() {
            return Err(RunError::Refused { endpoint, reason });
        }
        tracing::warn!(%endpoint, %reason, "the controller refuses us; keeping what is held and asking again");
        Ok(())
    }

    /// Takes for unknown what the version that is spoken does not have.
    fn known(&self, command: Command) -> Result<Command, String> {
        let spoken = self.session.as_ref().map_or(0, |session| session.link.protocol().minor);
        if command.since_minor() > spoken {
            return Err(format!(
                "not understood: it is of 1.{}, and 1.{spoken} is spoken",
                command.since_minor()
            ));
        }
        Ok(command)
    }

    fn obey(&mut self, command: Command) -> Result<(), String> {
        match command {
            Command::Apply { object, .. } => {
                if !self.ledger.wants(&object) {
                    return Ok(());
                }
                let id = object.id();
                self.scrubbing.holdings_changed();
                tracing::debug!(endpoint = %self.parts.endpoint, %id, "apply");
                let answer = if let Object::Protocol(spoken) = &object {
                    self.pod_speaks(Protocol::of_minor(spoken.minor));
                    Ok(())
                } else {
                    self.parts.handler.apply(object.clone())
                };
                if let Object::Table(kept) = &object
                    && answer.is_ok()
                {
                    self.keeps_table(kept);
                }
                self.ledger.applied(id, answer.is_ok().then_some(object));
                answer
            }
            Command::Remove { id, .. } => self.remove(&id),
            Command::Synced { .. } => {
                let mut answer = Ok(());
                for id in self.ledger.unconfirmed() {
                    if !self.may_go_on() {
                        return Err("fenced meanwhile".to_owned());
                    }
                    answer = answer.and(self.remove(&id));
                }
                self.parts.handler.synced();
                if let Some(session) = &mut self.session {
                    session.was_told_all();
                }
                answer
            }
            Command::Scrub { region, area, .. } => self.scrub(region, area),
        }
    }

    /// Whatever is said to others than the controller is to be said in this version from now on.
    fn pod_speaks(&mut self, pod: Protocol) {
        self.pod = pod;
        tracing::info!(endpoint = %self.parts.endpoint, "the pod speaks version {pod} of the protocol");
    }

    fn answer(&mut self, id: RequestId, answer: Answer) {
        if let Err(reason) = &answer {
            tracing::warn!(endpoint = %self.parts.endpoint, %reason, "cannot do what the controller wants");
        }
        if let Some(session) = &mut self.session {
            session.link.respond(id, answer);
        }
    }

    fn scrub(&mut self, region: RegionId, area: Area) -> Result<(), String> {
        // VMs run where frontends do. A backend is asked to flush what a VM uses, too.
        let beside_guests = matches!(self.parts.endpoint.role, Role::NetFrontend | Role::BlkFrontend);
        if let Some(pool) = self.pool.as_ref().filter(|_| beside_guests) {
            match pool.is_guest_locked(area) {
                Ok(false) => {}
                Ok(true) => {
                    return Err(format!("{region} is the memory of a VM that runs: stop it (vmm stop)"));
                }
                Err(error) => {
                    return Err(format!("cannot tell whether a VM has {region} as its memory: {error}"));
                }
            }
        }
        self.parts.handler.scrub(region, area)
    }

    /// Goes on with what takes longer.
    fn scrub_on(&mut self) {
        let Some(next) = self.scrubbing.next() else { return };
        let (ids, answer) = match next {
            Next::Answer(ids) => (ids, Ok(())),
            Next::Flush(region, piece) => match self.scrub(region, piece) {
                Ok(()) => (Vec::new(), Ok(())),
                Err(reason) => (self.scrubbing.give_up(), Err(Refusal::from(reason))),
            },
        };
        for id in ids {
            self.answer(id, answer.clone());
        }
        if let Some(session) = &mut self.session {
            session.link.flush();
        }
    }

    /// A join sent later says which volumes an SSD has by then.
    fn keeps_table(&mut self, kept: &TableObject) {
        self.standing.keep_wiped(&kept.ssd, &kept.table);
        for device in &mut self.parts.join.devices {
            if let DeviceReport::Ssd { name, table, .. } = device
                && *name == kept.ssd
            {
                *table = Some(kept.table.clone());
            }
        }
    }

    fn remove(&mut self, id: &ObjectId) -> Result<(), String> {
        tracing::debug!(endpoint = %self.parts.endpoint, %id, "remove");
        self.scrubbing.holdings_changed();
        if *id == ObjectId::Protocol {
            self.pod_speaks(Protocol::of_minor(0));
        } else {
            self.parts.handler.remove(id.clone())?;
        }
        self.ledger.removed(id);
        if let ObjectId::Port(lease) | ObjectId::Disk(lease) = id {
            self.standing.forget_lease(*lease);
        }
        Ok(())
    }

    /// Notices a controller that went away or came back.
    fn watch_controller(&mut self, now: Instant) {
        let endpoint = self.parts.endpoint;
        let beat =
            read_beat(&self.parts.memory, self.parts.layout.controller_heartbeat(self.controller.replica));
        if beat != self.controller.beat {
            self.controller.beat = beat;
            self.controller.moved = now;
            if std::mem::take(&mut self.controller.silent) {
                tracing::info!(%endpoint, "the controller is back");
                self.retell();
            }
        } else if !self.controller.silent
            && self.session.is_some()
            && now.duration_since(self.controller.moved) > CONTROLLER_SILENT_AFTER
        {
            self.controller.silent = true;
            tracing::warn!(%endpoint, "the controller is silent: going on with what is held");
        }
        if self.controller.waiting_since.is_some_and(|since| now.duration_since(since) > SAY_WAITING_AFTER) {
            self.controller.waiting_since = None;
            tracing::info!(%endpoint, "waiting for a controller");
        }
    }

    /// Sleeps until something happens or is due.
    fn sleep(&mut self, stop: &StopSignal, now: Instant) {
        let mut limit = match &self.parts.doorbell {
            Some(_) => SLEEP_WITH_DOORBELL,
            None => self.naps.next(Instant::now()),
        };
        let mut nothing_new = true;
        if !self.scrubbing.is_empty() {
            limit = Duration::ZERO;
        }
        if self.parts.fence.has_to_hear() {
            limit = SLEEP_IN_HANDSHAKE;
        }
        if let Some(session) = &mut self.session {
            if !session.link.ready() && now.duration_since(self.session_began) < HANDSHAKE_HASTE {
                limit = SLEEP_IN_HANDSHAKE;
            }
            if session.joined() {
                limit = limit.min(self.telemetry_due.saturating_duration_since(now));
            }
            // Without a doorbell to ring, an announcement would only cost lines.
            nothing_new = self.parts.doorbell.is_none() || session.link.announce_sleep();
        }
        if nothing_new {
            let mut watched = vec![
                PollFd::new(stop, PollFlags::IN),
                PollFd::from_borrowed_fd(self.parts.reporter.as_fd(), PollFlags::IN),
            ];
            watched.extend(self.parts.doorbell.as_ref().map(|doorbell| PollFd::new(doorbell, PollFlags::IN)));
            // An interruption leads to another round; nothing else can go wrong with descriptors of our own.
            let _ = poll(&mut watched, Timespec::try_from(limit).ok().as_ref());
        }
        self.naps.woke(Instant::now());
        if let Some(doorbell) = &mut self.parts.doorbell {
            doorbell.drain();
            if let Some(session) = &mut self.session {
                session.link.wake();
            }
        }
    }
}
