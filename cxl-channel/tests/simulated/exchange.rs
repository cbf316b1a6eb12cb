//! Requests, responses and notifications arrive once, in order and whole, on memory that misbehaves.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use cxl_channel::{
    Exchange, ExchangeError, Incoming, PAYLOAD_BYTES_LIMIT, Receiver, RequestId, RingPlacement, Sender, Wake,
};
use cxl_pool::simulated::{Faults, Random, SimulatedMemory, SimulatedPool};
use cxl_pool::{Generation, HostId, LineOffset, Memory};

use crate::schedule::{RECEIVING, SENDING, check_seeds};

const SLOTS: u32 = 16;
const GENERATION: Generation = Generation::new(1);

fn placements() -> [RingPlacement; 2] {
    let lines = RingPlacement::lines(SLOTS, 8).get();
    [0, lines].map(|start| RingPlacement { start: LineOffset::new(start), slots: SLOTS })
}

fn pool(seed: u64) -> SimulatedPool {
    SimulatedPool::new(seed, RingPlacement::lines(SLOTS, 8).bytes() * 2)
}

fn exchange(pool: &SimulatedPool, host: HostId) -> Exchange<SimulatedMemory> {
    exchange_over(&pool.host(host), host)
}

fn exchange_over<M: Memory + Clone>(memory: &M, host: HostId) -> Exchange<M> {
    let [mut outgoing, mut incoming] = placements();
    if host == RECEIVING {
        (outgoing, incoming) = (incoming, outgoing);
    }
    let sender = Sender::begin(memory.clone(), outgoing, GENERATION);
    Exchange::new(sender, Receiver::open(memory.clone(), incoming, GENERATION))
}

/// One side, and what it has yet to see.
struct Side {
    exchange: Exchange<SimulatedMemory>,
    asleep: bool,
    /// Payloads on their way to this side that begin something: kind and payload.
    expected: VecDeque<(bool, Vec<u8>)>,
    /// What the answers to this side's requests must be.
    answers: BTreeMap<RequestId, Vec<u8>>,
}

fn payload(random: &mut Random) -> Vec<u8> {
    let limit = if random.one_in(20) { 5000 } else { 150 };
    (0..random.below(limit)).map(|_| random.bits().to_le_bytes()[0]).collect()
}

/// What a peer answers.
fn answer(request: &[u8]) -> Vec<u8> {
    request.iter().rev().map(|byte| byte ^ 0x55).collect()
}

fn pair(sides: &mut [Side; 2], active: usize) -> (&mut Side, &mut Side) {
    let [a, b] = sides;
    if active == 0 { (a, b) } else { (b, a) }
}

/// What a side does in its turn.
fn turn(sides: &mut [Side; 2], active: usize, random: &mut Random, more: &mut u64, now: Instant) {
    let (side, peer) = pair(sides, active);
    if side.asleep {
        return;
    }
    if *more > 0 && random.one_in(3) {
        *more -= 1;
        let payload = payload(random);
        if random.one_in(2) {
            side.exchange.notify(&payload).unwrap();
            peer.expected.push_back((false, payload));
        } else {
            let id = side.exchange.request(&payload, now + Duration::from_mins(1)).unwrap();
            side.answers.insert(id, answer(&payload));
            peer.expected.push_back((true, payload));
        }
    }
    while let Some(incoming) = side.exchange.poll(now) {
        match incoming {
            Incoming::Request { id, payload } => {
                side.exchange.respond(id, &answer(&payload)).unwrap();
                assert_eq!(Some((true, payload)), side.expected.pop_front());
            }
            Incoming::Notification { payload } => {
                assert_eq!(Some((false, payload)), side.expected.pop_front());
            }
            Incoming::Response { id, payload } => assert_eq!(Some(payload), side.answers.remove(&id)),
            Incoming::Expired { id } => panic!("{id:?} expired though no time passed"),
        }
    }
    if side.exchange.flush() == Wake::Needed && peer.asleep {
        peer.asleep = false;
        peer.exchange.wake();
    }
    if side.exchange.ready() && random.one_in(3) {
        side.asleep = side.exchange.announce_sleep();
    }
}

