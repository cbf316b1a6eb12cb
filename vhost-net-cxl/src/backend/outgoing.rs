//! From the frontends to the wire, or to a local instance.

use std::time::{Duration, Instant};

use cxl_pool::{Area, Memory};
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::RegistrationState;

use super::finishing::Progress;
use super::registration::{Registration, RegistrationIndex};
use super::{BACKLOG_PACKETS, Backend, Port};
use crate::channel_end::ChannelEnd;
use crate::counters::DropReason;
use crate::ethernet::Addresses;
use crate::message::{self, MAX_PACKET_BYTES, NetMessage, Opcode, Status};
use crate::nic::{Batch, Piece};
use crate::offloads::Offloads;
use crate::scattered;
use crate::source_guard;
use crate::vlan;
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32, VnetHeader};

/// How long packets wait for a link that is down. By then the controller has moved the instance, if it can: its
/// frontend sends the same packets again elsewhere. If it cannot, they are lost as on any cable.
const LINK_DOWN_HOLD: Duration = Duration::from_secs(1);
/// What is looked at of a packet: the virtio-net header and the addresses.
const FRONT_BYTES: usize = HEADER_BYTES + Addresses::BYTES;

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
    /// Of a packet that has to be finished for the NIC: how many of its frames went out.
    pub(super) frames_sent: u32,
}

/// Whose packet it is, or how its sender has to be answered.
enum Sender {
    Known(usize, RegistrationIndex),
    Refused(Status),
}

impl<M: Memory> Backend<M> {
    /// Takes what a frontend sent. Returns whether that was anything.
    pub(super) fn serve_frontend(&mut self, channel: usize) -> bool {
        let end = &mut self.channels[channel];
        if !end.ready() {
            return false;
        }
        let mut inbox = std::mem::take(&mut self.inbox);
        let count = end.receive(&mut inbox);
        let mut rest = &inbox[..count];
        while let Some(words) = rest.first() {
            // What a newer peer may say and we do not understand needs no answer.
            let Some(message) = NetMessage::decode(*words) else {
                rest = &rest[1..];
                continue;
            };
            let mut taken = 1;
            match message.opcode {
                Opcode::Transmit => {
                    taken = rest.iter().take_while(|other| message::same_flow(words, other)).count();
                    self.transmit_run(channel, &message, &rest[..taken]);
                }
                Opcode::ReceiveDone => self.receive_done(channel, &message),
                Opcode::Offloads => self.accept_offloads(channel, &message),
                Opcode::TransmitDone | Opcode::Receive => {}
            }
            rest = &rest[taken..];
        }
        self.inbox = inbox;
        count > 0
    }

    /// Takes packets of one sender: messages that differ only in their buffers and sequence numbers.
    fn transmit_run(&mut self, channel: usize, first: &NetMessage, run: &[[u64; 2]]) {
        let messages = || run.iter().filter_map(|words| NetMessage::decode(*words));
        let refuse = |end: &mut ChannelEnd<M>, status| messages().for_each(|it| complete(end, &it, status));
        let (place, index) = match self.sender(first) {
            Sender::Known(port, index) => (port, index),
            Sender::Refused(status) => return refuse(&mut self.channels[channel], status),
        };
        let Some(registration) = &self.ports[place].registrations[index.get()] else { return };
        let (area, ram) = (registration.object.tx_area, registration.object.ram_area);
        if registration.object.channel != self.channels[channel].object().id {
            for _ in messages() {
                registration.counters.count_drop(DropReason::OutsideArea);
            }
            return refuse(&mut self.channels[channel], Status::Dropped);
        }
        if !M::COHERENT {
            // What is about to be read may have been brought into our cache by a prefetch since its last use.
            let whole = !self.ports[place].nic.identity().cache_bypassing;
            for message in messages().filter(|message| lies_in(area, message)) {
                let front = (HEADER_BYTES + source_guard::FRONT_BYTES) as u64;
                let bytes = u64::from(message.bytes).min(if whole { u64::MAX } else { front });
                let bytes = if message.more { u64::from(scattered::BUFFER_BYTES) } else { bytes };
                self.memory.invalidate(message.line.bytes(), bytes);
            }
            self.memory.full_fence();
            if whole && let Some(ram) = ram {
                self.invalidate_payloads(messages().filter(|message| lies_in(area, message)), ram);
            }
            for message in messages().filter(|message| lies_in(area, message)) {
                self.memory.prefetch(message.line.bytes());
            }
        }
        for message in messages() {
            if let Some(status) = self.transmit(channel, place, index, message, lies_in(area, &message)) {
                complete(&mut self.channels[channel], &message, status);
            }
        }
    }

    /// Invalidates what scattered packets consist of besides their buffers. What does not lie where it may is refused
    /// later.
    fn invalidate_payloads(&self, messages: impl Iterator<Item = NetMessage>, ram: Area) {
        let mut any = false;
        for message in messages.filter(|message| message.more) {
            let mut front = true;
            scattered::pieces(&self.memory, message.line.bytes(), message.bytes, ram, |piece| {
                if !std::mem::take(&mut front) {
                    self.memory.invalidate(piece.at, u64::from(piece.bytes));
                    any = true;
                }
            });
        }
        if any {
            self.memory.full_fence();
        }
    }

