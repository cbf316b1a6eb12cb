//! What a guest left undone is done in software where a NIC or a neighbour cannot.

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool};
use pod_protocol::ids::MacAddress;
use pod_protocol::objects::{NicPolicy, Object, RegistrationObject, RegistrationState};
use pod_protocol::worker::Task;
use std::sync::{Arc, Mutex};
use vhost_net_cxl::offloads::Offloads;

use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, all_features, area, channel, find, mac, port, registration, route,
    serve, settle,
};
use crate::recording::{RecordingNic, Wire, recording_backend};
use crate::switching::{Neighbours, neighbours};

const BUFFER_BYTES: u32 = 2048;
const HEADERS_BYTES: usize = 14 + 20 + 20;
const SEGMENT_BYTES: usize = 1400;

/// A large TCP packet over IPv4 and its virtio-net header.
pub(crate) fn large(from: MacAddress, to: MacAddress, payload: &[u8]) -> ([u8; 12], Vec<u8>) {
    let mut frame = Vec::new();
    frame.extend(to.bytes());
    frame.extend(from.bytes());
    frame.extend([8, 0]);
    let bytes = u16::try_from(40 + payload.len()).expect("short of 64 KiB").to_be_bytes();
    frame.extend([0x45, 0, bytes[0], bytes[1], 0, 5, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0x30, 0x39, 0, 80, 0, 0, 0, 100, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.extend(payload);
    let [low, high] = u16::try_from(SEGMENT_BYTES).expect("small").to_le_bytes();
    ([1, 1, 54, 0, low, high, 34, 0, 16, 0, 0, 0], frame)
}

pub(crate) fn payload(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|place| (place * 7 % 253).to_le_bytes()[0]).collect()
}

fn checks_out(frame: &[u8]) -> bool {
    let mut bytes = frame[26..34].to_vec();
    bytes.extend(u32::try_from(frame.len() - 34).expect("short").to_be_bytes());
    bytes.extend([0, 0, 0, 6]);
    bytes.extend(&frame[34..]);
    sum(&bytes) == 0xffff && sum(&frame[14..34]) == 0xffff
}

fn sum(bytes: &[u8]) -> u32 {
    let mut sum = 0;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

/// Checks the frames of a large packet and puts their payload together.
fn reassemble<'a>(frames: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<u8> {
    let mut payload = Vec::new();
    for (number, frame) in (0_u16..).zip(frames) {
        assert!(frame.len() <= HEADERS_BYTES + SEGMENT_BYTES && checks_out(frame), "frame {number}");
        assert_eq!(frame[18..20], (5 + number).to_be_bytes(), "identifications count up");
        let sequence = u32::try_from(100 + payload.len()).expect("small");
        assert_eq!(frame[38..42], sequence.to_be_bytes());
        payload.extend(&frame[HEADERS_BYTES..]);
    }
    payload
}

fn plain_features() -> u64 {
    all_features() & !Offloads::ALL.features()
}

fn arrived(pod: &mut Neighbours, guest: usize) -> Vec<Vec<u8>> {
    pod.guests[guest].received(BUFFER_BYTES).into_iter().map(|(_, frame)| frame).collect()
}

#[test]
fn a_large_packet_is_cut_for_a_neighbour_that_takes_none() {
    for mut pod in neighbours("", &[all_features(), plain_features()]) {
        let sent = payload(30_000);
        let (header, frame) = large(mac(1), mac(2), &sent);
        assert!(pod.guests[0].send(&header, &frame));
        pod.settle();
        let got = arrived(&mut pod, 1);
        assert_eq!(got.len(), 30_000_usize.div_ceil(SEGMENT_BYTES));
        assert_eq!(reassemble(&got), sent);
        assert_eq!(pod.guests[0].transmit.reclaim_pairs().len(), 1);
        assert!(pod.backend.lease(2).drops.is_empty(), "{:?}", pod.backend.lease(2).drops);
    }
}

#[test]
fn a_flooded_packet_reaches_everybody_in_the_form_that_each_can_take() {
    let no_large_v4 =
        all_features() & !Offloads::CHECKSUM.union(Offloads::TSO4).features() | Offloads::CHECKSUM.features();
    for mut pod in
        neighbours("", &[all_features(), plain_features(), all_features(), no_large_v4, plain_features()])
    {
        let sent = payload(5000);
        let (header, frame) = large(mac(1), MacAddress::BROADCAST, &sent);
        assert!(pod.guests[0].send(&header, &frame));
        pod.settle();
        for guest in [1, 3, 4] {
            assert_eq!(reassemble(&arrived(&mut pod, guest)), sent, "guest {guest}");
        }
        assert_eq!(arrived(&mut pod, 2), [frame], "whole");
        assert!(arrived(&mut pod, 0).is_empty());
        for guest in 1..=5 {
            assert!(pod.backend.lease(guest).drops.is_empty());
        }
        // Every receive buffer came back: as many packets again as there are buffers.
        for _ in 0..600 {
            assert!(pod.guests[0].send(&header, &large(mac(1), mac(2), &sent).1));
            pod.settle();
            assert_eq!(arrived(&mut pod, 1).len(), 4);
            pod.guests[0].transmit.reclaim_pairs();
        }
    }
}

#[test]
fn headers_that_do_not_match_cost_their_sender_the_packet() {
    for mut pod in neighbours("", &[all_features(), plain_features()]) {
        let (header, mut frame) = large(mac(1), mac(2), &payload(5000));
        frame[23] = 17;
        assert!(pod.guests[0].send(&header, &frame));
        pod.settle();
        assert!(arrived(&mut pod, 1).is_empty());
        assert_eq!(pod.backend.lease(2).drops, [("bad-header".to_owned(), 1)].into());
        assert_eq!(pod.guests[0].transmit.reclaim_pairs().len(), 1);
    }
}

/// One instance on a recording NIC.
struct Lone {
    pool: SimulatedPool,
    frontend: TestFrontend<SimulatedMemory>,
    backend: TestBackend<SimulatedMemory>,
    guest: Guest,
    wire: Arc<Mutex<Wire>>,
}

fn lone(offloads: Offloads, room: usize) -> Lone {
    let pool = SimulatedPool::new(3, POOL_BYTES);
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    let there = pool.host(HostId::new(2));
    // One more, for the announcement.
    let (mut backend, wire) = recording_backend(&there, offloads, room + 1, area(32, 16));
    serve(&mut frontend, &mut backend);
    let guest = Guest::new(64);
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);
    wire.lock().unwrap().frames.clear();
    Lone { pool, frontend, backend, guest, wire }
}

