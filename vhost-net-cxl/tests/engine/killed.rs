//! A frontend is killed while completions are out of order: a guest's packets end in another order than it offered them, and its VMM
//! knows of none but those that were returned.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool, check_seeds};
use cxl_pool::{Area, HostId};
use pod_protocol::objects::{Object, PortObject, RegistrationObject, RegistrationState};
use vhost_net_cxl::offloads::Offloads;

use crate::echo::frame;
use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, mac, port, registration, route,
    settle,
};
use crate::recording::{Wire, recording_backend};
use crate::switching::transmit_area;

const SLOTS: u32 = 512;
const QUEUE_SIZE: u16 = 128;
const BUFFER_BYTES: u32 = 2048;
const KILLS: u32 = 6;
/// Long enough to be lent, where the guest lies in the pool.
const FRAME_BYTES: usize = 600;

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It waits for the NIC.
    Wire,
    /// The other guest gets it at once.
    Neighbour,
    /// The frontend refuses it: its header asks for what was not agreed on.
    Frontend,
    /// The backend refuses it: it is from another's address.
    Backend,
}

impl End {
    const ALL: [Self; 4] = [Self::Wire, Self::Neighbour, Self::Frontend, Self::Backend];
}

/// Numbers from a seed (xorshift64*).
struct Lots(u64);

impl Lots {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        u32::try_from((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % u64::from(bound)).expect("small")
    }
}

/// Two guests of one frontend and one NIC, the first of which sends.
struct Scene {
    pool: SimulatedPool,
    frontend: TestFrontend<SimulatedMemory>,
    backend: TestBackend<SimulatedMemory>,
    wire: Arc<Mutex<Wire>>,
    guests: [Guest; 2],
    /// Where the first guest's transmit queue lies, if that is in the pool.
    ram_area: Option<Area>,
    generation: u32,
    /// What the first guest offered, in order, and how much of it was returned.
    offered: Vec<End>,
    returned: usize,
    /// How many packets the second guest received.
    received: u16,
    /// What reached the wire or the second guest since the frontend began.
    arrived: [Vec<u32>; 2],
    /// Everything that ever did.
    all: [BTreeSet<u32>; 2],
}

impl Scene {
    fn new(seed: u64) -> Self {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let memory = pool.host(HostId::new(2));
        let (mut backend, wire) = recording_backend(&memory, Offloads::NONE, 2, area(32, 16));
        backend.apply(Object::Channel(channel(1, 1, SLOTS, false)));
        let here = pool.host(HostId::new(1));
        let (first, ram_area) = Guest::of_seed(seed, &here, QUEUE_SIZE);
        for number in [1, 2] {
            let registration = registration(number, 1, 1, RegistrationState::Active, transmit_area(number));
            let ram_area = if number == 1 { ram_area } else { None };
            backend.apply(Object::Registration(RegistrationObject { ram_area, ..registration }));
        }
        let frontend = TestFrontend::new(&here).with_pool_file(first.pool_file);
        let mut guests = [first, Guest::new(QUEUE_SIZE)];
        guests[1].post(QUEUE_SIZE, BUFFER_BYTES);
        let (arrived, all) = Default::default();
        let offered = Vec::new();
        let mut scene = Self {
            pool,
            frontend,
            backend,
            wire,
            guests,
            ram_area,
            generation: 1,
            offered,
            returned: 0,
            received: 0,
            arrived,
            all,
        };
        scene.begin();
        scene.settle();
        scene.wire.lock().expect("unpoisoned").frames.clear();
        scene
    }

    /// What a frontend is told when it begins: and its VMMs go on at the used indices, as QEMU does.
    fn begin(&mut self) {
        self.frontend.apply(Object::Channel(channel(1, self.generation, SLOTS, true)));
        for number in [1, 2] {
            let port = port(number, transmit_area(number), route(1, 1), None);
            let ram_area = if number == 1 { self.ram_area } else { None };
            self.frontend.apply(Object::Port(PortObject { ram_area, ..port }));
        }
        let used = u16::try_from(self.returned).expect("few");
        let features = all_features() & !Offloads::ALL.features();
        let [first, second] = &self.guests;
        let start = |task: &mut TestFrontend<_>, number, ring| {
            task.task.start_ring(crate::pod::lease(number), ring, None);
        };
        start(&mut self.frontend, 1, first.transmit.ring(features, used));
        start(&mut self.frontend, 2, second.receive.ring(features, self.received));
    }

