//! `blk`: the path from a guest's queue to an SSD of another host, and rivals that use the same file locally.

mod cpu;
mod floor;
mod load;
mod neighbour;
mod ours;
mod paced;
mod places;
mod plain;
mod rival;
mod summary;
mod target;

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use cxl_pool::CoherenceMode;
use wadi_tests::runner::memory_tempdir;

use self::load::Measured;
use self::neighbour::Beside;
use self::target::Target;
use crate::cores::{self, Cores, Distance};

/// Disks: requests per second and latency of a volume on another host, of qemu-storage-daemon and of plain io_uring.
///
/// A driver without a VM (crate virtio-driver) uses the vhost-user socket and keeps a number of requests in flight. Ours
/// are the engine's two workers, frontend and backend, over a pool in /dev/shm, with hardware coherence and with software
/// coherence, each with the guest's memory elsewhere and in the pool (zero-copy). The rivals are a thread of qemu-storage-daemon that serves the same file, by io_uring and by the kernel's older interface
/// (aio=native), of which the quicker one counts, or its null-co, and a thread that uses the file by io_uring, without any VM. All take turns, in every round; the cores' distance is probed around each
/// run, and only equal tags are compared.
///
/// Ours has one hop more than qemu-storage-daemon. On a machine with two cores driver, frontend and backend do not each
/// have one, so the driver gives its core away whenever it finds nothing; qemu-storage-daemon is measured with a driver
/// that polls on a core of its own, which is best for it. CPU time per request, which does not depend on that, is shown
/// as well.
///
/// As an SSD of ours qemu-storage-daemon serves a file, too (medium vhost-user), and is compared with serving it to the driver itself; its own CPU
/// time is not counted then.
///
/// Volumes in several places, mirrored and striped, are measured on devices with a service time: there the cores of this
/// machine are not the limit.
#[derive(Args)]
pub(crate) struct Options {
    /// How often everything is measured.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// How long each run lasts; three times as long on a disk.
    #[arg(long, default_value_t = 200, value_name = "MILLISECONDS")]
    run_ms: u64,
    /// Measure these only.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Medium::ALL)]
    media: Vec<Medium>,
    /// Measure these only; goals that need another one are left out.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Server::ALL)]
    servers: Vec<Server>,
    /// Measure jobs only whose name contains this, such as `4K-read/qd32`.
    #[arg(long, default_value = "")]
    jobs: String,
    /// Measure volumes in several places only.
    #[arg(long)]
    places_only: bool,
}

impl Default for Options {
    fn default() -> Self {
        let (media, servers) = (Medium::ALL.into(), Server::ALL.into());
        Self { rounds: 3, run_ms: 200, media, servers, jobs: String::new(), places_only: false }
    }
}

/// What lies at the end of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Medium {
    /// Nothing: it answers at once.
    Null,
    /// A file in memory.
    Tmpfs,
    /// A file on a disk, past the page cache.
    Disk,
    /// A file in memory that qemu-storage-daemon serves: to our backend, whose SSD that is, or else to the driver itself.
    VhostUser,
}

impl Medium {
    const ALL: [Self; 4] = [Self::Null, Self::Tmpfs, Self::Disk, Self::VhostUser];

    /// How many times as long as others it is measured: disks that others use too take their time in fits and starts.
    const fn times(self) -> u32 {
        match self {
            Self::Null | Self::Tmpfs | Self::VhostUser => 1,
            Self::Disk => 3,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Tmpfs => "tmpfs",
            Self::Disk => "disk",
            Self::VhostUser => "vhost-user",
        }
    }
}

/// Who serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Server {
    /// Ours, in a pool that the hardware keeps coherent.
    Hardware,
    /// The same, with the guest's memory in the pool.
    HardwareZeroCopy,
    /// Ours, in a pool that it does not.
    Software,
    /// The same, with the guest's memory in the pool.
    SoftwareZeroCopy,
    /// qemu-storage-daemon, which uses the file by io_uring.
    Qemu,
    /// qemu-storage-daemon, which uses it by Linux AIO.
    QemuNative,
    /// Nobody: io_uring on the file.
    Plain,
}

