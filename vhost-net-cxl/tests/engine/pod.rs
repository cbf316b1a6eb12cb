//! A frontend and backends on hosts of their own, turned by hand: nothing runs unless a test says so.

use std::path::Path;
use std::sync::{Arc, Mutex};

use cxl_channel::RingPlacement;
use cxl_pool::{Area, EndpointId, FileIdentity, Generation, HostId, LineCount, LineOffset, Memory, Role};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, MacAddress};
use pod_protocol::objects::{
    ChannelObject, Engine, NicObject, NicPolicy, Object, PortObject, Priority, RegistrationObject,
    RegistrationState, Route,
};
use pod_protocol::reports::Report;
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::telemetry::LeaseTelemetry;
use pod_protocol::worker::{Progress, Task};
use vhost_net_cxl::backend::Backend;
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::ChannelEnd;
use vhost_net_cxl::counters::{LeaseBook, NicCounters};
use vhost_net_cxl::frontend::Frontend;
use vhost_net_cxl::nic::null::NullNic;
use vhost_net_cxl::nic::{LinkState, Nic, NicConfig};
use vhost_net_cxl::offloads::Offloads;
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;

use crate::guest::Guest;

pub(crate) const POOL_BYTES: u64 = 80 << 20;
pub(crate) const NIC: &str = "nic0";
const MTU: u16 = 1500;

/// What a modern driver acknowledges.
pub(crate) fn all_features() -> u64 {
    1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_RING_F_INDIRECT_DESC
        | 1 << VIRTIO_NET_F_MRG_RXBUF
        | Offloads::ALL.features()
}

pub(crate) fn mac(last: u8) -> MacAddress {
    MacAddress::new([2, 0, 0, 0, 0, last])
}

pub(crate) fn lease(number: u32) -> LeaseId {
    LeaseId::new(number).expect("small")
}

/// Megabytes of the pool as an area.
pub(crate) fn area(first_mib: u64, mib: u64) -> Area {
    let lines_per_mib = (1 << 20) / 64;
    Area::new(LineOffset::new(first_mib * lines_per_mib), LineCount::new(mib * lines_per_mib))
}

/// One side of channel `number`, whose rings have `slots` slots. Both directions lie in the same megabyte.
pub(crate) fn channel(number: u32, generation: u32, slots: u32, frontend_side: bool) -> ChannelObject {
    let start = area(u64::from(number), 1).start;
    let there = RingPlacement { start, slots };
    let behind = start.checked_add(LineCount::new(8192)).expect("in the pool");
    let back = RingPlacement { start: behind, slots };
    let endpoint = |host, role| EndpointId::new(HostId::new(host), role);
    let (peer, outgoing, incoming) = if frontend_side {
        (endpoint(2, Role::NetBackend), there, back)
    } else {
        (endpoint(1, Role::NetFrontend), back, there)
    };
    let (id, generation) = (ChannelId::new(number), Generation::new(generation));
    ChannelObject { id, engine: Engine::Net, peer, generation, outgoing, incoming, receives: None }
}

pub(crate) fn open<M: Memory>(
    memory: &M,
    book: &ChannelBook,
) -> impl Fn(&ChannelObject) -> Result<ChannelEnd<M>, String> + Send + use<M> {
    let (memory, book) = (memory.clone(), book.clone());
    let run = RunDirectory::new(Path::new("/nonexistent"));
    move |object| ChannelEnd::open(object, &memory, &run, &book)
}

pub(crate) fn route(channel: u32, generation: u16) -> Route {
    Route { channel: ChannelId::new(channel), generation: LeaseGeneration::new(generation) }
}

/// A backend with one null NIC, and a look into it.
pub(crate) struct TestBackend<M: Memory> {
    pub(crate) task: Backend<M>,
    pub(crate) book: LeaseBook,
    pub(crate) channels: ChannelBook,
    pub(crate) link: LinkState,
    pub(crate) reports: Arc<Mutex<Vec<Report>>>,
    pub(crate) counters: Arc<NicCounters>,
}

impl<M: Memory> TestBackend<M> {
    pub(crate) fn new(memory: &M, nic: &str, receive_area: Area) -> Self {
        let table = format!("name = '{NIC}'\ndriver = 'null'\n{nic}").parse().expect("TOML");
        let nic = NullNic::new(&NicConfig::parse(&table).expect("valid"), memory.clone());
        Self::with_nic(memory, Box::new(nic), receive_area)
    }

    pub(crate) fn with_nic(memory: &M, nic: Box<dyn Nic>, receive_area: Area) -> Self {
        let link = nic.link().clone();
        let (book, channels) = (LeaseBook::default(), ChannelBook::default());
        let reports: Arc<Mutex<Vec<Report>>> = Arc::default();
        let told = Arc::clone(&reports);
        let tell = Box::new(move |report| told.lock().expect("unpoisoned").push(report));
        let counters = Arc::new(NicCounters::default());
        let nics: Vec<(Box<dyn Nic>, _)> = vec![(nic, Arc::clone(&counters))];
        let mut task =
            Backend::new(memory.clone(), nics, book.clone(), Box::new(open(memory, &channels)), tell);
        let object = NicObject { nic: NIC.into(), rx_area: receive_area };
        task.apply(Object::Nic(object), None).expect("started");
        Self { task, book, channels, link, reports, counters }
    }

