//! The packets of a port that are not acknowledged yet, in order.

use std::collections::VecDeque;

use pod_protocol::ids::LeaseId;
use pod_protocol::objects::Route;
use vhost_frontend::{Buffer, Ring};

use super::rails::RailSet;
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
    /// What has the same number stays in order.
    pub(super) flow: u32,
    /// The number of the rail that it is, or will be, announced over.
    pub(super) rail: u8,
    pub(super) state: State,
}

impl Packet {
    /// One that only waits for its turn to be returned.
    #[inline]
    pub(super) const fn refused(descriptor: Option<(u16, u16)>) -> Self {
        Self { descriptor, buffer: None, bytes: 0, lent: false, flow: 0, rail: 0, state: State::Done }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// To be announced.
    Waiting,
    /// Announced over its rail.
    Sent,
    /// As [`State::Sent`], but it was given up, or its payload is gone: it is not announced again.
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
        self.awaits_on(RailSet::ALL)
    }

    /// Whether some were announced over these rails and not acknowledged.
    pub(super) fn awaits_on(&self, rails: RailSet) -> bool {
        let awaited = |packet: &Packet| matches!(packet.state, State::Sent | State::Abandoned);
        self.packets.iter().any(|packet| awaited(packet) && rails.contains(packet.rail))
    }

    /// Announces everything again that was not acknowledged.
    pub(super) fn send_again(&mut self) {
        self.retry = false;
        self.send_again_on(RailSet::ALL);
    }

    /// Gives each packet the number that its rail has now. What was announced over one that is no more is announced again.
    pub(super) fn renumber(&mut self, number: impl Fn(u8) -> Option<u8>) {
        for packet in &mut self.packets {
            match (number(packet.rail), packet.state) {
                (Some(rail), _) => packet.rail = rail,
                (None, State::Sent) => {
                    packet.state = State::Waiting;
                    self.waiting += 1;
                    self.first_waiting = 0;
                }
                (None, State::Abandoned) => packet.state = State::Done,
                (None, State::Waiting | State::Done) => {}
            }
        }
    }

    /// Gives waiting packets another rail, where theirs is to be left.
    pub(super) fn reroute(&mut self, leave: impl Fn(u8) -> bool, rail_of: impl Fn(u32) -> u8) {
        if self.waiting == 0 {
            return;
        }
        let waiting = self.packets.iter_mut().filter(|packet| packet.state == State::Waiting);
        waiting.filter(|packet| leave(packet.rail)).for_each(|packet| packet.rail = rail_of(packet.flow));
    }

    /// Whether there is any that is not acknowledged.
    pub(super) fn has_any(&self) -> bool {
        self.packets.iter().any(|packet| packet.state != State::Done)
    }

    /// Gives up everything: nothing of it is announced any more. Says how many those are that may not have been sent.
    pub(super) fn give_up(&mut self) -> usize {
        self.retry = false;
        let waiting = self.drop_waiting();
        let announced = self.packets.iter_mut().filter(|packet| packet.state == State::Sent);
        // Their buffers are the backend's until it has answered.
        waiting + announced.map(|packet| packet.state = State::Abandoned).count()
    }

    /// Gives up what waits, and says how many those are.
    pub(super) fn drop_waiting(&mut self) -> usize {
        let waiting = self.packets.iter_mut().filter(|packet| packet.state == State::Waiting);
        waiting.for_each(|packet| packet.state = State::Done);
        std::mem::take(&mut self.waiting)
    }

