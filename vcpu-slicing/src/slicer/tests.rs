use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;

/// A thread that always wants to run, timers that are late, and places where it cannot sleep. Returns what it ran and
/// the longest time without a look.
fn run(
    duty: Duty,
    windows: u64,
    mut late: impl FnMut() -> u64,
    mut unsafe_place: impl FnMut() -> bool,
) -> (f64, i64) {
    let (mut now, mut slicer) = (Clocks::default(), Slicer::begin(Clocks::default(), duty, Phase::default()));
    let mut lowest = 0;
    while now.wall_ns < windows * duty.window_ns {
        match slicer.look(now, duty) {
            Step::Look(after) => {
                let ran = after + late();
                now = Clocks { wall_ns: now.wall_ns + ran, cpu_ns: now.cpu_ns + ran };
            }
            Step::Sleep(ns) if unsafe_place() => {
                let ran = slicer.refused(ns, duty).0 + late();
                now = Clocks { wall_ns: now.wall_ns + ran, cpu_ns: now.cpu_ns + ran };
            }
            Step::Sleep(ns) => {
                now.wall_ns += ns + late();
                slicer.slept(now, duty);
            }
        }
        lowest = lowest.min(slicer.credit_ns());
    }
    #[expect(clippy::cast_precision_loss, reason = "a part of a whole")]
    let share = now.cpu_ns as f64 / now.wall_ns as f64;
    (share, lowest)
}

#[test]
fn it_runs_and_sleeps_in_windows() {
    let duty = Duty { run_ns: MS / 4, window_ns: MS };
    let mut slicer = Slicer::begin(Clocks::default(), duty, Phase::default());
    let mut now = Clocks::default();
    for _ in 0..10 {
        assert_eq!(slicer.look(now, duty), Step::Look(MS / 4));
        now = Clocks { wall_ns: now.wall_ns + MS / 4, cpu_ns: now.cpu_ns + MS / 4 };
        assert_eq!(slicer.look(now, duty), Step::Sleep(3 * MS / 4));
        now.wall_ns += 3 * MS / 4;
        slicer.slept(now, duty);
    }
}

#[test]
fn threads_take_turns_from_the_beginning_on() {
    for (threads, percent) in [(2, 50), (4, 25), (8, 25), (8, 5), (20, 5), (20, 30), (7, 80)] {
        let duty = Duty { run_ns: MS * percent / 100, window_ns: MS };
        // When each one runs, from the first window on.
        let mut running = BTreeMap::new();
        for number in 0..threads {
            let mut now = Clocks::default();
            let mut slicer = Slicer::begin(now, duty, Phase::of(7, number));
            while now.wall_ns < 2 * MS {
                match slicer.look(now, duty) {
                    Step::Look(after) => {
                        for part in now.wall_ns / 10_000..(now.wall_ns + after) / 10_000 {
                            *running.entry(part).or_insert(0_u64) += 1;
                        }
                        now = Clocks { wall_ns: now.wall_ns + after, cpu_ns: now.cpu_ns + after };
                    }
                    Step::Sleep(ns) => {
                        now.wall_ns += ns;
                        slicer.slept(now, duty);
                    }
                }
            }
        }
        let mean = threads as u64 * percent;
        let most = running.values().max().copied().unwrap_or_default();
        assert!(most * 100 <= mean + 200, "{most} of {threads} at a time, where {percent} % may run");
        let sum: u64 = running.range(..200).map(|(_, number)| number).sum();
        assert!(sum.abs_diff(mean * 2) <= mean / 10 + 10, "all got their part: {sum}, {mean}");
    }
}

#[test]
fn machines_that_are_told_to_begin_at_once_take_turns_too() {
    // One vCPU each; processes that were started one after the other, or with others between them.
    for apart in [1, 2, 3, 17] {
        let mut phases: Vec<u64> =
            (0..32).map(|machine| Phase::of(4000 + machine * apart, 0).of_window(MS)).collect();
        phases.sort_unstable();
        let widest = phases.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(MS);
        assert!(widest < MS / 10, "{apart} apart, nobody begins for {widest} ns of {MS}");
    }
}

#[test]
fn windows_stay_where_they_are_whatever_is_late_and_whatever_part_is_allowed() {
    let mut slicer = Slicer::begin(Clocks::default(), Duty { run_ns: MS / 4, window_ns: MS }, Phase(1 << 30));
    let (mut now, mut number, mut woken) = (Clocks::default(), 0_u64, Vec::new());
    while woken.len() < 1000 {
        number += 1;
        // Another part in each K of ten windows.
        let duty = Duty { run_ns: MS / 20 * (1 + number / 20 % 10), window_ns: MS };
        let late = number * 7919 % 30_000;
        match slicer.look(now, duty) {
            Step::Look(after) => {
                now = Clocks { wall_ns: now.wall_ns + after + late, cpu_ns: now.cpu_ns + after + late };
            }
            Step::Sleep(ns) => {
                now.wall_ns += ns;
                // A quarter of a window was over when it began.
                woken.push((now.wall_ns + MS / 4) % MS);
                now.wall_ns += late;
                slicer.slept(now, duty);
            }
        }
    }
    assert!(woken.iter().all(|place| *place == 0), "{woken:?}");
}

