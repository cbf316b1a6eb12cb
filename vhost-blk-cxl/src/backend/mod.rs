//! The backend: serves volumes of this host's SSDs to the frontends that lease them.

mod allocation;
mod arrivals;
mod by_commands;
pub mod check;
mod chores;
mod dispatch;
mod hanging;
mod in_flight;
mod places;
mod sharing;
mod tables;
mod task;
mod throttle;
mod volume;
mod waiting;
mod wiping;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{Area, Memory};
use pod_protocol::config::Wakeup;
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::ids::{PlaceId, RegionId, VolumeId};
use pod_protocol::objects::{Engine, Object, ObjectId, TableObject, VolumeObject};
use pod_protocol::reports::DeviceReport;
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::telemetry::{DeviceTelemetry, Telemetry};
use pod_protocol::worker::{Reply, SpawnError, Worker, WorkerConfig, WorkerHandle};

use self::by_commands::{CommandEraser, CommandStore, Commanded};
pub(crate) use self::hanging::Watch;
pub(crate) use self::sharing::Sharing;
use self::tables::Tables;
pub(crate) use self::task::{BackendTask, Device, Message};
use crate::counters::{Counter, Counters};
use crate::ssd::{Geometry, Label, Ssd};

/// How many requests a device is given at a time while several volumes want it: enough for most to be busy.
pub const QUEUE_DEPTH: u32 = 64;

/// How long the controller waits for requests to end before it has to ask again.
const DRAIN_PATIENCE: Duration = Duration::from_secs(1);

/// Of so many times that telemetry is asked for, every 100 ms, the worker looks once for devices that hang.
const TICK_EVERY: u32 = 3;

/// A device to serve.
pub struct OpenedSsd {
    /// Its name in the host's configuration.
    pub name: String,
    /// What runs it.
    pub ssd: Box<dyn Ssd>,
    /// How long it may keep a request before it is taken for failed. Without a limit guests wait for it.
    pub request_timeout: Option<Duration>,
    /// How many requests it is given at a time while several volumes want it, from 1 on. One alone has as many as the driver takes.
    pub queue_depth: u32,
}

impl OpenedSsd {
    /// A device that may take its time.
    pub fn new(name: impl Into<String>, ssd: Box<dyn Ssd>) -> Self {
        Self { name: name.into(), ssd, request_timeout: None, queue_depth: QUEUE_DEPTH }
    }
}

/// A device as the control thread knows it.
struct KnownDevice {
    name: String,
    geometry: Geometry,
    counters: Arc<Counters>,
    /// Set by the worker.
    failed: Arc<AtomicBool>,
}

impl KnownDevice {
    fn telemetry(&self) -> DeviceTelemetry {
        self.counters.device(&self.name, !self.failed.load(Ordering::Relaxed))
    }
}

struct KnownVolume {
    object: VolumeObject,
    intent_log: Option<u64>,
    counters: Arc<Counters>,
}

/// A place that is not served any more, and of which requests may still be with its device.
struct Ending {
    ssd: String,
    volume: VolumeId,
    /// Set by the worker.
    over: Arc<AtomicBool>,
}

/// Has what the controller gives a backend.
pub struct Backend {
    worker: WorkerHandle<Message>,
    devices: Vec<KnownDevice>,
    volumes: BTreeMap<PlaceId, KnownVolume>,
    ending: Vec<Ending>,
    malformed: Arc<Counter>,
    tables: Tables,
    reporter: Option<Reporter>,
    /// Whether there is a device with a time limit.
    watches: bool,
    /// Times that telemetry was asked for.
    ticks: u32,
}

/// What a host tells the controller about its SSDs.
pub fn device_reports<'a>(ssds: impl IntoIterator<Item = (&'a str, &'a dyn Ssd)>) -> Vec<DeviceReport> {
    ssds.into_iter()
        .map(|(name, ssd)| DeviceReport::Ssd {
            name: name.to_owned(),
            driver: ssd.driver().to_owned(),
            size_bytes: ssd.geometry().size_bytes,
            block_bytes: ssd.geometry().block_bytes,
            discard_granularity_bytes: ssd.discard_granularity_bytes(),
            table: None,
            reserved_bytes: 0,
            identity: None,
            iops: None,
            bytes_per_second: None,
        })
        .collect()
}

