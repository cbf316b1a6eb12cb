//! A guest whose memory lies in a real pool, with a disk in several places.

use std::fs::File;
use std::sync::Arc;

use cxl_channel::RingPlacement;
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{Area, Generation, LineCount, LineOffset, Memory, Pool, Role};
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::ids::{ChannelId, PlaceNumber};
use pod_protocol::objects::{ChannelObject, Engine, Object, ReplicaObject, Route, VolumeObject};
use pod_protocol::reports::Report;
use vhost_blk_cxl::backend::{Backend, OpenedSsd};
use vhost_blk_cxl::frontend::Frontend;
use vhost_blk_cxl::segments::Segment;
use vhost_frontend::mock::MockGuest;

use super::mirror::obeyed;
use super::ram::{Control, RamSsd};
use super::{ALL_FEATURES, Driver, Pod, SECTOR, SLOTS, VOLUME_BYTES, VOLUME_START, endpoint};

const QUEUES: u16 = 2;

/// A guest whose memory lies in a real pool, and a disk in several places.
pub struct SpreadPod<M: Memory> {
    /// For what it has of objects, and its frontend.
    pub pod: Pod<M>,
    reporter: Reporter,
    backends: Vec<Backend>,
    pub controls: Vec<Arc<Control>>,
    channels: Vec<ChannelObject>,
    next_ring: u64,
    pool: Pool,
    pub ram: Area,
    memory: M,
}

impl<M: Memory> SpreadPod<M> {
    /// So many places of a disk, and more hosts.
    pub fn new(pool: Pool, memory: &M, (places, hosts): (u32, u32), stripe_bytes: Option<u64>) -> Self {
        let mut pod = Pod::new(memory.clone(), memory.clone(), pool.layout().data().start);
        let lines = LineCount::covering(Driver::ram_bytes(QUEUES));
        let ram = Area::new(pod.data.start.saturating_add(pod.data.lines), lines);
        (pod.disk.ram_area, pod.volume.ram_area) = (Some(ram), Some(ram));
        pod.disk.stripe_bytes = stripe_bytes;
        pod.disk.replicas = (0..places).map(|number| Self::place(&pod, number, number)).collect();
        if stripe_bytes.is_some() {
            pod.volume.size_bytes = VOLUME_BYTES / u64::from(places);
        }
        let reporter = Reporter::new().unwrap();
        let bell = DoorbellListener::bind(&pod.run.data_doorbell(endpoint(1, Role::BlkFrontend))).unwrap();
        let (run, file, told) = (pod.run.clone(), Some(pool.file_identity()), Some(reporter.clone()));
        let frontend = Frontend::start(memory.clone(), run, Pod::<M>::worker(), Some(bell), told, file);
        pod.frontend = Some(frontend.unwrap());
        let next_ring = pool.layout().data().start.get();
        let mut setup = Self {
            pod,
            reporter,
            backends: Vec::new(),
            controls: Vec::new(),
            channels: Vec::new(),
            next_ring,
            pool,
            ram,
            memory: memory.clone(),
        };
        for index in 0..hosts as usize {
            setup.begin(index);
        }
        setup.pod.apply_disk();
        setup
    }

    /// A place of the disk, on the device of this host.
    pub fn place(pod: &Pod<M>, number: u32, host: u32) -> ReplicaObject {
        let channel = ChannelId::new(host + 1);
        ReplicaObject {
            number,
            ssd: format!("h{}/ssd0", host + 2),
            route: Route { channel, ..pod.disk.route },
            place: PlaceNumber::FIRST,
            in_sync: true,
            away: false,
            leaving: false,
        }
    }

    pub fn begin(&mut self, index: usize) {
        let here = endpoint(index as u16 + 2, Role::BlkBackend);
        let bell = DoorbellListener::bind(&self.pod.run.data_doorbell(here)).unwrap();
        let control = Control::new();
        let ssd = RamSsd { memory: self.memory.clone(), control: Arc::clone(&control) };
        let (ssds, run) = (vec![OpenedSsd::new("ssd0", Box::new(ssd))], self.pod.run.clone());
        let backend =
            Backend::start(self.memory.clone(), run, Pod::<M>::worker(), Some(bell), ssds, None).unwrap();
        self.backends.push(backend);
        self.controls.push(control);
        self.channel_at_frontend(index);
        self.channel_at_backend(index);
        let channel = ChannelId::new(index as u32 + 1);
        let volume = VolumeObject { channel, ..self.pod.volume.clone() };
        self.backends[index].apply(Object::Volume(volume)).unwrap();
    }

