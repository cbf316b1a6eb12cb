//! Guests that take what they can get, and what is left to their neighbours: judged by counters, not by the clock.

use std::sync::{Arc, Mutex};

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool};
use pod_protocol::objects::{Object, PortObject, RegistrationObject, RegistrationState};
use pod_protocol::worker::Turned;
use vhost_frontend::GuestMemory;
use vhost_net_cxl::frontend::Order;
use vhost_net_cxl::offloads::Offloads;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::echo::{BUFFER_BYTES, frame, pairs, returned};
use crate::guest::{Guest, INDIRECT, NEXT, ram_area};
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, connect, lease, mac, port, registration,
    route, settle,
};
use crate::recording::{Wire, recording_backend};
use crate::switching::transmit_area;

/// Packets that the NIC takes per turn.
pub(crate) const ROOM: usize = 24;
pub(crate) const GUESTS: u32 = 4;

/// Guests 1 to 4 of one frontend, the first of which has its memory in the pool, and a NIC that is slower than they are.
pub(crate) struct Pod {
    pub(crate) pool: SimulatedPool,
    pub(crate) frontend: TestFrontend<SimulatedMemory>,
    pub(crate) backend: TestBackend<SimulatedMemory>,
    pub(crate) guests: Vec<Guest>,
    pub(crate) wire: Arc<Mutex<Wire>>,
}

pub(crate) fn pod() -> Pod {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let here = pool.host(HostId::new(1));
    let mut frontend = TestFrontend::new(&here);
    let memory = pool.host(HostId::new(2));
    let (mut backend, wire) = recording_backend(&memory, Offloads::ALL, usize::MAX, area(32, 16));
    connect(&mut frontend, &mut backend, 1);
    let mut guests = Vec::new();
    for number in 1..=GUESTS {
        let guest = if number == 1 { Guest::in_simulated_pool(&here, 128) } else { Guest::new(128) };
        let ram_area = guest.pool_file.map(|_| ram_area());
        let registration = registration(number, 1, 1, RegistrationState::Active, transmit_area(number));
        if guest.pool_file.is_some() {
            frontend = frontend.with_pool_file(guest.pool_file);
        }
        backend.apply(Object::Registration(RegistrationObject { ram_area, ..registration }));
        frontend.apply(Object::Port(PortObject {
            ram_area,
            ..port(number, transmit_area(number), route(1, 1), None)
        }));
        frontend.start(number, &guest, all_features());
        guests.push(guest);
    }
    settle(&mut [&mut frontend, &mut backend]);
    wire.lock().expect("unpoisoned").frames.clear();
    Pod { pool, frontend, backend, guests, wire }
}

/// Frame `number` of a guest.
pub(crate) fn from(guest: u32, number: u32) -> Vec<u8> {
    let mut frame = frame(number, 600);
    frame[6..12].copy_from_slice(&mac(u8::try_from(guest).expect("few")).bytes());
    frame
}

impl Pod {
    /// Both sides have a turn, and the wire takes a few packets: returns whose they were and their numbers.
    pub(crate) fn turn(&mut self) -> Vec<(u32, u32)> {
        self.wire.lock().expect("unpoisoned").room = ROOM;
        self.frontend.turn_once();
        self.backend.turn_once();
        for guest in &mut self.guests {
            guest.transmit.reclaim_pairs();
        }
        let frames = std::mem::take(&mut self.wire.lock().expect("unpoisoned").frames);
        let parse = |frame: &Vec<u8>| {
            let number = u32::from_le_bytes(frame[14..18].try_into().expect("four bytes"));
            (u32::from(frame[11]), number)
        };
        frames.iter().map(parse).collect()
    }
}

