//! From a guest's transmit queues into the pool and on to the backend.
//!
//! Descriptors go back to the guest strictly in the order in which it offered them, and only once the backend is done
//! with the packet: a VMM without in-flight records resumes at the used index, so nothing may be returned out of order.

use std::time::Instant;

use cxl_pool::Memory;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::Route;
use vhost_frontend::pacing::Way;
use vhost_frontend::{Buffer, Chain, GuestView};

use super::PACKETS_PER_TURN;
use super::announcing::Announcement;
use super::budget::{Budget, COPIED_BYTES_PER_TURN, Taken};
use super::copying::{BOUNCE_BYTES, Rules};
use super::cutting::{Copied, Cut};
use super::flow::{FLOW_BYTES, flow_hash};
use super::flow_queues::FlowQueues;
use super::lending::Ranges;
use super::port::Port;
use super::rails::{Rails, Steering};
use super::receive::Channel;
use super::under_way::{Packet, State, UNDER_WAY_MAX};
use crate::message::{MAX_PACKET_BYTES, NetMessage, Run};
use crate::scattered;
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32};

/// Descriptors that a chain is expected to have; storage for more is made when a guest first sends such a chain.
const USUAL_SEGMENTS: usize = 20;

/// Storage that all ports use in turn.
pub(super) struct Scratch {
    pub(super) chains: Vec<Chain>,
    pub(super) used: Vec<(u16, u32)>,
    /// A packet on its way past the cache.
    bounce: Vec<u8>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self {
            chains: (0..PACKETS_PER_TURN).map(|_| Chain::with_capacity(USUAL_SEGMENTS)).collect(),
            used: Vec::with_capacity(UNDER_WAY_MAX),
            bounce: vec![0; BOUNCE_BYTES],
        }
    }
}

impl Port {
    /// Whether a packet that a guest offers now could be taken and announced.
    pub(super) fn can_send<M: Memory>(&mut self, channels: &mut [Channel<M>]) -> bool {
        if self.under_way.retry || self.under_way.len() >= UNDER_WAY_MAX {
            return false;
        }
        if self.leaving.is_some() || self.throttled || self.is_held() || self.object.incoming {
            return false;
        }
        // An area without room for the longest packet waits for acknowledgements, which wake us.
        let room = self.buffers.free_bytes() >= 2 * MAX_PACKET_BYTES || self.under_way.len() == 0;
        match self.steer(channels) {
            Steering::Ready => room && self.room(channels).is_some_and(|room| room > 0),
            Steering::Settling => false,
            Steering::Dead => room,
        }
    }

    /// How many packets can be announced, whichever rails they go over. Nothing if a rail's other end is not there.
    fn room<M: Memory>(&mut self, channels: &mut [Channel<M>]) -> Option<u32> {
        let below = self.is_below_minimum();
        let mut least = None;
        for rail in self.rails.open().iter() {
            let channel = find(self.rails.route(rail)?.channel, channels)?;
            if !channel.end.ready() {
                return None;
            }
            let room = channel.end.room().saturating_sub(channel.kept_from(below));
            least = Some(least.map_or(room, |least: u32| least.min(room)));
        }
        least
    }

    /// Whether it has used up its share of the fabric for now.
    fn is_held(&self) -> bool {
        self.pacer.as_ref().is_some_and(|pacer| pacer.is_held(Way::Asked))
    }

    fn is_below_minimum(&mut self) -> bool {
        self.minimum.as_mut().is_some_and(|minimum| minimum.is_below(Instant::now()))
    }

