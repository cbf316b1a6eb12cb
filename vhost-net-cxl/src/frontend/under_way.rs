//! The packets of a port that are not acknowledged yet, in order.

use std::collections::VecDeque;

use pod_protocol::ids::LeaseId;
use pod_protocol::objects::Route;
use vhost_frontend::{Buffer, Ring};

use crate::message::{NetMessage, Opcode, Status};

/// Packets of one port that may be under way.
pub(super) const UNDER_WAY_MAX: usize = 1024;

/// A packet taken from a guest.
#[derive(Debug)]
pub(super) struct Packet {
    /// Its descriptor's ring and head; nothing once that ring is gone.
    pub(super) descriptor: Option<(u16, u16)>,
    /// Where it lies; nothing if it was refused and only waits for its turn to be returned.
    pub(super) buffer: Option<Buffer>,
    pub(super) bytes: u32,
    /// Its payload lies in the guest's memory.
    pub(super) lent: bool,
    pub(super) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// To be announced.
    Waiting,
    /// Announced over the active route.
    Sent,
    /// As [`State::Sent`], but its payload is gone: it cannot be announced again.
    Abandoned,
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
    /// No packet before this one waits.
    first_waiting: usize,
    /// The backend was not ready for some: they are offered again when the timer says so.
    pub(super) retry: bool,
}

impl UnderWay {
    pub(super) fn new() -> Self {
        let packets = VecDeque::with_capacity(UNDER_WAY_MAX);
        Self { packets, first: 0, waiting: 0, first_waiting: 0, retry: false }
    }

    pub(super) fn len(&self) -> usize {
        self.packets.len()
    }

    /// How many are to be announced.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether some were announced and not acknowledged.
    pub(super) fn awaits(&self) -> bool {
        self.packets.iter().any(|packet| matches!(packet.state, State::Sent | State::Abandoned))
    }

    /// Announces everything again that was not acknowledged.
    pub(super) fn send_again(&mut self) {
        self.retry = false;
        self.first_waiting = 0;
        for packet in &mut self.packets {
            match packet.state {
                State::Sent => {
                    packet.state = State::Waiting;
                    self.waiting += 1;
                }
                State::Abandoned => packet.state = State::Done,
                State::Waiting | State::Done => {}
            }
        }
    }

    /// Whether memory of packets of this ring is lent to a backend, or about to be.
    pub(super) fn lends(&self, ring: u16) -> bool {
        let of_ring = |packet: &Packet| packet.descriptor.is_some_and(|(index, _)| index == ring);
        self.packets.iter().any(|packet| packet.lent && packet.state != State::Done && of_ring(packet))
    }

    /// Returns the descriptors of a ring that is about to stop, in order. Their packets stay under way, but for those whose
    /// payload goes with them; says how many of these were not even announced.
    pub(super) fn let_go(&mut self, ring: &mut Ring) -> u64 {
        let mut lost = 0;
        for packet in &mut self.packets {
            if let Some((index, head)) = packet.descriptor
                && index == ring.index()
            {
                packet.descriptor = None;
                match packet.state {
                    State::Sent if packet.lent => packet.state = State::Abandoned,
                    State::Waiting if packet.lent => {
                        packet.state = State::Done;
                        self.waiting -= 1;
                        lost += 1;
                    }
                    _ => {}
                }
                // A ring that cannot be written was parked; its guest gets nothing more.
                let _ = ring.complete(head, 0);
            }
        }
        lost
    }

    #[inline]
    pub(super) fn push(&mut self, packet: Packet) {
        if packet.state == State::Waiting {
            if self.waiting == 0 {
                self.first_waiting = self.packets.len();
            }
            self.waiting += 1;
        }
        self.packets.push_back(packet);
    }

    /// Puts the announcements of waiting packets into `messages`, as many as fit, and says how many.
    #[inline]
    pub(super) fn announcements(&self, lease: LeaseId, route: Route, messages: &mut [[u64; 2]]) -> usize {
        let (mut place, mut count) = (self.first_waiting, 0);
        for packet in self.packets.range(place..) {
            if count == messages.len().min(self.waiting) {
                break;
            }
            if packet.state == State::Waiting
                && let Some(buffer) = packet.buffer
            {
                let message = NetMessage {
                    opcode: Opcode::Transmit,
                    lease,
                    generation: route.generation,
                    sequence: self.sequence(place),
                    line: buffer.start().line(),
                    bytes: packet.bytes,
                    more: packet.lent,
                };
                messages[count] = message.encode();
                count += 1;
            }
            place += 1;
        }
        count
    }

    /// Notes that the first `count` of the waiting packets were announced.
    #[inline]
    pub(super) fn announced(&mut self, count: usize) {
        let mut left = count;
        let mut place = self.first_waiting;
        for packet in self.packets.range_mut(place..) {
            if left == 0 {
                break;
            }
            if packet.state == State::Waiting {
                packet.state = State::Sent;
                left -= 1;
            }
            place += 1;
        }
        self.first_waiting = place;
        self.waiting -= count - left;
    }

