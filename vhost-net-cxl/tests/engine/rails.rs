//! An instance that uses two NICs at the same time: flows are spread over them, and move when one dies or comes back.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool, check_seeds};
use cxl_pool::{Area, CoherenceMode, HostId, Memory};
use pod_protocol::objects::{
    NicPolicy, Object, PortObject, RailObject, RailState, RateLimit, RegistrationObject, RegistrationState,
};
use pod_protocol::telemetry::LeaseTelemetry;
use vhost_net_cxl::offloads::Offloads;

use crate::echo::{BUFFER_BYTES, frame, mapped_pool};
use crate::finishing::{large, payload};
use crate::guest::{Guest, ram_area};
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, connect, draws, lease, mac,
    port, registration, route, settle,
};
use crate::recording::{Wire, recording_backend};
use RailState::{Down, Gone, Up};

const SLOTS: u32 = 512;
/// The last byte of the address to which the first flow goes: nobody's here.
const FIRST_FLOW: u8 = 100;

/// What went out: over which rail, of which flow, and its number there.
type Sent = (usize, u8, u32);

/// A frontend with one guest, and two backends whose NICs it uses both.
struct Pod {
    pool: SimulatedPool,
    frontend: TestFrontend<SimulatedMemory>,
    backends: [TestBackend<SimulatedMemory>; 2],
    wires: [Arc<Mutex<Wire>>; 2],
    guest: Guest,
    /// The memory in the pool that is leased to the guest.
    ram_area: Option<Area>,
    /// In the order in which it went out.
    sent: Vec<Sent>,
    /// Of each flow, the number of its next packet.
    next: BTreeMap<u8, u32>,
}

impl Pod {
    fn new(seed: u64) -> Self {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let here = pool.host(HostId::new(1));
        let (mut guest, ram_area) = Guest::of_seed(seed, &here, 256);
        let mut frontend = TestFrontend::new(&here).with_pool_file(guest.pool_file);
        let mut wires = Vec::new();
        let backends = [1_u32, 2].map(|number| {
            let memory = pool.host(HostId::new(u16::try_from(number).expect("small") + 1));
            let receive_area = area(if number == 1 { 32 } else { 48 }, 8);
            let (mut backend, wire) = recording_backend(&memory, Offloads::ALL, usize::MAX, receive_area);
            wires.push(wire);
            backend.apply(Object::Channel(channel(number, 1, SLOTS, false)));
            backend.apply(Object::Registration(RegistrationObject { ram_area, ..on_a_rail(number, 1) }));
            frontend.apply(Object::Channel(channel(number, 1, SLOTS, true)));
            backend
        });
        frontend.apply(Object::Port(PortObject { ram_area, ..spread([Up, Up]) }));
        guest.post(32, BUFFER_BYTES);
        frontend.start(1, &guest, all_features());
        let (wires, next) = (wires.try_into().expect("two"), BTreeMap::new());
        let mut this = Self { pool, frontend, backends, wires, guest, ram_area, sent: Vec::new(), next };
        this.settle();
        this.sent.clear();
        this
    }

    /// Turns one backend, and notes what its NIC sent.
    fn turn(&mut self, rail: usize) -> bool {
        let busy = self.backends[rail].turn_once();
        let mut wire = self.wires[rail].lock().expect("unpoisoned");
        let numbered = |frame: &Vec<u8>| {
            (frame[12..14] == [0x88, 0xb5])
                .then(|| (frame[5] - FIRST_FLOW, u32::from_le_bytes(frame[14..18].try_into().expect("four"))))
        };
        self.sent.extend(wire.frames.iter().filter_map(numbered).map(|(flow, number)| (rail, flow, number)));
        wire.frames.clear();
        busy
    }

    fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..100_000 {
            let busy = self.frontend.turn_once() | self.turn(0) | self.turn(1);
            quiet = if busy { 0 } else { quiet + 1 };
            if quiet > 20 {
                assert_eq!(self.pool.faults(), Faults::default());
                return;
            }
        }
        panic!("the pod never comes to rest");
    }

    /// Offers the next packet of a flow; false if the queue is full.
    fn send(&mut self, flow: u8) -> bool {
        let next = self.next.entry(flow).or_default();
        // Long enough to stay in the pool where it lies there.
        let mut packet = frame(*next, 600 + usize::from(flow));
        packet[5] = FIRST_FLOW + flow;
        let offered = self.guest.send(&[0; 12], &packet);
        *next += u32::from(offered);
        offered
    }

    /// Every packet went out once, and those of each flow in order.
    fn check(&self) {
        for (flow, count) in &self.next {
            let numbers = self.sent.iter().filter(|(_, other, _)| other == flow).map(|(.., number)| *number);
            assert_eq!(numbers.collect::<Vec<_>>(), (0..*count).collect::<Vec<_>>(), "flow {flow}");
        }
        for backend in &self.backends {
            assert_eq!(backend.lease(1).drops, [].into());
        }
        assert_eq!(self.frontend.lease(1).drops, [].into());
    }

    /// Over which rails a flow went since the packet with this number.
    fn rails_of(&self, flow: u8, since: u32) -> Vec<usize> {
        let of_flow = self.sent.iter().filter(|(_, other, number)| *other == flow && *number >= since);
        let mut rails: Vec<usize> = of_flow.map(|(rail, ..)| *rail).collect();
        rails.dedup();
        rails
    }

    fn tell(&mut self, states: [RailState; 2]) {
        self.frontend.apply(Object::Port(PortObject { ram_area: self.ram_area, ..spread(states) }));
    }
}

fn on_a_rail(channel: u32, generation: u16) -> RegistrationObject {
    let registration = registration(1, channel, generation, RegistrationState::Active, area(8, 8));
    RegistrationObject { has_other_rails: true, ..registration }
}

fn spread(states: [RailState; 2]) -> PortObject {
    let rail = |number, state| RailObject { route: route(number, 1), state };
    let rails = vec![rail(1, states[0]), rail(2, states[1])];
    PortObject { rails, ..port(1, area(8, 8), route(1, 1), None) }
}

#[test]
fn what_a_guest_may_receive_counts_for_all_of_its_nics_together() {
    let mut pod = Pod::new(5);
    // Ten at once, and then one a second.
    let ten = RateLimit { packets_per_second: Some(1), burst_ms: 10_000, ..RateLimit::default() };
    let limit = |pod: &mut Pod, receive| {
        let policy = NicPolicy { receive, ..NicPolicy::default() };
        for (backend, number) in pod.backends.iter_mut().zip([1, 2]) {
            let policy = policy.clone();
            let registration = RegistrationObject { policy, ram_area: pod.ram_area, ..on_a_rail(number, 1) };
            backend.apply(Object::Registration(registration));
        }
        pod.frontend.apply(Object::Port(PortObject { policy, ram_area: pod.ram_area, ..spread([Up, Up]) }));
    };
    let arrive = |pod: &mut Pod, each: usize| {
        for wire in &pod.wires {
            let frame = |number| [vec![0; 12], from_outside(number)].concat();
            wire.lock().expect("unpoisoned").arriving.extend((0..each).map(frame));
        }
        pod.settle();
        pod.guest.received(BUFFER_BYTES).len()
    };
    limit(&mut pod, ten);
    let got = arrive(&mut pod, 12);
    assert!((10..15).contains(&got), "{got} of what two NICs let pass");
    let drops = |lease: LeaseTelemetry| lease.drops.get("rate-limit").copied().unwrap_or(0);
    let at_nics: u64 = pod.backends.iter().map(|backend| drops(backend.lease(1))).sum();
    assert!(at_nics >= 2, "each NIC lets pass no more than the guest may have: {at_nics}");
    assert_eq!(drops(pod.frontend.lease(1)) + at_nics + got as u64, 24);
    // Said again, it starts no new burst.
    limit(&mut pod, ten);
    assert!(arrive(&mut pod, 5) < 5);
    limit(&mut pod, RateLimit::default());
    assert_eq!(arrive(&mut pod, 12), 24);
    // A packet of ten frames counts as those.
    limit(&mut pod, ten);
    let (header, frame) = large(mac(99), mac(1), &payload(14_000));
    for wire in &pod.wires {
        wire.lock().expect("unpoisoned").arriving.push_back([&header[..], &frame].concat());
    }
    pod.settle();
    assert_eq!(pod.guest.received(BUFFER_BYTES).len(), 1);
}

/// A frame to the guest from elsewhere.
fn from_outside(number: usize) -> Vec<u8> {
    let mut frame = frame(u32::try_from(number).expect("small"), 100);
    frame[..6].copy_from_slice(&mac(1).bytes());
    frame[6..12].copy_from_slice(&mac(99).bytes());
    frame
}

