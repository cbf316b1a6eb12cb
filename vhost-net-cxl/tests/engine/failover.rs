//! Moving to another route: what was not acknowledged is sent again, first and in order.

use std::sync::{Arc, Mutex};

use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool, check_seeds};
use cxl_pool::{Area, HostId};
use pod_protocol::objects::{Object, PortObject, RegistrationObject, RegistrationState, Route};
use vhost_net_cxl::ethernet::announcement;
use vhost_net_cxl::offloads::Offloads;

use crate::echo::{BUFFER_BYTES, frame, pair, pairs, returned};
use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, mac, port, registration, route,
    settle,
};
use crate::recording::{Wire, recording_backend};
use RegistrationState::{Active, Draining, Standby};

const SLOTS: u32 = 512;

#[test]
fn packets_that_a_dead_link_holds_go_through_the_backup_nic() {
    check_seeds("-p vhost-net-cxl --test engine", 8, |seed| {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let host = |number| pool.host(HostId::new(number));
        let transmit_area = area(8, 8);
        let mut pair = pair(&host(1), &host(2), SLOTS, all_features(), 8);
        let mut backup = TestBackend::new(&host(3), "mode = 'echo'", area(48, 8));
        backup.apply(Object::Channel(channel(2, 1, SLOTS, false)));
        backup.apply(Object::Registration(registration(1, 2, 1, Standby, transmit_area)));
        pair.frontend.apply(Object::Channel(channel(2, 1, SLOTS, true)));
        pair.frontend.apply(Object::Port(port(1, transmit_area, route(1, 1), Some(route(2, 1)))));

        assert!(pair.guest.send(&[0; 12], &frame(0, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend, &mut backup]);
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 1);

        // The cable is pulled: what the guest sends from now on is neither lost nor acknowledged.
        pair.backend.link.set(false);
        for number in 1..20 {
            assert!(pair.guest.send(&[0; 12], &frame(number, 500)));
        }
        settle(&mut [&mut pair.frontend, &mut pair.backend, &mut backup]);
        assert!(pair.guest.transmit.reclaim_pairs().is_empty());
        assert_eq!(pair.guest.received(BUFFER_BYTES).len(), 1);

        // The controller moves the instance.
        backup.apply(Object::Registration(registration(1, 2, 2, Active, transmit_area)));
        pair.backend.apply(Object::Registration(registration(1, 1, 2, Standby, transmit_area)));
        pair.frontend.apply(Object::Port(port(1, transmit_area, route(2, 2), Some(route(1, 2)))));
        assert!(pair.guest.send(&[0; 12], &frame(20, 500)));
        settle(&mut [&mut pair.frontend, &mut pair.backend, &mut backup]);
        let arrived = pair.guest.received(BUFFER_BYTES);
        assert_eq!(arrived.len(), 20, "seed {seed}");
        for (number, (_, got)) in (1..).zip(&arrived) {
            assert_eq!(*got, returned(&frame(number, 500)), "frame {number}, seed {seed}");
        }
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 20);
        assert_eq!(pool.faults(), Faults::default());
        assert_eq!(backup.lease(1).drops, [].into());
        assert!(backup.reports.lock().expect("unpoisoned").is_empty(), "no NIC failed");

        // The cable is back: nothing that was parked comes out late.
        let before = pair.backend.counters.tx_packets.get();
        pair.backend.link.set(true);
        settle(&mut [&mut pair.frontend, &mut pair.backend, &mut backup]);
        assert_eq!(pair.backend.counters.tx_packets.get(), before);
        assert!(pair.guest.received(BUFFER_BYTES).is_empty());
        Ok(())
    });
}