    /// Notes the end of the transmission of `count` packets, of which `sequence` is the first. What is not under way, or
    /// was not announced, is passed over.
    #[inline]
    pub(super) fn acknowledge(&mut self, sequence: u16, count: u16, status: Status) {
        let first = usize::from(sequence.wrapping_sub(self.first));
        let end = (first + usize::from(count)).min(self.packets.len());
        if first >= end {
            return;
        }
        let announced = |packet: &&mut Packet| matches!(packet.state, State::Sent | State::Abandoned);
        let sent = self.packets.range_mut(first..end).filter(announced);
        match status {
            Status::Sent | Status::Dropped => sent.for_each(|packet| packet.state = State::Done),
            // Either side may hear of a new generation first.
            Status::NotYet | Status::Stale => {
                for packet in sent {
                    if packet.state == State::Abandoned {
                        packet.state = State::Done;
                        continue;
                    }
                    packet.state = State::Waiting;
                    self.waiting += 1;
                    self.retry = true;
                }
                self.first_waiting = self.first_waiting.min(first);
            }
        }
    }

    /// Takes the packet at the front if it is done with.
    #[inline]
    pub(super) fn pop_done(&mut self) -> Option<Packet> {
        if self.packets.front()?.state != State::Done {
            return None;
        }
        self.first = self.first.wrapping_add(1);
        self.first_waiting = self.first_waiting.saturating_sub(1);
        self.packets.pop_front()
    }

    fn sequence(&self, place: usize) -> u16 {
        // Far fewer than there are numbers.
        self.first.wrapping_add(u16::try_from(place).unwrap_or(u16::MAX))
    }
}

const _: () = assert!(UNDER_WAY_MAX <= u16::MAX as usize / 2);

#[cfg(test)]
mod tests {
    use super::*;
    use cxl_pool::{Area, LineCount, LineOffset};
    use pod_protocol::ids::{ChannelId, LeaseGeneration};
    use vhost_frontend::BufferArea;

    fn waiting(area: &mut BufferArea) -> Packet {
        Packet { descriptor: None, buffer: area.alloc(64), bytes: 64, lent: false, state: State::Waiting }
    }

    fn refused() -> Packet {
        Packet { descriptor: None, buffer: None, bytes: 0, lent: false, state: State::Done }
    }

    /// Announces up to `room` packets and returns their sequence numbers.
    fn announce(packets: &mut UnderWay, room: usize) -> Vec<u16> {
        let route = Route { channel: ChannelId::new(1), generation: LeaseGeneration::new(1) };
        let mut messages = vec![[0; 2]; room];
        let count = packets.announcements(LeaseId::MAX, route, &mut messages);
        packets.announced(count);
        let sequence = |words: &[u64; 2]| NetMessage::decode(*words).expect("a message").sequence;
        messages[..count].iter().map(sequence).collect()
    }

    fn returned(packets: &mut UnderWay) -> usize {
        std::iter::from_fn(|| packets.pop_done()).count()
    }

    #[test]
    fn packets_are_announced_once_and_returned_in_order() {
        let mut area = BufferArea::new(Area::new(LineOffset::new(0), LineCount::new(1024)), 64);
        let mut packets = UnderWay::new();
        // Around the end of the numbers.
        packets.first = u16::MAX - 1;
        for _ in 0..3 {
            packets.push(waiting(&mut area));
        }
        packets.push(refused());
        packets.push(waiting(&mut area));
        assert_eq!(announce(&mut packets, 2), [u16::MAX - 1, u16::MAX]);
        assert_eq!(announce(&mut packets, 8), [0, 2]);
        assert_eq!((announce(&mut packets, 8), packets.waiting()), (vec![], 0));
        packets.acknowledge(0, 3, Status::Sent);
        assert_eq!(returned(&mut packets), 0, "the first two are still under way");
        packets.acknowledge(u16::MAX - 1, 2, Status::Dropped);
        assert_eq!(returned(&mut packets), 5);
        packets.acknowledge(u16::MAX - 1, 200, Status::Sent);
        packets.push(waiting(&mut area));
        packets.acknowledge(3, 1, Status::Sent);
        assert_eq!(returned(&mut packets), 0, "what was not announced cannot be acknowledged");
        assert_eq!(announce(&mut packets, 8), [3]);
    }

    #[test]
    fn what_the_backend_was_not_ready_for_is_announced_again_and_in_order() {
        let mut area = BufferArea::new(Area::new(LineOffset::new(0), LineCount::new(1024)), 64);
        let mut packets = UnderWay::new();
        for _ in 0..6 {
            packets.push(waiting(&mut area));
        }
        assert_eq!(announce(&mut packets, 5), [0, 1, 2, 3, 4]);
        packets.acknowledge(0, 1, Status::Sent);
        packets.acknowledge(1, 2, Status::NotYet);
        assert!(packets.retry);
        assert_eq!(returned(&mut packets), 1);
        assert_eq!(packets.waiting(), 3);
        assert_eq!(announce(&mut packets, 8), [1, 2, 5]);
        packets.acknowledge(2, 4, Status::Sent);
        assert_eq!(returned(&mut packets), 0);
        packets.send_again();
        assert_eq!(announce(&mut packets, 8), [1], "the others were acknowledged");
        packets.acknowledge(1, 1, Status::Sent);
        assert_eq!(returned(&mut packets), 5);
    }
}
