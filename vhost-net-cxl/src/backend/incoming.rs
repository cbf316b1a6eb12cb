//! From the wire, or from a local instance, to the frontends.

use std::time::Instant;

use cxl_pool::{LINE_BYTES, Memory};
use pod_protocol::worker::Task as _;

use super::Backend;
use super::finishing::read_packet;
use super::outgoing::split;
use super::receive_buffers::BUFFER_BYTES;
use super::registration::RegistrationIndex;
use super::share::{Free, Reach};
use crate::counters::{DropReason, FrameFault};
use crate::ethernet::Addresses;
use crate::message::{MAX_PACKET_BYTES, NetMessage, Opcode, Run};
use crate::nic::{BATCH_FRAMES, Batch, Piece};
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32, VnetHeader};

/// The part of a channel's room, and of a NIC's receive buffers, that is kept for those who have had less than they are
/// promised: one in so many.
const KEPT_PART: u32 = 4;
const FRONT_BYTES: usize = HEADER_BYTES + Addresses::BYTES;
/// So often a NIC is asked at most for what it has received by now. It may receive for ever, but has no more than this waiting.
const BATCHES_WAITING: usize = 4096 / BATCH_FRAMES;

impl<M: Memory> Backend<M> {
    /// Takes all that a NIC has received by now, before it is changed who gets that. Everything else goes on meanwhile: frontends find what is
    /// for them, and make room for more.
    pub(super) fn serve_nic_so_far(&mut self, place: usize) {
        self.now = None;
        for _ in 0..BATCHES_WAITING {
            if !self.serve_nic(place) || !self.batch.is_full() {
                break;
            }
            self.turn();
        }
    }

    /// Takes what a NIC received. Returns whether that was anything.
    pub(super) fn serve_nic(&mut self, place: usize) -> bool {
        if self.ports[place].failed || !self.may_act() {
            return false;
        }
        let port = &mut self.ports[place];
        let Some(buffers) = &mut port.buffers else { return false };
        self.batch.clear();
        let outcome = port.nic.receive(buffers, &mut self.batch);
        if outcome.is_err() {
            // The buffers of these frames are with those that the driver had: all of them are taken back.
            self.batch.clear();
        }
        port.check(outcome, &self.tell);
        let bypassing = port.nic.identity().cache_bypassing;
        if !self.batch.is_empty() && !self.may_act() {
            self.forget_received(place);
            return true;
        }
        let batch = std::mem::take(&mut self.batch);
        if !bypassing {
            // What the driver, or the kernel on its behalf, wrote goes out before anybody hears of it.
            self.write_back(batch.pieces());
        }
        let mut receivers = std::mem::take(&mut self.receivers);
        if bypassing && !M::COHERENT {
            self.invalidate_fronts(&batch);
        }
        let mut index = 0;
        while index < batch.len() {
            let steered = self.deliver_steered(place, &batch, index);
            if steered == 0 {
                self.route(place, batch.frame(index), &mut receivers);
            }
            index += steered.max(1);
        }
        let bytes: u64 = batch.pieces().iter().map(|piece| u64::from(piece.bytes)).sum();
        let bytes = bytes - batch.len() as u64 * HEADER_BYTES as u64;
        let counters = &self.ports[place].counters;
        counters.rx_packets.add(batch.len() as u64);
        counters.rx_bytes.add(bytes);
        let busy = !batch.is_empty();
        self.batch = batch;
        self.receivers = receivers;
        busy
    }

    /// Gives the buffers of the frames back that were just received. The backend stood still between its question whether it may act and
    /// the NIC's answer: others may have delivered the same frames meanwhile.
    fn forget_received(&mut self, place: usize) {
        let port = &mut self.ports[place];
        port.counters.count_frames(FrameFault::StoodStill, self.batch.len() as u64);
        if let Some(buffers) = &mut port.buffers {
            for piece in self.batch.pieces() {
                if let Some(buffer) = buffers.at(piece.at) {
                    buffers.give_back(buffer);
                }
            }
        }
        self.batch.clear();
    }

    /// The device wrote behind our cache. What is about to be looked at of its frames may lie there, as it was before.
    fn invalidate_fronts(&self, batch: &Batch) {
        let unknown = || (0..batch.len()).filter(|index| batch.tag(*index).is_none());
        let mut any = false;
        for first in unknown().filter_map(|index| batch.frame(index).first()) {
            self.memory.invalidate(first.at, LINE_BYTES as u64);
            any = true;
        }
        if any {
            self.memory.full_fence();
        }
    }

