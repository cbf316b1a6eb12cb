//! A frontend and several backends in one process, with a mock guest on top and a test in place of the controller.

use std::sync::Arc;

use cxl_channel::RingPlacement;
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
use cxl_pool::{Area, Generation, HostId, LineCount, LineOffset, Role};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::{InstanceId, LeaseGeneration, LeaseId, PlaceId, PlaceNumber, RegionId, VolumeId};
use pod_protocol::objects::{
    ChannelObject, DiskObject, Engine, Object, ObjectId, Priority, Qos, ReplicaObject, Route, VolumeObject,
};
use pod_protocol::reports::Report;
use pod_protocol::run_directory::RunDirectory;
use vhost_blk_cxl::backend::{Backend, OpenedSsd};
use vhost_blk_cxl::frontend::Frontend;
use vhost_blk_cxl::intent_log;
use vhost_blk_cxl::ssd::{FileSsd, VolatileCacheOptions};

use super::column_move::Columns;
use super::drives::Drives;
use super::ram::{Control, RamSsd};
use super::side::Side;
use super::{Driver, Pod, SLOTS, VOLUME_START, endpoint, eventually};

/// Eight regions.
pub const MIRROR_BYTES: u64 = 2 << 20;
const POOL_BYTES: u64 = 32 << 20;
/// Behind what a real pool begins with.
pub(super) const RINGS: u64 = 32768;
pub(super) const RING_LINES: u64 = 200_000;

/// Who has not answered in time is told again, as the controller has it.
pub fn obeyed(mut tell: impl FnMut() -> Result<(), String>) {
    eventually(|| tell().is_ok());
}

/// A pod with one mirrored volume.
pub struct MirrorPod {
    pub pool: SimulatedPool,
    pub run: RunDirectory,
    pub disk: DiskObject,
    pub controls: Vec<Arc<Control>>,
    pub backends: Vec<Option<Backend>>,
    pub frontend: Option<Frontend>,
    /// Where the guest is.
    pub(super) side: Side,
    /// Where it will be.
    pub(super) incoming: Option<(Side, Frontend)>,
    /// Areas of hosts that the guest has left, which devices may still use.
    pub(super) left_areas: Vec<Area>,
    next_ring: u64,
    /// How often a replica was dropped, and came back.
    pub dropped: u64,
    pub synced: u64,
    /// What was said last of the VMM.
    pub attached: Option<Report>,
    /// Which of the places the volume has.
    pub present: Vec<bool>,
    /// The place that goes when another one has everything.
    pub replaced: Option<usize>,
    /// Of a striped volume: where its columns lie.
    pub columns: Option<Columns>,
    /// Which of the SSDs each one shares its host with, as the first of them.
    pub hosts: Vec<usize>,
    /// What the places are called by the backend.
    pub(super) names: Vec<PlaceNumber>,
    /// SSDs carry tables of volumes, and with them logs of intents.
    pub labelled: bool,
    /// What the volume is held to.
    pub qos: Qos,
    pub drives: Drives,
    pub(super) directory: tempfile::TempDir,
}

impl MirrorPod {
    pub fn new(seed: u64, replicas: u16) -> Self {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let directory = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(directory.path());
        run.prepare().unwrap();
        let side = Side::new(1, 0, usize::from(replicas));
        let generation = LeaseGeneration::new(1);
        let replica = |number: u16| ReplicaObject {
            number: number.into(),
            ssd: format!("h{}/ssd0", number + 2),
            route: Route { channel: side.channel(usize::from(number)), generation },
            place: PlaceNumber::FIRST,
            in_sync: true,
            away: false,
            leaving: false,
        };
        let members: Vec<ReplicaObject> = (0..replicas).map(replica).collect();
        let disk = DiskObject {
            lease: LeaseId::new(7).unwrap(),
            instance: InstanceId::new(1),
            instance_name: "vm0".to_owned(),
            device: "vol0".to_owned(),
            socket: side.socket.clone(),
            vmm_listens: false,
            volume: VolumeId::new(1),
            serial: "vol0".to_owned(),
            size_bytes: MIRROR_BYTES,
            block_bytes: 512,
            discard_granularity_bytes: None,
            read_only: false,
            queues: 2,
            data_area: side.data_area,
            ram_area: None,
            route: members[0].route,
            replicas: members,
            stripe_bytes: None,
            beside: None,
            number: None,
            epoch: 1,
            failed: false,
            write_through: false,
            untold: false,
            incoming: false,
        };
        let count = usize::from(replicas);
        Self {
            pool,
            run,
            disk,
            controls: (0..count).map(|_| Control::new()).collect(),
            backends: (0..count).map(|_| None).collect(),
            frontend: None,
            side,
            incoming: None,
            left_areas: Vec::new(),
            next_ring: RINGS,
            dropped: 0,
            synced: 0,
            attached: None,
            present: vec![true; count],
            replaced: None,
            columns: None,
            hosts: (0..count).collect(),
            names: vec![PlaceNumber::FIRST; count],
            labelled: false,
            qos: Qos::default(),
            drives: Drives::Ram,
            directory,
        }
    }

