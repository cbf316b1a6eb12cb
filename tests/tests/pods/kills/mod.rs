//! Whatever process of the network is killed with `kill -9`, or told to stop, at whatever stage of an instance's life: the
//! instance that it happened to goes on, and its neighbour on the same host, which has a NIC of its own, loses nothing.
//!
//! Stages and victims form a table, through which a run goes in an order that its seed decides; the moment within a stage, and
//! whether it is a death or an end in order, are the seed's, too. One round takes one case of each stage; a run draws its seed and says which.
//! After all single deaths come pairs.

mod neighbour;
mod scene;

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
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

type Case = (Stage, Vec<Victim>, End, Duration);

/// The cases in their order: stage by stage. The first round kills each of those on whom the network hangs, at a stage that the seed
/// chooses; in those that follow every victim of each stage comes before one comes twice.
fn case(seed: u64, number: u64) -> Case {
    let stages = Stage::ALL.len() as u64;
    let (place, lap) = (usize::try_from(number % stages).unwrap(), number / stages);
    let stage = Stage::ALL[place];
    let moment = Duration::from_millis(random(seed, 2000 + number, stage.longest_ms()));
    let end = if random(seed, 3000 + number, 3) == 0 { End::InOrder } else { End::Killed };
    let victims = stage.victims();
    let count = victims.len() as u64;
    let drawn = random(seed, number % stages, count);
    let victim = |index: u64| victims[usize::try_from(index % count).unwrap()];
    let Some(later) = lap.checked_sub(1) else {
        return match first_round(seed)[place] {
            Some(victim) => (stage, vec![victim], End::Killed, moment),
            None => (stage, vec![victim(drawn)], end, moment),
        };
    };
    let mut chosen = vec![victim(drawn + later)];
    if later >= count {
        let other = victim(random(seed, 1000 + number, count));
        if other != chosen[0] {
            chosen.push(other);
        }
    }
    (stage, chosen, end, moment)
}

/// Of each stage, who is killed there in the first round, if that is not left to the lot.
fn first_round(seed: u64) -> Vec<Option<Victim>> {
    let mut left: Vec<usize> = (0..Stage::ALL.len()).collect();
    for last in (1..left.len()).rev() {
        let drawn = random(seed, 4000 + last as u64, last as u64 + 1);
        left.swap(last, usize::try_from(drawn).unwrap());
    }
    let mut chosen = vec![None; left.len()];
    for victim in Victim::OF_EVERY_ROUND {
        let at = left.iter().position(|stage| Stage::ALL[*stage].victims().contains(victim)).unwrap();
        chosen[left.remove(at)] = Some(*victim);
    }
    chosen
}

/// One that nobody has chosen, unless somebody has.
fn seed() -> u64 {
    let given = std::env::var(SEED).ok().and_then(|text| text.parse().ok());
    // Short enough to be typed.
    given.unwrap_or_else(|| RandomState::new().build_hasher().finish() % 1_000_000)
}

#[test]
fn whoever_is_killed_at_whatever_stage_the_rest_goes_on() {
    let seed = seed();
    eprintln!(
        "the same again: {SEED}={seed} WADI_ROUNDS={} cargo test -p wadi-tests --test pods kills::",
        rounds()
    );
    let mut scene = Scene::set_up();
    for number in 0..u64::from(rounds()) * Stage::ALL.len() as u64 {
        let (stage, victims, end, moment) = case(seed, number);
        eprintln!("case {number}: {stage:?}, {victims:?} {end:?} after {moment:?} ({SEED}={seed})");
        scene.play(stage, &victims, end, moment);
    }
    scene.end();
}

#[test]
fn one_round_kills_everybody_on_whom_the_network_hangs() {
    let mut seen = BTreeSet::new();
    for seed in 0..200 {
        let cases: Vec<Case> = (0..Stage::ALL.len() as u64).map(|number| case(seed, number)).collect();
        for victim in Victim::OF_EVERY_ROUND {
            let killed = |case: &&Case| case.1 == [*victim] && case.2 == End::Killed;
            let case = cases.iter().find(killed);
            let case = case.unwrap_or_else(|| panic!("seed {seed}: {victim:?} is not killed in {cases:?}"));
            seen.insert(format!("{:?} {victim:?}", case.0));
        }
        assert!(cases.iter().all(|case| case.0.victims().contains(&case.1[0])), "{cases:?}");
    }
    // At every stage, if there are enough rounds.
    let all = Stage::ALL.iter().flat_map(|stage| stage.victims().iter().map(move |victim| (stage, victim)));
    let all = all.filter(|(_, victim)| Victim::OF_EVERY_ROUND.contains(victim));
    assert_eq!(seen, all.map(|(stage, victim)| format!("{stage:?} {victim:?}")).collect());
}

#[test]
fn every_victim_has_its_turn_at_every_stage() {
    for seed in 0..5 {
        let most = Stage::ALL.iter().map(|stage| stage.victims().len()).max().unwrap();
        // Behind the first round.
        let cases = (1 + most) * Stage::ALL.len();
        let cases: Vec<Case> = (0..cases as u64).map(|number| case(seed, number)).collect();
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