    pub(crate) fn apply(&mut self, object: Object) {
        self.task.apply(object, None).expect("applied");
    }

    pub(crate) fn lease(&self, number: u32) -> LeaseTelemetry {
        find(&self.book, number)
    }
}

pub(crate) fn find(book: &LeaseBook, number: u32) -> LeaseTelemetry {
    let all = book.telemetry();
    all.into_iter().find(|it| it.lease == lease(number)).expect("a lease with counters")
}

/// A registration of instance `number`, which has this number in everything, over `channel`.
pub(crate) fn registration(
    number: u32,
    channel: u32,
    generation: u16,
    state: RegistrationState,
    transmit_area: Area,
) -> RegistrationObject {
    RegistrationObject {
        lease: lease(number),
        nic: NIC.into(),
        instance: InstanceId::new(number),
        generation: LeaseGeneration::new(generation),
        mac: mac(u8::try_from(number).expect("small")),
        mtu: MTU,
        features: Offloads::ALL.features(),
        channel: ChannelId::new(channel),
        tx_area: transmit_area,
        state,
        rx_quota_buffers: 512,
        policy: NicPolicy::default(),
        ram_area: None,
        has_other_rails: false,
        priority: Priority::DEFAULT,
    }
}

pub(crate) fn port(number: u32, transmit_area: Area, active: Route, standby: Option<Route>) -> PortObject {
    PortObject {
        lease: lease(number),
        instance: InstanceId::new(number),
        instance_name: format!("vm{number}"),
        device: "net0".into(),
        socket: format!("vm{number}-net0.sock"),
        vmm_listens: false,
        mac: mac(u8::try_from(number).expect("small")),
        mtu: MTU,
        queue_pairs: 1,
        features: Offloads::ALL.features(),
        tx_area: transmit_area,
        active,
        rails: Vec::new(),
        standby,
        draining: None,
        incoming: false,
        policy: NicPolicy::default(),
        ram_area: None,
    }
}

/// A frontend, and a look into it.
pub(crate) struct TestFrontend<M: Memory> {
    pub(crate) task: Frontend<M>,
    pub(crate) book: LeaseBook,
    pub(crate) channels: ChannelBook,
}

impl<M: Memory> TestFrontend<M> {
    pub(crate) fn new(memory: &M) -> Self {
        let (book, channels) = (LeaseBook::default(), ChannelBook::default());
        let task =
            Frontend::new(memory.clone(), book.clone(), Box::new(open(memory, &channels))).expect("a timer");
        Self { task, book, channels }
    }

    /// Knows the memory of guests that lies in the pool, if there is any.
    pub(crate) fn with_pool_file(self, file: Option<FileIdentity>) -> Self {
        let Self { task, book, channels } = self;
        Self { task: if let Some(file) = file { task.with_pool_file(file) } else { task }, book, channels }
    }

    pub(crate) fn apply(&mut self, object: Object) {
        self.task.apply(object).expect("applied");
    }

    pub(crate) fn start(&mut self, number: u32, guest: &Guest, features: u64) {
        self.task.start_ring(lease(number), guest.receive.ring(features, 0), None);
        self.task.start_ring(lease(number), guest.transmit.ring(features, 0), None);
    }

    pub(crate) fn lease(&self, number: u32) -> LeaseTelemetry {
        find(&self.book, number)
    }
}

/// Has a frontend and a backend open their channel, number 1.
pub(crate) fn connect<M: Memory>(
    frontend: &mut TestFrontend<M>,
    backend: &mut TestBackend<M>,
    generation: u32,
) {
    backend.apply(Object::Channel(channel(1, generation, 512, false)));
    frontend.apply(Object::Channel(channel(1, generation, 512, true)));
}

/// The same, and leases the NIC to instance 1.
pub(crate) fn serve<M: Memory>(frontend: &mut TestFrontend<M>, backend: &mut TestBackend<M>) {
    connect(frontend, backend, 1);
    backend.apply(Object::Registration(registration(1, 1, 1, RegistrationState::Active, area(8, 8))));
    frontend.apply(Object::Port(port(1, area(8, 8), route(1, 1), None)));
}

/// Turns tasks until none of them has anything to do, several times in a row.
pub(crate) fn settle(tasks: &mut [&mut dyn Turn]) {
    let mut quiet = 0;
    for _ in 0..100_000 {
        let mut busy = false;
        for task in tasks.iter_mut() {
            busy |= task.turn_once();
        }
        quiet = if busy { 0 } else { quiet + 1 };
        if quiet > 20 {
            return;
        }
    }
    panic!("the tasks never come to rest");
}

/// Numbers below what is asked for, which follow from a seed.
pub(crate) fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 32) % below
    }
}

/// Anything that can be turned.
pub(crate) trait Turn {
    fn turn_once(&mut self) -> bool;
}

impl<M: Memory> Turn for TestBackend<M> {
    fn turn_once(&mut self) -> bool {
        self.task.turn() == Progress::Busy
    }
}

impl<M: Memory> Turn for TestFrontend<M> {
    fn turn_once(&mut self) -> bool {
        self.task.turn() == Progress::Busy
    }
}
