//! The frontend: offers virtio-net devices to the VMs of this host and carries their packets to and from the backends.
//!
//! One worker serves all ports in turns, each with a budget: it copies what guests send into the pool and announces it
//! (`transmit`), and copies what arrives into guests' buffers (`receive`). Guests are not trusted with anything: a
//! malformed chain or header costs its guest that packet.

mod announcing;
mod budget;
mod buffers;
mod copying;
mod cutting;
mod delivering;
mod device;
mod discarding;
mod doubles;
mod flow;
mod flow_queues;
mod handler;
mod lending;
mod letting_go;
mod limiting;
mod origins;
mod port;
mod rails;
mod receive;
mod receive_run;
mod retry_pause;
mod transmit;
mod under_way;
mod waiting;
mod walks;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use cxl_pool::{Area, FileIdentity, Memory};
use pod_protocol::ids::{LeaseId, MacAddress};
use pod_protocol::objects::{ChannelObject, Object, ObjectId, PortObject};
use pod_protocol::worker::{Progress, Reply, Sources, Task, Token};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use vhost_frontend::pacing::{PaceTimer, Pacer, Pacing};
use vhost_frontend::{GuestMemory, Ring};

use self::announcing::Announcement;
pub use self::device::device_spec;
pub use self::handler::FrontendHandler;
pub use self::letting_go::OnLetGo;
use self::origins::Origins;
use self::port::Port;
use self::receive::Channel;
use self::retry_pause::RetryPause;
use crate::channel_end::{ChannelEnd, MESSAGES_PER_LOOK, whole_pool};
use crate::counters::LeaseBook;
use crate::id_hash::IdHash;

/// Packets that one port sends per turn at most.
const PACKETS_PER_TURN: usize = 128;
/// The part of a channel's room that is kept for guests that have sent less than they are promised: one in so many.
const KEPT_PART: u32 = 4;
/// The timer among the worker's sources; rings have tokens from their lease and index.
const TIMER: Token = Token(u64::MAX >> 1);
/// The timer for ports that have used up their share of the fabric.
const PACE_TIMER: Token = Token(TIMER.0 - 1);

/// Opens our end of a channel.
pub type OpenChannel<M> = Box<dyn Fn(&ChannelObject) -> Result<ChannelEnd<M>, String> + Send>;

/// What other threads ask of the worker.
pub enum Order {
    /// Have this channel.
    Channel(ChannelObject, Reply<Result<(), String>>),
    /// Have this port.
    Port(Box<PortObject>, Reply<Result<(), String>>),
    /// Have this object no longer.
    Remove(ObjectId, Reply<()>),
    /// Is any of this area in use?
    Uses(Area, Reply<bool>),
    /// A guest's driver acknowledged these features.
    Features(LeaseId, u64),
    /// A queue of a guest started.
    RingStarted(LeaseId, Box<Ring>),
    /// A queue of a guest is to stop: answered with its next available index.
    RingStopped(LeaseId, u16, Reply<u16>),
    /// All queues of a guest were stopped: tell when what they sent is done with.
    LetGo(LeaseId, OnLetGo),
    /// The VMM asks that this address of its guest be announced.
    Announce(LeaseId, MacAddress),
    /// A guest's memory changed.
    MemoryChanged(LeaseId, GuestMemory, Reply<()>),
    /// A port is held to a share of the fabric from now on, or no longer.
    Pace(LeaseId, Option<Arc<Pacing>>, Reply<()>),
}

/// The worker's task.
pub struct Frontend<M: Memory> {
    memory: M,
    open_channel: OpenChannel<M>,
    book: LeaseBook,
    channels: Vec<Channel<M>>,
    ports: Vec<Port>,
    by_lease: HashMap<LeaseId, usize, IdHash>,
    /// Whose frames wait for a share of the fabric.
    held: Vec<LeaseId>,
    inbox: Vec<[u64; 2]>,
    receive_scratch: receive::Scratch,
    transmit_scratch: transmit::Scratch,
    /// Wakes us for packets that are to be offered again.
    timer: OwnedFd,
    timer_watched: bool,
    timer_armed: bool,
    retry_pause: RetryPause,
    pace_timer: PaceTimer,
    /// Device and inode number of the pool's file, if it is one.
    pool_file: Option<FileIdentity>,
}

