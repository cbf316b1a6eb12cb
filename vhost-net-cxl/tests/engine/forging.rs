//! A frontend, and a wire, that say anything about packets that are nearly right.
//!
//! What is right of them gets past the checks: to the NIC as it is, cut or with a tag, to neighbours as they accept it, and to all at once.

use std::sync::{Arc, Mutex};

use cxl_pool::{Area, ByteOffset, CoherenceMode, CreateOptions, HardwareMemory, LineOffset, Memory, Pool};
use pod_protocol::ids::{LeaseGeneration, LeaseId, MacAddress};
use pod_protocol::objects::{NicPolicy, Object, RegistrationObject, RegistrationState};
use proptest::prelude::*;
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::{ChannelEnd, MESSAGES_PER_LOOK};
use vhost_net_cxl::message::{NetMessage, Opcode, Status};
use vhost_net_cxl::offloads::Offloads;
use vhost_net_cxl::scattered::{self, write_list};

use crate::finishing::{large, payload};
use crate::guest::ram_area;
use crate::pod::{POOL_BYTES, TestBackend, Turn, area, channel, lease, mac, open, registration};
use crate::recording::{Wire, recording_backend};

/// Instances: the second one has its memory in the pool, the third and the fifth are in a VLAN, the addresses of the fourth are known.
const INSTANCES: u32 = 5;
const GENERATION: u16 = 5;
/// Each packet has so much of its sender's area, or memory, to itself.
const SLOT_BYTES: u64 = 128 << 10;
const SLOTS: u64 = 8;

fn transmit_area(instance: u32) -> Area {
    area(8 + u64::from(instance), 1)
}

/// Virtio-net headers: nothing to do; a checksum; TCP in segments of some lengths, of which the last one is too short; UDP.
const HEADERS: [[u8; 12]; 6] = [
    [0; 12],
    [1, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0],
    [1, 1, 54, 0, 120, 5, 34, 0, 16, 0, 0, 0],
    [1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0],
    [1, 1, 54, 0, 1, 0, 34, 0, 16, 0, 0, 0],
    [1, 5, 42, 0, 120, 5, 34, 0, 6, 0, 0, 0],
];

/// A packet that would be right, were it not for a few of its bytes.
#[derive(Clone, Debug)]
struct Forged {
    from: u32,
    /// An instance, somebody on the wire, or everybody.
    to: u8,
    header: usize,
    payload_bytes: usize,
    tagged: bool,
    /// Some of it lies in the sender's memory.
    scattered: bool,
    /// Which bytes are something else.
    wrong: Vec<(usize, u8)>,
}

impl Forged {
    fn bytes(&self) -> Vec<u8> {
        let to = match self.to {
            0 => MacAddress::BROADCAST,
            to => mac(to),
        };
        let (_, mut frame) =
            large(mac(u8::try_from(self.from).expect("few")), to, &payload(self.payload_bytes));
        if self.header == HEADERS.len() - 1 {
            frame[23] = 17;
        }
        if self.tagged {
            frame.splice(12..12, [0x81, 0, 0, 10]);
        }
        let mut bytes = [&HEADERS[self.header][..], &frame].concat();
        for (place, byte) in &self.wrong {
            // Mostly in the headers.
            let end = if place % 4 == 0 { bytes.len() } else { bytes.len().min(80) };
            bytes[place % end] = *byte;
        }
        bytes
    }
}

#[derive(Clone, Debug)]
enum Said {
    /// This packet is to be sent.
    Packet(Forged),
    /// It arrives from the wire.
    Arrives(Forged),
    /// What is received is given back.
    GivesBack(usize),
    Anything(NetMessage),
}

fn any_packet() -> impl Strategy<Value = Forged> {
    let length = prop_oneof![3 => 0..1400_usize, 1 => 1400..65_000_usize];
    let wrong = prop_oneof![Just(Vec::new()), prop::collection::vec((any::<usize>(), any::<u8>()), 1..4)];
    // Some on the wire, and one that nobody has.
    let to = prop_oneof![2 => 0..=5_u8, 1 => 9..11_u8];
    let flags = (any::<bool>(), any::<bool>());
    (1..=INSTANCES, to, 0..HEADERS.len(), length, flags, wrong).prop_map(
        |(from, to, header, payload_bytes, (tagged, scattered), wrong)| Forged {
            from,
            to,
            header,
            payload_bytes,
            tagged: tagged && from % 2 == 0,
            scattered: scattered && from == 2,
            wrong,
        },
    )
}