    /// Announces everything again that was announced over these rails and not acknowledged.
    pub(super) fn send_again_on(&mut self, rails: RailSet) {
        if rails == RailSet::NONE {
            return;
        }
        self.first_waiting = 0;
        for packet in self.packets.iter_mut().filter(|packet| rails.contains(packet.rail)) {
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

    /// The number of the packet that comes next.
    pub(super) fn next_number(&self) -> u16 {
        // Never more than a few.
        self.first.wrapping_add(u16::try_from(self.packets.len()).unwrap_or(u16::MAX))
    }

    /// Whether memory of packets that came before this one is lent to a backend, or about to be.
    pub(super) fn lends_before(&self, number: u16) -> bool {
        let before = usize::from(number.wrapping_sub(self.first));
        // Where all of them are gone the distance is that of numbers that have wrapped around.
        before <= self.packets.len()
            && self.packets.range(..before).any(|packet| packet.lent && packet.state != State::Done)
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

    /// Puts the announcements of packets that wait for a rail with this route into `messages`, as many as fit, and says how many.
    #[inline]
    pub(super) fn announcements(
        &self,
        lease: LeaseId,
        (rail, route): (u8, Route),
        messages: &mut [[u64; 2]],
    ) -> usize {
        let (mut place, mut count) = (self.first_waiting, 0);
        for packet in self.packets.range(place..) {
            if count == messages.len().min(self.waiting) {
                break;
            }
            if packet.state == State::Waiting
                && packet.rail == rail
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

    /// Notes that the first `count` of the packets that wait for a rail were announced.
    #[inline]
    pub(super) fn announced(&mut self, rail: u8, count: usize) {
        let mut left = count;
        let mut place = self.first_waiting;
        let mut passed_over = None;
        for packet in self.packets.range_mut(place..) {
            if left == 0 {
                break;
            }
            if packet.state == State::Waiting {
                if packet.rail == rail {
                    packet.state = State::Sent;
                    left -= 1;
                } else {
                    passed_over = passed_over.or(Some(place));
                }
            }
            place += 1;
        }
        self.first_waiting = passed_over.unwrap_or(place);
        self.waiting -= count - left;
    }

    /// Notes the end of the transmission of `count` packets over a rail, of which `sequence` is the first. What is not under way, or
    /// was not announced there, is passed over. True if some were given back: they wait again.
    #[inline]
    pub(super) fn acknowledge(&mut self, rail: u8, sequence: u16, count: u16, status: Status) -> bool {
        let first = usize::from(sequence.wrapping_sub(self.first));
        let end = (first + usize::from(count)).min(self.packets.len());
        if first >= end {
            return false;
        }
        let announced = |packet: &&mut Packet| {
            matches!(packet.state, State::Sent | State::Abandoned) && packet.rail == rail
        };
        let sent = self.packets.range_mut(first..end).filter(announced);
        match status {
            Status::Sent | Status::Dropped => {
                sent.for_each(|packet| packet.state = State::Done);
                false
            }
            // Either side may hear of a new generation first.
            Status::NotYet | Status::Stale | Status::Unreachable => {
                let mut any = false;
                for packet in sent {
                    if packet.state == State::Abandoned {
                        packet.state = State::Done;
                        continue;
                    }
                    packet.state = State::Waiting;
                    self.waiting += 1;
                    any = true;
                }
                self.first_waiting = self.first_waiting.min(first);
                any
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
        let buffer = area.alloc(64);
        Packet { descriptor: None, buffer, bytes: 64, lent: false, flow: 0, rail: 0, state: State::Waiting }
    }

    /// Announces up to `room` packets and returns their sequence numbers.
    fn announce(packets: &mut UnderWay, room: usize) -> Vec<u16> {
        announce_over(packets, 0, room)
    }

    fn announce_over(packets: &mut UnderWay, rail: u8, room: usize) -> Vec<u16> {
        let route = Route { channel: ChannelId::new(1), generation: LeaseGeneration::new(1) };
        let mut messages = vec![[0; 2]; room];
        let count = packets.announcements(LeaseId::MAX, (rail, route), &mut messages);
        packets.announced(rail, count);
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
        packets.push(Packet::refused(None));
        packets.push(waiting(&mut area));
        assert_eq!(announce(&mut packets, 2), [u16::MAX - 1, u16::MAX]);
        assert_eq!(announce(&mut packets, 8), [0, 2]);
        assert_eq!((announce(&mut packets, 8), packets.waiting()), (vec![], 0));
        packets.acknowledge(0, 0, 3, Status::Sent);
        assert_eq!(returned(&mut packets), 0, "the first two are still under way");
        packets.acknowledge(0, u16::MAX - 1, 2, Status::Dropped);
        assert_eq!(returned(&mut packets), 5);
        packets.acknowledge(0, u16::MAX - 1, 200, Status::Sent);
        packets.push(waiting(&mut area));
        packets.acknowledge(0, 3, 1, Status::Sent);
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
        packets.acknowledge(0, 0, 1, Status::Sent);
        assert!(packets.acknowledge(0, 1, 2, Status::NotYet));
        assert_eq!(returned(&mut packets), 1);
        assert_eq!(packets.waiting(), 3);
        assert_eq!(announce(&mut packets, 8), [1, 2, 5]);
        packets.acknowledge(0, 2, 4, Status::Sent);
        assert_eq!(returned(&mut packets), 0);
        packets.send_again();
        assert_eq!(announce(&mut packets, 8), [1], "the others were acknowledged");
        packets.acknowledge(0, 1, 1, Status::Sent);
        assert_eq!(returned(&mut packets), 5);
    }

    #[test]
    fn rails_are_announced_and_acknowledged_apart() {
        let mut area = BufferArea::new(Area::new(LineOffset::new(0), LineCount::new(1024)), 64);
        let mut packets = UnderWay::new();
        for number in 0..8_u8 {
            let flow = u32::from(number % 2);
            packets.push(Packet { flow, rail: number % 2, ..waiting(&mut area) });
        }
        assert_eq!(announce_over(&mut packets, 1, 3), [1, 3, 5]);
        assert_eq!(announce_over(&mut packets, 0, 8), [0, 2, 4, 6]);
        assert!(packets.awaits_on(RailSet::of(0)) && packets.awaits_on(RailSet::of(1)));
        // A run speaks of one rail only, whatever its numbers cover.
        assert!(!packets.acknowledge(0, 0, 8, Status::Sent));
        assert!(!packets.awaits_on(RailSet::of(0)) && packets.awaits_on(RailSet::of(1)));
        assert_eq!(returned(&mut packets), 1);
        assert!(packets.acknowledge(1, 1, 8, Status::Unreachable));
        assert!(!packets.awaits());
        packets.reroute(|rail| rail == 1, |_| 0);
        assert!(announce_over(&mut packets, 1, 8).is_empty());
        assert_eq!(announce_over(&mut packets, 0, 8), [1, 3, 5, 7], "in order");
        packets.renumber(|_| None);
        assert_eq!(packets.waiting(), 4, "all of them again");
        assert_eq!(packets.drop_waiting(), 4);
        assert_eq!((packets.waiting(), returned(&mut packets)), (0, 7));
    }
}
