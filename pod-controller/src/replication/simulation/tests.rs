use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use cxl_pool::simulated::{check_seeds, seeds};

use super::super::log::Sizes;
use super::Broken;
use super::group::{Group, Size, Summary};
use super::large::{HUGE, LARGE};
use crate::simulation::loads::Busy;

const TARGET: &str = "-p pod-controller --lib replication::simulation";
pub(super) const THREE: Size = Size {
    replicas: 3,
    outside: 0,
    hosts: 4,
    names: 8,
    rough_ms: 12_000,
    fault_every_ms: 200,
    pod_fault_every_ms: 60,
    wish_every_ms: 20,
    calm_ms: 150_000,
    restless: false,
    pool_mib: 600,
    filled: 0,
    asking_max: 12,
    gathered_max: 8,
    compare_every_ms: 0,
    check_every_ms: 500,
    busy: None,
    // Snapshots are made and written often, and in many pieces.
    sizes: Sizes { part_bytes: 16 << 10, purged: 12, log_least: 24 },
    chunk_bytes: 4 << 10,
};
/// Of those that are broken nothing is expected in the end.
const BROKEN: Size = Size { calm_ms: 2000, ..THREE };
const RESTLESS: Size = Size { restless: true, fault_every_ms: 30, rough_ms: 20_000, ..BROKEN };
pub(super) const FIVE: Size = Size { replicas: 5, ..THREE };
/// Two hosts of a pod, and one machine outside of it.
pub(super) const WITH_ONE_OUTSIDE: Size = Size { outside: 1, ..THREE };
const WITH_TWO_OUTSIDE: Size = Size { outside: 2, ..FIVE };
/// Daemons tell what devices do. To be moved for that, leases and volumes have to be there, and not be changed for other reasons all the
/// time.
const BUSY: Size = Size {
    hosts: 6,
    names: 16,
    filled: 16,
    pool_mib: 1600,
    wish_every_ms: 200,
    pod_fault_every_ms: 100,
    busy: Some(Busy { nics: 5, ssds: 2 }),
    ..THREE
};

fn run(seed: u64, size: Size, broken: Option<Broken>) -> Result<Summary, String> {
    let mut group = Group::new(seed, size, broken);
    let outcome = catch_unwind(AssertUnwindSafe(|| group.run()));
    let outcome = outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(text.unwrap_or_default().to_owned())
    });
    if outcome.is_err() && broken.is_none() {
        let last = group.trace.len().saturating_sub(60);
        group.trace[last..].iter().for_each(|line| println!("{line}"));
    }
    outcome
}

/// Whether what may happen happens.
fn is_worth_it(summary: &Summary) -> bool {
    let pod = summary.instances_max > 0 && summary.obeyed.0 > 20 && summary.obeyed.1 > 1;
    let replicas = summary.promised >= 10 && summary.leaders > 1;
    pod && replicas && summary.seen.lost > 0 && summary.seen.overtook > 0
}

/// Of many seeds there are some with which little happens: half of them have to be worth it.
fn promises_are_kept(seeds: u64, size: Size) -> [u64; 2] {
    let (runs, worth_it, moved) = (Cell::new(0), Cell::new(0), Cell::new([0; 2]));
    check_seeds(TARGET, seeds, |seed| {
        let summary = run(seed, size, None)?;
        println!("seed {seed}: {summary:?}");
        runs.set(runs.get() + 1);
        worth_it.set(worth_it.get() + u64::from(is_worth_it(&summary)));
        moved.set(std::array::from_fn(|kind| moved.get()[kind] + summary.moved[kind]));
        Ok(())
    });
    let (runs, worth_it) = (runs.get(), worth_it.get());
    assert!(2 * worth_it >= runs, "little happens but in {worth_it} of {runs} runs");
    moved.get()
}

#[test]
fn three_replicas_keep_their_promises_whatever_happens() {
    promises_are_kept(4, THREE);
}

/// Whoever leads knows what those before it moved.
#[test]
fn replicas_of_busy_pods_keep_their_promises_whatever_happens() {
    let moved = promises_are_kept(4, BUSY);
    // One seed that is run again need not have both.
    if std::env::var_os("WADI_SEED").is_none() {
        assert!(moved.iter().all(|count| *count > 0), "not both leases and volumes move: {moved:?}");
    }
}

#[test]
fn five_replicas_keep_their_promises_whatever_happens() {
    promises_are_kept(1, FIVE);
}

