//! The model's findings: tables for people, plots, and figures for machines.

use std::path::Path;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};

use super::choice::Tried;
use super::control::Setting;
use super::experiments::{contended, pair};
use super::figures::{Apps, KEY, Row};
use super::parameters::{Fabric, KNOWN};
use super::scale::{Scale, Shares};
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal};

pub(super) struct Findings {
    pub(super) fabric: Fabric,
    /// What only matters to control was chosen among these.
    pub(super) tried: Vec<Tried>,
    pub(super) apps: Apps,
    pub(super) rows: Vec<Row>,
    pub(super) curves: Vec<Panel>,
    /// The parts of responses with each level of load, without control and with it.
    pub(super) levels: [[f64; 4]; 2],
    pub(super) scale: Scale,
    /// (parameter, factor, key figures)
    pub(super) sensitivity: Vec<(usize, f64, [f64; 8])>,
}

const PAPER: &str = "MemChannel, measured";
const STEP_GOAL_NS: f64 = 200.0;

/// The paper's Figures 9, 10 and 11.
pub(super) fn curves(fabric: &Fabric, apps: &Apps) -> Result<Vec<Panel>> {
    let mut panels = Vec::new();
    for (title, other_hosts, programs) in [
        ("contention in a host (Figure 9)", false, [&apps.bwaves, &apps.roms]),
        ("contention in the fabric (Figure 10)", true, [&apps.bc, &apps.pr]),
    ] {
        let mut series = Vec::new();
        for app in programs {
            for (setting, how) in [(Setting::Uncontrolled, "without"), (Setting::Paper, "with")] {
                let mut points = Vec::new();
                for percent in [20.0, 40.0, 60.0, 80.0, 100.0] {
                    let found = contended(fabric, app, other_hosts, percent / 100.0, setting)?;
                    points.push((percent, found.slowdown));
                }
                series.push(Series { dashed: false, name: format!("{} {how}", app.name), points });
            }
        }
        panels.push(Panel {
            title: title.to_owned(),
            x_label: "contending traffic, %",
            y_label: "slowdown",
            series,
        });
    }
    let mut series = Vec::new();
    for (setting, how) in [(Setting::Uncontrolled, "without"), (Setting::Paper, "with")] {
        let mut both = [Vec::new(), Vec::new()];
        for threads in [1, 3, 6, 10, 15] {
            let found = pair(fabric, [&apps.bwaves, &apps.mica], threads, setting)?;
            for (points, rate) in both.iter_mut().zip(found) {
                points.push((f64::from(threads), rate));
            }
        }
        for (app, points) in [&apps.bwaves, &apps.mica].into_iter().zip(both) {
            series.push(Series { dashed: false, name: format!("{} {how}", app.name), points });
        }
    }
    let title = "Bwaves and MICA on a host (Figure 11)".to_owned();
    panels.push(Panel { title, x_label: "threads of each", y_label: "GB/s", series });
    Ok(panels)
}

fn table(header: impl IntoIterator<Item = String>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    table
}

