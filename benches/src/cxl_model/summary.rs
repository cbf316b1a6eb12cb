//! The model's findings: tables for people, a plot, and figures for machines.

use std::path::Path;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use cxl_channel::ReceivePolicy;

use super::fit::{BYPASS_RATE, IDLE_NS, IDLE_RATE};
use super::link::{Link, PARAMETERS};
use super::predict::{Curve, KNOWN, Prediction, RATES, TOLERANCE};
use super::{Sensitivity, Summary};
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal};

fn name(policy: ReceivePolicy) -> (&'static str, &'static str) {
    match policy {
        ReceivePolicy::Bypass => ("bypass cache", "bypass"),
        ReceivePolicy::NaivePrefetch => ("naive prefetch", "naive-prefetch"),
        ReceivePolicy::InvalidateConsumed => ("+ invalidate consumed", "invalidate-consumed"),
        ReceivePolicy::InvalidatePrefetched => ("+ invalidate prefetched", "invalidate-prefetched"),
        ReceivePolicy::Adaptive => ("adaptive (the default)", "adaptive"),
    }
}

fn plain_table(header: impl IntoIterator<Item = String>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    table
}

fn align(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Prints the tables and writes plot and figures.
pub(super) fn write(summary: &Summary, output: &Path) -> Result<()> {
    let Summary { link, predicted, curves, sensitivity, .. } = summary;
    println!("Channels on a modelled CXL 2.0 link that is not coherent; 16 B messages, 8192 slots\n");
    println!("Parameters, in ns where nothing else is said:\n{}", parameters(link));
    println!(
        "Fitted to the paper's bypass variant ({BYPASS_RATE} M/s) and to its lone message ({IDLE_NS} ns); the rest is predicted.\n"
    );
    println!("{}", against_paper(summary));
    println!("Highest rate in M/s, and median / 99th percentile of latency in ns at rates in M/s:");
    println!("{}", rates(curves));
    println!("–: does not keep up. in batches: 32 at a time, no clock read for each.\n");
    if !sensitivity.is_empty() {
        println!("Each parameter 20 % lower / higher, the others as they are:");
        println!("{}", changes(predicted, sensitivity));
    }
    let figures = figures(summary);
    report::print_goals(&figures);
    let (json, svg) = (output.join("cxl-model.json"), output.join("cxl-model.svg"));
    report::write_figures(&json, &figures)?;
    report::write(&svg, &plot::svg(&[panel(curves)]))?;
    println!("wrote {} and {}", json.display(), svg.display());
    Ok(())
}

fn parameters(link: &Link) -> Table {
    let mut table = plain_table(["parameter", "value", ""].map(str::to_owned));
    table.add_row([
        "load".to_owned(),
        format!("{:.0}", link.load_ns()),
        format!("{} × {}", link.cxl_ratio, link.dram_ns),
    ]);
    for parameter in PARAMETERS.iter().filter(|parameter| parameter.slug != "load") {
        let mut copy = *link;
        let value = *(parameter.of)(&mut copy);
        let unit = match parameter.slug {
            "bandwidth" => "bytes/ns each way",
            "write-back" => "× load",
            "fill-buffers" | "store-buffer" => "entries",
            _ if parameter.fitted => "fitted",
            _ => "",
        };
        table.add_row([parameter.name.to_owned(), format!("{value:.1}"), unit.to_owned()]);
    }
    table
}

fn against_paper(summary: &Summary) -> Table {
    let slower = format!("{} × DRAM", Link::OTHER_HOST.cxl_ratio);
    let header = ["", "paper", "model", "off by", &slower, "off by"];
    let mut table = plain_table(header.map(str::to_owned));
    for (Prediction { known, value }, other) in summary.predicted.iter().zip(&summary.other_host) {
        let off = |value: f64| format!("{:+.0} %", (value / known.measured - 1.0) * 100.0);
        table.add_row([
            known.name.to_owned(),
            format!("{} {}", known.measured, known.unit),
            format!("{value:.1}"),
            off(*value),
            format!("{:.1}", other.value),
            off(other.value),
        ]);
    }
    align(table)
}

fn rates(curves: &[Curve]) -> Table {
    let fixed = ["", "max", "in batches"].map(str::to_owned);
    let mut table = plain_table(fixed.into_iter().chain(RATES.map(|rate| format!("{rate}"))));
    for curve in curves {
        let at = |rate: f64| {
            let found = curve.points.iter().find(|point| point.0.total_cmp(&rate).is_eq());
            found.map_or("–".to_owned(), |(_, found)| {
                format!("{:.0} / {:.0}", found.median_ns, found.p99_ns)
            })
        };
        let first = [
            name(curve.policy).0.to_owned(),
            format!("{:.1}", curve.highest.rate),
            format!("{:.1}", curve.batched.rate),
        ];
        table.add_row(first.into_iter().chain(RATES.map(at)));
    }
    align(table)
}

fn changes(predicted: &[Prediction], sensitivity: &[Sensitivity]) -> Table {
    let header = ["20 % lower / higher".to_owned()].into_iter();
    let mut table = plain_table(header.chain(KNOWN.iter().map(|known| known.name.to_owned())));
    for (number, parameter) in PARAMETERS.iter().enumerate() {
        let change = |place: usize, factor: f64| {
            let changed = sensitivity
                .iter()
                .find(|changed| changed.parameter == number && changed.factor.total_cmp(&factor).is_eq());
            changed.map_or(0.0, |changed| {
                (changed.predicted[place].value / predicted[place].value - 1.0) * 100.0
            })
        };
        let cells = (0..KNOWN.len())
            .map(|place| format!("{:+.0} / {:+.0} %", change(place, 0.8), change(place, 1.2)));
        table.add_row([parameter.name.to_owned()].into_iter().chain(cells));
    }
    align(table)
}

fn figures(summary: &Summary) -> Vec<Figure> {
    const PAPER: &str = "Oasis, measured";
    let Summary { predicted, other_host, curves, sensitivity, .. } = summary;
    let slower = format!("load-x{}-dram/", Link::OTHER_HOST.cxl_ratio);
    let hosts = [("", predicted), (&slower, other_host)];
    let against_paper = |(host, predicted): (&str, &Vec<Prediction>)| -> Vec<Figure> {
        let figure = |Prediction { known, value }: &Prediction| {
            Figure::new(format!("cxl-model/{host}{}", known.slug), *value, known.unit)
                .against(PAPER, Some(known.measured))
                .with_goal(Goal::Within { of: known.measured, part: TOLERANCE })
        };
        predicted.iter().map(figure).collect()
    };
    let mut figures: Vec<Figure> = hosts.into_iter().flat_map(against_paper).collect();
    for curve in curves {
        let slug = name(curve.policy).1;
        if curve.policy == ReceivePolicy::Adaptive {
            figures.push(
                Figure::new(format!("cxl-model/{slug}/max"), curve.highest.rate, "M/s")
                    .against(PAPER, Some(87.0)),
            );
        }
        figures.push(Figure::new(format!("cxl-model/{slug}/max-in-batches"), curve.batched.rate, "M/s"));
        for (rate, found) in &curve.points {
            let idle = rate.total_cmp(&IDLE_RATE).is_eq().then_some(IDLE_NS);
            let prefix = format!("cxl-model/{slug}");
            let mut figure = Figure::new(format!("{prefix}/at-{rate}M/p50"), found.median_ns, "ns");
            if let Some(idle) = idle {
                figure = figure.against(PAPER, Some(idle));
            }
            figures.push(figure);
            figures.push(Figure::new(format!("{prefix}/at-{rate}M/p99"), found.p99_ns, "ns"));
            figures.push(Figure::new(
                format!("{prefix}/at-{rate}M/lines-fetched-per-message"),
                found.lines_in_per_message,
                "lines",
            ));
        }
    }
    for changed in sensitivity {
        let slug = PARAMETERS[changed.parameter].slug;
        for (now, base) in changed.predicted.iter().zip(predicted) {
            figures.push(
                Figure::new(
                    format!("cxl-model/{slug}-x{}/{}", changed.factor, now.known.slug),
                    now.value,
                    now.known.unit,
                )
                .against("all parameters as they are", Some(base.value)),
            );
        }
    }
    figures
}

fn panel(curves: &[Curve]) -> Panel {
    let series = |curve: &Curve| Series {
        dashed: false,
        name: format!("{} (highest rate {:.1} M/s)", name(curve.policy).0, curve.highest.rate),
        points: curve.points.iter().map(|(rate, found)| (*rate, found.median_ns)).collect(),
    };
    Panel {
        title: "modelled CXL 2.0, 16 B messages (Oasis, Figure 6)".to_owned(),
        x_label: "rate, M messages/s",
        y_label: "median one-way latency, ns",
        series: curves.iter().map(series).collect(),
    }
}