fn any_message() -> impl Strategy<Value = NetMessage> {
    let opcode = prop_oneof![
        3 => Just(Opcode::Transmit),
        4 => Just(Opcode::ReceiveDone),
        1 => Just(Opcode::Offloads),
        1 => Just(Opcode::Receive),
        1 => Just(Opcode::TransmitDone),
    ];
    let line = prop_oneof![0..2_000_000u64, 140_000..230_000u64];
    (opcode, 0..7u32, 3..8u16, any::<u16>(), line, 0..80_000u32, any::<bool>()).prop_map(
        |(opcode, lease, generation, sequence, line, bytes, more)| NetMessage {
            opcode,
            lease: LeaseId::new(lease).expect("small"),
            generation: LeaseGeneration::new(generation),
            sequence,
            line: LineOffset::new(line),
            bytes,
            more,
        },
    )
}

fn anything() -> impl Strategy<Value = Said> {
    prop_oneof![
        6 => any_packet().prop_map(Said::Packet),
        2 => any_packet().prop_map(Said::Arrives),
        2 => (0..8_usize).prop_map(Said::GivesBack),
        2 => any_message().prop_map(Said::Anything),
    ]
}

fn message(opcode: Opcode, instance: u32, sequence: u16, line: u64, bytes: u32, more: bool) -> NetMessage {
    NetMessage {
        opcode,
        lease: lease(instance),
        generation: LeaseGeneration::new(GENERATION),
        sequence,
        line: LineOffset::new(line),
        bytes,
        more,
    }
}

/// A backend, and a frontend of our own making.
struct Scene {
    memory: HardwareMemory,
    end: ChannelEnd<HardwareMemory>,
    backend: TestBackend<HardwareMemory>,
    wire: Arc<Mutex<Wire>>,
    /// What was received and not given back.
    held: Vec<NetMessage>,
    sent: u64,
}

impl Scene {
    fn new(memory: &HardwareMemory, offloads: Offloads) -> Self {
        let (mut backend, wire) = recording_backend(memory, offloads, usize::MAX, area(32, 16));
        backend.apply(Object::Channel(channel(1, 1, 512, false)));
        for instance in 1..=INSTANCES {
            let vlan = (instance == 3 || instance == 5).then_some(10);
            let addresses = if instance == 4 { vec!["10.0.0.1".parse().expect("one")] } else { Vec::new() };
            let registration =
                registration(instance, 1, GENERATION, RegistrationState::Active, transmit_area(instance));
            backend.apply(Object::Registration(RegistrationObject {
                policy: NicPolicy { vlan, addresses, ..NicPolicy::default() },
                ram_area: (instance == 2).then(ram_area),
                ..registration
            }));
        }
        let end = open(memory, &ChannelBook::default())(&channel(1, 1, 512, true)).expect("a channel");
        let memory = memory.clone();
        let mut this = Self { memory, end, backend, wire, held: Vec::new(), sent: 0 };
        while !this.end.ready() {
            this.backend.turn_once();
        }
        // Two of the drivers accept large packets.
        for instance in [1, 5] {
            let accepts = message(Opcode::Offloads, instance, 0, 0, Offloads::ALL.bits(), false);
            this.say(&accepts);
        }
        this
    }

    fn say(&mut self, message: &NetMessage) {
        if self.end.room() > 0 {
            self.end.send(message);
        }
        self.turn();
    }

    fn turn(&mut self) {
        self.end.publish();
        self.backend.turn_once();
        let mut inbox = [[0; 2]; MESSAGES_PER_LOOK];
        let count = self.end.receive(&mut inbox);
        let heard = inbox[..count].iter().map(|words| NetMessage::decode(*words).expect("a message"));
        self.held.extend(heard.filter(|message| message.opcode == Opcode::Receive));
    }

