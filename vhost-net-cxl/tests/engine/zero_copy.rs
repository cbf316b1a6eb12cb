//! Guests whose memory lies in the pool: what they send stays there until a NIC takes it, and nobody reads more of it than
//! is leased.

use std::sync::{Arc, Mutex};

use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool, check_seeds};
use cxl_pool::{Area, HostId, Memory};
use pod_protocol::ids::{LeaseGeneration, MacAddress};
use pod_protocol::objects::{Object, PortObject, RegistrationObject, RegistrationState, Route};
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::{ChannelEnd, MESSAGES_PER_LOOK};
use vhost_net_cxl::message::{NetMessage, Opcode, Run, Status};
use vhost_net_cxl::offloads::Offloads;
use vhost_net_cxl::scattered::write_list;

use crate::echo::{BUFFER_BYTES, QUEUE_SIZE, frame, pair_of, returned};
use crate::guest::{Guest, NEXT, ram_area};
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, lease, mac, open, port,
    registration, route, settle,
};
use crate::recording::{Wire, recording_backend};
use RegistrationState::{Active, Standby};

pub(crate) const SLOTS: u32 = 512;
const TSO_HEADER: [u8; 12] = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];

/// One frontend, whose guest's memory lies in the pool, and one backend whose NIC writes down what it sends.
pub(crate) struct Pod {
    pub(crate) pool: SimulatedPool,
    pub(crate) frontend: TestFrontend<SimulatedMemory>,
    pub(crate) backend: TestBackend<SimulatedMemory>,
    pub(crate) guest: Guest,
    pub(crate) wire: Arc<Mutex<Wire>>,
}

fn registered(channel: u32, generation: u16, state: RegistrationState) -> Object {
    let registration = registration(1, channel, generation, state, transmit_area());
    Object::Registration(RegistrationObject { ram_area: Some(ram_area()), ..registration })
}

pub(crate) fn offered(active: Route, standby: Option<Route>) -> Object {
    let port = port(1, transmit_area(), active, standby);
    Object::Port(PortObject { ram_area: Some(ram_area()), ..port })
}

fn transmit_area() -> Area {
    area(8, 8)
}

fn recording(
    pool: &SimulatedPool,
    host: u16,
    offloads: Offloads,
    receive_area: Area,
) -> (TestBackend<SimulatedMemory>, Arc<Mutex<Wire>>) {
    recording_backend(&pool.host(HostId::new(host)), offloads, usize::MAX, receive_area)
}

pub(crate) fn pod(seed: u64, offloads: Offloads) -> Pod {
    let pool = SimulatedPool::new(seed, POOL_BYTES);
    let here = pool.host(HostId::new(1));
    let guest = Guest::in_simulated_pool(&here, QUEUE_SIZE);
    let mut frontend = TestFrontend::new(&here).with_pool_file(guest.pool_file);
    let (mut backend, wire) = recording(&pool, 2, offloads, area(32, 8));
    backend.apply(Object::Channel(channel(1, 1, SLOTS, false)));
    backend.apply(registered(1, 1, Active));
    frontend.apply(Object::Channel(channel(1, 1, SLOTS, true)));
    frontend.apply(offered(route(1, 1), None));
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);
    // The announcement of its address.
    wire.lock().expect("unpoisoned").frames.clear();
    Pod { pool, frontend, backend, guest, wire }
}

impl Pod {
    pub(crate) fn settle(&mut self) {
        settle(&mut [&mut self.frontend, &mut self.backend]);
    }

    pub(crate) fn sent(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.wire.lock().expect("unpoisoned").frames)
    }
}