impl Lone {
    fn settle(&mut self) {
        settle(&mut [&mut self.frontend, &mut self.backend]);
        assert_eq!(self.pool.faults(), Faults::default());
    }
}

#[test]
fn a_large_packet_is_cut_for_a_nic_that_cannot() {
    let mut lone = lone(Offloads::CHECKSUM, usize::MAX - 1);
    let sent = payload(40_001);
    let (header, frame) = large(mac(1), mac(9), &sent);
    assert!(lone.guest.send(&header, &frame));
    assert!(lone.guest.send(&[0; 12], &crate::echo::frame(1, 100)), "and a plain one behind it");
    lone.settle();
    let mut wire = lone.wire.lock().unwrap();
    assert_eq!(wire.frames.pop(), Some(crate::echo::frame(1, 100)), "in order");
    assert_eq!(reassemble(&wire.frames), sent);
    assert!(wire.unfinished.is_empty());
    let counters = &lone.backend.counters;
    assert_eq!(counters.tx_packets.get(), wire.frames.len() as u64 + 1);
    assert_eq!(lone.guest.transmit.reclaim_pairs().len(), 2);
}

#[test]
fn a_large_packet_with_part_of_which_a_nic_finds_fault_is_a_drop_and_not_sent() {
    let mut lone = lone(Offloads::NONE, usize::MAX - 1);
    lone.wire.lock().unwrap().refuses_from = Some(3);
    let (header, frame) = large(mac(1), mac(9), &payload(20_000));
    assert!(lone.guest.send(&header, &frame));
    lone.settle();
    assert_eq!(lone.guest.transmit.reclaim_pairs().len(), 1);
    let telemetry = lone.backend.lease(1);
    assert_eq!(telemetry.drops, [("nic-refused".to_owned(), 1)].into());
    assert_eq!((telemetry.tx_packets, telemetry.tx_bytes), (0, 0));
    assert_eq!(lone.wire.lock().unwrap().frames.len(), 3, "and none behind");
    let counters = &lone.backend.counters;
    assert_eq!((counters.tx_packets.get(), counters.errors.get()), (3, 0), "the NIC is not to blame");
}

