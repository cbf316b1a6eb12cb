//! What arrives while an instance moves from one working NIC to another, and both may deliver to it.

use std::time::{Duration, Instant};

use pod_protocol::objects::{Object, RegistrationState};

use crate::echo::{BUFFER_BYTES, QUEUE_SIZE, frame};
use crate::failover::Move;
use crate::guest::Guest;
use crate::pod::{Turn, all_features, area, mac, port, registration, route};
use RegistrationState::{Active, Draining, Standby};

impl Move {
    /// A frame arrives at a NIC.
    fn arrive(&self, nic: usize, frame: &[u8]) {
        let packet = [&[0; 12][..], frame].concat();
        self.wires[nic].lock().expect("unpoisoned").arriving.push_back(packet);
    }

    /// The numbers of the frames that the guest has got since it was looked at last.
    fn heard(&mut self) -> Vec<u32> {
        let frames = self.guest.received(BUFFER_BYTES).into_iter();
        frames.map(|(_, frame)| u32::from_le_bytes(frame[14..18].try_into().expect("four bytes"))).collect()
    }
}

/// A frame to all, from a stranger.
fn broadcast(number: u32) -> Vec<u8> {
    let mut frame = frame(number, 200);
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac(9).bytes());
    frame
}

/// A frame to the guest.
fn unicast(number: u32) -> Vec<u8> {
    let mut frame = broadcast(number);
    frame[..6].copy_from_slice(&mac(1).bytes());
    frame
}

/// Who is told of the move.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    NewNic,
    OldNic,
    Frontend,
}

const ORDERS: [[Told; 3]; 3] = [
    [Told::NewNic, Told::OldNic, Told::Frontend],
    [Told::NewNic, Told::Frontend, Told::OldNic],
    [Told::Frontend, Told::NewNic, Told::OldNic],
];

fn tell(moving: &mut Move, whom: Told) {
    match whom {
        Told::NewNic => moving.register(1, 2, Active),
        Told::OldNic => moving.register(0, 1, Draining),
        Told::Frontend => moving.offer(Some(route(1, 1))),
    }
}

#[test]
fn a_flooded_frame_arrives_once_throughout_a_move() {
    for order in ORDERS {
        for first in [0, 1] {
            let mut moving = Move::new(0);
            moving.guest.post(QUEUE_SIZE, BUFFER_BYTES);
            let mut number = 0;
            let mut flood = |moving: &mut Move, when: &str| {
                // Some at a time, the one of each NIC behind the other's or both at once.
                for together in [false, true] {
                    let numbers = [number, number + 1, number + 2];
                    number += 3;
                    for nic in [first, 1 - first] {
                        for it in numbers {
                            moving.arrive(nic, &broadcast(it));
                        }
                        if !together {
                            moving.settle();
                        }
                    }
                    moving.settle();
                    assert_eq!(moving.heard(), numbers, "{when}, {order:?}, first {first}, {together}");
                }
            };
            flood(&mut moving, "before");
            for whom in order {
                tell(&mut moving, whom);
                flood(&mut moving, &format!("once {whom:?} knows"));
            }
            moving.offer(None);
            flood(&mut moving, "without a NIC that drains");
            moving.register(0, 2, Standby);
            flood(&mut moving, "afterwards");
            let drops = moving.frontend.lease(1).drops;
            assert!(
                drops.keys().all(|reason| ["doubled", "stale-generation"].contains(&reason.as_str())),
                "{drops:?}"
            );
        }
    }
}

#[test]
fn a_flooded_frame_that_the_new_nic_was_too_early_for_comes_over_the_old_one_however_late_that_looks() {
    let mut moving = Move::new(0);
    moving.guest.post(QUEUE_SIZE, BUFFER_BYTES);
    // More than a NIC is asked for at once, most of it for somebody else.
    for number in 100..300 {
        let mut frame = unicast(number);
        frame[..6].copy_from_slice(&mac(8).bytes());
        moving.arrive(0, &frame);
    }
    let numbers: Vec<u32> = (0..16).collect();
    for nic in [0, 1] {
        for it in &numbers {
            moving.arrive(nic, &broadcast(*it));
        }
    }
    // It only stands by yet. The other one's backend does not get to look until it is told of the move.
    while moving.backends[1].turn_once() {}
    for whom in [Told::NewNic, Told::Frontend, Told::OldNic] {
        tell(&mut moving, whom);
    }
    moving.settle();
    assert_eq!(moving.heard(), numbers);
}