#[test]
fn one_that_begins_in_its_sleep_sleeps_where_it_can() {
    let duty = Duty { run_ns: MS / 4, window_ns: MS };
    let half = Phase(1 << 31);
    let mut slicer = Slicer::begin(Clocks::default(), duty, half);
    assert_eq!(slicer.look(Clocks::default(), duty), Step::Sleep(MS / 2));
    // Not here: what it runs meanwhile it runs less in its next window.
    let (after, _) = slicer.refused(MS / 2, duty);
    let now = Clocks { wall_ns: after, cpu_ns: after };
    assert_eq!(slicer.look(now, duty), Step::Sleep(MS / 2 - after));
    let now = Clocks { wall_ns: MS / 2, cpu_ns: after };
    slicer.slept(now, duty);
    assert_eq!(slicer.look(now, duty), Step::Look(MS / 4 - after));
    // One that blocks until it has earned as much has slept.
    let mut slicer = Slicer::begin(Clocks::default(), duty, half);
    let now = Clocks { wall_ns: MS / 2, cpu_ns: 0 };
    assert!(matches!(slicer.look(now, duty), Step::Look(_)));
}

#[test]
fn what_comes_late_is_carried() {
    // 25 µs late each time, as on a virtual machine.
    for percent in [5, 10, 25, 50, 75, 90, 95] {
        let duty = Duty { run_ns: MS * percent / 100, window_ns: MS };
        let (share, _) = run(duty, 10_000, || 25_000, || false);
        #[expect(clippy::cast_precision_loss, reason = "a percentage")]
        let wanted = percent as f64 / 100.0;
        assert!((share - wanted).abs() < 0.002, "{percent} %: {share}");
    }
}

#[test]
fn one_that_idles_never_sleeps() {
    let duty = Duty { run_ns: MS / 10, window_ns: MS };
    let mut slicer = Slicer::begin(Clocks::default(), duty, Phase::default());
    let (mut now, mut looks) = (Clocks::default(), 0);
    while now.wall_ns < 1000 * MS {
        let Step::Look(after) = slicer.look(now, duty) else { panic!("it ran less than it may") };
        now = Clocks { wall_ns: now.wall_ns + after, cpu_ns: now.cpu_ns + after / 20 };
        looks += 1;
    }
    assert!(looks <= 1100, "{looks} looks in 1000 windows");
}

#[test]
fn one_that_idled_for_long_has_not_saved_it_up() {
    let duty = Duty { run_ns: MS / 10, window_ns: MS };
    let mut slicer = Slicer::begin(Clocks::default(), duty, Phase::default());
    let mut now = Clocks::default();
    for _ in 0..1000 {
        assert!(matches!(slicer.look(now, duty), Step::Look(_)));
        now.wall_ns += MS;
    }
    assert!(slicer.credit_ns() <= 2 * signed(duty.run_ns), "{}", slicer.credit_ns());
    // It bursts until it is put to sleep: within the next window.
    let mut ran = 0;
    while let Step::Look(after) = slicer.look(now, duty) {
        ran += after;
        now = Clocks { wall_ns: now.wall_ns + after, cpu_ns: now.cpu_ns + after };
    }
    assert!(ran <= MS, "{ran}");
}

#[test]
fn one_that_waits_pays_that_way() {
    let duty = Duty { run_ns: MS / 2, window_ns: MS };
    let mut slicer = Slicer::begin(Clocks::default(), duty, Phase::default());
    let mut now = Clocks { wall_ns: MS, cpu_ns: MS };
    let Step::Sleep(owed) = slicer.look(now, duty) else { panic!("it ran too long") };
    assert_eq!(slicer.refused(owed, duty), (RETRY_NS, false));
    now.wall_ns += RETRY_NS;
    let Step::Sleep(owed) = slicer.look(now, duty) else { panic!("it still owes") };
    let (after, missed) = slicer.refused(owed, duty);
    assert!(after > 10 * RETRY_NS && !missed, "it blocks, so it need not be tried: {after}");
    now.wall_ns += 2 * MS;
    assert!(matches!(slicer.look(now, duty), Step::Look(_)));
}

