//! From the frontends to the wire, or to a local instance.

use cxl_pool::{Area, Memory};

use super::Backend;
use super::registration::{Registration, RegistrationIndex};
use super::wire::Outgoing;
use crate::channel_end::ChannelEnd;
use crate::counters::DropReason;
use crate::ethernet::Addresses;
use crate::message::{self, MAX_PACKET_BYTES, NetMessage, Opcode, Status};
use crate::nic::Piece;
use crate::offloads::Offloads;
use crate::scattered;
use crate::source_guard;
use crate::vlan;
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32, VnetHeader};

/// What is looked at of a packet: the virtio-net header and the addresses.
const FRONT_BYTES: usize = HEADER_BYTES + Addresses::BYTES;

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
                self.channels[channel].counters().unreadable.add(1);
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
            Sender::Refused(status) => {
                let end = &mut self.channels[channel];
                if !self.leases.contains_key(&first.lease) {
                    end.counters().strays.add(run.len() as u64);
                }
                return refuse(end, status);
            }
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
        if to_wire && !port.backlog.has_room(index) {
            registration.counters.count_drop(DropReason::Backlog);
            self.receivers = receivers;
            self.source = source;
            return Some(Status::Dropped);
        }
        if to_wire {
            let registration = index;
            port.backlog.push(Outgoing { message, channel, registration, header, vlan, frames_sent: 0 });
        }
        if !receivers.is_empty() {
            self.deliver_locally(place, index, &source, header, &receivers);
        }
        self.receivers = receivers;
        self.source = source;
        if to_wire { None } else { Some(Status::Sent) }
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

/// Splits the front of a packet into its header and its addresses.
#[inline]
pub(super) fn split(front: [u8; FRONT_BYTES]) -> (VnetHeader, Addresses) {
    let mut header = [0; HEADER_BYTES];
    let mut addresses = [0; Addresses::BYTES];
    header.copy_from_slice(&front[..HEADER_BYTES]);
    addresses.copy_from_slice(&front[HEADER_BYTES..]);
    (VnetHeader::parse(header), Addresses::parse(addresses))
}

#[inline]
pub(super) fn complete<M: Memory>(end: &mut ChannelEnd<M>, message: &NetMessage, status: Status) {
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
pub(super) fn piece(message: &NetMessage) -> Piece {
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
