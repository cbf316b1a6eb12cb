//! `multiplex`: the bursty traffic of two hosts on one NIC, against a NIC each (Oasis §5.2, Figure 12).

mod pod;
mod trace;
mod wire;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use cxl_pool::{CoherenceMode, CreateOptions, Memory, Pool};
use wadi_tests::runner::memory_tempdir;

use self::pod::{POOL_BYTES, Pod, Sharing};
use self::wire::{BITS_PER_NS, Beginning, Seen, WINDOW_NS};
use crate::cores::{self, Cores};
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal, median};

/// Two hosts with bursty traffic on one NIC, against a NIC each: round trips from P50 to P99.99, and how much of the NICs is used.
///
/// Clients send to a guest on each of two hosts, which sends everything back, through the engine's frontend there and its backend beside the
/// NIC. The traffic is made of a seed, the same both times: bursts of 1 to 64 packets of 64 to 1514 bytes, at 10 Gbit/s within a burst. NICs are
/// modelled: a wire of 10 Gbit/s each way, flow tags, memory accesses past the caches. The engine is the real one; guests, frontends and
/// backends take turns on one core, so that a NIC less makes no difference but on the NIC.
#[derive(Args)]
pub(crate) struct Options {
    /// How often everything is measured.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// How long each run lasts.
    #[arg(long, default_value_t = 4000, value_name = "MILLISECONDS")]
    run_ms: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 3, run_ms: 4000 }
    }
}

const HOSTS: usize = 2;
const MAC_BYTES: usize = 6;
const SEED: u64 = 1;
/// So many turns are more than enough for frontends and backends to find each other.
const TURNS_TO_MEET: u32 = 1000;
/// What arrived last has so long to come back.
const PATIENCE: Duration = Duration::from_millis(100);
const QUANTILES: [(f64, &str); 5] =
    [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9"), (0.9999, "p99.99")];
/// What sharing may add to the 99th percentile (paper: 0 to 1 µs).
const ADDED_P99_NS: f64 = 1000.0;

fn mac(host: usize) -> [u8; MAC_BYTES] {
    [2, 0, 0, 0, 0, u8::try_from(host + 1).unwrap_or(u8::MAX)]
}

/// What came out of one run.
struct Sample {
    mode: CoherenceMode,
    sharing: Sharing,
    seen: Seen,
}

impl Sample {
    fn round_trip_ns(&self, host: usize, quantile: f64) -> f64 {
        as_f64(self.seen.round_trips[host].value_at_quantile(quantile))
    }

    /// The part of the NICs' rate that is used in all but one of 10 000 windows, at most.
    fn utilisation(&self) -> f64 {
        let mut windows = self.seen.windows.clone();
        windows.sort_unstable();
        // One in 10 000, or the fullest one of fewer.
        let place = windows.len() - 1 - windows.len() / 10_000;
        let whole = BITS_PER_NS * as_f64(WINDOW_NS) * as_f64(self.sharing.nics() as u64);
        as_f64(windows[place]) / whole
    }
}

/// Runs the benchmark.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    ensure!(options.rounds > 0 && options.run_ms >= 10, "give at least one round, and 10 ms for each run");
    let cores = Cores::choose()?;
    if let Some(load) = cores::busy() {
        println!("The machine is busy (load {load}): the figures will show that. Run this alone.");
    }
    cores::pin(cores.receiver)?;
    let mut samples = Vec::new();
    for round in 0..u64::from(options.rounds) {
        for mode in [CoherenceMode::Hardware, CoherenceMode::Software] {
            for sharing in Sharing::ALL {
                // Another round has other traffic; both ways to connect have the same.
                let traffic = SEED + round * HOSTS as u64;
                let sample = measure(mode, sharing, traffic, Duration::from_millis(options.run_ms));
                samples.push(sample.with_context(|| sharing.name())?);
            }
        }
    }
    cores::unpin(cores)?;
    write(&samples, output)
}

fn measure(mode: CoherenceMode, sharing: Sharing, traffic: u64, duration: Duration) -> Result<Sample> {
    let directory = memory_tempdir().context("cannot make a directory in /dev/shm")?;
    let options = CreateOptions { size_bytes: Some(POOL_BYTES), mode, ..CreateOptions::default() };
    let pool = Pool::create(&directory.path().join("pool"), &options)?;
    let seen = match mode {
        CoherenceMode::Hardware => replay(&pool, &pool.hardware(), sharing, traffic, duration)?,
        CoherenceMode::Software => replay(&pool, &pool.software(), sharing, traffic, duration)?,
    };
    let came_back: u64 = seen.round_trips.iter().map(hdrhistogram::Histogram::len).sum();
    ensure!(came_back > 0, "not a single packet came back");
    ensure!(
        came_back + seen.dropped.values().sum::<u64>() == seen.sent,
        "of {} packets {came_back} came back, and these were dropped: {:?}",
        seen.sent,
        seen.dropped
    );
    Ok(Sample { mode, sharing, seen })
}

