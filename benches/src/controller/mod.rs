//! `controller`: how many placements the controller's state machine decides, and how that grows with the pod.
//!
//! It has no rival: nothing else places onto NICs and SSDs of a CXL pod. What is measured first is the state machine alone, without
//! messages and disk, of pods of up to 1 000 hosts, 10 000 devices and 100 000 instances, with
//! as many regions as a pool can have room for; and how long it takes to list what there is.
//!
//! Then the controller's thread around it, with its disk, in pods whose endpoints obey at once: how long after a report of a NIC's
//! failure the last frontend concerned was told that its lease has moved, and how long after a request for an instance there is an answer.

mod conduct;
mod endpoint;
mod pod;
mod views;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

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
    /// How often that many were placed.
    runs: u32,
    /// How long it took for instances with a NIC, for volumes, and for instances with a NIC and a disk.
    placing: [Duration; 3],
    channels: usize,
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
        let one = measure(hosts)?;
        if options.json {
            println!("{}", serde_json::to_string(&one)?);
            return Ok(());
        }
        println!(
            "{hosts} hosts, {} instances: {:.0} placements/s, {} channels; {} leases moved in {:.1} ms; {:.0} volumes/s, {:.0} \
             placements/s with a disk; hosts, devices and volumes listed in {} ms",
            one.instances,
            one.placements_per_second(),
            one.channels,
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
        let one = measure_apart(hosts)?;
        println!(
            "{hosts:>6} {:>8} {:>10} {:>13.0} {:>9} {:>11.0} {:>9.0} {:>13} in {:>7.1} ms {:>13.0} B {:>5.0} MiB {:>21} ms",
            pod::devices(hosts),
            one.instances,
            one.placements_per_second(),
            one.channels,
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
    print_thread_title();
    let mut figures = figures(&found)?;
    for hosts in TURNS {
        let one = conduct::measure(hosts, output)?;
        print_thread(hosts, &one);
        let name = |what: &str| format!("controller/{hosts}-hosts/{what}");
        let figure = |what: &str, ms: f64| Figure::new(name(what), ms, "ms");
        figures.push(figure("failure-to-last-command", one.failure.median).with_goal(Goal::AtMost(1.0)));
        figures.push(figure("failure-to-last-backend", one.backends.median));
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
        "\n{:>6} {:>7} {:>9} {:>6} {:>30} {:>11} {:>22} {:>30} {:>12}",
        "hosts",
        "leases",
        "commands",
        "ports",
        "a NIC's failure: p50/p99/most",
        "backends",
        "decided/kept/sent in",
        "while all is written",
        "an instance"
    );
}

fn print_thread(hosts: u16, one: &conduct::Conduct) {
    let shown =
        |times: &conduct::Times| format!("{:.2}/{:.2}/{:.2} ms", times.median, times.p99, times.worst);
    let [decided, kept, sent] = one.steps_ms;
    println!(
        "{hosts:>6} {:>7} {:>9} {:>6} {:>30} {:>8.2} ms {:>22} {:>30} {:>9.2} ms",
        one.leases,
        one.told,
        one.ports,
        shown(&one.failure),
        one.backends.median,
        format!("{decided:.2}/{kept:.2}/{sent:.2} ms"),
        shown(&one.beside_snapshot),
        one.create_ms
    );
}

/// Measures in processes of their own: what one pod leaves to the next, memory above all, would make sizes differ. Smaller pods are
/// measured several times, so that each size is for as many instances.
fn measure_apart(hosts: u16) -> Result<Measured> {
    let program = std::env::current_exe().context("cannot tell which program this is")?;
    let mut all: Option<Measured> = None;
    for _ in 0..(LARGEST / hosts).max(1) {
        let mut command = Command::new(&program);
        command.args(["controller", "--json", "--hosts", &hosts.to_string()]).stderr(Stdio::inherit());
        let output = command.output().context("cannot start this program once more")?;
        ensure!(output.status.success(), "the run with {hosts} hosts ended with {}", output.status);
        let one: Measured =
            serde_json::from_slice(&output.stdout).context("a run said something else than was measured")?;
        all = Some(match all {
            Some(all) => all.and(&one),
            None => one,
        });
    }
    all.context("nothing was measured")
}

fn measure(hosts: u16) -> Result<Measured> {
    let resident_before = resident_bytes()?;
    let instances = u32::from(hosts) * INSTANCES;
    let mut pod = Pod::new(hosts)?;
    let placing = time_of(instances, |number| pod.place(number))?;
    let resident_bytes = resident_bytes()? - resident_before;
    let channels = pod.channels();
    let start = Instant::now();
    let moved = pod.fail_host()?;
    let move_ms = start.elapsed().as_secs_f64() * 1e3;
    let state_bytes = pod.bytes()?;
    pod = Pod::new(hosts)?;
    let of_volumes = time_of(instances, |number| pod.place_volume(number))?;
    let order = pod::in_any_order(instances);
    let with_disks = time_of(instances, |number| pod.place_with_disk(number, &order))?;
    let lists_ms = views::measure(pod.state())?;
    Ok(Measured {
        hosts,
        instances,
        runs: 1,
        placing: [placing, of_volumes, with_disks],
        channels,
        moved,
        move_ms,
        state_bytes,
        resident_bytes,
        lists_ms,
    })
}

impl Measured {
    /// Two runs as one; what both have to say alike is said once.
    fn and(self, other: &Self) -> Self {
        let mut placing = self.placing;
        placing.iter_mut().zip(other.placing).for_each(|(sum, it)| *sum += it);
        let runs = self.runs + other.runs;
        let sum_ms = self.move_ms * f64::from(self.runs) + other.move_ms * f64::from(other.runs);
        Self { runs, placing, move_ms: sum_ms / f64::from(runs), ..self }
    }

    fn lists(&self) -> String {
        self.lists_ms.map(|ms| format!("{ms:.1}")).join("/")
    }

    fn per_second(&self, took: Duration) -> f64 {
        f64::from(self.instances) * f64::from(self.runs) / took.as_secs_f64()
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

fn time_of(count: u32, place: impl FnMut(u32) -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    (0..count).try_for_each(place)?;
    Ok(start.elapsed())
}

fn figures(found: &[Measured]) -> Result<Vec<Figure>> {
    let (first, last) =
        found.first().zip(found.last()).context("no size was measured: there is nothing to compare")?;
    // All of n placements may cost n log n: one as the logarithm grows. A host's failure may look at all n once.
    let logarithm = |one: &Measured| f64::from(one.instances).log2();
    let logarithms = logarithm(last) / logarithm(first);
    let linear = f64::from(last.instances) / f64::from(first.instances);
    let round = |value: f64| (value * 100.0).round() / 100.0;
    let growth = |what: &str, rate: fn(&Measured) -> f64| {
        Figure::new(format!("controller/growth-of-{what}"), rate(first) / rate(last), "x")
            .with_goal(Goal::AtMost(round(logarithms)))
    };
    let mut figures = vec![
        growth("a-placement", Measured::placements_per_second),
        growth("a-placement-with-disk", Measured::with_disks_per_second),
        growth("a-volume", Measured::volumes_per_second),
        Figure::new("controller/growth-of-a-host-failure".to_owned(), last.move_ms / first.move_ms, "x")
            .with_goal(Goal::AtMost(round(logarithms * linear))),
    ];
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
    Ok(figures)
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
