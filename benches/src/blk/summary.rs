//! What the samples say: tables for people, a plot, and figures for machines.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};

use super::neighbour::Beside;
use super::{Job, Medium, Sample, Server, What, floor};
use crate::cores::Distance;
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal, median};

const OURS: Server = Server::Hardware;
/// What software coherence may cost.
const SOFTWARE_SHARE: f64 = 0.7;
/// How the names of figures end that say how many requests there were per second, and what part of those with hardware coherence there
/// could have been at most.
const RATE: &str = "/rate";
const SHARE_AT_MOST: &str = "/share-at-most";
/// What a single request may take longer than by io_uring on the same file.
const ADDED_US_MAX: f64 = 5.0;

/// The median of all runs of one kind.
#[derive(Clone, Copy)]
struct Cell {
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_us: [f64; 2],
}

impl Cell {
    fn of(
        samples: &[Sample],
        server: Server,
        medium: Medium,
        what: What,
        distance: Distance,
    ) -> Option<Self> {
        let matching = || {
            samples.iter().filter(move |sample| {
                (sample.server, sample.medium, sample.what, sample.distance)
                    == (server, medium, what, distance)
            })
        };
        let time = |of: fn(&Sample) -> Duration| {
            median(matching().map(move |sample| of(sample).as_secs_f64() * 1e6))
        };
        Some(Self {
            per_second: median(matching().map(|sample| sample.measured.per_second))?,
            p50_us: time(|sample| sample.measured.p50)?,
            p99_us: time(|sample| sample.measured.p99)?,
            cpu_us: [
                time(|sample| sample.measured.cpu_per_request[0])?,
                time(|sample| sample.measured.cpu_per_request[1])?,
            ],
        })
    }

    fn show(&self, server: Server) -> String {
        let Self { per_second, p50_us, p99_us, cpu_us: [first, second] } = self;
        let second = if server.mode().is_some() { format!("+{second:.1}") } else { String::new() };
        format!("{:.1} ({p50_us:.1} / {p99_us:.1}; {first:.1}{second})", per_second / 1e3)
    }
}

/// The part of a rival's rate that ours shall reach.
fn goal(rival: Server, medium: Medium, job: Job) -> Option<f64> {
    match (rival, medium, job.bytes >> 10, job.depth) {
        (Server::Qemu, Medium::Tmpfs, 4, 32) => Some(1.5),
        (Server::Qemu, Medium::Tmpfs, 128, 32) => Some(1.0),
        (Server::Qemu, Medium::Null, 4, 32 | 128) => Some(0.4),
        (Server::Plain, Medium::Tmpfs, 4, 32) => Some(0.5),
        (Server::Plain, Medium::Disk, _, 2..) => Some(0.95),
        _ => None,
    }
}

/// Prints the tables and writes plot and figures.
pub(super) fn write(
    samples: &[Sample],
    jobs: &[Job],
    rival: bool,
    places: Vec<Figure>,
    output: &Path,
) -> Result<()> {
    let count = |distance| samples.iter().filter(|sample| sample.distance == distance).count();
    // A distance that was seen now and then only has too few cells to compare.
    let common = |distance: &Distance| count(*distance) * 4 >= samples.len();
    let distances: Vec<Distance> = [Distance::Near, Distance::Far].into_iter().filter(common).collect();
    println!(
        "Disks: thousands of requests per second (median / 99th percentile in µs; CPU time per request in µs, of frontend+backend)"
    );
    println!(
        "Runs while the two cores were near: {}, far: {}, mixed: {}. Mixed ones, and less than a quarter, count for nothing.",
        count(Distance::Near),
        count(Distance::Far),
        count(Distance::Mixed)
    );
    let all_jobs: Vec<What> = jobs.iter().copied().map(What::Alone).collect();
    let measured = |medium| samples.iter().any(|sample| sample.medium == medium);
    let reader = Beside::ALL.map(What::Reader);
    let read = samples.iter().any(|sample| reader.contains(&sample.what));
    for distance in &distances {
        for medium in Medium::ALL.into_iter().filter(|medium| measured(*medium)) {
            println!("\n{}, {distance}\n{}", medium.name(), table(samples, &all_jobs, medium, *distance));
        }
        if read {
            let medium = Medium::Tmpfs;
            println!(
                "\ntwo disks on one device ({}), {distance}\n{}",
                medium.name(),
                table(samples, &reader, medium, *distance)
            );
        }
    }
    let mut figures = figures(samples, jobs, rival, &distances);
    figures.extend(places);
    println!();
    if samples.iter().any(|sample| sample.server == Server::SoftwareZeroCopy) {
        let flush_ns = floor::flush_ns()?;
        println!(
            "To flush a line that no cache holds takes {flush_ns:.2} ns here. That alone leaves software coherence with so much of \
             the rate with hardware coherence, zero-copy, as is said of it below."
        );
        figures.extend(shares_at_most(samples, jobs, &distances, flush_ns));
    }
    for figure in figures.iter().filter(|figure| figure.goal.is_some()) {
        let verdict = if figure.met == Some(true) { "met" } else { "MISSED" };
        let value = if figure.unit == "us" {
            format!("{:.1} us", figure.value)
        } else {
            format!("{:.0} {}", figure.value, figure.unit)
        };
        let compared = match (figure.ratio, &figure.rival) {
            (Some(ratio), Some(rival)) => format!(", {ratio:.2} of {rival}"),
            _ => String::new(),
        };
        let at_most = figure.name.strip_suffix(RATE).and_then(|of| {
            let name = format!("{of}{SHARE_AT_MOST}");
            figures.iter().find(|figure| figure.name == name)
        });
        let at_most = at_most.map_or(String::new(), |share| format!(", at most {:.2}", share.value));
        println!(
            "{verdict:<7} {:<58} {value:>12}, goal {}{compared}{at_most}",
            figure.name,
            figure.goal.as_deref().unwrap_or("")
        );
    }
    let (json, svg) = (output.join("blk.json"), output.join("blk.svg"));
    report::write_figures(&json, &figures)?;
    report::write(&svg, &plot::svg(&panels(samples, jobs, &distances)))?;
    println!("wrote {} and {}", json.display(), svg.display());
    Ok(())
}