fn aligned(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

pub(super) fn write(found: &Findings, output: &Path) -> Result<()> {
    println!("The bandwidth of a modelled CXL fabric: one switch, one port of eight lanes\n");
    let mut parameters = table(["parameter", "value", "from"].map(str::to_owned));
    for parameter in &KNOWN {
        let mut copy = found.fabric;
        parameters.add_row([
            parameter.name.to_owned(),
            format!("{:.2}", *(parameter.of)(&mut copy)),
            parameter.source.to_owned(),
        ]);
    }
    let Apps { bwaves, roms, bc, pr, silo, mica } = &found.apps;
    for app in [bwaves, roms, bc, pr, silo, mica] {
        let value = format!("{:.1}", app.in_flight);
        let name = format!("{}: lines under way per thread", app.name);
        parameters.add_row([name, value, "fitted without control".to_owned()]);
    }
    println!("{parameters}\n");
    println!(
        "What only matters to control, chosen on Bwaves (Figure 9) alone: of what uses 96 % of the link, the least slowdown. Figures with control of all \
         others are held out."
    );
    println!("{}\n", choice(found));
    let mut rows = table(["", "paper", "model", "off by", ""].map(str::to_owned));
    for row in &found.rows {
        rows.add_row([
            row.what.clone(),
            if row.paper.is_nan() { row.unit.to_owned() } else { format!("{} {}", row.paper, row.unit) },
            format!("{:.2}", row.ours),
            row.off().map_or_else(String::new, |off| format!("{:+.0} %", off * 100.0)),
            row.basis.name().to_owned(),
        ]);
    }
    println!("{}\n", aligned(rows));
    explain(&found.rows);
    println!(
        "What responses say of the egress port's load while Bwaves shares it with contending threads of two other hosts:"
    );
    for (how, parts) in ["without control", "with control"].iter().zip(found.levels) {
        let [light, optimal, moderate, severe] = parts.map(|part| part * 100.0);
        println!(
            "  {how}: light load {light:.1} %, optimal load {optimal:.1} %, moderate overload {moderate:.1} %, severe overload {severe:.1} %"
        );
    }
    println!();
    if !found.sensitivity.is_empty() {
        println!("Each parameter 20 % lower / higher, the programs fitted anew:");
        println!("{}\n", sensitivity(found));
    }
    let Scale { step_ns, all_ns, settle_us, lines, shares } = &found.scale;
    println!("64 hosts × 256 VMs, two levels of switches, 16 devices, 8 tenants, weights of 1, 2 and 4:");
    println!(
        "  a scheduling step {step_ns:.0} ns per mchannel, {all_ns:.0} ns with its part of sums and shares"
    );
    println!(
        "  sums, records and shares {settle_us:.0} µs per host and K; each host publishes {lines} lines"
    );
    for Shares { narrow, used, fair } in shares {
        let used = used * 100.0;
        println!(
            "  {narrow} too narrow: {used:.1} % moved of what ideal shares would; VMs that are held back get {fair:.2} of theirs or \
             more (1st percentile)"
        );
    }
    println!();
    let figures = figures(found);
    report::print_goals(&figures);
    let (json, svg) = (output.join("memchannel.json"), output.join("memchannel.svg"));
    report::write_figures(&json, &figures)?;
    report::write(&svg, &plot::svg(&found.curves))?;
    println!("wrote {} and {}", json.display(), svg.display());
    Ok(())
}

fn choice(found: &Findings) -> Table {
    let mut table =
        table(["overload, lines", "δ", "told of a link", "slowdown", "link used, %", ""].map(str::to_owned));
    for Tried { fabric, slowdown, used } in &found.tried {
        let numbers = |it: &Fabric| [it.overload_lines, it.delta, it.told].map(f64::to_bits);
        let is_chosen = numbers(fabric) == numbers(&found.fabric);
        table.add_row([
            format!("{:.0}", fabric.overload_lines),
            format!("{}", fabric.delta),
            format!("{}", fabric.told),
            format!("{slowdown:.2}"),
            format!("{:.1}", used * 100.0),
            if is_chosen { "chosen" } else { "" }.to_owned(),
        ]);
    }
    aligned(table)
}

/// Says of all that is off by more than 25 % why it is.
fn explain(rows: &[Row]) {
    let far: Vec<&Row> = rows.iter().filter(|row| row.is_far_off()).collect();
    println!("Why some differ by more than 25 % (supposed, not tested):");
    let mut said: Vec<&str> = Vec::new();
    for row in far {
        match row.explanation() {
            Some(explanation) if said.contains(&explanation.why) => {}
            Some(explanation) => {
                println!("  {}", explanation.why);
                said.push(explanation.why);
            }
            None => println!("  {}: nobody knows", row.what),
        }
    }
    println!();
}

fn sensitivity(found: &Findings) -> Table {
    let header = [String::new()].into_iter().chain(KEY.map(str::to_owned));
    let mut changes = table(header);
    let of = |slug: &str| found.rows.iter().find(|row| row.slug == slug).map_or(f64::NAN, |row| row.ours);
    let base = [
        of("cached-slowdown"),
        of("full-latency"),
        of("fabric-read"),
        of("fabric-write"),
        of("blocks-share"),
        of("stride-4-read"),
        of("bwaves-with"),
        of("bwaves-used"),
    ];
    for pair in found.sensitivity.chunks(2) {
        let [lower, higher] = pair else { continue };
        let cells = (0..KEY.len()).map(|place| {
            let change = |values: &[f64; 8]| (values[place] / base[place] - 1.0) * 100.0;
            format!("{:+.0} / {:+.0} %", change(&lower.2), change(&higher.2))
        });
        changes.add_row([KNOWN[lower.0].name.to_owned()].into_iter().chain(cells));
    }
    aligned(changes)
}

fn figures(found: &Findings) -> Vec<Figure> {
    let mut figures: Vec<Figure> = found
        .rows
        .iter()
        .map(|row| {
            Figure::new(format!("memchannel/{}", row.slug), row.ours, row.unit)
                .against(PAPER, Some(row.paper).filter(|paper| !paper.is_nan()))
                .with_goal(row.goal)
        })
        .collect();
    let Scale { step_ns, all_ns, settle_us, lines: _, shares } = &found.scale;
    figures.push(
        Figure::new("memchannel/step".to_owned(), *step_ns, "ns").with_goal(Goal::AtMost(STEP_GOAL_NS)),
    );
    figures.push(Figure::new("memchannel/step-with-shares".to_owned(), *all_ns, "ns"));
    figures.push(Figure::new("memchannel/settle".to_owned(), *settle_us, "us"));
    for Shares { narrow, used, fair } in shares {
        let name = |what| format!("memchannel/scale/{narrow}/{what}");
        figures.push(Figure::new(name("used"), used * 100.0, "%").with_goal(Goal::AtLeast(96.0)));
        figures.push(Figure::new(name("fair"), *fair, "of the share").with_goal(Goal::AtLeast(0.9)));
    }
    for (parameter, factor, values) in &found.sensitivity {
        for (name, value) in KEY.iter().zip(values) {
            let name = format!("memchannel/{} x{factor}/{name}", KNOWN[*parameter].name);
            figures.push(Figure::new(name, *value, ""));
        }
    }
    figures
}
