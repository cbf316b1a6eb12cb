//! What makes a board visible, and whole where it grows, is left out, one thing at a time; a reader must see something that is not so.

use std::sync::{Arc, Mutex};

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, Omission, OmittingMemory, Random, SimulatedPool};
use mem_channel::{ElementId, Node, Sums, TenantId};

use super::*;

const WRITER: HostId = HostId::new(1);
const READER: HostId = HostId::new(2);
const AREA: Area = Area::new(LineOffset::new(16), LineCount::new(16));
const STALE_US: f64 = 1e6;

/// So many records that all tell the round, each with its line's number for a tenant.
fn records(count: u32, round: u32) -> Vec<Record> {
    let record = |line| Record {
        element: ElementId(1),
        node: Node::Tenant { tenant: TenantId(line), weight: 1.0 },
        sums: Sums { rate: f64::from(round), ..Sums::default() },
    };
    (0..count).map(record).collect()
}

/// Another host, which looks whenever it likes.
struct Reader {
    board: PeerBoard<OmittingMemory>,
    peers: Peers,
    /// How many records there were to be in each round so far.
    counts: Vec<u32>,
    /// The header that it saw last cannot be of an earlier round.
    round: usize,
    random: Random,
}

impl Reader {
    /// Of a line that was not counted before, and now is, it must not find what was there before.
    fn look(&mut self) {
        let now_us = f64::from(u32::try_from(self.counts.len()).unwrap());
        let before = self.board.records;
        self.board.read(&mut self.peers, now_us);
        let after = self.board.records;
        if before == after {
            return;
        }
        while self.counts.get(self.round).is_some_and(|count| u64::from(*count) != after) {
            self.round += 1;
        }
        for (line, round) in self.found(now_us) {
            let grown = u64::from(line) >= before;
            assert!(
                !grown || round as usize >= self.round,
                "line {line} has what was there in round {round}"
            );
        }
    }

    /// The lines of which something is known, and the rounds that they are of.
    fn found(&self, now_us: f64) -> Vec<(u32, u32)> {
        let found = self.peers.records(now_us).map(|(_, record)| {
            let Node::Tenant { tenant, .. } = record.node else { panic!("nobody published {record:?}") };
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounds are few")]
            let round = record.sums.rate as u32;
            (tenant.0, round)
        });
        found.collect()
    }
}

/// Runs into all of it.
pub(crate) fn run(seed: u64, omission: &Omission) {
    let pool = SimulatedPool::new(seed, 4096);
    let memory = omission.in_memory(pool.host(WRITER));
    let mut ours = Board::open(memory.clone(), AREA);
    let reader = Reader {
        board: PeerBoard::new(omission.in_memory(pool.host(READER)), 1, AREA),
        peers: Peers::new(STALE_US),
        counts: vec![0],
        round: 0,
        random: Random::new(seed),
    };
    let reader = Arc::new(Mutex::new(reader));
    let meanwhile = Arc::clone(&reader);
    memory.interruption().set(move || {
        let mut reader = meanwhile.lock().unwrap();
        if reader.random.one_in(3) {
            reader.look();
        }
    });
    let mut random = Random::new(!seed);
    for round in 1..60 {
        let count = [1, 3, 5, 9][usize::try_from(random.below(4)).unwrap()];
        reader.lock().unwrap().counts.push(count);
        ours.publish(&records(count, round)).unwrap();
        let mut reader = reader.lock().unwrap();
        if random.one_in(2) {
            reader.look();
        }
        if random.one_in(3) {
            memory.full_fence();
            reader.look();
            let expected: Vec<(u32, u32)> = (0..count).map(|line| (line, round)).collect();
            assert_eq!(reader.found(f64::from(round)), expected, "what was published is not seen");
        }
    }
    memory.interruption().clear();
    assert_eq!(pool.faults(), Faults::default());
}