    /// Sends what waits, then takes what the guest offers, within a budget. Returns whether anything moved.
    pub(super) fn transmit<M: Memory>(
        &mut self,
        memory: &M,
        channels: &mut [Channel<M>],
        scratch: &mut Scratch,
    ) -> bool {
        self.without_room = false;
        if let Some(pacer) = &mut self.pacer {
            pacer.look();
        }
        if self.object.incoming {
            // Another host's frontend sends what is to be sent, until the guest is here.
            return false;
        }
        if !self.untold.is_empty() {
            self.tell_offloads(channels);
        }
        let mut busy = self.return_descriptors(scratch);
        if self.leaving.is_some() {
            if self.under_way.awaits() {
                return busy;
            }
            self.leaving = None;
            self.spread_all();
            // What the old NIC sent after the new one had announced itself has the switches look for the guest there.
            self.announcement = Announcement::Wanted;
        }
        let steering = self.steer(channels);
        if steering == Steering::Dead {
            let packets = PACKETS_PER_TURN.min(UNDER_WAY_MAX - self.under_way.len());
            let taken = self.take_packets(memory, Budget::packets(packets), scratch).packets;
            self.drop_waiting();
            let returned = self.return_descriptors(scratch);
            return busy || returned || taken > 0;
        }
        if self.under_way.retry || !self.is_ready(channels) {
            return busy;
        }
        busy |= self.announce(channels);
        if self.under_way.waiting() > 0 {
            self.without_room = true;
            return busy;
        }
        if steering == Steering::Settling {
            return busy;
        }
        if self.announcement == Announcement::Wanted && self.push_announcement(memory) {
            self.announce(channels);
            busy = true;
        }
        let Some(room) = self.room(channels) else { return busy };
        self.without_room = room == 0;
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        let room = room.min(UNDER_WAY_MAX - self.under_way.len()).min(PACKETS_PER_TURN);
        let room = if self.is_held() { 0 } else { room };
        let Taken { packets: taken, cost, .. } = if self.limiter.is_none() {
            self.take_packets(memory, Budget::packets(room), scratch)
        } else {
            self.take_within_limit(memory, room, scratch)
        };
        if let Some(minimum) = &mut self.minimum {
            minimum.charge(cost);
        }
        if taken > 0 {
            // All of them are in the pool before any is announced.
            memory.store_fence();
            self.announce(channels);
            // Refused ones at the front need not wait for anybody.
            self.return_descriptors(scratch);
        }
        busy || taken > 0
    }

    /// Whether there is somebody at the other end of each rail that is in use.
    fn is_ready<M: Memory>(&self, channels: &mut [Channel<M>]) -> bool {
        self.rails.open().iter().all(|rail| {
            let channel = self.rails.route(rail).and_then(|route| find(route.channel, channels));
            channel.is_some_and(|channel| channel.end.ready())
        })
    }

    /// Announces waiting packets, those of a flow in order, as far as the channels have room.
    fn announce<M: Memory>(&mut self, channels: &mut [Channel<M>]) -> bool {
        let mut any = false;
        for rail in self.rails.open().iter() {
            if self.under_way.waiting() > 0
                && let Some(route) = self.rails.route(rail)
                && let Some(channel) = find(route.channel, channels)
            {
                any |= self.announce_over(rail, route, channel);
            }
        }
        any
    }

    fn announce_over<M: Memory>(&mut self, rail: u8, route: Route, channel: &mut Channel<M>) -> bool {
        let mut any = false;
        while self.under_way.waiting() > 0 {
            let mut messages = [[0; 2]; PACKETS_PER_TURN];
            let count = self.under_way.announcements(self.object.lease, (rail, route), &mut messages);
            let sent = channel.end.request_all(&messages[..count]);
            self.under_way.announced(rail, sent);
            any |= sent > 0;
            if sent < count || count == 0 {
                break;
            }
        }
        any
    }

    /// Takes packets from the transmit queues, one queue after the other.
    pub(super) fn take_packets<M: Memory>(
        &mut self,
        memory: &M,
        mut budget: Budget,
        scratch: &mut Scratch,
    ) -> Taken {
        let queues = self.rings.len() / 2;
        let mut taken = Taken::default();
        for turn in 0..queues {
            let queue = (self.first_queue + turn) % queues;
            // An even share, so that one queue cannot starve the others; what is left over goes to the last.
            let share = budget.share(queues - turn);
            let Scratch { chains, bounce, .. } = scratch;
            let chains = &mut chains[..share.packets];
            let of_queue = self.take_from_queue(memory, 2 * queue + 1, (chains, share), bounce);
            let Taken { packets, held, .. } = of_queue;
            budget.spend(&of_queue);
            taken.add(&of_queue);
            if held {
                // A packet that waits for its share of the fabric is the next one: short ones of other queues would use up what is
                // saved for it again and again. Nor does a queue that has just had a part of the share have the next as well.
                self.first_queue = match &self.cut {
                    Some(cut) => cut.ring / 2,
                    None => (queue + usize::from(packets > 0)) % queues,
                };
                return taken;
            }
        }
        if queues > 0 {
            self.first_queue = (self.first_queue + 1) % queues;
        }
        taken
    }

