//! Broadcast and multicast frames, and those of the same NIC who get a copy: once, however often they are offered.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool};
use cxl_pool::{Area, HostId};
use pod_protocol::ids::MacAddress;
use pod_protocol::objects::{
    Object, PortObject, RailObject, RailState, RegistrationObject, RegistrationState,
};
use vhost_net_cxl::offloads::Offloads;

use crate::echo::{BUFFER_BYTES, QUEUE_SIZE, frame};
use crate::finishing::{large, payload};
use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, all_features, area, channel, mac, port, registration, route,
    settle,
};
use crate::recording::{Wire, recording_backend};
use RegistrationState::{Active, Standby};

const SLOTS: u32 = 512;
const PATIENCE: Duration = Duration::from_secs(20);

/// Two instances of one host, both on one NIC or on two at the same time; otherwise they may move to the other one.
struct Pod {
    pool: SimulatedPool,
    frontend: TestFrontend<SimulatedMemory>,
    backends: [TestBackend<SimulatedMemory>; 2],
    wires: [Arc<Mutex<Wire>>; 2],
    sender: Guest,
    neighbour: Guest,
}

fn transmit_area(instance: u32) -> Area {
    area(8 * u64::from(instance), 8)
}

fn pod(offloads: Offloads, on_both: bool) -> Pod {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    let mut wires = Vec::new();
    let backends = [1_u16, 2].map(|number| {
        let memory = pool.host(HostId::new(number + 1));
        let receive_area = area(24 + 8 * u64::from(number), 8);
        let (mut backend, wire) = recording_backend(&memory, offloads, usize::MAX, receive_area);
        wires.push(wire);
        let number = u32::from(number);
        backend.apply(Object::Channel(channel(number, 1, SLOTS, false)));
        frontend.apply(Object::Channel(channel(number, 1, SLOTS, true)));
        for instance in [1, 2] {
            let state = if on_both || number == 1 { Active } else { Standby };
            let one = registration(instance, number, 1, state, transmit_area(instance));
            backend.apply(Object::Registration(RegistrationObject { has_other_rails: on_both, ..one }));
        }
        backend
    });
    let rails = [1, 2].map(|number| RailObject { route: route(number, 1), state: RailState::Up });
    let rails = if on_both { rails.to_vec() } else { Vec::new() };
    let [sender, mut neighbour] = [1, 2].map(|_| Guest::new(QUEUE_SIZE));
    neighbour.post(QUEUE_SIZE, BUFFER_BYTES);
    for (instance, guest) in (1..).zip([&sender, &neighbour]) {
        let one = port(instance, transmit_area(instance), route(1, 1), Some(route(2, 1)));
        frontend.apply(Object::Port(PortObject { rails: rails.clone(), ..one }));
        frontend.start(instance, guest, all_features());
    }
    let wires = wires.try_into().expect("two");
    let mut pod = Pod { pool, frontend, backends, wires, sender, neighbour };
    pod.settle();
    pod.sent();
    pod
}

impl Pod {
    fn settle(&mut self) {
        let [first, second] = &mut self.backends;
        settle(&mut [&mut self.frontend, first, second]);
        assert_eq!(self.pool.faults(), Faults::default());
    }

    /// Both instances go on over the second NIC.
    fn fail_over(&mut self) {
        for instance in [1, 2] {
            let area = transmit_area(instance);
            self.backends[1].apply(Object::Registration(registration(instance, 2, 2, Active, area)));
            self.frontend.apply(Object::Port(port(instance, area, route(2, 2), Some(route(1, 2)))));
            self.backends[0].apply(Object::Registration(registration(instance, 1, 2, Standby, area)));
        }
    }

    fn set_room(&self, room: usize) {
        self.wires.iter().for_each(|wire| wire.lock().expect("unpoisoned").room = room);
    }

    /// What went out over each NIC, but for announcements.
    fn sent(&self) -> [Vec<Vec<u8>>; 2] {
        let taken =
            self.wires.each_ref().map(|wire| std::mem::take(&mut wire.lock().expect("unpoisoned").frames));
        taken.map(|frames| frames.into_iter().filter(|frame| frame[12..14] != [0x80, 0x35]).collect())
    }

