//! From a guest's transmit queues into the pool and on to the backend.
//!
//! Descriptors go back to the guest strictly in the order in which it offered them, and only once the backend is done
//! with the packet: a VMM without in-flight records resumes at the used index, so nothing may be returned out of order.

use std::collections::VecDeque;

use cxl_pool::Memory;
use pod_protocol::objects::Route;
use vhost_frontend::{Buffer, ChainReader, Next, Ring};

use super::PACKETS_PER_TURN;
use super::port::Port;
use super::receive::Channel;
use crate::counters::DropReason;
use crate::message::{MAX_PACKET_BYTES, NetMessage, Opcode, Status};
use crate::vnet_header::{ETHERNET_BYTES, HEADER_BYTES, HEADER_BYTES_U32, VnetHeader};

/// Packets of one port that may be under way.
const UNDER_WAY_MAX: usize = 1024;

/// A packet taken from a guest.
#[derive(Debug)]
struct Packet {
    /// Its descriptor's ring and head; nothing once that ring is gone.
    descriptor: Option<(u16, u16)>,
    /// Where it lies; nothing if it was refused and only waits for its turn to be returned.
    buffer: Option<Buffer>,
    bytes: u32,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// To be announced.
    Waiting,
    /// Announced over the active route.
    Sent,
    /// Acknowledged, or refused.
    Done,
}

/// The packets of a port that are not acknowledged yet, in order.
#[derive(Debug)]
pub(super) struct UnderWay {
    packets: VecDeque<Packet>,
    /// The sequence number of the first one; the others follow.
    first: u16,
    waiting: usize,
    /// The backend was not ready for some: they are offered again when the timer says so.
    retry: bool,
}

impl UnderWay {
    pub(super) fn new() -> Self {
        Self { packets: VecDeque::with_capacity(UNDER_WAY_MAX), first: 0, waiting: 0, retry: false }
    }

    pub(super) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Announces everything again that was not acknowledged.
    pub(super) fn send_again(&mut self) {
        self.retry = false;
        for packet in self.packets.iter_mut().filter(|packet| packet.state == State::Sent) {
            packet.state = State::Waiting;
            self.waiting += 1;
        }
    }

    /// Returns the descriptors of a ring that is about to stop, in order. Their packets stay under way.
    pub(super) fn let_go(&mut self, ring: &mut Ring) {
        for packet in &mut self.packets {
            if let Some((index, head)) = packet.descriptor
                && index == ring.index()
            {
                packet.descriptor = None;
                // A ring that cannot be written was parked; its guest gets nothing more.
                let _ = ring.complete(head, 0);
            }
        }
    }

    fn push(&mut self, packet: Packet) {
        self.waiting += usize::from(packet.state == State::Waiting);
        self.packets.push_back(packet);
    }

    /// Notes the end of a packet's transmission. False if there is no such packet.
    fn acknowledge(&mut self, sequence: u16, status: Status) -> bool {
        let place = usize::from(sequence.wrapping_sub(self.first));
        let Some(packet) = self.packets.get_mut(place).filter(|packet| packet.state == State::Sent) else {
            return false;
        };
        match status {
            Status::Sent | Status::Dropped => packet.state = State::Done,
            // Either side may hear of a new generation first.
            Status::NotYet | Status::Stale => {
                packet.state = State::Waiting;
                self.waiting += 1;
                self.retry = true;
            }
        }
        true
    }
}

impl Port {
    fn route(&self) -> Route {
        self.object.active
    }

    /// Whether a packet that a guest offers now could be taken and announced.
    pub(super) fn can_send<M: Memory>(&self, channels: &mut [Channel<M>]) -> bool {
        if self.under_way.retry || self.under_way.len() >= UNDER_WAY_MAX {
            return false;
        }
        // An area without room for the longest packet waits for acknowledgements, which wake us.
        let room = self.area.free_bytes() >= 2 * MAX_PACKET_BYTES || self.under_way.len() == 0;
        room && active(self.route(), channels)
            .is_some_and(|channel| channel.end.ready() && channel.end.room() > 0)
    }