impl Backend {
    /// Starts the worker with these devices. Without a reporter nobody is told of devices that fail.
    pub fn start<M: Memory>(
        memory: M,
        run: RunDirectory,
        config: WorkerConfig,
        doorbell: Option<DoorbellListener>,
        ssds: Vec<OpenedSsd>,
        reporter: Option<Reporter>,
    ) -> Result<Self, SpawnError> {
        let mut known = Vec::with_capacity(ssds.len());
        let mut devices = Vec::with_capacity(ssds.len());
        let mut watches = false;
        for OpenedSsd { name, ssd, request_timeout, queue_depth } in ssds {
            let device = Device {
                name,
                counters: Arc::default(),
                failed: Arc::default(),
                gave_up: false,
                watch: Watch::new(request_timeout),
                sharing: Sharing::new(queue_depth),
                ssd,
            };
            watches |= request_timeout.is_some();
            known.push(KnownDevice {
                name: device.name.clone(),
                geometry: device.ssd.geometry(),
                counters: Arc::clone(&device.counters),
                failed: Arc::clone(&device.failed),
            });
            devices.push(device);
        }
        let malformed = Arc::new(Counter::default());
        let rings = config.wakeup == Wakeup::Socket;
        let task = BackendTask::new(memory, run, rings, devices, reporter.clone(), Arc::clone(&malformed));
        let worker = Worker::spawn("blk-backend", config, doorbell, task)?;
        // A worker that ends at once says so with the next message.
        let _ = worker.send(Message::Start);
        let (volumes, tables) = (BTreeMap::new(), Tables::default());
        let ending = Vec::new();
        Ok(Self { worker, devices: known, volumes, ending, malformed, tables, reporter, watches, ticks: 0 })
    }

    /// Keeps the tables of volumes on these devices, by their names.
    pub fn keep_tables(&mut self, labels: Vec<(String, Label)>) {
        for (name, mut label) in labels {
            let Some(scratch) = label.scratch().cloned() else {
                self.tables.add(name, label);
                continue;
            };
            let Some((device, block_bytes)) = self.commanded(&name) else { continue };
            let store = CommandStore { device: device.clone(), scratch, block_bytes };
            label.write_to(Arc::new(store));
            self.tables.add_by_commands(name, label, Arc::new(CommandEraser(device)));
        }
    }

    /// Wipes what is deleted on these devices, which have no place for a table, by their own commands. To be reported as such with an
    /// empty table, so that the controller says what is there.
    pub fn wipe_by_commands(&mut self, names: impl IntoIterator<Item = String>) {
        for name in names {
            if let Some((device, _)) = self.commanded(&name) {
                self.tables.add_unwritten(name, Arc::new(CommandEraser(device)));
            }
        }
    }

    /// A device for those who have it carry out commands, and its block in bytes.
    fn commanded(&self, name: &str) -> Option<(Commanded, u32)> {
        let (device, known) = self.devices.iter().enumerate().find(|(_, device)| device.name == name)?;
        Some((Commanded { worker: self.worker.clone(), device }, known.geometry.block_bytes))
    }

    fn wipe(&mut self) {
        self.ending.retain(|it| !it.over.load(Ordering::Acquire));
        let (volumes, ending) = (&self.volumes, &self.ending);
        let in_use = |ssd: &str, id| {
            volumes.values().any(|known| known.object.volume == id && known.object.ssd == ssd)
                || ending.iter().any(|it| it.volume == id && it.ssd == ssd)
        };
        self.tables.wipe(Instant::now(), in_use, self.reporter.as_ref());
    }

    fn table(&mut self, object: &TableObject) -> Result<(), String> {
        self.tables.apply(object)?;
        self.wipe();
        // One that became mirrored may have a log of intents now.
        let tables = &self.tables;
        let other = |known: &&KnownVolume| {
            tables.intent_log(&known.object.ssd, known.object.volume) != known.intent_log
        };
        let changed: Vec<VolumeObject> =
            self.volumes.values().filter(other).map(|known| known.object.clone()).collect();
        changed.into_iter().try_for_each(|object| self.serve(object))
    }

    fn send(&self, message: Message) -> Result<(), String> {
        self.worker.send(message).map_err(|gone| gone.to_string())
    }

    /// Asks the worker for something that it answers when requests have ended. A device that hangs must not keep the
    /// controller from hearing about everything else, so it is told to ask again.
    fn drained<R>(&self, make_message: impl FnOnce(Reply<R>) -> Message) -> Result<R, String> {
        match self.worker.call_within(DRAIN_PATIENCE, make_message) {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err("earlier requests are still being carried out".to_owned()),
            Err(gone) => Err(gone.to_string()),
        }
    }

    fn volume(&mut self, object: VolumeObject) -> Result<(), String> {
        let id = object.id();
        match self.volumes.get(&id) {
            Some(known) if known.object == object => Ok(()),
            Some(known) if known.object.ssd != object.ssd => {
                let before = known.object.clone();
                self.serve(object)?;
                self.watch_end_of(&before)
            }
            _ => self.serve(object),
        }
    }

    /// Another place of its lease has its name now. Its requests may still be with its device, which is not wiped meanwhile.
    fn watch_end_of(&mut self, volume: &VolumeObject) -> Result<(), String> {
        let Some(device) = self.devices.iter().position(|device| device.name == volume.ssd) else {
            return Ok(());
        };
        let over = Arc::new(AtomicBool::new(false));
        self.ending.push(Ending { ssd: volume.ssd.clone(), volume: volume.volume, over: Arc::clone(&over) });
        self.send(Message::TellEnd { lease: volume.lease, device, over })
    }

