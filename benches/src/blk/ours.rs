//! The engine's two sides, each with its worker, over a pool of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use cxl_channel::RingPlacement;
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{
    Area, CoherenceMode, CreateOptions, EndpointId, Generation, HostId, LineCount, Memory, Pool, Role,
};
use pod_protocol::config::Wakeup;
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, VolumeId};
use pod_protocol::objects::{ChannelObject, DiskObject, Engine, Object, Route, VolumeObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::WorkerConfig;
use tempfile::TempDir;
use vhost_blk_cxl::backend::Backend;
use vhost_blk_cxl::frontend::Frontend;
use vhost_blk_cxl::ssd::{self, DriverKind, SsdConfig};

use super::load::threads_of;
use crate::cores::{self, Cores};

const SLOTS: u32 = 8192;
const DATA_BYTES: u64 = 32 << 20;
const POOL_BYTES: u64 = 64 << 20;
/// The daemons' default.
const BUSY_POLL: Duration = Duration::from_micros(50);

pub(super) struct Ours {
    // The frontend first: it lets go of its rings.
    _frontend: Box<dyn Handler>,
    _backend: Box<dyn Handler>,
    socket: PathBuf,
    _directory: TempDir,
}

impl Ours {
    /// Starts both sides. Without a file the device is the null driver.
    pub(super) fn start(
        mode: CoherenceMode,
        file: Option<&Path>,
        disk_bytes: u64,
        cores: Cores,
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
        let driver = match file {
            Some(path) => DriverKind::File { path: path.to_owned(), size_bytes: None, volatile_cache: None },
            None => DriverKind::Null { size_bytes: disk_bytes },
        };
        let config = SsdConfig { name: "ssd0".to_owned(), driver };
        match mode {
            CoherenceMode::Hardware => {
                Self::serve(&pool, &pool.hardware(), &config, disk_bytes, cores, directory)
            }
            CoherenceMode::Software => {
                Self::serve(&pool, &pool.software(), &config, disk_bytes, cores, directory)
            }
        }
    }

    fn serve<M: Memory>(
        pool: &Pool,
        memory: &M,
        config: &SsdConfig,
        disk_bytes: u64,
        cores: Cores,
        directory: TempDir,
    ) -> Result<Self> {
        let run = RunDirectory::new(directory.path());
        run.prepare()?;
        let ends = [endpoint(1, Role::BlkFrontend), endpoint(2, Role::BlkBackend)];
        let bell = |end| DoorbellListener::bind(&run.data_doorbell(end));
        let worker = || WorkerConfig { wakeup: Wakeup::Socket, busy_poll: BUSY_POLL, cpu: None, fence: None };
        // Threads begin where their parent is: the backend gets a core, the frontend shares the driver's.
        let ssds = vec![("ssd0".to_owned(), ssd::open(config, pool)?)];
        cores::pin(cores.sender)?;
        let backend =
            Backend::start(memory.clone(), run.clone(), worker(), Some(bell(ends[1])?), ssds, None)?;
        cores::pin(cores.receiver)?;
        let frontend = Frontend::start(memory.clone(), run.clone(), worker(), Some(bell(ends[0])?), None)?;
        let (mut backend, mut frontend): (Box<dyn Handler>, Box<dyn Handler>) =
            (Box::new(backend), Box::new(frontend));

        let layout = Placements::new(pool);
        for ring in [layout.there, layout.back] {
            ring.clear(memory);
        }
        let channel = |peer, outgoing, incoming| {
            let (id, generation) = (ChannelId::new(1), Generation::new(1));
            Object::Channel(ChannelObject { id, engine: Engine::Blk, peer, generation, outgoing, incoming })
        };
        let (disk, volume) = objects(layout.data, disk_bytes)?;
        let socket = run.sockets().join(&disk.socket);
        let refused = |reason: String| anyhow!(reason);
        backend.apply(channel(ends[0], layout.back, layout.there)).map_err(refused)?;
        backend.apply(Object::Volume(volume)).map_err(refused)?;
        frontend.apply(channel(ends[1], layout.there, layout.back)).map_err(refused)?;
        frontend.apply(Object::Disk(disk)).map_err(refused)?;
        Ok(Self { _frontend: frontend, _backend: backend, socket, _directory: directory })
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The two workers.
    #[allow(clippy::unused_self, reason = "there is one pair of them at a time")]
    pub(super) fn threads(&self) -> Result<Vec<PathBuf>> {
        let mut threads = threads_of("self")?;
        threads.retain(|thread| {
            fs::read_to_string(thread.join("comm")).is_ok_and(|name| name.starts_with("blk-"))
        });
        Ok(threads)
    }
}

struct Placements {
    there: RingPlacement,
    back: RingPlacement,
    data: Area,
}

impl Placements {
    fn new(pool: &Pool) -> Self {
        let start = pool.layout().data().start;
        let ring = RingPlacement::lines(SLOTS, 8);
        let behind = start.saturating_add(ring);
        let data = behind.saturating_add(ring);
        Self {
            there: RingPlacement { start, slots: SLOTS },
            back: RingPlacement { start: behind, slots: SLOTS },
            data: Area::new(data, LineCount::covering(DATA_BYTES)),
        }
    }
}

fn endpoint(host: u16, role: Role) -> EndpointId {
    EndpointId::new(HostId::new(host), role)
}

fn objects(data_area: Area, size_bytes: u64) -> Result<(DiskObject, VolumeObject)> {
    let lease = LeaseId::new(1).context("a small number")?;
    let instance = InstanceId::new(1);
    let route = Route { channel: ChannelId::new(1), generation: LeaseGeneration::new(1) };
    let disk = DiskObject {
        lease,
        instance,
        instance_name: "bench".to_owned(),
        device: "disk".to_owned(),
        socket: "disk.sock".to_owned(),
        serial: "bench".to_owned(),
        size_bytes,
        block_bytes: 4096,
        read_only: false,
        queues: 1,
        data_area,
        route,
        failed: false,
    };
    let volume = VolumeObject {
        lease,
        volume: VolumeId::new(1),
        ssd: "ssd0".to_owned(),
        start_bytes: 0,
        size_bytes,
        read_only: false,
        generation: route.generation,
        channel: route.channel,
        data_area,
        instance,
    };
    Ok((disk, volume))
}
