//! `rest`: what channels cost while nobody has anything to say.

mod counting;
mod pod;

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use rustix::time::{ClockId, clock_gettime};

use self::counting::Counted;
use self::pod::{Part, Pod};
use crate::cores::Cores;
use crate::report::{self, Figure, Goal};

/// The cost of being idle: lines fetched and written per second, bytes of pool bandwidth, and CPU time.
///
/// A frontend's and a backend's daemon, as far as they touch the pool: both have joined a controller, look at their fence,
/// beat, send telemetry, and run a worker with a channel pair of 16 B messages and one of 64 B. Everything goes through
/// memory that counts: a load of a line that was invalidated before fetches it.
///
/// Measured in each way to wait: `wakeup = "socket"` (sleep until a doorbell rings), `wakeup = "poll"` (sleep in steps of 50 µs to
/// 1 ms), and a core of its own (`cpu = N`), which polls without pause, as the paper's drivers do (Oasis, Table 3).
#[derive(Args)]
pub(crate) struct Options {
    /// How long each way is measured.
    #[arg(long, default_value_t = 3000, value_name = "MILLISECONDS")]
    run_ms: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { run_ms: 3000 }
    }
}

/// How a worker waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Socket,
    Poll,
    Dedicated,
}

impl Way {
    const ALL: [Self; 3] = [Self::Socket, Self::Poll, Self::Dedicated];

    const fn name(self) -> &'static str {
        match self {
            Self::Socket => "wakeup = \"socket\"",
            Self::Poll => "wakeup = \"poll\"",
            Self::Dedicated => "cpu = N",
        }
    }

    const fn slug(self) -> &'static str {
        match self {
            Self::Socket => "socket",
            Self::Poll => "poll",
            Self::Dedicated => "dedicated",
        }
    }
}

/// Of two drivers that poll, over the links of both hosts (Oasis, Table 3).
const OASIS_MB_PER_S: f64 = 200.0;
/// A line's bytes, in MB.
const LINE_MB: f64 = 64e-6;
const SETTLE: Duration = Duration::from_millis(500);

/// What one way costs, per second.
struct Cost {
    way: Way,
    /// Lines fetched and written, by part.
    parts: Vec<(Part, f64, f64)>,
    cores: f64,
}

impl Cost {
    fn sum(&self, of: impl Fn(&(Part, f64, f64)) -> f64) -> f64 {
        self.parts.iter().map(of).sum()
    }

    fn mb_per_s(&self) -> f64 {
        self.sum(|(_, fetched, written)| fetched + written) * LINE_MB
    }
}

/// Runs the benchmark.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    ensure!(options.run_ms >= 100, "less than 100 ms say nothing");
    let cores = Cores::choose()?;
    let mut costs = Vec::new();
    for way in Way::ALL {
        costs.push(measure(way, cores, Duration::from_millis(options.run_ms))?);
    }
    print(&costs);
    let figures = figures(&costs);
    report::print_goals(&figures);
    let json = output.join("rest.json");
    report::write_figures(&json, &figures)?;
    println!("wrote {}", json.display());
    Ok(())
}

/// CPU time of this process, in seconds.
#[allow(clippy::cast_precision_loss, reason = "a bench does not run for years")]
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[allow(clippy::cast_precision_loss, reason = "counts of a run stay far below 2^53")]
fn measure(way: Way, cores: Cores, duration: Duration) -> Result<Cost> {
    let pod = Pod::start(way, cores)?;
    thread::sleep(SETTLE);
    let count = || Part::ALL.map(|part| pod.counts(part));
    let (before, cpu_before) = (count(), cpu_seconds());
    let began = std::time::Instant::now();
    thread::sleep(duration);
    let seconds = began.elapsed().as_secs_f64();
    let (after, cpu) = (count(), cpu_seconds() - cpu_before);
    pod.stop()?;
    let rate = |after: u64, before: u64| (after - before) as f64 / seconds;
    let parts = Part::ALL.into_iter().zip(before.into_iter().zip(after));
    let parts = parts.map(|(part, (before, after)): (Part, (Counted, Counted))| {
        (part, rate(after.fetched, before.fetched), rate(after.written, before.written))
    });
    Ok(Cost { way, parts: parts.collect(), cores: cpu / seconds })
}

fn print(costs: &[Cost]) {
    println!("An idle frontend and backend: lines fetched + written per second");
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let headings = Part::ALL.map(Part::name).into_iter().chain(["MB/s in all", "cores in all"]);
    table.set_header([String::new()].into_iter().chain(headings.map(str::to_owned)));
    for cost in costs {
        let mut row = vec![cost.way.name().to_owned()];
        row.extend(cost.parts.iter().map(|(_, fetched, written)| format!("{fetched:.0} + {written:.0}")));
        row.extend([format!("{:.3}", cost.mb_per_s()), format!("{:.3}", cost.cores)]);
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}");
    println!(
        "Oasis (Table 3), two drivers that poll: {OASIS_MB_PER_S} MB/s. How often a dedicated core polls depends on how long a fetch takes."
    );
    println!("Everything runs in one process on two cores, the controller's side included.\n");
}

fn figures(costs: &[Cost]) -> Vec<Figure> {
    const RIVAL: &str = "Oasis, idle";
    let mut figures = Vec::new();
    for cost in costs {
        let prefix = format!("rest/{}", cost.way.slug());
        figures.push(
            Figure::new(format!("{prefix}/bandwidth"), cost.mb_per_s(), "MB/s")
                .against(RIVAL, Some(OASIS_MB_PER_S))
                .with_goal(Goal::AtMost(OASIS_MB_PER_S)),
        );
        figures.push(Figure::new(format!("{prefix}/lines-fetched"), cost.sum(|part| part.1), "/s"));
        figures.push(Figure::new(format!("{prefix}/lines-written"), cost.sum(|part| part.2), "/s"));
        figures.push(Figure::new(format!("{prefix}/cores"), cost.cores, "cores"));
        for (part, fetched, written) in &cost.parts {
            let prefix = format!("{prefix}/{}", part.slug());
            figures.push(Figure::new(format!("{prefix}/lines-fetched"), *fetched, "/s"));
            figures.push(Figure::new(format!("{prefix}/lines-written"), *written, "/s"));
        }
    }
    figures
}
