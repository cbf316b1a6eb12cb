//! What the moves say: a table for people, a plot, and figures for machines.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};

use super::Move;
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal, median};

/// For how long a guest may be out of reach.
const GAP_MS_MAX: f64 = 100.0;

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Of all moves.
fn values(moves: &[Move], of: fn(&Move) -> f64) -> (f64, f64) {
    let all = || moves.iter().map(of);
    (median(all()).unwrap_or_default(), all().fold(0.0, f64::max))
}

type Row = (&'static str, &'static str, &'static str, fn(&Move) -> f64);

const ROWS: [Row; 5] = [
    ("out of reach", "gap", "ms", |it| ms(it.gap)),
    ("of which QEMU had it stand still", "stopped", "ms", |it| ms(it.stopped)),
    ("the rest", "rest", "ms", |it| ms(it.gap.saturating_sub(it.stopped))),
    ("echo requests lost", "lost", "packets", |it| u32::try_from(it.lost).map_or(f64::INFINITY, f64::from)),
    ("sender held up", "held-up", "ms", |it| ms(it.held_up)),
];

pub(super) fn show(moves: &[Move], output: &Path) -> Result<()> {
    let sent: usize = moves.iter().map(|it| it.sent).sum();
    println!(
        "A guest moves to another host, {} times, answering {sent} echo requests meanwhile",
        moves.len()
    );
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["", "median", "worst", ""]);
    let mut figures = Vec::new();
    for (name, slug, unit, of) in ROWS {
        let (median, worst) = values(moves, of);
        table.add_row([name.to_owned(), format!("{median:.1}"), format!("{worst:.1}"), unit.to_owned()]);
        for (what, value) in [("median", median), ("worst", worst)] {
            let figure = Figure::new(format!("migration/{slug}/{what}"), value, unit);
            figures.push(if slug == "gap" { figure.with_goal(Goal::AtMost(GAP_MS_MAX)) } else { figure });
        }
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}\n");
    report::print_goals(&figures);
    let (json, svg) = (output.join("migration.json"), output.join("migration.svg"));
    report::write_figures(&json, &figures)?;
    report::write(&svg, &plot::svg(&[panel(moves)]))?;
    println!("wrote {} and {}", json.display(), svg.display());
    Ok(())
}

fn panel(moves: &[Move]) -> Panel {
    let sorted = |name: &str, of: fn(&Move) -> f64| {
        let mut values: Vec<f64> = moves.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        let points = (1..).map(f64::from).zip(values).collect();
        Series { dashed: false, name: name.to_owned(), points }
    };
    Panel {
        title: "a guest moves to another host, each move".to_owned(),
        x_label: "move, sorted",
        y_label: "ms",
        series: vec![
            sorted("out of reach", |it| ms(it.gap)),
            sorted("QEMU had it stand still", |it| ms(it.stopped)),
            sorted("sender held up", |it| ms(it.held_up)),
        ],
    }
}
