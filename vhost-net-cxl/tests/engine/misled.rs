//! A frontend whose backend talks nonsense.

use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
use cxl_pool::{Area, CoherenceMode, CreateOptions, HostId, LineOffset, Memory, Pool};
use pod_protocol::ids::{LeaseGeneration, LeaseId};
use pod_protocol::objects::{ChannelObject, Object};
use proptest::prelude::*;
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::{ChannelEnd, MESSAGES_PER_LOOK};
use vhost_net_cxl::message::{NetMessage, Opcode, Run, Status};

use crate::echo::{BUFFER_BYTES, frame, returned};
use crate::guest::Guest;
use crate::pod::{POOL_BYTES, TestFrontend, Turn, all_features, area, channel, lease, open, port, route};

const QUEUE_SIZE: u16 = 128;

/// A frontend with a guest, and a backend of our own making.
struct Scene<M: Memory> {
    memory: M,
    frontend: TestFrontend<M>,
    end: ChannelEnd<M>,
    guest: Guest,
}

/// Where the NIC of the backend receives.
fn receive_area() -> Area {
    area(32, 8)
}

impl<M: Memory> Scene<M> {
    fn new(here: &M, there: &M) -> Self {
        let mut frontend = TestFrontend::new(here);
        let receives = Some(vec![receive_area()]);
        frontend.apply(Object::Channel(ChannelObject { receives, ..channel(1, 1, 2048, true) }));
        frontend.apply(Object::Port(port(1, area(8, 8), route(1, 1), None)));
        let mut guest = Guest::new(QUEUE_SIZE);
        guest.post(QUEUE_SIZE, BUFFER_BYTES);
        frontend.start(1, &guest, all_features());
        let mut end = open(there, &ChannelBook::default())(&channel(1, 1, 2048, false)).expect("a channel");
        while !end.ready() {
            frontend.turn_once();
        }
        Self { memory: there.clone(), frontend, end, guest }
    }

    fn turn(&mut self) -> Vec<NetMessage> {
        let mut heard = Vec::new();
        for _ in 0..30 {
            self.end.publish();
            self.frontend.turn_once();
            let mut inbox = [[0; 2]; MESSAGES_PER_LOOK];
            let count = self.end.receive(&mut inbox);
            heard.extend(inbox[..count].iter().filter_map(|words| NetMessage::decode(*words)));
        }
        heard
    }

    /// Puts a packet to the guest where piece `number` of this test lies, and says where that is.
    fn put(&self, number: u64, packet: &[u8]) -> LineOffset {
        let line = LineOffset::new(receive_area().start.get() + 64 * number);
        self.put_at(line, packet)
    }

    fn put_at(&self, line: LineOffset, packet: &[u8]) -> LineOffset {
        self.memory.write(line.bytes(), packet);
        self.memory.write_back(line.bytes(), packet.len() as u64);
        self.memory.store_fence();
        line
    }
}

fn receive(sequence: u16, line: LineOffset, bytes: usize, more: bool) -> NetMessage {
    NetMessage {
        opcode: Opcode::Receive,
        lease: lease(1),
        generation: LeaseGeneration::new(1),
        sequence,
        line,
        bytes: u32::try_from(bytes).expect("short"),
        more,
    }
}

fn scene() -> Scene<SimulatedMemory> {
    let pool = SimulatedPool::new(15, POOL_BYTES);
    Scene::new(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)))
}

#[test]
fn pieces_that_make_no_packet_are_dropped_and_given_back() {
    let mut scene = scene();
    let packet = [vec![0; 12], returned(&frame(1, 100))].concat();
    let line = scene.put(0, &packet);
    let whole = |sequence| receive(sequence, line, packet.len(), false);
    let outside = LineOffset::new(POOL_BYTES / 64 - 1);
    let piece = |sequence, more| receive(sequence, line, 4096, more);
    let long: Vec<_> = (0..20).map(|number| piece(4, number < 19)).collect();
    let many: Vec<_> = (0..40).map(|number| receive(5, line, 64, number < 39)).collect();
    let bad: [Vec<NetMessage>; 6] = [
        // The rest of it never comes.
        vec![receive(0, line, 64, true)],
        vec![receive(1, outside, 100, false)],
        vec![receive(2, line, 64, true), receive(2, outside, 100, false)],
        // Nothing behind the header.
        vec![receive(3, line, 12, false)],
        long,
        many,
    ];
    for (number, messages) in (0_u64..).zip(&bad) {
        for message in messages {
            assert!(scene.end.request(message));
        }
        assert!(scene.end.request(&whole(100)));
        let heard = scene.turn();
        let given_back: Vec<u16> = heard
            .iter()
            .filter(|it| it.opcode == Opcode::ReceiveDone)
            .flat_map(|it| (0..Run::from_code(it.bytes).packets).map(|after| it.sequence + after))
            .collect();
        assert_eq!(given_back, [messages[0].sequence, 100]);
        let got = scene.guest.received(BUFFER_BYTES);
        assert_eq!(got.len(), 1, "case {number}: the good one arrived");
        assert_eq!(got[0].1, packet[12..]);
        let mut drops = scene.frontend.lease(1).drops;
        let outside = drops.remove("outside-area").unwrap_or(0);
        let bad = drops.remove("bad-message").unwrap_or(0);
        assert!(drops.is_empty(), "{drops:?}");
        // The second and the third.
        assert_eq!((bad + outside, outside), (number + 1, number.min(2)));
    }
}

