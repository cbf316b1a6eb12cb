//! What instances are promised where a NIC, or the way to it, is too slow for all: judged by counters, not by the clock.

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, SimulatedPool};
use pod_protocol::objects::{
    NicPolicy, Object, PortObject, RateLimit, RegistrationObject, RegistrationState,
};
use vhost_net_cxl::channel_counters::ChannelBook;

use crate::contention::{GUESTS, Pod, ROOM, from, pod};
use crate::echo::{BUFFER_BYTES, frame};
use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestFrontend, Turn, all_features, channel, mac, open, port, registration, route, settle,
};
use crate::switching::transmit_area;

/// Packets that the second guest offers per turn: more than an even share of what the NIC takes, and not all of it.
const WANTED: usize = 10;
const TURNS: usize = 1000;

/// More than anybody here can use, so that no test depends on how fast this machine is.
fn promise() -> RateLimit {
    RateLimit { minimum_bytes_per_second: Some(1 << 50), ..RateLimit::default() }
}

/// Says anew what a guest may do, as the controller does while it is in use.
fn set(pod: &mut Pod, guest: u32, policy: &NicPolicy) {
    let object = registration(guest, 1, 1, RegistrationState::Active, transmit_area(guest));
    pod.backend.apply(Object::Registration(RegistrationObject { policy: policy.clone(), ..object }));
    let object = port(guest, transmit_area(guest), route(1, 1), None);
    pod.frontend.apply(Object::Port(PortObject { policy: policy.clone(), ..object }));
}

/// Guests 1, 3 and 4 offer all that their queues hold, the second one what it wants. Returns how many packets of each went out.
fn contend(pod: &mut Pod, next: &mut [u32; GUESTS as usize]) -> [usize; GUESTS as usize] {
    let mut sent = [0; GUESTS as usize];
    for _ in 0..TURNS {
        for guest in 1..=GUESTS {
            let place = guest as usize - 1;
            let most = if guest == 2 { WANTED } else { usize::MAX };
            let mut offered = 0;
            while offered < most && pod.guests[place].send(&[0; 12], &from(guest, next[place])) {
                next[place] += 1;
                offered += 1;
            }
        }
        for (guest, _) in pod.turn() {
            sent[guest as usize - 1] += 1;
        }
    }
    sent
}

#[test]
fn a_guest_sends_what_it_is_promised_whoever_floods_and_only_for_as_long() {
    let mut pod = pod();
    let mut next = [0; GUESTS as usize];
    let even = ROOM / GUESTS as usize;
    // What is sent when hangs on when the memory shows it: the simulated one draws that by lot.
    let about_even = even * TURNS * 90 / 100..=even * TURNS * 110 / 100;
    let sent = contend(&mut pod, &mut next);
    assert!(about_even.contains(&sent[1]), "without a promise it has its share: {sent:?}");

    set(&mut pod, 2, &NicPolicy { transmit: promise(), ..NicPolicy::default() });
    let sent = contend(&mut pod, &mut next);
    // All that it offers, but for what its queue still held and what was chosen ahead.
    assert!(sent[1] >= WANTED * TURNS * 98 / 100, "{sent:?}");
    let others = [sent[0], sent[2], sent[3]];
    let rest = (ROOM * TURNS - sent[1]) / 3;
    assert!(others.iter().all(|it| (rest * 95 / 100..=rest * 105 / 100).contains(it)), "{sent:?}");

    set(&mut pod, 2, &NicPolicy::default());
    let sent = contend(&mut pod, &mut next);
    assert!(about_even.contains(&sent[1]), "{sent:?}");
    for guest in 1..=GUESTS {
        assert_eq!(pod.frontend.lease(guest).drops, [].into());
        assert_eq!(pod.backend.lease(guest).drops, [].into(), "who waits loses nothing");
    }
    assert_eq!(pod.pool.faults(), Faults::default());
}