#[test]
fn a_frame_that_is_said_twice_is_heard_twice_in_a_move() {
    let mut moving = Move::new(0);
    moving.guest.post(QUEUE_SIZE, BUFFER_BYTES);
    tell(&mut moving, Told::NewNic);
    for nic in [0, 1, 0, 1] {
        moving.arrive(nic, &broadcast(7));
    }
    moving.settle();
    assert_eq!(moving.heard(), [7, 7]);
    // What is for it alone comes over one NIC only.
    moving.arrive(0, &unicast(8));
    moving.arrive(1, &unicast(8));
    moving.settle();
    assert_eq!(moving.heard(), [8, 8]);
}

/// So many pairs of frames arrived the other way round than they were sent.
fn inversions(numbers: &[u32]) -> usize {
    let later = |(place, number): (usize, &u32)| numbers[place..].iter().filter(|it| *it < number).count();
    numbers.iter().enumerate().map(later).sum()
}

#[test]
fn what_arrives_over_either_nic_stays_in_order_and_nothing_comes_late_after_a_move() {
    const FRAMES: u32 = 20;
    let mut moving = Move::new(0);
    moving.guest.post(QUEUE_SIZE, BUFFER_BYTES);
    let mut number = 0;
    let mut arrive = |moving: &mut Move, nic: usize| {
        (number..number + FRAMES).for_each(|it| moving.arrive(nic, &unicast(it)));
        number += FRAMES;
    };
    // The switches turn to the new NIC at one moment: what the old one has by then is delivered first if anybody looks.
    moving.graceful();
    for nic in [0, 1] {
        arrive(&mut moving, nic);
        moving.settle();
    }
    assert_eq!(inversions(&moving.heard()), 0);
    // Both at once: then it hangs on chance whose frames come first, but each NIC's stay in order.
    for nic in [0, 1] {
        arrive(&mut moving, nic);
    }
    moving.settle();
    let heard = moving.heard();
    assert_eq!(heard.len(), 2 * FRAMES as usize);
    let (old, new): (Vec<u32>, Vec<u32>) = heard.iter().partition(|it| **it < 3 * FRAMES);
    assert_eq!((inversions(&old), inversions(&new)), (0, 0));
    // Once it does not drain any more, the old one is not heard, so nothing comes later than that.
    arrive(&mut moving, 0);
    arrive(&mut moving, 1);
    moving.offer(None);
    moving.settle();
    let heard = moving.heard();
    assert_eq!(heard, (5 * FRAMES..6 * FRAMES).collect::<Vec<_>>());
    assert_eq!(moving.frontend.lease(1).drops, [("stale-generation".to_owned(), u64::from(FRAMES))].into());
}

#[test]
fn what_others_are_flooded_with_between_two_copies_has_neither_delivered_twice() {
    // The copies count as such for 100 ms: a machine that is too busy has to try again.
    for _ in 0..100 {
        let mut moving = Move::new(0);
        moving.guest.post(QUEUE_SIZE, BUFFER_BYTES);
        let transmit_area = area(16, 8);
        let other = registration(2, 1, 1, Active, transmit_area);
        moving.backends[0].apply(Object::Registration(other));
        moving.frontend.apply(Object::Port(port(2, transmit_area, route(1, 1), None)));
        let mut second = Guest::new(QUEUE_SIZE);
        second.post(QUEUE_SIZE, BUFFER_BYTES);
        moving.frontend.start(2, &second, all_features());
        tell(&mut moving, Told::NewNic);
        moving.settle();
        moving.arrive(0, &broadcast(7));
        let began = Instant::now();
        moving.settle();
        assert_eq!((moving.heard(), second.received(BUFFER_BYTES).len()), (vec![7], 1));
        for number in 0..300 {
            // It does not get what seems to be its own.
            let mut frame = broadcast(100 + number);
            frame[6..12].copy_from_slice(&mac(1).bytes());
            moving.arrive(0, &frame);
            if number % 30 == 29 {
                moving.settle();
                assert_eq!(second.received(BUFFER_BYTES).len(), 30);
            }
        }
        moving.arrive(1, &broadcast(7));
        moving.settle();
        let late = began.elapsed() > Duration::from_millis(90);
        let heard = moving.heard();
        if !late {
            assert!(heard.is_empty(), "it has had that");
            assert_eq!(moving.frontend.lease(1).drops, [("doubled".to_owned(), 1)].into());
            return;
        }
    }
    panic!("this machine never had the time");
}
