//! The frontend: offers leased volumes to the VMs of this host as virtio-blk disks.
//!
//! A disk's vhost-user thread (`sink`) passes its rings to the one worker (`task`), which serves all disks: it
//! [parses](parse) requests, copies data to and from the pool, and exchanges messages with the backends.

mod attachment;
mod becoming;
mod copy_buffers;
mod device;
mod disk;
mod exchange;
mod flushed;
mod giving_up;
mod guest_side;
mod last_look;
mod mirrored;
mod owed_elsewhere;
mod own_flush;
pub mod parse;
mod place;
mod regions;
mod remembered;
mod seldom;
mod serve;
mod shown;
mod sink;
mod slots;
mod spread;
mod steps;
mod striped;
mod taking_back;
mod task;
mod turn_budget;
mod under_way;
mod unflushed;
mod vouching;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{Area, EndpointId, FileIdentity, HostId, Memory};
use pod_protocol::config::Wakeup;
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::ids::{LeaseId, RegionId};
use pod_protocol::objects::{ChannelObject, DiskObject, Engine, Object, ObjectId, ReplicaObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::telemetry::Telemetry;
use pod_protocol::worker::{SpawnError, Worker, WorkerConfig, WorkerHandle};
use tracing::info;
use vhost_frontend::pacing::{Meter, Pacing};
use vhost_frontend::{DeviceSpec, PoolRam, Server, VMM_PATIENCE};

use self::attachment::Attachment;
use self::device::{QUEUE_SIZE_MAX, features};
use self::mirrored::REPLICAS_MAX;
use self::shown::Shown;
use self::sink::DiskSink;
pub(crate) use self::task::{FrontendTask, Message};
use crate::counters::{Counter, Counters};

/// Of so many times that telemetry is asked for, every 100 ms, disks with copies say once what the controller may have missed.
const TICK_EVERY: u32 = 5;

/// A disk as the control thread holds it.
struct OfferedDisk {
    object: DiskObject,
    counters: Arc<Counters>,
    shown: Shown,
    attachment: Arc<Attachment>,
    /// Its socket goes when this goes.
    _server: Server,
}

impl OfferedDisk {
    /// Whether something of it may have to be brought in line.
    fn has_copies(&self) -> bool {
        !self.object.replicas.is_empty() && self.object.stripe_bytes.is_none() || self.object.beside.is_some()
    }

    fn dirty_bytes(&self) -> u64 {
        self.counters.dirty_bytes.get()
    }
}

/// Has what the controller gives a frontend.
pub struct Frontend {
    // Before the worker: servers wait for it to let go of their rings.
    disks: BTreeMap<LeaseId, OfferedDisk>,
    worker: WorkerHandle<Message>,
    run: RunDirectory,
    reporter: Option<Reporter>,
    malformed: Arc<Counter>,
    /// Device and inode number of the pool's file.
    pool_file: Option<FileIdentity>,
    /// Times that telemetry was asked for.
    ticks: u32,
    pace: Pace,
    meter: Meter,
}

/// What disks with copies do by the clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// How long a replica may keep a request.
    replica_timeout: Option<Duration>,
    /// How often marks are taken out of the log of intents. A part of a volume keeps its mark for so long at least after the
    /// last write to it.
    sweep_every: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { replica_timeout: None, sweep_every: Duration::from_secs(2) }
    }
}

impl Frontend {
    /// Starts the worker. Without a reporter nobody is told of VMMs that come and go. Guest memory that lies in the pool is
    /// known by `pool_file`, the pool's file or device.
    pub fn start<M: Memory>(
        memory: M,
        run: RunDirectory,
        config: WorkerConfig,
        doorbell: Option<DoorbellListener>,
        reporter: Option<Reporter>,
        pool_file: Option<FileIdentity>,
    ) -> Result<Self, SpawnError> {
        let malformed = Arc::new(Counter::default());
        let rings = config.wakeup == Wakeup::Socket;
        let meter = Meter::new(memory.clone());
        let task = FrontendTask::new(memory, run.clone(), rings, Arc::clone(&malformed), reporter.clone());
        let worker = Worker::spawn("blk-frontend", config, doorbell, task)?;
        Ok(Self {
            disks: BTreeMap::new(),
            worker,
            run,
            reporter,
            malformed,
            pool_file,
            ticks: 0,
            pace: Pace::default(),
            meter,
        })
    }

