//! Every message arrives once, in order and unaltered, whatever non-coherent memory does in between.

use cxl_channel::{Full, ReceivePolicy, Receiver, RingPlacement, Sender};
use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
use cxl_pool::{Generation, LineOffset};

use crate::schedule::{RECEIVING, SENDING, Scenario, check_seeds, run};

/// Checks a scenario in as many schedules: all kinds together make two millions.
fn check<const WORDS: usize>(schedules: u64, scenario: Scenario) {
    check_seeds(schedules, |seed| run::<SimulatedMemory, WORDS>(seed, scenario, |_, memory| memory));
}

/// A few laps of most rings.
const PLAIN: Scenario = Scenario { messages: 60, sleeps: false, restarts: 0, large: false };

#[test]
fn messages_of_16_bytes_arrive_once_in_order_and_unaltered() {
    check::<2>(400_000, PLAIN);
}

#[test]
fn messages_of_64_bytes_arrive_once_in_order_and_unaltered() {
    check::<8>(400_000, PLAIN);
}

#[test]
fn many_laps_of_16_and_64_bytes() {
    check::<2>(300, Scenario { messages: 2_000, sleeps: true, ..PLAIN });
    check::<8>(300, Scenario { messages: 2_000, sleeps: true, ..PLAIN });
}

/// The sizes that engines use, whose halves are acknowledged and of which more lies ahead than is fetched ahead.
#[test]
fn three_laps_of_large_rings() {
    let large = Scenario { large: true, ..PLAIN };
    check::<2>(150, large);
    check::<8>(150, Scenario { sleeps: true, ..large });
    check::<2>(50, Scenario { sleeps: true, restarts: 2, ..large });
}

#[test]
fn a_receiver_that_sleeps_is_woken_for_the_next_message() {
    check::<2>(300_000, Scenario { sleeps: true, ..PLAIN });
    check::<8>(300_000, Scenario { sleeps: true, ..PLAIN });
}

#[test]
fn nothing_of_an_older_generation_surfaces_after_a_restart_of_either_side() {
    check::<2>(300_000, Scenario { messages: 30, sleeps: true, restarts: 2, ..PLAIN });
    check::<8>(300_000, Scenario { messages: 30, sleeps: true, restarts: 2, ..PLAIN });
}

fn pair(pool: &SimulatedPool, slots: u32) -> (Sender<SimulatedMemory, 2>, Receiver<SimulatedMemory, 2>) {
    let placement = RingPlacement { start: LineOffset::new(1), slots };
    let generation = Generation::new(3);
    let sender = Sender::begin(pool.host(SENDING), placement, generation);
    let receiver = Receiver::open(pool.host(RECEIVING), placement, generation);
    (sender, receiver)
}

#[test]
fn nothing_can_be_sent_before_the_receiver_accepted() {
    let pool = SimulatedPool::new(1, 4096);
    let (mut sender, mut receiver) = pair(&pool, 16);
    assert!(!sender.ready());
    assert_eq!(sender.send([1, 2]), Err(Full));
    assert!(receiver.ready());
    assert!(sender.ready());
    assert_eq!(sender.send([1, 2]), Ok(()));
}

#[test]
fn a_full_ring_refuses_and_takes_again_once_half_of_it_is_consumed() {
    check_seeds(100, |seed| {
        let pool = SimulatedPool::new(seed, 4096);
        let (mut sender, mut receiver) = pair(&pool, 16);
        assert!(receiver.ready());
        for number in 0..16 {
            assert_eq!(sender.send([number, 0]), Ok(()));
        }
        assert_eq!(sender.free(), 0);
        assert_eq!(sender.send([16, 0]), Err(Full), "seed {seed}");
        let _ = sender.publish();
        for number in 0..8 {
            assert_eq!(sender.send([16, 0]), Err(Full), "seed {seed}: {number} consumed");
            let message = std::iter::repeat_with(|| receiver.receive()).take(100_000).flatten().next();
            assert_eq!(message, Some([number, 0]), "seed {seed}");
        }
        // What the receiver acknowledged is visible at the latest with its next fence.
        assert_eq!(receiver.lag(), 0);
        receiver.announce_sleep();
        assert_eq!(sender.free(), 8, "seed {seed}");
        Ok(())
    });
}

#[test]
fn a_receiver_that_announced_its_sleep_is_rung_for_once() {
    let pool = SimulatedPool::new(4, 4096);
    let (mut sender, mut receiver) = pair(&pool, 16);
    assert!(receiver.ready() && sender.ready());
    assert!(receiver.announce_sleep());
    sender.send([1, 0]).unwrap();
    assert_eq!(sender.publish(), cxl_channel::Wake::Needed);
    sender.send([2, 0]).unwrap();
    assert_eq!(sender.publish(), cxl_channel::Wake::NotNeeded, "it was told already");
    assert!(!receiver.announce_sleep(), "there is something to receive");
}

#[test]
fn a_receiver_without_a_doorbell_is_not_looked_after() {
    let pool = SimulatedPool::new(4, 4096);
    let (mut sender, receiver) = pair(&pool, 16);
    let mut receiver = receiver.without_doorbell();
    assert!(receiver.ready() && sender.ready());
    assert!(receiver.announce_sleep(), "there is nothing");
    sender.send([1, 0]).unwrap();
    assert_eq!(sender.publish(), cxl_channel::Wake::NotNeeded);
    // What was written back arrives at some time.
    let mut looks = 0..10_000;
    assert!(looks.any(|_| !receiver.announce_sleep()), "there is something to receive");
    assert_eq!(receiver.receive(), Some([1, 0]));
}

#[test]
fn every_policy_invalidates_a_dirty_line_never() {
    for policy in [ReceivePolicy::Bypass, ReceivePolicy::NaivePrefetch, ReceivePolicy::Adaptive] {
        let pool = SimulatedPool::new(9, 4096);
        let (mut sender, receiver) = pair(&pool, 16);
        let mut receiver = receiver.with_policy(policy);
        assert!(receiver.ready());
        for number in 0..1000 {
            let _ = sender.send([number, 0]);
            let _ = sender.publish();
            receiver.receive();
        }
        assert_eq!(pool.faults(), cxl_pool::simulated::Faults::default());
    }
}

#[test]
#[should_panic(expected = "the caller did not check the placement")]
fn a_placement_that_cannot_be_panics() {
    let pool = SimulatedPool::new(1, 4096);
    pair(&pool, 1 << 20);
}
