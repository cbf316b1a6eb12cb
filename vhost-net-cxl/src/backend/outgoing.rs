//! From the frontends to the wire, or to a local instance.

use cxl_pool::{Area, LINE_BYTES, Memory};

use super::Backend;
use super::direct;
use super::given_back::GivenBack;
use super::registration::{Registration, RegistrationIndex};
use super::share::Reach;
use super::wire::Outgoing;
use crate::channel_end::ChannelEnd;
use crate::counters::DropReason;
use crate::ethernet::Addresses;
use crate::message::{self, MAX_PACKET_BYTES, NetMessage, Opcode, REOPENS, Status};
use crate::nic::Piece;
use crate::offloads::Offloads;
use crate::scattered;
use crate::source_guard;
use crate::vlan;
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32, VnetHeader};

/// What is looked at of a packet: the virtio-net header and the addresses.
const FRONT_BYTES: usize = HEADER_BYTES + Addresses::BYTES;

/// So many packets ahead their fronts are asked for: as many lines as a CPU fetches at a time. More would hold it up.
const AHEAD_PACKETS: usize = 16;

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
                if status == Status::NotYet {
                    self.too_early.note((end.object().id, first.lease), messages());
                }
                if !self.leases.contains_key(&first.lease) {
                    end.counters().strays.add(run.len() as u64);
                }
                return refuse(end, status);
            }
        };
        let Some(registration) = &self.ports[place].registrations[index.get()] else { return };
        let area = registration.object.tx_area;
        if registration.object.channel != self.channels[channel].object().id {
            // It is another host that names this lease: no fault of the instance.
            let end = &mut self.channels[channel];
            end.counters().strays.add(run.len() as u64);
            return refuse(end, Status::Dropped);
        }
        if registration.object.has_other_rails && (registration.closed || !self.ports[place].is_able()) {
            if let Some(registration) = &mut self.ports[place].registrations[index.get()] {
                registration.closed = true;
            }
            // Before anybody here gets a copy of it: the frontend sends it again over another NIC.
            return refuse(&mut self.channels[channel], Status::Unreachable);
        }
        if !M::COHERENT {
            self.invalidate_run(place, registration, run);
        }
        let id = self.channels[channel].object().id;
        let vlan = registration.object.policy.vlan;
        let mut sender = direct::Sender::new((place, &self.ports[place]), index, (channel, id), vlan);
        for (position, message) in messages().enumerate() {
            if !M::COHERENT
                && let Some(ahead) = run.get(position + AHEAD_PACKETS).and_then(|it| NetMessage::decode(*it))
                && lies_in(area, &ahead)
            {
                fetch(&self.memory, &ahead);
            }
            let Some(registration) = &self.ports[place].registrations[index.get()] else { break };
            let checked = check(&self.memory, registration, &message, lies_in(area, &message));
            let (header, addresses) = match checked {
                Ok(checked) => checked,
                Err(reason) => {
                    registration.counters.count_drop(reason);
                    complete(&mut self.channels[channel], &message, Status::Dropped);
                    continue;
                }
            };
            if sender.is_on_wire(addresses.destination) && sender.goes_directly(&self.ports[place], header) {
                if !self.direct.push(&self.memory, registration, &sender, message, header) {
                    registration.counters.count_drop(DropReason::OutsideArea);
                    complete(&mut self.channels[channel], &message, Status::Dropped);
                }
                if self.direct.is_full() {
                    self.send_directly();
                }
                continue;
            }
            if let Some(status) = self.pass_on(&mut sender, message, header, addresses) {
                if status == Status::Sent
                    && let Some(registration) = &self.ports[place].registrations[index.get()]
                {
                    registration.count_sent(1, u64::from(message.bytes - HEADER_BYTES_U32));
                }
                complete(&mut self.channels[channel], &message, status);
            }
        }
        self.send_directly();
    }

    /// What is about to be read of packets may have been brought into our cache by a prefetch since its last use.
    fn invalidate_run(&self, place: usize, sender: &Registration, run: &[[u64; 2]]) {
        let (area, ram) = (sender.object.tx_area, sender.object.ram_area);
        let here = || {
            let messages = run.iter().filter_map(|words| NetMessage::decode(*words));
            messages.filter(move |message| lies_in(area, message))
        };
        let whole = !self.ports[place].nic.identity().cache_bypassing;
        let guarded = sender.guard.is_some();
        // A device reads the rest by itself.
        let front = if guarded { HEADER_BYTES + source_guard::FRONT_BYTES } else { LINE_BYTES } as u64;
        let mut any_scattered = false;
        for message in here() {
            let start = message.line.bytes();
            let own = if message.more { scattered::FRONT_BYTES } else { message.bytes };
            self.memory.invalidate(start, u64::from(own).min(if whole { u64::MAX } else { front }));
            if message.more {
                self.memory.invalidate(scattered::list(start), LINE_BYTES as u64);
                any_scattered = true;
            }
        }
        self.memory.full_fence();
        here().take(AHEAD_PACKETS).for_each(|message| fetch(&self.memory, &message));
        if let Some(ram) = ram.filter(|_| any_scattered) {
            let scattered = || here().filter(|message| message.more);
            self.invalidate_long_lists(scattered());
            if whole {
                self.invalidate_payloads(scattered(), ram);
            }
        }
    }

    /// Invalidates the lists of scattered packets that are longer than a line, of which the first one was invalidated.
    fn invalidate_long_lists(&self, messages: impl Iterator<Item = NetMessage>) {
        let mut any = false;
        for message in messages {
            let start = message.line.bytes();
            if scattered::is_long(&self.memory, start, message.bytes) {
                self.memory.invalidate(scattered::list(start), scattered::LIST_BYTES_MAX);
                any = true;
            }
        }
        if any {
            self.memory.full_fence();
        }
    }

    /// Invalidates what scattered packets consist of besides their buffers. What does not lie where it may is refused
    /// later.
    fn invalidate_payloads(&self, messages: impl Iterator<Item = NetMessage>, ram: Area) {
        let mut any = false;
        for message in messages {
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
            let ours = registration.object.generation;
            if message.generation == ours && registration.sends() {
                return Sender::Known(*port, *index);
            }
            // A standby registration of this generation is about to become active.
            if message.generation == ours || message.generation.is_newer_than(ours) {
                newest_refusal = Status::NotYet;
            }
        }
        Sender::Refused(newest_refusal)
    }

    /// Passes a checked packet on to whoever it is for. Answers at once unless it waits for the wire.
    fn pass_on(
        &mut self,
        sender: &mut direct::Sender,
        message: NetMessage,
        header: VnetHeader,
        addresses: Addresses,
    ) -> Option<Status> {
        let (place, index) = (sender.place, sender.registration);
        let port = &mut self.ports[place];
        let vlan = port.registrations[index.get()].as_ref()?.object.policy.vlan;
        let mut receivers = std::mem::take(&mut self.receivers);
        let mut source = std::mem::take(&mut self.source);
        let to_wire = port.switch.route(addresses, vlan, &mut receivers);
        let gives_back =
            if to_wire { port.gives_back(index, &message) } else { port.gives_back_local(index, &message) };
        if gives_back {
            (self.receivers, self.source) = (receivers, source);
            return Some(Status::NotYet);
        }
        let registration = port.registrations[index.get()].as_ref();
        source.clear();
        let fault = if !to_wire {
            // A frame to its own sender is for nobody.
            let whole = receivers.is_empty()
                || registration
                    .is_some_and(|it| gather(&self.memory, it, &message, |piece| source.push(piece)));
            (!whole).then_some(DropReason::OutsideArea)
        } else if receivers.is_empty() && sender.goes_directly(port, header) {
            sender.set_on_wire(addresses.destination);
            let pushed =
                registration.is_some_and(|it| self.direct.push(&self.memory, it, sender, message, header));
            (!pushed).then_some(DropReason::OutsideArea)
        } else {
            // What was sent before it comes first.
            self.send_directly();
            let backlog = &mut self.ports[place].backlog;
            let full = !backlog.has_room(index);
            if !full {
                let (registration, channel, flooded) = (index, sender.channel, !receivers.is_empty());
                let frames_sent = 0;
                let packet = Outgoing { message, channel, registration, header, vlan, flooded, frames_sent };
                backlog.push(packet);
            }
            full.then_some(DropReason::Backlog)
        };
        if let Some(reason) = fault {
            if let Some(registration) = &self.ports[place].registrations[index.get()] {
                registration.counters.count_drop(reason);
            }
        } else if !to_wire && !receivers.is_empty() {
            self.deliver_locally(place, index, &source, header, (&receivers, Reach::One));
        }
        self.receivers = receivers;
        self.source = source;
        if self.direct.is_full() {
            self.send_directly();
        }
        match fault {
            Some(_) => Some(Status::Dropped),
            None if to_wire => None,
            None => Some(Status::Sent),
        }
    }

    /// Notes what a guest's driver accepts to receive.
    fn accept_offloads(&mut self, channel: usize, message: &NetMessage) {
        let channel = self.channels[channel].object().id;
        let accepts = Offloads::from_bits(message.bytes);
        let leases = &self.leases;
        self.told.note((channel, message.lease), accepts, |lease| leases.contains_key(&lease));
        if message.sequence == REOPENS {
            self.too_early.reopen((channel, message.lease));
        }
        let Some(registrations) = leases.get(&message.lease) else { return };
        for (port, index) in registrations {
            if let Some(registration) = &mut self.ports[*port].registrations[index.get()]
                && registration.object.channel == channel
            {
                self.offloads_changed |= registration.told != Some(accepts);
                registration.told = Some(accepts);
                if message.sequence == REOPENS {
                    registration.closed = false;
                    registration.given_back = GivenBack::default();
                }
            }
        }
    }
}

