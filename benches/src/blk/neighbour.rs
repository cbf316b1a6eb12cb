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
    /// The same, with a limit of [`LIMIT_PER_SECOND`].
    LimitedWriter,
}

/// What a limited neighbour may do.
pub(super) const LIMIT_PER_SECOND: u32 = 20_000;

impl Beside {
    pub(super) const ALL: [Self; 3] = [Self::Nothing, Self::Writer, Self::LimitedWriter];

    pub(super) const fn key(self) -> &'static str {
        match self {
            Self::Nothing => "alone",
            Self::Writer => "beside-writer",
            Self::LimitedWriter => "beside-limited-writer",
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "4K-read/qd1, neighbour idle",
            Self::Writer => "4K-read/qd1, neighbour 4K-write/qd128",
            Self::LimitedWriter => "4K-read/qd1, neighbour limited to 20 k/s",
        }
    }
}

/// Measures the reader with and without its neighbour, both disks on one device.
pub(super) fn measure(bench: &mut Bench, server: Server, medium: Medium, files: &Files) -> Result<()> {
    let duration = bench.duration;
    for (limit, cases) in
        [(None, &[Beside::Nothing, Beside::Writer][..]), (Some(LIMIT_PER_SECOND), &[Beside::LimitedWriter])]
    {
        cores::unpin(bench.cores)?;
        let mut target = Target::start(server, medium, files, 2, limit, bench.cores)?;
        target.connect(1)?;
        for &beside in cases {
            bench.sample(server, medium, What::Reader(beside), &mut target, |target| match beside {
                Beside::Nothing => target.run(READER, duration),
                Beside::Writer | Beside::LimitedWriter => target.run_beside(READER, WRITER, duration),
            })?;
        }
    }
    Ok(())
}