    /// The frontend is killed; its successor begins.
    fn kill(&mut self) {
        self.pool.crash(HostId::new(1));
        // What it had returned counts, and nothing else.
        self.look();
        let here = self.pool.host(HostId::new(1));
        self.guests[0].outlive(&here);
        self.frontend = TestFrontend::new(&here).with_pool_file(self.guests[0].pool_file);
        self.arrived = Default::default();
        self.generation += 1;
        self.backend.apply(Object::Channel(channel(1, self.generation, SLOTS, false)));
        self.begin();
    }

    fn offer(&mut self, end: End) {
        let number = u32::try_from(self.offered.len()).expect("few");
        let mut sent = frame(number, FRAME_BYTES);
        let mut header = [0; 12];
        match end {
            End::Wire => {}
            End::Neighbour => sent[..6].copy_from_slice(&mac(2).bytes()),
            End::Frontend => header[..10].copy_from_slice(&[1, 0, 0, 0, 0, 0, 34, 0, 16, 0]),
            End::Backend => sent[6..12].copy_from_slice(&mac(9).bytes()),
        }
        if self.guests[0].send(&header, &sent) {
            self.offered.push(end);
        }
    }

    /// Looks at what was returned and what arrived.
    fn look(&mut self) {
        for head in self.guests[0].transmit.reclaim_pairs() {
            let index = u16::try_from(self.returned).expect("few");
            assert_eq!(head, self.guests[0].transmit.offered_head(index), "in the order of offering");
            self.returned += 1;
        }
        assert!(self.returned <= self.offered.len());
        let frames: Vec<_> = self.wire.lock().expect("unpoisoned").frames.drain(..).collect();
        for got in frames {
            self.note(0, End::Wire, &got);
        }
        for (_, got) in self.guests[1].received(BUFFER_BYTES) {
            self.received += 1;
            self.note(1, End::Neighbour, &got);
        }
    }

    fn note(&mut self, place: usize, end: End, got: &[u8]) {
        let number = u32::from_le_bytes(got[14..18].try_into().expect("four bytes"));
        assert_eq!(self.offered[number as usize], end);
        assert_eq!(got[12..], frame(number, FRAME_BYTES)[12..], "frame {number}");
        assert!(self.arrived[place].last().is_none_or(|last| *last < number), "in order, and once per life");
        self.arrived[place].push(number);
        self.all[place].insert(number);
    }

    fn settle(&mut self) {
        settle(&mut [&mut self.frontend, &mut self.backend]);
    }
}

#[test]
fn the_successor_of_a_killed_frontend_sends_what_was_not_returned_and_nothing_else() {
    check_seeds("-p vhost-net-cxl --test engine", 24, |seed| {
        let mut scene = Scene::new(seed);
        let mut lots = Lots(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        // At the first kill, what was offered later has ended, and what was offered first has not.
        scene.wire.lock().expect("unpoisoned").room = 0;
        scene.offer(End::Wire);
        scene.offer(End::Neighbour);
        scene.settle();
        scene.look();
        assert_eq!((scene.returned, &scene.arrived), (0, &[vec![], vec![1]]));
        scene.kill();
        for _ in 0..KILLS {
            let returned = scene.returned;
            for _ in 0..4 + lots.below(8) {
                for _ in 0..lots.below(8) {
                    scene.offer(End::ALL[lots.below(4) as usize]);
                }
                scene.wire.lock().expect("unpoisoned").room = lots.below(4) as usize;
                for _ in 0..lots.below(6) {
                    if lots.below(2) == 0 {
                        scene.frontend.turn_once()
                    } else {
                        scene.backend.turn_once()
                    };
                }
                scene.look();
                // Nothing that the guest had back is sent again.
                let first = |place: usize| scene.arrived[place].first().copied();
                assert!([0, 1].iter().filter_map(|it| first(*it)).all(|it| it as usize >= returned));
            }
            scene.kill();
        }
        scene.wire.lock().expect("unpoisoned").room = usize::MAX;
        scene.settle();
        scene.look();
        assert_eq!(scene.returned, scene.offered.len(), "every descriptor comes back, once");
        for (place, end) in [(0, End::Wire), (1, End::Neighbour)] {
            let numbers = (0..).zip(&scene.offered).filter(|(_, it)| **it == end).map(|(number, _)| number);
            assert_eq!(scene.all[place], numbers.collect(), "{end:?}");
        }
        assert_eq!(scene.pool.faults(), Faults::default());
        Ok(())
    });
}