impl Server {
    const ALL: [Self; 7] = [
        Self::Hardware,
        Self::HardwareZeroCopy,
        Self::Software,
        Self::SoftwareZeroCopy,
        Self::Qemu,
        Self::QemuNative,
        Self::Plain,
    ];
    /// The modes of qemu-storage-daemon.
    const QEMU: [Self; 2] = [Self::Qemu, Self::QemuNative];

    const fn name(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::HardwareZeroCopy => "hardware-zero-copy",
            Self::Software => "software",
            Self::SoftwareZeroCopy => "software-zero-copy",
            Self::Qemu => "qemu-storage-daemon",
            Self::QemuNative => "qemu-storage-daemon (aio=native)",
            Self::Plain => "plain io_uring",
        }
    }

    /// How our pool is kept coherent, if it is ours.
    const fn mode(self) -> Option<CoherenceMode> {
        match self {
            Self::Hardware | Self::HardwareZeroCopy => Some(CoherenceMode::Hardware),
            Self::Software | Self::SoftwareZeroCopy => Some(CoherenceMode::Software),
            Self::Qemu | Self::QemuNative | Self::Plain => None,
        }
    }

    /// Whether the guest's memory lies in our pool.
    const fn is_zero_copy(self) -> bool {
        matches!(self, Self::HardwareZeroCopy | Self::SoftwareZeroCopy)
    }

    /// What software coherence is compared with.
    const fn coherent(self) -> Option<Self> {
        match self {
            Self::Software => Some(Self::Hardware),
            Self::SoftwareZeroCopy => Some(Self::HardwareZeroCopy),
            _ => None,
        }
    }

    fn can(self, medium: Medium, job: Job) -> bool {
        match self {
            Self::Plain => matches!(medium, Medium::Tmpfs | Medium::Disk) && job.queues == 1,
            Self::QemuNative => medium != Medium::Null,
            _ => true,
        }
    }
}

/// What the driver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job {
    writes: bool,
    bytes: u32,
    /// In all queues together.
    depth: u32,
    queues: u16,
}

/// The most queues of any job.
const QUEUES_MAX: u16 = 4;

impl Job {
    fn all() -> Vec<Self> {
        let sizes = [(4 << 10, 1), (4 << 10, 32), (4 << 10, 128), (128 << 10, 32)];
        let jobs = |writes| sizes.map(|(bytes, depth)| Self { writes, bytes, depth, queues: 1 });
        let alone = [false, true].into_iter().flat_map(jobs);
        // In this order a server is connected to once for each number of queues.
        let queues = (2..=QUEUES_MAX).flat_map(|queues| {
            let sizes = [4 << 10, 128 << 10];
            let jobs = move |writes| sizes.map(|bytes| Self { writes, bytes, depth: 32, queues });
            [false, true].into_iter().flat_map(jobs)
        });
        alone.chain(queues).collect()
    }

    fn name(self) -> String {
        let kind = if self.writes { "write" } else { "read" };
        let queues = if self.queues == 1 { String::new() } else { format!("/queues{}", self.queues) };
        format!("{}K-{kind}/qd{}{queues}", self.bytes >> 10, self.depth)
    }
}

/// What was measured, and under which conditions.
#[derive(Clone, Copy, Debug)]
struct Sample {
    server: Server,
    medium: Medium,
    what: What,
    distance: Distance,
    measured: Measured,
}

/// What the driver did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// This, and nobody else did anything.
    Alone(Job),
    /// A reader's requests, one at a time, while somebody else did this.
    Reader(Beside),
}

/// How much of a device is used.
const DEVICE_BYTES: u64 = 512 << 20;

/// How long after that was written until a disk is measured.
const SETTLING: Duration = Duration::from_secs(5);

/// The files that are measured.
struct Files {
    tmpfs: PathBuf,
    disk: PathBuf,
    /// For sockets.
    directory: PathBuf,
}