#[test]
fn a_packet_that_is_ahead_of_its_registration_waits_for_it() {
    let pool = SimulatedPool::new(3, POOL_BYTES);
    for mut pair in pairs(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), SLOTS, all_features(), 8) {
        let transmit_area = area(8, 8);
        pair.frontend.apply(Object::Port(port(1, transmit_area, route(1, 2), None)));
        assert!(pair.guest.send(&[0; 12], &frame(1, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert!(pair.guest.transmit.reclaim_pairs().is_empty());
        pair.backend.apply(Object::Registration(registration(1, 1, 2, Active, transmit_area)));
        // Its timer, which nobody watches here, would have fired.
        pair.frontend.task.retry();
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 1);
        assert_eq!(pair.guest.received(BUFFER_BYTES).len(), 1);
    }
}

#[test]
fn a_restarted_backend_gets_what_its_predecessor_did_not_acknowledge() {
    check_seeds("-p vhost-net-cxl --test engine", 8, |seed| {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let transmit_area = area(8, 8);
        let mut pair = pair(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), SLOTS, all_features(), 8);
        for number in 0..10 {
            assert!(pair.guest.send(&[0; 12], &frame(number, 300)));
        }
        // The frontend has announced them; the backend dies before it looks.
        settle(&mut [&mut pair.frontend]);
        pool.crash(HostId::new(2));
        let memory = pool.host(HostId::new(2));
        let mut successor = TestBackend::new(&memory, "mode = 'echo'", area(48, 8));
        successor.apply(Object::Channel(channel(1, 2, SLOTS, false)));
        pair.frontend.apply(Object::Channel(channel(1, 2, SLOTS, true)));
        successor.apply(Object::Registration(registration(1, 1, 1, Active, transmit_area)));
        settle(&mut [&mut pair.frontend, &mut successor]);
        let arrived = pair.guest.received(BUFFER_BYTES);
        assert_eq!(arrived.len(), 10, "seed {seed}");
        for (number, (_, got)) in (0..).zip(&arrived) {
            assert_eq!(*got, returned(&frame(number, 300)), "frame {number}, seed {seed}");
        }
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 10);
        Ok(())
    });
}

#[test]
fn a_queue_that_stops_gets_its_descriptors_back_and_its_packets_go_on() {
    let pool = SimulatedPool::new(5, POOL_BYTES);
    let mut pair = pair(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), SLOTS, all_features(), 8);
    pair.backend.link.set(false);
    for number in 0..5 {
        assert!(pair.guest.send(&[0; 12], &frame(number, 100)));
    }
    settle(&mut [&mut pair.frontend, &mut pair.backend]);
    let next = pair.frontend.task.stop_ring(crate::pod::lease(1), 1, None);
    assert_eq!(next, 5);
    assert_eq!(pair.guest.transmit.reclaim_pairs(), [0, 2, 4, 6, 8], "in the order of offering");
    // A successor resumes at the used index and finds nothing to do twice.
    let ring = pair.guest.transmit.ring(all_features(), next);
    pair.frontend.task.start_ring(crate::pod::lease(1), ring, None);
    pair.backend.link.set(true);
    settle(&mut [&mut pair.frontend, &mut pair.backend]);
    // They were given back, and the timer fires, which nobody watches here.
    pair.frontend.task.retry();
    settle(&mut [&mut pair.frontend, &mut pair.backend]);
    assert_eq!(pair.guest.received(BUFFER_BYTES).len(), 5);
    assert!(pair.guest.transmit.reclaim_pairs().is_empty());
}

/// A frontend with one guest, and two backends whose NICs write down what they send.
pub(crate) struct Move {
    pub(crate) pool: SimulatedPool,
    pub(crate) frontend: TestFrontend<SimulatedMemory>,
    pub(crate) backends: [TestBackend<SimulatedMemory>; 2],
    pub(crate) wires: [Arc<Mutex<Wire>>; 2],
    pub(crate) guest: Guest,
    /// The memory in the pool that is leased to the guest.
    pub(crate) ram_area: Option<Area>,
}