    fn send(&mut self, packet: &Forged) {
        let bytes = packet.bytes();
        let slot = self.sent % SLOTS * SLOT_BYTES;
        let at = transmit_area(packet.from).start_byte().saturating_add(slot);
        let front = scattered::FRONT_BYTES as usize;
        let more = packet.scattered && bytes.len() > front;
        if more {
            self.memory.write(at, &bytes[..front]);
            self.scatter(at, ram_area().start_byte().saturating_add(slot), &bytes[front..]);
        } else {
            self.memory.write(at, &bytes);
        }
        let sequence = u16::try_from(self.sent % 65_536).expect("in range");
        let length = u32::try_from(bytes.len()).expect("short");
        let message = message(Opcode::Transmit, packet.from, sequence, at.line().get(), length, more);
        self.sent += 1;
        self.say(&message);
    }

    /// Puts the rest of a packet into its sender's memory, in three pieces, and lists them.
    fn scatter(&self, front: ByteOffset, at: ByteOffset, rest: &[u8]) {
        let mut ranges = Vec::new();
        let mut place = at;
        for part in rest.chunks(rest.len().div_ceil(3)) {
            self.memory.write(place, part);
            ranges.push((place, u32::try_from(part.len()).expect("short")));
            place = place.saturating_add(part.len() as u64 + 8);
        }
        let mut list = [0; 256];
        let bytes = write_list(&ranges, &mut list);
        self.memory.write(scattered::list(front), &list[..bytes]);
    }

    fn arrive(&mut self, packet: &Forged) {
        // Also longer than any packet.
        let mut bytes = packet.bytes();
        if packet.payload_bytes > 60_000 {
            bytes.resize(69_600, 7);
        }
        self.wire.lock().expect("unpoisoned").arriving.push_back(bytes);
        self.turn();
    }

    /// Gives a buffer back. If it is not the first one of its instance that is not taken, and so has to be given back once more.
    fn give_back(&mut self, place: usize) {
        if !self.held.is_empty() {
            let place = place % self.held.len();
            let message = if place == 0 { self.held.remove(0) } else { self.held[place] };
            self.end.complete(NetMessage { opcode: Opcode::ReceiveDone, ..message }, Status::Sent);
        }
        self.turn();
    }

    fn sent_of(&self, instance: u32) -> u64 {
        self.backend.lease(instance).tx_packets
    }
}

/// A packet of which nothing is wrong.
fn right(from: u32, to: u8, header: usize, payload_bytes: usize) -> Forged {
    Forged { from, to, header, payload_bytes, tagged: false, scattered: from == 2, wrong: Vec::new() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_backend_survives_whatever_a_frontend_and_a_wire_say(
        able: bool, said in prop::collection::vec(anything(), 1..150),
    ) {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let options = CreateOptions {
            size_bytes: Some(POOL_BYTES), mode: CoherenceMode::Hardware, ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options).expect("a pool");
        let mut scene = Scene::new(&pool.hardware(), if able { Offloads::ALL } else { Offloads::NONE });
        // To the wire, to a neighbour and to all, from each.
        for instance in 1..=INSTANCES {
            let neighbour = if instance % 2 == 0 { 1 } else { 5 };
            for (to, header, payload_bytes) in [(9, 0, 1000), (9, 2, 9000), (neighbour, 2, 4000), (0, 0, 1000)] {
                scene.send(&right(instance, to, header, payload_bytes));
            }
            for _ in 0..4 {
                scene.turn();
            }
            prop_assert_eq!(scene.sent_of(instance), 4, "of instance {}: {:?}", instance, scene.backend.lease(instance).drops);
        }
        for it in &said {
            match it {
                Said::Packet(packet) => scene.send(packet),
                Said::Arrives(packet) => scene.arrive(packet),
                Said::GivesBack(place) => scene.give_back(*place),
                Said::Anything(message) => scene.say(message),
            }
        }
        // Whatever was said, every buffer can be given back once, and then frames flow again.
        while !scene.held.is_empty() {
            scene.give_back(0);
        }
        for _ in 0..50 {
            scene.turn();
        }
        let before = scene.backend.lease(1).rx_packets;
        scene.arrive(&right(9, 1, 0, 100));
        scene.turn();
        prop_assert!(scene.backend.lease(1).rx_packets > before, "{:?}", scene.backend.lease(1).drops);
    }
}
