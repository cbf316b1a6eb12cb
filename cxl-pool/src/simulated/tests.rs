//! The simulation misbehaves in every way it promises to, and in no other.

use super::*;

const A: HostId = HostId::new(1);
const B: HostId = HostId::new(2);
const SEEDS: u64 = 200;

fn at(line: u64) -> ByteOffset {
    ByteOffset::new(line * 64)
}

/// Runs `scenario` with many seeds and says in how many it was true.
fn count(scenario: impl Fn(&SimulatedPool) -> bool) -> u64 {
    (0..SEEDS).filter(|&seed| scenario(&SimulatedPool::new(seed, 64 * 64))).count() as u64
}

fn sometimes(scenario: impl Fn(&SimulatedPool) -> bool) {
    let times = count(scenario);
    assert!(times > 0 && times < SEEDS, "{times} of {SEEDS}");
}

fn always(scenario: impl Fn(&SimulatedPool) -> bool) {
    check_seeds("-p cxl-pool --lib", SEEDS, |seed| {
        let holds = scenario(&SimulatedPool::new(seed, 64 * 64));
        if holds { Ok(()) } else { Err(format!("not so with seed {seed}")) }
    });
}

fn fresh(memory: &SimulatedMemory, line: u64) -> u64 {
    memory.invalidate(at(line), 64);
    memory.full_fence();
    memory.load(at(line))
}

/// Unrelated accesses, during which anything may happen.
fn pass_time(memory: &SimulatedMemory) {
    for _ in 0..50 {
        memory.load(at(60));
    }
}

#[test]
fn a_host_always_sees_its_own_writes() {
    always(|pool| {
        let a = pool.host(A);
        a.store(at(3), 7);
        pass_time(&a);
        a.load(at(3)) == 7
    });
}

#[test]
fn a_write_without_write_back_is_visible_only_if_evicted() {
    sometimes(|pool| {
        pool.host(A).store(at(3), 7);
        pass_time(&pool.host(B));
        fresh(&pool.host(B), 3) == 7
    });
}

#[test]
fn a_written_back_and_fenced_write_is_visible_to_who_invalidates() {
    always(|pool| {
        let (a, b) = (pool.host(A), pool.host(B));
        b.load(at(3));
        a.store(at(3), 7);
        a.write_back(at(3), 8);
        a.full_fence();
        fresh(&b, 3) == 7
    });
}

#[test]
fn a_store_fence_orders_a_write_back_before_later_stores_only() {
    let scenario = |then_store: bool| {
        move |pool: &SimulatedPool| {
            let (a, b) = (pool.host(A), pool.host(B));
            a.store(at(3), 7);
            a.write_back(at(3), 8);
            a.store_fence();
            if then_store {
                a.store(at(4), 1);
            }
            fresh(&b, 3) == 7
        }
    };
    sometimes(scenario(false));
    always(scenario(true));
}

#[test]
fn write_backs_without_a_fence_are_reordered() {
    sometimes(|pool| {
        let (a, b) = (pool.host(A), pool.host(B));
        for line in [3, 4] {
            a.store(at(line), 7);
            a.write_back(at(line), 8);
        }
        pass_time(&b);
        fresh(&b, 4) == 7 && fresh(&b, 3) == 0
    });
}

#[test]
fn a_cached_line_stays_stale_until_it_is_invalidated() {
    sometimes(|pool| {
        let (a, b) = (pool.host(A), pool.host(B));
        b.load(at(3));
        a.store(at(3), 7);
        a.write_back(at(3), 8);
        a.full_fence();
        b.load(at(3)) == 0
    });
}

#[test]
fn a_stale_line_may_stay_so_for_ever() {
    sometimes(|pool| {
        let (a, b) = (pool.host(A), pool.host(B));
        b.load(at(3));
        a.store(at(3), 7);
        a.write_back(at(3), 8);
        a.full_fence();
        (0..100_000).all(|_| b.load(at(3)) == 0)
    });
}

#[test]
fn a_line_never_touched_may_be_stale_too() {
    sometimes(|pool| {
        let (a, b) = (pool.host(A), pool.host(B));
        b.load(at(2));
        pass_time(&b);
        a.store(at(3), 7);
        a.write_back(at(3), 8);
        a.full_fence();
        b.load(at(3)) == 0
    });
}

#[test]
fn a_load_between_invalidate_and_fence_may_see_the_old_line() {
    sometimes(|pool| {
        let (a, b) = (pool.host(A), pool.host(B));
        b.load(at(3));
        a.store(at(3), 7);
        a.write_back(at(3), 8);
        a.full_fence();
        b.invalidate(at(3), 8);
        b.load(at(3)) == 0
    });
}