#[test]
fn flows_are_spread_and_each_stays_on_its_rail() {
    let mut pod = Pod::new(1);
    for _ in 0..10 {
        (0..8).for_each(|flow| assert!(pod.send(flow)));
        pod.settle();
        assert_eq!(pod.guest.transmit.reclaim_pairs().len(), 8);
    }
    pod.check();
    let rails: Vec<Vec<usize>> = (0..8).map(|flow| pod.rails_of(flow, 0)).collect();
    assert!(rails.iter().all(|rails| rails.len() == 1), "{rails:?}");
    assert!(rails.contains(&vec![0]) && rails.contains(&vec![1]), "{rails:?}");
}

/// Over which rails flows go whose packets stay in the guest's memory.
fn rails_of_lent_flows<M: Memory>(hosts: &[M; 3], mut guest: Guest) -> Vec<Vec<usize>> {
    let lent = Some(ram_area());
    let mut frontend = TestFrontend::new(&hosts[0]).with_pool_file(guest.pool_file);
    let (mut wires, mut backends) = (Vec::new(), Vec::new());
    for (number, memory) in (1..).zip(&hosts[1..]) {
        let receive_area = area(if number == 1 { 32 } else { 40 }, 8);
        let (mut backend, wire) = recording_backend(memory, Offloads::ALL, usize::MAX, receive_area);
        wires.push(wire);
        backend.apply(Object::Channel(channel(number, 1, SLOTS, false)));
        backend.apply(Object::Registration(RegistrationObject { ram_area: lent, ..on_a_rail(number, 1) }));
        frontend.apply(Object::Channel(channel(number, 1, SLOTS, true)));
        backends.push(backend);
    }
    frontend.apply(Object::Port(PortObject { ram_area: lent, ..spread([Up, Up]) }));
    frontend.start(1, &guest, all_features());
    // An odd number of flows: packets are in one piece and in two by turns.
    for number in 0..4 {
        for flow in 0..7 {
            let mut packet = frame(number, 1000);
            packet[5] = FIRST_FLOW + flow;
            assert!(guest.send(&[0; 12], &packet));
        }
    }
    let (first, second) = backends.split_at_mut(1);
    settle(&mut [&mut frontend, &mut first[0], &mut second[0]]);
    assert_eq!(frontend.book.zero_copy(), 28);
    let went = |rail: usize, flow: u8| {
        let wire = wires[rail].lock().expect("unpoisoned");
        wire.frames.iter().any(|frame| frame[12..14] == [0x88, 0xb5] && frame[5] == FIRST_FLOW + flow)
    };
    (0..7).map(|flow| (0..2).filter(|rail| went(*rail, flow)).collect()).collect()
}

#[test]
fn flows_of_a_guest_in_the_pool_are_spread_too() {
    let simulated = SimulatedPool::new(4, POOL_BYTES);
    let hosts = [1, 2, 3].map(|host| simulated.host(HostId::new(host)));
    let guest = Guest::in_simulated_pool(&hosts[0], 256);
    let of_others = rails_of_lent_flows(&hosts, guest);
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let pool = mapped_pool(&directory, CoherenceMode::Hardware);
    let path = directory.path().join("pool");
    let file = File::options().read(true).write(true).open(path).expect("the pool's file");
    let hosts = [1, 2, 3].map(|_| pool.hardware());
    for rails in [of_others, rails_of_lent_flows(&hosts, Guest::in_pool_file(&file, 256))] {
        assert!(rails.iter().all(|rails| rails.len() == 1), "{rails:?}");
        assert!(rails.contains(&vec![0]) && rails.contains(&vec![1]), "{rails:?}");
    }
}

#[test]
fn queue_pairs_are_spread_over_the_nics_and_move_together() {
    let mut pod = Pod::new(2);
    pod.frontend.task.remove(&pod_protocol::objects::ObjectId::Port(lease(1)), None);
    pod.frontend.apply(Object::Port(PortObject { queue_pairs: 2, ..spread([Up, Up]) }));
    pod.frontend.start(1, &pod.guest, all_features());
    // The second pair's transmit queue.
    let mut second = Guest::new(256);
    pod.frontend.task.start_ring(lease(1), second.transmit.ring_as(3, all_features(), 0), None);
    let mut number = 0;
    let mut offer = |guest: &mut Guest, flow: u8| {
        let mut packet = frame(number, 100);
        packet[5] = FIRST_FLOW + flow;
        number += 1;
        assert!(guest.send(&[0; 12], &packet));
    };
    for flow in 0..8 {
        offer(&mut pod.guest, flow);
        offer(&mut second, 8 + flow);
    }
    pod.settle();
    let rails_of = |pod: &Pod, flows: std::ops::Range<u8>| {
        let mut rails: Vec<usize> =
            pod.sent.iter().filter(|(_, flow, _)| flows.contains(flow)).map(|(rail, ..)| *rail).collect();
        assert_eq!(rails.len(), 8);
        rails.dedup();
        rails
    };
    // Whatever flow a packet belongs to: the queue says where it goes.
    assert_eq!((rails_of(&pod, 0..8), rails_of(&pod, 8..16)), (vec![0], vec![1]));
    pod.sent.clear();
    pod.backends[0].link.set(false);
    for flow in 0..8 {
        offer(&mut pod.guest, flow);
        offer(&mut second, 8 + flow);
    }
    pod.settle();
    assert_eq!((rails_of(&pod, 0..8), rails_of(&pod, 8..16)), (vec![1], vec![1]));
    assert_eq!(pod.guest.transmit.reclaim_pairs().len(), 16);
    assert_eq!(second.transmit.reclaim_pairs().len(), 16);
}

