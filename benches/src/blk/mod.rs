//! `blk`: the path from a guest's queue to an SSD of another host, and a rival that serves the same file locally.

mod load;
mod ours;
mod rival;
mod summary;

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use cxl_pool::CoherenceMode;

use self::load::{Load, Measured, Waiting};
use self::ours::Ours;
use self::rival::Rival;
use crate::cores::{self, Cores, Distance};

/// Disks: requests per second and latency of a volume on another host, and of qemu-storage-daemon on a local file.
///
/// A driver without a VM (crate virtio-driver) uses the vhost-user socket, one queue, and keeps a number of requests
/// in flight. Ours are the engine's two workers, frontend and backend, over a pool in /dev/shm, with hardware coherence
/// and with software coherence; the rival is one thread that serves the same file, or its null-co. All take turns, in
/// every round; the cores' distance is probed around each run, and only equal tags are compared.
///
/// Ours has one hop more than the rival. On a machine with two cores driver, frontend and backend do not each have one,
/// so the driver gives its core away whenever it finds nothing; the rival is measured with a driver that polls on a core
/// of its own, which is best for it. CPU time per request, which does not depend on that, is shown as well.
#[derive(Args)]
pub(crate) struct Options {
    /// How often everything is measured.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// How long each run lasts.
    #[arg(long, default_value_t = 200, value_name = "MILLISECONDS")]
    run_ms: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 3, run_ms: 200 }
    }
}

/// What lies at the end of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Medium {
    /// Nothing: it answers at once.
    Null,
    /// A file in memory.
    Tmpfs,
}

impl Medium {
    const ALL: [Self; 2] = [Self::Null, Self::Tmpfs];

    const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Tmpfs => "tmpfs",
        }
    }
}

/// Who serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    Ours(CoherenceMode),
    Qemu,
}

impl Server {
    const ALL: [Self; 3] =
        [Self::Ours(CoherenceMode::Hardware), Self::Ours(CoherenceMode::Software), Self::Qemu];

    const fn name(self) -> &'static str {
        match self {
            Self::Ours(CoherenceMode::Hardware) => "hardware-coherent",
            Self::Ours(CoherenceMode::Software) => "software-coherent",
            Self::Qemu => "qemu-storage-daemon",
        }
    }
}

/// What the driver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job {
    writes: bool,
    bytes: u32,
    depth: u32,
}

impl Job {
    fn all() -> Vec<Self> {
        let sizes = [(4 << 10, 1), (4 << 10, 32), (4 << 10, 128), (128 << 10, 32)];
        let jobs = |writes| sizes.map(|(bytes, depth)| Self { writes, bytes, depth });
        [jobs(false), jobs(true)].concat()
    }

    fn name(self) -> String {
        let kind = if self.writes { "write" } else { "read" };
        format!("{}K-{kind}/qd{}", self.bytes >> 10, self.depth)
    }
}

/// What was measured, and under which conditions.
#[derive(Clone, Copy, Debug)]
struct Sample {
    server: Server,
    medium: Medium,
    job: Job,
    distance: Distance,
    measured: Measured,
}

/// How much of the disk is used.
const DISK_BYTES: u64 = 512 << 20;

/// A server that runs.
enum Target {
    Ours(Ours),
    Rival(Rival),
}

impl Target {
    fn socket(&self) -> &Path {
        match self {
            Self::Ours(ours) => ours.socket(),
            Self::Rival(rival) => rival.socket(),
        }
    }

    fn threads(&self) -> Result<Vec<std::path::PathBuf>> {
        match self {
            Self::Ours(ours) => ours.threads(),
            Self::Rival(rival) => rival.threads(),
        }
    }

    const fn waiting(&self) -> Waiting {
        match self {
            Self::Ours(_) => Waiting::Yielding,
            Self::Rival(_) => Waiting::Spinning,
        }
    }
}

/// Runs the benchmark.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    ensure!(options.rounds > 0 && options.run_ms >= 10, "give at least one round, and 10 ms for each run");
    let cores = Cores::choose()?;
    if let Some(load) = cores::busy() {
        println!("The machine is busy (load {load}): the figures will show that. Run this alone.");
    }
    let rival_is_there = rival::is_installed();
    if !rival_is_there {
        println!("qemu-storage-daemon is not installed: no rival to compare with (Debian: qemu-utils).");
    }
    let directory = tempfile::tempdir_in("/dev/shm").context("cannot make a directory in /dev/shm")?;
    let file = directory.path().join("disk");
    load::fill(&file, DISK_BYTES)?;
    let jobs = Job::all();
    let servers: Vec<Server> =
        Server::ALL.into_iter().filter(|server| *server != Server::Qemu || rival_is_there).collect();
    let total = options.rounds as usize * jobs.len() * servers.len() * Medium::ALL.len();
    let mut samples = Vec::with_capacity(total);
    for _ in 0..options.rounds {
        for medium in Medium::ALL {
            for server in &servers {
                cores::unpin(cores)?;
                // One at a time: a file has one owner, and nobody else shall wake up.
                let target = start(*server, medium, &file, directory.path(), cores)?;
                cores::pin(cores.receiver)?;
                let mut load = Load::connect(target.socket(), DISK_BYTES)?;
                for job in &jobs {
                    show_progress(samples.len(), total);
                    let duration = Duration::from_millis(options.run_ms);
                    let before_ns = cores.line_transfer_ns()?;
                    cores::pin(cores.receiver)?;
                    let busy_before = load::cpu_time(&target.threads()?)?;
                    let mut measured = load.run(*job, duration, target.waiting())?;
                    let busy = load::cpu_time(&target.threads()?)?.saturating_sub(busy_before);
                    measured.cpu_per_request = busy.checked_div(measured.requests).unwrap_or_default();
                    let distance = Distance::of(before_ns, cores.line_transfer_ns()?);
                    samples.push(Sample { server: *server, medium, job: *job, distance, measured });
                }
            }
        }
    }
    show_progress(total, total);
    summary::write(&samples, &jobs, rival_is_there, output)
}

fn start(server: Server, medium: Medium, file: &Path, directory: &Path, cores: Cores) -> Result<Target> {
    let file = (medium == Medium::Tmpfs).then_some(file);
    match server {
        Server::Ours(mode) => Ok(Target::Ours(Ours::start(mode, file, DISK_BYTES, cores)?)),
        Server::Qemu => Ok(Target::Rival(Rival::start(file, DISK_BYTES, directory, cores)?)),
    }
}

fn show_progress(done: usize, total: usize) {
    let mut err = io::stderr();
    if err.is_terminal() {
        let end = if done == total { "\r\x1b[K" } else { "" };
        // If nobody sees it, nothing is lost.
        let _ = write!(err, "\rblk: run {done} of {total}{end}");
        let _ = err.flush();
    }
}
