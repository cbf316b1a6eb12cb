//! `stranding`: how much of hosts' resources nobody can use, and how much less that is when hosts share NICs and SSDs.
//!
//! As in Oasis §2.2: VMs of a trace are placed on hosts that have devices of their own; then hosts are put into pods at random, and
//! the least number of devices is sought with which every VM can be placed where it was, pod by pod. What decides whether VMs fit is the
//! controller's own state machine, which packs devices; beside it stand what it needs where it spreads load, and what nothing could do
//! with less than, the most that is used at a time.

mod pods;
mod schedule;
mod trace;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;

use self::pods::{Device, NICS, Needed, SSDS};
use self::trace::{Parts, Random};
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal};

/// Sizes of pods. The first is no pod.
const PODS: [usize; 5] = [1, 2, 4, 8, 16];

/// Stranded SSDs, NICs, cores and memory of hosts alone and in pods, from an allocation trace.
#[derive(Args)]
pub(crate) struct Options {
    /// How many hosts; a multiple of 16.
    #[arg(long, default_value_t = 64)]
    hosts: usize,
    /// How many days of the trace.
    #[arg(long, default_value_t = 6.0)]
    days: f64,
    /// Of the synthetic trace, and of how hosts are put into pods.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The table `vm` of the Azure Traces for Packing as CSV with a header, instead of a synthetic trace.
    #[arg(long, requires = "azure_types", value_name = "FILE")]
    azure_vms: Option<PathBuf>,
    /// The table `vmType` of the same, as CSV with a header.
    #[arg(long, requires = "azure_vms", value_name = "FILE")]
    azure_types: Option<PathBuf>,
    /// The machine whose parts count; the one with most types unless given.
    #[arg(long, requires = "azure_types", value_name = "ID")]
    machine: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self { hosts: 64, days: 6.0, seed: 1, azure_vms: None, azure_types: None, machine: None }
    }
}

/// What pods of a size need.
struct Found {
    hosts: usize,
    nic: Need,
    ssd: Need,
}

/// How many devices of a kind, of pods of a size.
struct Need {
    /// Those that the hosts of a pod would have of their own.
    own: f64,
    /// For what is used at a time, on average of all pods.
    at_least: f64,
    /// Where they are packed, on average.
    packed: f64,
    /// Where load is spread, on average.
    spread: f64,
    /// Where they are packed, in the pod that needs most.
    most: usize,
    /// What hosts alone do not use, as a part of all.
    unused_alone: f64,
}

impl Need {
    fn of(pods: &[Needed], own: usize, unused_alone: f64) -> Self {
        let average = |which: fn(&Needed) -> usize| {
            count(pods.iter().map(which).sum::<usize>()) / count(pods.len().max(1))
        };
        Self {
            own: count(own),
            at_least: average(|pod| pod.at_least),
            packed: average(|pod| pod.packed),
            spread: average(|pod| pod.spread),
            most: pods.iter().map(|pod| pod.packed).max().unwrap_or(0),
            unused_alone,
        }
    }

    /// What nobody uses of so many, in percent.
    fn stranded(&self, devices: f64) -> f64 {
        100.0 * (1.0 - (1.0 - self.unused_alone) * self.own / devices)
    }

    /// Compared with hosts that have theirs alone, so much less is bought, in percent.
    fn saved(&self) -> f64 {
        100.0 * (1.0 - self.packed / self.own)
    }

    /// A part of a line of the table.
    fn row(&self, hosts: usize) -> String {
        format!(
            "{:>5.1} of {:<3.0} {:>8.1} {:>6.1} {:>4} {:>7.1} % {:>3.0} % {:>4.0} %",
            self.packed,
            self.own,
            self.at_least,
            self.spread,
            self.most,
            self.stranded(self.packed),
            estimate(100.0 * self.unused_alone, hosts),
            self.saved()
        )
    }
}

/// Runs it.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    let hosts = options.hosts;
    ensure!(hosts > 0 && hosts.is_multiple_of(16), "--hosts {hosts}: use a multiple of 16");
    ensure!(options.days > 0.0, "--days must be more than 0");
    let mut random = Random::new(options.seed);
    let requests = match (&options.azure_vms, &options.azure_types) {
        (Some(vms), Some(types)) => {
            let read = |path: &Path| {
                fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
            };
            trace::azure(&read(vms)?, &read(types)?, options.machine.as_deref())?
        }
        _ => trace::synthetic(&mut random, hosts, options.days, 1.15),
    };
    let schedule = schedule::schedule(&requests, hosts, options.days);
    let percent = |part: f64| part * 100.0;
    println!(
        "{hosts} hosts, {} days: {} VMs placed, {} found no host",
        options.days,
        schedule.placed.len(),
        schedule.refused
    );
    let Parts { cores, memory, ssd, nic } = schedule.unused;
    println!(
        "stranded on hosts alone: SSD {:.0} %, NIC {:.0} %, cores {:.0} %, memory {:.0} % (Oasis: 33, 27, 5, 9)\n",
        percent(ssd),
        percent(nic),
        percent(cores),
        percent(memory)
    );
    let mut order: Vec<usize> = (0..hosts).collect();
    random.shuffle(&mut order);
    let columns = |what: &str| {
        format!(
            "{what:>12} {:>8} {:>6} {:>4} {:>9} {:>5} {:>6}",
            "at least", "spread", "most", "stranded", "√N", "saved"
        )
    };
    println!("{:>4} {} {}", "pod", columns("SSDs"), columns("NICs"));
    let mut found = Vec::new();
    for size in PODS {
        let one = measure(&schedule, &order, size)?;
        println!("{size:>4} {} {}", one.ssd.row(size), one.nic.row(size));
        found.push(one);
    }
    let figures = figures(&found, &schedule.unused)?;
    report::print_goals(&figures);
    report::write(&output.join("stranding.svg"), &plot::svg(&panels(&found, &schedule.unused)))?;
    report::write_figures(&output.join("stranding.json"), &figures)
}

