//! The paper's experiments on the simulated fabric.

use anyhow::Result;

use super::control::{Setting, Signal};
use super::fabric::{Found, Simulation, Stream};
use super::parameters::{Fabric, whole};

/// Without control, in µs: queues settle before anything is counted.
const SETTLE_US: f64 = 20.0;
const COUNT_US: f64 = 200.0;
/// With it, shares do, in K; and then swing for some K around where they belong. The paper's:
const SETTLE_KS: f64 = 24.0;
const COUNT_KS: f64 = 40.0;
/// A pod's, of which each is as long as 20 of those. Without a signal shares take longer to settle.
const POD_SETTLE_KS: f64 = 50.0;
const PROBED_SETTLE_KS: f64 = 20.0;
const POD_COUNT_KS: f64 = 10.0;

/// How long to simulate before anything is counted, and while it is, in µs.
fn times_us(fabric: &Fabric, setting: Setting) -> (f64, f64) {
    match setting {
        Setting::Uncontrolled => (SETTLE_US, COUNT_US),
        // Whatever K is: else a longer one would be given more time.
        Setting::Paper => (SETTLE_KS * Fabric::PAPER.k_us, COUNT_KS * Fabric::PAPER.k_us),
        Setting::Pod(Signal::Off) => (POD_SETTLE_KS * fabric.k_us, POD_COUNT_KS * fabric.k_us),
        Setting::Pod(Signal::Probe) => (PROBED_SETTLE_KS * fabric.k_us, POD_COUNT_KS * fabric.k_us),
    }
}

pub(super) fn run(fabric: &Fabric, streams: &[Stream], setting: Setting) -> Result<Vec<Found>> {
    let mut simulation = Simulation::new(fabric, streams, setting)?;
    let (settle_us, count_us) = times_us(fabric, setting);
    simulation.run(settle_us)?;
    simulation.run(count_us)
}

fn blocks(fabric: &Fabric, host: usize, write: bool, threads: u32) -> Stream {
    let in_flight = if write { fabric.block_writes } else { fabric.block_reads };
    Stream { host, in_flight, block: 64, threads, ..lone(write) }
}

fn lone(write: bool) -> Stream {
    Stream {
        host: 0,
        write,
        in_flight: 1.0,
        block: 1,
        threads: 1,
        egress: 0,
        pause_ns: 0.0,
        tenant: 0,
        weight: 1.0,
    }
}

/// Contending traffic on the same host, or half of it on each of two others: one port alone cannot congest another one.
fn contending(fabric: &Fabric, other_hosts: bool, write: bool, threads: u32) -> Vec<Stream> {
    if other_hosts {
        let half = threads / 2;
        vec![blocks(fabric, 1, write, threads - half), blocks(fabric, 2, write, half)]
    } else {
        vec![blocks(fabric, 0, write, threads)]
    }
}

/// Latency of a lone access beside 4 KiB blocks, in ns.
pub(super) fn beside_blocks(fabric: &Fabric, other_hosts: bool, write: bool, threads: u32) -> Result<f64> {
    let mut streams = vec![lone(write)];
    streams.extend(contending(fabric, other_hosts, write, threads));
    Ok(run(fabric, &streams, Setting::Uncontrolled)?[0].latency_ns)
}

/// Figure 3-a: a program whose data lies in the last-level cache, as far as others leave it there.
pub(super) fn cached(fabric: &Fabric) -> Result<f64> {
    let loaded = beside_blocks(fabric, false, false, whole(fabric.background))?;
    Ok((1.0 - fabric.llc_lost) * fabric.llc_ns + fabric.llc_lost * loaded)
}

/// Figure 4-b: how long a lone line takes from one device to another beside threads that do the same with blocks of so many lines, in ns. Who
/// copies reads a block and then writes it, so half of the threads are at either; devices have ports of their own.
fn copy_beside(fabric: &Fabric, lines: u32, threads: u32) -> Result<f64> {
    let one_way = |write: bool| {
        let most = if write { fabric.block_writes } else { fabric.block_reads };
        let in_flight = f64::from(lines).min(most);
        let others = |host, threads| Stream { block: lines, threads, in_flight, host, ..lone(write) };
        let streams = [lone(write), others(1, threads / 2), others(2, threads - threads / 2)];
        Ok(run(fabric, &streams, Setting::Uncontrolled)?[0].latency_ns)
    };
    let sum: Result<f64> = [false, true].into_iter().map(one_way).sum();
    sum
}

