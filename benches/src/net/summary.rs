//! What the samples say: tables for people, a plot, and figures for machines.

use std::path::Path;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};

use super::{Job, Measured, OURS, SOFTWARE, Sample, Server, Way, as_f64, devices, guests, seen_often};
use crate::cores::Distance;
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal, median};

/// What software coherence may cost.
const SOFTWARE_SHARE: f64 = 0.7;
/// CPU time per small packet.
const FRONTEND_NS_MAX: f64 = 100.0;
const BACKEND_NS_MAX: f64 = 50.0;
/// What our hops may add to the median round trip.
const ADDED_NS_MAX: f64 = 4000.0;

/// The medians of all runs of one kind. What does not apply is none.
#[derive(Default)]
struct Cell {
    rate: Option<f64>,
    frontend_ns: Option<f64>,
    backend_ns: Option<f64>,
    p50_ns: Option<f64>,
    p99_ns: Option<f64>,
    lost: u64,
}

impl Cell {
    fn of(samples: &[Sample], server: Server, job: Job, distance: Distance) -> Self {
        let matching = || {
            let same =
                |sample: &&Sample| (sample.server, sample.job, sample.distance) == (server, job, distance);
            samples.iter().filter(same).map(|sample| &sample.measured)
        };
        let of_rates = |get: fn(f64, Option<f64>, Option<f64>) -> Option<f64>| {
            median(matching().filter_map(|measured| match measured {
                Measured::Rate { packets_per_second, frontend_ns, backend_ns } => {
                    get(*packets_per_second, *frontend_ns, *backend_ns)
                }
                Measured::RoundTrips(_) => None,
            }))
        };
        let latencies = || {
            matching().filter_map(|measured| match measured {
                Measured::RoundTrips(latencies) => Some(latencies),
                Measured::Rate { .. } => None,
            })
        };
        let quantile =
            |quantile: f64| median(latencies().map(|it| as_f64(it.ns.value_at_quantile(quantile))));
        Self {
            rate: of_rates(|rate, _, _| Some(rate)),
            frontend_ns: of_rates(|_, frontend, _| frontend),
            backend_ns: of_rates(|_, _, backend| backend),
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            lost: latencies().map(|it| it.lost).sum(),
        }
    }

    fn text(&self, job: Job) -> String {
        if let (Some(p50), Some(p99)) = (self.p50_ns, self.p99_ns) {
            let lost = if self.lost > 0 { format!(", {} lost", self.lost) } else { String::new() };
            return format!("{:.2} / {:.2} µs{lost}", p50 / 1e3, p99 / 1e3);
        }
        let Some(rate) = self.rate else { return "n/a".to_owned() };
        let gigabits = rate * f64::from(job.frame_bytes) * 8.0 / 1e9;
        let cpu = match (self.frontend_ns, self.backend_ns) {
            (Some(frontend), Some(backend)) => format!(" ({frontend:.0} + {backend:.0} ns)"),
            _ => String::new(),
        };
        format!("{:.2} M/s, {gigabits:.1} Gbit/s{cpu}", rate / 1e6)
    }
}

/// The part of the rival's rate that ours shall reach; none where long frames are copied twice, which the rival does once.
fn share_of_rival(job: Job) -> Option<f64> {
    match job.way {
        _ if job.frame_bytes <= 64 => Some(0.4),
        Way::Lent => Some(0.6),
        _ => None,
    }
}

/// Prints the tables and writes plot and figures.
pub(super) fn write(
    samples: &[Sample],
    jobs: &[Job],
    shared: &[guests::Sample],
    to_devices: &[devices::Sample],
    rival: bool,
    output: &Path,
) -> Result<()> {
    let count = |distance| samples.iter().filter(|sample| sample.distance == distance).count();
    let distances = seen_often(samples, |sample| sample.distance);
    println!(
        "Networks: packets per second (CPU time per packet in frontend + backend); round trips: median / 99th percentile"
    );
    println!(
        "Runs while the two cores were near: {}, far: {}, mixed: {}. Mixed ones, and less than a quarter, count for nothing.",
        count(Distance::Near),
        count(Distance::Far),
        count(Distance::Mixed)
    );
    for distance in &distances {
        println!("\n{distance}\n{}", table(samples, jobs, *distance));
    }
    guests::print(shared);
    devices::print(to_devices);
    let mut figures = figures(samples, jobs, rival, &distances);
    figures.extend(guests::figures(shared));
    figures.extend(devices::figures(to_devices));
    println!();
    for figure in figures.iter().filter(|figure| figure.goal.is_some()) {
        let verdict = if figure.met == Some(true) { "met" } else { "MISSED" };
        let value = if figure.unit.is_empty() {
            format!("{:.4}", figure.value)
        } else {
            format!("{:.0} {}", figure.value, figure.unit)
        };
        let rival = figure.rival.as_deref().unwrap_or("the rival");
        let ratio = figure.ratio.map(|ratio| format!(", {ratio:.2} of {rival}'s")).unwrap_or_default();
        println!(
            "{verdict:<7} {:<56} {value:>14}, goal {}{ratio}",
            figure.name,
            figure.goal.as_deref().unwrap_or("")
        );
    }
    let (json, svg) = (output.join("net.json"), output.join("net.svg"));
    report::write_figures(&json, &figures)?;
    let mut panels = panels(samples, jobs, &distances);
    panels.extend(guests::panels(shared));
    panels.extend(devices::panels(to_devices));
    report::write(&svg, &plot::svg(&panels))?;
    println!("wrote {} and {}", json.display(), svg.display());
    Ok(())
}

