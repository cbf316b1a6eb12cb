//! The engine, frontend and backend, over a pool of its own.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use cxl_channel::RingPlacement;
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{
    Area, CoherenceMode, CreateOptions, EndpointId, Generation, HostId, LineCount, LineOffset, Memory, Pool,
    Role,
};
use pod_protocol::config::Wakeup;
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, MacAddress};
use pod_protocol::objects::{
    ChannelObject, Engine as EngineKind, NicObject, NicPolicy, Object, PortObject, Priority,
    RegistrationObject, RegistrationState, Route,
};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::{Worker, WorkerConfig, WorkerHandle};
use tempfile::TempDir;
use vhost_frontend::{DeviceSink, GuestMemory, Ring, Server, StopReason};
use vhost_net_cxl::backend::Backend;
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::ChannelEnd;
use vhost_net_cxl::counters::{LeaseBook, NicCounters};
use vhost_net_cxl::frontend::{Frontend, Order, device_spec};
use vhost_net_cxl::nic::{self, NicConfig};
use vhost_net_cxl::offloads::Offloads;
use wadi_tests::runner::memory_tempdir;

use super::engine::{Engine, Message, Spent};
use super::flood::Stream;
use super::round_trip::{Latencies, RoundTrips};
use crate::cores::{self, Cores};

const SLOTS: u32 = 8192;
/// The controller's defaults.
const TRANSMIT_BYTES: u64 = 16 << 20;
const RECEIVE_BYTES: u64 = 32 << 20;
const RX_QUOTA_BUFFERS: u32 = 4096;
/// Rings, tables, and what is lost by alignment.
const OTHER_BYTES: u64 = 16 << 20;
const MTU: u16 = 1500;
const PAGE_LINES: u64 = 64;
/// The daemons' defaults.
const WAKEUP: Wakeup = Wakeup::Poll;
const BUSY_POLL: Duration = Duration::from_micros(50);

/// How the two sides are spread over the cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
    /// They take turns on the receiver's core: the driver has the other one.
    ByTurns,
    /// The backend has the sender's core: the driver runs in the frontend's thread.
    Apart,
}

/// What both sides have done so far.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) frontend: Duration,
    pub(super) backend: Duration,
    /// Packets that the NIC has sent.
    pub(super) sent: u64,
}

/// What engine is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup<'a> {
    pub(super) mode: CoherenceMode,
    /// Its NIC, as in a host's configuration.
    pub(super) nic: &'a str,
    pub(super) spread: Spread,
    pub(super) cores: Cores,
    /// How many instances have a device each, with the addresses of [`mac`].
    pub(super) ports: usize,
    /// So much of the pool is the memory of the first one; none: it lies elsewhere.
    pub(super) ram_bytes: u64,
}

/// The address of the instance with this number, from 0 on. None that `dpdk-testpmd` sends to (02:00:00:00:00:00 and up, one for each of
/// its ports): else frames would go to another instance instead of the NIC.
pub(super) fn mac(port: usize) -> [u8; 6] {
    [2, 0, 0, 0, 1, u8::try_from(port).unwrap_or(u8::MAX).saturating_add(1)]
}

/// An engine that runs.
pub(super) struct Ours {
    // Before the workers: they wait for them to let go of their rings.
    _servers: Vec<Server>,
    frontend: WorkerHandle<Message>,
    _backend: Option<Box<dyn Send>>,
    sockets: Vec<PathBuf>,
    spent: Arc<Spent>,
    leases: LeaseBook,
    nic: Arc<NicCounters>,
    ram: (File, Area),
    _directory: TempDir,
}

impl Ours {
    /// Starts it.
    pub(super) fn start(setup: Setup<'_>) -> Result<Self> {
        let directory = memory_tempdir().context("cannot make a directory in /dev/shm")?;
        let areas = transmit_bytes(setup.ports) * setup.ports as u64 + RECEIVE_BYTES + setup.ram_bytes;
        let options = CreateOptions {
            size_bytes: Some((areas + OTHER_BYTES).next_multiple_of(2 << 20)),
            mode: setup.mode,
            host_slots: 2,
            replica_slots: 1,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options)?;
        match setup.mode {
            CoherenceMode::Hardware => Self::serve(&pool, &pool.hardware(), setup, directory),
            CoherenceMode::Software => Self::serve(&pool, &pool.software(), setup, directory),
        }
    }