    /// The frontend has a new generation of a channel.
    pub fn channel_at_frontend(&mut self, index: usize) {
        let lines = RingPlacement::lines(SLOTS, 8).get();
        let [outgoing, incoming] = [self.next_ring, self.next_ring + lines]
            .map(|start| RingPlacement { start: LineOffset::new(start), slots: SLOTS });
        self.next_ring += 2 * lines;
        assert!(self.next_ring <= self.pod.data.start.get(), "the test asks for too many generations");
        outgoing.clear(&self.memory);
        incoming.clear(&self.memory);
        let generation = self.channels.get(index).map_or(1, |channel| channel.generation.get() + 1);
        let channel = ChannelObject {
            id: ChannelId::new(index as u32 + 1),
            engine: Engine::Blk,
            peer: endpoint(index as u16 + 2, Role::BlkBackend),
            generation: Generation::new(generation),
            outgoing,
            incoming,
            receives: None,
        };
        match self.channels.get_mut(index) {
            Some(known) => *known = channel.clone(),
            None => self.channels.push(channel.clone()),
        }
        self.pod.frontend.as_mut().unwrap().apply(Object::Channel(channel)).unwrap();
    }

    /// The backend hears of it.
    pub fn channel_at_backend(&mut self, index: usize) {
        let known = self.channels[index].clone();
        let (outgoing, incoming) = (known.incoming, known.outgoing);
        let peer = endpoint(1, Role::BlkFrontend);
        let channel = ChannelObject { peer, outgoing, incoming, ..known };
        let backend = &mut self.backends[index];
        obeyed(|| backend.apply(Object::Channel(channel.clone())));
    }

    pub fn connected(&self) -> Driver {
        let file = File::from(self.pool.fd().try_clone_to_owned().unwrap());
        let start = self.ram.start_byte().get();
        let guest = MockGuest::in_file(file, start, Driver::ram_bytes(QUEUES), QUEUES, 128);
        let mut driver = Driver { guest };
        driver.guest.connect(&self.pod.socket(), ALL_FEATURES);
        driver
    }

    /// How many commands used the guest's own memory, of these as a list, and how many used none of it.
    pub fn direct_listed_and_bounced(&self) -> (usize, usize, usize) {
        let (mut direct, mut listed, mut bounced) = (0, 0, 0);
        for given in self.controls.iter().flat_map(|control| control.given()) {
            let in_ram = |it: &Segment| self.ram.contains(it.start, it.bytes.into());
            let command = given.command;
            if !command.operation.has_data() {
                continue;
            }
            if !given.list.is_empty() {
                assert!(given.list.iter().all(in_ram));
                listed += 1;
            } else if self.ram.contains(command.data, command.length_bytes) {
                direct += 1;
            } else {
                assert!(self.pod.data.contains(command.data, command.length_bytes));
                bounced += 1;
            }
        }
        (direct, listed, bounced)
    }

    pub fn bounced(&self) -> usize {
        self.direct_listed_and_bounced().2
    }

    /// What two columns hold of the volume.
    pub fn stored(&self, at: u64, bytes: usize) -> Vec<u8> {
        let of_sector = |at: u64| {
            let unit_bytes = self.pod.disk.stripe_bytes.unwrap();
            let (unit, within) = (at / unit_bytes, at % unit_bytes);
            let start = VOLUME_START + unit / 2 * unit_bytes + within;
            self.controls[(unit % 2) as usize].bytes(start, SECTOR as usize)
        };
        (at..at + bytes as u64).step_by(SECTOR as usize).flat_map(of_sector).collect()
    }

    pub fn hold(&self, held: bool) {
        self.controls.iter().for_each(|control| control.hold(held));
    }

    pub fn waiting(&self) -> usize {
        self.controls.iter().map(|control| control.waiting()).sum()
    }

    pub fn dirty_bytes(&mut self) -> u64 {
        self.pod.frontend.as_mut().unwrap().telemetry().gauges["mirror-dirty-bytes"]
    }

    /// How many requests of the guest were to use its own memory.
    pub fn not_copied(&mut self) -> u64 {
        self.pod.frontend.as_mut().unwrap().telemetry().counters["zero-copy-requests"]
    }

    /// Whether the controller was told such a thing by now.
    pub fn was_told(&mut self, is_it: fn(&Report) -> bool) -> bool {
        self.dirty_bytes();
        self.reporter.take().iter().any(is_it)
    }
}
