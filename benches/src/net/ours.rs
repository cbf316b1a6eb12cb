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
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId};
use pod_protocol::objects::{
    ChannelObject, Engine as EngineKind, NicObject, NicPolicy, Object, PortObject, RegistrationObject,
    RegistrationState, Route,
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

use super::engine::{Engine, Message, Spent};
use super::flood::MEMORY_BYTES;
use super::round_trip::{Latencies, RoundTrips};
use crate::cores::{self, Cores};

const SLOTS: u32 = 8192;
/// The controller's defaults.
const TRANSMIT_BYTES: u64 = 16 << 20;
const RECEIVE_BYTES: u64 = 32 << 20;
const RX_QUOTA_BUFFERS: u32 = 4096;
const POOL_BYTES: u64 = 128 << 20;
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

/// An engine that runs, with one device.
pub(super) struct Ours {
    // Before the workers: it waits for them to let go of its rings.
    _server: Server,
    frontend: WorkerHandle<Message>,
    _backend: Option<Box<dyn Send>>,
    socket: PathBuf,
    spent: Arc<Spent>,
    nic: Arc<NicCounters>,
    ram: (File, Area),
    _directory: TempDir,
}

impl Ours {
    /// Starts it with one NIC, given as in a host's configuration, for an instance with this address.
    pub(super) fn start(
        mode: CoherenceMode,
        nic: &str,
        mac: &str,
        spread: Spread,
        cores: Cores,
        ram_in_pool: bool,
    ) -> Result<Self> {
        let directory = tempfile::tempdir_in("/dev/shm").context("cannot make a directory in /dev/shm")?;
        let options = CreateOptions {
            size_bytes: Some(POOL_BYTES),
            mode,
            host_slots: 2,
            replica_slots: 1,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options)?;
        match mode {
            CoherenceMode::Hardware => {
                Self::serve(&pool, &pool.hardware(), nic, mac, spread, cores, directory, ram_in_pool)
            }
            CoherenceMode::Software => {
                Self::serve(&pool, &pool.software(), nic, mac, spread, cores, directory, ram_in_pool)
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the second half of `start`")]
    fn serve<M: Memory>(
        pool: &Pool,
        memory: &M,
        nic: &str,
        mac: &str,
        spread: Spread,
        cores: Cores,
        directory: TempDir,
        ram_in_pool: bool,
    ) -> Result<Self> {
        let run = RunDirectory::new(directory.path()).with_wakeup(WAKEUP);
        run.prepare()?;
        let ends = [endpoint(1, Role::NetFrontend), endpoint(2, Role::NetBackend)];
        let open = || {
            let (memory, run) = (memory.clone(), run.clone());
            Box::new(move |object: &ChannelObject| {
                ChannelEnd::open(object, &memory, &run, &ChannelBook::default())
            })
        };
        let placements = Placements::new(pool)?;
        let refused = |reason: String| anyhow!(reason);

        let config = NicConfig::parse(&format!("name = 'nic0'\n{nic}").parse()?)?;
        let nic = Arc::new(NicCounters::default());
        let nics = vec![(nic::open(&config, pool, memory)?, Arc::clone(&nic))];
        let mut backend = Backend::new(memory.clone(), nics, LeaseBook::default(), open(), Box::new(|_| ()));
        let mut frontend =
            Frontend::new(memory.clone(), LeaseBook::default(), open()).context("cannot make a timer")?;
        frontend = frontend.with_pool_file(pool.file_identity());

        let channel = |peer, outgoing, incoming| {
            let (id, generation) = (ChannelId::new(1), Generation::new(1));
            Object::Channel(ChannelObject {
                id,
                engine: EngineKind::Net,
                peer,
                generation,
                outgoing,
                incoming,
            })
        };
        let (port, registration) = objects(&placements, mac, ram_in_pool)?;
        let socket = run.sockets().join(&port.socket);
        let spec = device_spec(&port, Some(pool.file_identity()));
        let nic_object = NicObject { nic: "nic0".to_owned(), rx_area: placements.receive };
        for object in [
            channel(ends[0], placements.back, placements.there),
            Object::Nic(nic_object),
            Object::Registration(registration),
        ] {
            backend.apply(object, None).map_err(refused)?;
        }
        let lease = port.lease;
        for object in [channel(ends[1], placements.there, placements.back), Object::Port(port)] {
            frontend.apply(object).map_err(refused)?;
        }

        // Two on a core of their own each, or one that sleeps when it has nothing to do: then the cores can be probed.
        let cpu = |core| (spread == Spread::Apart).then_some(core);
        let worker =
            |core| WorkerConfig { wakeup: WAKEUP, busy_poll: BUSY_POLL, cpu: cpu(core), fence: None };
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
        let engine = Engine { frontend, backend, spent: Arc::clone(&spent), load: None };
        let frontend = Worker::spawn("net-frontend", worker(cores.receiver), bell(ends[0])?, engine)?;
        let server = Server::listen(&socket, spec, Sink { lease, worker: frontend.clone() })?;
        let file = File::from(pool.fd().try_clone_to_owned()?);
        let ram = (file, placements.ram);
        Ok(Self {
            _server: server,
            frontend,
            _backend: apart,
            socket,
            spent,
            nic,
            ram,
            _directory: directory,
        })
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
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
}

struct Placements {
    there: RingPlacement,
    back: RingPlacement,
    transmit: Area,
    receive: Area,
    ram: Area,
}

impl Placements {
    fn new(pool: &Pool) -> Result<Self> {
        let mut next = pool.layout().data().start;
        let mut take = |lines: LineCount| -> Result<LineOffset> {
            let start = next;
            next = next.checked_add(lines).context("the pool is too small")?;
            Ok(start)
        };
        let ring = RingPlacement::lines(SLOTS, 2);
        let (transmit, receive) = (LineCount::covering(TRANSMIT_BYTES), LineCount::covering(RECEIVE_BYTES));
        let ram = LineCount::covering(MEMORY_BYTES);
        let placements = Self {
            there: RingPlacement { start: take(ring)?, slots: SLOTS },
            back: RingPlacement { start: take(ring)?, slots: SLOTS },
            transmit: Area::new(take(transmit)?, transmit),
            receive: Area::new(take(receive)?, receive),
            // Whole pages: it is mapped.
            ram: Area::new(take(LineCount::new(PAGE_LINES))?, ram),
        };
        let start = placements.ram.start.get().next_multiple_of(PAGE_LINES);
        Ok(Self { ram: Area::new(LineOffset::new(start), ram), ..placements })
    }
}

fn endpoint(host: u16, role: Role) -> EndpointId {
    EndpointId::new(HostId::new(host), role)
}

fn objects(
    placements: &Placements,
    mac: &str,
    ram_in_pool: bool,
) -> Result<(PortObject, RegistrationObject)> {
    let lease = LeaseId::new(1).context("a small number")?;
    let (instance, generation) = (InstanceId::new(1), LeaseGeneration::new(1));
    let channel = ChannelId::new(1);
    let mac = mac.parse().map_err(|_| anyhow!("{mac} is no MAC address"))?;
    let features = Offloads::ALL.features();
    let ram_area = ram_in_pool.then_some(placements.ram);
    let port = PortObject {
        lease,
        instance,
        instance_name: "bench".to_owned(),
        device: "net0".to_owned(),
        socket: "net.sock".to_owned(),
        vmm_listens: false,
        mac,
        mtu: MTU,
        queue_pairs: 1,
        features,
        tx_area: placements.transmit,
        active: Route { channel, generation },
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
        tx_area: placements.transmit,
        state: RegistrationState::Active,
        rx_quota_buffers: RX_QUOTA_BUFFERS,
        policy: NicPolicy::default(),
        ram_area,
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