impl<M: Memory> Frontend<M> {
    /// A frontend without ports.
    pub fn new(memory: M, book: LeaseBook, open_channel: OpenChannel<M>) -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self {
            memory,
            open_channel,
            book,
            channels: Vec::new(),
            ports: Vec::new(),
            by_lease: HashMap::default(),
            held: Vec::new(),
            inbox: vec![[0; 2]; MESSAGES_PER_LOOK],
            receive_scratch: receive::Scratch::new(),
            transmit_scratch: transmit::Scratch::new(),
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            timer_watched: false,
            timer_armed: false,
            retry_pause: RetryPause::new(),
            pace_timer: PaceTimer::new()?,
            pool_file: None,
        })
    }

    /// Knows the pool's file or device, and so the memory of guests that lies in it: what they send
    /// from there is not copied.
    #[must_use]
    pub fn with_pool_file(mut self, file: FileIdentity) -> Self {
        self.pool_file = Some(file);
        self
    }

    /// Has this object from now on.
    pub fn apply(&mut self, object: Object) -> Result<(), String> {
        match object {
            Object::Channel(object) => self.apply_channel(&object),
            Object::Port(object) => self.apply_port(object),
            other => Err(format!("a net frontend has no {}", other.id())),
        }
    }

    fn apply_channel(&mut self, object: &ChannelObject) -> Result<(), String> {
        let origins = Origins::of(&self.memory, object)?;
        let same = |channel: &&mut Channel<M>| channel.end.object().has_rings_of(object);
        if let Some(channel) = self.channels.iter_mut().find(same) {
            channel.change_origins(origins);
            return Ok(());
        }
        let end = (self.open_channel)(object)?;
        self.channels.retain(|channel| channel.end.object().id != object.id);
        self.channels.push(Channel::new(end, origins));
        // The other side knows nothing of what went over the old rings.
        self.forget_waiting(object.id);
        for port in &mut self.ports {
            port.channel_renewed(object.id);
        }
        self.keep_room();
        Ok(())
    }

    /// Keeps a part of the room of each channel over which a guest sends that is promised a minimum.
    fn keep_room(&mut self) {
        for channel in &mut self.channels {
            let id = channel.end.object().id;
            let promised = |port: &Port| port.minimum.is_some() && port.sends_over(id);
            channel.kept = if self.ports.iter().any(promised) { channel.end.limit() / KEPT_PART } else { 0 };
        }
    }

    fn apply_port(&mut self, object: PortObject) -> Result<(), String> {
        let lease = object.lease;
        if let Some(port) = self.by_lease.get(&lease).copied() {
            self.ports[port].update(object);
            self.drop_unheard(port);
            self.keep_room();
            return Ok(());
        }
        if !whole_pool(&self.memory).contains_area(&object.tx_area) {
            return Err(format!("the transmit area of {lease} lies outside of the pool"));
        }
        if object.ram_area.is_some_and(|ram| !whole_pool(&self.memory).contains_area(&ram)) {
            return Err(format!("the guest memory of {lease} lies outside of the pool"));
        }
        self.by_lease.insert(lease, self.ports.len());
        // One place for each.
        self.held.reserve(self.ports.len() + 1);
        self.ports.push(Port::new(object, self.book.open(lease), self.pool_file));
        self.keep_room();
        Ok(())
    }

    /// Has this object no longer.
    pub fn remove(&mut self, id: &ObjectId, mut sources: Option<&mut Sources>) {
        match id {
            ObjectId::Channel(channel) => {
                self.forget_waiting(*channel);
                self.channels.retain(|it| it.end.object().id != *channel);
            }
            ObjectId::Port(lease) => {
                let Some(place) = self.by_lease.get(lease).copied() else { return };
                self.dismiss_all(place);
                self.by_lease.remove(lease);
                let port = &mut self.ports[place];
                for index in 0..port.ring_count() {
                    stop_ring(port, index, sources.as_deref_mut());
                }
                port.end_letting_go();
                self.ports.swap_remove(place);
                if let Some(moved) = self.ports.get(place) {
                    self.by_lease.insert(moved.lease(), place);
                }
                self.book.close(*lease);
                self.keep_room();
            }
            _ => {}
        }
    }

    /// Serves a queue of a guest from now on.
    pub fn start_ring(&mut self, lease: LeaseId, ring: Ring, sources: Option<&mut Sources>) {
        let Some(port) = self.port(lease) else { return };
        let token = port.token(ring.index());
        if let (Some(sources), Some(kick)) = (sources, ring.kick())
            && let Err(error) = sources.add(kick, token)
        {
            tracing::warn!(%lease, %error, "cannot watch a queue: it is served while others keep us awake");
        }
        port.start_ring(ring);
    }

    /// Announces a guest's address to the switches behind its NIC, as soon as its lease is here and there is room. Only the address
    /// of the lease is.
    pub fn announce(&mut self, lease: LeaseId, address: MacAddress) {
        let Some(port) = self.port(lease) else { return };
        if port.object.mac == address {
            port.announcement = Announcement::Wanted;
        } else {
            tracing::warn!(%lease, %address, mac = %port.object.mac, "the VMM wants another address announced than its lease's");
        }
    }

    /// Lets go of a queue and returns its next available index.
    pub fn stop_ring(&mut self, lease: LeaseId, index: u16, sources: Option<&mut Sources>) -> u16 {
        self.port(lease).map_or(0, |port| stop_ring(port, index, sources))
    }

    /// As [`Frontend::stop_ring`], but waits until the backend has given back what it was lent of the guest's memory.
    fn stop_ring_once_returned(
        &mut self,
        lease: LeaseId,
        index: u16,
        reply: Reply<u16>,
        sources: &mut Sources,
    ) {
        match self.port(lease) {
            Some(port) if port.under_way.lends(index) => {
                if let Some(Some(ring)) = port.rings.get(usize::from(index))
                    && let Some(kick) = ring.kick()
                {
                    // It was watched, or else could not be.
                    let _ = sources.remove(kick);
                }
                port.stop_when_returned(index, reply);
            }
            _ => reply.send(self.stop_ring(lease, index, Some(sources))),
        }
    }

    /// Serves the guests that send over a channel, each in its turn. Who finds no room is first when there is some again:
    /// otherwise it would hang on chance, or on the rhythm of acknowledgements, who gets it.
    fn serve_guests(&mut self, place: usize) -> bool {
        let (id, first) = (self.channels[place].end.object().id, self.channels[place].first);
        let count = self.ports.len();
        let (mut busy, mut without_room) = (false, None);
        for turn in 0..count {
            let port = (first + turn) % count;
            if self.ports[port].object.active.channel != id {
                continue;
            }
            busy |= self.serve_guest(port);
            if self.ports[port].without_room {
                without_room.get_or_insert(port);
            }
        }
        self.channels[place].first = without_room.unwrap_or(first + 1) % count.max(1);
        busy
    }

    /// Takes what a guest sends, and tells it what became of that.
    fn serve_guest(&mut self, place: usize) -> bool {
        let mut busy = self.deliver_waiting(place);
        let port = &mut self.ports[place];
        busy |= port.discard(&mut self.transmit_scratch);
        busy |= port.transmit(&self.memory, &mut self.channels, &mut self.transmit_scratch);
        if !port.stopping.is_empty() {
            port.finish_stopping();
        }
        if !port.taken_back.is_empty() {
            port.finish_taking_back();
        }
        if port.letting_go.is_some() {
            port.finish_letting_go();
        }
        port.signal();
        busy
    }

    fn channel_of(&self, place: usize) -> Option<&Channel<M>> {
        let id = self.ports[place].object.active.channel;
        self.channels.iter().find(|channel| channel.end.object().id == id)
    }

    fn port(&mut self, lease: LeaseId) -> Option<&mut Port> {
        let place = *self.by_lease.get(&lease)?;
        self.ports.get_mut(place)
    }

    fn watch_timer(&mut self, sources: &mut Sources) {
        if !self.timer_watched {
            self.timer_watched = sources.add(&self.timer, TIMER).is_ok();
            if let Err(error) = sources.add(&self.pace_timer, PACE_TIMER) {
                tracing::warn!(%error, "cannot watch a timer: who waits for a share of the fabric waits too long");
            }
        }
    }

    /// Offers packets again that backends were not ready for.
    pub fn retry(&mut self) {
        self.timer_armed = false;
        self.ports.iter_mut().for_each(Port::retry);
    }

    /// Holds a port to a share of the fabric, or no longer.
    pub fn pace(&mut self, lease: LeaseId, pacing: Option<Arc<Pacing>>) {
        if let Some(port) = self.port(lease) {
            port.pacer = pacing.map(Pacer::of_both_ways);
            if port.pacer.is_some() {
                port.waiting.prepare();
            }
        }
    }

    fn arm_timer(&mut self) {
        let pacers = self.ports.iter().filter_map(|port| port.pacer.as_ref());
        if let Some(wait) = pacers.filter_map(Pacer::wait).min() {
            self.pace_timer.arm(wait);
        }
        if self.timer_armed || !self.ports.iter().any(Port::waits_to_retry) {
            return;
        }
        let gave_back = self.ports.iter().any(Port::was_given_back);
        let pause = if gave_back { self.retry_pause.begin(Instant::now()) } else { retry_pause::LONGEST };
        let once = Timespec { tv_sec: 0, tv_nsec: i64::from(pause.subsec_nanos()) };
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let when = Itimerspec { it_interval: never, it_value: once };
        self.timer_armed = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &when).is_ok();
    }
}