    /// What the neighbour got since it was looked at last.
    fn heard(&mut self) -> Vec<Vec<u8>> {
        self.neighbour.received(BUFFER_BYTES).into_iter().map(|(_, frame)| frame).collect()
    }
}

/// Packet `number` to the group of this number.
fn multicast(number: u8) -> Vec<u8> {
    let mut frame = frame(number.into(), 100);
    frame[..6].copy_from_slice(&[1, 0, 0x5e, 0, 0, number]);
    frame
}

#[test]
fn a_broadcast_that_failed_with_its_nic_reaches_a_neighbour_that_moves_too_once() {
    for full in [false, true] {
        let mut pod = pod(Offloads::ALL, false);
        if full {
            pod.set_room(0);
        } else {
            pod.backends[0].link.set(false);
        }
        assert!(pod.sender.send(&[0; 12], &multicast(1)));
        pod.settle();
        pod.backends[0].link.set(false);
        pod.settle();
        pod.set_room(usize::MAX);
        pod.fail_over();
        pod.settle();
        assert_eq!(pod.sent(), [vec![], vec![multicast(1)]]);
        assert_eq!(pod.heard(), [multicast(1)]);
        assert_eq!(pod.sender.transmit.reclaim_pairs().len(), 1);
    }
}

#[test]
fn a_broadcast_that_one_of_two_nics_gives_back_reaches_a_neighbour_once() {
    let mut pod = pod(Offloads::ALL, true);
    pod.set_room(0);
    let frames: Vec<Vec<u8>> = (0..8).map(multicast).collect();
    for frame in &frames {
        assert!(pod.sender.send(&[0; 12], frame));
    }
    pod.settle();
    pod.backends[0].link.set(false);
    pod.settle();
    pod.set_room(usize::MAX);
    pod.settle();
    let [first, mut second] = pod.sent();
    second.sort();
    assert_eq!((first, second), (vec![], frames.clone()));
    let mut heard = pod.heard();
    heard.sort();
    assert_eq!(heard, frames);
    assert_eq!(pod.sender.transmit.reclaim_pairs().len(), 8);
}

#[test]
fn a_broadcast_that_waits_for_a_link_reaches_a_neighbour_when_it_is_back_or_given_up() {
    let mut pod = pod(Offloads::ALL, false);
    pod.backends[0].link.set(false);
    assert!(pod.sender.send(&[0; 12], &multicast(1)));
    pod.settle();
    assert!(pod.heard().is_empty(), "it may be sent again elsewhere");
    pod.backends[0].link.set(true);
    pod.settle();
    // It was given back, and the timer fires, which nobody watches here.
    pod.frontend.task.retry();
    pod.settle();
    assert_eq!((pod.heard(), pod.sent()), (vec![multicast(1)], [vec![multicast(1)], vec![]]));
    // Nobody moves it this time.
    pod.backends[0].link.set(false);
    assert!(pod.sender.send(&[0; 12], &multicast(2)));
    let began = Instant::now();
    let heard = loop {
        pod.settle();
        let heard = pod.heard();
        if !heard.is_empty() || began.elapsed() > PATIENCE {
            break heard;
        }
    };
    assert_eq!(heard, [multicast(2)]);
    assert!(pod.sender.send(&[0; 12], &multicast(3)));
    pod.settle();
    assert_eq!(pod.heard(), [multicast(3)], "nothing waits any longer");
    assert_eq!(pod.backends[0].lease(1).drops, [("link-down".to_owned(), 2)].into());
    assert_eq!(pod.sender.transmit.reclaim_pairs().len(), 3);
}

#[test]
fn a_multicast_that_is_finished_for_the_nic_reaches_a_neighbour_as_it_accepts_it() {
    let mut pod = pod(Offloads::NONE, false);
    let (header, frame) = large(mac(1), MacAddress::BROADCAST, &payload(4000));
    // The NIC takes its frames one after the other.
    pod.set_room(1);
    assert!(pod.sender.send(&header, &frame));
    pod.settle();
    assert!(pod.heard().is_empty());
    pod.set_room(usize::MAX);
    pod.settle();
    let [frames, _] = pod.sent();
    assert_eq!(frames.len(), 3);
    assert_eq!(pod.heard(), [frame]);
    assert_eq!(pod.sender.transmit.reclaim_pairs().len(), 1);
}
