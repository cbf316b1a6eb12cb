//! The backend: serves the NICs of this host to the frontends of the pod.
//!
//! One worker does everything in turns. From each channel it takes transmit requests, checks them (`outgoing`) and
//! passes them to the NIC or to the local instance they are for; from each NIC it takes frames and hands them to the
//! instances concerned (`incoming`). Frontends are trusted as little as guests: offsets, lengths, headers and source
//! addresses are checked here again.

mod finishing;
mod handler;
mod incoming;
mod outgoing;
pub mod receive_buffers;
mod registration;
mod reopening;
pub mod switch;
mod tagging;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use cxl_pool::{Area, ByteOffset, Memory};
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::{ChannelId, LeaseId};
use pod_protocol::objects::{
    ChannelObject, NicObject, Object, ObjectId, RegistrationObject, RegistrationState,
};
use pod_protocol::reports::Report;
use pod_protocol::worker::{Progress, Reply, Sources, Task, Token};

use self::finishing::Workbench;
pub use self::handler::{BackendHandler, WatchedNic};
use self::outgoing::Outgoing;
use self::receive_buffers::{BUFFER_BYTES, REGISTRATIONS_MAX, ReceiveBuffers};
pub use self::registration::RegistrationIndex;
use self::registration::{Numbers, Registration};
use self::switch::Switch;
use self::tagging::tagged_announcement;
use crate::channel_end::{ChannelEnd, MESSAGES_PER_LOOK, whole_pool};
use crate::counters::{LeaseBook, NicCounters};
use crate::ethernet::announcement;
use crate::id_hash::IdHash;
use crate::nic::reopen::Reopening;
use crate::nic::{Batch, Nic, PIECES_MAX, Piece};
use crate::offloads::Offloads;
use crate::vnet_header::VnetHeader;

/// Packets that may wait for a NIC; more than one frontend can have under way.
const BACKLOG_PACKETS: usize = 8192;

/// How far apart the numbers begin that frames to different leases get: odd, so that all are used.
const NUMBERS_APART: u16 = 0x4e35;

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

/// A NIC and everything that belongs to it.
struct Port {
    nic: Box<dyn Nic>,
    /// Where the fronts of frames are put together that are given a tag, for as long as the NIC takes them over.
    tagging: Option<ByteOffset>,
    /// Where it receives, once it was started.
    buffers: Option<ReceiveBuffers>,
    area: Option<Area>,
    registrations: Vec<Option<Registration>>,
    switch: Switch,
    /// Packets for the wire, in order.
    backlog: VecDeque<Outgoing>,
    counters: Arc<NicCounters>,
    failed: bool,
    /// It failed, and whoever opens it again has yet to hear of it.
    to_reopen: bool,
    was_up: bool,
    /// Since when its link is down, or packets wait for it to start.
    down_since: Option<Instant>,
}

