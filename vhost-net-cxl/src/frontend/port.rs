//! One virtio-net device of one VM: its queues, its packets under way, its routes.

use std::sync::Arc;
use std::time::Instant;

use cxl_pool::{Area, FileIdentity, Memory};
use pod_protocol::ids::{ChannelId, LeaseGeneration, LeaseId};
use pod_protocol::objects::{PortObject, Route};
use pod_protocol::worker::Token;
use vhost_frontend::pacing::Pacer;
use vhost_frontend::{ChainLimits, GuestMemory, PoolMap, Ring};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;

use super::announcing::Announcement;
use super::buffers::TransmitBuffers;
use super::cutting::Cut;
use super::doubles::Doubles;
use super::flow_queues::FlowQueues;
use super::lending::{Stopping, TakenBack};
use super::letting_go::LettingGo;
use super::limiting::{receive_limit, receives_alike};
use super::rails::{RailSet, Rails};
use super::receive::Channel;
use super::under_way::{UNDER_WAY_MAX, UnderWay};
use super::waiting::Waiting;
use super::walks::Walks;
use crate::counters::{DropReason, LeaseCounters};
use crate::message::{MAX_PACKET_BYTES, NetMessage, Opcode};
use crate::offloads::Offloads;
use crate::rate_limit::RateLimiter;
use crate::vnet_header::HEADER_BYTES;

/// Length of the header for a driver of before the standard that does not merge buffers: without `num_buffers`.
const LEGACY_HEADER_BYTES: usize = 10;
/// Descriptors of one chain; the longest packet has no need for more.
const SEGMENTS_MAX: u16 = 256;

/// A device at work.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Port {
    pub(super) object: PortObject,
    pub(super) counters: Arc<LeaseCounters>,
    pub(super) buffers: TransmitBuffers,
    pub(super) rings: Vec<Option<Ring>>,
    pub(super) under_way: UnderWay,
    /// Length of the virtio-net header in the guest's buffers.
    pub(super) header_bytes: usize,
    /// A packet may be spread over several receive buffers.
    pub(super) merges: bool,
    /// What the guest's driver may leave undone.
    pub(super) may_leave: Offloads,
    /// What it accepts to be left undone.
    pub(super) accepts: Offloads,
    /// What backends are told that it accepts.
    said: Offloads,
    /// The NICs over which it sends.
    pub(super) rails: Rails,
    /// The channels that still have to be told what it accepts.
    pub(super) untold: Vec<ChannelId>,
    /// There are queues that the VMM has disabled.
    pub(super) discards: bool,
    /// The transmit queue that is looked at first.
    pub(super) first_queue: usize,
    /// Where what arrives of a flow goes, while several receive queues run.
    pub(super) flow_queues: FlowQueues,
    /// How much of its receive queues was looked at.
    pub(super) walks: Walks,
    /// How much the guest may send, if that is limited.
    pub(super) limiter: Option<RateLimiter>,
    /// How much the guest may receive, if that is limited and judged here.
    pub(super) receive_limit: Option<RateLimiter>,
    /// What the guest is promised to send, if anything.
    pub(super) minimum: Option<RateLimiter>,
    /// Holds it to its share of the fabric, if it has one.
    pub(super) pacer: Option<Pacer>,
    /// Of the packet that is copied in pieces.
    pub(super) cut: Option<Cut>,
    /// What has arrived and has to wait for its share of the fabric.
    pub(super) waiting: Waiting,
    /// It has sent as much as it may for now.
    pub(super) throttled: bool,
    /// It found no room in its channel when it was served last.
    pub(super) without_room: bool,
    /// Packets in its queues that were counted as held back by the limit.
    pub(super) held_back: usize,
    /// The route that is being left in order: nothing new is announced until it has acknowledged everything.
    pub(super) leaving: Option<Route>,
    /// What was flooded to it lately.
    pub(super) doubles: Doubles,
    /// Of the guest's address, where the VMM asked for it.
    pub(super) announcement: Announcement,
    /// Device and inode number of the pool's file, if it is one.
    pub(super) pool_file: Option<FileIdentity>,
    /// Where in the pool the guest's memory lies.
    pub(super) pool_map: PoolMap,
    /// Queues that stop once the backend has given back what it was lent of them.
    pub(super) stopping: Vec<Stopping>,
    /// Memory that is gone once the backend has given back what it was lent of it.
    pub(super) taken_back: Vec<TakenBack>,
    /// All of its queues were stopped, and somebody waits until what they sent is done with.
    pub(super) letting_go: Option<LettingGo>,
    /// Until when the backend is waited for on behalf of all queues that stop: it is the same one, and has been silent for all of them.
    pub(super) patience_ends: Option<Instant>,
}

