//! The private write-back cache of one simulated host.

use super::random::Random;
use crate::{HostId, LINE_BYTES};

/// A line in a host's cache.
#[derive(Clone)]
pub(super) struct CachedLine {
    pub(super) line: u64,
    pub(super) data: [u8; LINE_BYTES],
    /// One bit for each byte that this host wrote and that is not written back.
    pub(super) dirty: u64,
    /// How often the shared line had changed when this host last wrote to its copy.
    pub(super) stored_at_version: u32,
}

/// What a cache control instruction has yet to do to a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pending {
    WriteBack,
    /// CLFLUSHOPT as an invalidate: it should find nothing to write back.
    Invalidate,
    /// CLFLUSHOPT as a flush.
    Flush,
}

/// An instruction that has not taken effect yet.
#[derive(Clone, Copy)]
pub(super) struct Instruction {
    pub(super) line: u64,
    pub(super) kind: Pending,
}

/// The cache. It belongs to the host and outlives the processes that run there.
pub(super) struct Cache {
    pub(super) host: HostId,
    /// The lines it holds, in an order that only the accesses so far decide, so that a random one is the same in every replay.
    resident: Vec<CachedLine>,
    /// For each line of the pool, one more than its place in `resident`; 0 if it is not there.
    places: Vec<u32>,
    pending: Vec<Instruction>,
    /// Pending ones that a store fence followed: they take effect before the next store.
    fenced: Vec<Instruction>,
    /// The line used last: a prefetcher brings in its neighbours.
    pub(super) recent: u64,
    /// Which process of the host may use it. Grows with each crash.
    pub(super) process: u64,
}

impl Cache {
    pub(super) fn new(host: HostId, process: u64, lines: usize) -> Self {
        Self {
            host,
            resident: Vec::new(),
            places: vec![0; lines],
            pending: Vec::new(),
            fenced: Vec::new(),
            recent: 0,
            process,
        }
    }

    pub(super) fn holds(&self, line: u64) -> bool {
        self.places[line as usize] != 0
    }

    /// How many lines it holds.
    pub(super) fn len(&self) -> usize {
        self.resident.len()
    }

    pub(super) fn get(&mut self, line: u64) -> Option<&mut CachedLine> {
        let place = self.places[line as usize].checked_sub(1)?;
        Some(&mut self.resident[place as usize])
    }

    /// The cached line; `fetch` says what it holds if it is not there yet.
    pub(super) fn get_or_fetch(
        &mut self,
        line: u64,
        fetch: impl FnOnce() -> [u8; LINE_BYTES],
    ) -> &mut CachedLine {
        if !self.holds(line) {
            self.resident.push(CachedLine { line, data: fetch(), dirty: 0, stored_at_version: 0 });
            self.places[line as usize] = self.resident.len() as u32;
        }
        let place = self.places[line as usize] - 1;
        &mut self.resident[place as usize]
    }

    pub(super) fn remove(&mut self, line: u64) {
        let Some(place) = self.places[line as usize].checked_sub(1) else { return };
        self.resident.swap_remove(place as usize);
        self.places[line as usize] = 0;
        if let Some(moved) = self.resident.get(place as usize) {
            self.places[moved.line as usize] = place + 1;
        }
    }

    /// A cached line at random.
    pub(super) fn any_line(&self, random: &mut Random) -> Option<u64> {
        let count = self.resident.len() as u64;
        (count > 0).then(|| self.resident[random.below(count) as usize].line)
    }

    pub(super) fn issue(&mut self, line: u64, kind: Pending) {
        self.pending.push(Instruction { line, kind });
    }

    pub(super) fn fence_stores(&mut self) {
        self.fenced.append(&mut self.pending);
    }

    /// Takes out one instruction at random: they take effect in any order.
    pub(super) fn take_pending(&mut self, random: &mut Random, only_fenced: bool) -> Option<Instruction> {
        let others = if only_fenced { 0 } else { self.pending.len() };
        let candidates = (self.fenced.len() + others) as u64;
        if candidates == 0 {
            return None;
        }
        let chosen = random.below(candidates) as usize;
        Some(match chosen.checked_sub(self.fenced.len()) {
            None => self.fenced.swap_remove(chosen),
            Some(other) => self.pending.swap_remove(other),
        })
    }
}