    /// Takes packets from one queue, as many as there are chains for and until its budget is used up.
    fn take_from_queue<M: Memory>(
        &mut self,
        memory: &M,
        index: usize,
        (chains, budget): (&mut [Chain], Budget),
        bounce: &mut [u8],
    ) -> Taken {
        let mut all = Taken::default();
        if self.is_stopping(index) || budget.is_used_up_by(&all) {
            return all;
        }
        let (pair, steers) = (ring_index(index) / 2, self.has_queues());
        let Some(ring) = self.rings[index].as_mut().filter(|ring| ring.is_enabled()) else {
            return all;
        };
        let offered = match ring.next_chains_within(chains, budget.descriptors) {
            Ok(offered) => offered,
            Err(error) => {
                // Once per ring: it stays silent from now on.
                tracing::warn!(lease = %self.object.lease, queue = index, %error, "a guest broke its queue");
                return all;
            }
        };
        if offered == 0 {
            return all;
        }
        all.note_walked(&chains[..offered]);
        let rules =
            Rules { header_bytes: self.header_bytes, mtu: self.object.mtu, may_leave: self.may_leave };
        let guest = ring.memory();
        let view = GuestView::new(guest);
        let (mut packets, mut bytes, mut copied, mut zero_copy) = (0, 0, 0, 0);
        let mut ranges = Ranges::new();
        for chain in &chains[..offered] {
            if copied >= COPIED_BYTES_PER_TURN || budget.is_used_up_by(&all) {
                break;
            }
            let mut packet = Packet::refused(Some((ring_index(index), chain.head())));
            match rules.frame_bytes(chain) {
                Err(reason) => self.counters.count_drop(reason),
                Ok(frame_bytes) => {
                    let whole = frame_bytes + HEADER_BYTES_U32;
                    let cut = self.pacer.as_mut().filter(|pacer| u64::from(whole) > pacer.at_once_bytes());
                    let ranges = if cut.is_none() {
                        ranges.find(&self.pool_map, chain, rules.header_bytes, whole)
                    } else {
                        // The backend would read all of it at once.
                        None
                    };
                    let (buffer, written) = if let Some(pacer) = cut {
                        let (of_port, what) = ((&mut self.buffers, pacer), (index, chain, frame_bytes));
                        match Cut::advance(&mut self.cut, of_port, (memory, rules, guest), what, bounce) {
                            Copied::NoBuffer => break,
                            Copied::InPart => {
                                all.held = true;
                                break;
                            }
                            Copied::Refused(reason) => (None, Err(reason)),
                            Copied::Whole(buffer, header) => (Some(buffer), Ok(header)),
                        }
                    } else {
                        let needed = ranges.map_or(whole, |_| scattered::BUFFER_BYTES);
                        // What follows has to wait as well.
                        let Some(buffer) = self.buffers.alloc(needed) else { break };
                        if let Some(pacer) = &mut self.pacer
                            && !pacer.admit(Way::Asked, whole.into())
                        {
                            self.buffers.free(buffer);
                            all.held = true;
                            break;
                        }
                        let of_frame = (frame_bytes, ranges);
                        (Some(buffer), rules.put(memory, (guest, &view), chain, of_frame, buffer, bounce))
                    };
                    match written {
                        Ok(header) => {
                            packets += 1;
                            bytes += u64::from(frame_bytes);
                            all.cost += header.wire_cost(frame_bytes);
                            packet.buffer = buffer;
                            packet.bytes = whole;
                            packet.lent = ranges.is_some();
                            zero_copy += u64::from(packet.lent);
                            let place = if packet.lent { &mut all.lent_bytes } else { &mut copied };
                            *place += u64::from(whole);
                            packet.state = State::Waiting;
                            let queues = steers.then_some(&mut self.flow_queues);
                            tell_flow(memory, (&self.rails, queues, pair), &mut packet, bounce);
                        }
                        Err(reason) => {
                            if let Some(buffer) = buffer {
                                self.buffers.free(buffer);
                            }
                            self.counters.count_drop(reason);
                        }
                    }
                }
            }
            self.under_way.push(packet);
            all.packets += 1;
        }
        self.counters.tx_packets.add(packets);
        self.counters.zero_copy.add(zero_copy);
        self.counters.tx_bytes.add(bytes);
        for chain in chains[all.packets..offered].iter().rev() {
            ring.put_back(chain);
        }
        all
    }

