//! `controller`: how many placements the controller's state machine decides, and how that grows with the pod.
//!
//! It has no rival: nothing else places onto NICs and SSDs of a CXL pod. What is measured first is the state machine alone, without
//! messages and disk, of pods of up to 1 000 hosts, 10 000 devices and 100 000 instances, with
//! as many regions as a pool can have room for; and how long it takes to list what there is.
//!
//! How it grows is another question than how fast it is: a small pod's state fits the processor's caches, and a large one's does not,
//! whatever is done with it. So growth is what a placement takes in a large pod to what it takes in one of as many small
//! ones as have as much memory together, by turns.
//!
//! Then the controller's thread around it, with its disk, in pods whose endpoints obey at once: how long after a report of a NIC's
//! failure the last frontend concerned was told that its lease has moved, and after an SSD's that its disk answers errors, and how long after
//! a request for an instance there is an answer.

mod conduct;
mod endpoint;
mod growth;
mod pod;
mod views;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use self::growth::Growth;
use self::pod::Pod;
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal};

/// Instances on each host.
const INSTANCES: u32 = 100;
/// Sizes of pods, each twice the one before.
const HOSTS: [u16; 4] = [125, 250, 500, LARGEST];
const LARGEST: u16 = 1000;
/// Sizes of pods whose controller's thread is measured. Smaller ones have no backup NICs.
const TURNS: [u16; 3] = [16, 32, 64];

/// The controller: placements per second, the time to place everything of a failed host again, and that to tell everybody.
#[derive(Args, Default)]
pub(crate) struct Options {
    /// Measure only the state machine, and only a pod of so many hosts: what is looked at with a profiler.
    #[arg(long, value_name = "N")]
    hosts: Option<u16>,
    /// So many pods of that size, by turns.
    #[arg(long, value_name = "N", requires = "hosts", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pods: u16,
    /// The same as JSON.
    #[arg(long, requires = "hosts")]
    json: bool,
    /// Measure only the controller's thread, and only in a pod of so many hosts.
    #[arg(long, value_name = "N", conflicts_with = "hosts")]
    thread: Option<u16>,
}

#[derive(Serialize, Deserialize)]
struct Measured {
    hosts: u16,
    instances: u32,
    /// In how many pods, by turns or one after the other, that many were placed.
    pods: u32,
    /// How long it took for instances with a NIC, for volumes, and for instances with a NIC and a disk.
    placing: [Duration; 3],
    /// Without disks, and with them.
    channels: [usize; 2],
    moved: u64,
    move_ms: f64,
    state_bytes: f64,
    resident_bytes: f64,
    /// To list hosts, devices and volumes.
    lists_ms: [f64; 3],
}

/// Runs it.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    if let Some(hosts) = options.hosts {
        let one = measure(hosts, options.pods)?;
        if options.json {
            println!("{}", serde_json::to_string(&one)?);
            return Ok(());
        }
        println!(
            "{hosts} hosts, {} instances: {:.0} placements/s, {} channels; {} leases moved in {:.1} ms; {:.0} volumes/s, {:.0} \
             placements/s with a disk; hosts, devices and volumes listed in {} ms",
            one.instances,
            one.placements_per_second(),
            one.channels[0],
            one.moved,
            one.move_ms,
            one.volumes_per_second(),
            one.with_disks_per_second(),
            one.lists()
        );
        return Ok(());
    }
    if let Some(hosts) = options.thread {
        print_thread_title();
        print_thread(hosts, &conduct::measure(hosts, output)?);
        return Ok(());
    }
    println!(
        "{:>6} {:>8} {:>10} {:>13} {:>9} {:>11} {:>9} {:>26} {:>15} {:>9} {:>24}",
        "hosts",
        "devices",
        "instances",
        "placements/s",
        "channels",
        "with disk/s",
        "volumes/s",
        "a failed host's leases",
        "state/instance",
        "resident",
        "hosts/devices/volumes in"
    );
    let mut found = Vec::new();
    for hosts in HOSTS {
        let one = measure_alone(hosts)?;
        println!(
            "{hosts:>6} {:>8} {:>10} {:>13.0} {:>9} {:>11.0} {:>9.0} {:>13} in {:>7.1} ms {:>13.0} B {:>5.0} MiB {:>21} ms",
            pod::devices(hosts),
            one.instances,
            one.placements_per_second(),
            one.channels[0],
            one.with_disks_per_second(),
            one.volumes_per_second(),
            one.moved,
            one.move_ms,
            one.state_bytes / f64::from(one.instances),
            one.resident_bytes / f64::from(1 << 20),
            one.lists()
        );
        found.push(one);
    }
    let growth = Growth::measure()?;
    growth.print();
    print_thread_title();
    let mut figures = figures(&found);
    figures.extend(growth.figures());
    for hosts in TURNS {
        let one = conduct::measure(hosts, output)?;
        print_thread(hosts, &one);
        let name = |what: &str| format!("controller/{hosts}-hosts/{what}");
        let figure = |what: &str, ms: f64| Figure::new(name(what), ms, "ms");
        figures.push(figure("failure-to-last-command", one.failure.median).with_goal(Goal::AtMost(1.0)));
        figures.push(figure("failure-to-last-backend", one.backends.median));
        figures
            .push(figure("ssd-failure-to-last-command", one.ssd_failure.median).with_goal(Goal::AtMost(1.0)));
        figures.push(figure("ssd-failure-to-last-command-p99", one.ssd_failure.p99));
        figures.push(figure("failure-to-last-command-p99", one.failure.p99));
        figures.push(figure("failure-to-last-command-worst", one.failure.worst));
        figures.push(figure("failure-beside-snapshot", one.beside_snapshot.median));
        figures.push(figure("failure-beside-snapshot-worst", one.beside_snapshot.worst));
        for (step, ms) in ["decided", "kept", "sent"].into_iter().zip(one.steps_ms) {
            figures.push(figure(&format!("failure-{step}-in"), ms));
        }
        figures.push(figure("instance", one.create_ms));
    }
    report::print_goals(&figures);
    report::write(&output.join("controller.svg"), &plot::svg(&panels(&found)))?;
    report::write_figures(&output.join("controller.json"), &figures)
}

