//! Frames that have arrived for a guest that has used up its share of the fabric.
//!
//! They stay where the backend put them, and are copied once the guest's budget allows. Meanwhile its other frames wait behind them, and nobody else's.
//! A frame that is longer than what the guest may save up is copied in pieces, each of which is admitted by itself, and shown to the guest with the last one.

use std::collections::VecDeque;

use cxl_pool::{LINE_BYTES, Memory};
use pod_protocol::ids::ChannelId;
use vhost_frontend::pacing::Way;

use super::Frontend;
use super::delivering::{Part, deliver, frame_bytes};
use super::port::Port;
use crate::counters::DropReason;
use crate::message::{NetMessage, Opcode, Status};

/// So many messages of one guest wait at most: two of the longest frames and some. Beyond that the oldest frames are dropped, as long as nothing of them was
/// copied: their buffers go back in the order in which they came, and who sends learns soonest that it is too much.
const MESSAGES_KEPT: usize = 48;
/// More than that a backend leaves to one guest only where it was given a large quota: then a frame is given up that was copied in part.
const MESSAGES_MAX: usize = 512;

/// The frames of a guest that wait, in the order in which they came.
#[derive(Debug)]
pub(super) struct Waiting {
    messages: VecDeque<(ChannelId, NetMessage)>,
    /// Which receive queue the first frame is being copied to, and how many of its bytes are there already.
    begun: Option<(usize, u32)>,
}

impl Waiting {
    /// Nothing waits.
    pub(super) const fn new() -> Self {
        Self { messages: VecDeque::new(), begun: None }
    }

    /// Frames are about to wait at times: makes room for all that ever will.
    pub(super) fn prepare(&mut self) {
        self.messages.reserve(MESSAGES_MAX + MESSAGES_KEPT);
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// A queue begins anew, or is gone: what lies in it of a frame that is not there as a whole is lost.
    pub(super) fn queue_changed(&mut self, queue: usize) {
        self.begun = self.begun.filter(|(begun, _)| *begun != queue);
    }

    /// What was said over a channel that is gone, or begins anew, is not true any more, and nobody waits for an answer.
    pub(super) fn forget(&mut self, channel: ChannelId) {
        if self.messages.front().is_some_and(|(first, _)| *first == channel) {
            self.begun = None;
        }
        self.messages.retain(|(from, _)| *from != channel);
    }

    fn push(&mut self, channel: ChannelId, pieces: &[NetMessage]) {
        self.messages.extend(pieces.iter().map(|piece| (channel, *piece)));
    }

    fn is_too_much(&self) -> bool {
        let most = if self.begun.is_none() { MESSAGES_KEPT } else { MESSAGES_MAX };
        self.messages.len() > most
    }

    /// Puts the pieces of the first frame into `frame`, and says over which channel it came.
    fn first(&self, frame: &mut Vec<NetMessage>) -> Option<ChannelId> {
        frame.clear();
        let (channel, _) = self.messages.front()?;
        for (_, piece) in &self.messages {
            frame.push(*piece);
            if !piece.more {
                break;
            }
        }
        Some(*channel)
    }

    fn pop(&mut self, pieces: usize) {
        self.begun = None;
        self.messages.drain(..pieces);
    }
}

impl Port {
    /// Whether a frame that has just arrived may be copied at once, as a whole.
    #[inline]
    pub(super) fn may_take(&mut self, frame_bytes: u32) -> bool {
        let Some(pacer) = &mut self.pacer else { return true };
        if !self.waiting.is_empty() || u64::from(frame_bytes) > pacer.at_once_bytes() {
            return false;
        }
        pacer.admit(Way::Unasked, frame_bytes.into()) || {
            // It was looked at the clock in the turn before, perhaps long ago.
            pacer.look();
            pacer.admit(Way::Unasked, frame_bytes.into())
        }
    }
}

impl<M: Memory> Frontend<M> {
    /// Has a frame wait that arrived over this channel.
    pub(super) fn let_wait(&mut self, place: usize, index: usize, pieces: &[NetMessage]) {
        let channel = self.channels[place].end.object().id;
        let port = &mut self.ports[index];
        if port.waiting.is_empty() {
            self.held.push(port.lease());
        }
        port.waiting.push(channel, pieces);
        let mut frame = std::mem::take(&mut self.receive_scratch.frame);
        while self.ports[index].waiting.is_too_much() {
            let Some(channel) = self.ports[index].waiting.first(&mut frame) else { break };
            self.ports[index].counters.count_drop(DropReason::FabricShare);
            self.dismiss(index, channel, &frame);
        }
        self.receive_scratch.frame = frame;
    }

