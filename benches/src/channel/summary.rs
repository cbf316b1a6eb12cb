//! What the samples say: a table for people, a plot, and figures for machines.

use std::path::Path;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};

use super::Sample;
use super::variant::{OURS, Variant};
use crate::cores::Distance;
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal, median};

/// Below this part of the rate that was asked for, a run did not keep up, and its latency only says how long it lasted.
const KEPT_UP: f64 = 0.95;
/// The goals for 16 B messages. How many times the better rival's highest rate on coherent memory,
const fn coherent_goal(distance: Distance) -> f64 {
    if matches!(distance, Distance::Near) { 1.25 } else { 1.5 }
}

/// how many times the rate of the variant that bypasses the cache,
const fn bypass_goal(distance: Distance) -> f64 {
    if matches!(distance, Distance::Near) { 30.0 } else { 9.0 }
}

/// on coherent memory no worse a median than the better rival's at this rate in M/s,
const LOW_M: f64 = 1.0;
/// and on memory that is not, at the rate in the middle no worse a median than at the ones below and above it;
const HUMP_M: [f64; 3] = [LOW_M, 7.0, 14.0];
/// give or take as much as the medians of one and the same ring differ by from run to run.
const NO_WORSE: f64 = 1.1;

/// Samples of one kind, over all rounds.
struct Cell<'a> {
    samples: Vec<&'a Sample>,
}

impl Cell<'_> {
    fn of(
        samples: &[Sample],
        variant: Variant,
        words: usize,
        rate_m: Option<f64>,
        distance: Distance,
    ) -> Cell<'_> {
        let wanted = |sample: &&Sample| {
            sample.variant == variant
                && sample.words == words
                && sample.rate_m == rate_m
                && sample.distance == distance
        };
        Cell { samples: samples.iter().filter(wanted).collect() }
    }

    /// The geometric mean of both directions' medians.
    fn rate_m(&self) -> Option<f64> {
        let of = |turned| {
            let runs = self.samples.iter().filter(move |sample| sample.turned == turned);
            median(runs.map(|sample| sample.measured.rate_m))
        };
        Some((of(false)? * of(true)?).sqrt())
    }

    /// Median and 99th percentile, of the runs that kept up.
    fn latency_ns(&self) -> Option<(f64, f64)> {
        let kept_up =
            |sample: &&&Sample| sample.rate_m.is_some_and(|asked| sample.measured.rate_m >= asked * KEPT_UP);
        let latencies: Vec<_> =
            self.samples.iter().filter(kept_up).filter_map(|sample| sample.measured.latency).collect();
        let middle = median(latencies.iter().map(|latency| latency.median_ns))?;
        Some((middle, median(latencies.iter().map(|latency| latency.p99_ns))?))
    }
}

/// Prints the tables and writes plot and figures.
pub(crate) fn write(
    samples: &[Sample],
    rates: &[Option<f64>],
    lone: Vec<Figure>,
    output: &Path,
) -> Result<()> {
    let count = |distance| samples.iter().filter(|sample| sample.distance == distance).count();
    // A distance that was seen now and then only has too few cells to compare.
    let common = |distance: &Distance| count(*distance) * 4 >= samples.len();
    let distances: Vec<Distance> = [Distance::Near, Distance::Far].into_iter().filter(common).collect();
    println!("Message channels: highest rate in M/s; one-way latency as median / 99th percentile in ns");
    println!(
        "Runs while the two cores were near: {}, far: {}, mixed: {}. Mixed ones, and less than a quarter, count for nothing.",
        count(Distance::Near),
        count(Distance::Far),
        count(Distance::Mixed)
    );
    for distance in &distances {
        for words in [2, 8] {
            println!("\n{} B, {distance}\n{}", words * 8, table(samples, rates, words, *distance));
        }
    }
    println!("\n–: did not keep up with that rate. n/a: no run while the cores were so.");
    let mut figures = figures(samples, rates, &distances);
    figures.extend(lone);
    for figure in figures.iter().filter(|figure| figure.goal.is_some()) {
        let verdict = if figure.met == Some(true) { "met" } else { "MISSED" };
        let value = format!("{:.1} {}", figure.value, figure.unit);
        let ratio = figure.ratio.map(|ratio| format!(", {ratio:.2} of the rival's")).unwrap_or_default();
        println!(
            "{verdict:<7} {:<48} {value:>12}, goal {}{ratio}",
            figure.name,
            figure.goal.as_deref().unwrap_or("")
        );
    }
    let (json, svg) = (output.join("channel.json"), output.join("channel.svg"));
    report::write_figures(&json, &figures)?;
    report::write(&svg, &plot::svg(&panels(samples, rates, &distances)))?;
    println!("wrote {} and {}", json.display(), svg.display());
    Ok(())
}