/// The worker's task.
pub struct Backend<M: Memory> {
    memory: M,
    open_channel: OpenChannel<M>,
    tell: Tell,
    reopening: Option<Reopening>,
    /// The time of this turn, once somebody has asked for it.
    now: Option<Instant>,
    book: LeaseBook,
    ports: Vec<Port>,
    channels: Vec<ChannelEnd<M>>,
    /// Which registrations a lease has, as indices of ports and registrations.
    leases: HashMap<LeaseId, Vec<(usize, RegistrationIndex)>, IdHash>,
    batch: Batch,
    /// What a NIC is given to send.
    outbox: Batch,
    inbox: Vec<[u64; 2]>,
    receivers: Vec<RegistrationIndex>,
    unable: Vec<RegistrationIndex>,
    in_vlan: Vec<RegistrationIndex>,
    first_number: u16,
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
            reopening: None,
            now: None,
            book,
            ports,
            channels: Vec::new(),
            leases: HashMap::default(),
            batch: Batch::new(),
            outbox: Batch::new(),
            inbox: vec![[0; 2]; MESSAGES_PER_LOOK],
            receivers: Vec::with_capacity(REGISTRATIONS_MAX),
            unable: Vec::with_capacity(REGISTRATIONS_MAX),
            in_vlan: Vec::with_capacity(REGISTRATIONS_MAX),
            first_number: 0,
            pieces: Vec::with_capacity(receive_buffers::PIECES_MAX),
            copied: Vec::with_capacity(receive_buffers::PIECES_MAX),
            source: Vec::with_capacity(PIECES_MAX),
            workbench: Workbench::new(),
        }
    }

    /// Reports to the controller through its reporter.
    pub fn tell_by(reporter: Reporter) -> Tell {
        Box::new(move |report| reporter.report(report))
    }

    /// Has this object from now on.
    pub fn apply(&mut self, object: Object, sources: Option<&mut Sources>) -> Result<(), String> {
        match object {
            Object::Channel(object) => self.apply_channel(&object),
            Object::Nic(object) => self.start_nic(&object, sources),
            Object::Registration(object) => self.register(object),
            other => Err(format!("a net backend has no {}", other.id())),
        }
    }

    /// Has this object no longer.
    pub fn remove(&mut self, id: &ObjectId) {
        match id {
            ObjectId::Channel(channel) => {
                self.forget_frontend(*channel);
                self.channels.retain(|end| end.object().id != *channel);
            }
            ObjectId::Registration { lease, nic } => self.unregister(*lease, nic),
            // A NIC goes on running without users: nothing reaches it, and its link stays watched.
            _ => {}
        }
    }

    /// Whether any of this area is in use.
    pub fn uses(&self, area: Area) -> bool {
        let registered = |port: &Port| {
            let mut registrations = port.registrations.iter().flatten();
            registrations.any(|registration| {
                let RegistrationObject { tx_area, ram_area, .. } = &registration.object;
                tx_area.overlaps(&area) || ram_area.is_some_and(|ram| ram.overlaps(&area))
            })
        };
        self.ports.iter().any(|port| port.area.is_some_and(|own| own.overlaps(&area)) || registered(port))
    }

    fn apply_channel(&mut self, object: &ChannelObject) -> Result<(), String> {
        // The frontend, or we, begin anew: what the old one held is not coming back.
        self.forget_frontend(object.id);
        self.channels.retain(|end| end.object().id != object.id);
        self.channels.push((self.open_channel)(object)?);
        Ok(())
    }

    /// Takes back what the frontend behind a channel holds.
    fn forget_frontend(&mut self, channel: ChannelId) {
        for port in &mut self.ports {
            for index in 0..port.registrations.len() {
                let behind = |it: &Registration| it.object.channel == channel;
                if port.registrations[index].as_ref().is_some_and(behind) {
                    port.take_back(index);
                }
            }
            port.backlog.retain(|packet| packet.channel != channel);
        }
        self.agree_on_offloads();
    }

    fn start_nic(&mut self, object: &NicObject, sources: Option<&mut Sources>) -> Result<(), String> {
        let place = self.ports.iter().position(|port| port.nic.identity().name == object.nic);
        let place = place.ok_or_else(|| format!("this host has no nic {}", object.nic))?;
        let port = &mut self.ports[place];
        if port.area == Some(object.rx_area) {
            return Ok(());
        }
        if port.area.is_some() {
            return Err(format!("nic {} runs already, in another receive area", object.nic));
        }
        if !whole_pool(&self.memory).contains_area(&object.rx_area) {
            return Err(format!("the receive area of nic {} lies outside of the pool", object.nic));
        }
        let mut buffers = ReceiveBuffers::new(object.rx_area);
        if buffers.is_empty() {
            return Err(format!("the receive area of nic {} is too small", object.nic));
        }
        let tagging = buffers.set_aside();
        port.nic.start(&mut buffers).map_err(|error| error.to_string())?;
        if let Some(sources) = sources {
            watch_descriptors(port.nic.as_ref(), place, sources)
                .map_err(|error| format!("cannot watch nic {}: {error}", object.nic))?;
        }
        port.buffers = Some(buffers);
        port.tagging = tagging;
        port.area = Some(object.rx_area);
        tracing::info!(nic = object.nic, area = %object.rx_area, "NIC started");
        Ok(())
    }

    fn register(&mut self, object: RegistrationObject) -> Result<(), String> {
        let place = self.ports.iter().position(|port| port.nic.identity().name == object.nic);
        let place = place.ok_or_else(|| format!("this host has no nic {}", object.nic))?;
        let lease = object.lease;
        if !whole_pool(&self.memory).contains_area(&object.tx_area) {
            return Err(format!("the transmit area of {lease} lies outside of the pool"));
        }
        if object.ram_area.is_some_and(|ram| !whole_pool(&self.memory).contains_area(&ram)) {
            return Err(format!("the guest memory of {lease} lies outside of the pool"));
        }
        let numbers = self.numbers_of(lease);
        let port = &mut self.ports[place];
        let known = self.leases.get(&lease).and_then(|all| all.iter().find(|(port, _)| *port == place));
        let index = if let Some((_, index)) = known {
            *index
        } else {
            let free = port.registrations.iter().position(Option::is_none);
            let index = free.and_then(|free| RegistrationIndex::new(u16::try_from(free).ok()?));
            let index = index
                .ok_or_else(|| format!("nic {} has {REGISTRATIONS_MAX} registrations already", object.nic))?;
            self.leases.entry(lease).or_default().push((place, index));
            index
        };
        port.switch.set(index, object.mac, object.policy.vlan, object.state);
        let state = object.state;
        tracing::info!(%lease, nic = object.nic, ?state, generation = object.generation.get(), "registered");
        match &mut port.registrations[index.get()] {
            Some(registration) => {
                let (before, after) = (registration.object.channel, object.channel);
                registration.update(object);
                if before != after {
                    let taken_back = port.take_back(index.get());
                    self.completed(before, taken_back);
                }
            }
            slot @ None => *slot = Some(Registration::new(object, self.book.open(lease), numbers)),
        }
        self.agree_on_offloads();
        Ok(())
    }

    fn unregister(&mut self, lease: LeaseId, nic: &str) {
        let Some(all) = self.leases.get_mut(&lease) else { return };
        let ports = &self.ports;
        let Some(at) = all.iter().position(|(port, _)| ports[*port].nic.identity().name == nic) else {
            return;
        };
        let (place, index) = all.swap_remove(at);
        if all.is_empty() {
            self.leases.remove(&lease);
            self.book.close(lease);
        }
        let port = &mut self.ports[place];
        let taken_back = port.take_back(index.get());
        port.switch.remove(index);
        let registration = port.registrations[index.get()].take();
        // Nobody waits for these: a frontend that still cares has another route.
        port.backlog.retain(|packet| packet.registration != index);
        if let Some(registration) = registration {
            self.completed(registration.object.channel, taken_back);
        }
        tracing::info!(%lease, nic, "unregistered");
        self.agree_on_offloads();
    }

    /// Notes that receive buffers that a frontend was told of over this channel are not to be given back any more.
    fn completed(&mut self, channel: ChannelId, buffers: usize) {
        if let Some(end) = self.channels.iter_mut().find(|end| end.object().id == channel) {
            end.completed(buffers);
        }
    }

    /// What numbers the frames to a lease. A lease that comes back does not begin anew: what its frontend says about frames of
    /// before must not be taken for those of now.
    fn numbers_of(&mut self, lease: LeaseId) -> Arc<Numbers> {
        let registrations = self.leases.get(&lease).into_iter().flatten();
        let mut known =
            registrations.filter_map(|(port, index)| self.ports[*port].registrations[index.get()].as_ref());
        if let Some(registration) = known.next() {
            return Arc::clone(&registration.numbers);
        }
        self.first_number = self.first_number.wrapping_add(NUMBERS_APART);
        Arc::new(Numbers::starting_at(self.first_number))
    }

    /// Tells each NIC what all of its receivers accept: the kernel segments and checksums for those who cannot.
    fn agree_on_offloads(&mut self) {
        for port in &mut self.ports {
            let receiving = port.registrations.iter().flatten().filter(|it| it.sends());
            let common = receiving.map(|it| it.accepts).reduce(Offloads::intersection);
            let common = common.unwrap_or(Offloads::NONE).intersection(port.nic.identity().offloads);
            let outcome = port.nic.set_receiver_offloads(common);
            port.check(outcome, &self.tell);
        }
    }

    /// Notices links that went up or down, and announces addresses whose time has come.
    fn look_at_links(&mut self) {
        for port in &mut self.ports {
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
                }
            }
            if up && port.area.is_some() {
                port.announce(&self.tell);
            }
        }
    }
}

