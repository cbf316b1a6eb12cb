//! What was found: a table for people, a plot, and figures for machines.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use vmm::slicing::Kind;

use super::latency::{Latencies, Latency};
use super::{Findings, Measured};
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal};

const RIVAL: &str = "cgroup processor quota";

/// `name` is that of the benchmark's files and figures.
pub(super) fn write(findings: &Findings, name: &str, output: &Path) -> Result<()> {
    let cost = findings.wake_up;
    println!(
        "a wake-up costs {:.1} us here: {:.1} % of windows of 1 ms; slicing chooses windows of {} us",
        cost.cost.as_secs_f64() * 1e6,
        100.0 * cost.overhead(Duration::from_millis(1)),
        cost.window().as_micros()
    );
    println!("a vCPU that nobody holds gets {:.1} %\n", findings.free);
    println!("{}", table(findings));
    let figures = figures(findings, name);
    report::print_goals(&figures);
    let series = findings.measured.iter().map(|one| Series {
        dashed: false,
        name: setting(one),
        points: one.obtained.iter().map(|it| (it.requested, it.percent)).collect(),
    });
    let panel = Panel {
        title: "share of a vCPU".to_owned(),
        x_label: "requested, %",
        y_label: "obtained, %",
        series: series.collect(),
    };
    report::write(&output.join(format!("{name}.svg")), &plot::svg(&[panel]))?;
    report::write_figures(&output.join(format!("{name}.json")), &figures)
}

/// How late timers and packets are, in a file of its own.
pub(super) fn write_latencies(latencies: &[Latency], output: &Path) -> Result<()> {
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    let name = |one: &Latency| one.held.map_or_else(|| "not held".to_owned(), |held| held.to_string());
    let cells =
        |seen: &Latencies| format!("{:.2} / {:.2} / {:.2}", ms(seen.median), ms(seen.p99), ms(seen.worst));
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["vCPU", "timers late by [ms]: median / P99 / worst", "echoes [ms]", "lost"]);
    let mut figures = Vec::new();
    for one in latencies {
        table.add_row([name(one), cells(&one.timers), cells(&one.echoes), one.lost.to_string()]);
        for (what, seen) in [("timers late", &one.timers), ("echoes", &one.echoes)] {
            for (which, value) in [("median", seen.median), ("P99", seen.p99), ("worst", seen.worst)] {
                figures.push(Figure::new(format!("slicing/{}/{what}/{which}", name(one)), ms(value), "ms"));
            }
        }
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("\n{table}");
    report::write_figures(&output.join("slicing-latency.json"), &figures)
}

fn setting(one: &Measured) -> String {
    format!("{} {} us", one.setting.kind, one.setting.window.as_micros())
}

fn table(findings: &Findings) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let mut header = vec!["requested %".to_owned()];
    header.extend(findings.measured.iter().map(|one| format!("{}: obtained % (spread)", setting(one))));
    table.set_header(header);
    let rows = findings.measured.first().map_or(0, |one| one.obtained.len());
    for row in 0..rows {
        let mut cells = vec![format!("{:.0}", findings.measured[0].obtained[row].requested)];
        for one in &findings.measured {
            let it = &one.obtained[row];
            let spread = format!(" ({:.1})", it.spread);
            let longer = if it.window > one.setting.window {
                format!(", in {} ms", it.window.as_millis())
            } else {
                String::new()
            };
            cells.push(format!("{:.2}{spread}{longer}", it.percent));
        }
        table.add_row(cells);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The farthest that any share was from what was asked for, in points.
fn worst(one: &Measured) -> f64 {
    one.obtained.iter().map(|it| (it.percent - it.requested).abs()).fold(0.0, f64::max)
}

fn figures(findings: &Findings, name: &str) -> Vec<Figure> {
    let mut figures = Vec::new();
    for one in &findings.measured {
        let rival = findings
            .measured
            .iter()
            .find(|other| other.setting.kind == Kind::Cgroup && other.setting.window == one.setting.window);
        let label = format!("{name}/{}/{}us", one.setting.kind, one.setting.window.as_micros());
        let mut figure = Figure::new(format!("{label}/worst error"), worst(one), "points");
        if one.setting.kind == Kind::Shim {
            figure = figure.against(RIVAL, rival.map(worst));
        }
        // Shorter windows have no goal: they need cheap wake-ups.
        figures.push(match one.setting.window.as_millis() {
            10.. => figure.with_goal(Goal::AtMost(1.0)),
            1.. => figure.with_goal(Goal::AtMost(2.0)),
            _ => figure,
        });
        for it in &one.obtained {
            let obtained = Figure::new(format!("{label}/{:.0}%", it.requested), it.percent, "%");
            figures.push(obtained);
            figures.push(Figure::new(format!("{label}/{:.0}%/spread", it.requested), it.spread, "points"));
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a small count")]
    let looks = findings.looks_at_full_duty as f64;
    figures
        .push(Figure::new(format!("{name}/shim/looks at full duty"), looks, "").with_goal(Goal::AtMost(0.0)));
    figures
}