#[test]
fn an_able_nic_gets_large_packets_whole() {
    let mut lone = lone(Offloads::ALL, usize::MAX - 1);
    let (header, frame) = large(mac(1), mac(9), &payload(40_000));
    assert!(lone.guest.send(&header, &frame));
    lone.settle();
    let wire = lone.wire.lock().unwrap();
    assert_eq!(wire.unfinished.len(), 1);
    assert_eq!(wire.unfinished[0][12..], frame);
}

#[test]
fn what_went_out_before_a_driver_failed_does_not_go_out_again() {
    let mut lone = lone(Offloads::NONE, 3);
    lone.wire.lock().unwrap().fails_when_full = true;
    let sent = payload(20_000);
    let (header, frame) = large(mac(1), mac(9), &sent);
    assert!(lone.guest.send(&header, &frame));
    lone.settle();
    let mut frames = std::mem::take(&mut lone.wire.lock().unwrap().frames);
    assert_eq!(frames.len(), 3);
    assert!(lone.guest.transmit.reclaim_pairs().is_empty());
    let memory = lone.pool.host(HostId::new(2));
    let (nic, wire) = RecordingNic::new(&memory, Offloads::NONE, usize::MAX);
    lone.backend.task.reopened(Box::new(nic), None);
    lone.settle();
    let announces = |frame: &&Vec<u8>| frame[12..14] == [0x80, 0x35];
    frames.extend(wire.lock().unwrap().frames.iter().filter(|frame| !announces(frame)).cloned());
    assert_eq!(reassemble(&frames), sent);
    assert_eq!(lone.guest.transmit.reclaim_pairs().len(), 1);
    assert_eq!(lone.backend.lease(1).tx_packets, 1);
}

#[test]
fn a_nic_that_fills_up_amid_a_packet_gets_each_frame_once() {
    let mut lone = lone(Offloads::NONE, 0);
    let sent = payload(20_000);
    let (header, frame) = large(mac(1), mac(9), &sent);
    assert!(lone.guest.send(&header, &frame));
    for _ in 0..30 {
        lone.settle();
        assert!(lone.wire.lock().unwrap().frames.len() <= 15);
        lone.wire.lock().unwrap().room += 1;
    }
    lone.settle();
    assert_eq!(reassemble(&lone.wire.lock().unwrap().frames), sent);
    assert_eq!(lone.guest.transmit.reclaim_pairs().len(), 1);
}

#[test]
fn a_guest_keeps_its_offloads_on_a_backup_that_has_none() {
    let pool = SimulatedPool::new(9, POOL_BYTES);
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    let (second, third) = (pool.host(HostId::new(2)), pool.host(HostId::new(3)));
    let (mut first, first_wire) = recording_backend(&second, Offloads::ALL, 0, area(24, 8));
    let (mut backup, wire) = recording_backend(&third, Offloads::NONE, usize::MAX, area(40, 8));
    let transmit_area = area(8, 8);
    for number in [1, 2] {
        frontend.apply(Object::Channel(channel(number, 1, 512, true)));
    }
    first.apply(Object::Channel(channel(1, 1, 512, false)));
    backup.apply(Object::Channel(channel(2, 1, 512, false)));
    first.apply(Object::Registration(registration(1, 1, 1, RegistrationState::Active, transmit_area)));
    backup.apply(Object::Registration(registration(1, 2, 1, RegistrationState::Standby, transmit_area)));
    frontend.apply(Object::Port(port(1, transmit_area, route(1, 1), Some(route(2, 1)))));
    let mut guest = Guest::new(64);
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut first, &mut backup]);

    let sent = payload(10_000);
    let (header, frame) = large(mac(1), mac(9), &sent);
    assert!(guest.send(&header, &frame));
    settle(&mut [&mut frontend, &mut first, &mut backup]);
    assert!(first_wire.lock().unwrap().unfinished.is_empty(), "it is full");
    first.link.set(false);
    first.apply(Object::Registration(registration(1, 1, 2, RegistrationState::Standby, transmit_area)));
    backup.apply(Object::Registration(registration(1, 2, 2, RegistrationState::Active, transmit_area)));
    frontend.apply(Object::Port(port(1, transmit_area, route(2, 2), Some(route(1, 2)))));
    settle(&mut [&mut frontend, &mut first, &mut backup]);
    let wire = wire.lock().unwrap();
    let (announcements, frames): (Vec<_>, Vec<_>) =
        wire.frames.iter().partition(|frame| frame[12..14] == [0x80, 0x35]);
    assert_eq!(announcements.len(), 1);
    assert_eq!(reassemble(frames), sent);
    assert_eq!(guest.transmit.reclaim_pairs().len(), 1);
}

