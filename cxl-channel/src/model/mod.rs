//! Every run of small rings, with the very code that runs in production, on memory that does whatever it may; and proof
//! that these runs notice what is missing.

mod fingerprint;
mod memory;
mod mutation;
mod search;
mod shared;
mod step;

use std::panic::{self, AssertUnwindSafe};

use self::memory::mutate;
use self::mutation::{Mutation, Site};
use self::search::{Explored, Scenario, explore};
use crate::ReceivePolicy;

const PLAIN: Scenario = Scenario {
    name: "three laps",
    slots: 8,
    policy: ReceivePolicy::Adaptive,
    messages: 26,
    messages_later: 0,
    doorbell: true,
    batch: 1,
    wide: false,
    lazy: false,
    sleeps: 0,
    sender_deaths: 0,
    receiver_deaths: 0,
};

/// The smallest ring that there is: 16 B messages share one line.
const SMALLEST: Scenario =
    Scenario { name: "three laps of the smallest ring", slots: 4, messages: 14, ..PLAIN };
/// More than one lap, so that the ring is full at times.
const LAP: Scenario = Scenario { name: "a full ring", messages: 10, ..PLAIN };
const SLEEP: Scenario = Scenario { name: "sleep", messages: 3, sleeps: 2, ..PLAIN };
const DEATHS: Scenario = Scenario {
    name: "deaths",
    messages: 2,
    messages_later: 2,
    sender_deaths: 1,
    receiver_deaths: 1,
    ..PLAIN
};
/// The slots that a new sender empties look like new messages to a receiver in this lap.
const DEATH: Scenario = Scenario {
    name: "a sender's death in the second lap",
    messages: 10,
    messages_later: 2,
    sender_deaths: 1,
    ..PLAIN
};
/// It looks again where others go to sleep, and is never rung for.
const POLLING: Scenario =
    Scenario { name: "no doorbell", doorbell: false, messages: 6, sleeps: 2, ..SMALLEST };
const LAZY: Scenario = Scenario { name: "late publishing", messages: 5, lazy: true, ..PLAIN };
const BATCHES: Scenario = Scenario { name: "batches", messages: 9, batch: 5, ..PLAIN };
const WIDE: Scenario = Scenario { name: "batches of wide lines", wide: true, ..BATCHES };
/// Enough for a receiver of coherent memory to look ahead, and to be behind by more than that.
const AHEAD: Scenario = Scenario { name: "looking ahead", messages: 8, batch: 4, ..PLAIN };

fn must_hold<const COHERENT: bool, const WORDS: usize>(scenario: Scenario) {
    let coherent = if COHERENT { "coherent" } else { "not coherent" };
    match explore::<COHERENT, WORDS>(scenario) {
        Ok(Explored { states, steps }) => {
            println!("{}, {} B, {coherent}: {states} states, {steps} steps", scenario.name, WORDS * 8);
        }
        Err(failure) => panic!("{}, {} B, {coherent}: {failure}", scenario.name, WORDS * 8),
    }
}

#[test]
fn three_laps_of_16_bytes() {
    must_hold::<false, 2>(PLAIN);
    must_hold::<true, 2>(PLAIN);
}

#[test]
fn three_laps_of_64_bytes() {
    must_hold::<false, 8>(PLAIN);
    must_hold::<true, 8>(PLAIN);
}

#[test]
fn three_laps_of_the_smallest_ring() {
    must_hold::<false, 2>(SMALLEST);
    must_hold::<true, 2>(SMALLEST);
    must_hold::<false, 8>(SMALLEST);
    must_hold::<true, 8>(SMALLEST);
}

#[test]
fn three_laps_of_the_smallest_ring_in_batches_and_with_late_publishing() {
    for wide in [false, true] {
        let batches = Scenario { batch: 5, wide, ..SMALLEST };
        must_hold::<false, 2>(batches);
        must_hold::<true, 2>(batches);
    }
    must_hold::<false, 2>(Scenario { lazy: true, ..SMALLEST });
}

#[test]
fn three_laps_of_the_smallest_ring_with_sleep() {
    must_hold::<false, 2>(Scenario { sleeps: 1, ..SMALLEST });
    must_hold::<false, 8>(Scenario { sleeps: 1, ..SMALLEST });
}

