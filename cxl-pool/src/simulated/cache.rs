//! The private write-back cache of one simulated host.

use std::collections::BTreeMap;

use super::random::Random;
use crate::LINE_BYTES;

/// A line in a host's cache.
#[derive(Clone)]
pub(super) struct CachedLine {
    pub(super) data: [u8; LINE_BYTES],
    /// One bit for each byte that this host wrote and that is not written back.
    pub(super) dirty: u64,
    /// How often the shared line had changed when this host last wrote to its copy.
    pub(super) stored_at_version: u64,
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
#[derive(Default)]
pub(super) struct Cache {
    // Ordered, so that "the first line at or after a random one" is the same in every replay.
    pub(super) lines: BTreeMap<u64, CachedLine>,
    pub(super) pending: Vec<Instruction>,
    /// Pending ones that a store fence followed: they take effect before the next store.
    pub(super) fenced: Vec<Instruction>,
    /// The line used last: a prefetcher brings in its neighbours.
    pub(super) recent: u64,
    /// Which process of the host may use it. Grows with each crash.
    pub(super) process: u64,
}

impl Cache {
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

    /// A cached line at random.
    pub(super) fn any_line(&self, random: &mut Random, lines: u64) -> Option<u64> {
        let from = random.below(lines);
        self.lines.range(from..).next().or_else(|| self.lines.iter().next()).map(|(line, _)| *line)
    }
}