#[test]
fn flows_of_a_dead_rail_move_at_once_and_come_back_with_it() {
    let mut pod = Pod::new(3);
    (0..8).for_each(|flow| assert!(pod.send(flow)));
    pod.settle();
    let own: Vec<usize> = (0..8).map(|flow| pod.rails_of(flow, 0)[0]).collect();
    // The cable is pulled while packets are on their way, and the controller says nothing.
    (0..8).for_each(|flow| assert!(pod.send(flow)));
    pod.frontend.turn_once();
    pod.backends[0].link.set(false);
    (0..8).for_each(|flow| assert!(pod.send(flow)));
    pod.settle();
    pod.check();
    (0..8).for_each(|flow| assert_eq!(pod.rails_of(flow, 1), [1], "flow {flow}"));
    assert_eq!(pod.guest.transmit.reclaim_pairs().len(), 24);
    // It says that the link is down, and then that it is back.
    pod.tell([Down, Up]);
    (0..8).for_each(|flow| assert!(pod.send(flow)));
    pod.settle();
    pod.backends[0].link.set(true);
    pod.tell([Up, Up]);
    (0..8).for_each(|flow| assert!(pod.send(flow)));
    pod.settle();
    pod.check();
    let now: Vec<usize> = (0..8).map(|flow| pod.rails_of(flow, 4)[0]).collect();
    assert_eq!(now, own, "each flow is where it was");
}

#[test]
fn a_rail_that_gave_packets_back_is_tried_again_without_the_controller() {
    let mut pod = Pod::new(4);
    pod.backends[0].link.set(false);
    (0..8).for_each(|flow| assert!(pod.send(flow)));
    pod.settle();
    pod.backends[0].link.set(true);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !pod.sent.iter().any(|(rail, ..)| *rail == 0) {
        assert!(Instant::now() < deadline, "the rail that is back is never used again");
        (0..8).for_each(|flow| assert!(pod.send(flow)));
        pod.settle();
        pod.guest.transmit.reclaim_pairs();
        std::thread::sleep(Duration::from_millis(10));
    }
    pod.check();
}

/// Whatever dies and comes back, and whenever the controller says so: nothing is lost or doubled, and flows stay in order.
#[test]
fn no_order_of_events_loses_doubles_or_reorders_anything() {
    check_seeds("-p vhost-net-cxl --test engine no_order_of_events", 24, |seed| {
        let mut pod = Pod::new(seed);
        let mut draw = draws(seed);
        let mut returned = 0;
        for _ in 0..600 {
            let rail = usize::from(draw(2) == 1);
            match draw(16) {
                0..6 => {
                    let flow = u8::try_from(draw(6)).expect("small");
                    for _ in 0..=draw(4) {
                        let _ = pod.send(flow);
                    }
                }
                6..9 => _ = pod.frontend.turn_once(),
                9..13 => _ = pod.turn(rail),
                13 => _ = pod.backends[rail].link.set(draw(2) == 0),
                14 => {
                    let says = |up: bool| if up { Up } else { Down };
                    let states = [draw(3) > 0, draw(3) > 0].map(says);
                    pod.tell(states);
                }
                _ => {
                    let room =
                        if draw(3) == 0 { usize::MAX } else { usize::try_from(draw(6)).expect("small") };
                    pod.wires[rail].lock().expect("unpoisoned").room = room;
                }
            }
            pod.frontend.task.retry();
            returned += pod.guest.transmit.reclaim_pairs().len();
        }
        for rail in 0..2 {
            pod.backends[rail].link.set(true);
            pod.wires[rail].lock().expect("unpoisoned").room = usize::MAX;
        }
        pod.settle();
        pod.tell([Down, Down]);
        pod.settle();
        pod.tell([Up, Up]);
        pod.settle();
        returned += pod.guest.transmit.reclaim_pairs().len();
        pod.check();
        assert_eq!(returned, pod.sent.len(), "every descriptor came back, seed {seed}");
        assert_eq!(pod.frontend.book.zero_copy() > 0, pod.ram_area.is_some());
        Ok(())
    });
}

