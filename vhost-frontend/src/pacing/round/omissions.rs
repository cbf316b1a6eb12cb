//! What makes a board new is left out, one thing at a time; others must take what somebody else had there for this host's.

use std::path::Path;

use cxl_pool::simulated::{Faults, Mutilation, Omission, SimulatedPool};
use cxl_pool::{HostId, LineCount, LineOffset};

use super::*;

const AREA: Area = Area::new(LineOffset::new(16), LineCount::new(16));
/// What the records of this host say, and those of whoever had the area before.
const OURS: f64 = 1.0;
const THEIRS: f64 = 2.0;

fn records(rate: f64) -> Vec<Record> {
    let record = |line| Record {
        element: NO_ELEMENT,
        node: Node::Tenant { tenant: TenantId(line), weight: 1.0 },
        sums: Sums { rate, ..Sums::default() },
    };
    (0..9).map(record).collect()
}

/// What somebody finds who looks for the first time.
fn found<M: Memory>(memory: &M) -> Vec<f64> {
    let mut peers = Peers::new(1e6);
    PeerBoard::new(memory.clone(), 1, AREA).read(&mut peers, 1.0);
    peers.records(1.0).map(|(_, record)| record.sums.rate).collect()
}

fn run(seed: u64, omission: &Omission) {
    let pool = SimulatedPool::new(seed, 4096);
    let before = pool.host(HostId::new(3));
    assert_eq!(Board::open(before.clone(), AREA).publish(&records(THEIRS)), Ok(()));
    cxl_pool::regions::scrub(&before, AREA);
    let (memory, other) = (omission.in_memory(pool.host(HostId::new(1))), pool.host(HostId::new(2)));
    let looks = other.clone();
    memory.interruption().set(move || {
        let found = found(&looks);
        assert!(
            !found.contains(&OURS) || !found.contains(&THEIRS),
            "what was there before seems to be this host's"
        );
    });
    let mut board = fresh(&memory, AREA);
    assert_eq!(board.publish(&records(OURS)), Ok(()));
    memory.interruption().clear();
    pool.host(HostId::new(1)).full_fence();
    assert_eq!(found(&other), [OURS; 9]);
    assert_eq!(pool.faults(), Faults::default());
}

#[test]
fn every_omission_is_noticed() {
    Mutilation {
        target: "-p vhost-frontend --lib omissions",
        workspace: &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        sources: &["vhost-frontend/src"],
        complete: 300,
        seeds: 2000,
        excused: &[],
        unmet: &[("copy.rs", "the engines copy: their tests leave it out there")],
    }
    .prove(run);
}
