//! What the rounds say: tables for people, plots, and figures for machines.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};

use super::{tcp, udp};
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal, median};

/// The median interruption that Oasis reports (section 5.3).
const PAPER_UDP_MS: f64 = 38.0;
/// How long it takes there until P99 of memcached is back.
const PAPER_TCP_MS: f64 = 133.0;
const UDP_MS_MAX: f64 = 10.0;
const TCP_MS_MAX: f64 = 50.0;
const PAPER: &str = "Oasis, as published";
/// Linux waits at least this long for an acknowledgement.
const RETRANSMISSION_MS: f64 = 200.0;
const AFTER_TIMER_MS_MAX: f64 = RETRANSMISSION_MS + 20.0;

/// All rounds.
#[derive(Default)]
pub(super) struct Measured {
    pub(super) undisturbed: Vec<udp::Round>,
    pub(super) failovers: Vec<udp::Round>,
    /// With two NICs in use at the same time.
    pub(super) rails: Vec<udp::Round>,
    pub(super) migrations: Vec<udp::Round>,
    pub(super) tcp: Vec<tcp::Round>,
}

/// Counts something of a round.
type Count = fn(&udp::Round) -> usize;

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn worst(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, f64::max)
}

fn count(rounds: &[udp::Round], of: Count) -> f64 {
    let sum: usize = rounds.iter().map(of).sum();
    u32::try_from(sum).map_or(f64::INFINITY, f64::from)
}

pub(super) fn show(measured: &Measured, rate: u32, output: &Path) -> Result<()> {
    println!("\nUDP, {rate} round trips per second through the pod");
    println!("{}", udp_table(measured));
    let mut panels = vec![udp_panel(measured)];
    if !measured.tcp.is_empty() {
        println!("\nRequests to memcached in a real guest over TCP, cable pulled");
        println!("{}", tcp_table(&measured.tcp));
        panels.push(tcp_panel(&measured.tcp));
    }
    let figures = figures(measured);
    println!();
    report::print_goals(&figures);
    report::write(&output.join("failover.svg"), &plot::svg(&panels))?;
    report::write_figures(&output.join("failover.json"), &figures)
}

fn udp_table(measured: &Measured) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "event",
        "rounds",
        "lost, median",
        "worst",
        "interruption, median [ms]",
        "worst",
        "since visible, median [ms]",
        "worst",
        "doubled",
        "out of order",
        "round trip, median [µs]",
        "longest [ms]",
        "sender held up, worst [ms]",
    ]);
    let kinds = [
        ("none", &measured.undisturbed),
        ("cable pulled", &measured.failovers),
        ("cable of one of two NICs in use pulled", &measured.rails),
        ("moved in order", &measured.migrations),
    ];
    for (name, rounds) in kinds {
        let lost = || rounds.iter().map(|it| u32::try_from(it.lost).map_or(f64::INFINITY, f64::from));
        let interruption = || rounds.iter().map(|it| ms(it.interruption));
        let since_visible = || rounds.iter().filter_map(|it| it.since_visible.map(ms));
        table.add_row([
            name.to_owned(),
            rounds.len().to_string(),
            format!("{:.0}", median(lost()).unwrap_or_default()),
            format!("{:.0}", worst(lost())),
            format!("{:.1}", median(interruption()).unwrap_or_default()),
            format!("{:.1}", worst(interruption())),
            cell(median(since_visible())),
            cell(since_visible().reduce(f64::max)),
            format!("{:.0}", count(rounds, |it| it.doubled)),
            format!("{:.0}", count(rounds, |it| it.reordered)),
            format!(
                "{:.0}",
                1e3 * median(rounds.iter().map(|it| ms(it.median_round_trip))).unwrap_or_default()
            ),
            format!("{:.1}", worst(rounds.iter().map(|it| ms(it.longest_round_trip)))),
            format!("{:.1}", worst(rounds.iter().map(|it| ms(it.held_up)))),
        ]);
    }
    align(table)
}

fn tcp_table(rounds: &[tcp::Round]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "retransmission timers",
        "rounds",
        "P99 before, median [ms]",
        "back after, median [ms]",
        "worst",
    ]);
    for (name, fired) in [("none fired", false), ("fired", true)] {
        let those = || rounds.iter().filter(move |it| (it.timers > 0) == fired);
        let back = || those().filter_map(|it| it.back_after().map(ms));
        table.add_row([
            name.to_owned(),
            those().count().to_string(),
            cell(median(those().filter_map(|it| it.before().map(ms)))),
            cell(median(back())),
            cell(back().reduce(f64::max)),
        ]);
    }
    align(table)
}

fn cell(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"))
}

