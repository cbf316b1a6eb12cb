use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cxl_pool::{Area, EndpointId, HostId, LineCount, LineOffset, Role};
use pod_protocol::commands::{Command as Order, Version};
use pod_protocol::ids::RegionId;
use pod_protocol::objects::{NicObject, Object};

use super::Broken;
use super::daemon::Mail;
use super::deeds::Deed;
use super::happening::Grant;
use super::kinds::Kind;
use super::loads::Busy;
use super::physical::{Physical, Seen};
use super::pod::Pod;
use super::random::Random;
use super::size::Size;

const SMALL: Size = Size {
    hosts: 6,
    names: 12,
    grouped: true,
    least_mib: 12,
    seconds: 8,
    slice_us: 500,
    doublings_max: 8,
    memory_fails: false,
    fault_every: 60,
    crash_every: 8,
    orphaned_us: 1_000_000,
    filled: 0,
    wish_every: 20,
    wishes: 1,
    check_every: 4,
    has_lines: true,
    busy: None,
};
/// Where daemons tell what devices do. To be moved for that, volumes have to be used, and not be copied for other reasons all the time.
const BUSY: Size = Size {
    names: 24,
    filled: 24,
    seconds: 12,
    fault_every: 120,
    crash_every: 4,
    wish_every: 100,
    busy: Some(Busy { nics: 6, ssds: 2 }),
    ..SMALL
};
/// Where something goes wrong all the time, and more than one thing is asked for at once.
const LARGE: Size = Size {
    hosts: 200,
    names: 2400,
    grouped: true,
    least_mib: 60,
    seconds: 1,
    slice_us: 2000,
    doublings_max: 8,
    memory_fails: true,
    fault_every: 5,
    // A second is to see several controllers.
    crash_every: 2,
    orphaned_us: 100_000,
    filled: 2400,
    wish_every: 5,
    wishes: 16,
    check_every: 150,
    has_lines: false,
    busy: None,
};

/// Seeds that once found something, for as long as the world follows from them in the same way: a join that was answered
/// when another life of the daemon had appeared.
const FOUND: [u64; 2] = [55, 64];

/// How many instances there were at most in the world of this seed, and what its network did; or what went wrong there.
fn outcome(seed: u64, size: Size, broken: Option<Broken>) -> Result<(usize, Seen), String> {
    let run = || {
        let mut pod = Pod::new(seed, size, broken);
        pod.run()?;
        let world = pod.world();
        let physical = &world.physical;
        let mut met = Seen { moved: world.moves.count, ..physical.seen.clone() };
        if let Some(lines) = &physical.lines {
            (met.given, met.given_on) = (lines.begun, lines.reused);
        }
        Ok((pod.instances_max, met))
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(text.unwrap_or_default().to_owned())
    })
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// What may happen to messages happens.
fn the_network_is_bad(seen: &Seen) {
    assert!(seen.overtook > seen.said / 200, "few messages overtake others by much: {seen:?}");
    assert!(seen.lost > seen.said / 2000, "few messages are lost: {seen:?}");
    assert!(seen.late > 0, "no answer is late: {seen:?}");
}

/// A world without some fault would show nothing about it.
fn every_kind_happened(seen: &Seen) {
    // One seed that is run again need not have all.
    if number("WADI_SIMULATION_SEED").is_none() {
        assert_eq!(seen.faults.missing(&Kind::ALL), [], "these faults never happened: {seen:?}");
    }
}

/// The seed that is to be run again, or so many from the first one on.
fn seeds(first: u64, count: u64) -> Range<u64> {
    match number("WADI_SIMULATION_SEED") {
        Some(seed) => seed..seed + 1,
        None => first..first + count,
    }
}

fn rounds() -> u64 {
    number("WADI_ROUNDS").unwrap_or(1).max(1)
}

/// What is met in the world of this seed, in which nothing may go wrong.
fn survives(seed: u64, size: Size, test: &str) -> (usize, Seen) {
    outcome(seed, size, None).unwrap_or_else(|what| {
        panic!(
            "seed {seed}: {what}\nrun it again: WADI_SIMULATION_SEED={seed} cargo test -p pod-controller --lib \
             simulation::tests::{test} -- --nocapture"
        )
    })
}

#[test]
fn small_pods_survive_whatever_happens() {
    let mut all = Seen::default();
    let size = Size { memory_fails: true, ..SMALL };
    // Those worlds had no groups, and memory that stays.
    let found = FOUND.map(|seed| (seed, Size { grouped: false, ..SMALL }));
    for (seed, size) in seeds(0, 6 * rounds()).map(|seed| (seed, size)).chain(found) {
        all.add(&survives(seed, size, "small").1);
    }
    println!("{all:?}");
    the_network_is_bad(&all);
    every_kind_happened(&all);
    if number("WADI_SIMULATION_SEED").is_none() {
        assert_eq!(all.deeds.missing(&Deed::ALL), [], "these were never granted: {all:?}");
    }
    assert!(all.given_on > all.given / 20, "few regions are given on to another host: {all:?}");
}

#[test]
fn busy_pods_survive_whatever_happens() {
    let mut all = Seen::default();
    for seed in seeds(0, 2 * rounds()) {
        all.add(&survives(seed, BUSY, "busy").1);
    }
    println!("{all:?}");
    // One seed that is run again need not have both.
    if number("WADI_SIMULATION_SEED").is_none() {
        assert!(all.moved.iter().all(|count| *count > 0), "not both leases and volumes move: {all:?}");
    }
}

