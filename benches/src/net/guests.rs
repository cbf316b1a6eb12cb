//! Several guests of one frontend, all of which send as fast as they can: how much comes through altogether, how evenly it is shared,
//! and what a packet costs.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use comfy_table::{CellAlignment, Table, presets};

use super::ours::{Spread, Work};
use super::testpmd::{Forwarding, Side, Testpmd};
use super::{Bench, OURS, Server, WARM_UP, as_f64, seen_often};
use crate::cores::{self, Distance};
use crate::plot::{Panel, Series};
use crate::report::{Figure, Goal, median};

/// How many guests there are.
pub(super) const COUNTS: [usize; 5] = [1, 2, 4, 8, 16];
const FRAME_BYTES: u32 = 64;
/// How even it has to be, by Jain's index.
const JAIN_MIN: f64 = 0.99;

/// What came out of one run.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    server: Server,
    guests: usize,
    distance: Distance,
    packets_per_second: f64,
    jain: f64,
    /// Of our two sides, per packet.
    cpu_ns: Option<(f64, f64)>,
}

pub(super) fn name(guests: usize) -> String {
    format!("guests/{guests}")
}

/// How even shares are: 1 if all are equal, 1/n if one of n has everything (Jain, Chiu and Hawe, DEC TR-301).
fn jain(shares: &[u64]) -> f64 {
    let sum: f64 = shares.iter().map(|share| as_f64(*share)).sum();
    let squares: f64 = shares.iter().map(|share| as_f64(*share).powi(2)).sum();
    if squares == 0.0 { 0.0 } else { sum * sum / (as_f64(shares.len() as u64) * squares) }
}

impl Bench<'_> {
    pub(super) fn guests(&self, server: Server, guests: usize) -> Result<Sample> {
        cores::unpin(self.cores)?;
        let before_ns = self.cores.line_transfer_ns()?;
        let transmit = Forwarding::Transmit { frame_bytes: FRAME_BYTES };
        let (shares, seconds, cpu) = match server {
            Server::Ours(mode) => {
                let nic = "driver = 'null'\nmode = 'sink'";
                let ours = self.ours(mode, nic, Spread::ByTurns, guests, 0)?;
                let mut driver = self.testpmd(ours.sockets())?;
                driver.forward(transmit)?;
                thread::sleep(WARM_UP);
                let (before, began, work) = (ours.sent_by_each(), Instant::now(), ours.work());
                thread::sleep(self.run);
                let (after, took, done) = (ours.sent_by_each(), began.elapsed(), ours.work());
                driver.stop()?;
                let dropped = ours.dropped();
                ensure!(dropped.is_empty(), "the backend dropped packets: {dropped:?}");
                (differences(&before, &after), took.as_secs_f64(), Some((work, done)))
            }
            Server::Testpmd => {
                let sockets: Vec<_> =
                    (0..guests).map(|guest| self.directory.join(format!("rival{guest}.sock"))).collect();
                let mut rival =
                    Testpmd::start(Side::Vhost, &sockets, self.directory, self.cores, self.huge_pages)?;
                let mut driver = self.testpmd(&sockets)?;
                rival.forward(Forwarding::Receive)?;
                driver.forward(transmit)?;
                thread::sleep(WARM_UP);
                let received = |rival: &mut Testpmd| -> Result<Vec<u64>> {
                    Ok(rival.totals_of_each()?.iter().map(|totals| totals.received).collect())
                };
                let (before, began) = (received(&mut rival)?, Instant::now());
                thread::sleep(self.run);
                let (after, took) = (received(&mut rival)?, began.elapsed());
                driver.stop()?;
                (differences(&before, &after), took.as_secs_f64(), None)
            }
        };
        let distance = Distance::of(before_ns, self.cores.line_transfer_ns()?);
        let packets: u64 = shares.iter().sum();
        ensure!(packets > 0 && shares.len() == guests, "not every guest's packets came through");
        let cpu_ns = cpu.map(|(before, after): (Work, Work)| {
            let each = |spent: Duration| spent.as_secs_f64() * 1e9 / as_f64(packets);
            (
                each(after.frontend.saturating_sub(before.frontend)),
                each(after.backend.saturating_sub(before.backend)),
            )
        });
        let packets_per_second = as_f64(packets) / seconds;
        Ok(Sample { server, guests, distance, packets_per_second, jain: jain(&shares), cpu_ns })
    }
}

fn differences(before: &[u64], after: &[u64]) -> Vec<u64> {
    after.iter().zip(before).map(|(after, before)| after - before).collect()
}