/// Asks for what is looked at of a packet.
#[inline]
fn fetch<M: Memory>(memory: &M, message: &NetMessage) {
    memory.prefetch(message.line.bytes());
    if message.more {
        memory.prefetch(scattered::list(message.line.bytes()));
    }
}

/// Looks whether a packet is one that its sender may send, and returns its header and addresses.
#[inline]
fn check<M: Memory>(
    memory: &M,
    registration: &Registration,
    message: &NetMessage,
    in_area: bool,
) -> Result<(VnetHeader, Addresses), DropReason> {
    if !in_area || message.more && registration.object.ram_area.is_none() {
        return Err(DropReason::OutsideArea);
    }
    let mut front = [0; FRONT_BYTES];
    memory.read(message.line.bytes(), &mut front);
    let (header, addresses) = split(front);
    let frame_bytes = message.bytes - HEADER_BYTES_U32;
    let checked = header.check(frame_bytes, registration.object.mtu, registration.may_leave);
    // A frontend hands over clean headers; one that would still need cleaning was not checked by it.
    if checked != Ok(VnetHeader { buffers: 0, ..header }) {
        return Err(DropReason::BadHeader);
    }
    if addresses.source != registration.object.mac {
        return Err(DropReason::Spoofed);
    }
    if addresses.is_reserved() {
        // A bridge's message from a guest has a guarded port of the switch close, and with it the NIC of everybody here.
        return Err(DropReason::Reserved);
    }
    if registration.object.policy.vlan.is_some() {
        let mut frame_type = [0; 2];
        memory.read(message.line.bytes().saturating_add(FRONT_BYTES as u64), &mut frame_type);
        if vlan::is_tagged(frame_type) {
            return Err(DropReason::Tagged);
        }
    }
    if let Some(guard) = &registration.guard {
        let mut front = [0; source_guard::FRONT_BYTES];
        let front = &mut front[..source_guard::FRONT_BYTES.min(frame_bytes as usize)];
        memory.read(message.line.bytes().saturating_add(HEADER_BYTES as u64), front);
        if !guard.permits(front) {
            return Err(DropReason::SpoofedAddress);
        }
    }
    Ok((header, addresses))
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
    end.complete(transmit_done(message), status);
}

/// The completion of a packet but for how it ended.
#[inline]
pub(super) fn transmit_done(message: &NetMessage) -> NetMessage {
    NetMessage { opcode: Opcode::TransmitDone, ..*message }
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