impl Move {
    pub(crate) fn new(seed: u64) -> Self {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let here = pool.host(HostId::new(1));
        let (guest, ram_area) = Guest::of_seed(seed, &here, 128);
        let mut frontend = TestFrontend::new(&here).with_pool_file(guest.pool_file);
        let mut wires = Vec::new();
        let backends = [2, 3].map(|host: u16| {
            let memory = pool.host(HostId::new(host));
            let receive_area = area(if host == 2 { 32 } else { 48 }, 8);
            let (mut backend, wire) = recording_backend(&memory, Offloads::ALL, usize::MAX, receive_area);
            wires.push(wire);
            let number = u32::from(host) - 1;
            backend.apply(Object::Channel(channel(number, 1, SLOTS, false)));
            let state = if host == 2 { Active } else { Standby };
            let registration = registration(1, number, 1, state, area(8, 8));
            backend.apply(Object::Registration(RegistrationObject { ram_area, ..registration }));
            frontend.apply(Object::Channel(channel(number, 1, SLOTS, true)));
            backend
        });
        let port = port(1, area(8, 8), route(1, 1), Some(route(2, 1)));
        frontend.apply(Object::Port(PortObject { ram_area, ..port }));
        frontend.start(1, &guest, all_features());
        let wires = wires.try_into().expect("two");
        let mut this = Self { pool, frontend, backends, wires, guest, ram_area };
        this.settle();
        this.wires.iter().for_each(|wire| wire.lock().unwrap().frames.clear());
        this
    }

    pub(crate) fn settle(&mut self) {
        let [first, second] = &mut self.backends;
        settle(&mut [&mut self.frontend, first, second]);
        assert_eq!(self.pool.faults(), Faults::default());
    }

    /// What the controller says to move the instance while both NICs work.
    pub(crate) fn graceful(&mut self) {
        self.register(1, 2, Active);
        self.register(0, 1, Draining);
        self.offer(Some(route(1, 1)));
    }

    /// Registers the instance at a backend.
    pub(crate) fn register(&mut self, backend: usize, generation: u16, state: RegistrationState) {
        let channel = u32::try_from(backend).expect("two") + 1;
        let registration = registration(1, channel, generation, state, area(8, 8));
        let ram_area = self.ram_area;
        self.backends[backend].apply(Object::Registration(RegistrationObject { ram_area, ..registration }));
    }

    /// Has the frontend send by the second NIC, once the one that drains is done.
    pub(crate) fn offer(&mut self, draining: Option<Route>) {
        let port = port(1, area(8, 8), route(2, 2), Some(route(1, 2)));
        self.frontend.apply(Object::Port(PortObject { draining, ram_area: self.ram_area, ..port }));
    }

    /// Offers a packet that is long enough to stay in the pool where it lies there.
    pub(crate) fn send(&mut self, number: u32) {
        assert!(self.guest.send(&[0; 12], &frame(number, 600)));
    }

    /// So many packets stayed where they were, if they lie in the pool.
    pub(crate) fn lent(&self, count: u64) {
        assert_eq!(self.frontend.book.zero_copy(), if self.ram_area.is_some() { count } else { 0 });
    }

    /// The numbers of the frames that a NIC sent, announcements left out.
    pub(crate) fn sent(&self, nic: usize) -> Vec<u32> {
        let wire = self.wires[nic].lock().unwrap();
        let frames = wire.frames.iter().filter(|frame| frame[12..14] == [0x88, 0xb5]);
        frames.map(|frame| u32::from_le_bytes(frame[14..18].try_into().expect("four bytes"))).collect()
    }
}

#[test]
fn a_link_that_is_back_before_its_backend_hears_of_the_move_sends_nothing_twice() {
    for seed in 0..2 {
        let mut moving = Move::new(seed);
        moving.backends[0].link.set(false);
        (0..20).for_each(|number| moving.send(number));
        moving.settle();
        assert!(moving.sent(0).is_empty());
        // The new NIC's backend hears of the move, and then the frontend, which sends all again.
        moving.register(1, 2, Active);
        moving.offer(None);
        let (frontend, second) = (&mut moving.frontend, &mut moving.backends[1]);
        settle(&mut [frontend, second]);
        assert_eq!(moving.sent(1), (0..20).collect::<Vec<_>>());
        moving.backends[0].link.set(true);
        moving.settle();
        moving.register(0, 2, Standby);
        moving.settle();
        assert!(moving.sent(0).is_empty(), "seed {seed}: {:?}", moving.sent(0));
        assert_eq!(moving.guest.transmit.reclaim_pairs().len(), 20);
    }
}

