//! The backend: serves the NICs of this host to the frontends of the pod.
//!
//! One worker does everything in turns. From each channel it takes transmit requests, checks them (`outgoing`) and
//! passes them to the NIC or to the local instance they are for; from each NIC it takes frames and hands them to the
//! instances concerned (`incoming`). Frontends are trusted as little as guests: offsets, lengths, headers and source
//! addresses are checked here again.

mod backlog;
mod direct;
mod finishing;
mod flooding;
mod given_back;
mod handler;
mod incoming;
mod objects;
mod outgoing;
mod port;
pub mod receive_buffers;
mod registration;
mod reopening;
mod share;
mod steered;
pub mod switch;
mod tagging;
mod told;
mod waking;
mod wire;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use cxl_pool::{Area, Memory};
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::{ChannelObject, Object, ObjectId, REGISTRATIONS_MAX, RegistrationState};
use pod_protocol::reports::Report;
use pod_protocol::worker::{Progress, Reply, Sources, Task, Token};

use self::direct::Direct;
use self::finishing::Workbench;
use self::given_back::TooEarly;
pub use self::handler::{BackendHandler, WatchedNic};
use self::port::Port;
use self::registration::Registration;
pub use self::registration::RegistrationIndex;
use self::told::Told;
use self::waking::Waking;
use crate::channel_end::{ChannelEnd, MESSAGES_PER_LOOK};
use crate::counters::{LeaseBook, NicCounters};
use crate::id_hash::IdHash;
use crate::nic::reopen::Reopening;
use crate::nic::{Batch, Nic, PIECES_MAX, Piece};

/// Opens our end of a channel.
pub type OpenChannel<M> = Box<dyn Fn(&ChannelObject) -> Result<ChannelEnd<M>, String> + Send>;

/// Tells the controller something.
pub type Tell = Box<dyn Fn(Report) + Send>;

/// What the control thread asks of the worker.
pub enum Order {
    /// Have this object.
    Apply(Box<Object>, Reply<Result<(), String>>),
    /// Have this object no longer.
    Remove(ObjectId, Reply<()>),
    /// Is any of this area in use?
    Uses(Area, Reply<bool>),
    /// A link changed: look at it.
    LinkChanged,
    /// A NIC that had failed was opened again.
    Reopened(Box<dyn Nic>),
}

/// Says whether what is registered is still this backend's. Asked once for each batch of packets: it has to be quick.
pub type Guard = Box<dyn Fn() -> bool + Send>;

/// The worker's task.
pub struct Backend<M: Memory> {
    memory: M,
    open_channel: OpenChannel<M>,
    tell: Tell,
    guard: Option<Guard>,
    reopening: Option<Reopening>,
    /// The time of this turn, once somebody has asked for it.
    now: Option<Instant>,
    book: LeaseBook,
    ports: Vec<Port>,
    channels: Vec<ChannelEnd<M>>,
    /// Which registrations a lease has, as indices of ports and registrations.
    leases: HashMap<LeaseId, Vec<(usize, RegistrationIndex)>, IdHash>,
    waking: Waking,
    told: Told,
    too_early: TooEarly,
    /// Registrations came, went or changed since all were looked over.
    registrations_changed: bool,
    /// Drivers accept something else than the NICs were told, and when those were told last because of that.
    offloads_changed: bool,
    offloads_agreed: Option<Instant>,
    batch: Batch,
    /// What a NIC is given to send.
    outbox: Batch,
    direct: Direct,
    inbox: Vec<[u64; 2]>,
    receivers: Vec<RegistrationIndex>,
    unable: Vec<RegistrationIndex>,
    in_vlan: Vec<RegistrationIndex>,
    first_number: u16,
    /// Somebody is promised a minimum to receive.
    promises_receiving: bool,
    pieces: Vec<Piece>,
    copied: Vec<Piece>,
    source: Vec<Piece>,
    workbench: Workbench,
}

