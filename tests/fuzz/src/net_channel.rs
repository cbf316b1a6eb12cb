//! What a peer of the network engine may write into the rings between us.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use cxl_channel::{Receiver, RingPlacement, Sender};
use cxl_pool::simulated::SimulatedPool;
use cxl_pool::{EndpointId, Generation, HostId, LineCount, LineOffset, Memory, Role};
use pod_protocol::data_channel::NET_WORDS;
use pod_protocol::ids::{ChannelId, LeaseGeneration, LeaseId};
use pod_protocol::objects::{ChannelObject, Engine};
use pod_protocol::run_directory::RunDirectory;
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::{ChannelEnd, MESSAGES_PER_LOOK};
use vhost_net_cxl::message::{NetMessage, Opcode, Run, Status};

use super::input::Input;
use super::pool::{layout, memory};

/// Sixteen lines: laps end soon.
const SLOTS: u32 = 64;
const GENERATION: Generation = Generation::new(7);
const ACTIONS_MAX: usize = 512;
/// Where the rings lie in simulated memory, and how much there is.
const SIMULATED_START: LineOffset = LineOffset::new(16);
const SIMULATED_BYTES: u64 = 1 << 14;
/// Behind the rings of the target `exchange`, which has the same pool.
const APART: LineCount = LineCount::new(1024);
/// Looks within which a message is seen that is there.
const LOOKS: usize = 64;

/// One byte that says whether hosts are coherent. Then every byte is an action: a message or many that go the right way, a word
/// anywhere in either ring, or something that our end does.
pub fn net_channel(data: &[u8]) {
    let mut input = Input(data);
    if input.byte() & 1 == 0 {
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let start = layout().data().start.saturating_add(APART);
        Scene::new([memory(), memory()], start).play(&mut input);
    } else {
        let pool = SimulatedPool::new(1, SIMULATED_BYTES);
        Scene::new([1, 2].map(|host| pool.host(HostId::new(host))), SIMULATED_START).play(&mut input);
    }
}

struct Scene<M: Memory> {
    memory: M,
    rings: RingPlacement,
    bytes: u64,
    end: ChannelEnd<M>,
    peer: Sender<M, NET_WORDS>,
    peers_receiver: Receiver<M, NET_WORDS>,
    /// What the peer has sent as it should, and was not received yet.
    sent: VecDeque<[u64; NET_WORDS]>,
    /// It has written nothing that it must not.
    honest: bool,
}

impl<M: Memory> Scene<M> {
    fn new([here, there]: [M; 2], start: LineOffset) -> Self {
        let lines = RingPlacement::lines(SLOTS, NET_WORDS);
        let outgoing = RingPlacement { start, slots: SLOTS };
        let incoming = RingPlacement { start: start.saturating_add(lines), slots: SLOTS };
        let bytes = LineCount::new(2 * lines.get()).bytes();
        here.zero(start.bytes(), bytes);
        here.write_back(start.bytes(), bytes);
        here.full_fence();
        // The peer begins as it should; what comes later is up to it.
        let peer = Sender::begin(there.clone(), incoming, GENERATION);
        let peers_receiver = Receiver::open(there.clone(), outgoing, GENERATION);
        let object = ChannelObject {
            id: ChannelId::new(1),
            engine: Engine::Net,
            peer: EndpointId::new(HostId::new(2), Role::NetBackend),
            generation: GENERATION,
            outgoing,
            incoming,
            receives: None,
        };
        let run = RunDirectory::new(Path::new("/nonexistent"));
        let end = ChannelEnd::open(&object, &here, &run, &ChannelBook::default()).expect("a channel");
        let (sent, honest) = (VecDeque::new(), true);
        let mut this =
            Self { memory: there, rings: outgoing, bytes, end, peer, peers_receiver, sent, honest };
        for _ in 0..LOOKS {
            let _ = (this.end.ready(), this.peers_receiver.ready(), this.peer.ready());
        }
        assert!(this.end.ready() && this.peer.ready(), "nobody has done anything wrong yet");
        this
    }

    fn play(&mut self, input: &mut Input<'_>) {
        for _ in 0..ACTIONS_MAX {
            if input.is_empty() {
                break;
            }
            match input.byte() % 8 {
                0 => {
                    let words = [input.u64(), input.u64() & !(1 << 63)];
                    self.send(&[words]);
                }
                1 => {
                    let first = u64::from(input.byte());
                    let words: Vec<_> = (0..first % 80).map(|number| [first, number + 1]).collect();
                    self.send(&words);
                }
                2 => {
                    let at = u64::from(input.u16()) * 8 % self.bytes;
                    let at = self.rings.start.bytes().saturating_add(at);
                    self.memory.store(at, input.u64());
                    self.memory.write_back(at, 8);
                    self.memory.full_fence();
                    self.honest = false;
                }
                3 => {
                    let most = input.byte().into();
                    self.receive(most);
                }
                4 => {
                    let wanted = usize::from(input.byte());
                    let room = self.end.room();
                    assert!(room <= self.end.limit());
                    let sent = self.end.request_all(&vec![message(1).encode(); wanted]);
                    assert!(sent <= wanted && sent <= room as usize);
                }
                5 => {
                    let (number, packets) = (input.u16(), u16::from(input.byte()).max(1));
                    self.end.complete_run(message(number), Run { status: Status::Sent, packets });
                    self.end.completed(packets.into());
                }
                6 => {
                    self.end.publish();
                    if self.end.announce_sleep() {
                        self.end.wake();
                    }
                }
                _ => self.listen(),
            }
        }
        if self.honest {
            for _ in 0..LOOKS {
                self.listen();
                self.end.publish();
                self.receive(MESSAGES_PER_LOOK);
            }
            assert!(self.sent.is_empty(), "{} messages never came", self.sent.len());
        }
    }

    /// The peer sends what there is room for.
    fn send(&mut self, messages: &[[u64; NET_WORDS]]) {
        let sent = self.peer.send_batch(messages);
        let _ = self.peer.publish();
        self.sent.extend(&messages[..sent]);
    }

    /// The peer takes what we have sent.
    fn listen(&mut self) {
        let _ = (self.peer.ready(), self.peers_receiver.ready());
        while self.peers_receiver.receive().is_some() {}
    }

    /// Takes at most so many messages.
    fn receive(&mut self, most: usize) {
        let mut inbox = vec![[u64::MAX; NET_WORDS]; most];
        let count = self.end.receive(&mut inbox);
        assert!(count <= most.min(MESSAGES_PER_LOOK));
        for words in &inbox[..count] {
            assert_eq!(words[NET_WORDS - 1] >> 63, 0, "that bit is the channel's");
            let _ = NetMessage::decode(*words);
            if self.honest {
                assert_eq!(Some(*words), self.sent.pop_front(), "in order, and nothing else");
            }
        }
    }
}

fn message(sequence: u16) -> NetMessage {
    NetMessage {
        opcode: Opcode::TransmitDone,
        lease: LeaseId::MAX,
        generation: LeaseGeneration::new(1),
        sequence,
        line: LineOffset::new(1),
        bytes: 100,
        more: false,
    }
}