    /// Transmissions ended.
    pub(super) fn transmit_done<M: Memory>(&mut self, channel: &Channel<M>, message: &NetMessage, run: Run) {
        // What an abandoned route says does not count: the packet has been sent again elsewhere.
        let from = Route { channel: channel.end.object().id, generation: message.generation };
        let rail = match self.leaving {
            // It was the only one, and nothing was announced over others since.
            Some(left) if left == from => Some(0),
            Some(_) => None,
            None => self.rails.find(from),
        };
        let Some(rail) = rail else { return };
        if self.under_way.acknowledge(rail, message.sequence, run.packets, run.status) {
            if self.rails.is_single() || self.leaving.is_some() {
                self.under_way.retry = true;
            } else {
                self.rails.note_given_back(rail);
            }
        }
    }

    /// Returns the descriptors at the front that are done with, and frees their buffers.
    pub(super) fn return_descriptors(&mut self, scratch: &mut Scratch) -> bool {
        let used = &mut scratch.used;
        let mut any = false;
        let mut of_ring = 0;
        while let Some(packet) = self.under_way.pop_done() {
            any = true;
            if let Some(buffer) = packet.buffer {
                self.buffers.free(buffer);
            }
            if let Some((ring, head)) = packet.descriptor {
                if ring != of_ring || used.len() == used.capacity() {
                    return_to(&mut self.rings, of_ring, used);
                    of_ring = ring;
                }
                used.push((head, 0));
            }
        }
        return_to(&mut self.rings, of_ring, used);
        any
    }

    /// Whether a backend was not ready for something.
    pub(super) fn was_given_back(&self) -> bool {
        self.under_way.retry
    }

    /// Whether the timer is wanted.
    pub(super) fn waits_to_retry(&self) -> bool {
        let is_waited_for =
            !self.stopping.is_empty() || !self.taken_back.is_empty() || self.letting_go.is_some();
        self.under_way.retry || self.throttled || is_waited_for || self.rails.waits_for_one()
    }

    /// The timer has fired. What was given back is offered again once the backend has answered all that followed it, which it gives back
    /// as well: else that would come after what is new.
    pub(super) fn retry(&mut self) {
        self.under_way.retry &= self.under_way.awaits();
        self.throttled = false;
    }
}

fn return_to(rings: &mut [Option<vhost_frontend::Ring>], ring: u16, used: &mut Vec<(u16, u32)>) {
    if let Some(Some(ring)) = rings.get_mut(usize::from(ring)) {
        // A ring that cannot be written was parked; its guest gets nothing more.
        let _ = ring.complete_together(used);
    }
    used.clear();
}

#[inline]
fn find<M: Memory>(id: ChannelId, channels: &mut [Channel<M>]) -> Option<&mut Channel<M>> {
    channels.iter_mut().find(|channel| channel.end.object().id == id)
}

/// Says which flow a packet is of that was just written into its buffer, as far as somebody wants to know, and over which rail it goes.
#[inline]
fn tell_flow<M: Memory>(
    memory: &M,
    (rails, queues, pair): (&Rails, Option<&mut FlowQueues>, u16),
    packet: &mut Packet,
    bounce: &[u8],
) {
    let (spreads, by_queue) = (!rails.is_single(), rails.is_by_queue());
    let flow = match packet.buffer {
        Some(buffer) if queues.is_some() || spreads && !by_queue => {
            flow_of(memory, buffer, bounce, packet.bytes - HEADER_BYTES_U32)
        }
        _ => 0,
    };
    if let Some(queues) = queues {
        queues.note(flow, pair);
    }
    if spreads {
        packet.flow = if by_queue { u32::from(pair) } else { flow };
        packet.rail = rails.rail_of(packet.flow);
    }
}

/// The flow of a packet that was just written into its buffer.
fn flow_of<M: Memory>(memory: &M, buffer: Buffer, bounce: &[u8], frame_bytes: u32) -> u32 {
    let bytes = (frame_bytes as usize).min(FLOW_BYTES);
    if M::COHERENT {
        let mut front = [0; FLOW_BYTES];
        memory.read(buffer.start().saturating_add(HEADER_BYTES as u64), &mut front[..bytes]);
        flow_hash(&front[..bytes])
    } else {
        // Reading it there would fetch it into the cache.
        flow_hash(&bounce[HEADER_BYTES..HEADER_BYTES + bytes])
    }
}

fn ring_index(index: usize) -> u16 {
    u16::try_from(index).expect("a port has at most 65536 rings")
}
