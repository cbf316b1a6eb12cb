//! Receivers that are flooded, and what is left of a channel and of a NIC's receive buffers to their neighbours: judged by counters,
//! not by the clock.

use std::collections::BTreeMap;

use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool};
use cxl_pool::{HostId, Memory};
use pod_protocol::ids::MacAddress;
use pod_protocol::objects::{Object, RegistrationObject, RegistrationState};
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::{ChannelEnd, MESSAGES_PER_LOOK};
use vhost_net_cxl::message::{NetMessage, Opcode};
use vhost_net_cxl::offloads::Offloads;

use crate::contention::{Pod, pod};
use crate::echo::{BUFFER_BYTES, frame};
use crate::pod::{POOL_BYTES, TestBackend, Turn, area, channel, mac, open, registration, settle};
use crate::recording::recording_backend;
use crate::switching::transmit_area;

/// Where a mark tells frames that are a guest's own from the flood.
const MARK_AT: usize = 20;
const OWN: u8 = 0xaa;
/// Of a channel: 248 messages may be under way.
const SLOTS: u32 = 1024;

/// A packet from the wire, or from a guest if that is who sends it.
fn packet(sender: u8, receiver: MacAddress, mark: u8) -> Vec<u8> {
    let mut frame = frame(0, 100);
    frame[..6].copy_from_slice(&receiver.bytes());
    frame[6..12].copy_from_slice(&mac(sender).bytes());
    frame[MARK_AT] = mark;
    frame
}

fn arrive(pod: &Pod, frame: Vec<u8>) {
    pod.wire.lock().expect("unpoisoned").arriving.push_back([vec![0; 12], frame].concat());
}

#[test]
fn a_flood_to_one_and_to_all_costs_a_third_one_nothing_of_what_is_its_own() {
    const ROUNDS: usize = 200;
    const OWN_PER_TURN: usize = 2;
    let mut pod = pod();
    pod.guests[1..].iter_mut().for_each(|guest| guest.post(128, BUFFER_BYTES));
    let (mut got, mut sent) = (0, 0);
    for round in 0..ROUNDS {
        // A guest on the same NIC floods its neighbour and everybody...
        while pod.guests[0].send(&[0; 12], &packet(1, mac(2), 0))
            && pod.guests[0].send(&[0; 12], &packet(1, MacAddress::BROADCAST, 0))
        {}
        for turn in 0..4 {
            // ... and so does the wire, which is looked at more often than the frontend looks at the channel.
            for number in 0..30 {
                let receiver = if number % 3 == 0 { MacAddress::BROADCAST } else { mac(2) };
                arrive(&pod, packet(99, receiver, 0));
                if number % 15 == 7 {
                    arrive(&pod, packet(99, mac(3), OWN));
                    sent += 1;
                }
            }
            // And one from a neighbour.
            if turn == 0 {
                sent += usize::from(pod.guests[3].send(&[0; 12], &packet(4, mac(3), OWN)));
            }
            pod.backend.turn_once();
        }
        settle(&mut [&mut pod.frontend, &mut pod.backend]);
        let arrived = pod.guests[2].received(BUFFER_BYTES);
        got += arrived.iter().filter(|(_, frame)| frame[MARK_AT] == OWN).count();
        for guest in [1, 3] {
            pod.guests[guest].received(BUFFER_BYTES);
        }
        for guest in [0, 3] {
            pod.guests[guest].transmit.reclaim_pairs();
        }
        pod.wire.lock().expect("unpoisoned").frames.clear();
        assert_eq!(got, sent, "in round {round}");
    }
    assert!(sent >= ROUNDS * 4 * OWN_PER_TURN, "{sent}");
    for guest in 2..=4 {
        let drops = pod.backend.lease(guest).drops;
        // Of what all get, everybody gets a part; the one that is flooded loses most.
        assert_eq!(drops.keys().collect::<Vec<_>>(), ["receive-share"], "guest {guest}");
    }
    let of = |guest| pod.backend.lease(guest).drops["receive-share"];
    assert!(of(2) > of(3), "{} and {}", of(2), of(3));
    assert_eq!(pod.pool.faults(), Faults::default());
}

/// A backend and the ends of three frontends that hold whatever they get, each with a channel of its own.
fn holders(
    pool: &SimulatedPool,
    backend: &mut TestBackend<SimulatedMemory>,
) -> Vec<ChannelEnd<SimulatedMemory>> {
    let here = pool.host(HostId::new(1));
    let mut ends = Vec::new();
    for number in 1..=3 {
        backend.apply(Object::Channel(channel(number, 1, SLOTS, false)));
        let one = registration(number, number, 1, RegistrationState::Active, transmit_area(number));
        backend.apply(Object::Registration(RegistrationObject { rx_quota_buffers: 4096, ..one }));
        let mut end =
            open(&here, &ChannelBook::default())(&channel(number, 1, SLOTS, true)).expect("a channel");
        while !end.ready() {
            backend.turn_once();
        }
        ends.push(end);
    }
    ends
}

fn heard<M: Memory>(end: &mut ChannelEnd<M>) -> usize {
    let mut inbox = [[0; 2]; MESSAGES_PER_LOOK];
    let count = end.receive(&mut inbox);
    let messages = inbox[..count].iter().filter_map(|words| NetMessage::decode(*words));
    messages.filter(|message| message.opcode == Opcode::Receive).count()
}

#[test]
fn two_that_keep_what_they_get_leave_receive_buffers_to_a_third_one() {
    let pool = SimulatedPool::new(7, POOL_BYTES);
    // 256 buffers: two channels have room for more.
    let (mut backend, wire) =
        recording_backend(&pool.host(HostId::new(2)), Offloads::ALL, usize::MAX, area(32, 1));
    let mut ends = holders(&pool, &mut backend);
    let mut arrive = |receiver: u8, count: usize| {
        for _ in 0..count {
            let packet = [vec![0; 12], packet(99, mac(receiver), 0)].concat();
            wire.lock().expect("unpoisoned").arriving.push_back(packet);
        }
        backend.turn_once();
    };
    for _ in 0..20 {
        arrive(1, 8);
        arrive(2, 8);
    }
    arrive(3, 40);
    for _ in 0..10 {
        arrive(3, 0);
    }
    let got: Vec<usize> = ends.iter_mut().map(|end| (0..10).map(|_| heard(end)).sum()).collect();
    assert_eq!(got[2], 40);
    assert!(got[..2].iter().all(|got| (80..=90).contains(got)), "a third each: {got:?}");
    assert_eq!(backend.lease(3).drops, BTreeMap::default());
    for (lease, got) in (1..).zip(&got[..2]) {
        assert_eq!(backend.lease(lease).drops, [("receive-share".to_owned(), 160 - *got as u64)].into());
    }
}

#[test]
fn a_source_that_tells_flows_apart_leaves_half_of_a_channel_free() {
    let pool = SimulatedPool::new(8, POOL_BYTES);
    let source = "mode = 'source'\ndestination = '02:00:00:00:00:01'";
    let mut backend = TestBackend::new(&pool.host(HostId::new(2)), source, area(32, 16));
    let mut ends = holders(&pool, &mut backend);
    (0..50).for_each(|_| _ = backend.turn_once());
    let got: usize = (0..10).map(|_| heard(&mut ends[0])).sum();
    assert_eq!(got, 124);
    assert_eq!(backend.lease(1).drops.keys().collect::<Vec<_>>(), ["receive-share"]);
}