impl Port {
    pub(super) fn new(
        object: PortObject,
        counters: Arc<LeaseCounters>,
        pool_file: Option<FileIdentity>,
    ) -> Self {
        let rings = (0..2 * object.queue_pairs).map(|_| None).collect();
        let buffers = TransmitBuffers::new(object.tx_area, UNDER_WAY_MAX);
        let limiter = RateLimiter::of_sender(&object.policy.transmit, Instant::now());
        let minimum = RateLimiter::minimum(&object.policy.transmit, Instant::now());
        let mut port = Self {
            rails: Rails::new(&object),
            receive_limit: receive_limit(&object),
            object,
            counters,
            buffers,
            rings,
            under_way: UnderWay::new(),
            header_bytes: HEADER_BYTES,
            merges: false,
            may_leave: Offloads::NONE,
            accepts: Offloads::NONE,
            said: Offloads::ALL,
            untold: Vec::new(),
            discards: false,
            first_queue: 0,
            flow_queues: FlowQueues::new(),
            walks: Walks::default(),
            limiter,
            minimum,
            pacer: None,
            cut: None,
            waiting: Waiting::new(),
            throttled: false,
            held_back: 0,
            without_room: false,
            leaving: None,
            doubles: Doubles::new(),
            announcement: Announcement::NotWanted,
            pool_file,
            pool_map: PoolMap::default(),
            stopping: Vec::new(),
            taken_back: Vec::new(),
            letting_go: None,
            patience_ends: None,
        };
        port.tell_all();
        port
    }

    pub(super) fn lease(&self) -> LeaseId {
        self.object.lease
    }

    pub(super) fn ring_count(&self) -> u16 {
        2 * self.object.queue_pairs
    }

    pub(super) fn uses(&self, area: Area) -> bool {
        let Self { object, .. } = self;
        object.tx_area.overlaps(&area) || object.ram_area.is_some_and(|ram| ram.overlaps(&area))
    }

    /// Takes over what the controller wants now. Over a new route everything that was not acknowledged goes first; but
    /// where the old one still works and drains, it is left to finish.
    pub(super) fn update(&mut self, object: PortObject) {
        let moved = object.active != self.object.active;
        if self.object.incoming && !object.incoming {
            tracing::info!(lease = %object.lease, instance = object.instance_name, "its guest is here now");
        }
        let routes = |it: &PortObject| (it.active, it.rails.clone(), it.standby, it.draining);
        let rerouted = routes(&object) != routes(&self.object);
        if moved && self.rails.is_single() && object.draining == Some(self.object.active) {
            self.leaving = object.draining;
            tracing::info!(
                lease = %object.lease, instance = object.instance_name, channel = %object.active.channel,
                awaited = self.under_way.len(), "moves to another route once the old one has drained",
            );
        } else if moved && self.rails.has_generation(object.active.generation) {
            tracing::info!(
                lease = %object.lease, instance = object.instance_name, channel = %object.active.channel,
                "goes on over another of its NICs",
            );
        } else if moved {
            tracing::info!(
                lease = %object.lease, instance = object.instance_name, channel = %object.active.channel,
                resent = self.under_way.len(), "moved to another route",
            );
        }
        // What the device offered to its guest cannot change under it.
        let Self { object: old, .. } = self;
        let (tx_area, ram_area, queue_pairs) = (old.tx_area, old.ram_area, old.queue_pairs);
        if object.policy.transmit != old.policy.transmit {
            self.limiter = RateLimiter::of_sender(&object.policy.transmit, Instant::now());
            self.minimum = RateLimiter::minimum(&object.policy.transmit, Instant::now());
            self.throttled = false;
            self.held_back = 0;
        }
        if !receives_alike(old, &object) {
            self.receive_limit = receive_limit(&object);
        }
        *old = PortObject { tx_area, ram_area, queue_pairs, ..object };
        if moved || self.object.draining.is_some() {
            self.doubles.two = self.object.draining.is_some();
        }
        let drains = self.leaving.is_some() && self.leaving == self.object.draining;
        if drains {
            self.rails = Rails::new(&self.object);
        } else if self.leaving.take().is_some() {
            self.rails = Rails::new(&self.object);
            self.under_way.send_again();
            self.spread_all();
        } else if rerouted {
            self.change_rails();
        }
        if rerouted {
            self.tell_all();
        }
    }