#[test]
fn packets_keep_their_order_whether_they_go_straight_to_the_nic_or_wait_for_it() {
    let mut lone = lone(Offloads::CHECKSUM, 0);
    let sent = payload(3 * SEGMENT_BYTES);
    let (header, whole) = large(mac(1), mac(9), &sent);
    let (mut offered, mut seen, mut refused) = (0, Vec::new(), 0);
    for round in 0..400_u32 {
        // Some that the NIC can take at once, some that have to be cut first, and some that are nobody's.
        while offered < 12 * (round + 1) {
            let mut frame = if offered % 7 == 3 { whole.clone() } else { crate::echo::frame(offered, 100) };
            if offered % 11 == 5 {
                frame[6..12].copy_from_slice(&mac(77).bytes());
            }
            let header = if offered % 7 == 3 { header } else { [0; 12] };
            if !lone.guest.send(&header, &frame) {
                break;
            }
            refused += u64::from(offered % 11 == 5);
            offered += 1;
        }
        // At times the NIC takes nothing, at times all, at times the half of a packet that was cut.
        lone.wire.lock().unwrap().room = (round as usize * 5) % 23;
        lone.frontend.task.turn();
        lone.backend.task.turn();
        lone.guest.transmit.reclaim_pairs();
        seen.append(&mut lone.wire.lock().unwrap().frames);
    }
    lone.wire.lock().unwrap().room = usize::MAX;
    lone.settle();
    seen.append(&mut lone.wire.lock().unwrap().frames);
    let mut seen = seen.iter();
    for number in (0..offered).filter(|number| number % 11 != 5) {
        if number % 7 == 3 {
            assert_eq!(reassemble(seen.by_ref().take(3)), sent, "packet {number}");
        } else {
            assert!(seen.next() == Some(&crate::echo::frame(number, 100)), "packet {number} is not next");
        }
    }
    assert_eq!(seen.next(), None);
    assert!(offered > 2000, "{offered}");
    assert_eq!(lone.backend.lease(1).drops, [("spoofed-source".to_owned(), refused)].into());
    assert_eq!(lone.backend.lease(1).tx_packets, u64::from(offered) - refused);
}

/// A large packet in segments of another length.
fn in_segments(of: u16, to: MacAddress, payload: &[u8]) -> ([u8; 12], Vec<u8>) {
    let (mut header, frame) = large(mac(1), to, payload);
    header[4..6].copy_from_slice(&of.to_le_bytes());
    (header, frame)
}

#[test]
fn a_packet_of_many_segments_is_cut_in_several_turns() {
    const FRAMES: usize = 1250;
    let mut lone = lone(Offloads::NONE, usize::MAX - 1);
    // Linux' smallest MSS.
    let sent = payload(48 * FRAMES);
    let (header, frame) = in_segments(48, mac(9), &sent);
    assert!(lone.guest.send(&header, &frame));
    assert!(lone.guest.send(&[0; 12], &crate::echo::frame(1, 100)), "and a plain one behind it");
    lone.frontend.task.turn();
    let mut before = 0;
    while before < FRAMES {
        lone.backend.task.turn();
        let now = lone.wire.lock().unwrap().frames.len();
        assert!((1..=257).contains(&(now - before)), "{} frames in a turn", now - before);
        before = now;
    }
    lone.settle();
    let mut wire = lone.wire.lock().unwrap();
    assert_eq!(wire.frames.pop(), Some(crate::echo::frame(1, 100)), "in order");
    assert_eq!(reassemble(&wire.frames), sent);
    assert_eq!(lone.guest.transmit.reclaim_pairs().len(), 2);
    assert_eq!(lone.backend.lease(1).drops, [].into());
}

