//! Guests that are held to a share of the fabric, by a real meter whose next K is an hour away: what it decided stands.

use std::time::Instant;

use cxl_pool::{Area, HostId, LineCount};
use pod_protocol::ids::InstanceId;
use pod_protocol::objects::{
    ElementObject, FabricObject, MchannelObject, Object, ObjectId, PortObject, Signal, TenantObject,
};
use pod_protocol::telemetry::MchannelTelemetry;
use vhost_frontend::pacing::Meter;

use crate::echo::frame;
use crate::guest::Guest;
use crate::pod::{all_features, area, connect, lease, mac, port, route};
use crate::switching::{Neighbours, neighbours, transmit_area};

const BUFFER_BYTES: u32 = 2048;
const FRAME_BYTES: usize = 100;
/// A frame and its header.
const PACKET_BYTES: u64 = 112;
/// At a byte a second there is room for ten packets in it, and for the eleventh after two minutes.
const WINDOW_US: u32 = 1_120_000_000;
const K_US: u32 = 3_600_000_000;

/// A meter of a path that carries ten packets in each T_W.
fn meter(pod: &Neighbours) -> Meter {
    meter_of(pod, WINDOW_US, 1)
}

/// A meter of a path that carries this much.
fn meter_of(pod: &Neighbours, window_us: u32, bytes_per_second: u64) -> Meter {
    let board = |mib| Area::new(area(mib, 1).start, LineCount::new(16));
    let mut meter = Meter::new(pod.memory_of(HostId::new(1)));
    let fabric = FabricObject {
        window_us,
        sample_us: K_US,
        sums: board(28),
        vms: board(29),
        peers: Vec::new(),
        sibling: None,
        elements: vec![ElementObject { element: 1, bytes_per_second, signal: Signal::Off }],
        tenants: vec![TenantObject { tenant: 0, weight: 1 }],
    };
    meter.share(fabric).expect("a fabric");
    meter
}

/// Holds instance `number` to what the path carries.
fn pace(pod: &mut Neighbours, meter: &mut Meter, number: u32) {
    let instance = InstanceId::new(number);
    let (lease, name) = (lease(number), String::new());
    let object = MchannelObject { lease, instance, name, weight: 1, tenant: 0, path: vec![1] };
    let pacing = meter.measure(object);
    pod.frontend.task.pace(lease, Some(pacing));
}

fn said(meter: &Meter, number: u32) -> MchannelTelemetry {
    meter.telemetry().into_iter().find(|it| it.lease == Some(lease(number))).expect("it is measured")
}

/// Frame `number` from one guest to another.
fn between(from: u8, to: u8, number: u32) -> Vec<u8> {
    let mut frame = frame(number, FRAME_BYTES);
    frame[..6].copy_from_slice(&mac(to).bytes());
    frame[6..12].copy_from_slice(&mac(from).bytes());
    frame
}

fn send(pod: &mut Neighbours, from: u8, to: u8, numbers: std::ops::Range<u32>) {
    for number in numbers {
        assert!(pod.guests[usize::from(from) - 1].send(&[0; 12], &between(from, to, number)));
    }
    pod.settle();
}

fn received(pod: &mut Neighbours, guest: usize) -> Vec<u32> {
    let frames = pod.guests[guest - 1].received(BUFFER_BYTES).into_iter();
    frames.map(|(_, frame)| u32::from_le_bytes(frame[14..18].try_into().expect("four bytes"))).collect()
}

#[test]
fn what_is_beyond_a_share_waits_in_the_queue_and_is_not_lost() {
    for mut pod in neighbours("", &[all_features(); 3]) {
        let mut meter = meter(&pod);
        pace(&mut pod, &mut meter, 1);
        send(&mut pod, 1, 2, 0..30);
        let mut arrived = received(&mut pod, 2);
        assert_eq!(arrived, (0..10).collect::<Vec<_>>());
        assert_eq!(pod.guests[0].transmit.reclaim_pairs().len(), 10, "the rest waits in the queue");
        assert_eq!((said(&meter, 1).bytes, said(&meter, 1).messages), (10 * PACKET_BYTES, 10));
        // Its neighbour is none the worse for it.
        send(&mut pod, 3, 2, 100..130);
        assert_eq!(received(&mut pod, 2), (100..130).collect::<Vec<_>>());
        // The wait is over and nothing has come in: tried again, it waits again.
        pod.frontend.task.retry();
        pod.settle();
        assert_eq!(received(&mut pod, 2), [0; 0]);
        assert!(said(&meter, 1).held_us > 0);
        // The path is shared no more.
        meter.share_nothing();
        pod.settle();
        arrived.extend(received(&mut pod, 2));
        assert_eq!(arrived, (0..30).collect::<Vec<_>>());
        assert_eq!(pod.guests[0].transmit.reclaim_pairs().len(), 20);
        assert_eq!(pod.frontend.lease(1).drops, [].into());
    }
}