/// Takes a ring from a port; its outstanding descriptors are returned first, since their packets lie in the pool.
fn stop_ring(port: &mut Port, index: u16, sources: Option<&mut Sources>) -> u16 {
    let Some(ring) = port.take_ring(index) else { return 0 };
    if let (Some(sources), Some(kick)) = (sources, ring.kick()) {
        // It was watched, or else could not be.
        let _ = sources.remove(kick);
    }
    ring.next_available()
}

impl<M: Memory> Task for Frontend<M> {
    type Message = Order;

    fn message(&mut self, order: Order, sources: &mut Sources) {
        self.watch_timer(sources);
        match order {
            Order::Channel(object, reply) => reply.send(self.apply_channel(&object)),
            Order::Port(object, reply) => reply.send(self.apply_port(*object)),
            Order::Remove(id, reply) => {
                self.remove(&id, Some(sources));
                reply.send(());
            }
            Order::Uses(area, reply) => reply.send(self.ports.iter().any(|port| port.uses(area))),
            Order::Features(lease, features) => {
                if let Some(port) = self.port(lease) {
                    port.set_features(features);
                }
            }
            Order::RingStarted(lease, ring) => self.start_ring(lease, *ring, Some(sources)),
            Order::RingStopped(lease, index, reply) => {
                self.stop_ring_once_returned(lease, index, reply, sources);
            }
            Order::LetGo(lease, then) => self.let_go(lease, then),
            Order::Announce(lease, address) => self.announce(lease, address),
            Order::MemoryChanged(lease, memory, reply) => match self.port(lease) {
                Some(port) => port.change_memory(&memory, reply),
                None => reply.send(()),
            },
            Order::Pace(lease, pacing, reply) => {
                self.pace(lease, pacing);
                reply.send(());
            }
        }
    }