    fn sender(&self, message: &NetMessage) -> Sender {
        // Unknown: the controller has told the frontend, and not yet us.
        let Some(registrations) = self.leases.get(&message.lease) else {
            return Sender::Refused(Status::NotYet);
        };
        let mut newest_refusal = Status::Stale;
        for (port, index) in registrations {
            let Some(registration) = &self.ports[*port].registrations[index.get()] else { continue };
            let ahead = message.generation.get().wrapping_sub(registration.object.generation.get());
            if ahead == 0 && registration.sends() {
                return Sender::Known(*port, *index);
            }
            // Half of the numbers lie ahead, half behind. A standby registration of this generation is about to become
            // active.
            if ahead <= u16::MAX / 2 {
                newest_refusal = Status::NotYet;
            }
        }
        Sender::Refused(newest_refusal)
    }

    /// Checks a packet and passes it on. Answers at once unless it waits for the wire.
    #[inline]
    fn transmit(
        &mut self,
        channel: usize,
        place: usize,
        index: RegistrationIndex,
        message: NetMessage,
        in_area: bool,
    ) -> Option<Status> {
        let channel = self.channels[channel].object().id;
        let port = &mut self.ports[place];
        let registration = port.registrations[index.get()].as_ref()?;
        let refuse = |reason| {
            registration.counters.count_drop(reason);
            Some(Status::Dropped)
        };
        if !in_area || message.more && registration.object.ram_area.is_none() {
            return refuse(DropReason::OutsideArea);
        }
        let mut front = [0; FRONT_BYTES];
        self.memory.read(message.line.bytes(), &mut front);
        let (header, addresses) = split(front);
        let frame_bytes = message.bytes - HEADER_BYTES_U32;
        let checked = header.check(frame_bytes, registration.object.mtu, registration.may_leave);
        // A frontend hands over clean headers; one that would still need cleaning was not checked by it.
        if checked != Ok(VnetHeader { buffers: 0, ..header }) {
            return refuse(DropReason::BadHeader);
        }
        if addresses.source != registration.object.mac {
            return refuse(DropReason::Spoofed);
        }
        let vlan = registration.object.policy.vlan;
        if vlan.is_some() {
            let mut frame_type = [0; 2];
            self.memory.read(message.line.bytes().saturating_add(FRONT_BYTES as u64), &mut frame_type);
            if vlan::is_tagged(frame_type) {
                return refuse(DropReason::Tagged);
            }
        }
        if let Some(guard) = &registration.guard {
            let mut front = [0; source_guard::FRONT_BYTES];
            let front = &mut front[..source_guard::FRONT_BYTES.min(frame_bytes as usize)];
            self.memory.read(message.line.bytes().saturating_add(HEADER_BYTES as u64), front);
            if !guard.permits(front) {
                return refuse(DropReason::SpoofedAddress);
            }
        }
        registration.counters.count_tx(frame_bytes);
        let mut receivers = std::mem::take(&mut self.receivers);
        let to_wire = port.switch.route(addresses, vlan, &mut receivers);
        let mut source = std::mem::take(&mut self.source);
        source.clear();
        if !receivers.is_empty() && !gather(&self.memory, registration, &message, |it| source.push(it)) {
            registration.counters.count_drop(DropReason::OutsideArea);
            self.receivers = receivers;
            self.source = source;
            return Some(Status::Dropped);
        }
        if to_wire && port.backlog.len() >= BACKLOG_PACKETS {
            registration.counters.count_drop(DropReason::Backlog);
            self.receivers = receivers;
            self.source = source;
            return Some(Status::Dropped);
        }
        if to_wire {
            let registration = index;
            port.backlog.push_back(Outgoing { message, channel, registration, header, vlan, frames_sent: 0 });
        }
        if !receivers.is_empty() {
            self.deliver_locally(place, index, &source, header, &receivers);
        }
        self.receivers = receivers;
        self.source = source;
        if to_wire { None } else { Some(Status::Sent) }
    }

    /// Gives the NIC what waits for it. Returns whether anything moved.
    pub(super) fn send_backlog(&mut self, place: usize) -> bool {
        let port = &mut self.ports[place];
        if port.backlog.is_empty() {
            return false;
        }
        if port.was_up && port.area.is_some() {
            return self.send_to_wire(place);
        }
        let since = *port.down_since.get_or_insert_with(Instant::now);
        let given_up = since.elapsed() > LINK_DOWN_HOLD;
        // Those who have moved elsewhere do not wait any longer.
        let before = port.backlog.len();
        for _ in 0..before {
            let Some(packet) = port.backlog.pop_front() else { break };
            let status = match port.status_before_sending(&packet) {
                Some(status) => status,
                None if given_up => {
                    if let Some(registration) = &port.registrations[packet.registration.get()] {
                        registration.counters.count_drop(DropReason::LinkDown);
                    }
                    Status::Dropped
                }
                // What is lent is not kept until the link comes back: by then it may be the guest's again.
                None if port.lends(&packet) => Status::NotYet,
                None => {
                    port.backlog.push_back(packet);
                    continue;
                }
            };
            answer(&mut self.channels, &packet, status);
        }
        self.ports[place].backlog.len() < before
    }