fn run(seed: u64) {
    let mut random = Random::new(!seed);
    let pool = pool(seed);
    let now = Instant::now();
    let mut sides = [SENDING, RECEIVING].map(|host| Side {
        exchange: exchange(&pool, host),
        asleep: false,
        expected: VecDeque::new(),
        answers: BTreeMap::new(),
    });
    let mut more = 60;
    let mut turns = 0;
    while more > 0 || sides.iter().any(|side| !side.expected.is_empty() || !side.answers.is_empty()) {
        // New work is a reason to be awake.
        if more > 0 && random.one_in(4) {
            let side = &mut sides[usize::try_from(random.below(2)).unwrap()];
            side.asleep = false;
            side.exchange.wake();
        }
        let active = usize::try_from(random.below(2)).unwrap();
        turn(&mut sides, active, &mut random, &mut more, now);
        turns += 1;
        assert!(turns < 100_000, "stuck: asleep {:?}", sides.each_ref().map(|side| side.asleep));
    }
    for side in &sides {
        assert_eq!(side.exchange.counters(), cxl_channel::Counters::default());
    }
    assert_eq!(pool.faults(), Faults::default());
}

#[test]
fn everything_arrives_once_in_order_and_whole() {
    check_seeds(4_000, |seed| {
        run(seed);
        Ok(())
    });
}

#[test]
fn the_longest_payload_arrives_and_a_longer_one_is_refused() {
    let pool = pool(7);
    let (mut a, mut b) = (exchange(&pool, SENDING), exchange(&pool, RECEIVING));
    let longest: Vec<u8> = (0..PAYLOAD_BYTES_LIMIT).map(|byte| byte.to_le_bytes()[0]).collect();
    let too_long = vec![0; PAYLOAD_BYTES_LIMIT + 1];
    assert_eq!(a.notify(&too_long), Err(ExchangeError::TooLong { bytes: too_long.len() }));
    a.notify(&longest).unwrap();
    a.notify(&[]).unwrap();
    let mut received = Vec::new();
    let mut turns = 0;
    while received.len() < 2 {
        a.ready();
        b.ready();
        let _ = a.flush();
        received.extend(b.poll(Instant::now()));
        let _ = b.flush();
        turns += 1;
        assert!(turns < 1_000_000, "stuck");
    }
    assert!(received[0] == Incoming::Notification { payload: longest });
    assert_eq!(received[1], Incoming::Notification { payload: Vec::new() });
}

/// Who waits for room, asleep, looks once when rung for, and must find it then.
pub(crate) fn rings_for_room<M: Memory + Clone>(
    seed: u64,
    wrap: impl Fn(SimulatedMemory) -> M,
) -> Result<(), String> {
    let pool = pool(seed);
    let now = Instant::now();
    let [mut a, mut b] = [SENDING, RECEIVING].map(|host| exchange_over(&wrap(pool.host(host)), host));
    while !(a.ready() & b.ready()) {}
    for _ in 0..=SLOTS {
        a.notify(b"one more than fits").unwrap();
    }
    let mut received = 0;
    while b.flush() != Wake::Needed || received < SLOTS / 2 {
        let _ = a.flush();
        received += u32::from(b.poll(now).is_some());
    }
    let _ = a.flush();
    if a.has_queued() { Err("rung for, but there was no room".to_owned()) } else { Ok(()) }
}

#[test]
fn there_is_room_once_a_doorbell_is_rung_for_it() {
    check_seeds(2_000, |seed| rings_for_room(seed, |memory| memory));
}