#[test]
fn a_guest_that_floods_costs_its_neighbours_neither_packets_nor_their_share() {
    let mut pod = pod();
    let mut sent = [0_u32; GUESTS as usize];
    let mut arrived = [0_u32; GUESTS as usize];
    for round in 0..1500 {
        // The first one offers all that its queue holds, the others now and then a packet.
        while pod.guests[0].send(&[0; 12], &from(1, sent[0])) {
            sent[0] += 1;
        }
        for guest in 2..=GUESTS {
            let place = guest as usize - 1;
            if (round + guest) % 3 == 0 && pod.guests[place].send(&[0; 12], &from(guest, sent[place])) {
                sent[place] += 1;
            }
        }
        for (guest, number) in pod.turn() {
            let place = guest as usize - 1;
            assert_eq!(number, arrived[place], "guest {guest}: in order, and none is missing");
            arrived[place] += 1;
        }
        for guest in 2..=GUESTS {
            let place = guest as usize - 1;
            // What is under way of one guest is bounded by its own queue, and so is what others wait for it.
            assert!(sent[place] - arrived[place] <= 8, "guest {guest} waits for {sent:?} in round {round}");
        }
    }
    assert!(sent[1] >= 499 && arrived[0] > 10_000, "{sent:?} {arrived:?}");
    for guest in 1..=GUESTS {
        assert_eq!(pod.frontend.lease(guest).drops, [].into());
        assert_eq!(pod.backend.lease(guest).drops, [].into());
    }
    assert_eq!(pod.pool.faults(), Faults::default());
}

#[test]
fn guests_that_all_flood_have_equal_shares() {
    let mut pod = pod();
    let mut sent = [0_u32; GUESTS as usize];
    let mut arrived = [0_u32; GUESTS as usize];
    for _ in 0..1500 {
        for guest in 1..=GUESTS {
            let place = guest as usize - 1;
            while pod.guests[place].send(&[0; 12], &from(guest, sent[place])) {
                sent[place] += 1;
            }
        }
        for (guest, number) in pod.turn() {
            let place = guest as usize - 1;
            assert_eq!(number, arrived[place], "guest {guest}");
            arrived[place] += 1;
        }
    }
    let shares = arrived.map(f64::from);
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    let jain = sum * sum / (f64::from(GUESTS) * squares);
    assert!(jain >= 0.99, "Jain's index is {jain} of {arrived:?}");
    assert!(sum > 30_000.0, "{arrived:?}");
}

#[test]
fn a_guest_that_posts_no_buffers_costs_its_neighbours_nothing() {
    let mut pod = pod();
    // The first one never posts any; the second one has plenty.
    pod.guests[1].post(128, BUFFER_BYTES);
    let mut heard = 0;
    for number in 0..3000_u32 {
        for guest in [1, 2] {
            let mut frame = frame(number, 600);
            frame[..6].copy_from_slice(&mac(guest).bytes());
            frame[6..12].copy_from_slice(&mac(99).bytes());
            let packet = [&[0; 12][..], &frame].concat();
            pod.wire.lock().expect("unpoisoned").arriving.push_back(packet);
        }
        if number % 8 == 7 {
            settle(&mut [&mut pod.frontend, &mut pod.backend]);
            for (_, got) in pod.guests[1].received(BUFFER_BYTES) {
                assert_eq!(got[14..18], u32::to_le_bytes(heard));
                heard += 1;
            }
        }
    }
    assert_eq!(heard, 3000);
    assert_eq!(pod.frontend.lease(1).drops, [("no-guest-buffers".to_owned(), 3000)].into());
    assert_eq!(pod.frontend.lease(2).drops, [].into());
    assert_eq!(pod.backend.lease(2).drops, [].into());
    assert_eq!(pod.pool.faults(), Faults::default());
}

#[test]
fn chains_with_empty_descriptors_and_split_headers_are_packets_like_others() {
    let pool = SimulatedPool::new(3, POOL_BYTES);
    for mut pair in pairs(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), 512, all_features(), 8) {
        let packet = [vec![0; 12], frame(5, 300)].concat();
        let queue = &mut pair.guest.transmit;
        let at = queue.buffer(0, 4096);
        pair.guest.memory.write_slice(&packet, GuestAddress(at)).expect("in memory");
        // A header in three parts, one of them empty, and an empty end.
        queue.offer(&[
            (0, at, 5, NEXT),
            (1, at, 0, NEXT),
            (2, at + 5, 8, NEXT),
            (3, at + 13, 299, NEXT),
            (4, at, 0, 0),
        ]);
        // Nothing at all.
        queue.offer(&[(6, at, 0, NEXT), (7, at, 0, 0)]);
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        let got = pair.guest.received(BUFFER_BYTES);
        assert_eq!(got.len(), 1);
        assert_eq!(got[0].1, returned(&frame(5, 300)));
        let heads: Vec<u16> = pair.guest.transmit.used().into_iter().map(|(head, _)| head).collect();
        assert_eq!(heads, [0, 6]);
        assert_eq!(pair.frontend.lease(1).drops, [("bad-chain".to_owned(), 1)].into());
    }
}

