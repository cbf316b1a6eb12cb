//! A channel of the data path, as an engine holds it: both rings and the doorbell of the peer's worker.

use cxl_channel::doorbell::Doorbell;
use cxl_channel::{Full, PlacementError, Receiver, Sender, Wake};
use cxl_pool::{Area, EndpointId, Generation, LineCount, LineOffset, Memory};

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
    heard: bool,
    ready: bool,
}

/// A channel object that cannot be what the controller meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelError {
    /// A ring lies outside the pool or has an odd size.
    #[error("{channel}: {problem}")]
    Placement {
        /// Which channel.
        channel: ChannelId,
        /// What is wrong.
        problem: PlacementError,
    },
    /// Generation 0 stands for none.
    #[error("{0} has no generation")]
    NoGeneration(ChannelId),
}

impl<M: Memory, const WORDS: usize> DataChannel<M, WORDS> {
    /// Begins the generation that the object names in the outgoing ring, and opens the incoming one. Poll
    /// [`DataChannel::ready`] until both ends have done so.
    pub fn open(memory: &M, object: &ChannelObject, run: &RunDirectory) -> Result<Self, ChannelError> {
        let pool = Area::new(LineOffset::new(0), LineCount::covering(memory.size_bytes()));
        for ring in [object.outgoing, object.incoming] {
            ring.check(WORDS, pool)
                .map_err(|problem| ChannelError::Placement { channel: object.id, problem })?;
        }
        if object.generation.get() == 0 {
            return Err(ChannelError::NoGeneration(object.id));
        }
        let sender = Sender::begin(memory.clone(), object.outgoing, object.generation);
        let receiver = Receiver::open(memory.clone(), object.incoming, object.generation);
        let mut doorbell = Doorbell::connect(&run.data_doorbell(object.peer));
        // The peer has to accept the generation, and may be asleep.
        doorbell.ring();
        Ok(Self {
            id: object.id,
            peer: object.peer,
            generation: object.generation,
            sender,
            receiver,
            doorbell,
            heard: false,
            ready: false,
        })
    }

    /// Whether both ends have accepted this generation; cheap once they have. While it is not, ask again each turn:
    /// the peer rings for each of its steps, so there is no need to stay awake for it.
    pub fn ready(&mut self) -> bool {
        if !self.heard && self.receiver.ready() {
            self.heard = true;
            // The peer waits for this, and may be asleep.
            self.doorbell.ring();
        }
        if !self.ready {
            self.ready = self.heard && self.sender.ready();
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

#[cfg(test)]
mod tests {
    use cxl_channel::RingPlacement;
    use cxl_pool::{HostId, Role};

    use super::*;
    use crate::objects::Engine;
    use crate::testing::TestPod;

    #[test]
    fn impossible_objects_are_refused() {
        let pod = TestPod::simulated(1);
        let memory = pod.memory(HostId::new(1));
        let start = pod.layout.data().start;
        let ring = |start, slots| RingPlacement { start, slots };
        let good = ChannelObject {
            id: ChannelId::new(1),
            engine: Engine::Blk,
            peer: EndpointId::new(HostId::new(2), Role::BlkBackend),
            generation: Generation::new(1),
            outgoing: ring(start, 64),
            incoming: ring(start.saturating_add(LineCount::new(128)), 64),
        };
        let open = |object: &ChannelObject| {
            DataChannel::<_, BLK_WORDS>::open(&memory, object, &pod.run_directory()).map(|_| ())
        };
        assert_eq!(open(&good), Ok(()));
        let none = ChannelObject { generation: Generation::new(0), ..good.clone() };
        assert_eq!(open(&none), Err(ChannelError::NoGeneration(good.id)));
        for bad in
            [ring(start, 0), ring(start, 65), ring(start, u32::MAX), ring(LineOffset::new(u64::MAX), 64)]
        {
            let outgoing = ChannelObject { outgoing: bad, ..good.clone() };
            assert!(matches!(open(&outgoing), Err(ChannelError::Placement { .. })), "{bad:?}");
            let incoming = ChannelObject { incoming: bad, ..good.clone() };
            assert!(matches!(open(&incoming), Err(ChannelError::Placement { .. })), "{bad:?}");
        }
    }
}
