//! From the backlog of a NIC to the wire, in order.

use std::time::Instant;

use cxl_pool::Memory;
use pod_protocol::ids::ChannelId;

use super::Backend;
use super::finishing::Progress;
use super::outgoing::{complete, gather, piece};
use super::registration::RegistrationIndex;
use crate::channel_end::ChannelEnd;
use crate::counters::DropReason;
use crate::message::{NetMessage, Status};
use crate::nic::Batch;
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32, VnetHeader, WireCost};

/// A packet on its way to the wire.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outgoing {
    pub(super) message: NetMessage,
    pub(super) channel: ChannelId,
    pub(super) registration: RegistrationIndex,
    /// As it was checked.
    pub(super) header: VnetHeader,
    /// In which VLAN it goes out.
    pub(super) vlan: Option<u16>,
    /// Others of this NIC get a copy of it.
    pub(super) flooded: bool,
    /// Of a packet that has to be finished for the NIC: how many of its frames went out.
    pub(super) frames_sent: u32,
}

impl Outgoing {
    /// The length of its frame.
    #[inline]
    pub(super) fn frame_bytes(&self) -> u64 {
        // No packet is shorter than its header: that was checked.
        u64::from(self.message.bytes).saturating_sub(HEADER_BYTES as u64)
    }

    /// What it comes to on the wire.
    #[inline]
    pub(super) fn wire_cost(&self) -> WireCost {
        self.header.wire_cost(self.message.bytes.saturating_sub(HEADER_BYTES_U32))
    }
}

impl<M: Memory> Backend<M> {
    /// Gives the NIC what waits for it. Returns whether anything moved.
    pub(super) fn send_backlog(&mut self, place: usize) -> bool {
        let port = &mut self.ports[place];
        if port.backlog.is_empty() {
            return false;
        }
        if port.has_wire() {
            if port.gives_waiting_back {
                return self.give_waiting_back(place);
            }
            return self.send_to_wire(place);
        }
        let given_up = port.is_given_up();
        // Those who have moved elsewhere do not wait any longer.
        let mut backlog = std::mem::take(&mut port.backlog);
        let before = backlog.len();
        let (port, channels) = (&mut self.ports[place], &mut self.channels);
        // Those that nobody waits for any longer.
        let mut flooded = Vec::new();
        backlog.retain(|packet| {
            let status = if let Some(status) = port.status_before_sending(packet) {
                status
            } else if let Some(registration) = &mut port.registrations[packet.registration.get()] {
                if registration.object.has_other_rails {
                    registration.closed = true;
                    Status::Unreachable
                } else if given_up {
                    registration.counters.count_drop(DropReason::LinkDown);
                    if packet.flooded {
                        flooded.push(*packet);
                        return false;
                    }
                    Status::Dropped
                } else if registration.lends() {
                    registration.given_back.note(&packet.message);
                    Status::NotYet
                } else {
                    return true;
                }
            } else {
                Status::Stale
            };
            answer(channels, packet, status);
            false
        });
        for packet in flooded {
            self.deliver_flooded(place, &packet);
            answer(&mut self.channels, &packet, Status::Dropped);
        }
        let any = backlog.len() < before;
        self.ports[place].backlog = backlog;
        any
    }

    fn give_waiting_back(&mut self, place: usize) -> bool {
        if !self.may_act() {
            return false;
        }
        let (port, channels) = (&mut self.ports[place], &mut self.channels);
        port.gives_waiting_back = false;
        port.give_back_waiting(|packet| answer(channels, packet, Status::NotYet));
        true
    }

