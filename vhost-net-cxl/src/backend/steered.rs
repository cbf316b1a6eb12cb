//! Frames that the NIC has told apart: whose they are, and that their headers ask for nothing, is known without a look at them.

use cxl_pool::Memory;
use pod_protocol::objects::REGISTRATIONS_MAX;

use super::Backend;
use super::port::Port;
use super::registration::{Registration, RegistrationIndex};
use super::share::{Free, Reach};
use crate::counters::DropReason;
use crate::message::{NetMessage, Opcode};
use crate::nic::{BATCH_FRAMES, Batch, Flow, FlowTag, Piece};
use crate::vnet_header::{HEADER_BYTES_U32, VnetHeader};

/// The lower bits of a tag name the registration, the upper ones tell it from earlier ones of that number.
const INDEX_BITS: u32 = 12;

const _: () = assert!(REGISTRATIONS_MAX == 1 << INDEX_BITS);

impl Port {
    /// A tag for a registration that no other one has, nor had lately.
    pub(super) fn next_tag(&mut self, index: RegistrationIndex) -> FlowTag {
        self.tags = self.tags.wrapping_add(1);
        FlowTag(self.tags << INDEX_BITS | u32::from(index.number()))
    }

    /// Tells the NIC which flows there are.
    pub(super) fn tell_flows(&mut self) {
        let receiving = |it: &&Registration| it.sends() && it.object.policy.vlan.is_none();
        let registrations = self.registrations.iter().flatten().filter(receiving);
        let flows: Vec<Flow> = registrations
            .filter(|it| {
                self.switch.receiver(it.object.mac).is_some_and(|index| index.get() == index_in(it.tag))
            })
            .map(|it| Flow { destination: it.object.mac, tag: it.tag })
            .collect();
        self.nic.set_flows(&flows);
    }

    /// Whose frames have this tag. Nobody's, if it has been taken back meanwhile.
    #[inline]
    fn receiver_of(&self, tag: FlowTag) -> Option<RegistrationIndex> {
        let index = RegistrationIndex::new(u16::try_from(index_in(tag)).ok()?)?;
        let registration = self.registrations.get(index.get())?.as_ref()?;
        (registration.tag == tag && registration.sends()).then_some(index)
    }
}

const fn index_in(tag: FlowTag) -> usize {
    (tag.0 & ((1 << INDEX_BITS) - 1)) as usize
}

impl<M: Memory> Backend<M> {
    /// Delivers the frames from `first` on that have the same tag, if the NIC gave them one, and says how many those are.
    pub(super) fn deliver_steered(&mut self, place: usize, batch: &Batch, first: usize) -> usize {
        let Some(tag) = batch.tag(first) else { return 0 };
        let Some(receiver) = self.ports[place].receiver_of(tag) else { return 0 };
        let count = (first..batch.len()).take_while(|index| batch.tag(*index) == Some(tag)).count();
        let registration = self.ports[place].registrations[receiver.get()].as_ref();
        let limited = registration.is_some_and(|it| it.receive_limit.is_some());
        if limited || self.promises_receiving {
            // Each of them is judged by itself.
            for index in first..first + count {
                self.deliver(place, batch.frame(index), VnetHeader::default(), (&[receiver], Reach::One));
            }
            return count;
        }
        let mut pieces = [Piece::NONE; BATCH_FRAMES];
        for (piece, index) in pieces.iter_mut().zip(first..first + count) {
            // A tagged frame is in one piece.
            *piece = batch.frame(index)[0];
        }
        self.deliver_run(place, receiver, &pieces[..count]);
        count
    }

    /// Tells the frontend of one receiver about frames of one piece each.
    fn deliver_run(&mut self, place: usize, receiver: RegistrationIndex, frames: &[Piece]) {
        let port = &mut self.ports[place];
        let (Some(buffers), Some(registration)) =
            (&mut port.buffers, &mut port.registrations[receiver.get()])
        else {
            return;
        };
        let channel = registration.object.channel;
        let end = self.channels.iter_mut().find(|end| end.object().id == channel);
        let mut end = end.and_then(|end| end.ready().then_some(end));
        let room = end.as_mut().map_or(0, |end| end.room() as usize);
        let held = registration.held.len();
        let quota = (registration.object.rx_quota_buffers as usize).saturating_sub(held);
        let share = Free { messages: room, buffers: buffers.free_count() }.allows_frames(held);
        let (accepted, _) = frames.split_at(frames.len().min(quota).min(share));
        let mut messages = [[0; 2]; BATCH_FRAMES];
        let first_number = registration.numbers.take(accepted.len());
        let mut sequence = first_number;
        for (message, frame) in messages.iter_mut().zip(accepted) {
            *message = NetMessage {
                opcode: Opcode::Receive,
                lease: registration.object.lease,
                generation: registration.object.generation,
                sequence,
                line: frame.at.line(),
                bytes: frame.bytes,
                more: false,
            }
            .encode();
            sequence = sequence.wrapping_add(1);
        }
        let sent = end.map_or(0, |end| end.request_all(&messages[..accepted.len()]));
        let (sent, dropped) = frames.split_at(sent);
        let mut bytes = 0;
        let mut sequence = first_number;
        for frame in sent {
            if let Some(buffer) = buffers.at(frame.at) {
                buffers.hold(buffer, receiver);
                registration.held.push_back((sequence, buffer));
            }
            sequence = sequence.wrapping_add(1);
            bytes += u64::from(frame.bytes - HEADER_BYTES_U32);
        }
        let counters = &registration.counters;
        counters.rx_packets.add(sent.len() as u64);
        counters.rx_bytes.add(bytes);
        let reason = match () {
            () if quota < share => DropReason::ReceiveQuota,
            () if room == 0 && held == 0 => DropReason::ChannelFull,
            () => DropReason::ReceiveShare,
        };
        for frame in dropped {
            counters.count_drop(reason);
            if let Some(buffer) = buffers.at(frame.at) {
                buffers.give_back(buffer);
            }
        }
    }
}