#[test]
fn what_waited_for_a_link_goes_out_once_and_before_what_came_later() {
    for seed in 0..2 {
        let mut moving = Move::new(seed);
        moving.backends[0].link.set(false);
        (0..20).for_each(|number| moving.send(number));
        moving.settle();
        moving.backends[0].link.set(true);
        for number in 20..40 {
            moving.send(number);
            moving.frontend.turn_once();
            moving.backends[0].turn_once();
        }
        // Its timer, which nobody watches here, fires.
        moving.frontend.task.retry();
        moving.settle();
        assert_eq!(moving.sent(0), (0..40).collect::<Vec<_>>(), "seed {seed}");
        assert_eq!(moving.guest.transmit.reclaim_pairs().len(), 40);
        assert_eq!(moving.backends[0].lease(1).drops, [].into());
    }
}

#[test]
fn a_move_between_working_nics_loses_doubles_and_reorders_nothing() {
    check_seeds("-p vhost-net-cxl --test engine", 8, |seed| {
        let mut moving = Move::new(seed);
        // The first NIC is busy with what the guest sent before.
        moving.wires[0].lock().unwrap().room = 0;
        for number in 0..20 {
            moving.send(number);
        }
        moving.settle();
        moving.graceful();
        for number in 20..40 {
            moving.send(number);
        }
        moving.settle();
        assert_eq!((moving.sent(0), moving.sent(1)), (vec![], vec![]), "the new NIC waits for the old one");
        moving.wires[0].lock().unwrap().room = 13;
        moving.settle();
        assert!(moving.sent(1).is_empty());
        moving.wires[0].lock().unwrap().room = 100;
        moving.settle();
        assert_eq!(moving.sent(0), (0..20).collect::<Vec<_>>());
        assert_eq!(moving.sent(1), (20..40).collect::<Vec<_>>());
        assert_eq!(moving.guest.transmit.reclaim_pairs().len(), 40);
        moving.lent(40);
        for backend in &moving.backends {
            assert_eq!(backend.lease(1).drops, [].into());
        }
        Ok(())
    });
}

/// The instance has moved in order, and its old NIC has yet to send seven of ten packets.
fn half_moved(seed: u64) -> Move {
    let mut moving = Move::new(seed);
    moving.wires[0].lock().unwrap().room = 3;
    for number in 0..10 {
        moving.send(number);
    }
    moving.settle();
    moving.graceful();
    moving.settle();
    moving
}

#[test]
fn the_switches_hear_last_from_the_nic_that_an_instance_has_moved_to() {
    let mut moving = half_moved(3);
    let announcements = |moving: &Move| std::mem::take(&mut moving.wires[1].lock().unwrap().frames);
    assert_eq!(announcements(&moving), [announcement(mac(1))], "as soon as it is active");
    // What the old one still sends has the switches turn to it once more.
    moving.wires[0].lock().unwrap().room = 100;
    moving.settle();
    assert_eq!(moving.sent(0), (0..10).collect::<Vec<_>>());
    assert_eq!(announcements(&moving), [announcement(mac(1))], "the guest has nothing more to say");
}

#[test]
fn an_old_nic_that_does_not_finish_is_waited_for_until_the_controller_gives_it_up() {
    [1, 2].into_iter().for_each(give_up_an_old_nic);
}

fn give_up_an_old_nic(seed: u64) {
    let mut moving = half_moved(seed);
    // The controller says the same once more, as after its restart.
    moving.offer(Some(route(1, 1)));
    moving.settle();
    assert_eq!((moving.sent(0), moving.sent(1)), (vec![0, 1, 2], vec![]));
    moving.offer(None);
    moving.register(0, 2, Standby);
    moving.settle();
    assert_eq!(moving.sent(1), (3..10).collect::<Vec<_>>());
    assert_eq!(moving.guest.transmit.reclaim_pairs().len(), 10);
    moving.wires[0].lock().unwrap().room = 100;
    moving.settle();
    assert_eq!(moving.sent(0), [0, 1, 2], "what it still held is stale");
}

