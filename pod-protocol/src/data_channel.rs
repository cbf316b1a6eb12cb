//! A channel of the data path, as an engine holds it: both rings and the doorbell of the peer's worker.

use cxl_channel::doorbell::Doorbell;
use cxl_channel::{Full, PlacementError, Receiver, Sender, Wake};
use cxl_pool::{Area, EndpointId, Generation, LineCount, LineOffset, Memory};

use crate::config::Wakeup;
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
        Self::check(memory, object)?;
        let sender = Sender::begin(memory.clone(), object.outgoing, object.generation);
        let mut receiver = Receiver::open(memory.clone(), object.incoming, object.generation);
        if run.wakeup() == Wakeup::Poll {
            receiver = receiver.without_doorbell();
        }
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

    /// Whether an object can be what the controller meant: [`DataChannel::open`] takes no other.
    pub fn check(memory: &M, object: &ChannelObject) -> Result<(), ChannelError> {
        let pool = Area::new(LineOffset::new(0), LineCount::covering(memory.size_bytes()));
        for ring in [object.outgoing, object.incoming] {
            ring.check(WORDS, pool)
                .map_err(|problem| ChannelError::Placement { channel: object.id, problem })?;
        }
        if object.generation.get() == 0 {
            return Err(ChannelError::NoGeneration(object.id));
        }
        Ok(())
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

    /// Queues a message; [`DataChannel::publish`] makes it visible. Several at hand go faster through
    /// [`DataChannel::send_batch`].
    #[inline]
    pub fn send(&mut self, message: [u64; WORDS]) -> Result<(), Full> {
        self.sender.send(message)
    }

    /// Queues as many of the messages as there is room for, from the first one on, and says how many;
    /// [`DataChannel::publish`] makes them visible. Whole lines are written at once, so the more at a time, the less each
    /// one costs.
    #[inline]
    pub fn send_batch(&mut self, messages: &[[u64; WORDS]]) -> usize {
        self.sender.send_batch(messages)
    }

    /// The next message from the peer.
    #[inline]
    pub fn receive(&mut self) -> Option<[u64; WORDS]> {
        self.receiver.receive()
    }

    /// The next messages from the peer, as many as there are and fit, and how many those are. Whole lines are read at
    /// once. What lies behind them in `into` may be overwritten with anything.
    #[inline]
    pub fn receive_batch(&mut self, into: &mut [[u64; WORDS]]) -> usize {
        self.receiver.receive_batch(into)
    }

    /// Makes everything sent visible, and rings if the peer sleeps. Once per turn.
    #[inline]
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
            receives: None,
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

    #[test]
    fn a_channel_is_said_as_in_1_0_where_it_limits_nobody() {
        let ring = |line| RingPlacement { start: LineOffset::new(line), slots: 64 };
        let object = ChannelObject {
            id: ChannelId::new(1),
            engine: Engine::Net,
            peer: EndpointId::new(HostId::new(2), Role::NetBackend),
            generation: Generation::new(1),
            outgoing: ring(0),
            incoming: ring(64),
            receives: None,
        };
        let said = serde_json::to_value(&object).expect("JSON");
        assert_eq!(said.get("receives"), None);
        assert_eq!(serde_json::from_value::<ChannelObject>(said).expect("a channel"), object);
        let areas = vec![Area::new(LineOffset::new(128), LineCount::new(64))];
        let limited = ChannelObject { receives: Some(areas), ..object.clone() };
        assert!(limited != object && limited.has_rings_of(&object));
        let renewed = ChannelObject { generation: Generation::new(2), ..limited.clone() };
        assert!(!renewed.has_rings_of(&limited));
    }

    #[test]
    fn batches_arrive_whole_and_in_order() {
        let pod = TestPod::simulated(2);
        let run = pod.run_directory();
        let hosts = [HostId::new(1), HostId::new(2)];
        let start = pod.layout.data().start;
        let rings = [0, 64]
            .map(|line| RingPlacement { start: start.saturating_add(LineCount::new(line)), slots: 64 });
        let [mut ours, mut theirs] = [0, 1].map(|side| {
            let object = ChannelObject {
                id: ChannelId::new(1),
                engine: Engine::Net,
                peer: EndpointId::new(hosts[1 - side], Role::NetFrontend),
                generation: Generation::new(1),
                outgoing: rings[side],
                incoming: rings[1 - side],
                receives: None,
            };
            let memory = pod.memory(hosts[side]);
            DataChannel::<_, NET_WORDS>::open(&memory, &object, &run).expect("placed well")
        });
        let message = |number: u64| [number, !number >> 1];
        assert_eq!(ours.send_batch(&[message(0)]), 0, "nothing is sent before the peer is there");
        while !(ours.ready() & theirs.ready()) {}
        let last = 1000;
        let (mut sent, mut received) = (0, 0);
        for turn in 0.. {
            // More than fits at times, and seldom whole lines.
            let batch: Vec<_> = (sent..last).take(turn * 7 % 83).map(message).collect();
            sent += ours.send_batch(&batch) as u64;
            ours.publish();
            let mut into = [[0; NET_WORDS]; 29];
            let count = theirs.receive_batch(&mut into[..turn % 30]);
            for got in &into[..count] {
                assert_eq!(*got, message(received));
                received += 1;
            }
            if received == last {
                break;
            }
        }
        assert_eq!((sent, theirs.receive()), (last, None));
    }
}