    fn turn(&mut self) -> Progress {
        let mut busy = false;
        for channel in 0..self.channels.len() {
            busy |= self.serve_channel(channel);
        }
        for channel in 0..self.channels.len() {
            busy |= self.serve_guests(channel);
        }
        for place in 0..self.ports.len() {
            if self.channel_of(place).is_none() {
                busy |= self.serve_guest(place);
            }
        }
        for channel in &mut self.channels {
            channel.end.publish();
        }
        self.arm_timer();
        if busy { Progress::Busy } else { Progress::Idle }
    }

    fn ready(&mut self, token: Token) {
        if token == TIMER {
            // Nothing there is as good as something there.
            let _ = rustix::io::read(&self.timer, &mut [0; 8]);
            self.retry();
            return;
        }
        if token == PACE_TIMER {
            self.pace_timer.fired();
            self.ports.iter_mut().filter_map(|port| port.pacer.as_mut()).for_each(Pacer::resume);
            return;
        }
        for port in &mut self.ports {
            port.drain_kick(token);
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        let mut quiet = true;
        for channel in &mut self.channels {
            quiet &= channel.end.announce_sleep();
        }
        for port in &mut self.ports {
            quiet &= port.enable_notifications(&mut self.channels);
        }
        quiet
    }

    fn resume(&mut self) {
        for channel in &mut self.channels {
            channel.end.wake();
        }
        for port in &mut self.ports {
            port.disable_notifications();
        }
    }
}
