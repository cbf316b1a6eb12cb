//! `exchange`: request and response over a pair of channels, against sockets.

mod end;
mod load;
mod ours;
mod run;
mod sockets;
mod summary;

use std::path::Path;

use anyhow::{Result, ensure};
use clap::Args;

use self::load::Measured;
use self::run::Bench;
pub(crate) use self::run::{ServerOptions, serve};
use crate::cores::{self, Cores, Distance};

/// Request and response over channels: calls per second and latency, idle and under load.
///
/// A client and a server on two cores; the server answers with the 48 B that it was asked with. Calls go one at a time, or
/// 32 are kept under way. Both sides poll, or sleep as soon as there is nothing to do and are woken by a doorbell.
///
/// The rival is a pair of UNIX seqpacket sockets, which keeps the borders of messages as channels do and is what two
/// processes of one machine would use otherwise; polled without waiting, or blocking.
#[derive(Args)]
pub(crate) struct Options {
    /// How often everything is measured.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// How long each run calls.
    #[arg(long, default_value_t = 150, value_name = "MILLISECONDS")]
    run_ms: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 5, run_ms: 150 }
    }
}

/// What carries the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Transport {
    Hardware,
    Software,
    Seqpacket,
}

/// What a side does that has nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Waiting {
    Poll,
    Sleep,
}

/// One kind of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    transport: Transport,
    waiting: Waiting,
    /// Calls under way.
    depth: usize,
}

const TRANSPORTS: [Transport; 3] = [Transport::Hardware, Transport::Software, Transport::Seqpacket];
/// Under load nobody sleeps, so one way to wait is enough there.
const WAYS: [(Waiting, usize); 3] = [(Waiting::Poll, 1), (Waiting::Poll, 32), (Waiting::Sleep, 1)];

struct Sample {
    case: Case,
    distance: Distance,
    measured: Measured,
}

/// Runs the benchmark.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    ensure!(options.rounds > 0 && options.run_ms >= 10, "give at least one round, and 10 ms for each run");
    let cores = Cores::choose()?;
    if let Some(load) = cores::busy() {
        println!("The machine is busy (load {load}): latencies, above all, will show that. Run this alone.");
    }
    let mut bench = Bench::new(cores)?;
    let mut samples = Vec::new();
    for _ in 0..options.rounds {
        for (waiting, depth) in WAYS {
            for transport in TRANSPORTS {
                let case = Case { transport, waiting, depth };
                let before_ns = cores.line_transfer_ns()?;
                let measured = bench.run(case, options.run_ms)?;
                let distance = Distance::of(before_ns, cores.line_transfer_ns()?);
                samples.push(Sample { case, distance, measured });
            }
        }
    }
    summary::write(&samples, output)
}
