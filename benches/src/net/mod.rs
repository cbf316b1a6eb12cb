//! `net`: the path from a guest's queue to a NIC of another host and back, and a rival that has one hop only.

mod devices;
mod engine;
mod flood;
mod guests;
mod huge_pages;
mod ours;
mod round_trip;
mod summary;
mod testpmd;

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use cxl_pool::CoherenceMode;

use self::flood::{Flood, Frame, GuestMemory, Stream};
use self::huge_pages::HugePages;
use self::ours::{Ours, Setup, Spread, StreamInFrontend, Work};
use self::round_trip::{Latencies, RoundTrips};
use self::testpmd::{DRIVER_MAC, Forwarding, Side, Testpmd};
use crate::cores::{self, Cores, Distance};

/// Networks: packets per second both ways and round trips through a NIC of another host, and of dpdk-testpmd's own vhost
/// port.
///
/// The guest's driver is dpdk-testpmd with a virtio-user port on the vhost-user socket, one queue pair of 256 entries, on
/// a core of its own. Ours are the engine's frontend and backend over a pool in /dev/shm, with hardware coherence and with
/// software coherence, and the null NIC; they take turns on the other core. The rival on that core is dpdk-testpmd with a
/// vhost port: one hop of shared memory, where ours has two. Both use huge pages if this machine has some to give.
///
/// One row is of a guest whose memory lies in the pool, so that nothing that it sends is copied. testpmd can have no such memory:
/// a driver of ours does the same work per packet there. The rival's row is with testpmd's driver and copies as ever.
///
/// CPU time per packet is the time of each side's turns over the number of packets; turns that found nothing to do do not
/// count. For round trips the two sides have a core each: a load generator of ours, with one packet in flight, runs in the
/// frontend's thread; on its own core it drives the rival.
///
/// Then 1 to 16 guests of one frontend, all of them ports of one testpmd: how evenly the rate is shared is told by Jain's index.
///
/// And the NIC drivers `tap` and `af-xdp`, in a network namespace of the benchmark's own, against the same devices used directly: by
/// dpdk-testpmd's drivers, and, for TCP of 64 KiB that is still to be segmented, by a loop of writes to a TAP device and by frames of 1502 B through
/// AF_XDP, which has no segmentation. Counted is what the kernel says that it got. Rows `-apart` have a core for each of the two sides, as
/// two hosts do, and the driver runs in the frontend's thread.
///
/// All take turns, in every round; the cores' distance is probed around each run, and only equal tags are compared.
#[derive(Args)]
pub(crate) struct Options {
    /// How often everything is measured.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// How long each run lasts.
    #[arg(long, default_value_t = 400, value_name = "MILLISECONDS")]
    run_ms: u64,
    /// Measure only the jobs whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 3, run_ms: 400, only: None }
    }
}

/// Who carries the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    Ours(CoherenceMode),
    Testpmd,
}

impl Server {
    const ALL: [Self; 3] =
        [Self::Ours(CoherenceMode::Hardware), Self::Ours(CoherenceMode::Software), Self::Testpmd];

    const fn name(self) -> &'static str {
        match self {
            Self::Ours(CoherenceMode::Hardware) => "hardware-coherent",
            Self::Ours(CoherenceMode::Software) => "software-coherent",
            Self::Testpmd => "dpdk-testpmd vhost",
        }
    }
}

const OURS: Server = Server::Ours(CoherenceMode::Hardware);
const SOFTWARE: Server = Server::Ours(CoherenceMode::Software);

/// Which way packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    FromGuest,
    /// From a guest whose memory lies in the pool, so that nothing is copied; the rival copies as ever.
    Lent,
    ToGuest,
    /// One packet there and back at a time.
    RoundTrip,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job {
    way: Way,
    frame_bytes: u32,
}

impl Job {
    const ALL: [Self; 7] = [
        Self { way: Way::FromGuest, frame_bytes: 64 },
        Self { way: Way::FromGuest, frame_bytes: 1500 },
        Self { way: Way::Lent, frame_bytes: 1500 },
        Self { way: Way::ToGuest, frame_bytes: 64 },
        Self { way: Way::ToGuest, frame_bytes: 1500 },
        Self { way: Way::RoundTrip, frame_bytes: 64 },
        Self { way: Way::RoundTrip, frame_bytes: 1500 },
    ];