    /// Copies what waits for a guest, as far as its budget allows. Says whether that was anything.
    pub(super) fn deliver_waiting(&mut self, index: usize) -> bool {
        if self.ports[index].waiting.is_empty() {
            return false;
        }
        if let Some(pacer) = &mut self.ports[index].pacer {
            pacer.look();
        }
        self.receive_scratch.begin_look();
        let mut frame = std::mem::take(&mut self.receive_scratch.frame);
        let mut any = false;
        while let Some(channel) = self.ports[index].waiting.first(&mut frame) {
            let port = &self.ports[index];
            let outcome = if !port.hears_of(channel, frame[0].generation) {
                Some(Err(DropReason::Stale))
            } else if let Err(reason) = self.still_lies(channel, &frame) {
                Some(Err(reason))
            } else {
                self.deliver_some(index, &frame)
            };
            let Some(outcome) = outcome else { break };
            any = true;
            let port = &self.ports[index];
            match outcome {
                Ok(false) => continue,
                Ok(true) => port.counters.count_rx(frame_bytes(&frame)),
                Err(reason) => port.counters.count_drop(reason),
            }
            self.dismiss(index, channel, &frame);
        }
        self.receive_scratch.frame = frame;
        self.receive_scratch.filled.show_unless(None, &mut self.ports);
        any
    }

    /// Whether a frame that waited lies where its backend receives: that may have changed meanwhile.
    fn still_lies(&self, channel: ChannelId, frame: &[NetMessage]) -> Result<(), DropReason> {
        let origins = self.channels.iter().find(|it| it.end.object().id == channel).map(|it| &it.origins);
        let origins = origins.ok_or(DropReason::OutsideArea)?;
        frame.iter().try_for_each(|piece| origins.check(piece))
    }

    /// Copies as much of the first frame as its guest's budget allows at once, and says whether that was the last of it. None if nothing is.
    fn deliver_some(&mut self, index: usize, frame: &[NetMessage]) -> Option<Result<bool, DropReason>> {
        let total = frame_bytes(frame);
        let port = &mut self.ports[index];
        let Some(queue) = port.queue_for(&self.memory, &frame[0]) else {
            return Some(Err(DropReason::NoGuestQueue));
        };
        let done = port.waiting.begun.filter(|(begun, _)| *begun == queue).map_or(0, |(_, done)| done);
        let mut bytes = total - done;
        if let Some(pacer) = &mut port.pacer {
            let whole_lines = (pacer.at_once_bytes() / LINE_BYTES as u64).max(1) * LINE_BYTES as u64;
            bytes = u32::try_from(whole_lines).map_or(bytes, |most| most.min(bytes));
            if !pacer.admit(Way::Unasked, bytes.into()) {
                return None;
            }
        }
        let span = Part { from: done, to: done + bytes };
        let delivered = deliver(&self.memory, &mut self.ports, index, frame, span, &mut self.receive_scratch);
        let port = &mut self.ports[index];
        Some(delivered.map(|()| {
            port.waiting.begun = Some((queue, span.to));
            if span.to == total {
                port.charge_received(&self.memory, &frame[0], total);
            }
            span.to == total
        }))
    }

    /// Gives the buffers of the first frame back that waits.
    fn dismiss(&mut self, index: usize, channel: ChannelId, frame: &[NetMessage]) {
        let port = &mut self.ports[index];
        port.waiting.pop(frame.len());
        if port.waiting.is_empty() {
            let lease = port.lease();
            self.held.retain(|held| *held != lease);
        }
        let channel = self.channels.iter_mut().find(|it| it.end.object().id == channel);
        if let (Some(channel), Some(first)) = (channel, frame.first()) {
            let done = NetMessage { opcode: Opcode::ReceiveDone, more: false, ..*first };
            channel.end.complete(done, Status::Sent);
        }
    }

    /// What waits and does not count any more, since its route was left, is given back before its NIC is told that it was: the buffers may then be another's.
    pub(super) fn drop_unheard(&mut self, index: usize) {
        let mut frame = std::mem::take(&mut self.receive_scratch.frame);
        // Whatever is behind one that counts came later, and is looked at before it is copied.
        while let Some(channel) = self.ports[index].waiting.first(&mut frame)
            && !self.ports[index].hears_of(channel, frame[0].generation)
        {
            self.ports[index].counters.count_drop(DropReason::Stale);
            self.dismiss(index, channel, &frame);
        }
        self.receive_scratch.frame = frame;
    }

    /// Gives all back that waits.
    pub(super) fn dismiss_all(&mut self, index: usize) {
        let mut frame = std::mem::take(&mut self.receive_scratch.frame);
        while let Some(channel) = self.ports[index].waiting.first(&mut frame) {
            self.dismiss(index, channel, &frame);
        }
        self.receive_scratch.frame = frame;
    }

    /// What was said over a channel is not true any more.
    pub(super) fn forget_waiting(&mut self, channel: ChannelId) {
        for port in &mut self.ports {
            port.waiting.forget(channel);
        }
        let Self { held, by_lease, ports, .. } = self;
        held.retain(|lease| by_lease.get(lease).is_some_and(|port| !ports[*port].waiting.is_empty()));
    }
}