    /// Whether a frame counts that came over this channel, from a NIC that was granted the lease at this generation. A NIC may
    /// hear of its grant before we do, and frames of a switch that turns to it at once are not to be lost. One that was left because it failed
    /// and stands by now does not count as what it was: it may have stood still, and hear of that last of all, while its successor
    /// has delivered the same broadcasts.
    pub(super) fn hears_of(&self, channel: ChannelId, generation: LeaseGeneration) -> bool {
        let active = self.object.active;
        let drains = self.object.draining.is_some_and(|route| route.channel == channel);
        let serves = active.channel == channel || self.sends_over(channel) || drains;
        serves
            || generation.is_newer_than(active.generation)
            || (self.hears(channel) && !active.generation.is_newer_than(generation))
    }

    /// Whether this channel belongs to one of our routes.
    fn hears(&self, channel: ChannelId) -> bool {
        let others = [self.object.standby, self.object.draining];
        self.object.active.channel == channel
            || self.sends_over(channel)
            || others.iter().flatten().any(|route| route.channel == channel)
    }

    /// The rings of a channel began anew: what was announced over the old ones may have been lost.
    pub(super) fn channel_renewed(&mut self, channel: ChannelId) {
        // What is under way was announced over the route that is being left, if there is one.
        match self.leaving {
            Some(left) if left.channel == channel => {
                self.leaving = None;
                self.under_way.send_again();
                self.spread_all();
            }
            Some(_) => {}
            None => {
                let over = self.rails.over(channel);
                if over != RailSet::NONE {
                    self.under_way.retry = false;
                }
                self.under_way.send_again_on(over);
            }
        }
        if self.hears(channel) && !self.untold.contains(&channel) {
            self.untold.push(channel);
        }
    }

    fn tell_all(&mut self) {
        self.untold.clear();
        self.untold.push(self.object.active.channel);
        let others = [self.object.standby, self.object.draining].into_iter().flatten();
        for route in self.rails.routes().chain(others) {
            if !self.untold.contains(&route.channel) {
                self.untold.push(route.channel);
            }
        }
    }

    /// Tells backends what the guest's driver accepts, so that their NICs do the rest.
    pub(super) fn tell_offloads<M: Memory>(&mut self, channels: &mut [Channel<M>]) {
        let message = self.offloads_message();
        self.untold.retain(|untold| {
            let channel = channels.iter_mut().find(|channel| channel.end.object().id == *untold);
            !channel.is_some_and(|channel| channel.end.ready() && channel.end.send(&message))
        });
    }

    /// Says what the guest's driver accepts.
    pub(super) fn offloads_message(&self) -> NetMessage {
        NetMessage {
            opcode: Opcode::Offloads,
            lease: self.object.lease,
            generation: self.object.active.generation,
            sequence: 0,
            line: cxl_pool::LineOffset::new(0),
            bytes: self.said.bits(),
            more: false,
        }
    }

    /// The driver acknowledged these features.
    pub(super) fn set_features(&mut self, features: u64) {
        let has = |bit: u32| features >> bit & 1 == 1;
        self.merges = has(VIRTIO_NET_F_MRG_RXBUF);
        let long = self.merges || has(VIRTIO_F_VERSION_1);
        self.header_bytes = if long { HEADER_BYTES } else { LEGACY_HEADER_BYTES };
        let offered = features & self.object.features;
        self.may_leave = Offloads::left_by_guest(offered);
        self.accepts = Offloads::accepted_by_guest(offered);
        self.look_at_offloads();
    }

