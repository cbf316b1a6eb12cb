//! A channel of the data path, as an engine holds it: both rings and the doorbell of the peer's worker.

use cxl_channel::doorbell::Doorbell;
use cxl_channel::{Full, Receiver, Sender, Wake};
use cxl_pool::{EndpointId, Generation, Memory};

use crate::ids::ChannelId;
use crate::objects::ChannelObject;
use crate::run_directory::RunDirectory;

/// Words of a network message.
pub const NET_WORDS: usize = 2;
/// Words of a block message.
pub const BLK_WORDS: usize = 8;

/// Both directions to one peer. `WORDS` is [`NET_WORDS`] or [`BLK_WORDS`].
pub struct DataChannel<M: Memory, const WORDS: usize> {
    /// Its name at both ends.
    pub id: ChannelId,
    /// Who is at the other end.
    pub peer: EndpointId,
    /// Of both rings.
    pub generation: Generation,
    /// To the peer.
    pub sender: Sender<M, WORDS>,
    /// From the peer.
    pub receiver: Receiver<M, WORDS>,
    /// Of the peer's worker.
    pub doorbell: Doorbell,
    ready: bool,
}

impl<M: Memory, const WORDS: usize> DataChannel<M, WORDS> {
    /// Begins the generation that the object names in the outgoing ring, and opens the incoming one. Poll
    /// [`DataChannel::ready`] until both ends have done so.
    pub fn open(memory: &M, object: &ChannelObject, run: &RunDirectory) -> Self {
        let sender = Sender::begin(memory.clone(), object.outgoing, object.generation);
        let receiver = Receiver::open(memory.clone(), object.incoming, object.generation);
        let mut doorbell = Doorbell::connect(run.data_doorbell(object.peer));
        // The peer has to accept the generation, and may be asleep.
        doorbell.ring();
        Self {
            id: object.id,
            peer: object.peer,
            generation: object.generation,
            sender,
            receiver,
            doorbell,
            ready: false,
        }
    }

    /// Whether both ends have accepted this generation; cheap once they have.
    pub fn ready(&mut self) -> bool {
        if !self.ready {
            let incoming = self.receiver.ready();
            let outgoing = self.sender.ready();
            self.ready = incoming && outgoing;
            if self.ready {
                // The peer waits for what we accepted last, and may be asleep.
                self.doorbell.ring();
            }
        }
        self.ready
    }

    /// Queues a message; [`DataChannel::publish`] makes it visible.
    pub fn send(&mut self, message: [u64; WORDS]) -> Result<(), Full> {
        self.sender.send(message)
    }

    /// The next message from the peer.
    pub fn receive(&mut self) -> Option<[u64; WORDS]> {
        self.receiver.receive()
    }

    /// Makes everything sent visible, and rings if the peer sleeps. Once per turn.
    pub fn publish(&mut self) {
        if self.sender.publish() == Wake::Needed {
            self.doorbell.ring();
        }
    }

    /// Tells the peer that it has to ring from now on. True if nothing came meanwhile, so that sleeping is safe.
    pub fn announce_sleep(&mut self) -> bool {
        self.receiver.announce_sleep()
    }

    /// Tells the peer that it need not ring any more.
    pub fn wake(&mut self) {
        self.receiver.wake();
    }
}
