//! `stranding`: how much of hosts' resources nobody can use, and how much less that is when hosts share NICs and SSDs.
//!
//! As in Oasis §2.2: VMs of a trace are placed on hosts that have devices of their own; then hosts are put into pods at random, and
//! the least number of devices is sought with which every VM can be placed where it was. Every pod gets as many as the pod that
//! needs most. What decides whether VMs fit is the controller's own state machine.

mod pods;
mod schedule;
mod trace;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;

use self::pods::{Device, NICS, SSDS};
use self::trace::{Parts, Random};
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal};

/// Sizes of pods. The first is no pod.
const PODS: [usize; 5] = [1, 2, 4, 8, 16];

/// Stranded SSDs, NICs, cores and memory of hosts alone and in pods, from an allocation trace.
#[derive(Args)]
pub(crate) struct Options {
    /// How many hosts; a multiple of 16.
    #[arg(long, default_value_t = 32)]
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
        Self { hosts: 32, days: 6.0, seed: 1, azure_vms: None, azure_types: None, machine: None }
    }
}

/// What pods of a size need.
struct Found {
    hosts: usize,
    /// Devices of each pod.
    nics: usize,
    ssds: usize,
    /// Of them, what nobody uses, in percent.
    nic_stranded: f64,
    ssd_stranded: f64,
    /// Compared with hosts that have theirs alone, so much less is bought, in percent.
    nic_saved: f64,
    ssd_saved: f64,
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
    println!(
        "{:>4}  {:>9} {:>8} {:>5} {:>6}  {:>9} {:>8} {:>5} {:>6}",
        "pod", "SSDs", "stranded", "√N", "saved", "NICs", "stranded", "√N", "saved"
    );
    let mut found = Vec::new();
    for size in PODS {
        let one = measure(&schedule, &order, size)?;
        println!(
            "{:>4}  {:>4} of {:<3} {:>6.1} % {:>3.0} % {:>4.0} %  {:>4} of {:<3} {:>6.1} % {:>3.0} % {:>4.0} %",
            one.hosts,
            one.ssds,
            SSDS * size,
            one.ssd_stranded,
            estimate(percent(ssd), size),
            one.ssd_saved,
            one.nics,
            NICS * size,
            one.nic_stranded,
            estimate(percent(nic), size),
            one.nic_saved
        );
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
    let (mut nics, mut ssds) = (0, 0);
    if size == 1 {
        // Nobody shares: every host has its own, all of which the schedule has used.
        (nics, ssds) = (NICS, SSDS);
    } else {
        for hosts in order.chunks(size) {
            nics = nics.max(pods::needed(Device::Nic, &schedule.placed, hosts)?);
            ssds = ssds.max(pods::needed(Device::Ssd, &schedule.placed, hosts)?);
        }
    }
    let stranded = |unused: f64, own: usize, needed: usize| {
        100.0 * (1.0 - (1.0 - unused) * count(own * size) / count(needed))
    };
    let saved = |own: usize, needed: usize| 100.0 * (1.0 - count(needed) / count(own * size));
    Ok(Found {
        hosts: size,
        nics,
        ssds,
        nic_stranded: stranded(schedule.unused.nic, NICS, nics),
        ssd_stranded: stranded(schedule.unused.ssd, SSDS, ssds),
        nic_saved: saved(NICS, nics),
        ssd_saved: saved(SSDS, ssds),
    })
}

fn figures(found: &[Found], unused: &Parts) -> Result<Vec<Figure>> {
    let eight = found.iter().find(|it| it.hosts == 8).context("pods of 8 hosts were not measured")?;
    let paper = "Oasis, Azure";
    let figure = |name: &str, value: f64, rival: f64| {
        Figure::new(format!("stranding/{name}"), value, "%").against(paper, Some(rival))
    };
    let mut figures = vec![
        figure("alone/ssd", unused.ssd * 100.0, 33.0),
        figure("alone/nic", unused.nic * 100.0, 27.0),
        figure("alone/cores", unused.cores * 100.0, 5.0),
        figure("alone/memory", unused.memory * 100.0, 9.0),
        figure("pod-of-8/ssd", eight.ssd_stranded, 7.0).with_goal(Goal::AtMost(7.0)),
        figure("pod-of-8/ssd-saved", eight.ssd_saved, 26.0).with_goal(Goal::AtLeast(26.0)),
        figure("pod-of-8/nic-saved", eight.nic_saved, 16.0).with_goal(Goal::AtLeast(16.0)),
    ];
    for one in found.iter().filter(|it| it.hosts > 1) {
        let root = "the square root";
        for (name, stranded, alone) in
            [("ssd", one.ssd_stranded, unused.ssd), ("nic", one.nic_stranded, unused.nic)]
        {
            let name = format!("stranding/pod-of-{}/{name}-beside-estimate", one.hosts);
            let rival = estimate(alone * 100.0, one.hosts);
            figures.push(Figure::new(name, stranded, "%").against(root, Some(rival)));
        }
    }
    Ok(figures)
}

fn panels(found: &[Found], unused: &Parts) -> Vec<Panel> {
    let line = |name: &str, value: &dyn Fn(&Found) -> f64| {
        // A logarithmic axis has no zero.
        let points = found.iter().map(|it| (count(it.hosts), value(it).max(0.1))).collect();
        Series { name: name.to_owned(), points }
    };
    let panel = |title: &str, series: Vec<Series>| Panel {
        title: title.to_owned(),
        x_label: "hosts of a pod",
        y_label: "stranded, percent",
        series,
    };
    let paper =
        Series { name: "Oasis, Fig. 2, pods of 1 and 8".to_owned(), points: vec![(1.0, 33.0), (8.0, 7.0)] };
    let flat = |name: &str, part: f64| line(name, &|_| part * 100.0);
    vec![
        panel(
            "SSD capacity",
            vec![
                line("measured", &|it| it.ssd_stranded),
                line("square root of N", &|it| estimate(unused.ssd * 100.0, it.hosts)),
                paper,
            ],
        ),
        panel(
            "NIC bandwidth",
            vec![
                line("measured", &|it| it.nic_stranded),
                line("square root of N", &|it| estimate(unused.nic * 100.0, it.hosts)),
            ],
        ),
        panel("Not pooled", vec![flat("cores", unused.cores), flat("memory", unused.memory)]),
    ]
}
