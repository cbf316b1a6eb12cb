use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cxl_pool::simulated::{check_seeds, seeds};

use super::Broken;
use super::group::{Group, Size, Summary};

const TARGET: &str = "-p pod-controller --lib replication::simulation";
const THREE: Size = Size {
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
};
/// Of those that are broken nothing is expected in the end.
const BROKEN: Size = Size { calm_ms: 2000, ..THREE };
const RESTLESS: Size = Size { restless: true, fault_every_ms: 30, rough_ms: 20_000, ..BROKEN };
pub(super) const FIVE: Size = Size { replicas: 5, ..THREE };
/// Two hosts of a pod, and one machine outside of it.
const WITH_ONE_OUTSIDE: Size = Size { outside: 1, ..THREE };
const WITH_TWO_OUTSIDE: Size = Size { outside: 2, ..FIVE };

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
fn promises_are_kept(seeds: u64, size: Size) {
    let (runs, worth_it) = (Cell::new(0), Cell::new(0));
    check_seeds(TARGET, seeds, |seed| {
        let summary = run(seed, size, None)?;
        println!("seed {seed}: {summary:?}");
        runs.set(runs.get() + 1);
        worth_it.set(worth_it.get() + u64::from(is_worth_it(&summary)));
        Ok(())
    });
    let (runs, worth_it) = (runs.get(), worth_it.get());
    assert!(2 * worth_it >= runs, "little happens but in {worth_it} of {runs} runs");
}

#[test]
fn three_replicas_keep_their_promises_whatever_happens() {
    promises_are_kept(4, THREE);
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
        (Broken::TakesAnyBase, "and should be Void", 13),
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