fn watch_descriptors(nic: &dyn Nic, place: usize, sources: &mut Sources) -> io::Result<()> {
    nic.descriptors().into_iter().try_for_each(|descriptor| sources.add(descriptor, Token(place as u64)))
}

impl Port {
    fn new(nic: Box<dyn Nic>, counters: Arc<NicCounters>) -> Self {
        let was_up = nic.link().is_up();
        counters.up.store(was_up, Ordering::Relaxed);
        Self {
            nic,
            buffers: None,
            tagging: None,
            area: None,
            registrations: (0..REGISTRATIONS_MAX).map(|_| None).collect(),
            switch: Switch::new(),
            backlog: VecDeque::with_capacity(BACKLOG_PACKETS),
            counters,
            failed: false,
            to_reopen: false,
            was_up,
            down_since: None,
        }
    }

    /// Whether a receiver takes a packet with what its header leaves undone.
    fn accepts(&self, index: RegistrationIndex, header: VnetHeader) -> bool {
        let required = header.required();
        required == Offloads::NONE
            || self.registrations[index.get()].as_ref().is_some_and(|it| it.accepts.contains(required))
    }

    /// Takes receive buffers for a packet of `bytes` bytes; none, and false, if too few are free.
    fn take_buffers(&mut self, bytes: u32, pieces: &mut Vec<Piece>) -> bool {
        pieces.clear();
        let Some(buffers) = &mut self.buffers else { return false };
        if buffers.free_count() < bytes.div_ceil(BUFFER_BYTES) as usize {
            return false;
        }
        let mut left = bytes;
        while left > 0
            && let Some(buffer) = buffers.take()
        {
            let here = left.min(BUFFER_BYTES);
            pieces.push(Piece { at: buffers.offset(buffer), bytes: here });
            left -= here;
        }
        true
    }