#[test]
fn the_payload_stays_in_the_guests_memory() {
    check_seeds("-p vhost-net-cxl --test engine", 12, |seed| {
        let mut pod = pod(seed, Offloads::ALL);
        for (number, bytes) in [(1, 1514), (2, 500), (3, 501), (4, 60), (5, 1514)] {
            assert!(pod.guest.send(&[0; 12], &frame(number, bytes)));
            pod.settle();
            assert_eq!(pod.sent(), [frame(number, bytes)]);
            let pieces = pod.wire.lock().expect("unpoisoned").pieces.pop().expect("one packet");
            assert!(transmit_area().contains(pieces[0].at, u64::from(pieces[0].bytes)));
            // A packet that its buffer holds anyway is copied.
            let lent = bytes + 12 > 512;
            assert_eq!(pieces.len(), if lent { 2 } else { 1 });
            for piece in &pieces[1..] {
                assert!(ram_area().contains(piece.at, u64::from(piece.bytes)));
            }
        }
        assert_eq!(pod.pool.faults(), Faults::default());
        Ok(())
    });
}

#[test]
fn a_list_of_more_ranges_than_a_line_holds_is_read_whole() {
    check_seeds("-p vhost-net-cxl --test engine", 24, |seed| {
        let mut pod = pod(seed, Offloads::ALL);
        // Again and again in the same buffer, with lists of other lengths before and after.
        for (number, pieces) in (0..).zip([2, 9, 17, 3, 12, 6, 17, 1]) {
            let packet = frame(number, 1200 + 16 * number as usize);
            assert!(pod.guest.send_in_pieces(&[0; 12], &packet, pieces));
            pod.settle();
            assert_eq!(pod.sent(), [packet]);
            pod.guest.transmit.reclaim_pairs();
        }
        assert_eq!(pod.backend.lease(1).drops, [].into());
        assert_eq!(pod.pool.faults(), Faults::default());
        Ok(())
    });
}

#[test]
fn a_chain_of_64_descriptors_is_lent_where_it_is_in_few_pieces_and_copied_where_it_is_not() {
    for apart in [0, 1] {
        let mut pod = pod(3, Offloads::ALL);
        let packet = [vec![0; 12], frame(7, 1268)].concat();
        let at = pod.guest.transmit.buffer(0, 4096);
        let mut descriptors = Vec::new();
        for (slot, part) in (0..64_u16).zip(packet.chunks(20)) {
            let here = at + u64::from(slot) * (20 + apart);
            pod.guest.store(here, part);
            // Empty ones between them are useless, but legal.
            let bytes = u32::try_from(part.len()).expect("short");
            descriptors.push((slot, here, bytes, if slot < 63 { NEXT } else { 0 }));
        }
        pod.guest.transmit.offer(&descriptors);
        pod.settle();
        assert_eq!(pod.sent(), [frame(7, 1268)]);
        let pieces = pod.wire.lock().expect("unpoisoned").pieces.pop().expect("one packet");
        assert_eq!(pieces.len(), if apart == 0 { 2 } else { 1 });
        assert_eq!(pod.guest.transmit.used().len(), 1);
        assert_eq!(pod.frontend.lease(1).drops, [].into());
    }
}

#[test]
fn what_was_checked_is_what_is_sent_whatever_the_guest_writes_meanwhile() {
    let mut pod = pod(5, Offloads::ALL);
    assert!(pod.guest.send(&[0; 12], &frame(1, 1514)));
    pod.frontend.turn_once();
    // Another header, another source, other addresses: too late.
    let at = pod.guest.transmit.buffer(0, 70_000);
    pod.guest.store(at, &[0xff; 244]);
    pod.settle();
    let sent = pod.sent();
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0][..244], frame(1, 1514)[..244]);
    assert_eq!(pod.backend.lease(1).drops, [].into());
}