    /// Passes a frame on.
    fn route(&mut self, place: usize, pieces: &[Piece], receivers: &mut Vec<RegistrationIndex>) {
        let Some(first) = pieces.first() else { return };
        receivers.clear();
        let mut header = VnetHeader::default();
        let mut reach = Reach::One;
        let bytes: u64 = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
        let mut fault = Some(FrameFault::Short);
        if bytes > MAX_PACKET_BYTES {
            // No message has room for more, nor anybody who puts frames together.
            fault = Some(FrameFault::Long);
        } else if first.bytes as usize >= FRONT_BYTES {
            let mut front = [0; FRONT_BYTES];
            self.memory.read(first.at, &mut front);
            let (read, addresses) = split(front);
            header = read;
            reach = Reach::of_flooded(addresses.is_flooded());
            self.ports[place].switch.route(addresses, None, receivers);
            let tagged = self.ports[place].switch.has_vlans()
                && self.deliver_in_vlan(place, pieces, header, addresses);
            fault = (receivers.is_empty() && !tagged).then_some(FrameFault::NoReceiver);
        }
        if let Some(fault) = fault {
            self.ports[place].counters.count_frames(fault, 1);
        }
        if !receivers.iter().all(|index| self.ports[place].accepts(*index, header)) {
            // All of it will be read here.
            self.bring_in(place, pieces);
        }
        self.deliver_as_accepted(place, pieces, header, (receivers, reach));
    }

    /// Delivers a packet in receive buffers as it is to those who accept that, and finished to the others.
    pub(super) fn deliver_as_accepted(
        &mut self,
        place: usize,
        pieces: &[Piece],
        header: VnetHeader,
        (receivers, reach): (&[RegistrationIndex], Reach),
    ) {
        if !receivers.iter().all(|index| self.ports[place].accepts(*index, header)) {
            let mut unable = std::mem::take(&mut self.unable);
            unable.clear();
            unable.extend(receivers.iter().filter(|index| !self.ports[place].accepts(**index, header)));
            self.deliver_finished(place, pieces, header, (&unable, reach));
            self.unable = unable;
        }
        // Last, since it gives the buffers back that nobody holds.
        self.deliver(place, pieces, header, (receivers, reach));
    }

    /// Copies a packet of an instance into receive buffers, for instances of the same NIC. The sender's buffer would
    /// do as well, were it not for the receivers: they may hold it for as long as they like.
    pub(super) fn deliver_locally(
        &mut self,
        place: usize,
        sender: RegistrationIndex,
        packet: &[Piece],
        header: VnetHeader,
        (receivers, reach): (&[RegistrationIndex], Reach),
    ) {
        self.bring_in(place, packet);
        if !receivers.iter().any(|index| self.ports[place].accepts(*index, header)) {
            self.deliver_finished(place, packet, header, (receivers, reach));
            return;
        }
        let mut pieces = std::mem::take(&mut self.copied);
        let bytes = packet.iter().map(|piece| piece.bytes).sum();
        if !self.ports[place].take_buffers(bytes, &mut pieces) {
            if let Some(sender) = &self.ports[place].registrations[sender.get()] {
                sender.counters.count_drop(DropReason::NoReceiveBuffers);
            }
            self.copied = pieces;
            return;
        }
        self.take_over(place, &pieces);
        let mut bounce = [0; BUFFER_BYTES as usize];
        let mut done = 0;
        for piece in &pieces {
            let bounce = &mut bounce[..piece.bytes as usize];
            read_packet(&self.memory, packet, done, bounce);
            self.memory.write(piece.at, bounce);
            done += u64::from(piece.bytes);
        }
        self.write_back(&pieces);
        self.deliver_as_accepted(place, &pieces, header, (receivers, reach));
        self.copied = pieces;
    }

    /// Before all of a packet is read here that an instance sends, or that the NIC received: if that works past our cache, only
    /// the front was invalidated so far.
    pub(super) fn bring_in(&self, place: usize, packet: &[Piece]) {
        if self.ports[place].nic.identity().cache_bypassing {
            for piece in packet {
                self.memory.invalidate(piece.at, u64::from(piece.bytes));
            }
            self.memory.full_fence();
        }
    }

    /// Before receive buffers are written here: what a device wrote past our cache must not be overwritten by older copies of the
    /// same lines.
    pub(super) fn take_over(&self, place: usize, pieces: &[Piece]) {
        if self.ports[place].nic.identity().cache_bypassing {
            for piece in pieces {
                self.memory.invalidate(piece.at, u64::from(piece.bytes));
            }
            self.memory.full_fence();
        }
    }

    /// Writes back what was written to receive buffers, before anybody hears of it.
    #[track_caller]
    pub(super) fn write_back(&self, pieces: &[Piece]) {
        if !M::COHERENT {
            for piece in pieces {
                self.memory.write_back(piece.at, u64::from(piece.bytes));
            }
        }
        self.memory.store_fence();
    }

