//! Volumes in several places: what a mirror costs, and what a second device gives.
//!
//! All of them run as in a pod: devices have tables of their volumes, and with them mirrors have their logs of intents, out of which marks
//! are taken by the frontend when its telemetry is asked for.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use comfy_table::{CellAlignment, Table, presets};
use cxl_channel::RingPlacement;
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{CoherenceMode, CreateOptions, Generation, Pool, Role};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::{ChannelId, LeaseGeneration, PlaceNumber};
use pod_protocol::objects::{ChannelObject, Engine, Object, ReplicaObject, Route, TableObject, VolumeObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::volume_table::{MirrorEntry, VolumeEntry, VolumeTable};
use tempfile::TempDir;
use vhost_blk_cxl::backend::{Backend, OpenedSsd};
use vhost_blk_cxl::frontend::Frontend;
use vhost_blk_cxl::ssd::{LABEL_BYTES, Label};
use wadi_tests::runner::memory_tempdir;

use super::Job;
use super::load::{Load, Measured, Waiting, anonymous_ram};
use super::ours::{POOL_BYTES, SLOTS, data_area, endpoint, objects, worker};
use super::paced::PacedSsd;
use crate::cores::{self, Cores};
use crate::report::{Figure, Goal, median};

/// Its log of intents does not hold all of what is written to it for long.
const DISK_BYTES: u64 = 1 << 30;
/// Where requests go: to a part of the volume all of which is soon marked in the log, and to all of it, where most writes of a short run
/// have to be marked first.
const SPANS: [Span; 2] = [Span { bytes: 64 << 20, key: "" }, Span { bytes: DISK_BYTES, key: "/all" }];
const STRIPE_BYTES: u64 = 64 << 10;
/// Copying all of a mirror, once, takes much less.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a daemon is asked for its telemetry.
const TELEMETRY_EVERY: Duration = Duration::from_millis(100);
/// Enough for two devices.
const JOBS: [Job; 2] = [
    Job { writes: true, bytes: 4 << 10, depth: 64, queues: 1 },
    Job { writes: false, bytes: 4 << 10, depth: 64, queues: 1 },
];

/// How much of the volume a job uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    bytes: u64,
    key: &'static str,
}

/// Where the volume lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Places {
    One,
    /// On two devices of different hosts, all of it on each.
    Mirror,
    /// On two devices of different hosts, a share on each.
    Stripes,
}

impl Places {
    const ALL: [Self; 3] = [Self::One, Self::Mirror, Self::Stripes];

    const fn name(self) -> &'static str {
        match self {
            Self::One => "one device",
            Self::Mirror => "mirror of two",
            Self::Stripes => "stripes over two",
        }
    }

    const fn key(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::Mirror => "mirror",
            Self::Stripes => "stripes",
        }
    }

    /// The part of one device's rate that it shall reach.
    fn goal(self, job: Job) -> Option<f64> {
        match self {
            Self::Mirror if job.writes => Some(0.6),
            Self::Stripes => Some(1.6),
            _ => None,
        }
    }
}

struct Sample {
    places: Places,
    span: Span,
    job: Job,
    measured: Measured,
}

