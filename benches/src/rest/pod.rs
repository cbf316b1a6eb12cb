//! The daemons of an idle pod, in threads, over memory that counts.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cxl_channel::RingPlacement;
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{Area, CreateOptions, EndpointId, Generation, HostId, LineCount, Pool, Role, SoftwareMemory};
use pod_protocol::config::HostConfig;
use pod_protocol::controller::{ControllerPort, PortEvent};
use pod_protocol::daemon::{Exit, StopSignal};
use pod_protocol::data_channel::{BLK_WORDS, DataChannel, NET_WORDS};
use pod_protocol::endpoint::{Endpoint, Handler, RunError};
use pod_protocol::ids::{ChannelId, RegionId};
use pod_protocol::objects::{ChannelObject, Engine, Object, ObjectId};
use pod_protocol::reports::Join;
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::telemetry::Telemetry;
use pod_protocol::worker::{Progress, Sources, Task, Token, Worker, WorkerConfig, WorkerHandle};
use wadi_tests::runner::memory_tempdir;

use super::Way;
use super::counting::{Counted, CountingMemory, Counts};
use crate::cores::Cores;

const SLOTS: u32 = 8192;
const POOL_BYTES: u64 = 32 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

type Counting = CountingMemory<SoftwareMemory>;

/// Which part of the pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    FrontendWorker,
    BackendWorker,
    /// Presence, fence, telemetry and the control channel of both daemons.
    Control,
    Controller,
}

impl Part {
    pub(super) const ALL: [Self; 4] =
        [Self::FrontendWorker, Self::BackendWorker, Self::Control, Self::Controller];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::FrontendWorker => "frontend's worker",
            Self::BackendWorker => "backend's worker",
            Self::Control => "control, both",
            Self::Controller => "controller",
        }
    }

    pub(super) const fn slug(self) -> &'static str {
        match self {
            Self::FrontendWorker => "frontend-worker",
            Self::BackendWorker => "backend-worker",
            Self::Control => "control",
            Self::Controller => "controller",
        }
    }
}

/// A worker with one channel pair of each size and nothing else to do.
struct Idle {
    net: DataChannel<Counting, NET_WORDS>,
    blk: DataChannel<Counting, BLK_WORDS>,
    ready: Arc<AtomicBool>,
}

impl Task for Idle {
    type Message = ();

    fn message(&mut self, (): (), _: &mut Sources) {}

    fn turn(&mut self) -> Progress {
        let ready = self.net.ready() & self.blk.ready();
        self.ready.store(ready, Ordering::Release);
        let came = self.net.receive().is_some() | self.blk.receive().is_some();
        if came { Progress::Busy } else { Progress::Idle }
    }

    fn ready(&mut self, _: Token) {}

    fn prepare_sleep(&mut self) -> bool {
        self.net.announce_sleep() & self.blk.announce_sleep()
    }

    fn resume(&mut self) {
        self.net.wake();
        self.blk.wake();
    }
}

/// A daemon that is given nothing.
struct Nothing {
    /// Ends with the daemon.
    _worker: WorkerHandle<()>,
}

impl Handler for Nothing {
    fn apply(&mut self, _: Object) -> Result<(), String> {
        Ok(())
    }

    fn remove(&mut self, _: ObjectId) -> Result<(), String> {
        Ok(())
    }

    fn scrub(&mut self, _: RegionId, _: Area) -> Result<(), String> {
        Ok(())
    }

    fn telemetry(&mut self) -> Telemetry {
        Telemetry::default()
    }

    fn fenced(&mut self) {}
}

/// A pod with a controller and two daemons.
pub(super) struct Pod {
    counts: Vec<(Part, Arc<Counts>)>,
    stop: Vec<StopSignal>,
    daemons: Vec<JoinHandle<Result<Exit, RunError>>>,
    controller: JoinHandle<()>,
    controller_stops: Arc<AtomicBool>,
    _directory: tempfile::TempDir,
}