    /// Has backends hear what the guest accepts, where that has changed. Without a receive queue that is anything, for all of it is dropped: other
    /// guests of the NIC are not to have their large frames cut for one whose driver does not run.
    fn look_at_offloads(&mut self) {
        let says = if self.has_queue() { self.accepts } else { Offloads::ALL };
        if says != self.said {
            self.said = says;
            self.tell_all();
        }
    }

    pub(super) fn start_ring(&mut self, mut ring: Ring) {
        let index = usize::from(ring.index());
        self.patience_ends = None;
        if ring.is_enabled() {
            self.letting_go = None;
        }
        self.waiting.queue_changed(index);
        self.set_features(ring.features());
        ring.set_limits(ChainLimits { segments: SEGMENTS_MAX, bytes: chain_bytes_max() });
        ring.disable_notifications();
        self.map_memory(&ring.memory().clone());
        if let Some(place) = self.rings.get_mut(index) {
            *place = Some(ring);
        }
        self.look_at_offloads();
        self.look_for_disabled();
    }

    /// Lets go of a ring. What it sent lies in the pool and goes on, unless it is lent; its descriptors are returned now.
    pub(super) fn take_ring(&mut self, index: u16) -> Option<Ring> {
        let mut ring = self.rings.get_mut(usize::from(index))?.take()?;
        self.waiting.queue_changed(usize::from(index));
        if let Some(cut) = self.cut.take_if(|cut| cut.ring == usize::from(index)) {
            self.buffers.free(cut.buffer);
        }
        for _ in 0..self.under_way.let_go(&mut ring) {
            self.counters.count_drop(DropReason::QueueStopped);
        }
        ring.signal();
        self.look_at_offloads();
        self.look_for_disabled();
        Some(ring)
    }

    pub(super) fn set_memory(&mut self, memory: &GuestMemory) {
        self.map_memory(memory);
        for ring in self.rings.iter_mut().flatten() {
            ring.set_memory(memory.clone());
        }
    }

    /// Signals what was done in this turn.
    pub(super) fn signal(&mut self) {
        for ring in self.rings.iter_mut().flatten() {
            ring.signal();
        }
    }

    /// Names a ring among the worker's sources.
    pub(super) fn token(&self, ring: u16) -> Token {
        Token(u64::from(self.object.lease.get()) << 16 | u64::from(ring))
    }

    pub(super) fn drain_kick(&self, token: Token) {
        if token.0 >> 16 != u64::from(self.object.lease.get()) {
            return;
        }
        let index = usize::try_from(token.0 & 0xffff).unwrap_or(usize::MAX);
        if let Some(Some(ring)) = self.rings.get(index) {
            ring.drain_kick();
        }
    }

    /// About to sleep: asks for kicks where something can be done about them. False if something came meanwhile.
    pub(super) fn enable_notifications<M: Memory>(&mut self, channels: &mut [Channel<M>]) -> bool {
        // While nothing can be sent, a kick would wake us for nothing: the channel's news will.
        let (sends, discards) = (self.can_send(channels), !self.object.incoming);
        let mut quiet = true;
        // Receive queues need no kicks: a frame that finds no buffer is dropped, none waits for one.
        for ring in self.rings.iter_mut().skip(1).step_by(2).flatten() {
            let wanted = if ring.is_enabled() { sends } else { discards };
            if wanted {
                quiet &= !ring.enable_notifications();
            }
        }
        quiet
    }

    pub(super) fn disable_notifications(&mut self) {
        for ring in self.rings.iter_mut().skip(1).step_by(2).flatten() {
            ring.disable_notifications();
        }
    }
}

/// The longest chain: the longest packet, or as many receive buffers for it as a guest may chain.
const fn chain_bytes_max() -> u64 {
    2 * MAX_PACKET_BYTES
}