#[test]
fn a_request_expires_and_its_late_response_is_dropped() {
    let pool = pool(3);
    let (mut a, mut b) = (exchange(&pool, SENDING), exchange(&pool, RECEIVING));
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let id = a.request(b"question", at(10)).unwrap();
    assert_eq!(a.next_deadline(), Some(at(10)));
    let request = loop {
        a.ready();
        b.ready();
        let _ = a.flush();
        if let Some(Incoming::Request { id, .. }) = b.poll(start) {
            break id;
        }
    };
    assert_eq!(a.poll(at(9)), None);
    assert_eq!(a.poll(at(10)), Some(Incoming::Expired { id }));
    assert_eq!(a.next_deadline(), None);
    b.respond(request, b"answer").unwrap();
    b.notify(b"after it").unwrap();
    let after = loop {
        let _ = b.flush();
        if let Some(incoming) = a.poll(at(11)) {
            break incoming;
        }
    };
    assert_eq!(after, Incoming::Notification { payload: b"after it".to_vec() });
    assert_eq!((a.counters().unexpected_responses, a.counters().expired), (1, 1));
}

#[test]
fn a_peer_that_takes_nothing_costs_limited_memory() {
    let pool = pool(3);
    let mut a = exchange(&pool, SENDING);
    let payload = vec![0; PAYLOAD_BYTES_LIMIT];
    let taken = std::iter::repeat_with(|| a.notify(&payload)).take_while(Result::is_ok).count();
    assert!((1..100).contains(&taken));
    let mut a = exchange(&pool, SENDING);
    let taken = std::iter::repeat_with(|| a.notify(&[])).take_while(Result::is_ok).count();
    assert!(taken < 1_000_000);
}

#[test]
fn garbage_from_the_peer_is_dropped_and_counted() {
    check_seeds(50, |seed| {
        let pool = pool(seed);
        let mut random = Random::new(seed);
        let [mut b, mut a] = [
            Sender::<_, 8>::begin(pool.host(RECEIVING), placements()[1], GENERATION),
            Sender::<_, 8>::begin(pool.host(SENDING), placements()[0], GENERATION),
        ];
        assert!(!a.ready());
        let receiver = Receiver::open(pool.host(SENDING), placements()[1], GENERATION);
        let mut exchange = Exchange::new(a, receiver);
        exchange.ready();
        for _ in 0..2000 {
            let mut words: [u64; 8] = std::array::from_fn(|_| random.bits());
            if random.one_in(2) {
                // Make what decides look right more often.
                words[7] &= 0x0003_03ff;
            }
            let _ = b.send(words);
            let _ = b.publish();
            while let Some(incoming) = exchange.poll(Instant::now()) {
                assert!(!matches!(incoming, Incoming::Response { .. } | Incoming::Expired { .. }));
            }
        }
        assert!(exchange.counters().malformed > 0);
        Ok(())
    });
}

/// An exchange, and the peer's end of its incoming ring without an exchange on top.
fn with_raw_peer() -> (Sender<SimulatedMemory, 8>, Exchange<SimulatedMemory>) {
    let pool = pool(5);
    let [outgoing, incoming] = placements();
    let peer = Sender::<_, 8>::begin(pool.host(RECEIVING), incoming, GENERATION);
    let sender = Sender::<_, 8>::begin(pool.host(SENDING), outgoing, GENERATION);
    let mut exchange = Exchange::new(sender, Receiver::open(pool.host(SENDING), incoming, GENERATION));
    exchange.ready();
    (peer, exchange)
}

/// What a part carries.
const FRAGMENT_BYTES: u64 = 56;

/// A part of a notification, full of this byte.
fn part(byte: u8, first: bool, last: bool) -> [u64; 8] {
    let mut words = [u64::from_le_bytes([byte; 8]); 8];
    words[7] = FRAGMENT_BYTES | u64::from(first) << 6 | u64::from(last) << 7 | 3 << 8;
    words
}

/// Everything that arrives while the peer sends these slots.
fn heard(
    peer: &mut Sender<SimulatedMemory, 8>,
    exchange: &mut Exchange<SimulatedMemory>,
    slots: impl Iterator<Item = [u64; 8]>,
) -> Vec<Incoming> {
    let mut heard = Vec::new();
    let mut slots = slots.peekable();
    for _ in 0..10_000_000 {
        while slots.peek().is_some_and(|words| peer.send(*words).is_ok()) {
            slots.next();
        }
        let _ = peer.publish();
        while let Some(incoming) = exchange.poll(Instant::now()) {
            heard.push(incoming);
        }
        if slots.peek().is_none() && peer.free_for(SLOTS / 2 + 1) > SLOTS / 2 && exchange.announce_sleep() {
            return heard;
        }
    }
    panic!("stuck");
}