fn table(samples: &[Sample], rows: &[What], medium: Medium, distance: Distance) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let names = Server::ALL.map(|server| server.name().to_owned());
    table.set_header([String::new()].into_iter().chain(names));
    for what in rows {
        let mut row = vec![match what {
            What::Alone(job) => job.name(),
            What::Reader(beside) => beside.name().to_owned(),
        }];
        for server in Server::ALL {
            let cell = Cell::of(samples, server, medium, *what, distance);
            row.push(cell.map_or_else(|| "n/a".to_owned(), |cell| cell.show(server)));
        }
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn figures(samples: &[Sample], jobs: &[Job], rival: bool, distances: &[Distance]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for distance in distances {
        for medium in Medium::ALL {
            for job in jobs {
                let cell = |server| Cell::of(samples, server, medium, What::Alone(*job), *distance);
                let name = |server: Server, what: &str| {
                    format!("blk/{}/{}/{}/{distance}/{what}", medium.name(), job.name(), server.name())
                };
                for server in Server::ALL.into_iter().filter(|server| server.mode().is_some()) {
                    let Some(ours) = cell(server) else { continue };
                    let name = |what: &str| name(server, what);
                    match server.coherent() {
                        None => compare(&mut figures, &ours, medium, *job, rival, cell, name),
                        Some(coherent) => {
                            let rate = Figure::new(name("rate"), ours.per_second, "/s");
                            let theirs = cell(coherent).map(|cell| cell.per_second);
                            let rate = rate.against(coherent.name(), theirs);
                            figures.push(match theirs {
                                Some(theirs) => {
                                    rate.with_goal(Goal::AtLeast((theirs * SOFTWARE_SHARE).round()))
                                }
                                None => rate,
                            });
                        }
                    }
                }
            }
        }
        for what in Beside::ALL {
            let cell = |server| {
                Cell::of(samples, server, Medium::Tmpfs, What::Reader(what), *distance)
                    .map(|cell| cell.p99_us)
            };
            if let Some(ours) = cell(OURS) {
                let name = format!("blk/tmpfs/reader-{}/{}/{distance}/p99", what.key(), OURS.name());
                let modes = Server::QEMU.into_iter().filter_map(|mode| Some((mode, cell(mode)?)));
                let (mode, theirs) = modes
                    .min_by(|one, other| one.1.total_cmp(&other.1))
                    .map_or((Server::Qemu, None), |(mode, p99)| (mode, Some(p99)));
                figures.push(Figure::new(name, ours, "us").against(rival_name(rival, mode), theirs));
            }
        }
    }
    figures
}

/// What flushing leaves of the rates with hardware coherence.
fn shares_at_most(samples: &[Sample], jobs: &[Job], distances: &[Distance], flush_ns: f64) -> Vec<Figure> {
    let mut figures = Vec::new();
    for distance in distances {
        for medium in Medium::ALL {
            for job in jobs {
                let cell = |server| Cell::of(samples, server, medium, What::Alone(*job), *distance);
                if cell(Server::SoftwareZeroCopy).is_none() {
                    continue;
                }
                let Some(hardware) = cell(Server::HardwareZeroCopy) else { continue };
                let server = Server::SoftwareZeroCopy.name();
                let of = format!("blk/{}/{}/{server}/{distance}", medium.name(), job.name());
                let share = floor::share_at_most(*job, hardware.per_second, flush_ns);
                figures.push(Figure::new(format!("{of}{SHARE_AT_MOST}"), share, "of the rate"));
            }
        }
    }
    figures
}

/// Ours, with hardware coherence, against the rivals.
fn compare(
    figures: &mut Vec<Figure>,
    ours: &Cell,
    medium: Medium,
    job: Job,
    rival: bool,
    cell: impl Fn(Server) -> Option<Cell>,
    name: impl Fn(&str) -> String,
) {
    // At its best: in which mode that is depends on the job.
    let modes = Server::QEMU.into_iter().filter_map(|mode| Some((mode, cell(mode)?)));
    let (quicker, theirs) = modes
        .max_by(|(_, one), (_, other)| one.per_second.total_cmp(&other.per_second))
        .map_or((Server::Qemu, None), |(mode, cell)| (mode, Some(cell)));
    let rival = rival_name(rival, quicker);
    for (server, what, rival, theirs) in [
        (Server::Qemu, "rate", rival, theirs),
        (Server::Plain, "rate-by-plain", Server::Plain.name(), cell(Server::Plain)),
    ] {
        if !server.can(medium, job) {
            continue;
        }
        let their_rate = theirs.map(|cell| cell.per_second);
        let rate = Figure::new(name(what), ours.per_second, "/s").against(rival, their_rate);
        figures.push(match (goal(server, medium, job), their_rate) {
            (Some(share), Some(rate_theirs)) => rate.with_goal(Goal::AtLeast((rate_theirs * share).round())),
            _ => rate,
        });
    }
    for (what, of) in [("p50", (|cell| cell.p50_us) as fn(&Cell) -> f64), ("p99", |cell| cell.p99_us)] {
        let figure = Figure::new(name(what), of(ours), "us");
        figures.push(figure.against(rival, theirs.as_ref().map(of)));
    }
    let [front, back] = ours.cpu_us;
    let total = Figure::new(name("cpu-per-request"), front + back, "us");
    figures.push(total.against(rival, theirs.map(|cell| cell.cpu_us[0])));
    figures.push(Figure::new(name("cpu-per-request-frontend"), front, "us"));
    figures.push(Figure::new(name("cpu-per-request-backend"), back, "us"));
    if let (1, Some(plain)) = (job.depth, cell(Server::Plain)) {
        let added = Figure::new(name("added-to-plain-p50"), ours.p50_us - plain.p50_us, "us");
        figures.push(added.with_goal(Goal::AtMost(ADDED_US_MAX)));
    }
}

fn rival_name(is_there: bool, mode: Server) -> &'static str {
    if is_there { mode.name() } else { "qemu-storage-daemon (not installed)" }
}