#[test]
fn a_backend_that_dies_while_it_drains_costs_nothing() {
    [1, 2].into_iter().for_each(die_while_draining);
}

fn die_while_draining(seed: u64) {
    let mut moving = Move::new(seed);
    moving.wires[0].lock().unwrap().room = 0;
    for number in 0..10 {
        moving.send(number);
    }
    moving.settle();
    moving.graceful();
    moving.settle();
    // Its successor makes a new channel, and knows nothing of what its predecessor held.
    moving.frontend.apply(Object::Channel(channel(1, 2, SLOTS, true)));
    let [_, second] = &mut moving.backends;
    settle(&mut [&mut moving.frontend, second]);
    assert_eq!(moving.sent(1), (0..10).collect::<Vec<_>>());
    assert_eq!(moving.guest.transmit.reclaim_pairs().len(), 10);
}

#[test]
fn unicast_is_heard_from_both_nics_while_one_drains() {
    let pool = SimulatedPool::new(4, POOL_BYTES);
    let host = |number| pool.host(HostId::new(number));
    for mut pair in pairs(&host(1), &host(2), SLOTS, all_features(), 8) {
        let mut second =
            TestBackend::new(&host(3), "mode = 'source'\ndestination = '02:00:00:00:00:01'", area(48, 8));
        second.apply(Object::Channel(channel(2, 1, SLOTS, false)));
        second.apply(Object::Registration(registration(1, 2, 1, Draining, area(8, 8))));
        pair.frontend.apply(Object::Channel(channel(2, 1, SLOTS, true)));
        pair.frontend.apply(Object::Port(PortObject {
            draining: Some(route(2, 1)),
            ..port(1, area(8, 8), route(1, 1), None)
        }));
        let mut heard = 0;
        for _ in 0..200 {
            pair.frontend.turn_once();
            pair.backend.turn_once();
            second.turn_once();
            heard += pair.guest.received(BUFFER_BYTES).len();
        }
        assert!(heard > 100, "{heard}");
        assert!(pair.guest.send(&[0; 12], &frame(1, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert!(pair.guest.received(BUFFER_BYTES).iter().any(|(_, got)| *got == returned(&frame(1, 100))));
    }
}

#[test]
fn a_new_nic_is_heard_before_the_frontend_is_told_of_it_and_an_old_one_no_more_afterwards() {
    let pool = SimulatedPool::new(5, POOL_BYTES);
    let host = |number| pool.host(HostId::new(number));
    for mut pair in pairs(&host(1), &host(2), SLOTS, all_features(), 8) {
        let mut second =
            TestBackend::new(&host(3), "mode = 'source'\ndestination = '02:00:00:00:00:01'", area(48, 8));
        second.apply(Object::Channel(channel(2, 1, SLOTS, false)));
        pair.frontend.apply(Object::Channel(channel(2, 1, SLOTS, true)));
        second.apply(Object::Registration(registration(1, 2, 2, Active, area(8, 8))));
        let mut listen = |pair: &mut crate::echo::Pair<SimulatedMemory>| {
            let mut heard = 0;
            for _ in 0..100 {
                pair.frontend.turn_once();
                pair.backend.turn_once();
                second.turn_once();
                heard += pair.guest.received(BUFFER_BYTES).len();
            }
            heard
        };
        let heard = listen(&mut pair);
        assert!(heard > 50, "{heard}");
        assert_eq!(pair.frontend.lease(1).drops, [].into());
        // It moved on, and the second NIC has not heard of that yet, also where that is to stand by.
        let mut stale = 0;
        for standby in [None, Some(route(2, 3))] {
            pair.frontend.apply(Object::Port(port(1, area(8, 8), route(1, 3), standby)));
            // What had come before is there still.
            pair.guest.received(BUFFER_BYTES);
            assert_eq!(listen(&mut pair), 0, "{standby:?}");
            let dropped = pair.frontend.lease(1).drops["stale-generation"];
            assert!(dropped > stale, "{standby:?}");
            stale = dropped;
        }
    }
}