#[test]
fn a_large_packet_is_cut_for_a_nic_that_cannot_do_it() {
    let mut pod = pod(6, Offloads::NONE);
    let mut large = frame(1, 54 + 3 * 1448);
    large[12..14].copy_from_slice(&[8, 0]);
    let total = u16::try_from(large.len() - 14).expect("short").to_be_bytes();
    large[14..34].copy_from_slice(&[
        0x45, 0, total[0], total[1], 0, 5, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
    ]);
    large[34..54]
        .copy_from_slice(&[0x30, 0x39, 0, 80, 0, 0, 0, 100, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    assert!(pod.guest.send(&TSO_HEADER, &large));
    pod.settle();
    let payload: Vec<u8> = pod.sent().iter().flat_map(|frame| frame[54..].to_vec()).collect();
    assert!(payload == large[54..], "{} bytes of payload", payload.len());
    assert_eq!(pod.guest.transmit.reclaim_pairs().len(), 1);
}

#[test]
fn a_neighbour_gets_what_lies_in_the_senders_memory() {
    check_seeds("-p vhost-net-cxl --test engine", 8, |seed| {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let here = pool.host(HostId::new(1));
        let guest = Guest::in_simulated_pool(&here, QUEUE_SIZE);
        let mut pair = pair_of(guest, &here, &pool.host(HostId::new(2)), SLOTS, all_features(), 8);
        pair.backend.apply(Object::Registration(registration(2, 1, 1, Active, area(16, 8))));
        pair.frontend.apply(Object::Port(port(2, area(16, 8), route(1, 1), None)));
        let mut neighbour = Guest::new(QUEUE_SIZE);
        neighbour.post(QUEUE_SIZE, BUFFER_BYTES);
        pair.frontend.start(2, &neighbour, all_features());
        let mut frames = Vec::new();
        for number in 0..8 {
            let mut frame = frame(number, 1514 - number as usize);
            frame[..6].copy_from_slice(&mac(2).bytes());
            assert!(pair.guest.send(&[0; 12], &frame));
            frames.push(frame);
        }
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        let got: Vec<Vec<u8>> =
            neighbour.received(BUFFER_BYTES).into_iter().map(|(_, frame)| frame).collect();
        assert!(got == frames, "seed {seed}: {} frames", got.len());
        assert_eq!(pool.faults(), Faults::default());
        Ok(())
    });
}

#[test]
fn what_a_dead_link_was_lent_goes_through_the_backup_nic() {
    let mut pod = pod(8, Offloads::ALL);
    let (mut backup, backup_wire) = recording(&pod.pool, 3, Offloads::ALL, area(40, 4));
    backup.apply(Object::Channel(channel(2, 1, SLOTS, false)));
    backup.apply(registered(2, 1, Standby));
    pod.frontend.apply(Object::Channel(channel(2, 1, SLOTS, true)));
    pod.frontend.apply(offered(route(1, 1), Some(route(2, 1))));
    pod.backend.link.set(false);
    for number in 0..10 {
        assert!(pod.guest.send(&[0; 12], &frame(number, if number % 2 == 0 { 1000 } else { 100 })));
    }
    settle(&mut [&mut pod.frontend, &mut pod.backend, &mut backup]);
    assert!(pod.guest.transmit.reclaim_pairs().is_empty());

    // The link comes back before the backend hears that the lease has moved: it has kept nothing that it was lent.
    backup.apply(registered(2, 2, Active));
    pod.frontend.apply(offered(route(2, 2), Some(route(1, 2))));
    settle(&mut [&mut pod.frontend, &mut backup]);
    assert_eq!(pod.guest.transmit.reclaim_pairs().len(), 10);
    pod.backend.link.set(true);
    settle(&mut [&mut pod.frontend, &mut pod.backend, &mut backup]);
    assert_eq!(pod.sent().iter().filter(|frame| frame[12..14] == [0x88, 0xb5]).count(), 0);
    let mut frames = std::mem::take(&mut backup_wire.lock().expect("unpoisoned").frames);
    frames.retain(|frame| frame[12..14] == [0x88, 0xb5]);
    let expected: Vec<Vec<u8>> =
        (0..10).map(|number| frame(number, if number % 2 == 0 { 1000 } else { 100 })).collect();
    assert!(frames == expected, "{} frames", frames.len());
    assert_eq!(pod.pool.faults(), Faults::default());
}

#[test]
fn a_broadcast_that_waits_for_a_link_reaches_neighbours_once() {
    let mut pod = pod(9, Offloads::ALL);
    pod.backend.apply(Object::Registration(registration(2, 1, 1, Active, area(16, 8))));
    pod.frontend.apply(Object::Port(port(2, area(16, 8), route(1, 1), None)));
    let mut neighbour = Guest::new(QUEUE_SIZE);
    neighbour.post(QUEUE_SIZE, BUFFER_BYTES);
    pod.frontend.start(2, &neighbour, all_features());
    pod.settle();
    pod.sent();
    pod.backend.link.set(false);
    let to = |address: MacAddress, number| {
        let mut frame = frame(number, 100);
        frame[..6].copy_from_slice(&address.bytes());
        frame
    };
    let (broadcast, unicast) = (to(MacAddress::BROADCAST, 1), to(mac(2), 2));
    assert!(pod.guest.send(&[0; 12], &broadcast));
    assert!(pod.guest.send(&[0; 12], &unicast));
    for _ in 0..10 {
        pod.settle();
        // It is offered again when the timer fires.
        pod.frontend.task.retry();
    }
    pod.backend.link.set(true);
    pod.settle();
    let got = neighbour.received(BUFFER_BYTES).into_iter().map(|(_, frame)| frame);
    let (broadcasts, others): (Vec<_>, Vec<_>) = got.partition(|frame| *frame == broadcast);
    assert_eq!(broadcasts.len(), 1);
    assert_eq!(others, [unicast], "what stays here needs no link");
    // Unless this took longer than anything waits for a link.
    let sent = pod.sent().into_iter().filter(|frame| *frame == broadcast).count() as u64;
    let lost = pod.backend.lease(1).drops.get("link-down").copied().unwrap_or(0);
    assert_eq!(sent + lost, 1);
    let counted = pod.backend.lease(1);
    assert_eq!(
        (counted.tx_packets, counted.tx_bytes),
        (2, 200),
        "once each, however often they were offered"
    );
    assert_eq!(pod.guest.transmit.reclaim_pairs().len(), 2);
}

#[test]
fn what_a_stopped_queue_had_lent_and_not_sent_is_counted() {
    let mut pod = pod(10, Offloads::ALL);
    pod.backend.link.set(false);
    assert!(pod.guest.send(&[0; 12], &frame(1, 1000)));
    assert!(pod.guest.send(&[0; 12], &frame(2, 100)));
    pod.settle();
    pod.frontend.task.stop_ring(lease(1), 1, None);
    assert_eq!(pod.guest.transmit.reclaim_pairs().len(), 2);
    assert_eq!(pod.frontend.lease(1).drops, [("queue-stopped".to_owned(), 1)].into());
    pod.backend.link.set(true);
    pod.frontend.task.retry();
    pod.settle();
    let mut sent = pod.sent();
    sent.retain(|frame| frame[12..14] == [0x88, 0xb5]);
    assert_eq!(sent, [frame(2, 100)], "what was copied goes on");
}

pub(crate) fn transmissions<M: Memory>(end: &mut ChannelEnd<M>) -> Vec<NetMessage> {
    let mut inbox = [[0; 2]; MESSAGES_PER_LOOK];
    let count = end.receive(&mut inbox);
    let messages = inbox[..count].iter().filter_map(|words| NetMessage::decode(*words));
    messages.filter(|message| message.opcode == Opcode::Transmit).collect()
}

#[test]
fn a_list_that_leads_out_of_the_leased_memory_is_refused() {
    let pool = SimulatedPool::new(2, POOL_BYTES);
    let here = pool.host(HostId::new(1));
    let (mut backend, wire) = recording(&pool, 2, Offloads::ALL, area(32, 8));
    backend.apply(Object::Channel(channel(1, 1, SLOTS, false)));
    backend.apply(registered(1, 5, Active));
    let mut end = open(&here, &ChannelBook::default())(&channel(1, 1, SLOTS, true)).expect("a channel");
    for _ in 0..1000 {
        backend.turn_once();
        if end.ready() {
            break;
        }
    }
    assert!(end.ready());
    let ram = ram_area().start_byte();
    let past_its_end = ram.saturating_add(ram_area().bytes() - 100);
    let cases = [
        (vec![(ram, 256)], 512, Status::Sent),
        (vec![(past_its_end, 101)], 357, Status::Dropped),
        (vec![(area(47, 1).start_byte(), 256)], 512, Status::Dropped),
        (vec![(transmit_area().start_byte(), 256)], 512, Status::Dropped),
        (vec![(ram, 255)], 512, Status::Dropped),
        (vec![(ram, 257)], 512, Status::Dropped),
        (vec![(ram, 0), (ram, 256)], 512, Status::Dropped),
        (vec![(ram, 100), (ram, 156)], 512, Status::Sent),
        (vec![(ram, u32::MAX)], 512, Status::Dropped),
        (vec![], 256, Status::Dropped),
    ];
    for (sequence, (ranges, bytes, _)) in (0_u16..).zip(&cases) {
        let buffer = transmit_area().start_byte().saturating_add(u64::from(sequence) * 512);
        let mut content = [0; 512];
        content[12..12 + 60].copy_from_slice(&frame(u32::from(sequence), 60));
        write_list(ranges, &mut content[256..]);
        here.write(buffer, &content);
        here.write_back(buffer, 512);
        here.store_fence();
        assert!(end.request(&NetMessage {
            opcode: Opcode::Transmit,
            lease: lease(1),
            generation: LeaseGeneration::new(5),
            sequence,
            line: buffer.line(),
            bytes: *bytes,
            more: true,
        }));
    }
    end.publish();
    let mut answers = Vec::new();
    for _ in 0..100 {
        backend.turn_once();
        let mut inbox = [[0; 2]; MESSAGES_PER_LOOK];
        let count = end.receive(&mut inbox);
        for message in inbox[..count].iter().filter_map(|words| NetMessage::decode(*words)) {
            let run = Run::from_code(message.bytes);
            answers.extend((0..run.packets).map(|after| (message.sequence + after, run.status)));
        }
    }
    answers.sort_by_key(|(sequence, _)| *sequence);
    let expected: Vec<(u16, Status)> = (0..).zip(cases.iter().map(|case| case.2)).collect();
    assert_eq!(answers, expected);
    assert_eq!(backend.lease(1).drops, [("outside-area".to_owned(), 8)].into());
    assert_eq!(wire.lock().expect("unpoisoned").pieces.len(), 2);
    assert!(backend.task.uses(ram_area()), "the memory is in use as long as the lease is registered");
}

#[test]
fn nothing_is_lent_without_a_lease_for_it() {
    let pool = SimulatedPool::new(4, POOL_BYTES);
    let here = pool.host(HostId::new(1));
    let mut guest = Guest::in_simulated_pool(&here, QUEUE_SIZE);
    // The frontend knows the file, and the guest's memory lies in it; but nobody has leased that to the guest.
    let file = guest.pool_file.take();
    let mut pair = pair_of(guest, &here, &pool.host(HostId::new(2)), SLOTS, all_features(), 8);
    pair.frontend = TestFrontend::new(&here).with_pool_file(file);
    pair.frontend.apply(Object::Channel(channel(1, 2, SLOTS, true)));
    pair.backend.apply(Object::Channel(channel(1, 2, SLOTS, false)));
    pair.frontend.apply(Object::Port(port(1, transmit_area(), route(1, 1), None)));
    pair.frontend.start(1, &pair.guest, all_features());
    assert!(pair.guest.send(&[0; 12], &frame(1, 1514)));
    settle(&mut [&mut pair.frontend, &mut pair.backend]);
    let got = pair.guest.received(BUFFER_BYTES);
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].1, returned(&frame(1, 1514)));
    assert_eq!(pair.backend.lease(1).drops, [].into());
}

#[test]
fn so_much_is_lent_in_a_turn_and_the_rest_in_further_ones() {
    const PACKETS: u64 = 60;
    let mut pod = pod(4, Offloads::ALL);
    let frame = frame(1, 60_000);
    for _ in 0..PACKETS {
        assert!(pod.guest.send(&TSO_HEADER, &frame));
    }
    pod.frontend.turn_once();
    let lent = pod.frontend.book.zero_copy();
    // And one packet more.
    assert_eq!(lent, (2_u64 << 20).div_ceil(60_012));
    pod.frontend.turn_once();
    assert_eq!(pod.frontend.book.zero_copy(), PACKETS);
    pod.settle();
    assert_eq!(pod.wire.lock().expect("unpoisoned").unfinished.len() as u64, PACKETS);
    assert_eq!(pod.guest.transmit.reclaim_pairs().len() as u64, PACKETS);
}
