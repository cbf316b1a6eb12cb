//! What an instance may do with its NIC, and that this changes while it is in use.

use pod_protocol::objects::{
    NicPolicy, Object, PortObject, RateLimit, RegistrationObject, RegistrationState,
};

use crate::echo::frame;
use crate::finishing::{large, payload};
use crate::pod::{all_features, mac, port, registration, route};
use crate::switching::{Neighbours, neighbours, transmit_area};

const BUFFER_BYTES: u32 = 2048;
/// Ten at once, and then one a second: no test waits for the next.
const TEN: RateLimit = RateLimit {
    bytes_per_second: None,
    packets_per_second: Some(1),
    burst_ms: 10_000,
    minimum_bytes_per_second: None,
};

fn set_port(pod: &mut Neighbours, number: u32, policy: NicPolicy) {
    let object = port(number, transmit_area(number), route(1, 1), None);
    pod.frontend.apply(Object::Port(PortObject { policy, ..object }));
}

fn set_registration(pod: &mut Neighbours, number: u32, policy: NicPolicy) {
    let object = registration(number, 1, 1, RegistrationState::Active, transmit_area(number));
    pod.backend.apply(Object::Registration(RegistrationObject { policy, ..object }));
}

/// Frame `number` from the first guest to the second.
fn between(number: u32) -> Vec<u8> {
    let mut frame = frame(number, 100);
    frame[..6].copy_from_slice(&mac(2).bytes());
    frame
}

fn numbers(pod: &mut Neighbours) -> Vec<u32> {
    let frames = pod.guests[1].received(BUFFER_BYTES).into_iter();
    frames.map(|(_, frame)| u32::from_le_bytes(frame[14..18].try_into().expect("four bytes"))).collect()
}

#[test]
fn a_guest_that_sends_too_much_waits_and_loses_nothing() {
    for mut pod in neighbours("", &[all_features(), all_features()]) {
        set_port(&mut pod, 1, NicPolicy { transmit: TEN, ..NicPolicy::default() });
        for number in 0..30 {
            assert!(pod.guests[0].send(&[0; 12], &between(number)));
        }
        pod.settle();
        let mut arrived = numbers(&mut pod);
        assert!((10..25).contains(&arrived.len()), "{}", arrived.len());
        assert_eq!(
            pod.guests[0].transmit.reclaim_pairs().len(),
            arrived.len(),
            "the rest waits in the queue"
        );
        assert!(pod.frontend.lease(1).rate_waits >= 1);
        assert_eq!(pod.frontend.lease(1).throttled, 20, "each of them once");
        // The timer fires, and not enough has come in.
        pod.frontend.task.retry();
        pod.settle();
        arrived.extend(numbers(&mut pod));
        assert!(arrived.len() < 28, "{}", arrived.len());
        // The limit is lifted.
        set_port(&mut pod, 1, NicPolicy::default());
        pod.settle();
        arrived.extend(numbers(&mut pod));
        assert_eq!(arrived, (0..30).collect::<Vec<_>>());
        assert_eq!(pod.frontend.lease(1).drops, [].into());
        assert!(pod.frontend.lease(1).throttled == 20, "ten went at once");
    }
}

#[test]
fn long_packets_go_no_further_beyond_a_burst_than_short_ones() {
    // A burst of 10 kB, and then a kilobyte a second.
    let slow = RateLimit { bytes_per_second: Some(1000), packets_per_second: None, ..TEN };
    for mut pod in neighbours("", &[all_features(), all_features()]) {
        set_port(&mut pod, 1, NicPolicy { transmit: slow, ..NicPolicy::default() });
        let (header, frame) = large(mac(1), mac(2), &payload(20_000));
        for _ in 0..8 {
            assert!(pod.guests[0].send(&header, &frame));
        }
        pod.settle();
        assert_eq!(pod.guests[1].received(BUFFER_BYTES).len(), 1, "what it is owed for is one packet");
        assert_eq!(pod.frontend.lease(1).throttled, 7);
        assert_eq!(pod.guests[0].transmit.reclaim_pairs().len(), 1);
    }
}

#[test]
fn the_other_guests_of_a_limited_one_are_not_held_up() {
    for mut pod in neighbours("", &[all_features(), all_features(), all_features()]) {
        set_port(&mut pod, 3, NicPolicy { transmit: TEN, ..NicPolicy::default() });
        for number in 0..30 {
            let mut flood = between(100 + number);
            flood[6..12].copy_from_slice(&mac(3).bytes());
            assert!(pod.guests[2].send(&[0; 12], &flood));
            assert!(pod.guests[0].send(&[0; 12], &between(number)));
        }
        pod.settle();
        let of_first: Vec<u32> = numbers(&mut pod).into_iter().filter(|number| *number < 100).collect();
        assert_eq!(of_first, (0..30).collect::<Vec<_>>());
    }
}