    /// Takes back what a registration's frontend holds, and says how much that was: it is gone.
    fn take_back(&mut self, index: usize) -> usize {
        let Some(registration) = &mut self.registrations[index] else { return 0 };
        let held = registration.held.len();
        registration.held.clear();
        registration.accepts = Offloads::NONE;
        let index = u16::try_from(index).ok().and_then(RegistrationIndex::new);
        if let (Some(buffers), Some(index)) = (&mut self.buffers, index) {
            buffers.release_all(index);
        }
        held
    }

    /// Borrows the addresses of registrations that have become active: one broadcast each makes the switches send
    /// their frames here from now on.
    fn announce(&mut self, tell: &Tell) {
        for registration in self.registrations.iter_mut().flatten().filter(|it| it.announce) {
            let frame = announcement(registration.object.mac);
            let sent = match registration.object.policy.vlan {
                Some(vlan) => self.nic.transmit_frame(&tagged_announcement(&frame, vlan)),
                None => self.nic.transmit_frame(&frame),
            };
            match sent {
                Ok(true) => registration.announce = false,
                Ok(false) => return,
                outcome => {
                    self.check(outcome.map(drop), tell);
                    return;
                }
            }
        }
    }

    fn announces(&self) -> bool {
        self.was_up && self.area.is_some() && self.registrations.iter().flatten().any(|it| it.announce)
    }
}

impl<M: Memory> Task for Backend<M> {
    type Message = Order;

    fn message(&mut self, order: Order, sources: &mut Sources) {
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
        self.look_at_links();
        let mut busy = false;
        for channel in 0..self.channels.len() {
            busy |= self.serve_frontend(channel);
        }
        for port in 0..self.ports.len() {
            busy |= self.send_backlog(port);
            busy |= self.serve_nic(port);
        }
        for port in &mut self.ports {
            let outcome = port.nic.flush();
            port.check(outcome, &self.tell);
        }
        self.ask_for_reopening();
        for channel in &mut self.channels {
            channel.publish();
        }
        if busy { Progress::Busy } else { Progress::Idle }
    }

    fn ready(&mut self, _token: Token) {
        // Every turn looks at every NIC.
    }

    fn prepare_sleep(&mut self) -> bool {
        let waits = self
            .ports
            .iter()
            .all(|port| port.backlog.is_empty() && !port.nic.has_work() && !port.announces());
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