    fn send_to_wire(&mut self, place: usize) -> bool {
        let mut any = false;
        loop {
            let port = &mut self.ports[place];
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
            let port = &mut self.ports[place];
            let outcome = if count == 0 { Ok(0) } else { port.nic.transmit(&outbox) };
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
                    port.check(Err(error), &self.tell);
                    return any;
                }
            };
            let mut bytes = 0;
            let mut end = 0;
            for packet in port.backlog.drain(..sent) {
                bytes += u64::from(packet.message.bytes) - HEADER_BYTES as u64;
                // Mostly the same one as before.
                if self.channels.get(end).is_none_or(|it| it.object().id != packet.channel) {
                    let found = self.channels.iter().position(|it| it.object().id == packet.channel);
                    let Some(found) = found else { continue };
                    end = found;
                }
                complete(&mut self.channels[end], &packet.message, Status::Sent);
            }
            port.counters.tx_packets.add(sent as u64);
            port.counters.tx_bytes.add(bytes);
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
        for packet in &port.backlog {
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
            Ok(Ok(Progress::Whole)) => Status::Sent,
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
        port.backlog.pop_front();
        answer(&mut self.channels, &packet, status);
        Some(true)
    }

    /// Notes what a guest's driver accepts to receive.
    fn accept_offloads(&mut self, channel: usize, message: &NetMessage) {
        let channel = self.channels[channel].object().id;
        let accepts = Offloads::from_bits(message.bytes);
        let Some(registrations) = self.leases.get(&message.lease) else { return };
        for (port, index) in registrations {
            if let Some(registration) = &mut self.ports[*port].registrations[index.get()]
                && registration.object.channel == channel
            {
                registration.accepts = accepts;
            }
        }
        self.agree_on_offloads();
    }
}

impl Port {
    /// Whether payload of this packet, or of others of its sender, lies in the sender's memory.
    fn lends(&self, packet: &Outgoing) -> bool {
        let registration = self.registrations[packet.registration.get()].as_ref();
        registration.is_some_and(|it| it.object.ram_area.is_some())
    }

    /// How a packet has to be answered whose sender may not send it any more; nothing if it still may.
    #[inline]
    fn status_before_sending(&self, packet: &Outgoing) -> Option<Status> {
        match &self.registrations[packet.registration.get()] {
            Some(it) if it.object.generation != packet.message.generation => Some(Status::Stale),
            Some(it) if it.object.state == RegistrationState::Standby => Some(Status::Stale),
            Some(_) => None,
            None => Some(Status::Stale),
        }
    }
}

/// Splits the front of a packet into its header and its addresses.
#[inline]
pub(super) fn split(front: [u8; FRONT_BYTES]) -> (VnetHeader, Addresses) {
    let mut header = [0; HEADER_BYTES];
    let mut addresses = [0; Addresses::BYTES];
    header.copy_from_slice(&front[..HEADER_BYTES]);
    addresses.copy_from_slice(&front[HEADER_BYTES..]);
    (VnetHeader::parse(header), Addresses::parse(addresses))
}

fn answer<M: Memory>(channels: &mut [ChannelEnd<M>], packet: &Outgoing, status: Status) {
    if let Some(end) = channels.iter_mut().find(|end| end.object().id == packet.channel) {
        complete(end, &packet.message, status);
    }
}

#[inline]
fn complete<M: Memory>(end: &mut ChannelEnd<M>, message: &NetMessage, status: Status) {
    end.complete(NetMessage { opcode: Opcode::TransmitDone, ..*message }, status);
}

/// Whether a packet, or the front of a scattered one with the list of the rest, lies in an area, and can be one at all.
#[inline]
fn lies_in(area: Area, message: &NetMessage) -> bool {
    let bytes = u64::from(message.bytes);
    let (least, here) = if message.more {
        (scattered::FRONT_BYTES as usize, scattered::BUFFER_BYTES.into())
    } else {
        (FRONT_BYTES, bytes)
    };
    bytes > least as u64 && bytes <= MAX_PACKET_BYTES && area.contains(message.line.bytes(), here)
}

/// A packet in one piece.
#[inline]
fn piece(message: &NetMessage) -> Piece {
    Piece { at: message.line.bytes(), bytes: message.bytes }
}

/// Hands the pieces of a packet to `push`; false if it does not lie where it may.
#[inline]
pub(super) fn gather<M: Memory>(
    memory: &M,
    sender: &Registration,
    message: &NetMessage,
    mut push: impl FnMut(Piece),
) -> bool {
    if !message.more {
        push(piece(message));
        return true;
    }
    let ram = sender.object.ram_area;
    ram.is_some_and(|ram| scattered::pieces(memory, message.line.bytes(), message.bytes, ram, push))
}