/// No log of replicas in the pod may be lost while only one of them has what is committed; each may, and the last one goes on.
#[test]
fn replicas_outside_of_the_pod_help_others_to_lead_and_never_do_themselves() {
    promises_are_kept(4, WITH_ONE_OUTSIDE);
    promises_are_kept(1, WITH_TWO_OUTSIDE);
}

/// The seed that is to be tried again, or so many.
fn large_pods_keep_their_promises(test: &str, count: u64, size: Size) {
    let all = seeds(1);
    let count = if std::env::var_os("WADI_SEED").is_some() { 1 } else { count };
    let mut leaders = 0;
    for seed in all.start..all.start + count {
        let began = Instant::now();
        let summary = run(seed, size, None).unwrap_or_else(|what| {
            panic!(
                "{what}\nto see it again: WADI_SEED={seed} cargo test {TARGET}::tests::{test} -- --nocapture"
            )
        });
        println!("seed {seed}: {summary:?}, {:.1} s", began.elapsed().as_secs_f64());
        let filled = usize::try_from(size.filled).expect("few");
        assert!(summary.instances_max >= filled * 10 / 11, "seed {seed}: few instances: {summary:?}");
        assert!(summary.compared >= 10, "seed {seed}: little is compared: {summary:?}");
        leaders += summary.leaders;
    }
    assert!(count == 0 || leaders as u64 > count, "nobody takes over from anybody");
}

#[test]
fn replicas_of_large_pods_keep_their_promises() {
    let test = "replicas_of_large_pods_keep_their_promises";
    large_pods_keep_their_promises(test, seeds(1).count().div_ceil(20) as u64, LARGE);
}

/// It takes minutes, and is left out where there is one round.
#[test]
fn replicas_of_huge_pods_keep_their_promises() {
    let test = "replicas_of_huge_pods_keep_their_promises";
    large_pods_keep_their_promises(test, seeds(1).count() as u64 / 20, HUGE);
}

/// What is compared there of what was changed is enough to notice it.
#[test]
fn what_is_broken_on_purpose_is_noticed_in_large_pods() {
    let size = Size { filled: 100, calm_ms: 2000, ..LARGE };
    for (broken, symptom, first) in [
        (Broken::ShowsTooEarly, "that is not committed", 0),
        (Broken::TellsTooEarly, "tells daemons of state", 0),
        (Broken::SwapsCommands, "differs from others", 0),
        (Broken::ForgetsWhatItKept, "is lost", 0),
    ] {
        let noticed = (first..first + 20).find_map(|seed| {
            let what = run(seed, size, Some(broken)).err()?;
            println!("{broken:?} with seed {seed}: {what}");
            what.contains(symptom).then_some(())
        });
        assert!(noticed.is_some(), "{broken:?} is not noticed");
    }
}

#[test]
fn the_same_seed_gives_the_same_world() {
    let (seed, size) = (seeds(1).start, Size { rough_ms: 5000, ..THREE });
    let trace = || {
        let mut group = Group::new(seed, size, None);
        let mut summary = group.run().expect("it goes well");
        summary.seen.overtook = 0;
        (group.trace, summary)
    };
    let (first, second) = (trace(), trace());
    let differs = first.0.iter().zip(&second.0).find(|(one, other)| one != other);
    assert_eq!(differs, None, "it goes on otherwise");
    assert_eq!(first, second);
}

/// A simulation that finds nothing may be blind: each of these must be seen within a few seeds.
#[test]
fn what_is_broken_on_purpose_is_noticed() {
    let mut seen = BTreeMap::new();
    // From the seed on that finds it now: few worlds have a change that is void.
    for (broken, symptom, first) in [
        (Broken::ForgetsWhatItKept, "is lost", 0),
        (Broken::ForgetsItsVote, "lead in term", 0),
        (Broken::TakesAnyBase, "and should be Void", 28),
        (Broken::AnswersWhatIsVoid, "that is not committed", 8),
        (Broken::ShowsTooEarly, "that is not committed", 0),
        (Broken::TellsTooEarly, "tells daemons of state", 0),
    ] {
        let noticed = (first..first + 40).find_map(|seed| {
            let size = if broken == Broken::ForgetsItsVote { RESTLESS } else { BROKEN };
            let what = run(seed, size, Some(broken)).err()?;
            println!("{broken:?} with seed {seed}: {what}");
            what.contains(symptom).then(|| format!("seed {seed}: {what}"))
        });
        println!("{broken:?}: {noticed:?}");
        seen.insert(format!("{broken:?}"), noticed);
    }
    let unseen: Vec<_> = seen.iter().filter(|(_, what)| what.is_none()).map(|(name, _)| name).collect();
    assert!(unseen.is_empty(), "not noticed: {unseen:?}");
}