#[test]
fn memory_that_is_plugged_in_or_out_counts_from_then_on() {
    let pod = pod();
    let plugged = GuestAddress(1 << 32);
    let at = plugged.0 + 4096;
    let packet = [vec![0; 12], from(1, 7)].concat();
    let region = MmapRegion::new(1 << 20).expect("memory");
    let region = Arc::new(GuestRegionMmap::new(region, plugged).expect("a region"));
    let small: GuestMemoryMmap<()> = GuestMemoryMmap::clone(&pod.guests[0].memory);
    let large = small.insert_region(Arc::clone(&region)).expect("beside the rest");
    large.write_slice(&packet, GuestAddress(at)).expect("in memory");
    let Pod { frontend, mut backend, mut guests, wire, .. } = pod;
    let book = frontend.book.clone();
    let mut frontend = Turned::new(frontend.task).expect("sources");
    let mut offer = |frontend: &mut Turned<_>, slot: u16| {
        let bytes = u32::try_from(packet.len()).expect("short");
        guests[0].transmit.offer(&[(slot, at, bytes, 0)]);
        for _ in 0..10 {
            frontend.turn();
            backend.turn_once();
        }
        let frames = std::mem::take(&mut wire.lock().expect("unpoisoned").frames);
        (frames.len(), guests[0].transmit.used().len())
    };
    let change = |frontend: &mut Turned<_>, memory: &GuestMemoryMmap<()>| {
        let memory = GuestMemory::from(memory.clone());
        let told = frontend.call(|reply| Order::MemoryChanged(lease(1), memory, reply));
        assert_eq!(told, Some(()));
    };
    assert_eq!(offer(&mut frontend, 0), (0, 1), "not there yet");
    change(&mut frontend, &large);
    assert_eq!(offer(&mut frontend, 2), (1, 1));
    change(&mut frontend, &small);
    assert_eq!(offer(&mut frontend, 4), (0, 1), "gone again");
    assert_eq!(crate::pod::find(&book, 1).drops, [("bad-chain".to_owned(), 2)].into());
}

#[test]
fn a_guest_that_sends_empty_descriptors_has_few_of_them_looked_at_in_a_turn() {
    const DESCRIPTORS: u64 = 256;
    const CHAINS: u64 = 64;
    let mut pod = pod();
    for slot in 0..u16::try_from(CHAINS).expect("few") {
        let table = pod.guests[1].transmit.buffer(2 * slot, 8192);
        for number in 0..DESCRIPTORS {
            let mut raw = [0_u8; 16];
            raw[..8].copy_from_slice(&(table + 4096).to_le_bytes());
            raw[12..14].copy_from_slice(&(if number + 1 < DESCRIPTORS { NEXT } else { 0 }).to_le_bytes());
            raw[14..].copy_from_slice(&u16::try_from(number + 1).expect("few").to_le_bytes());
            let at = GuestAddress(table + 16 * number);
            pod.guests[1].memory.write_slice(&raw, at).expect("in memory");
        }
        pod.guests[1].transmit.offer(&[(2 * slot, table, 16 * 256, INDIRECT)]);
    }
    assert!(pod.guests[2].send(&[0; 12], &from(3, 7)));
    let looked_at = |pod: &Pod| pod.frontend.lease(2).drops.get("bad-chain").copied().unwrap_or(0);
    let (mut before, mut turns) = (0, 0);
    while before < CHAINS {
        pod.frontend.turn_once();
        let now = looked_at(&pod);
        assert!(
            (1..=4096 / DESCRIPTORS).contains(&(now - before)),
            "{} chains in turn {turns}",
            now - before
        );
        assert_eq!(pod.frontend.lease(3).tx_packets, 1, "its neighbour has its turn");
        (before, turns) = (now, turns + 1);
    }
    assert_eq!(pod.guests[1].transmit.used().len() as u64, CHAINS);
}
