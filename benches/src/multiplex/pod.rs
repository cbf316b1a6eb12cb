//! Two hosts with a guest each, which send back what they get, and one NIC or two, all of which take turns on one core.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, anyhow};
use cxl_channel::RingPlacement;
use cxl_pool::{Area, EndpointId, Generation, HostId, LineCount, LineOffset, Memory, Pool, Role};
use pod_protocol::config::Wakeup;
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, MacAddress};
use pod_protocol::objects::{
    ChannelObject, Engine, NicObject, NicPolicy, Object, PortObject, Priority, RegistrationObject,
    RegistrationState, Route,
};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::Task;
use vhost_frontend::mock::{MockGuest, Piece};
use vhost_net_cxl::backend::Backend;
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::ChannelEnd;
use vhost_net_cxl::counters::{LeaseBook, NicCounters};
use vhost_net_cxl::frontend::Frontend;
use vhost_net_cxl::nic::Nic;
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use vm_memory::{Bytes, GuestAddress};

use super::wire::{Beginning, Seen, WireNic};
use super::{HOSTS, MAC_BYTES, mac};

const SLOTS: u32 = 8192;
const AREA_BYTES: u64 = 16 << 20;
pub(super) const POOL_BYTES: u64 = 128 << 20;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const RING_SIZE: u16 = 256;
const GUEST_BYTES: u64 = 4 << 20;
const BUFFER_BYTES: u32 = 2048;
const HEADER_BYTES: u64 = 12;

/// Which NIC a host uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Each its own.
    Apart,
    /// Both that of the first host.
    Shared,
}

impl Sharing {
    pub(super) const ALL: [Self; 2] = [Self::Apart, Self::Shared];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Apart => "a NIC each",
            Self::Shared => "one NIC",
        }
    }

    pub(super) const fn nics(self) -> usize {
        match self {
            Self::Apart => HOSTS,
            Self::Shared => 1,
        }
    }

    const fn nic_of(self, host: usize) -> usize {
        match self {
            Self::Apart => host,
            Self::Shared => 0,
        }
    }
}

/// A guest that sends back what it gets.
struct Echo {
    guest: MockGuest,
    /// Buffers that are on their way out, in the order in which they were offered.
    out: std::collections::VecDeque<u64>,
    /// The buffer of each receive descriptor.
    posted: Vec<u64>,
}

impl Echo {
    fn new() -> (Self, u64) {
        let features = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_NET_F_MRG_RXBUF | 1 << VIRTIO_RING_F_EVENT_IDX;
        let guest = MockGuest::new(GUEST_BYTES, 2, RING_SIZE);
        let mut echo = Self { guest, out: [].into(), posted: vec![0; RING_SIZE.into()] };
        for buffer in 0..u64::from(RING_SIZE) - 1 {
            echo.post(echo.guest.data_start() + buffer * u64::from(BUFFER_BYTES));
        }
        (echo, features)
    }

    fn post(&mut self, address: u64) {
        let piece = Piece { address, bytes: BUFFER_BYTES, writable: true };
        let head = self.guest.offer_silently(RECEIVE, &[piece]);
        self.posted[usize::from(head)] = address;
    }

    /// Sends back what has come, and posts the buffers of what was sent. Says how many came.
    fn turn(&mut self) -> Result<u64> {
        while self.guest.used(TRANSMIT).is_some() {
            // The device gives them back in order.
            let address = self.out.pop_front().context("a buffer that was offered")?;
            self.post(address);
        }
        let mut came = 0;
        while let Some(used) = self.guest.used(RECEIVE) {
            let address = self.posted[usize::from(used.head)];
            let at = GuestAddress(address + HEADER_BYTES);
            let mut addresses = [0; 2 * MAC_BYTES];
            let memory = self.guest.memory();
            memory.read_slice(&mut addresses, at)?;
            addresses.rotate_left(MAC_BYTES);
            memory.write_slice(&addresses, at)?;
            memory.write_slice(&[0; 12], GuestAddress(address))?;
            let piece = Piece { address, bytes: used.written, writable: false };
            self.guest.offer_silently(TRANSMIT, &[piece]);
            self.out.push_back(address);
            came += 1;
        }
        for ring in [TRANSMIT, RECEIVE] {
            self.guest.mute(ring);
        }
        Ok(came)
    }
}

/// What backend and frontend know of a host's guest.
fn attachment(
    host: usize,
    nic: String,
    (lease, instance): (LeaseId, InstanceId),
    tx_area: Area,
) -> (RegistrationObject, PortObject) {
    let (generation, channel) = (LeaseGeneration::new(1), ChannelId::new(instance.get()));
    let (mac, mtu, policy) = (MacAddress::new(mac(host)), 1500, NicPolicy::default());
    let registration = RegistrationObject {
        lease,
        nic,
        instance,
        generation,
        mac,
        mtu,
        features: 0,
        channel,
        tx_area,
        state: RegistrationState::Active,
        rx_quota_buffers: 2048,
        policy: policy.clone(),
        ram_area: None,
        has_other_rails: false,
        priority: Priority::DEFAULT,
    };
    let port = PortObject {
        lease,
        instance,
        instance_name: format!("vm{instance}"),
        device: "net0".to_owned(),
        socket: String::new(),
        vmm_listens: false,
        mac,
        mtu,
        queue_pairs: 1,
        features: 0,
        tx_area,
        active: Route { channel, generation },
        rails: Vec::new(),
        standby: None,
        draining: None,
        incoming: false,
        policy,
        ram_area: None,
    };
    (registration, port)
}