    /// Sends what waits, then takes what the guest offers, within a budget. Returns whether anything moved.
    pub(super) fn transmit<M: Memory>(&mut self, memory: &M, channels: &mut [Channel<M>]) -> bool {
        if !self.untold.is_empty() {
            self.tell_offloads(channels);
        }
        let mut busy = self.return_descriptors();
        let Some(channel) = active(self.route(), channels) else { return busy };
        if !channel.end.ready() || self.under_way.retry {
            return busy;
        }
        busy |= self.announce(channel);
        if self.under_way.waiting > 0 {
            return busy;
        }
        let room = usize::try_from(channel.end.room()).unwrap_or(usize::MAX);
        let room = room.min(UNDER_WAY_MAX - self.under_way.len()).min(PACKETS_PER_TURN);
        let taken = self.take_packets(memory, room);
        if taken > 0 {
            // All of them are in the pool before any is announced.
            memory.store_fence();
            self.announce(channel);
            // Refused ones at the front need not wait for anybody.
            self.return_descriptors();
        }
        busy || taken > 0
    }

    /// Announces waiting packets, in order, as far as the channel has room.
    fn announce<M: Memory>(&mut self, channel: &mut Channel<M>) -> bool {
        if self.under_way.waiting == 0 {
            return false;
        }
        let mut any = false;
        let mut sequence = self.under_way.first;
        for packet in &mut self.under_way.packets {
            if packet.state == State::Waiting
                && let Some(buffer) = packet.buffer
            {
                let message = NetMessage {
                    opcode: Opcode::Transmit,
                    lease: self.object.lease,
                    generation: self.object.active.generation,
                    sequence,
                    line: buffer.start().line(),
                    bytes: packet.bytes,
                    more: false,
                };
                if channel.end.room() == 0 || !channel.end.request(&message) {
                    break;
                }
                packet.state = State::Sent;
                self.under_way.waiting -= 1;
                any = true;
                if self.under_way.waiting == 0 {
                    break;
                }
            }
            sequence = sequence.wrapping_add(1);
        }
        any
    }

    /// Takes up to `budget` packets from the transmit queues, one queue after the other.
    fn take_packets<M: Memory>(&mut self, memory: &M, budget: usize) -> usize {
        let queues = self.rings.len() / 2;
        let mut taken = 0;
        for turn in 0..queues {
            let queue = (self.first_queue + turn) % queues;
            // An even share, so that one queue cannot starve the others; what is left over goes to the last.
            let share = (budget - taken).div_ceil(queues - turn);
            for _ in 0..share {
                if !self.take_packet(memory, 2 * queue + 1) {
                    break;
                }
                taken += 1;
            }
        }
        if queues > 0 {
            self.first_queue = (self.first_queue + 1) % queues;
        }
        taken
    }