#[test]
fn room_is_kept_from_who_has_had_what_it_is_promised() {
    const SLOTS: u32 = 256;
    // A quarter of the slots but for some to spare, and a quarter of that is kept.
    for (minimum, expected) in [(1 << 50, 56), (1, 42)] {
        let pool = SimulatedPool::new(16, POOL_BYTES);
        let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
        frontend.apply(Object::Channel(channel(1, 1, SLOTS, true)));
        let transmit = RateLimit { minimum_bytes_per_second: Some(minimum), ..RateLimit::default() };
        let policy = NicPolicy { transmit, ..NicPolicy::default() };
        let object = port(1, transmit_area(1), route(1, 1), None);
        frontend.apply(Object::Port(PortObject { policy, ..object }));
        let mut guest = Guest::new(128);
        frontend.start(1, &guest, all_features());
        let there = pool.host(HostId::new(2));
        // It acknowledges nothing.
        let mut end = open(&there, &ChannelBook::default())(&channel(1, 1, SLOTS, false)).expect("a channel");
        while !end.ready() {
            frontend.turn_once();
        }
        assert!(guest.send(&[0; 12], &frame(0, 100)));
        frontend.turn_once();
        (1..64).for_each(|number| assert!(guest.send(&[0; 12], &frame(number, 100))));
        (0..20).for_each(|_| _ = frontend.turn_once());
        assert_eq!(frontend.lease(1).tx_packets, expected, "promised {minimum}");
    }
}

/// Frames from the wire: a flood for the first guest, and between them more for the second one than its share of the channel. Returns what the second guest got
/// of how many.
fn receive(pod: &mut Pod) -> (usize, usize) {
    const FLOOD: usize = 40;
    let (mut got, mut sent) = (0, 0);
    for round in 0..200_u32 {
        for _ in 0..4 {
            // The backend has many turns to each of the frontend: the channel fills up.
            let mut wire = pod.wire.lock().expect("unpoisoned");
            for number in 0..FLOOD {
                let guest = if number % 5 < 2 { 2 } else { 1 };
                let mut frame = frame(round, 100);
                frame[..6].copy_from_slice(&mac(guest).bytes());
                frame[6..12].copy_from_slice(&mac(99).bytes());
                wire.arriving.push_back([&[0; 12][..], &frame].concat());
                sent += usize::from(guest == 2);
            }
            drop(wire);
            pod.backend.turn_once();
        }
        settle(&mut [&mut pod.frontend, &mut pod.backend]);
        for (guest, counted) in [(0, false), (1, true)] {
            let frames = pod.guests[guest].received(BUFFER_BYTES).len();
            got += if counted { frames } else { 0 };
        }
    }
    (got, sent)
}

#[test]
fn a_guest_receives_what_it_is_promised_although_another_is_flooded() {
    let mut pod = pod();
    pod.guests[..2].iter_mut().for_each(|guest| guest.post(128, BUFFER_BYTES));
    let (got, sent) = receive(&mut pod);
    let lost = pod.backend.lease(2).drops;
    assert!(got < sent, "the way is too narrow for all");
    assert_eq!(lost, [("receive-share".to_owned(), (sent - got) as u64)].into());

    set(&mut pod, 2, &NicPolicy { receive: promise(), ..NicPolicy::default() });
    let (got, sent) = receive(&mut pod);
    assert_eq!((got, pod.backend.lease(2).drops), (sent, lost), "none of it is lost any more");
    let drops = pod.backend.lease(1).drops;
    assert!(drops["kept-for-minimum"] > 0, "{drops:?}");

    // A promise that is used up at once is none.
    let little = RateLimit { minimum_bytes_per_second: Some(1), ..RateLimit::default() };
    set(&mut pod, 2, &NicPolicy { receive: little, ..NicPolicy::default() });
    let (got, sent) = receive(&mut pod);
    assert!(got < sent, "{got} of {sent}");

    set(&mut pod, 2, &NicPolicy::default());
    let drops = pod.backend.lease(1).drops;
    let kept = drops["kept-for-minimum"];
    let (got, sent) = receive(&mut pod);
    assert!(got < sent);
    assert_eq!(pod.backend.lease(1).drops["kept-for-minimum"], kept, "nothing is kept for anybody");
    assert_eq!(pod.pool.faults(), Faults::default());
}