/// The next generation goes on for more than a lap, too.
#[test]
fn either_side_dies_at_any_moment_of_three_laps() {
    let laps = Scenario { name: "three laps with a death, and more after it", messages_later: 6, ..SMALLEST };
    for scenario in [Scenario { sender_deaths: 1, ..laps }, Scenario { receiver_deaths: 1, ..laps }] {
        must_hold::<false, 2>(scenario);
        must_hold::<true, 2>(scenario);
        must_hold::<true, 8>(scenario);
        must_hold::<false, 8>(Scenario { messages: 6, messages_later: 5, ..scenario });
    }
}

#[test]
fn both_sides_die_at_any_moment_of_three_generations() {
    let laps =
        Scenario { name: "a lap and more in each generation", messages: 6, messages_later: 6, ..SMALLEST };
    must_hold::<false, 2>(Scenario { sender_deaths: 1, receiver_deaths: 1, ..laps });
    must_hold::<false, 2>(Scenario { sender_deaths: 2, ..laps });
    must_hold::<false, 2>(Scenario { receiver_deaths: 2, ..laps });
    must_hold::<true, 2>(Scenario { sender_deaths: 2, receiver_deaths: 1, ..laps });
}

#[test]
fn either_side_dies_while_the_other_sleeps_or_handles_batches() {
    for (sender_deaths, receiver_deaths) in [(1, 0), (0, 1)] {
        let deaths = Scenario { sender_deaths, receiver_deaths, messages: 6, messages_later: 5, ..SMALLEST };
        must_hold::<false, 2>(Scenario { name: "sleep and a death", sleeps: 1, ..deaths });
        must_hold::<true, 2>(Scenario { name: "sleep and a death", sleeps: 1, ..deaths });
        for wide in [false, true] {
            must_hold::<false, 2>(Scenario { name: "batches and a death", batch: 5, wide, ..deaths });
            must_hold::<true, 2>(Scenario { name: "batches and a death", batch: 5, wide, ..deaths });
        }
    }
}

#[test]
fn every_policy() {
    for policy in [
        ReceivePolicy::Bypass,
        ReceivePolicy::NaivePrefetch,
        ReceivePolicy::InvalidateConsumed,
        ReceivePolicy::InvalidatePrefetched,
    ] {
        must_hold::<false, 2>(Scenario { name: "a full ring, another policy", policy, ..LAP });
        must_hold::<false, 2>(Scenario { policy, ..SMALLEST });
        must_hold::<false, 2>(Scenario { name: "sleep, another policy", policy, ..SLEEP });
    }
}

#[test]
fn a_receiver_that_sleeps_is_woken() {
    must_hold::<false, 2>(SLEEP);
    must_hold::<false, 8>(SLEEP);
    must_hold::<true, 2>(SLEEP);
    must_hold::<true, 8>(SLEEP);
}

#[test]
fn a_receiver_without_a_doorbell_need_not_be_woken() {
    must_hold::<false, 2>(POLLING);
    must_hold::<false, 8>(Scenario { messages: 4, ..POLLING });
    must_hold::<true, 2>(POLLING);
    must_hold::<false, 2>(Scenario { sender_deaths: 1, messages_later: 3, ..POLLING });
}

#[test]
fn either_side_dies_at_any_moment() {
    must_hold::<false, 2>(Scenario { messages: 4, messages_later: 4, ..DEATHS });
    must_hold::<false, 8>(DEATHS);
    must_hold::<false, 2>(DEATH);
    must_hold::<true, 2>(DEATH);
    must_hold::<true, 2>(Scenario { messages: 4, messages_later: 4, ..DEATHS });
    must_hold::<true, 8>(DEATHS);
}

#[test]
fn a_sender_that_publishes_late() {
    must_hold::<false, 2>(LAZY);
    must_hold::<false, 8>(LAZY);
    must_hold::<true, 2>(LAZY);
}

#[test]
fn batches_of_whole_and_broken_lines() {
    must_hold::<false, 2>(BATCHES);
    must_hold::<true, 2>(BATCHES);
    must_hold::<false, 8>(Scenario { messages: 4, batch: 2, ..BATCHES });
}

