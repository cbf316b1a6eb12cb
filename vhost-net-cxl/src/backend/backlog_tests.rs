use std::collections::HashMap;
use std::time::Duration;

use pod_protocol::ids::{ChannelId, LeaseGeneration, LeaseId};
use proptest::prelude::*;

use super::*;
use crate::message::{NetMessage, Opcode};
use crate::vnet_header::{HEADER_BYTES_U32, VnetHeader};

fn index(index: u16) -> RegistrationIndex {
    RegistrationIndex::new(index).expect("below the limit")
}

fn packet(of: u16, sequence: u16, frame_bytes: u32) -> Outgoing {
    let message = NetMessage {
        opcode: Opcode::Transmit,
        lease: LeaseId::new(of.into()).expect("small"),
        generation: LeaseGeneration::new(1),
        sequence,
        line: cxl_pool::LineOffset::new(0),
        bytes: frame_bytes + HEADER_BYTES_U32,
        more: false,
    };
    Outgoing {
        message,
        channel: ChannelId::new(1),
        registration: index(of),
        header: VnetHeader::default(),
        vlan: None,
        flooded: false,
        frames_sent: 0,
    }
}

fn promise(bytes_per_second: u64) -> RateLimit {
    RateLimit { minimum_bytes_per_second: Some(bytes_per_second), ..RateLimit::default() }
}

fn priority(priority: u16) -> Priority {
    Priority::new(priority).expect("in range")
}

fn admit(backlog: &mut Backlog, count: u16) {
    for of in 0..count {
        backlog.admit(index(of), (&RateLimit::default(), Priority::DEFAULT), Instant::now());
    }
}

/// Instances that always have packets of these lengths waiting, and a wire that takes `bytes_per_ms`.
struct Contest {
    backlog: Backlog,
    lengths: Vec<u32>,
    offered: Vec<u16>,
    sent: Vec<u16>,
    sent_bytes: Vec<u64>,
    now: Instant,
    start: Instant,
    debt: u64,
}

impl Contest {
    fn new(instances: &[(u32, RateLimit)]) -> Self {
        let mut backlog = Backlog::new();
        let now = Instant::now();
        for (of, (_, promise)) in (0..).zip(instances) {
            backlog.admit(index(of), (promise, Priority::DEFAULT), now);
        }
        let count = instances.len();
        Self {
            backlog,
            lengths: instances.iter().map(|(length, _)| *length).collect(),
            offered: vec![0; count],
            sent: vec![0; count],
            sent_bytes: vec![0; count],
            now,
            start: now,
            debt: 0,
        }
    }

    fn offer(&mut self) {
        for (of, length) in (0_u16..).zip(&self.lengths) {
            let place = usize::from(of);
            while self.offered[place].wrapping_sub(self.sent[place]) < 300 {
                self.backlog.push(packet(of, self.offered[place], *length));
                self.offered[place] = self.offered[place].wrapping_add(1);
            }
        }
    }

    fn run(&mut self, steps: u32, bytes_per_ms: u64) {
        for _ in 0..steps {
            self.now += Duration::from_millis(1);
            while self.debt < bytes_per_ms {
                self.offer();
                self.backlog.choose(|| self.now);
                let next = self.backlog.pop_front().expect("there is always something");
                let place = next.registration.get();
                assert_eq!(next.message.sequence, self.sent[place], "in order");
                self.sent[place] = self.sent[place].wrapping_add(1);
                self.sent_bytes[place] += next.frame_bytes();
                self.debt += next.frame_bytes();
            }
            self.debt -= bytes_per_ms;
        }
    }

    /// Bytes per millisecond of each.
    fn rates(&self) -> Vec<u64> {
        let ms = u64::try_from(self.now.duration_since(self.start).as_millis()).expect("short");
        self.sent_bytes.iter().map(|bytes| bytes / ms).collect()
    }
}

#[test]
fn without_promises_bytes_are_shared_evenly_however_long_packets_are() {
    let lengths = [60, 1514, 9000, 65_000];
    let mut contest = Contest::new(&lengths.map(|length| (length, RateLimit::default())));
    contest.run(400, 400_000);
    for (rate, length) in contest.rates().iter().zip(lengths) {
        assert!((97_000..=103_000).contains(rate), "{rate} B/ms with packets of {length} B");
    }
}