    fn serve(&mut self, object: VolumeObject) -> Result<(), String> {
        let id = object.id();
        // Of all places of a lease together.
        let known = self.volumes.range(PlaceId::all(id.lease)).next();
        let counters = known.map_or_else(Arc::default, |(_, known)| Arc::clone(&known.counters));
        let found = self.devices.iter().enumerate().find(|(_, device)| device.name == object.ssd);
        let Some((index, device)) = found else {
            return Err(format!("this host has no ssd {}", object.ssd));
        };
        check(&object, device)?;
        let end_bytes = object.start_bytes + object.size_bytes;
        self.tables.check(&object.ssd, object.volume, object.start_bytes, end_bytes)?;
        let intent_log = self.tables.intent_log(&object.ssd, object.volume);
        let (boxed, shared) = (Box::new(object.clone()), Arc::clone(&counters));
        self.worker
            .call(|done| Message::Volume { object: boxed, device: index, intent_log, counters: shared, done })
            .map_err(|gone| gone.to_string())?;
        // On a device a lease has one place, whatever it was called before.
        self.volumes.retain(|other, it| other.lease != id.lease || it.object.ssd != object.ssd);
        self.volumes.insert(id, KnownVolume { object, intent_log, counters });
        Ok(())
    }

    fn remove_volume(&mut self, id: PlaceId) -> Result<(), String> {
        // Of two that were here, what is left may have the name of the other one: it is served on by that.
        let Some(ssd) = self.volumes.get(&id).map(|known| &known.object.ssd) else { return Ok(()) };
        let Some(device) = self.devices.iter().position(|device| device.name == *ssd) else { return Ok(()) };
        self.drained(|done| Message::RemoveVolume { id, device, done })?;
        // Only now may somebody else have its place.
        self.volumes.remove(&id);
        self.wipe();
        Ok(())
    }
}

impl Handler for Backend {
    fn apply(&mut self, object: Object) -> Result<(), String> {
        match object {
            Object::Channel(channel) if channel.engine == Engine::Blk => {
                self.worker.call(|known| Message::Channel(channel, known)).map_err(|gone| gone.to_string())?
            }
            Object::Channel(channel) => Err(format!("{} is not for block requests", channel.id)),
            Object::Table(table) => self.table(&table),
            Object::Volume(volume) => self.volume(volume),
            other => Err(format!("a block backend cannot have a {}", other.id())),
        }
    }

    fn remove(&mut self, id: ObjectId) -> Result<(), String> {
        match id {
            ObjectId::Channel(channel) => self.send(Message::RemoveChannel(channel)),
            ObjectId::Volume(id) => self.remove_volume(id),
            _ => Ok(()),
        }
    }

    fn scrub(&mut self, _region: RegionId, area: Area) -> Result<(), String> {
        // A dead predecessor's requests have ended: they held the locks of the devices that we hold now, and of those that were left out
        // none can have any.
        self.drained(|reply| Message::Scrub(area, reply))?
    }

    fn telemetry(&mut self) -> Telemetry {
        // It comes often enough to notice what was wiped.
        self.wipe();
        self.ticks = self.ticks.wrapping_add(1);
        if self.watches && self.ticks.is_multiple_of(TICK_EVERY) {
            // A worker that is gone was fenced, and the process is about to end.
            let _ = self.send(Message::Tick);
        }
        let devices = self.devices.iter().map(KnownDevice::telemetry);
        let volumes: Vec<&KnownVolume> = self.volumes.values().collect();
        let leases = volumes.chunk_by(|one, next| one.object.lease == next.object.lease);
        let leases = leases.filter_map(|places| places.first().copied());
        Telemetry {
            devices: devices.collect(),
            leases: leases.map(|it| it.counters.lease(it.object.lease)).collect(),
            allocated_bytes: self.tables.allocated_bytes().clone(),
            counters: [("malformed-messages".to_owned(), self.malformed.get())].into(),
            ..Telemetry::default()
        }
    }

    fn fenced(&mut self) {
        // The worker ends by itself, and without it nothing is done. The process follows.
        self.worker.stop();
    }
}

/// Refuses a volume that is not on its device.
fn check(volume: &VolumeObject, device: &KnownDevice) -> Result<(), String> {
    let block = u64::from(device.geometry.block_bytes);
    let inside = volume
        .start_bytes
        .checked_add(volume.size_bytes)
        .is_some_and(|end| volume.size_bytes > 0 && end <= device.geometry.size_bytes);
    if !inside || !volume.start_bytes.is_multiple_of(block) || !volume.size_bytes.is_multiple_of(block) {
        return Err(format!(
            "the volume of {} is {} bytes from {} of ssd {}, which has {} in blocks of {block}",
            volume.lease, volume.size_bytes, volume.start_bytes, device.name, device.geometry.size_bytes
        ));
    }
    Ok(())
}