/// As a guest under translation does whose timer ticks as often as windows begin: all that it does between is to wait, where it cannot
/// be put to sleep.
#[test]
fn one_that_runs_in_step_with_its_windows_is_held_to_a_small_share() {
    const WINDOW: u64 = 10 * MS;
    // When in each 10 ms it begins to run, and for how long.
    for (percent, begins, runs) in
        [(5, 5 * MS, 2 * MS), (5, 0, 2 * MS), (2, 3 * MS, MS), (15, 5 * MS, 24 * MS / 10)]
    {
        let duty = Duty { run_ns: WINDOW * percent / 100, window_ns: WINDOW };
        let busy = begins..begins + runs;
        let pass = |mut now: Clocks, ns: u64| {
            let end = now.wall_ns + ns;
            while now.wall_ns < end {
                let place = now.wall_ns % WINDOW;
                let changes = [busy.start, busy.end, WINDOW].into_iter().find(|at| *at > place);
                let step = (changes.unwrap_or(WINDOW) - place).min(end - now.wall_ns);
                now.cpu_ns += if busy.contains(&place) { step } else { 0 };
                now.wall_ns += step;
            }
            now
        };
        let (mut now, mut looks, mut late) = (Clocks::default(), 0_u64, 7_u64);
        let mut slicer = Slicer::begin(now, duty, Phase::default());
        while now.wall_ns < 2000 * WINDOW {
            looks += 1;
            late = late * 48_271 % 0x7FFF_FFFF;
            let late_ns = late % 60_000;
            now = match slicer.look(now, duty) {
                Step::Look(after) => pass(now, after + late_ns),
                Step::Sleep(ns) if !busy.contains(&(now.wall_ns % WINDOW)) => {
                    pass(now, slicer.refused(ns, duty).0 + late_ns)
                }
                Step::Sleep(ns) => {
                    now.wall_ns += ns.min(WINDOW) + late_ns;
                    slicer.slept(now, duty);
                    now
                }
            };
        }
        let allowed = now.wall_ns / 100 * percent;
        assert!(now.cpu_ns <= allowed / 100 * 105, "{} of {allowed} ns at {percent} %", now.cpu_ns);
        assert!(looks <= 2000 * 20, "{looks} looks in 2000 windows");
    }
}

#[test]
fn nowhere_to_sleep_is_given_up_for_a_while() {
    let duty = Duty { run_ns: MS / 2, window_ns: MS };
    let (mut slicer, mut now, mut missed) =
        (Slicer::begin(Clocks::default(), duty, Phase::default()), Clocks::default(), 0);
    for _ in 0..1000 {
        now = match slicer.look(now, duty) {
            Step::Look(after) => Clocks { wall_ns: now.wall_ns + after, cpu_ns: now.cpu_ns + after },
            Step::Sleep(ns) => {
                let (after, last) = slicer.refused(ns, duty);
                missed += u32::from(last);
                Clocks { wall_ns: now.wall_ns + after, cpu_ns: now.cpu_ns + after }
            }
        };
    }
    assert!((5..=10).contains(&missed), "{missed}");
    assert!(slicer.credit_ns() >= -signed(duty.window_ns), "no more than one window is carried");
    assert!(slicer.forgiven_ns() > 5 * MS, "and the rest is told: {}", slicer.forgiven_ns());
}

#[test]
fn strange_orders_and_clocks_do_no_harm() {
    for duty in [
        Duty { run_ns: 0, window_ns: MS },
        Duty { run_ns: 0, window_ns: 0 },
        Duty { run_ns: u64::MAX, window_ns: u64::MAX },
        Duty { run_ns: 5, window_ns: u64::MAX },
        Duty { run_ns: 9, window_ns: 3 },
    ] {
        let mut slicer = Slicer::begin(Clocks { wall_ns: u64::MAX, cpu_ns: 3 }, duty, Phase::default());
        for now in [Clocks::default(), Clocks { wall_ns: u64::MAX, cpu_ns: u64::MAX }, Clocks::default()] {
            let step = slicer.look(now, duty);
            slicer.refused(1, duty);
            assert!(!matches!(step, Step::Look(0)), "{duty:?}");
        }
    }
}

proptest! {
    #[test]
    fn the_long_run_share_is_exact(
        percent in 2_u64..99, window_us in 100_u64..20_000, lates in prop::collection::vec(0_u64..40, 1..50),
        bad in prop::collection::vec(prop::bool::weighted(0.3), 1..50),
    ) {
        let window_ns = window_us * 1000;
        let duty = Duty { run_ns: window_ns * percent / 100, window_ns };
        // Late by at most a fifth of the smaller part of a window: more cannot be made good within one.
        let most = duty.run_ns.min(window_ns - duty.run_ns) / 5;
        let (mut late, mut places) = (lates.iter().cycle(), bad.iter().cycle());
        // Somewhere it can sleep.
        prop_assume!(bad.iter().any(|bad| !bad) && most > 25_000);
        let (share, lowest) = run(
            duty, 2000, || late.next().unwrap() * most / 40, || *places.next().unwrap(),
        );
        #[expect(clippy::cast_precision_loss, reason = "a percentage")]
        let wanted = duty.run_ns as f64 / window_ns as f64;
        prop_assert!((share - wanted).abs() < 0.01, "{share} instead of {wanted}");
        prop_assert!(lowest >= -signed(window_ns));
    }
}