#[test]
fn batches_of_lines_that_are_stored_and_loaded_at_once() {
    must_hold::<false, 2>(WIDE);
    must_hold::<true, 2>(WIDE);
    must_hold::<false, 8>(Scenario { messages: 4, batch: 2, ..WIDE });
}

#[test]
fn a_receiver_that_looks_ahead() {
    must_hold::<true, 2>(Scenario { messages: 14, batch: 4, ..AHEAD });
    must_hold::<true, 8>(AHEAD);
}

/// Runs the scenarios until one fails, and says which.
fn noticed() -> Option<&'static str> {
    type Run = (Scenario, &'static str, fn(Scenario) -> Result<Explored, String>);
    let runs: [Run; 15] = [
        (SLEEP, "sleep", explore::<false, 2>),
        (SLEEP, "sleep, coherent", explore::<true, 2>),
        (DEATHS, "deaths", explore::<false, 2>),
        (DEATHS, "deaths, 64 B", explore::<false, 8>),
        (DEATH, "a sender's death in the second lap", explore::<false, 2>),
        (LAZY, "late publishing", explore::<false, 2>),
        (LAP, "a full ring", explore::<false, 2>),
        (Scenario { messages: 5, ..BATCHES }, "batches", explore::<false, 2>),
        (Scenario { messages: 12, batch: 4, ..BATCHES }, "batches of whole lines", explore::<false, 2>),
        (Scenario { messages: 5, ..WIDE }, "batches of wide lines", explore::<false, 2>),
        (Scenario { policy: ReceivePolicy::Bypass, ..LAP }, "a full ring, bypass", explore::<false, 2>),
        (
            Scenario { policy: ReceivePolicy::InvalidatePrefetched, ..LAP },
            "a full ring, all that was prefetched invalidated",
            explore::<false, 2>,
        ),
        (LAP, "a full ring, coherent", explore::<true, 2>),
        (POLLING, "no doorbell", explore::<false, 2>),
        (
            Scenario { policy: ReceivePolicy::InvalidatePrefetched, messages: 6, ..SMALLEST },
            "a full ring of more lines, all that was prefetched invalidated",
            explore::<false, 8>,
        ),
    ];
    runs.into_iter().find_map(|(scenario, name, run)| {
        let result = panic::catch_unwind(AssertUnwindSafe(|| run(scenario)));
        (!matches!(result, Ok(Ok(_)))).then_some(name)
    })
}

#[test]
fn every_mutation_is_noticed_that_is_no_matter_of_speed() {
    mutate(None);
    assert_eq!(noticed(), None);
    let sites = mutate(None);
    let is_met = |site: &Site| sites.iter().any(|met| site.is(met));
    let unmet: Vec<String> = Site::in_source().iter().filter(|site| !is_met(site)).map(Site::name).collect();
    assert_eq!(unmet, NOT_MET, "sites are found by running into them");
    let mut unnoticed = Vec::new();
    for site in sites {
        let name = site.name();
        mutate(Some(Mutation { site }));
        match noticed() {
            Some(scenario) => println!("| `{name}` | {scenario} |"),
            None => unnoticed.push(name),
        }
    }
    mutate(None);
    assert_eq!(unnoticed, ONLY_FOR_SPEED);
}

/// What no run comes to: how the receiver asks for lines to be written back, on coherent memory, which it does after laps by the
/// thousand, for speed; and what an exchange waits for before it rings, which `broken::every_omission_is_noticed` leaves out.
const NOT_MET: [&str; 2] = [
    "Receiver::ask_for_the_way: store(at, header::tagged(self.generation, through_memory.into()))",
    "Receiver::settle: full_fence()",
];

/// What may be left out at the price of speed only; `docs/channel.md` says why.
const ONLY_FOR_SPEED: [&str; 7] = [
    "Receiver::ready: store(at, header::tagged(self.generation, 1))",
    "Receiver::found_nothing: invalidate(self.line(prefetched), 1)",
    "Receiver::found_nothing: invalidate(self.line(line - 1), 1)",
    "Receiver::found_nothing: invalidate(self.line(prefetched), 1) (2)",
    "Receiver::consumed: invalidate(at, Self::SLOT_BYTES)",
    "Receiver::consumed: invalidate(self.line(self.received / Self::SLOTS_PER_LINE - 2), 1)",
    "Sender::free_for: full_fence()",
];