    pub fn started(seed: u64, replicas: u16) -> Self {
        let mut pod = Self::new(seed, replicas);
        pod.start_all();
        pod
    }

    pub fn start_all(&mut self) {
        self.start_frontend();
        for index in 0..self.controls.len() {
            self.start_backend(index);
        }
        self.apply_disk();
    }

    /// The same with the first place only; the volume may move to the others.
    pub fn alone(seed: u64, hosts: u16) -> Self {
        let mut pod = Self::new(seed, hosts);
        for index in 1..usize::from(hosts) {
            pod.present[index] = false;
            pod.disk.replicas[index].in_sync = false;
        }
        pod.start_all();
        pod
    }

    /// A volume that lies on all of these hosts' devices, unit by unit.
    pub fn striped(seed: u64, hosts: u16, unit_bytes: u64) -> Self {
        Self::striped_over(seed, (hosts, hosts), unit_bytes)
    }

    /// A volume that lies on so many of these hosts' devices, and whose columns may move to the others.
    pub fn striped_over(seed: u64, (columns, hosts): (u16, u16), unit_bytes: u64) -> Self {
        let mut pod = Self::new(seed, hosts);
        pod.disk.stripe_bytes = Some(unit_bytes);
        pod.columns = Some(Columns::new(columns));
        pod.start_all();
        pod
    }

    /// Has the volume lie on one more device, in place of another one if there is one.
    pub fn add(&mut self, index: usize, replaced: Option<usize>) {
        assert!(!self.present[index]);
        self.present[index] = true;
        self.replaced = replaced;
        let count = self.controls.len() as u32;
        let replica = &mut self.disk.replicas[index];
        replica.number += count;
        (replica.in_sync, replica.leaving) = (false, false);
        self.disk.epoch += 1;
        if self.shares_host(index) {
            self.add_beside(index);
        } else if self.backends[index].is_some() {
            let volume = Object::Volume(self.volume(index));
            let (lease, area) = (self.disk.lease, self.disk.data_area);
            let backend = self.backends[index].as_mut().unwrap();
            obeyed(|| backend.remove(ObjectId::Volume(PlaceId::first(lease))));
            obeyed(|| backend.scrub(RegionId::new(1), area));
            backend.apply(volume).unwrap();
        }
        self.apply_disk();
    }

    /// The frontend has let go of a place: what is there is nobody's any more.
    fn left(&mut self, index: usize) {
        self.present[index] = false;
        self.disk.epoch += 1;
        if self.shares_host(index) {
            self.leave_other(index);
        } else if let Some(backend) = &mut self.backends[index] {
            let lease = self.disk.lease;
            obeyed(|| backend.remove(ObjectId::Volume(PlaceId::first(lease))));
        }
        self.controls[index].set_bytes(VOLUME_START, &vec![0xdd; MIRROR_BYTES as usize]);
        if self.labelled {
            self.put_on_drive(index, self.log_start(index), &[0; intent_log::LENGTH]);
        }
    }

    /// Gives the disk an area of another length. To be called before anything is started.
    pub fn set_data_area(&mut self, bytes: u64) {
        let area = Area::new(self.side.data_area.start, LineCount::covering(bytes));
        assert!(area.bytes() + area.start.bytes().get() <= POOL_BYTES);
        (self.side.data_area, self.disk.data_area) = (area, area);
    }

    /// The places that the volume has.
    pub fn places(&self) -> Vec<usize> {
        (0..self.present.len()).filter(|&index| self.present[index]).collect()
    }

    pub fn memory(&self, index: usize) -> SimulatedMemory {
        self.pool.host(HostId::new(self.hosts[index] as u16 + 2))
    }

    pub fn driver(&self) -> Driver {
        Driver::connected_to(&self.run.sockets().join(&self.disk.socket), self.disk.queues)
    }

    pub fn start_frontend(&mut self) {
        self.frontend = None;
        self.frontend = Some(self.side.start(&self.pool, &self.drives, &self.run));
    }

