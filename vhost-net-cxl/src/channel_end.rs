//! Our end of a pair of rings to a peer, and the promise that a completion never finds the ring full.
//!
//! A ring's receiver tells how far it is every half ring only, so a sender can count on half of the slots. That half is
//! shared evenly between packets under way in either direction: as long as neither side has more than a quarter of the
//! slots outstanding, the completions of one direction and the requests of the other always fit together.

use std::sync::Arc;

use cxl_pool::{Area, LineCount, LineOffset, Memory};
use pod_protocol::data_channel::{DataChannel, NET_WORDS};
use pod_protocol::objects::ChannelObject;
use pod_protocol::run_directory::RunDirectory;

use crate::channel_counters::{ChannelBook, ChannelCounters};
use crate::message::{NetMessage, Run, Status};

/// Messages that one look at a channel takes at most.
pub const MESSAGES_PER_LOOK: usize = 128;
/// Messages that wait at most to be put into the ring together.
const OUTBOX_MESSAGES: usize = 64;
/// Slots set aside for what is neither a request nor a completion.
const SPARE_SLOTS: u32 = 8;

/// A channel at work.
pub struct ChannelEnd<M: Memory> {
    object: ChannelObject,
    channel: DataChannel<M, NET_WORDS>,
    /// Requests that we may have outstanding.
    limit: u32,
    outstanding: u32,
    unpublished: bool,
    /// It was full when a sender looked last.
    stalled: bool,
    counters: Arc<ChannelCounters>,
    /// What the counters do not say yet: messages sent and received, and how many requests they say are under way.
    uncounted_sent: u64,
    uncounted_received: u64,
    shown_depth: u32,
    /// Messages that are not in the ring yet: there, whole lines at a time cost least.
    outbox: Vec<[u64; NET_WORDS]>,
    /// Completions that are still being gathered: that of the first packet, and what they have in common.
    gathered: Option<(NetMessage, Run)>,
}

impl<M: Memory> ChannelEnd<M> {
    /// Begins to use the rings of a channel.
    pub fn open(
        object: &ChannelObject,
        memory: &M,
        run: &RunDirectory,
        book: &ChannelBook,
    ) -> Result<Self, String> {
        let channel = DataChannel::open(memory, object, run).map_err(|error| error.to_string())?;
        Ok(Self::new(object.clone(), channel, book))
    }

    fn new(object: ChannelObject, channel: DataChannel<M, NET_WORDS>, book: &ChannelBook) -> Self {
        let slots = object.outgoing.slots.min(object.incoming.slots);
        let limit = (slots / 4).saturating_sub(SPARE_SLOTS).max(1);
        let counters = book.open(&object, limit);
        Self {
            stalled: false,
            counters,
            uncounted_sent: 0,
            uncounted_received: 0,
            shown_depth: 0,
            object,
            channel,
            limit,
            outstanding: 0,
            unpublished: false,
            outbox: Vec::with_capacity(OUTBOX_MESSAGES),
            gathered: None,
        }
    }

    /// What the controller said about it.
    #[inline]
    pub fn object(&self) -> &ChannelObject {
        &self.object
    }

    /// Whether both sides have agreed on this generation.
    #[inline]
    pub fn ready(&mut self) -> bool {
        self.channel.ready()
    }

    /// How many requests may be sent now.
    #[inline]
    pub fn room(&mut self) -> u32 {
        let left = self.limit.saturating_sub(self.outstanding);
        // All that is left is asked for. With a few free slots known and nobody to look again, a burst would be cut to as many, and
        // who leaves a part of the room to others would find less than that.
        let room = if left == 0 { 0 } else { left.min(self.free(left)) };
        if (room == 0) != self.stalled {
            self.stalled = room == 0;
            self.counters.stalls.add(u64::from(self.stalled));
        }
        room
    }

    /// How many requests may be under way at once.
    #[inline]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// What is counted for it.
    #[inline]
    pub fn counters(&self) -> &ChannelCounters {
        &self.counters
    }

    /// Slots that nothing is meant for yet: at least as many as are wanted, if the peer has left so many.
    #[inline]
    fn free(&mut self, wanted: u32) -> u32 {
        // At most as many as fit the outbox.
        let waiting = u32::try_from(self.outbox.len()).unwrap_or(u32::MAX);
        self.channel.sender.free_for(wanted.saturating_add(waiting)).saturating_sub(waiting)
    }

    /// Sends a request that its peer will complete. There must be room.
    #[inline]
    pub fn request(&mut self, message: &NetMessage) -> bool {
        let sent = self.send(message);
        self.outstanding += u32::from(sent);
        sent
    }