#[test]
fn of_a_packet_of_many_segments_a_neighbour_gets_what_it_has_room_for() {
    for mut pod in neighbours("", &[all_features(), plain_features()]) {
        let sent = payload(48 * 1250);
        let (header, frame) = in_segments(48, mac(2), &sent);
        assert!(pod.guests[0].send(&header, &frame));
        pod.settle();
        let got = reassemble(&arrived(&mut pod, 1));
        assert!(!got.is_empty() && sent.starts_with(&got), "{} bytes", got.len());
        let drops = pod.backend.lease(2).drops;
        assert_eq!(drops, [("receive-share".to_owned(), 1)].into(), "the rest is not even cut");
        assert_eq!(pod.guests[0].transmit.reclaim_pairs().len(), 1);
    }
}

#[test]
fn frames_from_the_wire_that_nobody_could_put_together_are_dropped() {
    for features in [all_features(), plain_features()] {
        let pool = SimulatedPool::new(4, POOL_BYTES);
        let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
        let (mut backend, wire) =
            recording_backend(&pool.host(HostId::new(2)), Offloads::ALL, usize::MAX, area(32, 16));
        serve(&mut frontend, &mut backend);
        // Another one that is in a VLAN.
        let policy = NicPolicy { vlan: Some(10), ..NicPolicy::default() };
        let other = registration(2, 1, 1, RegistrationState::Active, area(16, 8));
        backend.apply(Object::Registration(RegistrationObject { policy, ..other }));
        let mut guest = Guest::new(128);
        guest.post(128, BUFFER_BYTES);
        frontend.start(1, &guest, features);
        settle(&mut [&mut frontend, &mut backend]);
        let arrive = |header: [u8; 12], frame: &[u8]| {
            wire.lock().unwrap().arriving.push_back([&header[..], frame].concat());
        };
        let to = |last: u8, bytes: usize| {
            let mut frame = payload(bytes);
            frame[..6].copy_from_slice(&mac(last).bytes());
            frame[6..12].copy_from_slice(&mac(99).bytes());
            frame
        };
        // More than 64 KiB, for each and in the VLAN.
        let mut tagged = to(2, 69_000);
        tagged[12..16].copy_from_slice(&[0x81, 0, 0, 10]);
        for frame in [to(1, 69_000), to(2, 69_000), tagged] {
            arrive([1, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0], &frame);
        }
        settle(&mut [&mut frontend, &mut backend]);
        assert_eq!(backend.counters.dropped(), [("too-long".to_owned(), 3)].into());
        // A checksum that lies behind the frame's end, and segments of no size.
        arrive([1, 0, 0, 0, 0, 0, 0xff, 0xff, 16, 0, 0, 0], &to(1, 1000));
        arrive([1, 0, 0, 0, 0, 0, 34, 0, 0xff, 0xff, 0, 0], &to(1, 1000));
        arrive([1, 1, 54, 0, 0, 0, 34, 0, 16, 0, 0, 0], &large(mac(99), mac(1), &payload(5000)).1);
        settle(&mut [&mut frontend, &mut backend]);
        assert!(guest.received(BUFFER_BYTES).is_empty());
        let drops = [&frontend.book, &backend.book].map(|book| find(book, 1).drops);
        let bad = drops.iter().filter_map(|drops| drops.get("bad-header")).sum::<u64>();
        assert_eq!(bad, 3, "{drops:?}");
        // It goes on, and has all of its buffers.
        for _ in 0..600 {
            arrive([0; 12], &to(1, 1000));
            settle(&mut [&mut frontend, &mut backend]);
            assert_eq!(guest.received(BUFFER_BYTES).len(), 1);
        }
    }
}