impl<M: Memory> Backend<M> {
    /// A backend for these NICs, none of which was started.
    pub fn new(
        memory: M,
        nics: Vec<(Box<dyn Nic>, Arc<NicCounters>)>,
        book: LeaseBook,
        open_channel: OpenChannel<M>,
        tell: Tell,
    ) -> Self {
        let ports = nics.into_iter().map(|(nic, counters)| Port::new(nic, counters)).collect();
        Self {
            memory,
            open_channel,
            tell,
            guard: None,
            reopening: None,
            now: None,
            book,
            ports,
            channels: Vec::new(),
            leases: HashMap::default(),
            waking: Waking::default(),
            told: Told::default(),
            too_early: TooEarly::default(),
            registrations_changed: false,
            offloads_changed: false,
            offloads_agreed: None,
            batch: Batch::new(),
            outbox: Batch::new(),
            direct: Direct::new(),
            inbox: vec![[0; 2]; MESSAGES_PER_LOOK],
            receivers: Vec::with_capacity(REGISTRATIONS_MAX),
            unable: Vec::with_capacity(REGISTRATIONS_MAX),
            in_vlan: Vec::with_capacity(REGISTRATIONS_MAX),
            first_number: 0,
            promises_receiving: false,
            pieces: Vec::with_capacity(receive_buffers::PIECES_MAX),
            copied: Vec::with_capacity(receive_buffers::PIECES_MAX),
            source: Vec::with_capacity(PIECES_MAX),
            workbench: Workbench::new(),
        }
    }

    /// Asks whether it may act each time before it sends or delivers something, and not only at the beginning of a turn: it may stand
    /// still in the middle of one.
    pub fn set_guard(&mut self, guard: Guard) {
        self.guard = Some(guard);
    }

    fn may_act(&self) -> bool {
        self.guard.as_ref().is_none_or(|may_act| may_act())
    }

    /// Reports to the controller through its reporter.
    pub fn tell_by(reporter: Reporter) -> Tell {
        Box::new(move |report| reporter.report(report))
    }

    /// Notices links that went up or down, and announces addresses whose time has come.
    fn look_at_links(&mut self) {
        let guard = &self.guard;
        for port in &mut self.ports {
            port.check_watch(&self.tell);
            let up = port.nic.link().is_up() && !port.failed;
            if up != port.was_up {
                port.was_up = up;
                port.counters.up.store(up, Ordering::Relaxed);
                // From here on, and not from the first packet that waits: what comes later is dropped at once.
                port.down_since = (!up).then(Instant::now);
                if up {
                    // The switches may have forgotten, or learnt otherwise.
                    let active = |it: &&mut Registration| it.object.state == RegistrationState::Active;
                    port.registrations.iter_mut().flatten().filter(active).for_each(|it| it.announce = true);
                    port.announcing = true;
                    port.gives_waiting_back = !port.backlog.is_empty();
                }
            }
            if port.announces() && guard.as_ref().is_none_or(|may_act| may_act()) {
                port.announce(&self.tell);
            }
        }
    }
}

impl<M: Memory> Task for Backend<M> {
    type Message = Order;

    fn message(&mut self, order: Order, sources: &mut Sources) {
        self.waking.watch(sources);
        match order {
            Order::Apply(object, reply) => reply.send(self.apply(*object, Some(sources))),
            Order::Remove(id, reply) => {
                self.remove(&id);
                reply.send(());
            }
            Order::Uses(area, reply) => reply.send(self.uses(area)),
            Order::LinkChanged => self.look_at_links(),
            Order::Reopened(nic) => self.reopened(nic, Some(sources)),
        }
    }

    fn turn(&mut self) -> Progress {
        self.now = None;
        self.look_over();
        self.look_at_links();
        let mut busy = false;
        for channel in 0..self.channels.len() {
            busy |= self.serve_frontend(channel);
        }
        self.agree_by_and_by();
        for port in 0..self.ports.len() {
            busy |= self.send_backlog(port);
            busy |= self.serve_nic(port);
        }
        for port in &mut self.ports {
            let outcome = port.nic.flush();
            port.check(outcome, &self.tell);
            port.count_refused();
        }
        self.ask_for_reopening();
        for channel in &mut self.channels {
            channel.publish();
        }
        if busy { Progress::Busy } else { Progress::Idle }
    }

    fn ready(&mut self, token: Token) {
        // Every turn looks at every NIC.
        self.waking.ready(token);
    }

    fn prepare_sleep(&mut self) -> bool {
        let waits = !self.ports.iter().any(|port| port.nic.has_work());
        // They are told after a moment.
        let told = !self.offloads_changed && !self.registrations_changed;
        let waits = waits && told && self.is_woken_for_what_waits();
        // Every channel announces, also when one has news: the resume that follows withdraws all of them.
        let mut quiet = true;
        for channel in &mut self.channels {
            quiet &= channel.announce_sleep();
        }
        waits && quiet
    }

    fn resume(&mut self) {
        for channel in &mut self.channels {
            channel.wake();
        }
    }
}