fn table(samples: &[Sample], jobs: &[Job], distance: Distance) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let names = Server::ALL.map(|server| server.name().to_owned());
    table.set_header([String::new()].into_iter().chain(names));
    for job in jobs {
        let cells = Server::ALL.map(|server| Cell::of(samples, server, *job, distance).text(*job));
        table.add_row([job.name()].into_iter().chain(cells));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn figures(samples: &[Sample], jobs: &[Job], rival: bool, distances: &[Distance]) -> Vec<Figure> {
    let rival_name = if rival { Server::Testpmd.name() } else { "dpdk-testpmd vhost (not installed)" };
    let mut figures = Vec::new();
    for distance in distances {
        for job in jobs {
            let cell = |server| Cell::of(samples, server, *job, *distance);
            let (hardware, software, theirs) = (cell(OURS), cell(SOFTWARE), cell(Server::Testpmd));
            let name = |server: Server, what: &str| {
                format!("net/{}/{}/{distance}/{what}", job.name(), server.name())
            };
            if job.way == Way::RoundTrip {
                for (server, cell) in [(OURS, &hardware), (SOFTWARE, &software)] {
                    let (Some(p50), Some(p99)) = (cell.p50_ns, cell.p99_ns) else { continue };
                    figures
                        .push(Figure::new(name(server, "p50"), p50, "ns").against(rival_name, theirs.p50_ns));
                    figures
                        .push(Figure::new(name(server, "p99"), p99, "ns").against(rival_name, theirs.p99_ns));
                    if let Some(baseline) = theirs.p50_ns {
                        let added = Figure::new(name(server, "p50-added"), p50 - baseline, "ns");
                        let goal = Goal::AtMost(ADDED_NS_MAX);
                        figures.push(if server == OURS { added.with_goal(goal) } else { added });
                    }
                }
                continue;
            }
            if let Some(ours) = hardware.rate {
                let rate = Figure::new(name(OURS, "rate"), ours, "/s").against(rival_name, theirs.rate);
                figures.push(match theirs.rate.zip(share_of_rival(*job)) {
                    Some((theirs, share)) => rate.with_goal(Goal::AtLeast((theirs * share).round())),
                    None => rate,
                });
            }
            for (server, cell) in [(OURS, &hardware), (SOFTWARE, &software)] {
                for (what, value, most) in [
                    ("frontend-cpu", cell.frontend_ns, FRONTEND_NS_MAX),
                    ("backend-cpu", cell.backend_ns, BACKEND_NS_MAX),
                ] {
                    let Some(value) = value else { continue };
                    let figure = Figure::new(name(server, what), value, "ns");
                    let judged = server == OURS && job.frame_bytes <= 64;
                    figures.push(if judged { figure.with_goal(Goal::AtMost(most)) } else { figure });
                }
            }
            if let Some(ours) = software.rate {
                let rate =
                    Figure::new(name(SOFTWARE, "rate"), ours, "/s").against(OURS.name(), hardware.rate);
                figures.push(match hardware.rate {
                    Some(hardware) => rate.with_goal(Goal::AtLeast((hardware * SOFTWARE_SHARE).round())),
                    None => rate,
                });
            }
        }
    }
    figures
}

fn panels(samples: &[Sample], jobs: &[Job], distances: &[Distance]) -> Vec<Panel> {
    let mut panels = Vec::new();
    for distance in distances {
        for (way, title, y_label) in [
            (Way::FromGuest, "from the guest", "packets per second"),
            (Way::Lent, "from a guest whose memory lies in the pool", "packets per second"),
            (Way::ToGuest, "to the guest", "packets per second"),
            (Way::RoundTrip, "there and back, one at a time", "median in ns"),
        ] {
            let series = Server::ALL.map(|server| Series {
                dashed: false,
                name: server.name().to_owned(),
                points: jobs
                    .iter()
                    .filter(|job| job.way == way)
                    .filter_map(|job| {
                        let cell = Cell::of(samples, server, *job, *distance);
                        Some((f64::from(job.frame_bytes), cell.rate.or(cell.p50_ns)?))
                    })
                    .collect(),
            });
            panels.push(Panel {
                title: format!("Packets {title}, cores {distance}"),
                x_label: "bytes of a frame",
                y_label,
                series: series.into(),
            });
        }
    }
    panels
}