/// Figure 4-b: the largest blocks, in bytes, that leave such a copy within a tenth of what it takes alone.
pub(super) fn harmless_block(fabric: &Fabric) -> Result<f64> {
    let threads = whole(fabric.background / 2.0);
    let alone = copy_beside(fabric, 1, 0)?;
    let mut harmless = 0.0;
    for lines in [1, 2, 4, 8, 16, 32, 64] {
        if copy_beside(fabric, lines, threads)? > 1.1 * alone {
            break;
        }
        harmless = f64::from(lines) * super::fabric::LINE;
    }
    Ok(harmless)
}

/// Figure 4-c: what 4 KiB blocks on four cores leave to single lines on four others, in per cent of the link for the blocks.
pub(super) fn blocks_against_lines(fabric: &Fabric) -> Result<f64> {
    let lines = Stream { threads: 4, ..lone(false) };
    let found = run(fabric, &[lines, blocks(fabric, 0, false, 4)], Setting::Uncontrolled)?;
    Ok(found[1].rate / (found[0].rate + found[1].rate) * 100.0)
}

/// Table 1: four cores with a stride; GB/s of use.
pub(super) fn strided(fabric: &Fabric, write: bool, stride: f64) -> Result<f64> {
    let without = if write { fabric.strided_writes } else { fabric.strided_reads };
    // Of what the prefetcher is ahead by, one line in `stride` is of use, and it gets going one time in `stride`.
    let useful = without + fabric.prefetched / (stride * stride);
    let useless = fabric.prefetched / stride * (1.0 - 1.0 / stride);
    let of_use = Stream { in_flight: useful, threads: 4, ..lone(write) };
    let mut streams = vec![of_use];
    if useless > 0.0 {
        streams.push(Stream { in_flight: useless.max(0.25), ..of_use });
    }
    Ok(run(fabric, &streams, Setting::Uncontrolled)?[0].rate)
}

/// Figure 5: four cores that read line after line with so many NOPs between; GB/s.
///
/// What keeps loads under way beside each other becomes less in two ways: of a core's window fewer instructions are loads, and the prefetcher, which follows the
/// loads as they are issued, is ahead by as many fewer. And between two loads a core is busy for as long as it takes to retire the NOPs.
pub(super) fn perturbed(fabric: &Fabric, nops: f64) -> Result<f64> {
    let in_window = fabric.instructions / (nops + fabric.load_instructions);
    let under_way = (fabric.strided_reads + fabric.prefetched).min(in_window).max(1.0);
    let pause_ns = (nops + fabric.load_instructions) / fabric.retired_per_ns;
    let stream = Stream { in_flight: under_way, threads: 4, pause_ns, ..lone(false) };
    Ok(run(fabric, &[stream], Setting::Uncontrolled)?[0].rate)
}

/// Two egress ports: how much longer a lone read takes through one that nobody else uses, on a host whose other threads fill the other one. Their lines stand before it in
/// the lanes of the host's port.
pub(super) fn beside_another_egress(fabric: &Fabric) -> Result<f64> {
    let elsewhere = Stream { egress: 1, ..lone(false) };
    let alone = run(fabric, &[elsewhere], Setting::Uncontrolled)?[0].latency_ns;
    let mut streams = vec![elsewhere];
    streams.extend(contending(fabric, false, false, whole(fabric.background)));
    // Two other hosts send through the full one, too: it is the egress port that is short, and not this host's own.
    streams.extend(contending(fabric, true, false, whole(fabric.background)));
    Ok(run(fabric, &streams, Setting::Uncontrolled)?[0].latency_ns / alone)
}

/// Two egress ports with programs of a host each, and contending threads of two other hosts through the first one: what a program gets through the second one with
/// control, as a part of what it has alone.
pub(super) fn left_alone(fabric: &Fabric, app: &App, setting: Setting) -> Result<f64> {
    let through = |egress| Stream { egress, ..app.stream(fabric.program_threads()) };
    let alone = run(fabric, &[through(1)], Setting::Uncontrolled)?[0].rate;
    let mut streams = vec![Stream { host: 3, ..through(1) }, through(0)];
    streams.extend(contending(fabric, true, false, whole(fabric.background)));
    Ok(run(fabric, &streams, setting)?[0].rate / alone)
}

