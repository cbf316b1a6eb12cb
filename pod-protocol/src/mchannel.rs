//! How hosts tell each other what their mchannels use of the fabric, in lines of the pool that are not coherent.
//!
//! Each host has a board, an area of lines that it alone writes: a header that says how many records follow, then one record per
//! line. A reader never waits. What it finds torn or old leaves what it knew before in place ([`Peers`]).

use cxl_pool::{Area, LINE_BYTES, LineCount, LineOffset, Memory};
use mem_channel::{Peers, RECORD_WORDS, Record, encode};
use thiserror::Error;

/// More records than the board has lines for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{records} records do not fit a board of {lines} lines: give the host a larger board")]
pub struct BoardFull {
    /// How many there were.
    pub records: usize,
    /// How many lines the board has, the header included.
    pub lines: u64,
}

/// This host's board. Only one process of a host may have it.
pub struct Board<M> {
    memory: M,
    area: Area,
    sequence: u32,
    published: Option<u64>,
}

impl<M: Memory> Board<M> {
    /// Takes over the host's board where an earlier process left it, or an area of zeros.
    pub fn open(memory: M, area: Area) -> Self {
        // What an earlier process of this host wrote is in this host's cache or in the pool; a sequence number is part of one
        // word, so that it is whole even in a line that is not.
        let sequence = lines(area).skip(1).fold(None, |newest: Option<u32>, line| {
            let found = sequence(&memory.load_words(line.bytes()));
            match newest {
                Some(newest) if found.wrapping_sub(newest) >= 1 << 31 => Some(newest),
                _ => Some(found),
            }
        });
        Self { memory, area, sequence: sequence.unwrap_or(0), published: None }
    }

    /// Publishes what [`Host::sample`](mem_channel::Host::sample) returned. Call it every K, also if nothing changed: who
    /// stops is taken for gone. Of more than the board has lines for, the first are published.
    pub fn publish(&mut self, records: &[Record]) -> Result<(), BoardFull> {
        let room = self.area.lines.get().saturating_sub(1);
        let count = room.min(records.len() as u64);
        let full = BoardFull { records: records.len(), lines: self.area.lines.get() };
        if self.area.lines.get() == 0 {
            return Err(full);
        }
        self.sequence = self.sequence.wrapping_add(1);
        for (line, record) in lines(self.area).skip(1).zip(records) {
            self.memory.store_words(line.bytes(), encode(record, self.sequence));
        }
        let first = self.area.start.saturating_add(LineCount::new(1));
        self.memory.write_back(first.bytes(), count * LINE_BYTES as u64);
        self.memory.store_fence();
        if self.published != Some(count) {
            let header = self.area.start.bytes();
            self.memory.store_words(header, [count, !count]);
            self.memory.write_back(header, LINE_BYTES as u64);
            self.memory.store_fence();
            self.published = Some(count);
        }
        if count == records.len() as u64 { Ok(()) } else { Err(full) }
    }
}

/// Another host's board.
pub struct PeerBoard<M> {
    memory: M,
    host: u16,
    area: Area,
    records: u64,
}

impl<M: Memory> PeerBoard<M> {
    /// The board of this host. Nothing is read yet.
    pub fn new(memory: M, host: u16, area: Area) -> Self {
        Self { memory, host, area, records: 0 }
    }

    /// Reads the board, at a time of the caller's clock in µs; returns how many records were news.
    pub fn read(&mut self, peers: &mut Peers, now_us: f64) -> usize {
        let known = (self.records + 1) * LINE_BYTES as u64;
        self.memory.invalidate(self.area.start.bytes(), known);
        self.memory.full_fence();
        let [count, complement] = self.memory.load_words::<2>(self.area.start.bytes());
        if complement == !count && count < self.area.lines.get() {
            if count > self.records {
                // The new ones may have been brought in before they were written.
                self.memory.invalidate(self.area.start.bytes(), (count + 1) * LINE_BYTES as u64);
                self.memory.full_fence();
            }
            self.records = count;
            // What was in the lines behind has moved up, or is no more.
            peers.truncate(self.host, usize::try_from(count).unwrap_or(usize::MAX));
        }
        let mut news = 0;
        let records = usize::try_from(self.records).unwrap_or(usize::MAX);
        for (number, line) in (0..).zip(lines(self.area).skip(1).take(records)) {
            let words = self.memory.load_words(line.bytes());
            news += usize::from(peers.take(self.host, number, &words, now_us));
        }
        news
    }
}