#[test]
fn a_promise_is_kept_and_the_rest_is_shared() {
    // 400 B/us: 200 are promised to the first, and a quarter of the other 200 is its share.
    let mut contest = Contest::new(&[
        (1514, promise(200_000_000)),
        (1514, promise(1)),
        (60, promise(1)),
        (9000, promise(1)),
    ]);
    contest.run(400, 400_000);
    let rates = contest.rates();
    assert!((240_000..=260_000).contains(&rates[0]), "{rates:?}");
    assert!(rates[1..].iter().all(|rate| (45_000..=55_000).contains(rate)), "{rates:?}");
}

#[test]
fn promises_beyond_what_there_is_are_kept_alike() {
    let mut contest = Contest::new(&[
        (1514, promise(400_000_000)),
        (1514, promise(400_000_000)),
        (1514, RateLimit::default()),
    ]);
    contest.run(200, 400_000);
    let rates = contest.rates();
    assert!(rates[..2].iter().all(|rate| (195_000..=205_000).contains(rate)), "{rates:?}");
}

#[test]
fn a_promise_holds_from_when_it_is_made_and_ends_with_it() {
    let mut contest = Contest::new(&[(1514, RateLimit::default()), (1514, RateLimit::default())]);
    contest.run(100, 100_000);
    let before = contest.sent_bytes[1];
    contest.backlog.admit(index(1), (&promise(80_000_000), Priority::DEFAULT), contest.now);
    contest.run(100, 100_000);
    let with = contest.sent_bytes[1] - before;
    assert!(with >= 8_500_000, "{with} of 10 MB with 8 promised");
    contest.backlog.admit(index(1), (&RateLimit::default(), Priority::DEFAULT), contest.now);
    contest.run(100, 100_000);
    let after = contest.sent_bytes[1] - before - with;
    assert!((4_500_000..=5_500_000).contains(&after), "{after}");
}

#[test]
fn what_is_not_promised_is_shared_by_priorities_however_long_packets_are() {
    // 400 B/us: 100 are promised to the second one, of the rest each has by its priority.
    let mut contest = Contest::new(&[
        (60, RateLimit::default()),
        (1514, promise(100_000_000)),
        (65_000, RateLimit::default()),
        (9000, RateLimit::default()),
    ]);
    let priorities = [1000, 100, 300, 100];
    for (of, promise) in (0..).zip([0, 100_000_000, 0, 0]) {
        let promise = RateLimit {
            minimum_bytes_per_second: Some(promise).filter(|it| *it > 0),
            ..RateLimit::default()
        };
        contest.backlog.admit(index(of), (&promise, priority(priorities[usize::from(of)])), contest.now);
    }
    contest.run(400, 400_000);
    let rates = contest.rates();
    for (rate, wanted) in rates.iter().zip([200_000, 120_000, 60_000, 20_000]) {
        assert!((wanted * 95 / 100..=wanted * 105 / 100).contains(rate), "{rates:?}");
    }
    // Another one holds for what waits already.
    let before = contest.sent_bytes[3];
    contest.backlog.admit(index(3), (&RateLimit::default(), Priority::MAX), contest.now);
    contest.run(400, 400_000);
    let rate = (contest.sent_bytes[3] - before) / 400;
    assert!((120_000..=130_000).contains(&rate), "{rate}: 10 of 24 parts of 300");
}

#[test]
fn one_large_packet_at_a_time_is_not_worth_more_than_many_small_ones() {
    let now = Instant::now();
    let mut backlog = Backlog::new();
    admit(&mut backlog, 2);
    let mut sent_bytes = [0, 0];
    for sequence in 0..4000 {
        // The first one never has two packets waiting.
        let large = backlog.queues[0].packets.is_empty()
            && !backlog.chosen.iter().any(|it| it.registration == index(0));
        if large {
            backlog.push(packet(0, sequence, 64_000));
        }
        while backlog.queues[1].packets.len() < 100 {
            backlog.push(packet(1, sequence, 1500));
        }
        backlog.choose(|| now);
        let next = backlog.pop_front().expect("there is always something");
        sent_bytes[next.registration.get()] += next.frame_bytes();
    }
    let [large, small] = sent_bytes;
    assert!(large * 10 <= small * 12, "{large} and {small} B");
}

