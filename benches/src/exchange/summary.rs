//! What the samples say: a table for people, and figures for machines.

use std::path::Path;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};

use super::{Sample, TRANSPORTS, Transport, WAYS, Waiting};
use crate::cores::Distance;
use crate::report::{self, Figure, Goal, median};

struct Cell {
    calls_per_s: f64,
    median_ns: f64,
    p99_ns: f64,
}

fn cell(samples: &[Sample], transport: Transport, way: (Waiting, usize), distance: Distance) -> Option<Cell> {
    let chosen: Vec<_> = samples
        .iter()
        .filter(|sample| {
            let case = sample.case;
            (case.transport, (case.waiting, case.depth), sample.distance) == (transport, way, distance)
        })
        .map(|sample| sample.measured)
        .collect();
    Some(Cell {
        calls_per_s: median(chosen.iter().map(|measured| measured.calls_per_s))?,
        median_ns: median(chosen.iter().map(|measured| measured.median_ns))?,
        p99_ns: median(chosen.iter().map(|measured| measured.p99_ns))?,
    })
}

fn name(transport: Transport) -> (&'static str, &'static str) {
    match transport {
        Transport::Hardware => ("hardware-coherent", "hardware"),
        Transport::Software => ("software-coherent", "software"),
        Transport::Seqpacket => ("UNIX seqpacket", "seqpacket"),
    }
}

fn describe((waiting, depth): (Waiting, usize)) -> (String, String) {
    match waiting {
        Waiting::Poll if depth == 1 => ("one call at a time, polling".to_owned(), "idle".to_owned()),
        Waiting::Poll => (format!("{depth} calls under way, polling"), format!("load-{depth}")),
        Waiting::Sleep => ("one call at a time, both asleep between".to_owned(), "asleep".to_owned()),
    }
}

/// Prints the table and writes the figures.
pub(super) fn write(samples: &[Sample], output: &Path) -> Result<()> {
    let count = |distance| samples.iter().filter(|sample| sample.distance == distance).count();
    // A distance that was seen now and then only has too few cells to compare.
    let common = |distance: &Distance| count(*distance) * 4 >= samples.len();
    println!("Request and response of 48 B: thousands of calls per second (median / 99th percentile in ns)");
    println!(
        "Runs while the two cores were near: {}, far: {}, mixed: {}. Mixed ones, and less than a quarter, count for nothing.",
        count(Distance::Near),
        count(Distance::Far),
        count(Distance::Mixed)
    );
    let mut figures = Vec::new();
    for distance in [Distance::Near, Distance::Far].into_iter().filter(common) {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table
            .set_header([distance.to_string()].into_iter().chain(TRANSPORTS.map(|it| name(it).0.to_owned())));
        for way in WAYS {
            let (text, slug) = describe(way);
            let mut row = vec![text];
            for transport in TRANSPORTS {
                let found = cell(samples, transport, way, distance);
                row.push(found.as_ref().map_or("n/a".to_owned(), |cell| {
                    format!("{:.0} ({:.0} / {:.0})", cell.calls_per_s / 1e3, cell.median_ns, cell.p99_ns)
                }));
                if let (Some(cell), false) = (&found, transport == Transport::Seqpacket) {
                    add_figures(&mut figures, samples, cell, (transport, way, distance), &slug);
                }
            }
            table.add_row(row);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("\n{table}");
    }
    println!();
    report::print_goals(&figures);
    let json = output.join("exchange.json");
    report::write_figures(&json, &figures)?;
    println!("wrote {}", json.display());
    Ok(())
}

fn add_figures(
    figures: &mut Vec<Figure>,
    samples: &[Sample],
    ours: &Cell,
    (transport, way, distance): (Transport, (Waiting, usize), Distance),
    slug: &str,
) {
    let rival = cell(samples, Transport::Seqpacket, way, distance);
    let rival_name = name(Transport::Seqpacket).1;
    let prefix = format!("exchange/{}/{slug}/{distance}", name(transport).1);
    let theirs = rival.as_ref().map(|cell| cell.calls_per_s);
    let rate = Figure::new(format!("{prefix}/calls"), ours.calls_per_s, "/s").against(rival_name, theirs);
    figures.push(match theirs {
        Some(theirs) => rate.with_goal(Goal::AtLeast(theirs.round())),
        None => rate,
    });
    for (quantile, ours, theirs) in [
        ("p50", ours.median_ns, rival.as_ref().map(|cell| cell.median_ns)),
        ("p99", ours.p99_ns, rival.as_ref().map(|cell| cell.p99_ns)),
    ] {
        figures.push(Figure::new(format!("{prefix}/{quantile}"), ours, "ns").against(rival_name, theirs));
    }
}