    /// Sends requests that their peer will complete, as many as fit and at most [`room`](Self::room), and says how many.
    #[inline]
    pub fn request_all(&mut self, messages: &[[u64; NET_WORDS]]) -> usize {
        let room = self.room() as usize;
        self.post();
        let sent = self.channel.send_batch(&messages[..messages.len().min(room)]);
        self.unpublished |= sent > 0;
        self.uncounted_sent += sent as u64;
        // No more than there was room for.
        self.outstanding += u32::try_from(sent).unwrap_or(u32::MAX);
        sent
    }

    /// Says that a packet ended. `done` is the completion but for its length; it leaves together with those of the packets
    /// that follow it and ended alike, with [`publish`](Self::publish) at the latest.
    #[inline]
    pub fn complete(&mut self, done: NetMessage, status: Status) {
        self.complete_run(done, Run { status, packets: 1 });
    }

    /// As [`complete`](Self::complete), for packets of one sender with consecutive numbers, of which `done` is the first one's.
    #[inline]
    pub fn complete_run(&mut self, done: NetMessage, ended: Run) {
        if let Some((first, run)) = &mut self.gathered
            && (first.opcode, first.lease, first.generation) == (done.opcode, done.lease, done.generation)
            && run.status == ended.status
            && run.packets <= Run::MAX - ended.packets
            && first.sequence.wrapping_add(run.packets) == done.sequence
        {
            run.packets += ended.packets;
            return;
        }
        self.send_gathered();
        self.gathered = Some((done, ended));
    }

    fn send_gathered(&mut self) {
        if let Some((first, run)) = self.gathered.take() {
            // It fits, unless the peer has more under way than it may; then the loss is its own.
            if !self.send(&NetMessage { bytes: run.code(), ..first }) {
                self.counters.lost.add(1);
            }
        }
    }

    /// Sends a remark that is not completed. It fits, unless the peer has more outstanding than it may.
    #[inline]
    pub fn send(&mut self, message: &NetMessage) -> bool {
        if self.free(1) == 0 {
            return false;
        }
        self.outbox.push(message.encode());
        if self.outbox.len() == OUTBOX_MESSAGES {
            self.post();
        }
        true
    }

    /// Puts the outbox into the ring, where there is room for all of it.
    #[inline]
    fn post(&mut self) {
        let mut rest = &self.outbox[..];
        while !rest.is_empty() {
            let sent = self.channel.send_batch(rest);
            if sent == 0 {
                // Room was counted before each message was accepted; only a receiver that takes its word back gets us here.
                break;
            }
            self.unpublished = true;
            self.uncounted_sent += sent as u64;
            rest = &rest[sent..];
        }
        self.outbox.clear();
    }

    /// Notes that so many requests were completed.
    #[inline]
    pub fn completed(&mut self, requests: usize) {
        // Fewer than a ring has slots, unless the peer lies.
        self.outstanding = self.outstanding.saturating_sub(u32::try_from(requests).unwrap_or(u32::MAX));
    }

    /// Takes what has arrived into `inbox`, as much as fits and at most [`MESSAGES_PER_LOOK`] messages, and says how many.
    #[inline]
    pub fn receive(&mut self, inbox: &mut [[u64; NET_WORDS]]) -> usize {
        // Completions of what is taken now must fit.
        let most = inbox.len().min(MESSAGES_PER_LOOK);
        let free = self.free(u32::try_from(most).unwrap_or(u32::MAX)) as usize;
        let count = self.channel.receive_batch(&mut inbox[..most.min(free)]);
        self.uncounted_received += count as u64;
        count
    }

    /// Lets the peer see what was sent, and wakes it if it sleeps.
    pub fn publish(&mut self) {
        self.send_gathered();
        self.post();
        if std::mem::take(&mut self.unpublished) {
            self.channel.publish();
        }
        self.count();
    }

    /// Counts what happened since the last time: per turn, since another thread looks at the counters.
    fn count(&mut self) {
        if self.uncounted_sent > 0 {
            self.counters.sent.add(std::mem::take(&mut self.uncounted_sent));
        }
        if self.uncounted_received > 0 {
            self.counters.received.add(std::mem::take(&mut self.uncounted_received));
        }
        if self.shown_depth != self.outstanding {
            self.shown_depth = self.outstanding;
            self.counters.set_depth(self.outstanding);
        }
    }

    /// Tells the peer that we are about to sleep; false if something has come meanwhile.
    pub fn announce_sleep(&mut self) -> bool {
        self.channel.announce_sleep()
    }

    /// Tells the peer that we are awake.
    pub fn wake(&mut self) {
        self.channel.wake();
    }
}

/// All of the pool. What the controller says lies somewhere is checked against it: an offset outside would be our end.
pub(crate) fn whole_pool<M: Memory>(memory: &M) -> Area {
    Area::new(LineOffset::new(0), LineCount::new(memory.size_bytes() / cxl_pool::LINE_BYTES as u64))
}