#[test]
fn what_a_dead_backend_was_sent_goes_over_the_other_nic_once_it_is_gone() {
    check_seeds("-p vhost-net-cxl --test engine", 8, |seed| {
        let mut pod = Pod::new(seed);
        for _ in 0..4 {
            (0..8).for_each(|flow| assert!(pod.send(flow)));
        }
        // They are announced to both; the first backend dies before it looks.
        for _ in 0..8 {
            pod.frontend.turn_once();
        }
        pod.pool.crash(HostId::new(2));
        settle(&mut [&mut pod.frontend, &mut pod.backends[1]]);
        pod.turn(1);
        assert!(pod.guest.transmit.reclaim_pairs().len() < 32, "nobody knows yet");
        pod.tell([Gone, Up]);
        (0..8).for_each(|flow| assert!(pod.send(flow)));
        settle(&mut [&mut pod.frontend, &mut pod.backends[1]]);
        pod.turn(1);
        pod.check();
        // Its successor has another channel; the flows come back.
        let memory = pod.pool.host(HostId::new(2));
        (pod.backends[0], pod.wires[0]) = recording_backend(&memory, Offloads::ALL, usize::MAX, area(40, 8));
        connect(&mut pod.frontend, &mut pod.backends[0], 2);
        let registration = RegistrationObject { ram_area: pod.ram_area, ..on_a_rail(1, 1) };
        pod.backends[0].apply(Object::Registration(registration));
        pod.tell([Up, Up]);
        pod.settle();
        (0..8).for_each(|flow| assert!(pod.send(flow)));
        pod.settle();
        pod.check();
        assert!(pod.sent.iter().any(|(rail, ..)| *rail == 0));
        Ok(())
    });
}

#[test]
fn with_all_rails_dead_packets_wait_for_the_backup_nic() {
    let mut pod = Pod::new(6);
    for backend in &pod.backends {
        backend.link.set(false);
    }
    for _ in 0..3 {
        (0..8).for_each(|flow| assert!(pod.send(flow)));
    }
    pod.settle();
    assert!(pod.sent.is_empty() && pod.guest.transmit.reclaim_pairs().is_empty());
    // The controller moves the instance: to the second host's NIC here, now alone and with another generation.
    pod.backends[1].link.set(true);
    let moved = registration(1, 2, 2, RegistrationState::Active, area(8, 8));
    pod.backends[1].apply(Object::Registration(moved));
    pod.backends[0].task.remove(&pod_protocol::objects::ObjectId::Registration {
        lease: lease(1),
        nic: crate::pod::NIC.into(),
    });
    pod.frontend.apply(Object::Port(port(1, area(8, 8), route(2, 2), None)));
    pod.settle();
    assert_eq!(pod.guest.transmit.reclaim_pairs().len(), 24);
    for flow in 0..8 {
        let numbers = pod.sent.iter().filter(|(_, other, _)| *other == flow).map(|(.., number)| *number);
        assert_eq!(numbers.collect::<Vec<_>>(), [0, 1, 2], "flow {flow}");
    }
}

#[test]
fn frames_arrive_from_either_nic() {
    let mut pod = Pod::new(7);
    let to = |destination: [u8; 6], number: u32| {
        let mut packet = vec![0; 12];
        packet.extend(frame(number, 80));
        packet[12..18].copy_from_slice(&destination);
        packet[18..24].copy_from_slice(&mac(200).bytes());
        packet
    };
    for number in 0..4_u32 {
        // A switch sends a frame over one port of a group, broadcasts too.
        let destination = if number < 2 { mac(1).bytes() } else { [0xff; 6] };
        let wire = &pod.wires[number as usize % 2];
        wire.lock().expect("unpoisoned").arriving.push_back(to(destination, number));
        pod.settle();
    }
    let arrived = pod.guest.received(BUFFER_BYTES);
    let numbers: Vec<u8> = arrived.iter().map(|(_, frame)| frame[14]).collect();
    assert_eq!(numbers, [0, 1, 2, 3]);
}