/// Everything.
pub(super) struct Pod<M: Memory> {
    frontends: Vec<Frontend<M>>,
    backends: Vec<Backend<M>>,
    guests: Vec<Echo>,
    books: Vec<LeaseBook>,
}

impl<M: Memory> Pod<M> {
    /// Two hosts, and NICs with traffic of these seeds for so long.
    pub(super) fn new(
        pool: &Pool,
        memory: &M,
        sharing: Sharing,
        (traffic, began, until_ns): (u64, &Beginning, u64),
        seen: &Arc<Mutex<Seen>>,
    ) -> Result<Self> {
        let mut next = pool.layout().data().start;
        let mut take = |lines: LineCount| -> Result<LineOffset> {
            let start = next;
            next = next.checked_add(lines).context("the pool is too small")?;
            Ok(start)
        };
        // Nobody sleeps, so there are no doorbells.
        let run = RunDirectory::new(Path::new("/nonexistent")).with_wakeup(Wakeup::Poll);
        let open = || {
            let (memory, run) = (memory.clone(), run.clone());
            Box::new(move |object: &ChannelObject| {
                ChannelEnd::open(object, &memory, &run, &ChannelBook::default())
            })
        };
        let refused = |reason: String| anyhow!(reason);
        let area = LineCount::covering(AREA_BYTES);
        let mut books = Vec::new();
        let mut book = || {
            books.push(LeaseBook::default());
            LeaseBook::clone(&books[books.len() - 1])
        };
        let mut backends = Vec::new();
        for nic in 0..sharing.nics() {
            let hosts: Vec<usize> = (0..HOSTS).filter(|host| sharing.nic_of(*host) == nic).collect();
            let name = format!("nic{nic}");
            let wire = WireNic::new(
                &name,
                memory.clone(),
                &hosts,
                traffic,
                began.clone(),
                until_ns,
                Arc::clone(seen),
            );
            let nics: Vec<(Box<dyn Nic>, _)> = vec![(Box::new(wire), Arc::new(NicCounters::default()))];
            let mut backend = Backend::new(memory.clone(), nics, book(), open(), Box::new(|_| ()));
            let rx_area = Area::new(take(area)?, area);
            backend.apply(Object::Nic(NicObject { nic: name, rx_area }), None).map_err(refused)?;
            backends.push(backend);
        }
        let (mut frontends, mut guests) = (Vec::new(), Vec::new());
        for host in 0..HOSTS {
            let number = u32::try_from(host)? + 1;
            let ring = RingPlacement::lines(SLOTS, 2);
            let there = RingPlacement { start: take(ring)?, slots: SLOTS };
            let back = RingPlacement { start: take(ring)?, slots: SLOTS };
            let channel = ChannelId::new(number);
            let end = |role| EndpointId::new(HostId::new(u16::try_from(number).unwrap_or(u16::MAX)), role);
            let object = |peer, outgoing, incoming| {
                let (id, generation) = (channel, Generation::new(1));
                Object::Channel(ChannelObject {
                    id,
                    engine: Engine::Net,
                    peer,
                    generation,
                    outgoing,
                    incoming,
                    receives: None,
                })
            };
            let backend = &mut backends[sharing.nic_of(host)];
            let mut frontend = Frontend::new(memory.clone(), book(), open()).context("a timer")?;
            backend.apply(object(end(Role::NetFrontend), back, there), None).map_err(refused)?;
            frontend.apply(object(end(Role::NetBackend), there, back)).map_err(refused)?;
            let (lease, instance) = (LeaseId::new(number).context("a lease")?, InstanceId::new(number));
            let tx_area = Area::new(take(area)?, area);
            let (registration, port) =
                attachment(host, format!("nic{}", sharing.nic_of(host)), (lease, instance), tx_area);
            backend.apply(Object::Registration(registration), None).map_err(refused)?;
            frontend.apply(Object::Port(port)).map_err(refused)?;
            let (echo, features) = Echo::new();
            for index in [0, 1] {
                frontend.start_ring(lease, echo.guest.device_ring(index, features), None);
            }
            frontends.push(frontend);
            guests.push(echo);
        }
        Ok(Self { frontends, backends, guests, books })
    }

    /// What the engine dropped, by reason.
    pub(super) fn drops(&self) -> BTreeMap<String, u64> {
        let mut drops = BTreeMap::new();
        for (reason, count) in self.books.iter().flat_map(LeaseBook::telemetry).flat_map(|lease| lease.drops)
        {
            *drops.entry(reason).or_default() += count;
        }
        drops
    }

    /// Everybody has a turn. Says how many packets guests got.
    pub(super) fn turn(&mut self) -> Result<u64> {
        self.backends.iter_mut().for_each(|backend| _ = backend.turn());
        self.frontends.iter_mut().for_each(|frontend| _ = frontend.turn());
        let mut came = 0;
        for guest in &mut self.guests {
            came += guest.turn()?;
        }
        self.frontends.iter_mut().for_each(|frontend| _ = frontend.turn());
        Ok(came)
    }
}