impl Files {
    fn of(&self, medium: Medium) -> Option<&Path> {
        match medium {
            Medium::Null => None,
            Medium::Tmpfs | Medium::VhostUser => Some(&self.tmpfs),
            Medium::Disk => Some(&self.disk),
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
    let in_memory = memory_tempdir().context("cannot make a directory in /dev/shm")?;
    std::fs::create_dir_all(output).with_context(|| format!("cannot create {}", output.display()))?;
    let on_disk = tempfile::tempdir_in(output)
        .with_context(|| format!("cannot make a directory in {}", output.display()))?;
    let files = Files {
        tmpfs: in_memory.path().join("disk"),
        disk: on_disk.path().join("disk"),
        directory: in_memory.path().to_owned(),
    };
    let duration = Duration::from_millis(options.run_ms);
    if options.places_only {
        let figures = places::measure(cores, duration, options.rounds)?;
        return summary::write(&[], &[], rival_is_there, figures, output);
    }
    for medium in &options.media {
        files.of(*medium).map_or(Ok(()), fill)?;
    }
    let media =
        || options.media.iter().copied().filter(|medium| *medium != Medium::VhostUser || rival_is_there);
    if options.media.contains(&Medium::Disk) {
        // Disks, and above all those of virtual machines, take their time after so much was written.
        show_progress("waiting for the disk to settle");
        std::thread::sleep(SETTLING);
    }
    let jobs: Vec<Job> = Job::all().into_iter().filter(|job| job.name().contains(&options.jobs)).collect();
    let servers =
        options.servers.iter().copied().filter(|server| !Server::QEMU.contains(server) || rival_is_there);
    let servers: Vec<Server> = servers.collect();
    let mut bench = Bench { cores, duration, samples: Vec::new() };
    for round in 0..options.rounds {
        for medium in media() {
            for &server in &servers {
                show_progress(&format!("round {}: {} on {}", round + 1, server.name(), medium.name()));
                bench.measure(server, medium, &files, &jobs)?;
                if medium == Medium::Tmpfs
                    && !server.is_zero_copy()
                    && server != Server::Plain
                    && options.jobs.is_empty()
                {
                    neighbour::measure(&mut bench, server, medium, &files)?;
                }
            }
        }
    }
    show_progress("");
    let places = if options.jobs.is_empty() && options.servers.contains(&Server::Hardware) {
        places::measure(cores, duration, options.rounds)?
    } else {
        Vec::new()
    };
    summary::write(&bench.samples, &jobs, rival_is_there, places, output)
}

/// What all measurements share.
struct Bench {
    cores: Cores,
    duration: Duration,
    samples: Vec<Sample>,
}

impl Bench {
    /// Does all jobs that it can.
    fn measure(&mut self, server: Server, medium: Medium, files: &Files, jobs: &[Job]) -> Result<()> {
        // One at a time: a file has one owner, and nobody else shall wake up.
        cores::unpin(self.cores)?;
        let mut target: Option<Target> = None;
        for &job in jobs.iter().filter(|job| server.can(medium, **job)) {
            let target = match &mut target {
                Some(target) => target,
                none => none.insert(Target::start(server, medium, files, 1, None, self.cores)?),
            };
            target.connect(job.queues)?;
            let duration = self.duration * medium.times();
            self.sample(server, medium, What::Alone(job), target, |target| target.run(job, duration))?;
        }
        Ok(())
    }

    /// Takes a sample.
    fn sample(
        &mut self,
        server: Server,
        medium: Medium,
        what: What,
        target: &mut Target,
        run: impl FnOnce(&mut Target) -> Result<Measured>,
    ) -> Result<()> {
        let before_ns = self.cores.line_transfer_ns()?;
        cores::pin(self.cores.receiver)?;
        let before = cpu::times(&target.threads()?)?;
        let mut measured = run(target)?;
        let after = cpu::times(&target.threads()?)?;
        for (per_request, (before, after)) in
            measured.cpu_per_request.iter_mut().zip(before.into_iter().zip(after))
        {
            *per_request = after.saturating_sub(before).checked_div(measured.requests).unwrap_or_default();
        }
        let distance = Distance::of(before_ns, self.cores.line_transfer_ns()?);
        self.samples.push(Sample { server, medium, what, distance, measured });
        Ok(())
    }
}

/// Makes a file whose every page is there.
fn fill(path: &Path) -> Result<()> {
    let mut file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let piece = vec![0x5a; 1 << 20];
    for _ in 0..DEVICE_BYTES >> 20 {
        file.write_all(&piece)
            .with_context(|| format!("cannot fill {}: is there no room?", path.display()))?;
    }
    file.sync_all().with_context(|| format!("cannot write {}", path.display()))
}

fn show_progress(text: &str) {
    let mut err = io::stderr();
    if err.is_terminal() {
        // If nobody sees it, nothing is lost.
        let _ = write!(err, "\r\x1b[K{text}");
        let _ = err.flush();
    }
}