    /// Takes one packet; false if there is none, or no room for it.
    fn take_packet<M: Memory>(&mut self, memory: &M, index: usize) -> bool {
        let Some(ring) = &mut self.rings[index] else { return false };
        let descriptor = |head| Some((ring_index(index), head));
        let refused =
            |head| Packet { descriptor: descriptor(head), buffer: None, bytes: 0, state: State::Done };
        match ring.next_chain(&mut self.chain) {
            Ok(Next::Chain) => {}
            Ok(Next::Empty) => return false,
            Ok(Next::Malformed(_)) => {
                self.counters.count_drop(DropReason::BadChain);
                self.under_way.push(refused(self.chain.head()));
                return true;
            }
            Err(error) => {
                // Once per ring: it stays silent from now on.
                tracing::warn!(lease = %self.object.lease, queue = index, %error, "a guest broke its queue");
                return false;
            }
        }
        let head = self.chain.head();
        let frame_bytes = self.chain.readable_bytes().checked_sub(self.header_bytes as u64);
        let frame_bytes = frame_bytes.filter(|bytes| {
            let total = bytes + HEADER_BYTES as u64;
            (u64::from(ETHERNET_BYTES)..=MAX_PACKET_BYTES).contains(bytes) && total <= MAX_PACKET_BYTES
        });
        let Some(frame_bytes) = frame_bytes.and_then(|bytes| u32::try_from(bytes).ok()) else {
            self.counters.count_drop(DropReason::BadChain);
            self.under_way.push(refused(head));
            return true;
        };
        let bytes = frame_bytes + HEADER_BYTES_U32;
        let Some(buffer) = self.area.alloc(bytes) else {
            ring.put_back(&self.chain);
            return false;
        };
        let mut reader = ChainReader::new(ring.memory(), self.chain.readable());
        let mut raw = [0; HEADER_BYTES];
        let copied = reader.read(&mut raw[..self.header_bytes]);
        // From here on only our copy of the header counts: the guest may rewrite its own at any time.
        let checked = VnetHeader::parse(raw).check(frame_bytes, self.object.mtu, self.may_leave);
        let reason = match (copied, checked) {
            (Ok(()), Ok(header)) => {
                memory.write(buffer.start(), &header.to_bytes());
                let payload = buffer.start().saturating_add(HEADER_BYTES as u64);
                match reader.copy_to_pool(memory, payload, u64::from(frame_bytes)) {
                    Ok(()) => None,
                    Err(_) => Some(DropReason::BadChain),
                }
            }
            (Err(_), _) => Some(DropReason::BadChain),
            (_, Err(_)) => Some(DropReason::BadHeader),
        };
        if let Some(reason) = reason {
            self.area.free(buffer);
            self.counters.count_drop(reason);
            self.under_way.push(refused(head));
            return true;
        }
        memory.write_back(buffer.start(), u64::from(bytes));
        self.counters.count_tx(frame_bytes);
        let packet =
            Packet { descriptor: descriptor(head), buffer: Some(buffer), bytes, state: State::Waiting };
        self.under_way.push(packet);
        true
    }

    /// A transmission ended.
    pub(super) fn transmit_done<M: Memory>(&mut self, channel: &Channel<M>, message: &NetMessage) {
        // What an abandoned route says does not count: the packet has been sent again elsewhere.
        let current = self.route();
        if channel.end.object().id == current.channel && message.generation == current.generation {
            self.under_way.acknowledge(message.sequence, Status::from_code(message.bytes));
        }
    }

    /// Returns the descriptors at the front that are done with, and frees their buffers.
    pub(super) fn return_descriptors(&mut self) -> bool {
        let mut any = false;
        while let Some(packet) = self.under_way.packets.front()
            && packet.state == State::Done
        {
            any = true;
            if let Some((ring, head)) = packet.descriptor
                && let Some(Some(ring)) = self.rings.get_mut(usize::from(ring))
            {
                // A ring that cannot be written was parked; its guest gets nothing more.
                let _ = ring.complete(head, 0);
            }
            if let Some(buffer) = packet.buffer {
                self.area.free(buffer);
            }
            self.under_way.packets.pop_front();
            self.under_way.first = self.under_way.first.wrapping_add(1);
        }
        any
    }

    /// Whether the timer is wanted.
    pub(super) fn waits_to_retry(&self) -> bool {
        self.under_way.retry
    }

    /// The timer has fired.
    pub(super) fn retry(&mut self) {
        self.under_way.retry = false;
    }
}

fn active<M: Memory>(route: Route, channels: &mut [Channel<M>]) -> Option<&mut Channel<M>> {
    channels.iter_mut().find(|channel| channel.end.object().id == route.channel)
}

fn ring_index(index: usize) -> u16 {
    u16::try_from(index).expect("a port has at most 65536 rings")
}