    fn serve<M: Memory>(pool: &Pool, memory: &M, setup: Setup<'_>, directory: TempDir) -> Result<Self> {
        let Setup { cores, spread, .. } = setup;
        let run = RunDirectory::new(directory.path()).with_wakeup(WAKEUP);
        run.prepare()?;
        let ends = [endpoint(1, Role::NetFrontend), endpoint(2, Role::NetBackend)];
        let open = || {
            let (memory, run) = (memory.clone(), run.clone());
            Box::new(move |object: &ChannelObject| {
                ChannelEnd::open(object, &memory, &run, &ChannelBook::default())
            })
        };
        let placements = Placements::new(pool, &setup)?;
        let refused = |reason: String| anyhow!(reason);

        let config = NicConfig::parse(&format!("name = 'nic0'\n{}", setup.nic).parse()?)?;
        let nic = Arc::new(NicCounters::default());
        let nics = vec![(nic::open(&config, pool, memory)?, Arc::clone(&nic))];
        let leases = LeaseBook::default();
        let mut backend = Backend::new(memory.clone(), nics, leases.clone(), open(), Box::new(|_| ()));
        let mut frontend =
            Frontend::new(memory.clone(), LeaseBook::default(), open()).context("cannot make a timer")?;
        frontend = frontend.with_pool_file(pool.file_identity());

        let channel = |peer, outgoing, incoming, receives| {
            let (id, generation) = (ChannelId::new(1), Generation::new(1));
            Object::Channel(ChannelObject {
                id,
                engine: EngineKind::Net,
                peer,
                generation,
                outgoing,
                incoming,
                receives,
            })
        };
        let nic_object = NicObject { nic: "nic0".to_owned(), rx_area: placements.receive };
        let theirs = channel(ends[0], placements.back, placements.there, None);
        for object in [theirs, Object::Nic(nic_object)] {
            backend.apply(object, None).map_err(refused)?;
        }
        let ours = channel(ends[1], placements.there, placements.back, Some(vec![placements.receive]));
        frontend.apply(ours).map_err(refused)?;
        let mut devices = Vec::with_capacity(setup.ports);
        for number in 0..setup.ports {
            let (port, registration) = objects(&placements, number, setup.ram_bytes > 0)?;
            let socket = run.sockets().join(&port.socket);
            devices.push((port.lease, socket, device_spec(&port, Some(pool.file_identity()))));
            backend.apply(Object::Registration(registration), None).map_err(refused)?;
            frontend.apply(Object::Port(port)).map_err(refused)?;
        }

        // Two on a core of their own each, or one that sleeps when it has nothing to do: then the cores can be probed.
        let cpu = |core| (spread == Spread::Apart).then_some(core);
        let worker = |core| WorkerConfig {
            wakeup: WAKEUP,
            busy_poll: BUSY_POLL,
            poll_in_flight: Duration::ZERO,
            cpu: cpu(core),
            fence: None,
        };
        let bell = |end| DoorbellListener::bind(&run.data_doorbell(end));
        let spent = Arc::new(Spent::default());
        let (backend, apart): (_, Option<Box<dyn Send>>) = match spread {
            Spread::ByTurns => (Some(backend), None),
            Spread::Apart => {
                let worker = Worker::spawn("net-backend", worker(cores.sender), bell(ends[1])?, backend)?;
                (None, Some(Box::new(worker)))
            }
        };
        // Threads begin where their parent is.
        cores::pin(cores.receiver)?;
        let engine = Engine { frontend, backend, spent: Arc::clone(&spent), load: None, turns: 0 };
        let frontend = Worker::spawn("net-frontend", worker(cores.receiver), bell(ends[0])?, engine)?;
        let (mut servers, mut sockets) = (Vec::new(), Vec::new());
        for (lease, socket, spec) in devices {
            servers.push(Server::listen(&socket, spec, Sink { lease, worker: frontend.clone() })?);
            sockets.push(socket);
        }
        let file = File::from(pool.fd().try_clone_to_owned()?);
        let ram = (file, placements.ram);
        Ok(Self {
            _servers: servers,
            frontend,
            _backend: apart,
            sockets,
            spent,
            leases,
            nic,
            ram,
            _directory: directory,
        })
    }

    /// Where the first instance's driver connects.
    pub(super) fn socket(&self) -> &Path {
        &self.sockets[0]
    }

    /// Where the drivers connect, in the order of the instances.
    pub(super) fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }

    /// Packets of the instances that the backend dropped, with the reasons.
    pub(super) fn dropped(&self) -> Vec<(String, u64)> {
        self.leases.telemetry().into_iter().flat_map(|lease| lease.drops).collect()
    }

    /// Packets that the backend took from each instance so far.
    pub(super) fn sent_by_each(&self) -> Vec<u64> {
        self.leases.telemetry().iter().map(|lease| lease.tx_packets).collect()
    }

    /// Where a guest has its memory that has it in the pool.
    pub(super) fn ram(&self) -> Result<(File, Area)> {
        Ok((self.ram.0.try_clone()?, self.ram.1))
    }

    /// What was done so far.
    pub(super) fn work(&self) -> Work {
        let time = |of: &std::sync::atomic::AtomicU64| Duration::from_nanos(of.load(Ordering::Relaxed));
        Work {
            frontend: time(&self.spent.frontend_ns),
            backend: time(&self.spent.backend_ns),
            sent: self.nic.tx_packets.get(),
        }
    }

    /// Drives the port from the frontend's thread.
    pub(super) fn round_trips(&self, load: RoundTrips) -> Result<Latencies> {
        let drive = |reply| Message::RoundTrips(Box::new(load), reply);
        self.frontend.call(drive).map_err(|_| anyhow!("the frontend's worker has ended"))
    }

    /// Has the frontend's thread drive the port until it is told to end.
    pub(super) fn stream(&self, stream: Stream) -> Result<StreamInFrontend> {
        let frontend = self.frontend.clone();
        let sent = frontend.send(Message::Stream(Box::new(stream)));
        sent.map_err(|_| anyhow!("the frontend's worker has ended"))?;
        Ok(StreamInFrontend { frontend })
    }
}