fn table(samples: &[Sample], rates: &[Option<f64>], words: usize, distance: Distance) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let heading = |rate: &Option<f64>| rate.map_or("max".to_owned(), |rate| format!("at {rate} M/s"));
    table.set_header([String::new()].into_iter().chain(rates.iter().map(heading)));
    for variant in Variant::ALL {
        let mut row = vec![variant.name().to_owned()];
        for rate_m in rates {
            let cell = Cell::of(samples, variant, words, *rate_m, distance);
            row.push(match (rate_m, cell.rate_m()) {
                (_, None) => "n/a".to_owned(),
                (None, Some(rate)) => format!("{rate:.1}"),
                (Some(_), Some(_)) => match cell.latency_ns() {
                    Some((middle, p99)) => format!("{middle:.0} / {p99:.0}"),
                    None => "–".to_owned(),
                },
            });
        }
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn figures(samples: &[Sample], rates: &[Option<f64>], distances: &[Distance]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for distance in distances {
        for words in [2, 8] {
            for variant in Variant::ALL.into_iter().filter(|variant| !Variant::RIVALS.contains(variant)) {
                let of = |variant, rate_m| Cell::of(samples, variant, words, rate_m, *distance);
                let prefix = format!("channel/{}/{}B/{distance}", variant.slug(), words * 8);
                for rate_m in rates {
                    let ours = of(variant, *rate_m);
                    if let Some(rate) = rate_m {
                        let Some((middle, p99)) = ours.latency_ns() else { continue };
                        let quickest = quickest_rival(|rival| of(rival, *rate_m).latency_ns());
                        let (rival, theirs) = quickest.unzip();
                        let slug = rival.map_or("", Variant::slug);
                        let median_at = |rate| Some(of(variant, Some(rate)).latency_ns()?.0);
                        let goal = median_goal(variant, *rate, theirs.map(|latency| latency.0), median_at);
                        let figure = Figure::new(format!("{prefix}/p50-at-{rate}M"), middle, "ns")
                            .against(slug, theirs.map(|latency| latency.0));
                        figures.push(with_goal(figure, goal.filter(|_| words == 2)));
                        figures.push(
                            Figure::new(format!("{prefix}/p99-at-{rate}M"), p99, "ns")
                                .against(slug, theirs.map(|latency| latency.1)),
                        );
                    } else if let Some(rate) = ours.rate_m() {
                        let (rival, factor) = if variant == OURS {
                            (Variant::Bypass, bypass_goal(*distance))
                        } else {
                            (fastest_rival(|rival| of(rival, None).rate_m()), coherent_goal(*distance))
                        };
                        let theirs = of(rival, None).rate_m();
                        let goal =
                            theirs.map(|theirs| Goal::AtLeast((theirs * factor * 10.0).round() / 10.0));
                        let judged = words == 2 && (variant == OURS || variant == Variant::Coherent);
                        let figure = Figure::new(format!("{prefix}/max"), rate, "M/s");
                        figures
                            .push(with_goal(figure.against(rival.slug(), theirs), goal.filter(|_| judged)));
                    }
                }
            }
        }
    }
    figures
}

/// Which of the rivals has the lowest median where both kept up, and its latency.
fn quickest_rival(latency_of: impl Fn(Variant) -> Option<(f64, f64)>) -> Option<(Variant, (f64, f64))> {
    let measured = Variant::RIVALS.into_iter().filter_map(|rival| Some((rival, latency_of(rival)?)));
    measured.min_by(|one, other| one.1.0.total_cmp(&other.1.0))
}

/// Which of the rivals passes most.
fn fastest_rival(rate_of: impl Fn(Variant) -> Option<f64>) -> Variant {
    let measured = Variant::RIVALS.into_iter().filter_map(|rival| Some((rival, rate_of(rival)?)));
    measured.max_by(|one, other| one.1.total_cmp(&other.1)).map_or(Variant::Rtrb, |fastest| fastest.0)
}

fn with_goal(figure: Figure, goal: Option<Goal>) -> Figure {
    match goal {
        Some(goal) => figure.with_goal(goal),
        None => figure,
    }
}

/// What the median at a rate should be at most, given the rival's, and the variant's own at other rates.
fn median_goal(
    variant: Variant,
    rate_m: f64,
    rival_ns: Option<f64>,
    median_at: impl Fn(f64) -> Option<f64>,
) -> Option<Goal> {
    let is = |wanted: f64| (rate_m - wanted).abs() < f64::EPSILON;
    let [low, middle, high] = HUMP_M;
    if variant == Variant::Coherent && is(low) {
        return rival_ns.map(|rival_ns| Goal::AtMost((rival_ns * NO_WORSE).round()));
    }
    if variant == OURS && is(middle) {
        let most = median_at(low)?.max(median_at(high)?) * NO_WORSE;
        return Some(Goal::AtMost(most.round()));
    }
    None
}

fn panels(samples: &[Sample], rates: &[Option<f64>], distances: &[Distance]) -> Vec<Panel> {
    let mut panels = Vec::new();
    for distance in distances {
        for words in [2, 8] {
            let line = |variant: Variant, dashed: bool| Series {
                name: variant.name().to_owned(),
                dashed,
                points: rates
                    .iter()
                    .filter_map(|rate| {
                        let latency = Cell::of(samples, variant, words, *rate, *distance).latency_ns();
                        let (median, p99) = latency?;
                        Some(((*rate)?, if dashed { p99 } else { median }))
                    })
                    .collect(),
            };
            let series = Variant::ALL.map(|variant| [line(variant, false), line(variant, true)]);
            panels.push(Panel {
                title: format!("{} B messages, cores {distance}", words * 8),
                x_label: "rate, M messages/s",
                y_label: "one-way latency, ns: median, and P99 dashed",
                series: series.into_iter().flatten().collect(),
            });
        }
    }
    panels
}