    fn name(self) -> String {
        let way = match self.way {
            Way::FromGuest => "from-guest",
            Way::Lent => "from-guest-in-pool",
            Way::ToGuest => "to-guest",
            Way::RoundTrip => "round-trip",
        };
        format!("{way}/{}B", self.frame_bytes)
    }

    /// The NIC that this job wants.
    fn nic(self) -> String {
        match self.way {
            Way::FromGuest | Way::Lent => "driver = 'null'\nmode = 'sink'".to_owned(),
            Way::ToGuest => {
                let bytes = self.frame_bytes;
                format!(
                    "driver = 'null'\nmode = 'source'\nframe-bytes = {bytes}\ndestination = '{DRIVER_MAC}'"
                )
            }
            Way::RoundTrip => "driver = 'null'\nmode = 'echo'".to_owned(),
        }
    }
}

/// What came out.
#[derive(Clone, Debug)]
enum Measured {
    Rate {
        packets_per_second: f64,
        /// Of our two sides, per packet; the rival has but one.
        frontend_ns: Option<f64>,
        backend_ns: Option<f64>,
    },
    RoundTrips(Latencies),
}

/// What was measured, and under which conditions.
#[derive(Clone, Debug)]
struct Sample {
    server: Server,
    job: Job,
    distance: Distance,
    measured: Measured,
}

/// Where and how to measure.
struct Bench<'a> {
    cores: Cores,
    directory: &'a Path,
    huge_pages: bool,
    run: Duration,
}

/// Packets come and go for so long before anything counts.
const WARM_UP: Duration = Duration::from_millis(50);

/// Runs the benchmark.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    ensure!(options.rounds > 0 && options.run_ms >= 10, "give at least one round, and 10 ms for each run");
    let cores = Cores::choose()?;
    if let Some(load) = cores::busy() {
        println!("The machine is busy (load {load}): the figures will show that. Run this alone.");
    }
    let testpmd_is_there = testpmd::is_installed();
    if !testpmd_is_there {
        println!(
            "dpdk-testpmd is not installed: no driver for the rates, so only round trips are measured, and no rival to \
             compare with (deploy/setup-debian.sh bench installs it)."
        );
    }
    let wanted = |job: &Job| {
        (testpmd_is_there || job.way == Way::RoundTrip)
            && options.only.as_ref().is_none_or(|only| job.name().contains(only))
    };
    let jobs: Vec<Job> = Job::ALL.into_iter().filter(wanted).collect();
    let servers: Vec<Server> =
        Server::ALL.into_iter().filter(|server| testpmd_is_there || *server != Server::Testpmd).collect();
    let directory = tempfile::tempdir().context("cannot make a directory")?;
    let pages = if testpmd_is_there { HugePages::reserve() } else { None };
    if testpmd_is_there && pages.is_none() {
        println!("No huge pages are to be had (root may reserve some): dpdk-testpmd runs without.");
    }
    let bench = Bench {
        cores,
        directory: directory.path(),
        huge_pages: pages.is_some(),
        run: Duration::from_millis(options.run_ms),
    };
    let wanted = |guests: &usize| {
        testpmd_is_there && options.only.as_ref().is_none_or(|only| guests::name(*guests).contains(only))
    };
    let counts: Vec<usize> = guests::COUNTS.into_iter().filter(wanted).collect();
    let wanted = |job: &devices::Job| options.only.as_ref().is_none_or(|only| job.name().contains(only));
    let through: Vec<devices::Job> = if devices::can_be_made(testpmd_is_there) {
        devices::Job::ALL.into_iter().filter(wanted).collect()
    } else {
        Vec::new()
    };
    let total = options.rounds as usize * (jobs.len() + counts.len() + through.len()) * servers.len();
    let mut shared = Vec::with_capacity(total);
    let mut to_devices = Vec::with_capacity(total);
    let mut samples = Vec::with_capacity(total);
    for _ in 0..options.rounds {
        for job in &jobs {
            for server in &servers {
                show_progress(samples.len() + shared.len() + to_devices.len(), total);
                let sample = bench.measure(*server, *job);
                let what = || format!("{} of {}", job.name(), server.name());
                samples.push(sample.with_context(what)?);
            }
        }
        for guests in &counts {
            for server in &servers {
                show_progress(samples.len() + shared.len() + to_devices.len(), total);
                let sample = bench.guests(*server, *guests);
                shared.push(sample.with_context(|| format!("{guests} guests of {}", server.name()))?);
            }
        }
        for job in &through {
            for server in &servers {
                show_progress(samples.len() + shared.len() + to_devices.len(), total);
                let sample = bench.device(*server, *job);
                to_devices.push(sample.with_context(|| format!("{} of {}", job.name(), server.name()))?);
            }
        }
    }
    show_progress(total, total);
    summary::write(&samples, &jobs, &shared, &to_devices, testpmd_is_there, output)
}