/// What would be stranded if hosts' needs were independent of each other (HotOS '25, §2.1).
fn estimate(alone: f64, pod: usize) -> f64 {
    alone / count(pod).sqrt()
}

fn count(number: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a small count")]
    let count = number as f64;
    count
}

fn measure(schedule: &schedule::Schedule, order: &[usize], size: usize) -> Result<Found> {
    let need = |device: Device, own: usize, unused: f64| {
        let of_pod = |hosts: &[usize]| match hosts {
            // Nobody shares: every host has its own, all of which the schedule has used.
            [_] => Ok(Needed { at_least: own, packed: own, spread: own }),
            _ => pods::needed(device, &schedule.placed, hosts),
        };
        let pods: Vec<Needed> = order.chunks(size).map(of_pod).collect::<Result<_>>()?;
        Ok::<_, anyhow::Error>(Need::of(&pods, own * size, unused))
    };
    Ok(Found {
        hosts: size,
        nic: need(Device::Nic, NICS, schedule.unused.nic)?,
        ssd: need(Device::Ssd, SSDS, schedule.unused.ssd)?,
    })
}

fn figures(found: &[Found], unused: &Parts) -> Result<Vec<Figure>> {
    let eight = found.iter().find(|it| it.hosts == 8).context("pods of 8 hosts were not measured")?;
    let paper = "Oasis, Azure";
    let stranded = |need: &Need| need.stranded(need.packed);
    let figure = |name: &str, value: f64, rival: f64| {
        Figure::new(format!("stranding/{name}"), value, "%").against(paper, Some(rival))
    };
    let mut figures = vec![
        figure("alone/ssd", unused.ssd * 100.0, 33.0),
        figure("alone/nic", unused.nic * 100.0, 27.0),
        figure("alone/cores", unused.cores * 100.0, 5.0),
        figure("alone/memory", unused.memory * 100.0, 9.0),
        figure("pod-of-8/ssd", stranded(&eight.ssd), 7.0).with_goal(Goal::AtMost(7.0)),
        figure("pod-of-8/ssd-saved", eight.ssd.saved(), 26.0).with_goal(Goal::AtLeast(26.0)),
        figure("pod-of-8/nic-saved", eight.nic.saved(), 16.0).with_goal(Goal::AtLeast(16.0)),
    ];
    for one in found.iter().filter(|it| it.hosts > 1) {
        for (device, need) in [("ssd", &one.ssd), ("nic", &one.nic)] {
            let name = |what: &str| format!("stranding/pod-of-{}/{device}-{what}", one.hosts);
            let root = estimate(need.unused_alone * 100.0, one.hosts);
            let rivals = [
                ("estimate", "the square root", root),
                ("least", "the most that is used at a time", need.stranded(need.at_least)),
                ("spread", "where load is spread", need.stranded(need.spread)),
            ];
            for (what, rival, value) in rivals {
                let name = name(&format!("beside-{what}"));
                figures.push(Figure::new(name, stranded(need), "%").against(rival, Some(value)));
            }
        }
    }
    Ok(figures)
}

fn panels(found: &[Found], unused: &Parts) -> Vec<Panel> {
    let line = |name: &str, value: &dyn Fn(&Found) -> f64| {
        // A logarithmic axis has no zero.
        let points = found.iter().map(|it| (count(it.hosts), value(it).max(0.1))).collect();
        Series { dashed: false, name: name.to_owned(), points }
    };
    let panel = |title: &str, series: Vec<Series>| Panel {
        title: title.to_owned(),
        x_label: "hosts of a pod",
        y_label: "stranded, percent",
        series,
    };
    let paper = Series {
        dashed: false,
        name: "Oasis, Fig. 2, pods of 1 and 8".to_owned(),
        points: vec![(1.0, 33.0), (8.0, 7.0)],
    };
    let flat = |name: &str, part: f64| line(name, &|_| part * 100.0);
    vec![
        panel(
            "SSD capacity",
            vec![
                line("packed", &|it| it.ssd.stranded(it.ssd.packed)),
                line("spread", &|it| it.ssd.stranded(it.ssd.spread)),
                line("at least", &|it| it.ssd.stranded(it.ssd.at_least)),
                line("square root of N", &|it| estimate(unused.ssd * 100.0, it.hosts)),
                paper,
            ],
        ),
        panel(
            "NIC bandwidth",
            vec![
                line("packed", &|it| it.nic.stranded(it.nic.packed)),
                line("spread", &|it| it.nic.stranded(it.nic.spread)),
                line("at least", &|it| it.nic.stranded(it.nic.at_least)),
                line("square root of N", &|it| estimate(unused.nic * 100.0, it.hosts)),
            ],
        ),
        panel("Not pooled", vec![flat("cores", unused.cores), flat("memory", unused.memory)]),
    ]
}