/// What responses say of the egress port's load (DevLoad) while a program and contending threads of its host share it: the parts of the four levels.
pub(super) fn levels(fabric: &Fabric, app: &App, setting: Setting) -> Result<[f64; 4]> {
    let mut streams = vec![app.stream(fabric.program_threads())];
    streams.extend(contending(fabric, true, false, whole(fabric.background)));
    let mut simulation = Simulation::new(fabric, &streams, setting)?;
    let (settle_us, count_us) = times_us(fabric, setting);
    simulation.run(settle_us)?;
    simulation.run(count_us)?;
    Ok(simulation.levels())
}

/// A program of Figures 9 to 11: its lines under way per thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct App {
    pub(super) name: &'static str,
    pub(super) in_flight: f64,
}

impl App {
    fn stream(&self, threads: u32) -> Stream {
        Stream { in_flight: self.in_flight, threads, ..lone(false) }
    }
}

/// What contending traffic does to a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contended {
    pub(super) slowdown: f64,
    /// Of the link.
    pub(super) used: f64,
    pub(super) latency_ns: f64,
}

/// Figures 9 (the other traffic on the same host) and 10 (on two others). `part`: how much of the contending traffic.
pub(super) fn contended(
    fabric: &Fabric,
    app: &App,
    other_hosts: bool,
    part: f64,
    setting: Setting,
) -> Result<Contended> {
    let alone = run(fabric, &[app.stream(fabric.program_threads())], Setting::Uncontrolled)?[0].rate;
    let threads = whole(fabric.background * part);
    let mut streams = vec![app.stream(fabric.program_threads())];
    streams.extend(contending(fabric, other_hosts, false, threads));
    let found = run(fabric, &streams, setting)?;
    Ok(Contended {
        slowdown: alone / found[0].rate,
        used: found.iter().map(|found| found.rate).sum::<f64>() / fabric.link_gb_s,
        latency_ns: found[0].latency_ns,
    })
}

/// Figure 11: GB/s of two programs on a host.
pub(super) fn pair(fabric: &Fabric, apps: [&App; 2], threads: u32, setting: Setting) -> Result<[f64; 2]> {
    let found = run(fabric, &[apps[0].stream(threads), apps[1].stream(threads)], setting)?;
    Ok([found[0].rate, found[1].rate])
}

/// The gap at the heaviest contention, in GB/s.
pub(super) fn gap(fabric: &Fabric, apps: [&App; 2], setting: Setting) -> Result<f64> {
    let [a, b] = pair(fabric, apps, whole(fabric.pair_threads), setting)?;
    Ok((a - b).abs())
}

/// So many lines under way per thread fill the link while a program of Figures 9 and 10 is alone. Up to there contention slows it
/// by what it does to latencies; beyond, it slows it the less the more it has under way.
pub(super) fn fills_the_link(fabric: &Fabric) -> f64 {
    fabric.idle_ns / fabric.line_ns() / f64::from(fabric.program_threads())
}