/// What is at the other end of the driver's queues.
enum OtherEnd<'a> {
    Ours(&'a Ours),
    Rival(&'a mut Testpmd),
}

/// Who drives the guest's end of the queues.
enum Driver {
    Testpmd(Testpmd),
    /// It sends from the beginning.
    Flood(Flood),
    /// So does this one, in the frontend's thread.
    InFrontend(StreamInFrontend),
}

impl Driver {
    fn begin(&mut self, forwarding: Forwarding) -> Result<()> {
        match self {
            Self::Testpmd(testpmd) => testpmd.forward(forwarding),
            Self::Flood(_) | Self::InFrontend(_) => Ok(()),
        }
    }

    fn received(&mut self) -> Result<u64> {
        match self {
            Self::Testpmd(testpmd) => Ok(testpmd.totals()?.received),
            Self::Flood(_) | Self::InFrontend(_) => Ok(0),
        }
    }

    fn end(self) -> Result<()> {
        match self {
            Self::Testpmd(mut testpmd) => testpmd.stop(),
            Self::Flood(flood) => flood.stop(),
            Self::InFrontend(stream) => stream.stop(),
        }
    }
}

/// How far everything was at a time.
struct Snapshot {
    at: Instant,
    /// Packets that reached the end of their way: dropped ones do not count.
    arrived: u64,
    work: Option<Work>,
}

impl Snapshot {
    fn take(driver: &mut Driver, job: Job, other_end: &mut OtherEnd<'_>) -> Result<Self> {
        let arrived = match (job.way, &mut *other_end) {
            (Way::FromGuest | Way::Lent, OtherEnd::Ours(ours)) => ours.work().sent,
            (Way::FromGuest | Way::Lent, OtherEnd::Rival(rival)) => rival.totals()?.received,
            _ => driver.received()?,
        };
        let at = Instant::now();
        let work = match other_end {
            OtherEnd::Ours(ours) => Some(ours.work()),
            OtherEnd::Rival(_) => None,
        };
        Ok(Self { at, arrived, work })
    }
}

impl Bench<'_> {
    fn measure(&self, server: Server, job: Job) -> Result<Sample> {
        cores::unpin(self.cores)?;
        let (measured, distance) = match (server, job.way) {
            (_, Way::RoundTrip) => self.round_trips(server, job)?,
            (Server::Ours(mode), way) => {
                let lent = way == Way::Lent;
                let ours = self.ours(
                    mode,
                    &job.nic(),
                    Spread::ByTurns,
                    1,
                    if lent { flood::memory_bytes(job.frame_bytes) } else { 0 },
                )?;
                let driver = if lent {
                    cores::unpin(self.cores)?;
                    let (pool, ram) = ours.ram()?;
                    let frame = Frame::datagram(ours::mac(0), job.frame_bytes);
                    let stream = Stream::connect(ours.socket(), GuestMemory::Pool(pool, ram), frame)?;
                    Driver::Flood(Flood::start(stream, self.cores.sender))
                } else {
                    self.driver(ours.sockets())?
                };
                self.rate(driver, job, &mut OtherEnd::Ours(&ours))?
            }
            (Server::Testpmd, _) => {
                let socket = self.directory.join("rival.sock");
                let mut rival =
                    Testpmd::start(Side::Vhost, &[&socket], self.directory, self.cores, self.huge_pages)?;
                let driver = self.driver(&[&socket])?;
                rival.forward(match job.way {
                    Way::ToGuest => Forwarding::Transmit { frame_bytes: job.frame_bytes },
                    _ => Forwarding::Receive,
                })?;
                self.rate(driver, job, &mut OtherEnd::Rival(&mut rival))?
            }
        };
        Ok(Sample { server, job, distance, measured })
    }

    fn ours(
        &self,
        mode: CoherenceMode,
        nic: &str,
        spread: Spread,
        ports: usize,
        ram_bytes: u64,
    ) -> Result<Ours> {
        Ours::start(Setup { mode, nic, spread, cores: self.cores, ports, ram_bytes })
    }

    fn driver(&self, sockets: &[impl AsRef<Path>]) -> Result<Driver> {
        Ok(Driver::Testpmd(self.testpmd(sockets)?))
    }

    fn testpmd(&self, sockets: &[impl AsRef<Path>]) -> Result<Testpmd> {
        cores::unpin(self.cores)?;
        Testpmd::start(Side::Driver, sockets, self.directory, self.cores, self.huge_pages)
    }

    /// How many packets per second reach the end of their way.
    fn rate(
        &self,
        mut driver: Driver,
        job: Job,
        other_end: &mut OtherEnd<'_>,
    ) -> Result<(Measured, Distance)> {
        let before_ns = self.cores.line_transfer_ns()?;
        cores::unpin(self.cores)?;
        driver.begin(if job.way == Way::ToGuest {
            Forwarding::Receive
        } else {
            Forwarding::Transmit { frame_bytes: job.frame_bytes }
        })?;
        thread::sleep(WARM_UP);
        let before = Snapshot::take(&mut driver, job, other_end)?;
        thread::sleep(self.run);
        let after = Snapshot::take(&mut driver, job, other_end)?;
        driver.end()?;
        let distance = Distance::of(before_ns, self.cores.line_transfer_ns()?);
        let packets = after.arrived - before.arrived;
        ensure!(packets > 0, "not a single packet came through");
        let packets = as_f64(packets);
        let cpu_ns = |of: fn(&Work) -> Duration| -> Option<f64> {
            let spent = of(after.work.as_ref()?).saturating_sub(of(before.work.as_ref()?));
            Some(spent.as_secs_f64() * 1e9 / packets)
        };
        let measured = Measured::Rate {
            packets_per_second: packets / (after.at - before.at).as_secs_f64(),
            frontend_ns: cpu_ns(|work| work.frontend),
            backend_ns: cpu_ns(|work| work.backend),
        };
        Ok((measured, distance))
    }

    /// Round trips of single packets, by a load generator of ours.
    fn round_trips(&self, server: Server, job: Job) -> Result<(Measured, Distance)> {
        let before_ns = self.cores.line_transfer_ns()?;
        cores::unpin(self.cores)?;
        let source = ours::mac(0);
        let latencies = match server {
            Server::Ours(mode) => {
                let ours = self.ours(mode, &job.nic(), Spread::Apart, 1, 0)?;
                cores::unpin(self.cores)?;
                let load = RoundTrips::connect(ours.socket(), source, job.frame_bytes)?;
                ours.round_trips(load.lasting(WARM_UP, self.run))?
            }
            Server::Testpmd => {
                let socket = self.directory.join("echo.sock");
                // The other way round: the load has the receiver's core.
                let Cores { receiver, sender } = self.cores;
                let swapped = Cores { receiver: sender, sender: receiver };
                let mut rival =
                    Testpmd::start(Side::Vhost, &[&socket], self.directory, swapped, self.huge_pages)?;
                let load = RoundTrips::connect(&socket, source, job.frame_bytes)?;
                rival.forward(Forwarding::Echo)?;
                cores::pin(receiver)?;
                let mut load = load.lasting(WARM_UP, self.run);
                let latencies = loop {
                    if let Some(latencies) = load.step() {
                        break latencies;
                    }
                };
                cores::unpin(self.cores)?;
                rival.stop()?;
                latencies
            }
        };
        let distance = Distance::of(before_ns, self.cores.line_transfer_ns()?);
        Ok((Measured::RoundTrips(latencies), distance))
    }
}

/// Distances of the cores to tell apart. One that was seen now and then only has too few samples to compare.
fn seen_often<T>(samples: &[T], of: impl Fn(&T) -> Distance) -> Vec<Distance> {
    let is_common = |distance: &Distance| {
        let count = samples.iter().filter(|sample| of(sample) == *distance).count();
        count > 0 && count * 4 >= samples.len()
    };
    [Distance::Near, Distance::Far].into_iter().filter(is_common).collect()
}

#[allow(clippy::cast_precision_loss, reason = "counts of packets are far below 2^53")]
fn as_f64(count: u64) -> f64 {
    count as f64
}

fn show_progress(done: usize, total: usize) {
    let mut err = io::stderr();
    if err.is_terminal() {
        let end = if done == total { "\r\x1b[K" } else { "" };
        // If nobody sees it, nothing is lost.
        let _ = write!(err, "\rnet: run {done} of {total}{end}");
        let _ = err.flush();
    }
}
