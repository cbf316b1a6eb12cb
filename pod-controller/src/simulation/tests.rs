use std::panic::{AssertUnwindSafe, catch_unwind};

use super::Broken;
use super::pod::{Pod, Size};

const SMALL: Size = Size { hosts: 6, names: 12, seconds: 8, fault_every: 60, wish_every: 20, check_every: 4 };

/// Seeds that once found something, for as long as the world follows from them in the same way: a join that was answered
/// when another life of the daemon had appeared.
const FOUND: [u64; 2] = [55, 64];

/// What went wrong in the world of this seed.
fn failure(seed: u64, size: Size, broken: Option<Broken>) -> Option<String> {
    let run = || Pod::new(seed, size, broken).run();
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.err(),
        Err(panic) => Some(
            panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
                .unwrap_or_default(),
        ),
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn small_pods_survive_whatever_happens() {
    let seeds = match number("WADI_SIMULATION_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..6 * number("WADI_ROUNDS").unwrap_or(1).max(1),
    };
    for seed in seeds.chain(FOUND) {
        if let Some(what) = failure(seed, SMALL, None) {
            panic!(
                "seed {seed}: {what}\nrun it again: WADI_SIMULATION_SEED={seed} cargo test -p pod-controller --lib \
                 simulation::tests::small -- --nocapture"
            );
        }
    }
}

/// A simulation that finds nothing may be blind: each of these must be seen within a few seeds.
#[test]
fn what_is_broken_on_purpose_is_noticed() {
    for (broken, symptom) in [
        (Broken::DoesNotWaitForFences, "acts although it is over"),
        (Broken::DoesNotWaitForScrubs, "still hold"),
        (Broken::ForgetsTheLastCommand, "was promised, and is not there"),
        (Broken::DeafToLinks, "which does not work"),
        (Broken::KeepsGenerations, "active twice"),
    ] {
        // A daemon that is left alone is heard: what it says and nobody minds shows only then.
        let calm = Size { fault_every: 250, ..SMALL };
        let size = if broken == Broken::DeafToLinks { calm } else { SMALL };
        let noticed = (0..40).filter_map(|seed| failure(seed, size, Some(broken)));
        let noticed = noticed.into_iter().find(|what| what.contains(symptom));
        assert!(noticed.is_some(), "{broken:?} is not noticed");
        println!("{broken:?}: {}", noticed.unwrap_or_default());
    }
}