    pub(super) fn new_rings(&mut self, index: usize, incoming: bool) {
        let lines = RingPlacement::lines(SLOTS, 8).get();
        let start = self.next_ring;
        self.next_ring += 2 * lines;
        assert!(self.next_ring <= RINGS + RING_LINES, "the test asks for too many generations");
        let rings =
            [start, start + lines].map(|start| RingPlacement { start: LineOffset::new(start), slots: SLOTS });
        let at_backend = self.memory(index);
        let side = if incoming { &mut self.incoming.as_mut().unwrap().0 } else { &mut self.side };
        match &self.drives {
            Drives::Ram => {
                rings[0].clear(&self.pool.host(HostId::new(side.host)));
                rings[1].clear(&at_backend);
            }
            Drives::Files { pool, .. } => rings.iter().for_each(|ring| ring.clear(&pool.hardware())),
        }
        side.generations[index] += 1;
        side.rings.resize(self.controls.len(), rings);
        side.rings[index] = rings;
    }

    pub(super) fn channel(side: &Side, index: usize, at_frontend: bool) -> Object {
        let [to_backend, to_frontend] = side.rings[index];
        let (peer, outgoing, incoming) = if at_frontend {
            (endpoint(index as u16 + 2, Role::BlkBackend), to_backend, to_frontend)
        } else {
            (endpoint(side.host, Role::BlkFrontend), to_frontend, to_backend)
        };
        let generation = Generation::new(side.generations[index]);
        let id = side.channel(index);
        let engine = Engine::Blk;
        Object::Channel(ChannelObject { id, engine, peer, generation, outgoing, incoming, receives: None })
    }

    /// A backend begins, as the controller has it: it flushes what its predecessor left, has its channel, then its
    /// volume; the frontend hears of it last.
    pub fn start_backend(&mut self, index: usize) {
        let host = index as u16 + 2;
        let bell = DoorbellListener::bind(&self.run.data_doorbell(endpoint(host, Role::BlkBackend))).unwrap();
        let (memory, path) = (self.memory(index), self.drive(index));
        let (worker, run) = (Pod::<SimulatedMemory>::worker(), self.run.clone());
        let mut backend = match &mut self.drives {
            Drives::Ram => {
                let mut ssds = Vec::new();
                for ssd in (0..self.hosts.len()).filter(|&ssd| self.hosts[ssd] == index) {
                    let control = Arc::clone(&self.controls[ssd]);
                    let driver = RamSsd { memory: memory.clone(), control };
                    ssds.push(OpenedSsd::new(self.ssd_name(ssd), Box::new(driver)));
                }
                Backend::start(memory, run, worker, Some(bell), ssds, None).unwrap()
            }
            Drives::Files { pool, seed, opened, obeys_flush } => {
                *opened += 1;
                let (seed, obeys_flush) = (*seed << 8 | *opened, *obeys_flush);
                let cache = VolatileCacheOptions { seed, obeys_flush };
                let bytes = VOLUME_START + MIRROR_BYTES;
                let ssd = FileSsd::open_volatile("ssd0", &path, Some(bytes), pool, cache).unwrap();
                let ssds = vec![OpenedSsd::new("ssd0", Box::new(ssd))];
                Backend::start(pool.hardware(), run, worker, Some(bell), ssds, None).unwrap()
            }
        };
        if self.labelled {
            backend.keep_tables(vec![("ssd0".to_owned(), self.label(index))]);
            obeyed(|| backend.apply(Object::Table(self.table(index))));
        }
        obeyed(|| backend.scrub(RegionId::new(1), self.disk.data_area));
        self.new_rings(index, false);
        obeyed(|| backend.apply(Self::channel(&self.side, index, false)));
        for place in self.served_by(index) {
            backend.apply(Object::Volume(self.volume(place))).unwrap();
        }
        self.backends[index] = Some(backend);
        let channel = Self::channel(&self.side, index, true);
        self.frontend.as_mut().unwrap().apply(channel).unwrap();
        self.connect_incoming(index);
    }

    /// A channel between a backend and the frontend where the guest will be.
    pub(super) fn connect_incoming(&mut self, index: usize) {
        if self.incoming.is_some() {
            self.new_rings(index, true);
        }
        let (Some(backend), Some((side, frontend))) = (&mut self.backends[index], &mut self.incoming) else {
            return;
        };
        obeyed(|| backend.apply(Self::channel(side, index, false)));
        frontend.apply(Self::channel(side, index, true)).unwrap();
    }

