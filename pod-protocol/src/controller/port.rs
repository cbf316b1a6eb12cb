//! The controller's connection to the endpoints of its pod.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_channel::doorbell::{Doorbell, DoorbellListener};
use cxl_pool::{ControllerHello, EndpointId, Layout, Memory, Pool, Record, ReplicaId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::event::{CommandId, JoinRequest, PortError, PortEvent};
use super::peer::{Office, Peer};
use crate::answer::Refusal;
use crate::commands::Command;
use crate::daemon::{LockError, LockFile};
use crate::liveness::{self, Alive, Usurper, new_incarnation, predecessor, read_own_beat, write_beat};
use crate::naps::Naps;
use crate::protocol::Protocol;
use crate::reports::Report;
use crate::run_directory::RunDirectory;

/// How often the slots of the pool are looked at, and how often the controller itself beats.
const SWEEP_EVERY: Duration = Duration::from_millis(20);
/// No sooner than this after the one before.
const SWEEP_AT_MOST_EVERY: Duration = Duration::from_millis(1);
/// How often it looks at least before it calls somebody silent.
const LOOKS_OF_A_SILENCE: u32 = 4;
/// How long to sleep at most while an endpoint accepts a new connection, during which nobody rings.
const SLEEP_WHILE_CONNECTING: Duration = Duration::from_millis(1);
/// After this long a connection that is still not made is waited for without haste.
const CONNECTING_HASTE: Duration = Duration::from_secs(1);
/// How long to sleep at most where endpoints cannot ring.
const SLEEP_WITHOUT_DOORBELL: Duration = Duration::from_millis(1);

/// Ends a [`ControllerPort::wait`] from another thread. Clones wake the same port.
#[derive(Clone, Debug)]
pub struct PortWaker(Arc<OwnedFd>);

impl PortWaker {
    /// A waker of a port that is yet to be [opened](ControllerPort::open_replica).
    pub fn new() -> Result<Self, PortError> {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| PortError::Resources(errno.into()))?;
        Ok(Self(Arc::new(waker)))
    }

    /// Forgets that it was woken.
    pub(crate) fn drain(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }

    /// Waits until it is woken, or for this long, for whoever has no port to wait at.
    pub fn wait(&self, at_most: Duration) {
        let mut watched = [PollFd::new(self, PollFlags::IN)];
        // An interruption leads to another round; nothing else can go wrong with a descriptor of our own.
        let _ = poll(&mut watched, Timespec::try_from(at_most).ok().as_ref());
        self.drain();
    }

    /// Ends the present or the next wait.
    pub fn wake(&self) {
        // It fails only when the counter is full, and then the port has been woken already.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

impl AsFd for PortWaker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sees every endpoint of the pod, grants, commands and fences. It decides nothing: what to do about an event is its
/// controller's business.
///
/// Use it from one thread: take events from [`ControllerPort::poll`] until there are none, then
/// [`ControllerPort::wait`].
pub struct ControllerPort<M: Memory> {
    memory: M,
    layout: Layout,
    run: RunDirectory,
    office: Office,
    /// Who has the controller's slot instead, once that was seen.
    usurper: Option<Usurper>,
    peers: BTreeMap<EndpointId, Peer<M>>,
    events: VecDeque<PortEvent>,
    next_command: u64,
    beat: u64,
    sweep_due: Instant,
    swept: Instant,
    /// For how long it has watched the endpoints in all.
    watched: Duration,
    silent_after: Duration,
    connecting: bool,
    connecting_haste_until: Instant,
    doorbells: bool,
    naps: Naps,
    listener: DoorbellListener,
    waker: PortWaker,
    _lock: LockFile,
}

impl<M: Memory> ControllerPort<M> {
    /// Takes the controller's slot of the pool. Refused while another controller has it.
    pub fn open(pool: &Pool, memory: M, run: RunDirectory, term: u64) -> Result<Self, PortError> {
        Self::open_layout(pool.layout(), memory, run, term)
    }

    /// As [`ControllerPort::open`], over memory without a pool file.
    pub fn open_layout(layout: &Layout, memory: M, run: RunDirectory, term: u64) -> Result<Self, PortError> {
        let office = (ReplicaId::default(), term, Protocol::CURRENT);
        Self::open_replica(layout, memory, run, office, PortWaker::new()?)
    }

    /// As [`ControllerPort::open_layout`], for one of several controllers: it has been elected for this term, which
    /// must be higher than all before of any replica, and speaks this version of the protocol.
    pub fn open_replica(
        layout: &Layout,
        memory: M,
        run: RunDirectory,
        (replica, term, protocol): (ReplicaId, u64, Protocol),
        waker: PortWaker,
    ) -> Result<Self, PortError> {
        run.prepare()?;
        let lock = LockFile::acquire(&run.controller_lock(replica)).map_err(|error| match error {
            LockError::Held { holder, .. } => PortError::AlreadyRuns { holder },
            LockError::Io { .. } => PortError::Lock(error),
        })?;
        predecessor::<ControllerHello, M>(
            &memory,
            (layout.controller(replica), layout.controller_heartbeat(replica)),
        )
        .map_err(|Alive { pid }| PortError::AliveElsewhere { pid })?;
        let listener = DoorbellListener::bind(&run.controller_doorbell(replica))?;
        let office = Office { replica, incarnation: new_incarnation(), term, protocol };
        ControllerHello {
            incarnation: office.incarnation,
            term,
            pid: std::process::id(),
            protocol: protocol.into(),
        }
        .publish(&memory, layout.controller(replica));
        // The fence in this makes the hello visible, too.
        let beat = read_own_beat(&memory, layout.controller_heartbeat(replica));
        let now = Instant::now();
        Ok(Self {
            peers: layout.endpoints().map(|endpoint| (endpoint, Peer::new(endpoint))).collect(),
            beat,
            memory,
            layout: layout.clone(),
            run,
            office,
            usurper: None,
            events: VecDeque::new(),
            next_command: 0,
            sweep_due: now,
            swept: now,
            watched: Duration::ZERO,
            silent_after: Duration::from_millis(200),
            connecting: false,
            connecting_haste_until: now,
            doorbells: true,
            naps: Naps::new(SLEEP_WITHOUT_DOORBELL, now),
            listener,
            waker,
            _lock: lock,
        })
    }

    /// How long a heartbeat may stand still before [`PortEvent::Silent`], as far as this port was there to look; 200 ms unless
    /// told.
    pub fn set_silent_after(&mut self, silent_after: Duration) {
        self.silent_after = silent_after;
    }

    /// Whether endpoints can ring: they run on this kernel with `wakeup = "socket"`. True unless told; with `false`
    /// the port looks at its rings in short steps.
    pub fn set_doorbells(&mut self, doorbells: bool) {
        self.doorbells = doorbells;
    }

    /// Which life of the controller this is.
    pub fn incarnation(&self) -> u64 {
        self.office.incarnation
    }

    /// What this controller speaks.
    pub fn protocol(&self) -> Protocol {
        self.office.protocol
    }

    /// The daemons that have a slot of the pool, dead or alive: which version each speaks, and whether it beats.
    pub fn spoken(&self) -> impl Iterator<Item = (EndpointId, Protocol, bool)> {
        let of =
            |(endpoint, peer): (&EndpointId, &Peer<M>)| Some((*endpoint, peer.spoken()?, peer.is_alive()));
        self.peers.iter().filter_map(of)
    }

    /// How many messages of daemons said nothing that this version knows. They are dropped.
    pub fn not_understood(&self) -> u64 {
        self.peers.values().map(Peer::not_understood).sum()
    }

    /// For other threads that want this one's attention.
    pub fn waker(&self) -> PortWaker {
        self.waker.clone()
    }

    /// Looks whether the slot is still this controller's. Once it is not, the port says and hears nothing any more: another one decides.
    pub fn check(&mut self) -> Result<(), PortError> {
        let hello = self.layout.controller(self.office.replica);
        self.usurper = self.usurper.or_else(|| {
            liveness::usurper::<ControllerHello, M>(&self.memory, hello, self.office.incarnation)
        });
        self.usurper.map_or(Ok(()), |by| Err(PortError::Usurped(by)))
    }

    /// The next event, if there is one. Never blocks. Call it often: it also sends what was queued, and beats.
    pub fn poll(&mut self, now: Instant) -> Option<PortEvent> {
        if self.usurper.is_some() {
            return None;
        }
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        if now >= self.sweep_due {
            // One that was held up itself, with its machine or by its disk, saw nothing meanwhile: what stood still with it would
            // all be taken for dead at its first look.
            let unwatched = now.saturating_duration_since(self.swept);
            self.watched += unwatched.min(self.silent_after / LOOKS_OF_A_SILENCE);
            self.swept = now;
            self.sweep_due = now + SWEEP_EVERY;
            self.check().ok()?;
            self.beat = self.beat.wrapping_add(1);
            write_beat(&self.memory, self.layout.controller_heartbeat(self.office.replica), self.beat);
            for peer in self.peers.values_mut() {
                let silence = (self.silent_after, self.watched);
                peer.sweep(&self.memory, &self.layout, self.office.protocol, silence, &mut self.events);
            }
            // Whoever has been still for long enough before the next look is due is looked at then.
            let silences =
                self.peers.values().filter_map(|peer| peer.silent_in(self.silent_after, self.watched));
            self.sweep_due = now + silences.fold(SWEEP_EVERY, Duration::min).max(SWEEP_AT_MOST_EVERY);
        }
        self.connecting = false;
        for peer in self.peers.values_mut() {
            self.connecting |= peer.converse(now, &mut self.events);
        }
        if self.events.iter().any(may_lead_to_more) {
            self.naps.spoke(now);
        }
        self.events.pop_front()
    }

    /// Grants an endpoint that [appeared](PortEvent::Appeared) a fresh connection; it will ask to
    /// [join](PortEvent::Joined). Refused for a life that was fenced. What the endpoint holds is not touched.
    pub fn grant(&mut self, endpoint: EndpointId) -> Result<(), PortError> {
        self.check()?;
        let doorbell = self.doorbell(endpoint);
        let peer = self.peers.get_mut(&endpoint).ok_or(PortError::NoSlot(endpoint))?;
        peer.grant(&self.memory, &self.layout, self.office, doorbell, &mut self.events)?;
        self.connecting = true;
        self.connecting_haste_until = Instant::now() + CONNECTING_HASTE;
        Ok(())
    }

    /// Queues a command, to be sent by [`let_hear`](Self::let_hear) or by [`poll`](Self::poll). What became of it comes as
    /// [`PortEvent::Answered`], always. Commands to one endpoint are obeyed in the order of sending.
    pub fn send(&mut self, to: EndpointId, command: &Command) -> CommandId {
        let id = CommandId(self.next_command);
        self.next_command += 1;
        let now = Instant::now();
        self.naps.spoke(now);
        let ours = self.check().is_ok();
        match self.peers.get_mut(&to).filter(|_| ours) {
            Some(peer) => peer.send(id, command, now, &mut self.events),
            None => self.events.push_back(PortEvent::Answered {
                endpoint: to,
                command: id,
                result: Err(super::CommandFailure::Disconnected),
            }),
        }
        id
    }

    /// Has an endpoint hear what was sent to it now, and not when the port is [asked](Self::poll) for an event next.
    pub fn let_hear(&mut self, to: EndpointId) {
        if self.check().is_ok()
            && let Some(peer) = self.peers.get_mut(&to)
        {
            peer.flush();
        }
    }

    /// Answers a join. A refused endpoint that holds nothing exits with the reason.
    pub fn answer(&mut self, request: JoinRequest, answer: Result<(), String>) {
        if self.check().is_ok()
            && let Some(peer) = self.peers.get_mut(&request.endpoint)
        {
            peer.answer(request, answer.map_err(Refusal::from));
        }
    }

    /// Takes back everything that this life of the endpoint holds; a newer one keeps what it has. Returns the newest fence
    /// generation, which is visible in the pool by then.
    ///
    /// What was held may be given on once [`PortEvent::Gone`] says that the endpoint has left, or `fence-ms` and the
    /// drift bound from now, to devices whose owner checks lease generations.
    pub fn fence(&mut self, endpoint: EndpointId, incarnation: u64) -> Result<u64, PortError> {
        self.check()?;
        let doorbell = self.doorbell(endpoint);
        let peer = self.peers.get_mut(&endpoint).ok_or(PortError::NoSlot(endpoint))?;
        Ok(peer.fence(&self.memory, &self.layout, self.office, (incarnation, doorbell), &mut self.events))
    }

    /// Sleeps until something may have happened, or for this long.
    pub fn wait(&mut self, at_most: Duration) {
        let now = Instant::now();
        let mut limit = at_most.min(self.sweep_due.saturating_duration_since(now));
        if self.connecting && now < self.connecting_haste_until {
            limit = limit.min(SLEEP_WHILE_CONNECTING);
        }
        if !self.doorbells {
            limit = limit.min(self.naps.next(now));
        }
        let mut nothing_new = self.events.is_empty();
        if self.doorbells {
            for peer in self.peers.values_mut() {
                nothing_new &= peer.announce_sleep();
            }
        }
        if nothing_new {
            let mut watched = [
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::from_borrowed_fd(self.waker.0.as_fd(), PollFlags::IN),
            ];
            // An interruption leads to another round; nothing else can go wrong with descriptors of our own.
            let _ = poll(&mut watched, Timespec::try_from(limit).ok().as_ref());
        }
        self.naps.woke(Instant::now());
        self.listener.drain();
        self.waker.drain();
        for peer in self.peers.values_mut() {
            peer.wake();
        }
    }

    fn doorbell(&self, endpoint: EndpointId) -> Doorbell {
        Doorbell::connect(&self.run.control_doorbell(endpoint))
    }
}

/// Whether something is said in answer to it, or about it, before long. Counters come all the time.
const fn may_lead_to_more(event: &PortEvent) -> bool {
    !matches!(event, PortEvent::Report { report: Report::Telemetry(_), .. })
}

impl<M: Memory> Drop for ControllerPort<M> {
    fn drop(&mut self) {
        // The next one need not watch our heartbeat. Grants stay: what endpoints hold outlives us.
        let hello = self.layout.controller(self.office.replica);
        liveness::leave::<ControllerHello, M>(&self.memory, hello, self.office.incarnation);
    }
}