#[test]
fn a_message_of_which_a_part_makes_no_sense_does_not_arrive() {
    let (mut peer, mut exchange) = with_raw_peer();
    let mut senseless = part(2, false, false);
    senseless[7] &= !(3 << 8);
    let slots = [part(1, true, false), senseless, part(3, false, true), part(4, true, true)];
    let heard = heard(&mut peer, &mut exchange, slots.into_iter());
    assert_eq!(heard, [Incoming::Notification { payload: vec![4; 56] }]);
    assert_eq!(exchange.counters().malformed, 2);
}

#[test]
fn a_message_that_does_not_end_is_dropped_and_the_next_one_arrives() {
    let (mut peer, mut exchange) = with_raw_peer();
    let fragments = PAYLOAD_BYTES_LIMIT / 56 + 1;
    let endless = (0..fragments).map(|number| part(1, number == 0, false));
    let rest = [part(1, false, true), part(4, true, true)];
    let heard = heard(&mut peer, &mut exchange, endless.chain(rest));
    assert_eq!(heard, [Incoming::Notification { payload: vec![4; 56] }]);
    assert_eq!(exchange.counters().malformed, 2);
}

#[test]
fn an_answered_request_does_not_expire() {
    let pool = pool(3);
    let (mut a, mut b) = (exchange(&pool, SENDING), exchange(&pool, RECEIVING));
    let start = Instant::now();
    let id = a.request(b"question", start + Duration::from_secs(10)).unwrap();
    let response = loop {
        a.ready();
        b.ready();
        let _ = a.flush();
        if let Some(Incoming::Request { id, payload }) = b.poll(start) {
            b.respond(id, &payload).unwrap();
        }
        let _ = b.flush();
        if let Some(response) = a.poll(start) {
            break response;
        }
    };
    assert_eq!(response, Incoming::Response { id, payload: b"question".to_vec() });
    assert_eq!(a.next_deadline(), None);
    assert_eq!(a.poll(start + Duration::from_secs(11)), None);
}

#[test]
fn what_was_sent_makes_room_for_more() {
    let pool = pool(3);
    let (mut a, mut b) = (exchange(&pool, SENDING), exchange(&pool, RECEIVING));
    // More than may wait at once, by far.
    let payload = vec![7; PAYLOAD_BYTES_LIMIT / 8];
    for _ in 0..17 {
        a.notify(&payload).unwrap();
        let mut received = None;
        for _ in 0..1_000_000 {
            a.ready();
            b.ready();
            let _ = a.flush();
            received = b.poll(Instant::now());
            let _ = b.flush();
            if received.is_some() {
                break;
            }
        }
        assert!(received == Some(Incoming::Notification { payload: payload.clone() }));
    }
}

#[test]
fn requests_that_nobody_answers_cost_limited_memory() {
    let pool = pool(3);
    let (mut a, mut b) = (exchange(&pool, SENDING), exchange(&pool, RECEIVING));
    let now = Instant::now();
    let deadline = now + Duration::from_secs(10);
    let mut asked = 0;
    let refused = (0..1_000_000).find_map(|_| {
        a.ready();
        b.ready();
        let _ = a.flush();
        // It takes them all.
        while b.poll(now).is_some() {}
        let _ = b.flush();
        let asking = a.request(b"", deadline);
        asked += u32::from(asking.is_ok());
        asking.err()
    });
    assert_eq!(refused, Some(ExchangeError::Backlog));
    // Once they have expired there is room again.
    let expired = std::iter::from_fn(|| a.poll(deadline)).count();
    assert_eq!(u32::try_from(expired), Ok(asked));
    assert!(a.request(b"", deadline).is_ok());
}