fn print_thread_title() {
    println!(
        "\n{:>6} {:>7} {:>9} {:>6} {:>30} {:>11} {:>22} {:>30} {:>6} {:>31} {:>12}",
        "hosts",
        "leases",
        "commands",
        "ports",
        "a NIC's failure: p50/p99/most",
        "backends",
        "decided/kept/sent in",
        "while all is written",
        "disks",
        "an SSD's failure: p50/p99/most",
        "an instance"
    );
}

fn print_thread(hosts: u16, one: &conduct::Conduct) {
    let shown =
        |times: &conduct::Times| format!("{:.2}/{:.2}/{:.2} ms", times.median, times.p99, times.worst);
    let [decided, kept, sent] = one.steps_ms;
    println!(
        "{hosts:>6} {:>7} {:>9} {:>6} {:>30} {:>8.2} ms {:>22} {:>30} {:>6} {:>31} {:>9.2} ms",
        one.leases,
        one.told,
        one.ports,
        shown(&one.failure),
        one.backends.median,
        format!("{decided:.2}/{kept:.2}/{sent:.2} ms"),
        shown(&one.beside_snapshot),
        one.disks,
        shown(&one.ssd_failure),
        one.create_ms
    );
}

/// Measures in a process of its own: what one pod leaves to the next, memory above all, would make sizes differ.
fn measure_apart(hosts: u16, pods: u16) -> Result<Measured> {
    let program = std::env::current_exe().context("cannot tell which program this is")?;
    let mut command = Command::new(&program);
    command.args(["controller", "--json", "--hosts", &hosts.to_string(), "--pods", &pods.to_string()]);
    let output = command.stderr(Stdio::inherit()).output().context("cannot start this program once more")?;
    ensure!(output.status.success(), "the run with {hosts} hosts ended with {}", output.status);
    serde_json::from_slice(&output.stdout).context("a run said something else than was measured")
}

/// Measures smaller pods several times, so that each size is for as many instances.
fn measure_alone(hosts: u16) -> Result<Measured> {
    let mut all = measure_apart(hosts, 1)?;
    for _ in 1..as_large(hosts) {
        all = all.and(&measure_apart(hosts, 1)?);
    }
    Ok(all)
}

/// How many pods of so many hosts have as much as the largest.
fn as_large(hosts: u16) -> u16 {
    (LARGEST / hosts).max(1)
}