    fn send_to_wire(&mut self, place: usize) -> bool {
        let mut any = false;
        loop {
            let port = &mut self.ports[place];
            port.backlog.choose(|| *self.now.get_or_insert_with(Instant::now));
            while let Some(packet) = port.backlog.front()
                && let Some(status) = port.status_before_sending(packet)
            {
                answer(&mut self.channels, packet, status);
                port.backlog.pop_front();
                any = true;
            }
            if let Some(packet) = port.backlog.front()
                && !port.nic.identity().offloads.contains(packet.header.required())
            {
                if !self.may_act() {
                    return any;
                }
                match self.send_unfinished(place) {
                    Some(true) => {
                        any = true;
                        continue;
                    }
                    Some(false) => return true,
                    None => return any,
                }
            }
            let mut outbox = std::mem::take(&mut self.outbox);
            let whole = self.fill(place, &mut outbox);
            let count = outbox.len();
            // Right before it sends: whoever stands still after that has sent no more than a batch.
            let sends = count > 0 && self.may_act();
            let outcome = if sends { self.ports[place].nic.transmit(&outbox) } else { Ok(0) };
            self.outbox = outbox;
            if count == 0 {
                if whole {
                    return any;
                }
                // Nothing but the front one's list can be wrong here.
                self.refuse_front(place);
                any = true;
                continue;
            }
            let sent = match outcome {
                Ok(sent) => sent,
                Err(error) => {
                    self.ports[place].check(Err(error), &self.tell);
                    return any;
                }
            };
            let (mut packets, mut bytes, mut end) = (0, 0, 0);
            for position in 0..sent {
                let port = &mut self.ports[place];
                let Some(packet) = port.backlog.pop_front() else { break };
                let refused = port.nic.refused().contains(&position);
                if refused {
                    port.count_refused_packet(&packet);
                } else {
                    packets += 1;
                    bytes += packet.frame_bytes();
                    port.count_sent(&packet);
                }
                if packet.flooded {
                    self.deliver_flooded(place, &packet);
                }
                // Mostly the same one as before.
                if self.channels.get(end).is_none_or(|it| it.object().id != packet.channel) {
                    let found = self.channels.iter().position(|it| it.object().id == packet.channel);
                    let Some(found) = found else { continue };
                    end = found;
                }
                let status = if refused { Status::Dropped } else { Status::Sent };
                complete(&mut self.channels[end], &packet.message, status);
            }
            let counters = &self.ports[place].counters;
            counters.tx_packets.add(packets);
            counters.tx_bytes.add(bytes);
            any |= sent > 0;
            if sent < count {
                return any;
            }
        }
    }

    /// Puts the packets at the front that the NIC can send as they are into `outbox`, as many as fit. False if it ended at one
    /// that does not lie where it may.
    fn fill(&self, place: usize, outbox: &mut Batch) -> bool {
        let port = &self.ports[place];
        let able = port.nic.identity().offloads;
        outbox.clear();
        for packet in port.backlog.chosen() {
            if outbox.is_full()
                || port.status_before_sending(packet).is_some()
                || !able.contains(packet.header.required())
            {
                break;
            }
            if let Some(vlan) = packet.vlan {
                if !self.push_tagged(port, packet, vlan, outbox) {
                    return false;
                }
                continue;
            }
            if !packet.message.more {
                outbox.push_frame(piece(&packet.message));
                continue;
            }
            let Some(registration) = &port.registrations[packet.registration.get()] else { break };
            if !gather(&self.memory, registration, &packet.message, |it| outbox.push_piece(it)) {
                outbox.abandon_frame();
                return false;
            }
            outbox.end_frame();
        }
        true
    }

    /// Refuses the packet at the front.
    fn refuse_front(&mut self, place: usize) {
        let port = &mut self.ports[place];
        let Some(packet) = port.backlog.pop_front() else { return };
        if let Some(registration) = &port.registrations[packet.registration.get()] {
            registration.counters.count_drop(DropReason::OutsideArea);
        }
        answer(&mut self.channels, &packet, Status::Dropped);
    }

    /// Sends the packet at the front as frames that the NIC can send. Says whether all of it went out, or is refused;
    /// nothing if the NIC failed.
    fn send_unfinished(&mut self, place: usize) -> Option<bool> {
        let packet = *self.ports[place].backlog.front()?;
        let mut source = std::mem::take(&mut self.source);
        source.clear();
        let registration = self.ports[place].registrations[packet.registration.get()].as_ref();
        let whole = registration
            .is_some_and(|it| gather(&self.memory, it, &packet.message, |piece| source.push(piece)));
        let outcome = whole.then(|| self.send_finished(place, &packet, &source));
        self.source = source;
        let Some(outcome) = outcome else {
            self.refuse_front(place);
            return Some(true);
        };
        let port = &mut self.ports[place];
        let status = match outcome {
            Ok(Ok(Progress::Whole)) => {
                port.count_sent(&packet);
                if packet.flooded {
                    self.deliver_flooded(place, &packet);
                }
                Status::Sent
            }
            Ok(Ok(Progress::Refused)) => {
                port.count_refused_packet(&packet);
                if packet.flooded {
                    self.deliver_flooded(place, &packet);
                }
                Status::Dropped
            }
            Ok(Ok(Progress::Until(frames))) => {
                if let Some(front) = port.backlog.front_mut() {
                    front.frames_sent = frames;
                }
                return (frames > packet.frames_sent).then_some(false);
            }
            Ok(Err(_)) => {
                if let Some(registration) = &port.registrations[packet.registration.get()] {
                    registration.counters.count_drop(DropReason::BadHeader);
                }
                Status::Dropped
            }
            Err(error) => {
                port.check(Err(error), &self.tell);
                return None;
            }
        };
        self.ports[place].backlog.pop_front();
        answer(&mut self.channels, &packet, status);
        Some(true)
    }
}

pub(super) fn answer<M: Memory>(channels: &mut [ChannelEnd<M>], packet: &Outgoing, status: Status) {
    if let Some(end) = channels.iter_mut().find(|end| end.object().id == packet.channel) {
        complete(end, &packet.message, status);
    }
}
