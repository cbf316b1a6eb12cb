//! Guests that are held to a share of the fabric, by a real meter whose next K is an hour away: what it decided stands.

use cxl_pool::{Area, HostId, LineCount};
use pod_protocol::ids::InstanceId;
use pod_protocol::objects::{
    ElementObject, FabricObject, MchannelObject, Object, ObjectId, PortObject, TenantObject,
};
use pod_protocol::telemetry::MchannelTelemetry;
use vhost_frontend::pacing::Meter;

use crate::echo::frame;
use crate::guest::Guest;
use crate::pod::{all_features, area, lease, mac, port, route};
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
        elements: vec![ElementObject { element: 1, bytes_per_second }],
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
fn what_a_guest_receives_is_part_of_its_share() {
    for mut pod in neighbours("", &[all_features(); 2]) {
        let mut meter = meter(&pod);
        pace(&mut pod, &mut meter, 1);
        // Nobody can hold these back: they come, and are counted.
        send(&mut pod, 2, 1, 0..30);
        assert_eq!(received(&mut pod, 1), (0..30).collect::<Vec<_>>());
        let told = said(&meter, 1);
        assert_eq!((told.bytes, told.messages, told.held_us), (30 * (PACKET_BYTES - 12), 30, 0));
        send(&mut pod, 1, 2, 30..40);
        let sent = received(&mut pod, 2);
        assert_eq!(sent, [30, 31, 32, 33, 34], "half of what it saved up pays for what it received");
        // A device that is measured no more moves what it likes.
        pod.frontend.task.pace(lease(1), None);
        pod.settle();
        assert_eq!(received(&mut pod, 2), (35..40).collect::<Vec<_>>());
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
        let mut long = between(1, 2, 0);
        long.resize(60_000, 7);
        // A TCP segment that is still to be cut in pieces of 1448 bytes.
        assert!(queues[0].send(&[1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0], &long));
        let before = said(&meter, 1).bytes;
        while queues[0].transmit.reclaim_pairs().is_empty() {
            let short = said(&meter, 1).bytes - before;
            assert!(short <= 2 * SAVED, "{short} bytes of short packets went before the long one");
            flood(&mut pod, &mut queues[1]);
        }
    }
}