/// A driver at work in the frontend's thread.
pub(super) struct StreamInFrontend {
    frontend: WorkerHandle<Message>,
}

impl StreamInFrontend {
    /// Ends it, and says how it went.
    pub(super) fn stop(self) -> Result<()> {
        self.frontend.call(Message::EndStream).map_err(|_| anyhow!("the frontend's worker has ended"))?
    }
}

/// The transmit area of an instance: the controller's default, unless there are many.
fn transmit_bytes(ports: usize) -> u64 {
    if ports == 1 { TRANSMIT_BYTES } else { TRANSMIT_BYTES / 4 }
}

struct Placements {
    there: RingPlacement,
    back: RingPlacement,
    transmit: Vec<Area>,
    receive: Area,
    ram: Area,
}

impl Placements {
    fn new(pool: &Pool, setup: &Setup<'_>) -> Result<Self> {
        let mut next = pool.layout().data().start;
        let mut take = |lines: LineCount| -> Result<LineOffset> {
            let start = next;
            next = next.checked_add(lines).context("the pool is too small")?;
            Ok(start)
        };
        let ring = RingPlacement::lines(SLOTS, 2);
        let there = RingPlacement { start: take(ring)?, slots: SLOTS };
        let back = RingPlacement { start: take(ring)?, slots: SLOTS };
        let (each, receive) =
            (LineCount::covering(transmit_bytes(setup.ports)), LineCount::covering(RECEIVE_BYTES));
        let transmit =
            (0..setup.ports).map(|_| Ok(Area::new(take(each)?, each))).collect::<Result<Vec<Area>>>()?;
        let receive = Area::new(take(receive)?, receive);
        // Whole pages: it is mapped.
        let start = take(LineCount::new(PAGE_LINES))?.get().next_multiple_of(PAGE_LINES);
        let ram = Area::new(LineOffset::new(start), LineCount::covering(setup.ram_bytes));
        Ok(Self { there, back, transmit, receive, ram })
    }
}

fn endpoint(host: u16, role: Role) -> EndpointId {
    EndpointId::new(HostId::new(host), role)
}

fn objects(
    placements: &Placements,
    number: usize,
    ram_in_pool: bool,
) -> Result<(PortObject, RegistrationObject)> {
    let name = u32::try_from(number)? + 1;
    let lease = LeaseId::new(name).context("a small number")?;
    let (instance, generation) = (InstanceId::new(name), LeaseGeneration::new(1));
    let channel = ChannelId::new(1);
    let mac = MacAddress::new(mac(number));
    let features = Offloads::ALL.features();
    let ram_area = ram_in_pool.then_some(placements.ram);
    let port = PortObject {
        lease,
        instance,
        instance_name: "bench".to_owned(),
        device: "net0".to_owned(),
        socket: format!("net{number}.sock"),
        vmm_listens: false,
        mac,
        mtu: MTU,
        queue_pairs: 1,
        features,
        tx_area: placements.transmit[number],
        active: Route { channel, generation },
        rails: Vec::new(),
        standby: None,
        draining: None,
        incoming: false,
        policy: NicPolicy::default(),
        ram_area,
    };
    let registration = RegistrationObject {
        lease,
        nic: "nic0".to_owned(),
        instance,
        generation,
        mac,
        mtu: MTU,
        features,
        channel,
        tx_area: placements.transmit[number],
        state: RegistrationState::Active,
        rx_quota_buffers: RX_QUOTA_BUFFERS,
        policy: NicPolicy::default(),
        ram_area,
        has_other_rails: false,
        priority: Priority::DEFAULT,
    };
    Ok((port, registration))
}

/// Passes what the driver says on to the worker.
struct Sink {
    lease: LeaseId,
    worker: WorkerHandle<Message>,
}

// A worker that has ended takes the benchmark with it.
impl DeviceSink for Sink {
    fn features(&mut self, acknowledged: u64) {
        let _ = self.worker.send(Message::Order(Order::Features(self.lease, acknowledged)));
    }

    fn ring_started(&mut self, ring: Ring) {
        let _ = self.worker.send(Message::Order(Order::RingStarted(self.lease, Box::new(ring))));
    }

    fn ring_stopped(&mut self, index: u16, _reason: StopReason) -> u16 {
        let stop = |reply| Message::Order(Order::RingStopped(self.lease, index, reply));
        self.worker.call(stop).unwrap_or(0)
    }

    fn memory_changed(&mut self, memory: &GuestMemory) {
        let change = |reply| Message::Order(Order::MemoryChanged(self.lease, memory.clone(), reply));
        let _ = self.worker.call(change);
    }
}