#[test]
fn a_crashed_process_leaves_dirty_lines_that_may_appear_later() {
    sometimes(|pool| {
        pool.host(A).store(at(3), 7);
        pool.crash(A);
        pass_time(&pool.host(B));
        fresh(&pool.host(B), 3) == 7
    });
}

#[test]
fn a_restarted_process_sees_what_its_host_cached() {
    always(|pool| {
        pool.host(A).store(at(3), 7);
        pool.crash(A);
        pool.host(A).load(at(3)) == 7
    });
}

#[test]
#[should_panic(expected = "a crashed process of h1 accessed the pool")]
fn a_crashed_process_cannot_go_on() {
    let pool = SimulatedPool::new(1, 4096);
    let memory = pool.host(A);
    pool.crash(A);
    memory.load(at(0));
}

#[test]
fn a_host_without_power_forgets() {
    sometimes(|pool| {
        let a = pool.host(A);
        a.store(at(3), 7);
        pass_time(&a);
        pool.power_off(A);
        pool.host(A).load(at(3)) == 7
    });
}

#[test]
fn a_write_of_several_words_may_be_seen_in_part() {
    sometimes(|pool| {
        let (a, b) = (pool.host(A), pool.host(B));
        a.write(at(3), &[7; 64]);
        let mut seen = [0; 64];
        b.read(at(3), &mut seen);
        seen.contains(&7) && seen.contains(&0)
    });
}

#[test]
fn streamed_bytes_are_there_before_a_store_after_the_fence() {
    let scenario = |fence: bool| {
        move |pool: &SimulatedPool| {
            let (a, b) = (pool.host(A), pool.host(B));
            a.write_streaming(at(3), &[7; 100]);
            if fence {
                a.store_fence();
            }
            a.store(at(9), 1);
            let mut seen = [0; 100];
            b.invalidate(at(3), 100);
            b.full_fence();
            b.read(at(3), &mut seen);
            seen == [7; 100]
        }
    };
    sometimes(scenario(false));
    always(scenario(true));
}

#[test]
fn two_writers_of_one_line_are_noticed() {
    sometimes(|pool| {
        let (a, b) = (pool.host(A), pool.host(B));
        a.store(at(3), 1);
        b.store(at(3).saturating_add(8), 2);
        for memory in [&a, &b] {
            memory.flush(at(3), 64);
            memory.full_fence();
        }
        // Not where the first writer's line was evicted before the second one fetched it.
        pool.faults().lost_updates > 0
    });
}

#[test]
fn invalidating_what_one_wrote_is_noticed() {
    sometimes(|pool| {
        let a = pool.host(A);
        a.store(at(3), 1);
        a.invalidate(at(3), 64);
        a.full_fence();
        pool.faults().dirty_invalidates > 0
    });
}

#[test]
fn handing_a_line_over_by_the_rules_breaks_none() {
    always(|pool| {
        let hosts = [pool.host(A), pool.host(B)];
        for turn in 0..20 {
            let memory = &hosts[turn % 2];
            memory.invalidate(at(3), 64);
            memory.full_fence();
            if memory.load(at(3)) != turn as u64 {
                return false;
            }
            memory.store(at(3), turn as u64 + 1);
            memory.flush(at(3), 64);
            memory.full_fence();
        }
        pool.faults() == Faults::default()
    });
}

#[test]
fn a_device_past_the_caches_sees_what_was_written_back_and_is_seen_after_an_invalidate() {
    always(|pool| {
        let (a, device) = (pool.host(A), pool.device(B));
        a.store(at(3), 7);
        a.flush(at(3), 64);
        a.full_fence();
        let seen = device.load(at(3));
        device.store(at(3), 8);
        (seen, fresh(&a, 3), pool.faults()) == (7, 8, Faults::default())
    });
    sometimes(|pool| {
        let (a, device) = (pool.host(A), pool.device(B));
        a.load(at(3));
        device.store(at(3), 8);
        a.load(at(3)) == 0
    });
    sometimes(|pool| {
        let (a, device) = (pool.host(A), pool.device(B));
        a.store(at(3), 7);
        device.store(at(3), 8);
        pass_time(&a);
        pool.faults().lost_updates > 0
    });
}

#[test]
fn one_seed_replays() {
    let run = |seed| {
        let pool = SimulatedPool::new(seed, 4096);
        let (a, b) = (pool.host(A), pool.host(B));
        let step = |step| {
            a.store(at(step % 8), step);
            b.load(at(step * 7 % 8))
        };
        (0..1000).map(step).collect::<Vec<_>>()
    };
    check_seeds("-p cxl-pool --lib", 20, |seed| {
        assert_eq!(run(seed), run(seed));
        Ok(())
    });
    // Where nothing happens by itself, all are alike.
    let different: std::collections::BTreeSet<_> = (0..20).map(run).collect();
    assert!(different.len() > 5, "{} of 20", different.len());
}