/// What a panel shows: rates over what varies between jobs that are alike otherwise.
#[derive(Clone, Copy)]
enum Over {
    Depth,
    Queues,
}

impl Over {
    const fn label(self) -> &'static str {
        match self {
            Self::Depth => "requests in flight",
            Self::Queues => "queues",
        }
    }

    /// Where a job stands on this axis, if it does: those over queues all have as many requests in flight.
    fn place(self, job: Job) -> Option<f64> {
        match self {
            Self::Depth => (job.queues == 1).then_some(job.depth.into()),
            Self::Queues => (job.depth == 32).then_some(job.queues.into()),
        }
    }
}

fn panels(samples: &[Sample], jobs: &[Job], distances: &[Distance]) -> Vec<Panel> {
    const SHOWN: [(u32, Over); 3] =
        [(4 << 10, Over::Depth), (4 << 10, Over::Queues), (128 << 10, Over::Queues)];
    let mut panels = Vec::new();
    for distance in distances {
        for medium in Medium::ALL {
            for (bytes, over) in SHOWN {
                for writes in [false, true] {
                    let alike = || jobs.iter().filter(move |job| job.writes == writes && job.bytes == bytes);
                    let series = Server::ALL.map(|server| Series {
                        dashed: false,
                        name: server.name().to_owned(),
                        points: alike()
                            .filter_map(|job| {
                                let place = over.place(*job)?;
                                let cell = Cell::of(samples, server, medium, What::Alone(*job), *distance)?;
                                Some((place, cell.per_second))
                            })
                            .collect(),
                    });
                    // One point is no line.
                    if series.iter().all(|series| series.points.len() < 2) {
                        continue;
                    }
                    let (kind, name) = (if writes { "writes" } else { "reads" }, medium.name());
                    panels.push(Panel {
                        title: format!("{} KiB random {kind}, {name}, cores {distance}", bytes >> 10),
                        x_label: over.label(),
                        y_label: "requests per second",
                        series: series.into(),
                    });
                }
            }
        }
    }
    panels
}
