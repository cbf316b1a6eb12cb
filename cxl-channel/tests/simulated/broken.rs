//! What channels do for coherence is left out, one thing at a time; then the checks that the right one passes must fail. Where
//! they do not, they are worth nothing.

use std::path::Path;

use cxl_channel::{RingPlacement, Sender};
use cxl_pool::simulated::{Mutilation, Omission, OmittingMemory, SimulatedPool};
use cxl_pool::{Generation, HostId, LineOffset, Memory};

use crate::exchange;
use crate::schedule::{Scenario, run};

/// So few schedules show whether it is right to ring for room.
const ROOM_EVERY: u64 = 16;

fn check(seed: u64, omission: &Omission) {
    let wrap = |_, memory| omission.in_memory(memory);
    // To fall asleep mends what else would be noticed, and the other way round.
    let scenario = Scenario { messages: 60, sleeps: seed & 2 == 0, restarts: 4, large: false };
    let result = if seed.is_multiple_of(2) {
        run::<OmittingMemory, 2>(seed, scenario, wrap)
    } else {
        run::<OmittingMemory, 8>(seed, scenario, wrap)
    };
    result.unwrap();
    if seed.is_multiple_of(ROOM_EVERY) {
        exchange::rings_for_room(seed, |memory| omission.in_memory(memory)).unwrap();
    }
    generations_of_others_are_seen(seed, omission);
}

/// Whoever begins a ring counts on from the generation before, which another host may have begun.
fn generations_of_others_are_seen(seed: u64, omission: &Omission) {
    let ring = RingPlacement { start: LineOffset::new(0), slots: 8 };
    let pool = SimulatedPool::new(seed, 4096);
    let (here, other) = (omission.in_memory(pool.host(HostId::new(1))), pool.host(HostId::new(2)));
    for generation in 1..4 {
        Sender::<_, 2>::begin(other.clone(), ring, Generation::new(generation));
        other.full_fence();
        assert_eq!(ring.generation(&here).get(), generation);
    }
}

#[test]
fn every_omission_is_noticed() {
    Mutilation {
        target: "-p cxl-channel --test simulated",
        workspace: &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        sources: &["cxl-channel/src"],
        complete: 400,
        seeds: 4_000,
        excused: &EXCUSED,
        unmet: &[],
    }
    .prove(check);
}

/// Six of these may be left out at the price of speed only; `docs/channel.md` says why. The others cost nothing here but
/// time, since what is under way arrives at last, or show only where the other side comes in the middle of a call: the search
/// through every run (`cxl-channel/src/model/`) notices them.
const EXCUSED: [&str; 15] = [
    "receiver.rs ready: self.memory.full_fence() (2)",
    "receiver.rs announce_sleep: self.memory.full_fence()",
    "receiver.rs announce_sleep: self.memory.invalidate(at, Self::SLOT_BYTES)",
    "receiver.rs announce_sleep: self.memory.full_fence() (2)",
    "receiver.rs found_nothing: self.memory.invalidate(self.line(prefetched), 1)",
    "receiver.rs found_nothing: self.memory.invalidate(self.line(line - 1), 1)",
    "receiver.rs found_nothing: self.memory.invalidate(self.line(prefetched), 1) (2)",
    "receiver.rs consumed: self.memory.invalidate(at, Self::SLOT_BYTES)",
    "receiver.rs consumed: self.memory.invalidate(self.line(self.received / Self::SLOTS_PER_LINE - 2), 1)",
    "sender.rs begin: memory.write_back(said, 8)",
    "sender.rs begin: memory.full_fence() (2)",
    "sender.rs begin: memory.full_fence() (3)",
    "sender.rs begin: memory.full_fence() (4)",
    "sender.rs free_for: self.memory.full_fence()",
    "sender.rs publish: self.memory.full_fence()",
];
