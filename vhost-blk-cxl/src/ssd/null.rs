//! A device that takes everything and gives nothing.

use std::os::fd::BorrowedFd;

use super::{Command, Finished, Full, Geometry, Outcome, Ssd};
use crate::segments::Segment;

/// How many commands it holds until they are collected.
const DEPTH: usize = 1024;

/// Completes every command at once and moves no data: what is left is the cost of everything else.
#[derive(Debug)]
pub struct NullSsd {
    geometry: Geometry,
    finished: Vec<Finished>,
}

impl NullSsd {
    /// A device that claims this size, rounded down to whole blocks.
    pub fn new(size_bytes: u64) -> Self {
        let geometry = Geometry { size_bytes: size_bytes & !511, block_bytes: 512 };
        Self { geometry, finished: Vec::with_capacity(DEPTH) }
    }
}

impl Ssd for NullSsd {
    fn driver(&self) -> &'static str {
        "null"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, command: Command) -> Result<(), Full> {
        if self.finished.len() == DEPTH {
            return Err(Full);
        }
        self.finished.push(Finished { id: command.id, outcome: Outcome::Done });
        Ok(())
    }

    fn submit_list(&mut self, command: Command, _segments: &[Segment]) -> Result<(), Full> {
        self.submit(command)
    }

    fn kick(&mut self) {}

    fn reap(&mut self, into: &mut Vec<Finished>) {
        into.append(&mut self.finished);
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn bypasses_cache(&self) -> bool {
        true
    }

    fn write_verifier(&self) -> u64 {
        0
    }

    fn failure(&self) -> Option<&str> {
        None
    }
}
