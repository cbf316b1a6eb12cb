//! What a guest that reads one block after the other notices of a guest that writes as much as it can.

use anyhow::Result;

use super::target::Target;
use super::{Bench, Files, Job, Medium, Server, What};
use crate::cores;

const READER: Job = Job { writes: false, bytes: 4 << 10, depth: 1, queues: 1 };
const WRITER: Job = Job { writes: true, bytes: 4 << 10, depth: 128, queues: 1 };

/// What the neighbour does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beside {
    Nothing,
    /// 4 KiB writes, 128 at a time.
    Writer,
}

impl Beside {
    pub(super) const ALL: [Self; 2] = [Self::Nothing, Self::Writer];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "4K-read/qd1, neighbour idle",
            Self::Writer => "4K-read/qd1, neighbour 4K-write/qd128",
        }
    }
}

/// Measures the reader with and without its neighbour, both disks on one device.
pub(super) fn measure(bench: &mut Bench, server: Server, medium: Medium, files: &Files) -> Result<()> {
    cores::unpin(bench.cores)?;
    let mut target = Target::start(server, files.of(medium), &files.directory, 2, bench.cores)?;
    target.connect(1)?;
    let duration = bench.duration;
    for beside in Beside::ALL {
        bench.sample(server, medium, What::Reader(beside), &mut target, |target| match beside {
            Beside::Nothing => target.run(READER, duration),
            Beside::Writer => target.run_beside(READER, WRITER, duration),
        })?;
    }
    Ok(())
}