#[test]
fn a_queue_has_an_end_and_others_have_theirs() {
    let mut backlog = Backlog::new();
    admit(&mut backlog, 5);
    let mut count = 0;
    while backlog.has_room(index(3)) {
        backlog.push(packet(3, count, 100));
        count += 1;
    }
    assert_eq!(usize::from(count), QUEUE_PACKETS_MAX);
    assert!(backlog.has_room(index(4)));
}

proptest! {
    #[test]
    fn nothing_is_lost_doubled_or_overtakes_its_own(
        steps in prop::collection::vec((0..6_u16, 1..200_u16, 60..70_000_u32, 0..100_usize, any::<bool>()), 1..60),
        promised in prop::collection::vec(prop::option::of(1..1_000_000_000_u64), 6),
        priorities in prop::collection::vec(1..=1000_u16, 6),
    ) {
        let now = Instant::now();
        let mut backlog = Backlog::new();
        for (of, promised) in (0..).zip(promised) {
            let promise = RateLimit { minimum_bytes_per_second: promised, ..RateLimit::default() };
            backlog.admit(index(of), (&promise, priority(priorities[usize::from(of)])), now);
        }
        let mut next: HashMap<u16, (u16, u16)> = HashMap::new();
        let mut waiting = 0;
        for (of, count, length, takes, refuses) in steps {
            for _ in 0..count {
                let (offered, _) = next.entry(of).or_default();
                if backlog.has_room(index(of)) {
                    backlog.push(packet(of, *offered, length));
                    *offered += 1;
                    waiting += 1;
                }
            }
            for _ in 0..takes {
                backlog.choose(|| now);
                let Some(packet) = backlog.pop_front() else { break };
                let of = u16::try_from(packet.registration.get()).expect("few");
                let (_, sent) = next.entry(of).or_default();
                prop_assert_eq!(packet.message.sequence, *sent);
                *sent += 1;
                waiting -= 1;
            }
            if refuses {
                // All of one instance, as if it had gone; the others stay as they are.
                let before = backlog.len();
                let mut dismissed = Vec::new();
                backlog.dismiss(index(of), |packet| dismissed.push(packet.message.sequence));
                prop_assert_eq!(dismissed.len(), before - backlog.len());
                backlog.admit(index(of), (&RateLimit::default(), Priority::DEFAULT), now);
                waiting -= before - backlog.len();
                let (offered, sent) = next.entry(of).or_default();
                *sent = *offered;
            }
            prop_assert_eq!(backlog.len(), waiting);
            prop_assert_eq!(backlog.is_empty(), waiting == 0);
        }
        let mut left = 0;
        loop {
            backlog.choose(|| now);
            if backlog.pop_front().is_none() {
                break;
            }
            left += 1;
        }
        prop_assert_eq!(left, waiting);
    }
}

#[test]
fn what_a_packet_comes_to_on_the_wire_is_what_is_shared() {
    let mut backlog = Backlog::new();
    admit(&mut backlog, 2);
    // TCP over IPv4 in a hundred segments of 8 bytes, each with headers of 54.
    let header = VnetHeader::parse([1, 1, 54, 0, 8, 0, 34, 0, 16, 0, 0, 0]);
    for sequence in 0..2000 {
        backlog.push(packet(0, sequence, 1514));
        backlog.push(Outgoing { header, ..packet(1, sequence, 854) });
    }
    let mut on_wire = [0, 0];
    for _ in 0..1000 {
        backlog.choose(Instant::now);
        let next = backlog.pop_front().expect("one that waits");
        on_wire[next.registration.get()] += if next.header.is_large() { 100 * 62 } else { 1514 };
    }
    let [plain, cut] = on_wire;
    assert!(plain * 95 / 100 <= cut && cut <= plain * 105 / 100, "{on_wire:?}");
}
