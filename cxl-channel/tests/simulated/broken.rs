//! What channels do for coherence is left out, one thing at a time; then the checks that the right one passes must fail. Where
//! they do not, they are worth nothing.

use std::path::Path;

use cxl_pool::simulated::{Mutilation, Omission, OmittingMemory};

use crate::schedule::{Scenario, run};

const SCENARIO: Scenario = Scenario { messages: 60, sleeps: true, restarts: 4 };

fn check(seed: u64, omission: &Omission) {
    let wrap = |_, memory| omission.in_memory(memory);
    let result = if seed.is_multiple_of(2) {
        run::<OmittingMemory, 2>(seed, SCENARIO, wrap)
    } else {
        run::<OmittingMemory, 8>(seed, SCENARIO, wrap)
    };
    result.unwrap();
}

#[test]
fn every_omission_is_noticed() {
    Mutilation {
        target: "-p cxl-channel --test simulated",
        workspace: &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        source: "cxl-channel/src",
        complete: 400,
        seeds: 20_000,
        excused: &ONLY_FOR_SPEED,
    }
    .prove(check);
}

/// What may be left out at the price of speed only; `docs/channel.md` says why.
const ONLY_FOR_SPEED: [&str; 3] = [
    "receiver.rs found_nothing: self.memory.invalidate(self.line(prefetched), 1)",
    "receiver.rs consumed: self.memory.invalidate(at, Self::SLOT_BYTES)",
    "sender.rs put: self.memory.full_fence()",
];
