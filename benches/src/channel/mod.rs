//! `channel`: message channels, the paper's steps (Oasis, Figure 6), ours and a rival.

mod ends;
mod lone;
mod one_core;
mod rivals;
mod run;
mod summary;
mod traffic;
mod variant;

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;

use self::run::Bench;
pub(crate) use self::run::{SenderOptions, send};
use self::traffic::{Measured, Traffic};
use self::variant::Variant;
use crate::cores::{self, Cores, Distance};

/// Message channels: throughput and one-way latency of the paper's steps, ours, and two crates.
///
/// Sender and receiver are two processes on two cores that share a pool file; messages have 16 or 64 bytes, rings 8192
/// slots. Measured are the highest rate, and the latency at several fixed rates: median and 99th percentile, counted
/// from when a message was due. The paper (Oasis, SOSP '25, §3.2.2) needs 14 M messages/s with a median of 0.6 µs.
///
/// The rivals are rtrb and gil through their own batch interfaces, their rings allocated in the same pool file and their senders
/// forked off. Judged is by the better one in each place. They work on coherent memory only, so compare them with
/// "hardware-coherent"; the other variants pay for cache control that they do without.
///
/// All variants take turns, in every round, in both directions: one of the two cores may be slower than the other, and some rings
/// mind a slow sender more than a slow receiver. What one line transfer between the cores costs is probed before and after
/// each run; it is tagged near (below 100 ns), far, or mixed, and only equal tags are compared. On coherent hardware
/// stale lines cannot be seen, so the steps differ by the cost of their instructions only.
#[derive(Args)]
pub(crate) struct Options {
    /// How often everything is measured.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// How long each run sends.
    #[arg(long, default_value_t = 150, value_name = "MILLISECONDS")]
    run_ms: u64,
    /// The fixed rates, in millions of messages per second.
    #[arg(long, value_delimiter = ',', default_values_t = [1.0, 7.0, 14.0, 28.0], value_name = "RATE,…")]
    rates: Vec<f64>,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 3, run_ms: 150, rates: vec![1.0, 7.0, 14.0, 28.0] }
    }
}

/// At full speed everything takes turns so often in a round and direction, each time for a part of the time: from one run to the
/// next, the same ring may be a third faster or slower, so it takes many to tell two of them apart.
const FULL_SPEED_RUNS: u32 = 3;
const FULL_SPEED_SHORTER: u32 = 3;

/// What was measured, and under which conditions.
#[derive(Clone, Copy, Debug)]
struct Sample {
    variant: Variant,
    words: usize,
    /// In millions per second; nothing at full speed.
    rate_m: Option<f64>,
    distance: Distance,
    /// The cores had changed places.
    turned: bool,
    measured: Measured,
}

/// Runs the benchmark.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    ensure!(options.rounds > 0 && options.run_ms >= 10, "give at least one round, and 10 ms for each run");
    ensure!(options.rates.iter().all(|rate| *rate > 0.0), "rates must be above 0");
    let cores = Cores::choose()?;
    if let Some(load) = cores::busy() {
        println!("The machine is busy (load {load}): latencies, above all, will show that. Run this alone.");
    }
    let mut bench = Bench::new(cores)?;
    one_core::print(&mut bench)?;
    let lone = lone::measure(&mut bench, options.rounds)?;
    let rates: Vec<Option<f64>> = [None].into_iter().chain(options.rates.iter().copied().map(Some)).collect();
    let runs_of = |rate_m: &Option<f64>| if rate_m.is_none() { FULL_SPEED_RUNS } else { 1 };
    let runs: u32 = rates.iter().map(runs_of).sum();
    let total = (options.rounds * runs) as usize * 2 * 2 * Variant::ALL.len();
    let mut samples = Vec::with_capacity(total);
    for _ in 0..options.rounds {
        for rate_m in rates.iter().flat_map(|rate_m| (0..runs_of(rate_m)).map(move |_| rate_m)) {
            for words in [2, 8] {
                for variant in Variant::ALL {
                    for turned in [false, true] {
                        show_progress(samples.len(), total);
                        bench.set_cores(if turned { cores.turned() } else { cores });
                        samples.push(sample(&mut bench, options, variant, words, *rate_m, turned)?);
                    }
                }
            }
        }
    }
    show_progress(total, total);
    summary::write(&samples, &rates, lone, output)
}

fn sample(
    bench: &mut Bench,
    options: &Options,
    variant: Variant,
    words: usize,
    rate_m: Option<f64>,
    turned: bool,
) -> Result<Sample> {
    let cores = bench.cores();
    let shorter = if rate_m.is_none() { FULL_SPEED_SHORTER } else { 1 };
    let duration = Duration::from_millis(options.run_ms) / shorter;
    let traffic = Traffic { rate: rate_m.map(|rate| rate * 1e6), duration };
    let before_ns = cores.line_transfer_ns()?;
    let measured = match words {
        2 => bench.run::<2>(variant, traffic)?,
        _ => bench.run::<8>(variant, traffic)?,
    };
    let distance = Distance::of(before_ns, cores.line_transfer_ns()?);
    Ok(Sample { variant, words, rate_m, distance, turned, measured })
}

fn show_progress(done: usize, total: usize) {
    let mut err = io::stderr();
    if err.is_terminal() {
        let end = if done == total { "\r\x1b[K" } else { "" };
        // If nobody sees it, nothing is lost.
        let _ = write!(err, "\rchannel: run {done} of {total}{end}");
        let _ = err.flush();
    }
}