/// The medians of all runs of one kind; of the evenness, the worst.
struct Cell {
    rate: f64,
    jain: f64,
    frontend_ns: Option<f64>,
    backend_ns: Option<f64>,
}

impl Cell {
    fn of(samples: &[Sample], server: Server, guests: usize, distance: Distance) -> Option<Self> {
        let matching = || {
            let same = move |it: &&Sample| (it.server, it.guests, it.distance) == (server, guests, distance);
            samples.iter().filter(same)
        };
        Some(Self {
            rate: median(matching().map(|it| it.packets_per_second))?,
            jain: matching().map(|it| it.jain).reduce(f64::min)?,
            frontend_ns: median(matching().filter_map(|it| Some(it.cpu_ns?.0))),
            backend_ns: median(matching().filter_map(|it| Some(it.cpu_ns?.1))),
        })
    }

    fn text(&self) -> String {
        let cpu = match (self.frontend_ns, self.backend_ns) {
            (Some(frontend), Some(backend)) => format!(" ({frontend:.0} + {backend:.0} ns)"),
            _ => String::new(),
        };
        format!("{:.2} M/s{cpu}, {:.4}", self.rate / 1e6, self.jain)
    }
}

/// Prints the tables.
pub(super) fn print(samples: &[Sample]) {
    if samples.is_empty() {
        return;
    }
    println!(
        "\nGuests of one frontend that send frames of {FRAME_BYTES} B: all packets per second (CPU time per packet in frontend + \
         backend), and how even the shares are (Jain's index)"
    );
    for distance in seen_often(samples, |it| it.distance) {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let names = Server::ALL.map(|server| server.name().to_owned());
        table.set_header([distance.to_string()].into_iter().chain(names));
        for guests in COUNTS {
            let cells = Server::ALL.map(|server| {
                Cell::of(samples, server, guests, distance).map_or("n/a".to_owned(), |cell| cell.text())
            });
            table.add_row([name(guests)].into_iter().chain(cells));
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("{table}");
    }
}

/// What they say, for machines.
pub(super) fn figures(samples: &[Sample]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for distance in seen_often(samples, |it| it.distance) {
        for guests in COUNTS {
            let cell = |server| Cell::of(samples, server, guests, distance);
            let rival = cell(Server::Testpmd);
            let hardware = cell(OURS);
            for server in Server::ALL {
                let Some(cell) = cell(server) else { continue };
                let figure = |what: &str, value, unit| {
                    let title = format!("net/{}/{}/{distance}/{what}", name(guests), server.name());
                    Figure::new(title, value, unit)
                };
                let rate = figure("rate", cell.rate, "/s");
                figures.push(match server {
                    Server::Testpmd => rate,
                    OURS => rate.against(Server::Testpmd.name(), rival.as_ref().map(|it| it.rate)),
                    Server::Ours(_) => rate.against(OURS.name(), hardware.as_ref().map(|it| it.rate)),
                });
                let even = figure("jain", cell.jain, "");
                figures.push(if server == Server::Testpmd {
                    even
                } else {
                    even.with_goal(Goal::AtLeast(JAIN_MIN))
                });
                for (what, value) in [("frontend-cpu", cell.frontend_ns), ("backend-cpu", cell.backend_ns)] {
                    figures.extend(value.map(|value| figure(what, value, "ns")));
                }
            }
        }
    }
    figures
}

/// The rates, to be drawn.
pub(super) fn panels(samples: &[Sample]) -> Vec<Panel> {
    let panel = |distance| Panel {
        title: format!("Guests of one frontend, cores {distance}"),
        x_label: "guests",
        y_label: "packets per second",
        series: Server::ALL
            .map(|server| Series {
                dashed: false,
                name: server.name().to_owned(),
                points: COUNTS
                    .into_iter()
                    .filter_map(|guests| {
                        let cell = Cell::of(samples, server, guests, distance)?;
                        Some((as_f64(guests as u64), cell.rate))
                    })
                    .collect(),
            })
            .into(),
    };
    seen_often(samples, |it| it.distance).into_iter().map(panel).collect()
}

#[cfg(test)]
mod tests {
    use super::jain;

    #[test]
    fn equal_shares_are_even_and_a_monopoly_is_not() {
        assert!((jain(&[7, 7, 7, 7]) - 1.0).abs() < 1e-12);
        assert!((jain(&[9, 0, 0]) - 1.0 / 3.0).abs() < 1e-12);
        assert!(jain(&[0, 0]) < 1e-12);
        assert!((jain(&[1, 3]) - 0.8).abs() < 1e-12);
    }
}