fn align(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn udp_panel(measured: &Measured) -> Panel {
    let sorted = |rounds: &[udp::Round], of: fn(&udp::Round) -> Duration| {
        let mut values: Vec<f64> = rounds.iter().map(|it| ms(of(it))).collect();
        values.sort_by(f64::total_cmp);
        (1..).map(f64::from).zip(values).collect()
    };
    let series = |name: &str, points| Series { dashed: false, name: name.to_owned(), points };
    Panel {
        title: "UDP, each round".to_owned(),
        x_label: "round, sorted",
        y_label: "ms",
        series: vec![
            series("interruption, cable pulled", sorted(&measured.failovers, |it| it.interruption)),
            series(
                "the same since its host could know",
                sorted(&measured.failovers, |it| it.since_visible.unwrap_or_default()),
            ),
            series("interruption, one of two NICs in use", sorted(&measured.rails, |it| it.interruption)),
            series(
                "longest round trip, moved in order",
                sorted(&measured.migrations, |it| it.longest_round_trip),
            ),
            series(
                "longest round trip, undisturbed",
                sorted(&measured.undisturbed, |it| it.longest_round_trip),
            ),
            series("sender held up, cable pulled", sorted(&measured.failovers, |it| it.held_up)),
        ],
    }
}

fn tcp_panel(rounds: &[tcp::Round]) -> Panel {
    let median_after = |fired: bool| {
        let mut bins: std::collections::BTreeMap<Duration, Vec<f64>> = std::collections::BTreeMap::new();
        for round in rounds.iter().filter(|it| (it.timers > 0) == fired) {
            for (end, took) in round.after() {
                bins.entry(end).or_default().push(ms(took));
            }
        }
        bins.into_iter().filter_map(|(end, values)| Some((ms(end), median(values)?))).collect::<Vec<_>>()
    };
    let before = median(rounds.iter().filter_map(|it| it.before().map(ms))).unwrap_or_default();
    let series = |name: &str, points| Series { dashed: false, name: name.to_owned(), points };
    Panel {
        title: format!("memcached, P99 per {} ms, median of the rounds", tcp::BIN.as_millis()),
        x_label: "ms since the cable was pulled",
        y_label: "ms",
        series: vec![
            series("P99, no timer fired", median_after(false)),
            series("P99, a timer fired", median_after(true)),
            series("P99 before", vec![(ms(tcp::BIN), before), (3000.0, before)]),
        ],
    }
}

fn figures(measured: &Measured) -> Vec<Figure> {
    let mut figures = Vec::new();
    let interruption = || measured.failovers.iter().map(|it| ms(it.interruption));
    let lost = || measured.failovers.iter().map(|it| u32::try_from(it.lost).map_or(f64::INFINITY, f64::from));
    if let Some(value) = median(interruption()) {
        figures.push(
            Figure::new("UDP, cable pulled: interruption, median".to_owned(), value, "ms")
                .against(PAPER, Some(PAPER_UDP_MS)),
        );
    }
    let since_visible = || measured.failovers.iter().filter_map(|it| it.since_visible.map(ms));
    if let Some(value) = median(since_visible()) {
        let name = "UDP, cable pulled: interruption since its host could know, median";
        figures.push(Figure::new(name.to_owned(), value, "ms").with_goal(Goal::AtMost(UDP_MS_MAX)));
    }
    let mut plain = |name: &str, value: f64, unit| figures.push(Figure::new(name.to_owned(), value, unit));
    plain("UDP, cable pulled: interruption, worst", worst(interruption()), "ms");
    plain("UDP, cable pulled: interruption since its host could know, worst", worst(since_visible()), "ms");
    let visible = measured.failovers.iter().filter_map(|it| it.visible_after.map(ms));
    plain("UDP, cable pulled: its host could know after, median", median(visible).unwrap_or_default(), "ms");
    plain("UDP, cable pulled: lost, median", median(lost()).unwrap_or_default(), "packets");
    plain("UDP, cable pulled: lost, worst", worst(lost()), "packets");
    let of_rails = || measured.rails.iter().map(|it| u32::try_from(it.lost).map_or(f64::INFINITY, f64::from));
    let rail_interruption = || measured.rails.iter().map(|it| ms(it.interruption));
    plain(
        "UDP, one of two NICs in use: interruption, median",
        median(rail_interruption()).unwrap_or_default(),
        "ms",
    );
    plain("UDP, one of two NICs in use: interruption, worst", worst(rail_interruption()), "ms");
    plain("UDP, one of two NICs in use: lost, median", median(of_rails()).unwrap_or_default(), "packets");
    plain("UDP, one of two NICs in use: lost, worst", worst(of_rails()), "packets");
    let held_up = worst(measured.failovers.iter().map(|it| ms(it.held_up)));
    plain("sender held up by the machine, worst", held_up, "ms");
    plain("UDP, undisturbed: lost", count(&measured.undisturbed, |it| it.lost), "packets");
    let of_moves: [(&str, Count); 3] =
        [("lost", |it| it.lost), ("doubled", |it| it.doubled), ("out of order", |it| it.reordered)];
    for (what, of) in of_moves {
        let name = format!("UDP, moved in order: {what}");
        figures
            .push(Figure::new(name, count(&measured.migrations, of), "packets").with_goal(Goal::AtMost(0.0)));
    }
    for (what, fired, most) in
        [("no timer fired", false, TCP_MS_MAX), ("a timer fired", true, AFTER_TIMER_MS_MAX)]
    {
        let those = measured.tcp.iter().filter(|it| (it.timers > 0) == fired);
        let back: Vec<f64> = those.filter_map(|it| it.back_after().map(ms)).collect();
        if let Some(value) = median(back.iter().copied()) {
            let name = format!("memcached, {what} ({} rounds): P99 back, median", back.len());
            let rival = if fired { None } else { Some(PAPER_TCP_MS) };
            let figure = Figure::new(name, value, "ms").with_goal(Goal::AtMost(most));
            figures.push(if rival.is_some() { figure.against(PAPER, rival) } else { figure });
        }
    }
    figures
}