/// The number of lines under way, at least `least`, at which a figure without control is as measured; `find` falls as it grows.
pub(super) fn fit(measured: f64, least: f64, mut find: impl FnMut(f64) -> Result<f64>) -> Result<f64> {
    let (mut low, mut high) = (least, 48.0);
    for _ in 0..10 {
        let middle = f64::midpoint(low, high);
        if find(middle)? > measured {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(f64::midpoint(low, high))
}

#[cfg(test)]
mod tests {
    use super::super::topology::Topology;
    use super::*;

    const PAPER: Fabric = Fabric::PAPER;

    #[test]
    fn a_full_egress_port_holds_up_what_goes_to_another_one_behind_it_and_nothing_else() {
        let held_up = beside_another_egress(&PAPER).unwrap();
        assert!(held_up > 1.5, "{held_up}");
        // From other hosts nothing stands before it.
        let elsewhere = Stream { egress: 1, ..lone(false) };
        let mut streams = vec![elsewhere];
        streams.extend(contending(&PAPER, true, false, 40));
        let beside = run(&PAPER, &streams, Setting::Uncontrolled).unwrap()[0].latency_ns;
        assert!(beside < 1.01 * PAPER.idle_ns, "{beside} ns");
    }

    #[test]
    fn two_egress_ports_carry_as_much_as_two_links() {
        let through = |host, egress| Stream { egress, ..blocks(&PAPER, host, false, 20) };
        let one = run(&PAPER, &[through(0, 0), through(1, 0)], Setting::Uncontrolled).unwrap();
        let two = run(&PAPER, &[through(0, 0), through(1, 1)], Setting::Uncontrolled).unwrap();
        let sum = |found: &[Found]| found.iter().map(|found| found.rate).sum::<f64>() / PAPER.link_gb_s;
        assert!((sum(&one) - 1.0).abs() < 0.02 && (sum(&two) - 2.0).abs() < 0.04, "{one:?} {two:?}");
    }

    #[test]
    fn a_narrow_uplink_is_divided_and_holds_up_no_other_leaf() {
        let (half, whole) = (PAPER.link_gb_s / 2.0, PAPER.link_gb_s);
        let topology = Topology::two_levels(&[whole; 4], &[half, whole], &[whole; 2]);
        let through = |host, egress| Stream { egress, ..blocks(&PAPER, host, false, 20) };
        let streams = [through(0, 0), through(1, 0), through(2, 1), through(3, 1)];
        let mut simulation =
            Simulation::over(&PAPER, topology, &[1.0], &streams, Setting::Uncontrolled).unwrap();
        simulation.run(SETTLE_US).unwrap();
        let found = simulation.run(COUNT_US).unwrap();
        let (narrow, wide) = (found[0].rate + found[1].rate, found[2].rate + found[3].rate);
        assert!((narrow / half - 1.0).abs() < 0.02 && (wide / whole - 1.0).abs() < 0.02, "{found:?}");
        assert!((found[0].rate / found[1].rate - 1.0).abs() < 0.05, "{found:?}");
    }

    /// Of a pod's vCPUs that are held many must not run at once: the others' lines would wait for theirs, although on average there is room for all.
    #[test]
    fn in_a_pod_who_wants_no_more_than_his_share_has_what_he_wants() {
        // A quarter of the link, and a fifth of a pod's times, to be done sooner.
        let fabric =
            Fabric { link_gb_s: PAPER.link_gb_s / 4.0, t_w_us: 200.0, k_us: 2000.0, ..PAPER.in_a_pod() };
        let modest = Stream { threads: 9, weight: 1.5, ..lone(false) };
        let hungry = Stream { threads: 15, in_flight: 2.0, ..lone(false) };
        let wanted = run(&fabric, &[modest], Setting::Uncontrolled).unwrap()[0].rate;
        let all = |found: &[Found]| found.iter().map(|found| found.rate).sum::<f64>() / fabric.link_gb_s;
        for signal in [Signal::Off, Signal::Probe] {
            let found = run(&fabric, &[modest, hungry], Setting::Pod(signal)).unwrap();
            println!("{signal:?}: {} of {wanted}, used {}", found[0].rate, all(&found));
            assert!(found[0].rate > 0.9 * wanted, "{signal:?}: {} of {wanted} GB/s", found[0].rate);
            assert!(all(&found) > 0.95, "{signal:?}: {}", all(&found));
        }
    }

    #[test]
    fn responses_say_each_of_four_levels_of_load() {
        for waiting in 0..200 {
            let level = PAPER.level(waiting);
            assert_eq!(level.is_overload(), f64::from(waiting) > PAPER.overload_lines, "{waiting} lines");
        }
        assert_eq!([0, 25, 73, 97].map(|waiting| PAPER.level(waiting).number()), [0, 1, 2, 3]);
        let light = Simulation::new(&PAPER, &[lone(false)], Setting::Uncontrolled).and_then(|mut it| {
            it.run(50.0)?;
            Ok(it.levels())
        });
        assert!((light.unwrap()[0] - 1.0).abs() < 1e-9);
    }

    #[test]
    fn nops_between_reads_leave_less_and_less() {
        let found = [0.0, 16.0, 64.0, 256.0, 1024.0].map(|nops| perturbed(&PAPER, nops).unwrap());
        assert!((found[0] - 21.9).abs() < 0.5, "{found:?}");
        assert!(
            found.windows(2).all(|pair| pair[1] <= pair[0] + 0.01) && found[4] < 0.2 * found[0],
            "{found:?}"
        );
    }
}