    /// It is this frontend of its host. To be called before it has disks.
    pub fn join_host(&mut self, run: &RunDirectory, endpoint: EndpointId) -> io::Result<()> {
        self.meter.join_host(run, endpoint)
    }

    /// It is on this host: reads of mirrored disks go to replicas there, if these are not busy. To be called before it has channels.
    pub fn set_host(&mut self, host: HostId) -> Result<(), String> {
        self.send(Message::Host(host))
    }

    /// Goes on without replicas that keep a request for longer than this. Without a limit guests wait for them.
    pub fn set_replica_timeout(&mut self, timeout: Option<Duration>) {
        self.pace.replica_timeout = timeout;
    }

    /// Of mirrored disks: takes marks out of the log of what is being written when nobody wrote there for so long. After the
    /// death of a frontend what is marked is copied; each look costs a flush.
    pub fn set_sweep_interval(&mut self, interval: Duration) {
        self.pace.sweep_every = interval;
    }

    fn send(&self, message: Message) -> Result<(), String> {
        self.worker.send(message).map_err(|gone| gone.to_string())
    }

    fn channel(&mut self, object: ChannelObject) -> Result<(), String> {
        if object.engine != Engine::Blk {
            return Err(format!("{} is not for block requests", object.id));
        }
        self.worker.call(|opened| Message::Channel(object, opened)).map_err(|gone| gone.to_string())?
    }

    fn disk(&mut self, object: DiskObject) -> Result<(), String> {
        if let Some(disk) = self.disks.get_mut(&object.lease) {
            if disk.object == object {
                return Ok(());
            }
            if may_become(&disk.object, &object) {
                return self.update(object);
            }
            self.remove_disk(object.lease)?;
        }
        check(&object)?;
        let path = self.run.sockets().join(&object.socket);
        let counters = Arc::new(Counters::default());
        // Until the worker has begun.
        let others = match object.stripe_bytes {
            None => object.replicas.len().saturating_sub(1) as u64,
            Some(_) => 0,
        };
        counters.dirty_bytes.set(object.size_bytes.saturating_mul(others));
        let shown = Shown::new(&object);
        let attachment = Arc::new(Attachment::new(self.reporter.clone()));
        let lease = object.lease;
        // What its VMM may map, wherever the data go.
        let pool_ram = self.pool_file.map(|file| PoolRam { file, leased: object.ram_area });
        let spec = DeviceSpec {
            name: format!("{}-{}", object.instance_name, object.device),
            virtio_features: features(&object),
            // QEMU says what a disk's driver acknowledged whenever it starts its rings.
            assumed_features: 0,
            config: shown.config(),
            queues: object.queues,
            queues_hint: |count| {
                format!(
                    "the disk has so many queues (`disk-queues` of the controller): give QEMU's vhost-user-blk-pci num-queues={count}"
                )
            },
            queue_size_max: QUEUE_SIZE_MAX,
            in_order: false,
            announces: false,
            discards: |_| false,
            pool_ram,
            vmm_patience: VMM_PATIENCE,
        };
        let sink = DiskSink {
            object: object.clone(),
            worker: self.worker.clone(),
            attachment: Arc::clone(&attachment),
            shown: shown.clone(),
            connected: false,
            running: BTreeSet::new(),
            out_of_patience: false,
            untold: false,
        };
        self.send(Message::Disk {
            object: Box::new(object.clone()),
            counters: Arc::clone(&counters),
            writeback: shown.writeback(),
            pool_ram,
        })?;
        if let Some(pacing) = self.meter.pacing(lease) {
            self.pace(lease, Some(pacing))?;
        }
        let open = if object.vmm_listens { Server::connect } else { Server::listen };
        match open(&path, spec, sink) {
            Ok(server) => {
                let disk = OfferedDisk { object, counters, shown, attachment, _server: server };
                self.disks.insert(lease, disk);
                Ok(())
            }
            Err(error) => {
                self.remove_from_worker(lease)?;
                Err(error.to_string())
            }
        }
    }

