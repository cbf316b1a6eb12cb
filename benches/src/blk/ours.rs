//! The engine's two sides, each with its worker, over a pool of their own.

use std::fs::File;
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
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, PlaceNumber, VolumeId};
use pod_protocol::objects::{ChannelObject, DiskObject, Engine, Object, Priority, Qos, Route, VolumeObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::WorkerConfig;
use tempfile::TempDir;
use vhost_blk_cxl::backend::{Backend, OpenedSsd, QUEUE_DEPTH};
use vhost_blk_cxl::frontend::Frontend;
use vhost_blk_cxl::ssd::{self, DriverKind, SsdConfig};
use vm_memory::FileOffset;
use wadi_tests::runner::memory_tempdir;

use super::QUEUES_MAX;
use super::cpu::{Threads, is_of_io_uring, threads_of};
use super::load::RAM_BYTES;
use crate::cores::{self, Cores};

pub(super) const SLOTS: u32 = 8192;
/// Of each disk.
const DATA_BYTES: u64 = 32 << 20;
const PAGE_LINES: u64 = 64;
pub(super) const POOL_BYTES: u64 = 128 << 20;
/// Of a disk with a limit: what it did not use of it is gone after this.
const BURST_MS: u32 = 1;
/// As daemons have their workers by default.
pub(super) fn worker() -> WorkerConfig {
    WorkerConfig {
        wakeup: Wakeup::Socket,
        busy_poll: Duration::from_micros(50),
        poll_in_flight: Duration::from_micros(200),
        cpu: None,
        fence: None,
    }
}

pub(super) struct Ours {
    // The frontend first: it lets go of its rings.
    _frontend: Box<dyn Handler>,
    backend: Box<dyn Handler>,
    disks: Vec<(PathBuf, Option<FileOffset>)>,
    last: VolumeObject,
    _directory: TempDir,
}

impl Ours {
    /// Starts both sides, with so many disks that share the device evenly. The guests' memory lies in the pool if that is wanted.
    pub(super) fn start(
        mode: CoherenceMode,
        driver: DriverKind,
        device_bytes: u64,
        disks: u16,
        ram_in_pool: bool,
        cores: Cores,
    ) -> Result<Self> {
        let directory = memory_tempdir().context("cannot make a directory in /dev/shm")?;
        let options = CreateOptions {
            size_bytes: Some(POOL_BYTES),
            mode,
            host_slots: 2,
            replica_slots: 1,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options)?;
        let config = SsdConfig {
            name: "ssd0".to_owned(),
            driver,
            request_timeout: None,
            iops: None,
            bytes_per_second: None,
            queue_depth: QUEUE_DEPTH,
        };
        let disk_bytes = device_bytes / u64::from(disks);
        let disks: Vec<_> =
            (0..disks).map(|index| objects(&pool, index, disk_bytes, ram_in_pool)).collect::<Result<_>>()?;
        match mode {
            CoherenceMode::Hardware => Self::serve(&pool, &pool.hardware(), &config, disks, cores, directory),
            CoherenceMode::Software => Self::serve(&pool, &pool.software(), &config, disks, cores, directory),
        }
    }

    fn serve<M: Memory>(
        pool: &Pool,
        memory: &M,
        config: &SsdConfig,
        disks: Vec<(DiskObject, VolumeObject)>,
        cores: Cores,
        directory: TempDir,
    ) -> Result<Self> {
        let run = RunDirectory::new(directory.path());
        run.prepare()?;
        let ends = [endpoint(1, Role::BlkFrontend), endpoint(2, Role::BlkBackend)];
        let bell = |end| DoorbellListener::bind(&run.data_doorbell(end));
        // Threads begin where their parent is: the backend gets a core, the frontend shares the driver's.
        let ssds = vec![OpenedSsd::new("ssd0", ssd::open(config, pool, None)?)];
        cores::pin(cores.sender)?;
        let backend =
            Backend::start(memory.clone(), run.clone(), worker(), Some(bell(ends[1])?), ssds, None)?;
        cores::pin(cores.receiver)?;
        let frontend = Frontend::start(
            memory.clone(),
            run.clone(),
            worker(),
            Some(bell(ends[0])?),
            None,
            Some(pool.file_identity()),
        )?;
        let (mut backend, mut frontend): (Box<dyn Handler>, Box<dyn Handler>) =
            (Box::new(backend), Box::new(frontend));

        let [there, back] = rings(pool);
        for ring in [there, back] {
            ring.clear(memory);
        }
        let channel = |peer, outgoing, incoming| {
            let (id, generation) = (ChannelId::new(1), Generation::new(1));
            let engine = Engine::Blk;
            Object::Channel(ChannelObject {
                id,
                engine,
                peer,
                generation,
                outgoing,
                incoming,
                receives: None,
            })
        };
        let refused = |reason: String| anyhow!(reason);
        backend.apply(channel(ends[0], back, there)).map_err(refused)?;
        frontend.apply(channel(ends[1], there, back)).map_err(refused)?;
        let mut offered = Vec::new();
        let last = disks.last().context("there is a disk")?.1.clone();
        for (disk, volume) in disks {
            let ram = disk.ram_area.map(|area| -> Result<_> {
                let file = File::from(pool.fd().try_clone_to_owned()?);
                Ok(FileOffset::new(file, area.start_byte().get()))
            });
            offered.push((run.sockets().join(&disk.socket), ram.transpose()?));
            backend.apply(Object::Volume(volume)).map_err(refused)?;
            frontend.apply(Object::Disk(disk)).map_err(refused)?;
        }
        Ok(Self { _frontend: frontend, backend, disks: offered, last, _directory: directory })
    }

    /// Sets a limit to the last disk.
    pub(super) fn limit_last(&mut self, per_second: u32) -> Result<()> {
        let qos = Qos { iops: Some(per_second.into()), burst_ms: BURST_MS, ..Qos::default() };
        let limited = VolumeObject { qos, ..self.last.clone() };
        self.backend.apply(Object::Volume(limited)).map_err(|reason| anyhow!(reason))
    }

    pub(super) fn socket(&self, disk: usize) -> &Path {
        &self.disks[disk].0
    }

    /// Where this disk's guest must have its memory.
    pub(super) fn ram(&self, disk: usize) -> Option<&FileOffset> {
        self.disks[disk].1.as_ref()
    }

    /// The two workers, and what the kernel does for the backend's device.
    #[allow(clippy::unused_self, reason = "there is one pair of them at a time")]
    pub(super) fn threads(&self) -> Result<Threads> {
        Ok([
            threads_of("self", |name| name == "blk-frontend")?,
            threads_of("self", |name| name == "blk-backend" || is_of_io_uring(name))?,
        ])
    }
}

/// To the backend and back.
fn rings(pool: &Pool) -> [RingPlacement; 2] {
    let start = pool.layout().data().start;
    let behind = start.saturating_add(RingPlacement::lines(SLOTS, 8));
    [start, behind].map(|start| RingPlacement { start, slots: SLOTS })
}

/// Where the data of this disk's requests lies.
pub(super) fn data_area(pool: &Pool, disk: u16) -> Area {
    // Behind its data, its guest's memory.
    let each = LineCount::covering(DATA_BYTES + RAM_BYTES as u64).get();
    let lines = LineCount::covering(DATA_BYTES);
    // Whole pages, as the controller hands them out: direct I/O wants them.
    let rings = (RingPlacement::lines(SLOTS, 8).get() * 2).next_multiple_of(PAGE_LINES);
    let start = pool.layout().data().start.saturating_add(LineCount::new(rings));
    Area::new(start.saturating_add(LineCount::new(each * u64::from(disk))), lines)
}

pub(super) fn endpoint(host: u16, role: Role) -> EndpointId {
    EndpointId::new(HostId::new(host), role)
}

pub(super) fn objects(
    pool: &Pool,
    index: u16,
    size_bytes: u64,
    ram_in_pool: bool,
) -> Result<(DiskObject, VolumeObject)> {
    let data_area = data_area(pool, index);
    let ram_area = ram_in_pool.then(|| {
        let start = data_area.start.saturating_add(data_area.lines);
        Area::new(start, LineCount::covering(RAM_BYTES as u64))
    });
    let number = u32::from(index) + 1;
    let lease = LeaseId::new(number).context("a small number")?;
    let instance = InstanceId::new(number);
    let route = Route { channel: ChannelId::new(1), generation: LeaseGeneration::new(1) };
    let disk = DiskObject {
        lease,
        instance,
        instance_name: format!("bench{number}"),
        device: "disk".to_owned(),
        socket: format!("disk{number}.sock"),
        vmm_listens: false,
        volume: VolumeId::new(number),
        serial: "bench".to_owned(),
        size_bytes,
        block_bytes: 4096,
        discard_granularity_bytes: None,
        read_only: false,
        queues: QUEUES_MAX,
        data_area,
        ram_area,
        route,
        replicas: Vec::new(),
        stripe_bytes: None,
        beside: None,
        number: None,
        epoch: 0,
        failed: false,
        write_through: false,
        untold: false,
        incoming: false,
    };
    let volume = VolumeObject {
        lease,
        place: PlaceNumber::FIRST,
        volume: VolumeId::new(number),
        ssd: "ssd0".to_owned(),
        start_bytes: size_bytes * u64::from(index),
        size_bytes,
        read_only: false,
        generation: route.generation,
        channel: route.channel,
        data_area,
        ram_area,
        instance,
        qos: Qos::default(),
        priority: Priority::DEFAULT,
    };
    Ok((disk, volume))
}
