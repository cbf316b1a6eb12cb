//! Our end of a pair of rings to a peer, and the promise that a completion never finds the ring full.
//!
//! A ring's receiver tells how far it is every half ring only, so a sender can count on half of the slots. That half is
//! shared evenly between packets under way in either direction: as long as neither side has more than a quarter of the
//! slots outstanding, the completions of one direction and the requests of the other always fit together.

use cxl_pool::{Area, LineCount, LineOffset, Memory};
use pod_protocol::data_channel::{DataChannel, NET_WORDS};
use pod_protocol::objects::ChannelObject;
use pod_protocol::run_directory::RunDirectory;

use crate::message::NetMessage;

/// Messages that one look at a channel takes at most.
pub const MESSAGES_PER_LOOK: usize = 64;
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
    inbox: Vec<[u64; NET_WORDS]>,
}

impl<M: Memory> ChannelEnd<M> {
    /// Begins to use the rings of a channel.
    pub fn open(object: &ChannelObject, memory: &M, run: &RunDirectory) -> Result<Self, String> {
        let channel = DataChannel::open(memory, object, run).map_err(|error| error.to_string())?;
        Ok(Self::new(object.clone(), channel))
    }

    fn new(object: ChannelObject, channel: DataChannel<M, NET_WORDS>) -> Self {
        let slots = object.outgoing.slots.min(object.incoming.slots);
        let limit = (slots / 4).saturating_sub(SPARE_SLOTS).max(1);
        let inbox = vec![[0; 2]; MESSAGES_PER_LOOK];
        Self { object, channel, limit, outstanding: 0, unpublished: false, inbox }
    }

    /// What the controller said about it.
    pub fn object(&self) -> &ChannelObject {
        &self.object
    }

    /// Whether both sides have agreed on this generation.
    pub fn ready(&mut self) -> bool {
        self.channel.ready()
    }

    /// How many requests may be sent now.
    pub fn room(&mut self) -> u32 {
        let left = self.limit.saturating_sub(self.outstanding);
        if left == 0 { 0 } else { left.min(self.channel.sender.free()) }
    }

    /// Sends a request that its peer will complete. There must be room.
    pub fn request(&mut self, message: &NetMessage) -> bool {
        let sent = self.send(message);
        self.outstanding += u32::from(sent);
        sent
    }

    /// Sends a completion, or a remark that is not completed. It fits, unless the peer has more outstanding than it may.
    pub fn send(&mut self, message: &NetMessage) -> bool {
        self.unpublished = true;
        self.channel.sender.send(message.encode()).is_ok()
    }

    /// Notes that a request was completed.
    pub fn completed(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
    }

    /// Takes what has arrived, at most [`MESSAGES_PER_LOOK`] messages.
    pub fn receive(&mut self) -> &[[u64; NET_WORDS]] {
        // Completions of what is taken now must fit.
        let most = (self.channel.sender.free() as usize).min(MESSAGES_PER_LOOK);
        let count = self.channel.receiver.receive_batch(&mut self.inbox[..most]);
        &self.inbox[..count]
    }

    /// Lets the peer see what was sent, and wakes it if it sleeps.
    pub fn publish(&mut self) {
        if std::mem::take(&mut self.unpublished) {
            self.channel.publish();
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