#[test]
fn a_backend_that_lies_about_where_a_frame_is_has_nothing_else_of_the_pool_shown_to_a_guest() {
    let mut scene = scene();
    let secret = [vec![0; 12], returned(&frame(7, 100))].concat();
    let bytes = secret.len();
    // What its guest sends, the memory of another one, its own rings, and either end of where it receives.
    let [before, behind] = [receive_area().start.get() - 1, receive_area().end().get()].map(LineOffset::new);
    let places = [area(8, 8).start, area(50, 1).start, area(1, 1).start, before, behind];
    let mut sequence = 0;
    let mut lie = |scene: &mut Scene<SimulatedMemory>, pieces: &[(LineOffset, usize)]| {
        for (number, (line, bytes)) in (1..).zip(pieces) {
            assert!(scene.end.request(&receive(sequence, *line, *bytes, number < pieces.len())));
        }
        sequence += 1;
    };
    let good = scene.put(1, &secret);
    for line in places {
        // The rings are left as they are.
        if line != area(1, 1).start {
            scene.put_at(line, &secret);
        }
        for pieces in [vec![(line, bytes)], vec![(good, 64), (line, bytes)], vec![(line, 64), (good, 64)]] {
            lie(&mut scene, &pieces);
        }
    }
    let last = LineOffset::new(receive_area().end().get() - 1);
    lie(&mut scene, &[(last, bytes)]);
    scene.turn();
    assert!(scene.guest.received(BUFFER_BYTES).is_empty());
    let lies = 3 * places.len() as u64 + 1;
    assert_eq!(scene.frontend.lease(1).drops, [("outside-area".to_owned(), lies)].into());
    // What is where it should be arrives, before and after the NIC receives elsewhere.
    lie(&mut scene, &[(good, bytes)]);
    scene.turn();
    assert_eq!(scene.guest.received(BUFFER_BYTES)[0].1, secret[12..]);
    let receives = Some(vec![area(50, 1)]);
    scene.frontend.apply(Object::Channel(ChannelObject { receives, ..channel(1, 1, 2048, true) }));
    lie(&mut scene, &[(good, bytes)]);
    lie(&mut scene, &[(area(50, 1).start, bytes)]);
    scene.turn();
    assert_eq!(scene.guest.received(BUFFER_BYTES).len(), 1);
    assert_eq!(scene.frontend.lease(1).drops, [("outside-area".to_owned(), lies + 1)].into());
}

#[test]
fn headers_that_its_guest_does_not_understand_are_dropped_and_counted() {
    let mut scene = scene();
    let bare = all_features() & !vhost_net_cxl::offloads::Offloads::ALL.features();
    for ring in 0..2 {
        scene.frontend.task.stop_ring(lease(1), ring, None);
    }
    scene.guest = Guest::new(QUEUE_SIZE);
    scene.guest.post(QUEUE_SIZE, BUFFER_BYTES);
    scene.frontend.start(1, &scene.guest, bare);
    let unfinished = [vec![1, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0], returned(&frame(1, 100))].concat();
    let line = scene.put(0, &unfinished);
    // One by itself, and several together.
    for sequence in 0..5 {
        assert!(scene.end.request(&receive(sequence, line, unfinished.len(), false)));
    }
    scene.turn();
    assert!(scene.guest.received(BUFFER_BYTES).is_empty());
    assert_eq!(scene.frontend.lease(1).drops, [("receiver-offloads".to_owned(), 5)].into());
}

fn any_opcode() -> impl Strategy<Value = Opcode> {
    prop_oneof![
        4 => Just(Opcode::Receive),
        3 => Just(Opcode::TransmitDone),
        1 => Just(Opcode::Transmit),
        1 => Just(Opcode::ReceiveDone),
        1 => Just(Opcode::Offloads),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_frontend_survives_whatever_a_backend_says(
        messages in prop::collection::vec(
            (any_opcode(), 0..3u32, 0..4u16, 0..4u16, prop_oneof![0..2_000_000u64, 500_000..560_000u64], 0..80_000u32, any::<bool>()),
            1..200,
        ),
    ) {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let options = CreateOptions {
            size_bytes: Some(POOL_BYTES), mode: CoherenceMode::Hardware, ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options).expect("a pool");
        let memory = pool.hardware();
        let mut scene = Scene::new(&memory, &memory);
        let mut sent = 0;
        for (number, (opcode, lease, generation, sequence, line, bytes, more)) in (0..).zip(messages) {
            if number < 40 && scene.guest.send(&[0; 12], &frame(number, 100)) {
                sent += 1;
            }
            let lease = LeaseId::new(lease).expect("small");
            let generation = LeaseGeneration::new(generation);
            let line = LineOffset::new(line);
            scene.end.send(&NetMessage { opcode, lease, generation, sequence, line, bytes, more });
            scene.end.publish();
            scene.frontend.turn_once();
        }
        // What it still asks for is answered, and then packets flow as ever.
        let mut returned_count = scene.guest.transmit.reclaim_pairs().len();
        for _ in 0..20 {
            scene.frontend.task.retry();
            for message in scene.turn().into_iter().filter(|it| it.opcode == Opcode::Transmit) {
                let done = NetMessage { opcode: Opcode::TransmitDone, ..message };
                scene.end.complete(done, Status::Sent);
            }
            returned_count += scene.guest.transmit.reclaim_pairs().len();
        }
        // Of those that it heard of before, it was told anything: they may wait for an answer for ever.
        prop_assert!(returned_count <= sent);
        let _ = scene.guest.received(BUFFER_BYTES);
        let packet = [vec![0; 12], returned(&frame(1, 100))].concat();
        let line = scene.put(0, &packet);
        scene.end.request(&receive(9, line, packet.len(), false));
        scene.turn();
        let got = scene.guest.received(BUFFER_BYTES);
        prop_assert!(got.iter().any(|(_, frame)| *frame == packet[12..]));
    }
}