#[test]
fn large_pods_survive_whatever_happens() {
    let mut all = Seen::default();
    // The first one in which each kind of fault happens.
    for seed in seeds(3, rounds().div_ceil(20)) {
        let (instances, seen) = survives(seed, LARGE, "large");
        println!("{instances} instances, {seen:?}");
        the_network_is_bad(&seen);
        all.add(&seen);
        assert!(instances > 2000, "seed {seed}: there were {instances} instances at most");
    }
    every_kind_happened(&all);
}

/// Whoever counts faults that never were would miss that one is switched off.
#[test]
fn faults_that_do_not_happen_are_not_counted() {
    let quiet = Size { fault_every: u64::MAX, seconds: 2, ..SMALL };
    let (_, seen) = outcome(1, quiet, None).expect("nothing goes wrong");
    assert_eq!(seen.faults.missing(&Kind::ALL), Kind::ALL, "{seen:?}");
}

/// A simulation that finds nothing may be blind: each of these must be seen within a few seeds.
#[test]
fn what_is_broken_on_purpose_is_noticed() {
    // From the seed on that finds it now.
    for (broken, symptom, first) in [
        (Broken::DoesNotWaitForFences, "acts although it is over", 0),
        (Broken::DoesNotWaitForScrubs, "still hold", 0),
        (Broken::GivesDirtyRegionsOn, "came over", 0),
        (Broken::ScrubsNothing, "came over", 0),
        (Broken::ForgetsTheLastCommand, "was promised, and is not there", 0),
        (Broken::DeafToLinks, "which does not work", 0),
        (Broken::DeafToSilence, "which stands still", 0),
        (Broken::DeafToMemory, "which is known to have failed", 0),
        (Broken::KeepsGenerations, "active twice", 0),
        (Broken::MovesTooMuch, "just before", 4),
        (Broken::ForgetsWhatMoved, "just before", 8),
    ] {
        // A daemon that is left alone is heard: what it says and nobody minds shows only then.
        let calm = Size { fault_every: 250, ..SMALL };
        // Two backends have to hear of a lease at about the same time.
        let quick = Size { doublings_max: 0, ..SMALL };
        // Whoever follows has to know before what moved has rested.
        let hurried = Size { crash_every: 2, orphaned_us: 100_000, ..BUSY };
        let size = match broken {
            Broken::MovesTooMuch => BUSY,
            Broken::ForgetsWhatMoved => hurried,
            Broken::DeafToLinks => calm,
            Broken::DeafToMemory => Size { memory_fails: true, ..SMALL },
            Broken::KeepsGenerations => quick,
            _ => SMALL,
        };
        let noticed = (first..first + 120).filter_map(|seed| outcome(seed, size, Some(broken)).err());
        let noticed = noticed.into_iter().find(|what| what.contains(symptom));
        assert!(noticed.is_some(), "{broken:?} is not noticed");
        println!("{broken:?}: {}", noticed.unwrap_or_default());
    }
}

const BACKEND: EndpointId = EndpointId::new(HostId::new(2), Role::NetBackend);

/// Host 2, of which a backend runs.
fn host() -> Physical {
    let mut physical = Physical::new(1, 0);
    physical.add_host(2, false, &mut Random::new(1));
    physical.start(BACKEND);
    physical
}

fn mail(connection: u64, order: Order, regions: Vec<(RegionId, Area)>) -> Mail {
    Mail { connection, ticket: connection, order, regions }
}

#[test]
fn a_daemon_that_obeys_whoever_was_deposed_is_noticed() {
    for anybody in [false, true] {
        let mut physical = host();
        let daemon = physical.daemons.get_mut(&BACKEND).expect("a daemon");
        daemon.obeys_anybody = anybody;
        for (connection, term, index) in [(1, 2, 9), (2, 1, 20)] {
            let daemon = physical.daemons.get_mut(&BACKEND).expect("a daemon");
            assert_eq!(daemon.begin(Grant { connection, term }), term == 2 || anybody);
            let order = Order::Synced { version: Version { term, index } };
            physical.arrives(BACKEND, mail(connection, order, Vec::new()));
        }
        let noticed = physical.violation.is_some_and(|what| what.contains("obeys Version"));
        assert_eq!(noticed, anybody);
    }
}

#[test]
fn a_ring_that_is_cleared_where_somebody_has_something_is_noticed() {
    let mut physical = host();
    let rx_area = Area::new(LineOffset::new(100), LineCount::new(50));
    let object = Object::Nic(NicObject { nic: "nic0".to_owned(), rx_area });
    let daemon = physical.daemons.get_mut(&BACKEND).expect("a daemon");
    assert!(daemon.begin(Grant { connection: 1, term: 1 }));
    let order = Order::Apply { version: Version { term: 1, index: 1 }, object };
    physical.arrives(BACKEND, mail(1, order, vec![(RegionId::new(7), rx_area)]));
    for free in [98, 150] {
        physical.clear(LineOffset::new(free));
        assert_eq!(physical.violation, None, "{free}");
    }
    physical.clear(LineOffset::new(149));
    let noticed = physical.violation.is_some_and(|what| what.contains("a ring is cleared"));
    assert!(noticed);
}