#[test]
fn what_a_guest_may_not_receive_is_dropped_and_counted() {
    for mut pod in neighbours("", &[all_features(), all_features()]) {
        set_registration(&mut pod, 2, NicPolicy { receive: TEN, ..NicPolicy::default() });
        for number in 0..30 {
            assert!(pod.guests[0].send(&[0; 12], &between(number)));
        }
        pod.settle();
        let arrived = numbers(&mut pod).len();
        assert!((10..25).contains(&arrived), "{arrived}");
        assert_eq!(pod.backend.lease(2).drops, [("rate-limit".to_owned(), 30 - arrived as u64)].into());
        assert_eq!(pod.guests[0].transmit.reclaim_pairs().len(), 30, "the sender is none the wiser");
        // Said again, it starts no new burst; said otherwise, it holds at once.
        set_registration(&mut pod, 2, NicPolicy { receive: TEN, ..NicPolicy::default() });
        for number in 0..10 {
            assert!(pod.guests[0].send(&[0; 12], &between(number)));
        }
        pod.settle();
        assert!(numbers(&mut pod).len() < 5);
        assert_eq!(pod.guests[0].transmit.reclaim_pairs().len(), 10);
        set_registration(&mut pod, 2, NicPolicy::default());
        for number in 0..30 {
            assert!(pod.guests[0].send(&[0; 12], &between(number)));
        }
        pod.settle();
        assert_eq!(numbers(&mut pod).len(), 30);
    }
}

#[test]
fn what_a_guest_may_receive_is_counted_in_bytes_too() {
    for mut pod in neighbours("", &[all_features(), all_features()]) {
        // A burst of 10 kB, and then a kilobyte a second.
        let slow = RateLimit { bytes_per_second: Some(1000), packets_per_second: None, ..TEN };
        set_registration(&mut pod, 2, NicPolicy { receive: slow, ..NicPolicy::default() });
        for number in 0..30 {
            let mut frame = frame(number, 1000);
            frame[..6].copy_from_slice(&mac(2).bytes());
            assert!(pod.guests[0].send(&[0; 12], &frame));
        }
        pod.settle();
        let arrived = numbers(&mut pod).len();
        assert!((10..20).contains(&arrived), "{arrived}");
        assert_eq!(pod.backend.lease(2).drops, [("rate-limit".to_owned(), 30 - arrived as u64)].into());
    }
}

#[test]
fn a_guest_with_known_addresses_uses_no_others() {
    for mut pod in neighbours("", &[all_features(), all_features()]) {
        let arp = |sender: [u8; 4]| {
            let mut frame = between(0);
            frame[12..14].copy_from_slice(&[0x08, 0x06]);
            frame[14..22].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
            frame[22..28].copy_from_slice(&mac(1).bytes());
            frame[28..32].copy_from_slice(&sender);
            frame
        };
        let known =
            NicPolicy { addresses: vec!["10.0.0.1".parse().expect("an address")], ..NicPolicy::default() };
        set_registration(&mut pod, 1, known);
        for sender in [[10, 0, 0, 1], [10, 0, 0, 254], [10, 0, 0, 1]] {
            assert!(pod.guests[0].send(&[0; 12], &arp(sender)));
        }
        pod.settle();
        assert_eq!(pod.guests[1].received(BUFFER_BYTES).len(), 2);
        assert_eq!(pod.backend.lease(1).drops, [("spoofed-address".to_owned(), 1)].into());
        assert_eq!(pod.guests[0].transmit.reclaim_pairs().len(), 3);
        set_registration(&mut pod, 1, NicPolicy::default());
        assert!(pod.guests[0].send(&[0; 12], &arp([10, 0, 0, 254])));
        pod.settle();
        assert_eq!(pod.guests[1].received(BUFFER_BYTES).len(), 1);
    }
}

/// The same with segments of another length.
fn in_segments(of: u16, payload_bytes: usize) -> ([u8; 12], Vec<u8>) {
    let (mut header, frame) = large(mac(1), mac(2), &payload(payload_bytes));
    header[4..6].copy_from_slice(&of.to_le_bytes());
    (header, frame)
}

#[test]
fn large_packets_count_as_what_they_come_to_on_the_wire() {
    // Of ten frames: three packets of four, and one of fourteen.
    let packets = [(TEN, in_segments(1400, 5600), 3), (TEN, in_segments(1000, 14_000), 1)];
    // A hundred segments of 4 bytes, each with headers of 54: two of them are more than 10 kB.
    let slow = RateLimit { bytes_per_second: Some(1000), packets_per_second: None, ..TEN };
    let bytes = [(slow, in_segments(4, 400), 2)];
    for (limit, (header, frame), fit) in packets.into_iter().chain(bytes) {
        for mut pod in neighbours("", &[all_features(), all_features()]) {
            set_port(&mut pod, 1, NicPolicy { transmit: limit, ..NicPolicy::default() });
            for _ in 0..8 {
                assert!(pod.guests[0].send(&header, &frame));
            }
            pod.settle();
            assert_eq!(pod.guests[1].received(BUFFER_BYTES).len(), fit, "sent");
            assert_eq!(pod.frontend.lease(1).throttled, 8 - fit as u64);
            set_port(&mut pod, 1, NicPolicy::default());
            pod.settle();
            assert_eq!(pod.guests[1].received(BUFFER_BYTES).len(), 8 - fit, "the rest");
            pod.guests[0].transmit.reclaim_pairs();
            // The other way it is the same, but that what is too much is dropped.
            set_registration(&mut pod, 2, NicPolicy { receive: limit, ..NicPolicy::default() });
            for _ in 0..8 {
                assert!(pod.guests[0].send(&header, &frame));
            }
            pod.settle();
            assert_eq!(pod.guests[1].received(BUFFER_BYTES).len(), fit, "received");
            assert_eq!(pod.backend.lease(2).drops, [("rate-limit".to_owned(), 8 - fit as u64)].into());
        }
    }
}