fn replay<M: Memory>(
    pool: &Pool,
    memory: &M,
    sharing: Sharing,
    traffic: u64,
    duration: Duration,
) -> Result<Seen> {
    let seen = Arc::new(Mutex::new(Seen::new()));
    let beginning = Beginning::default();
    let until_ns = u64::try_from(duration.as_nanos())?;
    let mut pod = Pod::new(pool, memory, sharing, (traffic, &beginning, until_ns), &seen)?;
    // Before both ends of a channel have met, what arrives finds no room in it.
    for _ in 0..TURNS_TO_MEET {
        pod.turn()?;
    }
    let began = *beginning.get_or_init(Instant::now);
    while began.elapsed() < duration {
        pod.turn()?;
    }
    let mut last = Instant::now();
    while last.elapsed() < PATIENCE {
        if pod.turn()? > 0 {
            last = Instant::now();
        }
    }
    let drops = pod.drops();
    drop(pod);
    let seen = Arc::into_inner(seen).context("nobody else has it any more")?;
    let mut seen = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (reason, count) in drops {
        *seen.dropped.entry(reason).or_default() += count;
    }
    Ok(seen)
}

fn matching(
    samples: &[Sample],
    mode: CoherenceMode,
    sharing: Sharing,
) -> impl Iterator<Item = &Sample> + Clone {
    samples.iter().filter(move |it| (it.mode, it.sharing) == (mode, sharing))
}

fn round_trip(
    samples: &[Sample],
    mode: CoherenceMode,
    sharing: Sharing,
    host: usize,
    quantile: f64,
) -> Option<f64> {
    median(matching(samples, mode, sharing).map(|it| it.round_trip_ns(host, quantile)))
}

const fn mode_name(mode: CoherenceMode) -> &'static str {
    match mode {
        CoherenceMode::Hardware => "hardware-coherent",
        CoherenceMode::Software => "software-coherent",
    }
}

fn write(samples: &[Sample], output: &Path) -> Result<()> {
    println!(
        "Two hosts with bursty traffic, a NIC each or one for both: round trips in µs (medians of the runs)"
    );
    let mut figures = Vec::new();
    let mut panels = Vec::new();
    for mode in [CoherenceMode::Hardware, CoherenceMode::Software] {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let names = QUANTILES.map(|(_, name)| name.to_owned());
        table.set_header([mode_name(mode).to_owned()].into_iter().chain(names));
        let mut series = Vec::new();
        for host in 0..HOSTS {
            for sharing in Sharing::ALL {
                let name = format!("host {}, {}", host + 1, sharing.name());
                let ns = QUANTILES.map(|(quantile, _)| round_trip(samples, mode, sharing, host, quantile));
                let cells = ns.map(|ns| ns.map_or("n/a".to_owned(), |ns| format!("{:.2}", ns / 1e3)));
                table.add_row([name.clone()].into_iter().chain(cells));
                let points = QUANTILES
                    .iter()
                    .zip(ns)
                    .filter_map(|((quantile, _), ns)| Some((1.0 / (1.0 - quantile), ns?)));
                series.push(Series { dashed: false, name, points: points.collect() });
            }
            for (quantile, name) in QUANTILES {
                let [apart, shared] =
                    Sharing::ALL.map(|sharing| round_trip(samples, mode, sharing, host, quantile));
                let Some((apart, shared)) = apart.zip(shared) else { continue };
                let title = |what: &str| format!("multiplex/{}/host{}/{what}", mode_name(mode), host + 1);
                figures.push(Figure::new(title(name), shared, "ns").against("a NIC each", Some(apart)));
                if name == "p99" {
                    let added = Figure::new(title("p99-added"), shared - apart, "ns");
                    figures.push(added.with_goal(Goal::AtMost(ADDED_P99_NS)));
                }
            }
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("\n{table}");
        let utilisation = |sharing| median(matching(samples, mode, sharing).map(Sample::utilisation));
        let [apart, shared] = Sharing::ALL.map(utilisation);
        if let Some((apart, shared)) = apart.zip(shared) {
            println!(
                "NIC utilisation at P99.99 of windows of {} µs: {:.1} % with a NIC each, {:.1} % with one",
                WINDOW_NS / 1000,
                apart * 100.0,
                shared * 100.0
            );
            let name = format!("multiplex/{}/utilisation-p99.99", mode_name(mode));
            figures.push(Figure::new(name, shared * 100.0, "%").against("a NIC each", Some(apart * 100.0)));
        }
        let mut dropped: BTreeMap<&str, u64> = BTreeMap::new();
        for (reason, count) in samples.iter().filter(|it| it.mode == mode).flat_map(|it| &it.seen.dropped) {
            *dropped.entry(reason).or_default() += count;
        }
        let sent: u64 = samples.iter().filter(|it| it.mode == mode).map(|it| it.seen.sent).sum();
        println!(
            "{sent} packets in all runs; all came back but for what was dropped and counted: {dropped:?}"
        );
        panels.push(Panel {
            title: format!("Round trips, {}", mode_name(mode)),
            x_label: "one in so many packets takes longer",
            y_label: "ns",
            series,
        });
    }
    println!();
    report::print_goals(&figures);
    report::write(&output.join("multiplex.svg"), &plot::svg(&panels))?;
    report::write_figures(&output.join("multiplex.json"), &figures)
}

#[allow(clippy::cast_precision_loss, reason = "counts and times of a short run are far below 2^53")]
fn as_f64(count: u64) -> f64 {
    count as f64
}