    pub(super) fn volume(&self, index: usize) -> VolumeObject {
        VolumeObject {
            lease: self.disk.lease,
            place: self.names[index],
            volume: VolumeId::new(1),
            ssd: self.ssd_name(index),
            start_bytes: VOLUME_START,
            size_bytes: match self.disk.stripe_bytes {
                Some(unit) => {
                    self.disk.size_bytes.div_ceil(unit * self.columns.as_ref().unwrap().count()) * unit
                }
                None => self.disk.size_bytes,
            },
            read_only: false,
            generation: self.disk.replicas[index].route.generation,
            channel: self.disk.replicas[index].route.channel,
            data_area: self.disk.data_area,
            ram_area: None,
            instance: InstanceId::new(1),
            qos: self.qos,
            priority: Priority::DEFAULT,
        }
    }

    /// Holds the volume to something else from now on.
    pub fn set_qos(&mut self, qos: Qos) {
        self.qos = qos;
        for index in 0..self.backends.len() {
            for volume in
                self.served_by(index).into_iter().map(|place| self.volume(place)).collect::<Vec<_>>()
            {
                if let Some(backend) = &mut self.backends[index] {
                    backend.apply(Object::Volume(volume)).unwrap();
                }
            }
        }
    }

    pub fn apply_disk(&mut self) {
        let disk = self.disk_at(&self.side);
        self.frontend.as_mut().unwrap().apply(Object::Disk(disk)).unwrap();
        if let Some((side, _)) = &self.incoming {
            let disk = DiskObject { incoming: true, ..self.disk_at(side) };
            self.incoming.as_mut().unwrap().1.apply(Object::Disk(disk)).unwrap();
        }
    }

    fn disk_at(&self, side: &Side) -> DiskObject {
        let mut disk = self.disk.clone();
        (disk.socket, disk.data_area) = (side.socket.clone(), side.data_area);
        for (index, replica) in disk.replicas.iter_mut().enumerate() {
            replica.route.channel = side.channel(self.hosts[index]);
            replica.place = self.names[index];
        }
        if let Some(columns) = &self.columns {
            columns.put(&mut disk);
            return disk;
        }
        let mut present = self.present.iter();
        disk.replicas.retain(|_| *present.next().unwrap());
        disk.route = disk.replicas[0].route;
        if let [only] = disk.replicas.as_slice() {
            disk.number = Some(only.number);
            disk.replicas.clear();
        }
        disk
    }

    pub(super) fn drop_replica(&mut self, index: usize) {
        let present = &self.present;
        let other =
            |(other, replica): (usize, &ReplicaObject)| other != index && replica.in_sync && present[other];
        if self.disk.replicas[index].in_sync && self.disk.replicas.iter().enumerate().any(other) {
            self.disk.replicas[index].in_sync = false;
            self.disk.epoch += 1;
            self.dropped += 1;
        }
    }

    fn numbered(&self, number: u32) -> Option<usize> {
        let found = |index: &usize| self.present[*index] && self.disk.replicas[*index].number == number;
        (0..self.present.len()).find(found)
    }

    /// What the controller has yet to hear.
    pub fn reports(&mut self) -> Vec<Report> {
        self.side.reporter.take().into()
    }

    /// What the controller does with what it is told.
    pub fn control(&mut self) {
        let reports = self.side.reporter.take();
        let epoch = self.disk.epoch;
        for report in reports {
            if matches!(report, Report::Attachment { .. }) {
                self.attached = Some(report);
                continue;
            }
            if self.columns.is_some() {
                self.control_columns(&report);
                continue;
            }
            match report {
                Report::ReplicaFailed { replica, epoch, .. } => {
                    let Some(index) = self.numbered(replica) else { continue };
                    if self.disk.replicas[index].in_sync {
                        self.drop_replica(index);
                    } else if epoch == self.disk.epoch {
                        self.disk.epoch += 1;
                    }
                }
                Report::ReplicaSynced { replica, epoch, .. } if epoch == self.disk.epoch => {
                    let Some(index) = self.numbered(replica) else { continue };
                    self.disk.replicas[index].in_sync = true;
                    self.disk.epoch += 1;
                    self.synced += 1;
                    if let Some(replaced) = self.replaced.take() {
                        self.disk.replicas[replaced].leaving = true;
                    }
                    // Its backend may have died since that was said.
                    if self.disk.replicas[index].away {
                        self.drop_replica(index);
                    }
                }
                Report::ReplicaLeft { replica, epoch, .. } if epoch == self.disk.epoch => {
                    let Some(index) = self.numbered(replica) else { continue };
                    assert!(self.disk.replicas[index].leaving, "it was not told to go");
                    if self.disk.replicas[index].in_sync {
                        self.drop_replica(index);
                    } else {
                        self.left(index);
                    }
                }
                _ => {}
            }
        }
        if self.disk.epoch != epoch {
            self.apply_disk();
        }
        // That is when the frontend says again what was not heard.
        self.frontend.as_mut().unwrap().telemetry();
    }
}
