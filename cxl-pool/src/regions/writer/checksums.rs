//! The checksum of all entries from those of blocks of them, so that a change of one costs no look at all the others.

use std::collections::BTreeSet;

use crc32fast::Hasher;
use zerocopy::IntoBytes;

use super::EntryWire;

/// Entries of a block. Its checksum takes about as long as to put together those of the blocks above it.
const BLOCK: usize = 64;

/// A tree of checksums: blocks at the bottom, and each node above the checksum of what its two children cover, one after the other.
#[derive(Debug, Default)]
pub(super) struct Checksums {
    /// The root is 1, the children of `n` are `2n` and `2n + 1`, the second half are the blocks.
    nodes: Vec<Node>,
    /// Blocks whose checksum is out of date.
    stale: BTreeSet<usize>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    crc: u32,
    bytes: u64,
}

impl Node {
    fn of(bytes: &[u8]) -> Self {
        Self { crc: crc32fast::hash(bytes), bytes: bytes.len() as u64 }
    }

    fn followed_by(self, next: Self) -> Self {
        let mut both = Hasher::new_with_initial_len(self.crc, self.bytes);
        both.combine(&Hasher::new_with_initial_len(next.crc, next.bytes));
        Self { crc: both.finalize(), bytes: self.bytes + next.bytes }
    }
}

impl Checksums {
    /// The entry at this place changed, came or went.
    pub(super) fn note(&mut self, place: usize) {
        self.stale.insert(place / BLOCK);
    }

    /// The CRC-32 of all entries, one after the other. They are the ones that it was told of.
    pub(super) fn of(&mut self, entries: &[EntryWire]) -> u32 {
        let leaves = entries.len().div_ceil(BLOCK).max(1).next_power_of_two();
        if self.nodes.len() < 2 * leaves {
            self.nodes = vec![Node::default(); 2 * leaves];
            self.stale = (0..leaves).collect();
        }
        let leaves = self.nodes.len() / 2;
        let mut changed = std::mem::take(&mut self.stale);
        // What came and went again meanwhile.
        changed.retain(|block| *block < leaves);
        for block in &changed {
            let from = (block * BLOCK).min(entries.len());
            let to = (from + BLOCK).min(entries.len());
            self.nodes[leaves + block] = Node::of(entries[from..to].as_bytes());
        }
        // From one level to the next above it, to the root.
        changed = changed.into_iter().map(|block| leaves + block).collect();
        while changed.first().is_some_and(|node| *node > 1) {
            changed = changed.into_iter().map(|node| node / 2).collect();
            for node in &changed {
                self.nodes[*node] = self.nodes[2 * node].followed_by(self.nodes[2 * node + 1]);
            }
        }
        self.nodes[1].crc
    }
}