    /// Tells the frontends of the receivers about a packet in receive buffers, which was written back, and which are free
    /// again once all of them are done with it. Says whether anybody was told.
    pub(super) fn deliver(
        &mut self,
        place: usize,
        pieces: &[Piece],
        header: VnetHeader,
        (receivers, reach): (&[RegistrationIndex], Reach),
    ) -> bool {
        let port = &mut self.ports[place];
        let Some(buffers) = &mut port.buffers else { return false };
        let mut any = false;
        let count = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        for index in receivers {
            let Some(registration) = &mut port.registrations[index.get()] else { continue };
            let counters = &registration.counters;
            if !registration.accepts().contains(header.required()) {
                // It gets its own, finished ones.
                continue;
            }
            if let Some(limiter) = &mut registration.receive_limit {
                // One look at the clock per turn, whoever is limited.
                limiter.refill(*self.now.get_or_insert_with(Instant::now));
                if limiter.allowed() == 0 {
                    counters.count_drop(DropReason::RateLimit);
                    continue;
                }
            }
            if registration.held.len() + pieces.len() > registration.object.rx_quota_buffers as usize {
                counters.count_drop(DropReason::ReceiveQuota);
                continue;
            }
            let channel = registration.object.channel;
            let end = self.channels.iter_mut().find(|end| end.object().id == channel);
            let Some(end) = end.and_then(|end| end.ready().then_some(end)) else {
                counters.count_drop(DropReason::ChannelFull);
                continue;
            };
            let (room, held) = (end.room(), registration.held.len());
            if room < count && held == 0 {
                counters.count_drop(DropReason::ChannelFull);
                continue;
            }
            let free = Free { messages: room as usize, buffers: buffers.free_count() };
            let has_its_share = !free.allows(held, pieces.len(), reach);
            let scarce = self.promises_receiving
                && (room < end.limit() / KEPT_PART + count
                    || buffers.held_count() + pieces.len()
                        > buffers.len() - buffers.len() / KEPT_PART as usize);
            if scarce || has_its_share {
                let now = *self.now.get_or_insert_with(Instant::now);
                let promised = registration.receive_minimum.as_mut();
                if !promised.is_some_and(|minimum| minimum.is_below(now)) {
                    counters.count_drop(if scarce {
                        DropReason::KeptForOthers
                    } else {
                        DropReason::ReceiveShare
                    });
                    continue;
                }
                if room < count {
                    counters.count_drop(DropReason::ChannelFull);
                    continue;
                }
            }
            let sequence = registration.next_number();
            let mut bytes = 0;
            for (position, piece) in pieces.iter().enumerate() {
                end.request(&NetMessage {
                    opcode: Opcode::Receive,
                    lease: registration.object.lease,
                    generation: registration.object.generation,
                    sequence,
                    line: piece.at.line(),
                    bytes: piece.bytes,
                    more: position + 1 < pieces.len(),
                });
                if let Some(buffer) = buffers.at(piece.at) {
                    buffers.hold(buffer, *index);
                    registration.held.push_back((sequence, buffer));
                }
                bytes += piece.bytes;
            }
            let frame_bytes = bytes - HEADER_BYTES_U32;
            counters.count_rx(frame_bytes);
            any = true;
            let limits = [&mut registration.receive_limit, &mut registration.receive_minimum];
            limits.into_iter().flatten().for_each(|limit| limit.charge(header.wire_cost(frame_bytes)));
        }
        for piece in pieces {
            if let Some(buffer) = buffers.at(piece.at)
                && !buffers.is_held(buffer)
            {
                buffers.give_back(buffer);
            }
        }
        any
    }

    /// Takes the receive buffers of a run of packets back, if they were the frontend's to give.
    pub(super) fn receive_done(&mut self, channel: usize, message: &NetMessage) {
        let end = &mut self.channels[channel];
        // Without a lease, its buffers were taken back with the registration.
        let Some(registrations) = self.leases.get(&message.lease) else { return };
        let run = Run::from_code(message.bytes);
        let mut refused = None;
        let mut released = 0;
        for (place, index) in registrations {
            let port = &mut self.ports[*place];
            let (Some(buffers), Some(registration)) =
                (&mut port.buffers, &mut port.registrations[index.get()])
            else {
                continue;
            };
            if registration.object.channel != end.object().id {
                continue;
            }
            // Packets are given back in the order in which they were announced, those of a lease's other NICs among them.
            while let Some((sequence, buffer)) = registration.held.front()
                && sequence.wrapping_sub(message.sequence) < run.packets
            {
                buffers.release(*buffer, *index);
                registration.held.pop_front();
                released += 1;
            }
            if released == 0 {
                refused = Some((place, index));
            }
        }
        if released > 0 {
            end.completed(released);
        } else if let Some((place, index)) = refused
            && let Some(registration) = &self.ports[*place].registrations[index.get()]
        {
            registration.counters.count_drop(DropReason::BadMessage);
        }
    }
}