    fn pace(&self, lease: LeaseId, pacing: Option<Arc<Pacing>>) -> Result<(), String> {
        self.worker.call(|done| Message::Pace(lease, pacing, done)).map_err(|gone| gone.to_string())?
    }

    /// Changes a disk in use. The guest hears of a new size when requests up to there are served.
    fn update(&mut self, object: DiskObject) -> Result<(), String> {
        if let Some(disk) = self.disks.get(&object.lease)
            && disk.object.incoming
        {
            // While the guest was on another host, its driver told the frontend there.
            disk.shown.set_writeback(&object, !object.write_through);
        }
        let boxed = Box::new(object.clone());
        self.worker.call(|done| Message::Update(boxed, done)).map_err(|gone| gone.to_string())?;
        let Some(disk) = self.disks.get_mut(&object.lease) else { return Ok(()) };
        let before = std::mem::replace(&mut disk.object, object);
        let grown = before.size_bytes != disk.object.size_bytes;
        if grown {
            info!(lease = %disk.object.lease, bytes = disk.object.size_bytes, "the disk grew");
        }
        if grown || before.discard_granularity_bytes != disk.object.discard_granularity_bytes {
            disk.shown.update(&disk.object);
        }
        Ok(())
    }

    fn remove_disk(&mut self, lease: LeaseId) -> Result<(), String> {
        // The worker first: the disk's thread waits for it to let go of the rings.
        self.remove_from_worker(lease)?;
        self.disks.remove(&lease);
        Ok(())
    }

    fn remove_from_worker(&self, lease: LeaseId) -> Result<(), String> {
        self.worker.call(|reply| Message::RemoveDisk(lease, reply)).map_err(|gone| gone.to_string())
    }
}

impl Handler for Frontend {
    fn apply(&mut self, object: Object) -> Result<(), String> {
        match object {
            Object::Channel(channel) => self.channel(channel),
            Object::Disk(disk) => self.disk(disk),
            Object::Fabric(fabric) => self.meter.share(fabric),
            Object::Mchannel(object) => {
                let lease = object.lease;
                let known = self.meter.pacing(lease).is_some();
                let pacing = self.meter.measure(object);
                if known { Ok(()) } else { self.pace(lease, Some(pacing)) }
            }
            other => Err(format!("a block frontend cannot have a {}", other.id())),
        }
    }

    fn remove(&mut self, id: ObjectId) -> Result<(), String> {
        match id {
            ObjectId::Channel(channel) => self.send(Message::RemoveChannel(channel)),
            ObjectId::Disk(lease) => self.remove_disk(lease),
            ObjectId::Fabric => {
                self.meter.share_nothing();
                Ok(())
            }
            ObjectId::Mchannel(lease) => {
                self.meter.forget(lease);
                self.pace(lease, None)
            }
            _ => Ok(()),
        }
    }

    fn scrub(&mut self, region: RegionId, area: Area) -> Result<(), String> {
        if self.meter.uses(area) {
            return Err(format!("{region} is in use for sums of the fabric"));
        }
        self.worker.call(|reply| Message::Scrub(area, reply)).map_err(|gone| gone.to_string())?
    }

    fn telemetry(&mut self) -> Telemetry {
        self.ticks = self.ticks.wrapping_add(1);
        if self.ticks.is_multiple_of(TICK_EVERY) && self.disks.values().any(OfferedDisk::has_copies) {
            // A worker that is gone was fenced, and the process is about to end.
            let _ = self.send(Message::Tick(self.pace));
        }
        self.disks.values().for_each(|disk| disk.attachment.catch_up());
        let leases = self.disks.iter().map(|(&lease, disk)| disk.counters.lease(lease)).collect();
        let zero_copy = self.disks.values().map(|disk| disk.counters.zero_copy.get()).sum();
        let resubmitted = self.disks.values().map(|disk| disk.counters.resubmitted.get()).sum();
        let counters = [
            ("malformed-messages".to_owned(), self.malformed.get()),
            ("resubmitted-requests".to_owned(), resubmitted),
            ("zero-copy-requests".to_owned(), zero_copy),
        ];
        let dirty_bytes = self.disks.values().map(OfferedDisk::dirty_bytes).sum();
        let gauges = [("mirror-dirty-bytes".to_owned(), dirty_bytes)];
        let (mchannels, vcpus) = (self.meter.telemetry(), self.meter.vcpus());
        Telemetry {
            leases,
            mchannels,
            vcpus,
            elements: self.meter.elements(),
            counters: counters.into(),
            gauges: gauges.into(),
            ..Telemetry::default()
        }
    }

