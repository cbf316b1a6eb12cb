//! What the samples say: tables for people, a plot, and figures for machines.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use cxl_pool::CoherenceMode;

use super::{Job, Medium, Sample, Server};
use crate::cores::Distance;
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal, median};

const OURS: Server = Server::Ours(CoherenceMode::Hardware);
const SOFTWARE: Server = Server::Ours(CoherenceMode::Software);
/// What software coherence may cost.
const SOFTWARE_SHARE: f64 = 0.7;

/// The median of all runs of one kind.
struct Cell {
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_us: f64,
}

impl Cell {
    fn of(samples: &[Sample], server: Server, medium: Medium, job: Job, distance: Distance) -> Option<Self> {
        let matching = || {
            samples.iter().filter(move |sample| {
                (sample.server, sample.medium, sample.job, sample.distance) == (server, medium, job, distance)
            })
        };
        let time = |of: fn(&Sample) -> Duration| {
            median(matching().map(move |sample| of(sample).as_secs_f64() * 1e6))
        };
        Some(Self {
            per_second: median(matching().map(|sample| sample.measured.per_second))?,
            p50_us: time(|sample| sample.measured.p50)?,
            p99_us: time(|sample| sample.measured.p99)?,
            cpu_us: time(|sample| sample.measured.cpu_per_request)?,
        })
    }
}

/// The part of the rival's rate that ours shall reach.
fn share_of_rival(medium: Medium, job: Job) -> Option<f64> {
    match (medium, job.bytes >> 10, job.depth) {
        (Medium::Tmpfs, 4, 32) => Some(1.5),
        (Medium::Tmpfs, 128, 32) => Some(1.0),
        (Medium::Null, 4, 32 | 128) => Some(0.4),
        _ => None,
    }
}

/// Prints the tables and writes plot and figures.
pub(super) fn write(samples: &[Sample], jobs: &[Job], rival: bool, output: &Path) -> Result<()> {
    let count = |distance| samples.iter().filter(|sample| sample.distance == distance).count();
    // A distance that was seen now and then only has too few cells to compare.
    let common = |distance: &Distance| count(*distance) * 4 >= samples.len();
    let distances: Vec<Distance> = [Distance::Near, Distance::Far].into_iter().filter(common).collect();
    println!(
        "Disks: thousands of requests per second (median / 99th percentile in µs; CPU time per request in µs)"
    );
    println!(
        "Runs while the two cores were near: {}, far: {}, mixed: {}. Mixed ones, and less than a quarter, count for nothing.",
        count(Distance::Near),
        count(Distance::Far),
        count(Distance::Mixed)
    );
    for distance in &distances {
        for medium in Medium::ALL {
            println!("\n{}, {distance}\n{}", medium.name(), table(samples, jobs, medium, *distance));
        }
    }
    let figures = figures(samples, jobs, rival, &distances);
    println!();
    for figure in figures.iter().filter(|figure| figure.goal.is_some()) {
        let verdict = if figure.met == Some(true) { "met" } else { "MISSED" };
        let value = format!("{:.0} {}", figure.value, figure.unit);
        let ratio = figure.ratio.map(|ratio| format!(", {ratio:.2} of the rival's")).unwrap_or_default();
        println!(
            "{verdict:<7} {:<50} {value:>12}, goal {}{ratio}",
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

fn table(samples: &[Sample], jobs: &[Job], medium: Medium, distance: Distance) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let names = Server::ALL.map(|server| server.name().to_owned());
    table.set_header([String::new()].into_iter().chain(names));
    for job in jobs {
        let mut row = vec![job.name()];
        for server in Server::ALL {
            row.push(match Cell::of(samples, server, medium, *job, distance) {
                None => "n/a".to_owned(),
                Some(Cell { per_second, p50_us, p99_us, cpu_us }) => {
                    format!("{:.1} ({p50_us:.1} / {p99_us:.1}; {cpu_us:.1})", per_second / 1e3)
                }
            });
        }
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn figures(samples: &[Sample], jobs: &[Job], rival: bool, distances: &[Distance]) -> Vec<Figure> {
    let rival_name = if rival { Server::Qemu.name() } else { "qemu-storage-daemon (not installed)" };
    let mut figures = Vec::new();
    for distance in distances {
        for medium in Medium::ALL {
            for job in jobs {
                let cell = |server| Cell::of(samples, server, medium, *job, *distance);
                let (hardware, software, theirs) = (cell(OURS), cell(SOFTWARE), cell(Server::Qemu));
                let name = |server: Server, what: &str| {
                    format!("blk/{}/{}/{}/{distance}/{what}", medium.name(), job.name(), server.name())
                };
                if let Some(ours) = &hardware {
                    let rate = Figure::new(name(OURS, "rate"), ours.per_second, "/s")
                        .against(rival_name, theirs.as_ref().map(|cell| cell.per_second));
                    figures.push(match (share_of_rival(medium, *job), &theirs) {
                        (Some(share), Some(theirs)) => {
                            rate.with_goal(Goal::AtLeast((theirs.per_second * share).round()))
                        }
                        _ => rate,
                    });
                    for (what, value, of) in [
                        ("p50", ours.p50_us, theirs.as_ref().map(|cell| cell.p50_us)),
                        ("p99", ours.p99_us, theirs.as_ref().map(|cell| cell.p99_us)),
                        ("cpu-per-request", ours.cpu_us, theirs.as_ref().map(|cell| cell.cpu_us)),
                    ] {
                        figures.push(Figure::new(name(OURS, what), value, "us").against(rival_name, of));
                    }
                }
                if let Some(software) = &software {
                    let rate = Figure::new(name(SOFTWARE, "rate"), software.per_second, "/s")
                        .against(OURS.name(), hardware.as_ref().map(|cell| cell.per_second));
                    figures.push(match &hardware {
                        Some(ours) => {
                            rate.with_goal(Goal::AtLeast((ours.per_second * SOFTWARE_SHARE).round()))
                        }
                        None => rate,
                    });
                }
            }
        }
    }
    figures
}

fn panels(samples: &[Sample], jobs: &[Job], distances: &[Distance]) -> Vec<Panel> {
    let mut panels = Vec::new();
    for distance in distances {
        for medium in Medium::ALL {
            let small_reads = || jobs.iter().filter(|job| !job.writes && job.bytes == 4 << 10);
            let series = Server::ALL.map(|server| Series {
                name: server.name().to_owned(),
                points: small_reads()
                    .filter_map(|job| {
                        let cell = Cell::of(samples, server, medium, *job, *distance)?;
                        Some((f64::from(job.depth), cell.per_second))
                    })
                    .collect(),
            });
            panels.push(Panel {
                title: format!("4 KiB random reads, {}, cores {distance}", medium.name()),
                x_label: "requests in flight",
                y_label: "requests per second",
                series: series.into(),
            });
        }
    }
    panels
}