#[test]
fn what_a_guest_receives_waits_for_its_share_and_is_not_lost() {
    for mut pod in neighbours("", &[all_features(); 3]) {
        let mut meter = meter(&pod);
        pace(&mut pod, &mut meter, 1);
        send(&mut pod, 2, 1, 0..30);
        let mut arrived = received(&mut pod, 1);
        assert_eq!(arrived, (0..11).collect::<Vec<_>>(), "all that is saved up");
        let told = said(&meter, 1);
        assert_eq!((told.bytes, told.messages), (11 * (PACKET_BYTES - 12), 11));
        // Its neighbour is none the worse for it, and who sent has its buffers back.
        assert_eq!(pod.guests[1].transmit.reclaim_pairs().len(), 30);
        send(&mut pod, 2, 3, 100..130);
        assert_eq!(received(&mut pod, 3), (100..130).collect::<Vec<_>>());
        // Others cannot silence a guest by sending to it.
        send(&mut pod, 1, 3, 30..40);
        assert_eq!(received(&mut pod, 3), (30..35).collect::<Vec<_>>(), "half is its own");
        pod.frontend.task.retry();
        pod.settle();
        assert_eq!(received(&mut pod, 1), [0; 0]);
        assert!(said(&meter, 1).held_us > 0);
        // A device that is measured no more moves what it likes.
        pod.frontend.task.pace(lease(1), None);
        pod.settle();
        arrived.extend(received(&mut pod, 1));
        assert_eq!(arrived, (0..30).collect::<Vec<_>>());
        assert_eq!(received(&mut pod, 3), (35..40).collect::<Vec<_>>());
        assert_eq!(pod.frontend.lease(1).drops, [].into());
    }
}

#[test]
fn of_what_waits_for_its_share_the_newest_is_kept_and_the_rest_is_dropped_for_this_guest_alone() {
    for mut pod in neighbours("", &[all_features(); 3]) {
        let mut meter = meter(&pod);
        pace(&mut pod, &mut meter, 1);
        for first in (0..200).step_by(10) {
            for to in [1, 3] {
                send(&mut pod, 2, to, first..first + 10);
                assert_eq!(pod.guests[1].transmit.reclaim_pairs().len(), 10);
            }
            assert_eq!(received(&mut pod, 3), (first..first + 10).collect::<Vec<_>>());
        }
        assert_eq!(received(&mut pod, 1), (0..11).collect::<Vec<_>>());
        assert_eq!(pod.frontend.lease(1).drops, [("fabric-share".to_owned(), 200 - 11 - 48)].into());
        assert_eq!(pod.backend.lease(1).drops, [].into(), "the backend knows nothing of it");
        meter.share_nothing();
        pod.settle();
        assert_eq!(received(&mut pod, 1), (152..200).collect::<Vec<_>>());
        // All buffers went back.
        send(&mut pod, 2, 1, 0..30);
        assert_eq!(received(&mut pod, 1), (0..30).collect::<Vec<_>>());
    }
}

#[test]
fn what_waits_is_not_delivered_any_more_once_its_route_was_left() {
    for mut pod in neighbours("", &[all_features(); 2]) {
        let mut meter = meter(&pod);
        pace(&mut pod, &mut meter, 1);
        send(&mut pod, 2, 1, 0..30);
        assert_eq!(received(&mut pod, 1).len(), 11);
        pod.frontend.apply(Object::Port(port(1, transmit_area(1), route(2, 2), None)));
        pod.frontend.task.pace(lease(1), None);
        pod.settle();
        assert_eq!(received(&mut pod, 1), [0; 0]);
        assert_eq!(pod.frontend.lease(1).drops, [("stale-generation".to_owned(), 19)].into());
        // Nor over a channel that begins anew.
    }
    for mut pod in neighbours("", &[all_features(); 2]) {
        let mut meter = meter(&pod);
        pace(&mut pod, &mut meter, 1);
        send(&mut pod, 2, 1, 0..30);
        connect(&mut pod.frontend, &mut pod.backend, 2);
        pod.frontend.task.pace(lease(1), None);
        pod.settle();
        assert_eq!(received(&mut pod, 1).len(), 11);
        assert_eq!(pod.guests[1].transmit.reclaim_pairs().len(), 30);
        send(&mut pod, 2, 1, 40..50);
        assert_eq!(received(&mut pod, 1), (40..50).collect::<Vec<_>>());
    }
}

/// A TCP segment of this length between guests, that is still to be cut in pieces of 1448 bytes, and its header.
fn long(from: u8, to: u8, bytes: usize) -> ([u8; 12], Vec<u8>) {
    let mut long = between(from, to, 0);
    let rest = (FRAME_BYTES..bytes).map(|place| (place % 251).to_le_bytes()[0]);
    long.extend(rest);
    ([1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0], long)
}