fn lines(area: Area) -> impl Iterator<Item = LineOffset> {
    (0..area.lines.get()).map(move |line| area.start.saturating_add(LineCount::new(line)))
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half of the last word")]
fn sequence(words: &[u64; RECORD_WORDS]) -> u32 {
    words[RECORD_WORDS - 1] as u32
}

#[cfg(test)]
pub(crate) mod omissions;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use cxl_pool::HostId;
    use cxl_pool::simulated::{Random, SimulatedMemory, SimulatedPool, check_seeds, seeds};
    use mem_channel::{ElementId, Node, Sums, TenantId};

    use super::*;

    const STALE_US: f64 = 1e6;

    fn board(host: u64) -> Area {
        Area::new(LineOffset::new(16 * host), LineCount::new(16))
    }

    /// Records whose numbers all follow from the round, so that a mixture shows.
    fn records(count: u64, round: u32) -> Vec<Record> {
        (0..count)
            .map(|number| {
                let rate = f64::from(round);
                let tenant = TenantId(u32::try_from(number).unwrap());
                Record {
                    element: ElementId(1),
                    node: Node::Tenant { tenant, weight: 1.0 },
                    sums: Sums { rate, demand: rate + 1.0, max_demand: rate + 2.0, alpha: rate, weight: 1.0 },
                }
            })
            .collect()
    }

    fn rates(peers: &Peers, now_us: f64) -> Vec<f64> {
        peers
            .records(now_us)
            .map(|(_, record)| {
                let Sums { rate, demand, max_demand, alpha, .. } = record.sums;
                assert!(
                    (demand - rate - 1.0).abs() + (max_demand - rate - 2.0).abs() + (alpha - rate).abs()
                        < 1e-9
                );
                rate
            })
            .collect()
    }

    #[test]
    fn readers_see_whole_records_in_order_and_at_last_the_newest() {
        let (kept, missed) = (Cell::new(0), Cell::new(0));
        let count = 60;
        check_seeds("-p pod-protocol --lib", count, |seed| {
            let pool = SimulatedPool::new(seed, 4096);
            let (writer, reader) = (HostId::new(1), HostId::new(2));
            let mut random = Random::new(seed);
            let mut ours = Board::open(pool.host(writer), board(1));
            let mut theirs = PeerBoard::new(pool.host(reader), 1, board(1));
            let mut peers = Peers::new(STALE_US);
            let mut before = Vec::new();
            for round in 1..60 {
                ours.publish(&records(5, round)).unwrap();
                if random.one_in(9) {
                    // Killed at any moment; the next one goes on with the same cache.
                    pool.crash(writer);
                    ours = Board::open(pool.host(writer), board(1));
                    theirs = PeerBoard::new(pool.host(reader), 1, board(1));
                }
                let now_us = f64::from(round);
                if theirs.read(&mut peers, now_us) == 5 {
                    kept.set(kept.get() + 1);
                } else {
                    missed.set(missed.get() + 1);
                }
                let after = rates(&peers, now_us);
                assert!(before.iter().zip(&after).all(|(before, after)| before <= after), "seed {seed}");
                before = after;
            }
            ours.publish(&records(5, 60)).unwrap();
            pool.host(writer).full_fence();
            theirs.read(&mut peers, 60.0);
            assert_eq!(rates(&peers, 60.0), [60.0; 5], "seed {seed}");
            assert_eq!(pool.faults().lost_updates, 0, "seed {seed}: a line with two writers");
            Ok(())
        });
        let (kept, missed) = (kept.get(), missed.get());
        // One seed alone need not.
        let both = kept > 0 && missed > 0 || seeds(count).count() == 1;
        assert!(both, "the simulation shows both: {kept} all new, {missed} not");
    }

    /// A host's board, and what another host knows of it.
    fn one_board() -> (SimulatedMemory, Board<SimulatedMemory>, PeerBoard<SimulatedMemory>, Peers) {
        let pool = SimulatedPool::new(1, 4096);
        let (memory, reader) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
        let ours = Board::open(memory.clone(), board(1));
        (memory, ours, PeerBoard::new(reader, 1, board(1)), Peers::new(STALE_US))
    }

    #[test]
    fn a_line_that_was_written_in_part_is_not_believed() {
        let (memory, mut ours, mut theirs, mut peers) = one_board();
        ours.publish(&records(2, 7)).unwrap();
        memory.full_fence();
        assert_eq!(theirs.read(&mut peers, 0.0), 2);
        let second = board(1).start.saturating_add(LineCount::new(2)).bytes();
        memory.store(second.saturating_add(8), 3.0_f64.to_bits());
        memory.flush(second, 64);
        memory.full_fence();
        assert_eq!(theirs.read(&mut peers, 1.0), 0);
        assert_eq!(rates(&peers, 1.0), [7.0, 7.0]);
        // A header that makes no sense is ignored as well.
        memory.store(board(1).start_byte(), u64::MAX);
        memory.flush(board(1).start_byte(), 8);
        memory.full_fence();
        assert_eq!(theirs.read(&mut peers, 2.0), 0);
    }

    #[test]
    fn of_more_than_a_board_has_room_for_the_first_are_published() {
        let (memory, mut ours, mut theirs, mut peers) = one_board();
        for (round, count) in [(1, 16), (2, 40)] {
            let full = BoardFull { records: usize::try_from(count).unwrap(), lines: 16 };
            assert_eq!(ours.publish(&records(count, round)), Err(full));
            memory.full_fence();
            assert_eq!(theirs.read(&mut peers, 0.0), 15);
            assert_eq!(rates(&peers, 0.0), [f64::from(round); 15]);
        }
        ours.publish(&records(15, 3)).unwrap();
    }

    #[test]
    fn lines_that_are_published_no_more_do_not_count() {
        let (memory, mut ours, mut theirs, mut peers) = one_board();
        for (round, count) in [(1, 5), (2, 3), (3, 4), (4, 0), (5, 2)] {
            ours.publish(&records(count, round)).unwrap();
            memory.full_fence();
            theirs.read(&mut peers, f64::from(round));
            let expected = vec![f64::from(round); usize::try_from(count).unwrap()];
            assert_eq!(rates(&peers, f64::from(round)), expected);
        }
    }

    #[test]
    fn a_board_that_gets_shorter_and_longer_is_read_whole_at_last() {
        check_seeds("-p pod-protocol --lib", 60, |seed| {
            let pool = SimulatedPool::new(seed, 4096);
            let (writer, reader) = (HostId::new(1), HostId::new(2));
            let mut random = Random::new(seed);
            let mut ours = Board::open(pool.host(writer), board(1));
            let mut theirs = PeerBoard::new(pool.host(reader), 1, board(1));
            let mut peers = Peers::new(STALE_US);
            for round in 1..60 {
                let count = [1, 3, 5, 9][(0..3).filter(|_| random.one_in(2)).count()];
                ours.publish(&records(count, round)).unwrap();
                let now_us = f64::from(round);
                theirs.read(&mut peers, now_us);
                let found = rates(&peers, now_us);
                assert!(found.len() <= 9 && found.iter().all(|rate| *rate <= now_us), "seed {seed}");
                if random.one_in(5) {
                    pool.host(writer).full_fence();
                    theirs.read(&mut peers, now_us);
                    let expected = vec![now_us; usize::try_from(count).unwrap()];
                    assert_eq!(rates(&peers, now_us), expected, "seed {seed}");
                }
            }
            Ok(())
        });
    }

    #[test]
    fn sequence_numbers_go_on_after_a_restart_also_across_the_wrap() {
        let memory = SimulatedPool::new(1, 4096).host(HostId::new(1));
        let start = board(1).start.saturating_add(LineCount::new(1));
        for (line, sequence) in [(0, u32::MAX), (1, 0), (2, u32::MAX)] {
            let at = start.saturating_add(LineCount::new(line)).bytes();
            memory.store_words(at, encode(&records(1, 1)[0], sequence));
        }
        // Lines that were never used hold 0, which is newer than u32::MAX.
        assert_eq!(Board::open(memory, board(1)).sequence, 0);
    }
}