    fn fenced(&mut self) {
        self.meter.stop();
        // The worker ends by itself, and without it nothing is sent. The process follows.
        self.worker.stop();
    }
}

/// Whether a disk that is in use can become another without its guest noticing more than a new size.
fn may_become(old: &DiskObject, new: &DiskObject) -> bool {
    let DiskObject { route, number, failed, size_bytes, epoch, write_through, incoming, untold, .. } = new;
    let numbers = |disk: &DiskObject| {
        let mut numbers: Vec<u32> = disk.replicas.iter().map(|replica| replica.number).collect();
        numbers.sort_unstable();
        numbers
    };
    // The columns of a striped disk stay, wherever they lie.
    if *incoming && !old.incoming || old.stripe_bytes.is_some() && numbers(old) != numbers(new) {
        return false;
    }
    let (replicas, beside) = (new.replicas.clone(), new.beside.clone());
    // A guest can be told of a larger disk, not that the end of it is gone.
    let size_bytes = *size_bytes.max(&old.size_bytes);
    let (route, number, failed, epoch) = (*route, *number, *failed, *epoch);
    let (write_through, incoming, untold) = (*write_through, *incoming, *untold);
    let places = DiskObject { route, replicas, beside, number, epoch, ..old.clone() };
    // What the driver was shown of discards is advice: the others are carried out too.
    let discard_granularity_bytes = new.discard_granularity_bytes;
    let places = DiskObject { write_through, incoming, untold, ..places };
    let wanted = DiskObject { failed, size_bytes, discard_granularity_bytes, ..places };
    wanted == *new
}

/// Refuses what no guest could use.
fn check(disk: &DiskObject) -> Result<(), String> {
    let lease = disk.lease;
    if disk.queues == 0 || disk.queues > 256 {
        return Err(format!("the disk of {lease} has {} queues, 1 to 256 are possible", disk.queues));
    }
    if !matches!(disk.block_bytes, 512 | 1024 | 2048 | 4096) {
        return Err(format!(
            "the disk of {lease} has blocks of {} bytes, 512 to 4096 are possible",
            disk.block_bytes
        ));
    }
    if disk.size_bytes == 0 || !disk.size_bytes.is_multiple_of(u64::from(disk.block_bytes)) {
        return Err(format!("the disk of {lease} is {} bytes long, not a number of blocks", disk.size_bytes));
    }
    if disk.data_area.bytes() < device::REQUEST_BYTES_MAX {
        return Err(format!(
            "the data area of {lease} has {} bytes, the longest request needs {}",
            disk.data_area.bytes(),
            device::REQUEST_BYTES_MAX
        ));
    }
    if disk.replicas.len() > REPLICAS_MAX {
        return Err(format!(
            "the disk of {lease} has {} replicas, {REPLICAS_MAX} are possible",
            disk.replicas.len()
        ));
    }
    let has_column = |number: u32| disk.replicas.iter().any(|column| column.number == number);
    let stray = |beside: &ReplicaObject| disk.stripe_bytes.is_none() || !has_column(beside.number);
    if disk.stripe_bytes.is_some_and(|unit| unit == 0 || !unit.is_multiple_of(4096))
        || disk.replicas.len() == 1
        || disk.beside.as_ref().is_some_and(stray)
    {
        return Err(format!("the disk of {lease} is striped, or mirrored, in a way that makes no sense"));
    }
    if disk.socket.contains('/') || disk.socket.is_empty() {
        return Err(format!("{:?} is no name for the socket of {lease}", disk.socket));
    }
    Ok(())
}
