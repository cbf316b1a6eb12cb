//! Whatever process of the network is killed with `kill -9`, or told to stop, at whatever stage of an instance's life: the
//! instance that it happened to goes on, and its neighbour on the same host, which has a NIC of its own, loses nothing.
//!
//! Stages and victims form a table, through which a run goes in an order that its seed decides; the moment within a stage, and
//! whether it is a death or an end in order, are the seed's, too. One round takes one case of each stage. After all single
//! deaths come pairs.

mod neighbour;
mod scene;

use std::time::Duration;

use scene::{End, Scene, Stage, Victim};
use wadi_tests::stage::rounds;

const SEED: &str = "WADI_KILLS_SEED";

/// A number in `0..bound`, from a seed and what it is for (splitmix64).
fn random(seed: u64, what: u64, bound: u64) -> u64 {
    let mut word =
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(what.wrapping_mul(0xd1b5_4a32_d192_ed03));
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ word >> 31) % bound
}

/// The cases in their order: stage by stage, and every victim of each before one comes twice.
fn case(seed: u64, number: u64) -> (Stage, Vec<Victim>, End, Duration) {
    let stages = Stage::ALL.len() as u64;
    let (stage, lap) = (Stage::ALL[usize::try_from(number % stages).unwrap()], number / stages);
    let victims = stage.victims();
    let count = victims.len() as u64;
    let first = random(seed, number % stages, count) + lap;
    let mut chosen = vec![victims[usize::try_from(first % count).unwrap()]];
    if lap >= count {
        let other = victims[usize::try_from(random(seed, 1000 + number, count)).unwrap()];
        if other != chosen[0] {
            chosen.push(other);
        }
    }
    let moment = Duration::from_millis(random(seed, 2000 + number, stage.longest_ms()));
    let end = if random(seed, 3000 + number, 3) == 0 { End::InOrder } else { End::Killed };
    (stage, chosen, end, moment)
}

#[test]
fn whoever_is_killed_at_whatever_stage_the_rest_goes_on() {
    let seed = std::env::var(SEED).ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let mut scene = Scene::set_up();
    for number in 0..u64::from(rounds()) * Stage::ALL.len() as u64 {
        let (stage, victims, end, moment) = case(seed, number);
        eprintln!("case {number}: {stage:?}, {victims:?} {end:?} after {moment:?} ({SEED}={seed})");
        scene.play(stage, &victims, end, moment);
    }
    scene.end();
}

#[test]
fn every_victim_has_its_turn_at_every_stage() {
    for seed in 0..5 {
        let most = Stage::ALL.iter().map(|stage| stage.victims().len()).max().unwrap();
        let cases: Vec<_> = (0..(most * Stage::ALL.len()) as u64).map(|number| case(seed, number)).collect();
        for stage in Stage::ALL {
            for victim in stage.victims() {
                let found = cases.iter().any(|(at, victims, ..)| at == stage && victims.contains(victim));
                assert!(found, "seed {seed}: nothing happens to {victim:?} at {stage:?}");
            }
        }
        for end in [End::Killed, End::InOrder] {
            assert!(cases.iter().any(|case| case.2 == end), "seed {seed}: nobody is ever {end:?}");
        }
    }
}