#[test]
fn long_packets_are_moved_in_pieces_that_keep_the_bound() {
    // 10 kB may be saved up: half of what one of 60 kB would exceed the bound by.
    const RATE: u64 = 10_000_000;
    const WINDOW_US: u32 = 1000;
    let allowed = |began: Instant| {
        let elapsed_us = began.elapsed().as_micros() + 1 + 2 * u128::from(WINDOW_US);
        u128::from(RATE) * elapsed_us / 1_000_000
    };
    // Who sends is held to a share, and then who receives.
    for (paced, from, to) in [(1, 1, 2), (1, 2, 1)] {
        for mut pod in neighbours("", &[all_features(); 2]) {
            let mut meter = meter_of(&pod, WINDOW_US, RATE);
            pace(&mut pod, &mut meter, paced);
            let began = Instant::now();
            for round in 0..4 {
                let (header, sent) = long(from, to, 60_000);
                assert!(pod.guests[usize::from(from) - 1].send(&header, &sent));
                // One that is short comes behind it.
                assert!(pod.guests[usize::from(from) - 1].send(&[0; 12], &between(from, to, 7)));
                let mut arrived = Vec::new();
                while arrived.len() < 2 {
                    pod.settle();
                    let moved = said(&meter, paced).bytes;
                    assert!(
                        u128::from(moved) <= allowed(began),
                        "{moved} bytes, where {} may be",
                        allowed(began)
                    );
                    let frames = pod.guests[usize::from(to) - 1].received(BUFFER_BYTES);
                    arrived.extend(frames.into_iter().map(|(_, frame)| frame));
                }
                assert!(arrived[0] == sent, "the packet of round {round} is not what was sent");
                assert_eq!(arrived[1], between(from, to, 7));
                assert_eq!(pod.guests[usize::from(from) - 1].transmit.reclaim_pairs().len(), 2);
            }
            assert!(said(&meter, paced).messages > 4 * 13, "they were moved as a whole");
            assert_eq!(pod.frontend.lease(1).drops, [].into());
        }
    }
}

#[test]
fn a_device_that_goes_leaves_its_share_and_its_successor_begins_with_a_window() {
    for mut pod in neighbours("", &[all_features(); 2]) {
        let mut meter = meter(&pod);
        pace(&mut pod, &mut meter, 1);
        send(&mut pod, 1, 2, 0..12);
        assert_eq!(received(&mut pod, 2).len(), 10);
        meter.forget(lease(1));
        assert!(meter.telemetry().is_empty());
        pod.settle();
        assert_eq!(received(&mut pod, 2), [10, 11]);
        pace(&mut pod, &mut meter, 1);
        send(&mut pod, 1, 2, 20..40);
        assert_eq!(received(&mut pod, 2), (20..30).collect::<Vec<_>>());
    }
}

#[test]
fn a_long_packet_gets_through_beside_a_queue_that_is_never_empty() {
    // A tenth of a second's share, 100 kB, may be saved up.
    const SAVED: u64 = 100_000;
    for mut pod in neighbours("", &[all_features(); 2]) {
        let mut meter = meter_of(&pod, 100_000, 1_000_000);
        // The first guest has two pairs of queues.
        pod.frontend.task.remove(&ObjectId::Port(lease(1)), None);
        let two = PortObject { queue_pairs: 2, ..port(1, transmit_area(1), route(1, 1), None) };
        pod.frontend.apply(Object::Port(two));
        let mut queues = [Guest::new(64), Guest::new(64)];
        for (queue, first) in queues.iter_mut().zip([0, 2]) {
            queue.post(64, BUFFER_BYTES);
            pod.frontend.task.start_ring(lease(1), queue.receive.ring_as(first, all_features(), 0), None);
            pod.frontend.task.start_ring(
                lease(1),
                queue.transmit.ring_as(first + 1, all_features(), 0),
                None,
            );
        }
        pace(&mut pod, &mut meter, 1);
        let mut number = 0;
        let mut flood = |pod: &mut Neighbours, queue: &mut Guest| {
            queue.transmit.reclaim_pairs();
            while queue.send(&[0; 12], &between(1, 2, number)) {
                number += 1;
            }
            pod.settle();
            pod.guests[1].received(BUFFER_BYTES);
        };
        // What is saved up goes to short packets.
        while said(&meter, 1).bytes < SAVED / 2 {
            flood(&mut pod, &mut queues[1]);
        }
        let (header, long) = long(1, 2, 60_000);
        assert!(queues[0].send(&header, &long));
        let before = said(&meter, 1).bytes;
        while queues[0].transmit.reclaim_pairs().is_empty() {
            let short = said(&meter, 1).bytes - before;
            assert!(short <= 2 * SAVED, "{short} bytes of short packets went before the long one");
            flood(&mut pod, &mut queues[1]);
        }
    }
}