impl Pod {
    pub(super) fn start(way: Way, cores: Cores) -> Result<Self> {
        let directory = memory_tempdir().context("cannot make a directory in /dev/shm")?;
        let options = CreateOptions {
            size_bytes: Some(POOL_BYTES),
            host_slots: 2,
            replica_slots: 1,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options)?;
        let counts: Vec<_> = Part::ALL.into_iter().map(|part| (part, Counts::new(POOL_BYTES))).collect();
        let memory = |part| {
            let counts = counts.iter().find(|(of, _)| *of == part).map(|(_, counts)| Arc::clone(counts));
            let counts = counts.context("every part is counted")?;
            anyhow::Ok(CountingMemory { memory: pool.software(), counts })
        };
        let run = RunDirectory::new(directory.path());
        let controller_stops = Arc::new(AtomicBool::new(false));
        let mut port = ControllerPort::open(&pool, memory(Part::Controller)?, run.clone(), 1)?;
        port.set_doorbells(way == Way::Socket);
        let stops = Arc::clone(&controller_stops);
        let controller = thread::spawn(move || control(&mut port, &stops));
        let mut pod = Self {
            counts: counts.clone(),
            stop: Vec::new(),
            daemons: Vec::new(),
            controller,
            controller_stops,
            _directory: directory,
        };
        let mut ready = Vec::new();
        for (part, core) in [(Part::FrontendWorker, cores.sender), (Part::BackendWorker, cores.receiver)] {
            let is_ready = Arc::new(AtomicBool::new(false));
            ready.push(Arc::clone(&is_ready));
            let cpu = (way == Way::Dedicated).then_some(core);
            let memory = (memory(part)?, memory(Part::Control)?);
            pod.join(&pool, &run, part, (way, cpu), memory, is_ready)?;
        }
        let deadline = Instant::now() + PATIENCE;
        while !ready.iter().all(|ready| ready.load(Ordering::Acquire)) {
            ensure!(Instant::now() < deadline, "the channels do not get ready");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(pod)
    }

    fn join(
        &mut self,
        pool: &Pool,
        run: &RunDirectory,
        part: Part,
        (way, cpu): (Way, Option<usize>),
        (data, control): (Counting, Counting),
        ready: Arc<AtomicBool>,
    ) -> Result<()> {
        let is_frontend = part == Part::FrontendWorker;
        let ends = [(1, Role::NetFrontend), (2, Role::NetBackend)]
            .map(|(host, role)| EndpointId::new(HostId::new(host), role));
        let (own, peer) = if is_frontend { (ends[0], ends[1]) } else { (ends[1], ends[0]) };
        let config = config(run.root(), own.host, if way == Way::Socket { "socket" } else { "poll" })?;
        // As a daemon with this configuration has it: where it polls, its receivers wait for no doorbell.
        let run = &config.run_directory();
        let bell = DoorbellListener::bind(&run.data_doorbell(own));
        let objects = [(Engine::Net, NET_WORDS), (Engine::Blk, BLK_WORDS)]
            .map(|(engine, words)| object(pool, engine, words, peer, is_frontend));
        let mut net = DataChannel::open(&data, &objects[0], run)?;
        let mut blk = DataChannel::open(&data, &objects[1], run)?;
        net.sender.set_wakeups(way == Way::Socket);
        blk.sender.set_wakeups(way == Way::Socket);
        let join = Join {
            host_name: config.host.name.clone(),
            software: "wadi-benches".to_owned(),
            pid: std::process::id(),
            devices: Vec::new(),
            memory_failures: Vec::new(),
            fence_ms: None,
        };
        let section = config.run.clone();
        let endpoint = Endpoint::try_join(pool, control, &config, own.role, join, |_, fence| {
            let worker = WorkerConfig::new(&section, cpu, fence);
            let handle = Worker::spawn("rest", worker, bell?, Idle { net, blk, ready })?;
            Ok::<_, anyhow::Error>(Box::new(Nothing { _worker: handle }) as Box<dyn Handler>)
        })?;
        let stop = StopSignal::manual().context("cannot make a pipe")?;
        self.stop.push(stop.clone());
        self.daemons.push(thread::spawn(move || endpoint.run_until(&stop)));
        Ok(())
    }

    pub(super) fn counts(&self, part: Part) -> Counted {
        self.counts.iter().find(|(of, _)| *of == part).map(|(_, counts)| counts.read()).unwrap_or_default()
    }

    pub(super) fn stop(self) -> Result<()> {
        self.stop.iter().for_each(StopSignal::stop);
        for daemon in self.daemons {
            match daemon.join() {
                Ok(outcome) => _ = outcome.context("a daemon failed")?,
                Err(_) => bail!("a daemon panicked"),
            }
        }
        self.controller_stops.store(true, Ordering::Release);
        ensure!(self.controller.join().is_ok(), "the controller's side panicked");
        Ok(())
    }
}

/// The controller's side: lets everybody join.
fn control(port: &mut ControllerPort<Counting>, stops: &AtomicBool) {
    while !stops.load(Ordering::Acquire) {
        while let Some(event) = port.poll(Instant::now()) {
            match event {
                PortEvent::Appeared { endpoint, .. } => {
                    // One that is gone again is not granted, and will be seen to be gone.
                    let _ = port.grant(endpoint);
                }
                PortEvent::Joined { request, .. } => port.answer(request, Ok(())),
                _ => {}
            }
        }
        port.wait(Duration::from_millis(20));
    }
}

fn config(run: &Path, host: HostId, wakeup: &str) -> Result<HostConfig> {
    let text = format!(
        "[host]\nid = {0}\nname = \"h{0}\"\n[pool]\npath = \"unused\"\n[run]\ndirectory = {1:?}\nwakeup = {wakeup:?}\n",
        host.get(),
        run.display().to_string(),
    );
    Ok(HostConfig::parse(&text, Path::new("host.toml"))?)
}

/// One side of a channel pair. Both pairs lie one behind the other in the pool's data.
fn object(pool: &Pool, engine: Engine, words: usize, peer: EndpointId, is_frontend: bool) -> ChannelObject {
    let ring = RingPlacement::lines(SLOTS, words).get();
    let first = if engine == Engine::Net { 0 } else { 2 * RingPlacement::lines(SLOTS, NET_WORDS).get() };
    let place = |lines| RingPlacement {
        start: pool
            .layout()
            .data()
            .start
            .checked_add(LineCount::new(lines))
            .unwrap_or(pool.layout().data().start),
        slots: SLOTS,
    };
    let (there, back) = (place(first), place(first + ring));
    let (outgoing, incoming) = if is_frontend { (there, back) } else { (back, there) };
    let id = ChannelId::new(if engine == Engine::Net { 1 } else { 2 });
    ChannelObject { id, engine, peer, generation: Generation::new(1), outgoing, incoming, receives: None }
}