fn measure(hosts: u16, pods: u16) -> Result<Measured> {
    let resident_before = resident_bytes()?;
    let instances = u32::from(hosts) * INSTANCES;
    let make = || (0..pods).map(|_| Pod::new(hosts)).collect::<Result<Vec<Pod>>>();
    let mut all = make()?;
    let placing = time_of(&mut all, instances, Pod::place)?;
    let resident_bytes = (resident_bytes()? - resident_before) / f64::from(pods);
    let mut channels = [count(&all, Pod::channels), 0];
    let start = Instant::now();
    let mut moved = 0;
    for pod in &mut all {
        moved = pod.fail_host()?;
    }
    let move_ms = start.elapsed().as_secs_f64() * 1e3 / f64::from(pods);
    let state_bytes = all[0].bytes()?;
    drop(all);
    let mut all = make()?;
    let of_volumes = time_of(&mut all, instances, Pod::place_volume)?;
    let order = pod::in_any_order(instances);
    let with_disks = time_of(&mut all, instances, |pod, number| pod.place_with_disk(number, &order))?;
    channels[1] = count(&all, Pod::channels);
    let lists_ms = views::measure(all[0].state())?;
    Ok(Measured {
        hosts,
        instances,
        pods: u32::from(pods),
        placing: [placing, of_volumes, with_disks],
        channels,
        moved,
        move_ms,
        state_bytes,
        resident_bytes,
        lists_ms,
    })
}

/// The mean of a pod.
fn count(all: &[Pod], of: impl Fn(&Pod) -> usize) -> usize {
    all.iter().map(of).sum::<usize>() / all.len()
}

impl Measured {
    /// Two runs as one; what both have to say alike is said once.
    fn and(self, other: &Self) -> Self {
        let mut placing = self.placing;
        placing.iter_mut().zip(other.placing).for_each(|(sum, it)| *sum += it);
        let pods = self.pods + other.pods;
        let sum_ms = self.move_ms * f64::from(self.pods) + other.move_ms * f64::from(other.pods);
        Self { pods, placing, move_ms: sum_ms / f64::from(pods), ..self }
    }

    fn lists(&self) -> String {
        self.lists_ms.map(|ms| format!("{ms:.1}")).join("/")
    }

    fn per_second(&self, took: Duration) -> f64 {
        f64::from(self.instances) * f64::from(self.pods) / took.as_secs_f64()
    }

    /// Of instances with a NIC.
    fn placements_per_second(&self) -> f64 {
        self.per_second(self.placing[0])
    }

    fn volumes_per_second(&self) -> f64 {
        self.per_second(self.placing[1])
    }

    /// Of instances with a NIC and a disk, which is one of the volumes.
    fn with_disks_per_second(&self) -> f64 {
        self.per_second(self.placing[2])
    }
}

/// How long it takes to place so many in each of these pods, by turns.
fn time_of(
    all: &mut [Pod],
    count: u32,
    mut place: impl FnMut(&mut Pod, u32) -> Result<()>,
) -> Result<Duration> {
    let start = Instant::now();
    for number in 0..count {
        for pod in &mut *all {
            place(pod, number)?;
        }
    }
    Ok(start.elapsed())
}

fn figures(found: &[Measured]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for one in found {
        let name = |what: &str| format!("controller/{}-hosts/{what}", one.hosts);
        figures.push(Figure::new(name("placements"), one.placements_per_second(), "1/s"));
        figures.push(Figure::new(name("placements-with-disk"), one.with_disks_per_second(), "1/s"));
        figures.push(Figure::new(name("volumes"), one.volumes_per_second(), "1/s"));
        figures.push(Figure::new(name("host-failure"), one.move_ms, "ms"));
        for (what, ms) in ["hosts", "devices", "volumes"].into_iter().zip(one.lists_ms) {
            figures.push(Figure::new(name(&format!("list-of-{what}")), ms, "ms"));
        }
        figures.push(Figure::new(name("state"), one.state_bytes / f64::from(one.instances), "B/instance"));
        figures.push(Figure::new(name("resident"), one.resident_bytes / f64::from(1 << 20), "MiB"));
    }
    figures
}

fn panels(found: &[Measured]) -> [Panel; 2] {
    let series = |name: &str, value: fn(&Measured) -> f64| Series {
        dashed: false,
        name: name.to_owned(),
        points: found.iter().map(|one| (f64::from(one.instances), value(one))).collect(),
    };
    [
        Panel {
            title: "Placements per second".to_owned(),
            x_label: "instances",
            y_label: "placements/s",
            series: vec![
                series("with a NIC", Measured::placements_per_second),
                series("with a NIC and a disk", Measured::with_disks_per_second),
            ],
        },
        Panel {
            title: "Everything of a failed host placed again".to_owned(),
            x_label: "instances",
            y_label: "ms",
            series: vec![series("state machine", |one| one.move_ms)],
        },
    ]
}

/// How much memory this process has now.
fn resident_bytes() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<f64>().ok());
    kib.map(|kib| kib * 1024.0).context("/proc/self/status has no VmRSS")
}