/// Measures all of it and prints a table.
pub(super) fn measure(cores: Cores, duration: Duration, rounds: u32) -> Result<Vec<Figure>> {
    let mut samples = Vec::new();
    for _ in 0..rounds {
        for places in Places::ALL {
            cores::unpin(cores)?;
            let served = Served::start(places, cores)?;
            cores::pin(cores.receiver)?;
            for span in SPANS {
                let mut load = Load::connect(&served.socket, span.bytes, 1, &anonymous_ram()?)?;
                for job in JOBS {
                    let measured = load.run(job, duration, Waiting::Yielding)?;
                    samples.push(Sample { places, span, job, measured });
                }
            }
            let logs = served.logged.load(Ordering::Relaxed) > 0;
            ensure!(logs == (places == Places::Mirror), "mirrors have logs of intents, and nothing else has");
        }
    }
    cores::unpin(cores)?;
    let rate = |places: Places, span: Span, job: Job| {
        let of =
            samples.iter().filter(|sample| (sample.places, sample.span, sample.job) == (places, span, job));
        median(of.map(|sample| sample.measured.per_second)).unwrap_or_default()
    };
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let names = Places::ALL.map(|places| places.name().to_owned());
    table.set_header([String::new()].into_iter().chain(names));
    let mut figures = Vec::new();
    for (span, job) in SPANS.into_iter().flat_map(|span| JOBS.map(|job| (span, job))) {
        let one = rate(Places::One, span, job);
        let mut row = vec![format!("{} in {} MiB", job.name(), span.bytes >> 20)];
        for places in Places::ALL {
            let ours = rate(places, span, job);
            row.push(format!("{:.1} ({:.2})", ours / 1e3, ours / one));
            let name = format!("blk/paced/{}{}/{}/rate", job.name(), span.key, places.key());
            let figure = Figure::new(name, ours, "/s");
            figures.push(match (places, places.goal(job)) {
                (Places::One, _) => figure,
                (_, Some(part)) => figure
                    .against(Places::One.name(), Some(one))
                    .with_goal(Goal::AtLeast((one * part).round())),
                (_, None) => figure.against(Places::One.name(), Some(one)),
            });
        }
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!(
        "Volumes in several places, on devices that can do {:.0} thousand requests per second each (emulated): thousands \
         of requests per second (part of one device's)\n{table}\n",
        PacedSsd::per_second() / 1e3
    );
    Ok(figures)
}

/// A frontend and a backend for each place.
struct Served {
    // The frontend first: it lets go of its rings.
    _frontend: Asked,
    _backends: Vec<Backend>,
    /// Writes to what volumes leave free at the devices' beginning: logs of intents.
    logged: Arc<AtomicU64>,
    socket: PathBuf,
    _directory: TempDir,
}

impl Served {
    fn start(places: Places, cores: Cores) -> Result<Self> {
        let count: u16 = if places == Places::One { 1 } else { 2 };
        let directory = memory_tempdir().context("cannot make a directory in /dev/shm")?;
        let options = CreateOptions {
            size_bytes: Some(POOL_BYTES),
            mode: CoherenceMode::Hardware,
            host_slots: count + 1,
            replica_slots: 1,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options)?;
        let memory = pool.hardware();
        let run = RunDirectory::new(directory.path());
        run.prepare()?;
        let bell = |end| DoorbellListener::bind(&run.data_doorbell(end));
        let front = endpoint(1, Role::BlkFrontend);
        // Threads begin where their parent is: the backends share a core, the frontend shares the driver's.
        cores::pin(cores.receiver)?;
        let (doorbell, file) = (Some(bell(front)?), Some(pool.file_identity()));
        let mut frontend = Frontend::start(memory.clone(), run.clone(), worker(), doorbell, None, file)?;
        // The second disk's place is used; in that of the first one there are more rings.
        let (mut disk, mut volume) = objects(&pool, 1, DISK_BYTES, false)?;
        volume.start_bytes = LABEL_BYTES;
        let refused = |reason: String| anyhow!(reason);
        let mut backends = Vec::new();
        let logged = Arc::default();
        for number in 0..count {
            cores::pin(cores.sender)?;
            let back = endpoint(number + 2, Role::BlkBackend);
            let ssd = OpenedSsd::new("ssd0", Box::new(PacedSsd::new(LABEL_BYTES + DISK_BYTES, &logged)?));
            let mut backend =
                Backend::start(memory.clone(), run.clone(), worker(), Some(bell(back)?), vec![ssd], None)?;
            let lines = RingPlacement::lines(SLOTS, 8);
            let start = if number == 0 { pool.layout().data().start } else { data_area(&pool, 0).start };
            let [there, here] =
                [start, start.saturating_add(lines)].map(|start| RingPlacement { start, slots: SLOTS });
            there.clear(&memory);
            here.clear(&memory);
            let route =
                Route { channel: ChannelId::new(u32::from(number) + 1), generation: LeaseGeneration::new(1) };
            let channel = |peer, outgoing, incoming| {
                let (id, generation) = (route.channel, Generation::new(1));
                Object::Channel(ChannelObject {
                    id,
                    engine: Engine::Blk,
                    peer,
                    generation,
                    outgoing,
                    incoming,
                    receives: None,
                })
            };
            backend.apply(channel(front, here, there)).map_err(refused)?;
            frontend.apply(channel(back, there, here)).map_err(refused)?;
            volume.channel = route.channel;
            if places == Places::Mirror {
                let file = directory.path().join(format!("table{number}"));
                backend.keep_tables(vec![("ssd0".to_owned(), label(&file)?)]);
                backend.apply(Object::Table(table(&volume, number.into()))).map_err(refused)?;
            }
            backend.apply(Object::Volume(volume.clone())).map_err(refused)?;
            disk.replicas.push(ReplicaObject {
                number: number.into(),
                ssd: format!("h{}/ssd0", number + 2),
                route,
                place: PlaceNumber::FIRST,
                in_sync: true,
                away: false,
                leaving: false,
            });
            backends.push(backend);
        }
        match places {
            Places::One => disk.replicas.clear(),
            Places::Mirror => {}
            Places::Stripes => disk.stripe_bytes = Some(STRIPE_BYTES),
        }
        let socket = run.sockets().join(&disk.socket);
        frontend.apply(Object::Disk(disk)).map_err(refused)?;
        let began = Instant::now();
        while frontend.telemetry().gauges["mirror-dirty-bytes"] > 0 {
            ensure!(began.elapsed() < PATIENCE, "the mirror was never in line");
            std::thread::sleep(Duration::from_millis(5));
        }
        let frontend = Asked::every(TELEMETRY_EVERY, frontend)?;
        Ok(Self { _frontend: frontend, _backends: backends, logged, socket, _directory: directory })
    }
}

/// Where a device's table stands. The device itself keeps no data.
fn label(path: &Path) -> Result<Label> {
    File::create(path)?.set_len(LABEL_BYTES)?;
    Ok(Label::open(path)?)
}

/// The table of a device that has a replica.
fn table(volume: &VolumeObject, number: u32) -> TableObject {
    let entry = VolumeEntry {
        id: volume.volume,
        name: "bench".to_owned(),
        start_bytes: volume.start_bytes,
        size_bytes: volume.size_bytes,
        deleted: false,
        mirror: Some(MirrorEntry { epoch: 0, number, replicas: Vec::new() }),
        stripe: None,
    };
    TableObject { ssd: volume.ssd.clone(), table: VolumeTable { volumes: vec![entry] } }
}

/// A frontend that is asked for its telemetry, as the controller asks daemons.
struct Asked {
    is_over: Arc<AtomicBool>,
    asking: Option<JoinHandle<()>>,
    _frontend: Arc<Mutex<Frontend>>,
}

impl Asked {
    fn every(interval: Duration, frontend: Frontend) -> Result<Self> {
        let (frontend, is_over) = (Arc::new(Mutex::new(frontend)), Arc::new(AtomicBool::new(false)));
        let (asked, stop) = (Arc::clone(&frontend), Arc::clone(&is_over));
        let asking = std::thread::Builder::new().name("telemetry".to_owned()).spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                lock(&asked).telemetry();
                std::thread::park_timeout(interval);
            }
        })?;
        Ok(Self { is_over, asking: Some(asking), _frontend: frontend })
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(asking) = self.asking.take() {
            asking.thread().unpark();
            // If it panicked, that was said.
            let _ = asking.join();
        }
    }
}

fn lock(frontend: &Mutex<Frontend>) -> MutexGuard<'_, Frontend> {
    // Nothing panics while it holds the lock.
    frontend.lock().unwrap_or_else(PoisonError::into_inner)
}
