//! A daemon as the controller knows it: it joins, has what it is told to have, and looks at its fence.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cxl_pool::{Area, EndpointId};
use pod_protocol::commands::Command as Order;
use pod_protocol::ids::{ChannelId, LeaseGeneration, LeaseId, PlaceId, PlaceNumber, RegionId};
use pod_protocol::objects::{Object, ObjectId, RegistrationState};

/// An order on its way, with the numbers that its areas had when it was given.
#[derive(Clone, Debug)]
pub(super) struct Mail {
    pub(super) connection: u64,
    pub(super) ticket: u64,
    pub(super) order: Order,
    pub(super) regions: Vec<(RegionId, Area)>,
}

/// One life of a daemon after the other, at one place.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own that may go wrong by itself")]
pub(super) struct Daemon {
    pub(super) id: EndpointId,
    /// Zero: nobody has ever been there.
    pub(super) incarnation: u64,
    pub(super) alive: bool,
    /// It left in order: its slot is empty.
    pub(super) left: bool,
    /// Stopped by a signal until it is told to go on.
    pub(super) frozen: bool,
    /// How fast its clock runs, in thousandths of true time.
    pub(super) clock_permille: u64,
    /// Which conversation with a controller it is in; none was begun with zero.
    pub(super) connection: u64,
    pub(super) joined: bool,
    /// Since when it has had the controller's ear without a pause.
    pub(super) joined_us: u64,
    pub(super) inbox: VecDeque<Mail>,
    pub(super) objects: BTreeMap<ObjectId, Object>,
    confirmed: BTreeSet<ObjectId>,
    /// The fence generation that came with its grant.
    pub(super) granted_fence: u64,
    /// Whether it was granted anything in this life.
    pub(super) granted: bool,
    /// When it looked at its fence last.
    pub(super) looked_us: u64,
    /// What its VMMs do: connected, running.
    pub(super) attached: BTreeMap<LeaseId, (bool, bool)>,
}

impl Daemon {
    pub(super) fn new(id: EndpointId) -> Self {
        Self {
            id,
            incarnation: 0,
            alive: false,
            left: true,
            frozen: false,
            clock_permille: 1000,
            connection: 0,
            joined: false,
            joined_us: 0,
            inbox: VecDeque::new(),
            objects: BTreeMap::new(),
            confirmed: BTreeSet::new(),
            granted_fence: 0,
            granted: false,
            looked_us: 0,
            attached: BTreeMap::new(),
        }
    }

    pub(super) fn is_running(&self) -> bool {
        self.alive && !self.frozen
    }

    pub(super) fn start(&mut self, incarnation: u64, clock_permille: u64) {
        *self = Self { incarnation, clock_permille, alive: true, left: false, ..Self::new(self.id) };
    }

    pub(super) fn die(&mut self) {
        self.alive = false;
        self.frozen = false;
        self.joined = false;
        self.objects.clear();
        self.inbox.clear();
        self.attached.clear();
    }

    /// A controller begins to say anew what it wants.
    pub(super) fn begin(&mut self, connection: u64) {
        self.connection = connection;
        self.joined = false;
        self.confirmed.clear();
    }

    /// Does as it is told. The areas are those that it is given by that.
    pub(super) fn obey(&mut self, order: &Order) -> Result<(), String> {
        match order {
            Order::Apply { object, .. } => {
                self.confirmed.insert(object.id());
                self.objects.insert(object.id(), object.clone());
            }
            Order::Remove { id, .. } => {
                self.objects.remove(id);
                self.confirmed.remove(id);
            }
            Order::Synced { .. } => {
                let confirmed = &self.confirmed;
                self.objects.retain(|id, _| confirmed.contains(id));
            }
            Order::Scrub { region, area, .. } => {
                if self.objects.values().flat_map(areas_of).any(|used| used.overlaps(area)) {
                    return Err(format!("{region} is in use"));
                }
            }
        }
        Ok(())
    }

    /// The channel and generation with which it serves a guest's device, if it does.
    pub(super) fn writes(&self, lease: LeaseId) -> Vec<(ChannelId, LeaseGeneration)> {
        match (self.objects.get(&ObjectId::Port(lease)), self.objects.get(&ObjectId::Disk(lease))) {
            (Some(Object::Port(port)), _) if !port.incoming => {
                vec![(port.active.channel, port.active.generation)]
            }
            (_, Some(Object::Disk(disk))) if !disk.incoming => {
                let replicas = disk.replicas.iter().chain(&disk.beside).map(|replica| replica.route);
                replicas.chain([disk.route]).map(|route| (route.channel, route.generation)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The places of a volume in several, as this frontend calls them in its requests, with the SSDs that it means.
    pub(super) fn means(&self, lease: LeaseId) -> Vec<(Called, String)> {
        let Some(Object::Disk(disk)) = self.objects.get(&ObjectId::Disk(lease)) else { return Vec::new() };
        let places = disk.replicas.iter().chain(&disk.beside);
        places.map(|it| ((it.route.channel, it.place, it.route.generation), it.ssd.clone())).collect()
    }

    /// The places of a volume as this backend knows them, with the SSDs where they are.
    pub(super) fn serves(&self, lease: LeaseId) -> Vec<(Called, String)> {
        let of_lease = |object: &Object| match object {
            Object::Volume(it) if it.lease == lease => {
                let ssd = format!("h{}/{}", self.id.host.get(), it.ssd);
                Some(((it.channel, it.place, it.generation), ssd))
            }
            _ => None,
        };
        self.objects.values().filter_map(of_lease).collect()
    }

    /// What it accepts of a lease: over which channel, of which generation, and whether as the active NIC.
    pub(super) fn accepts(&self, lease: LeaseId) -> Vec<(ChannelId, LeaseGeneration, bool)> {
        let of_lease = |object: &Object| match object {
            Object::Registration(it) if it.lease == lease && it.state != RegistrationState::Standby => {
                Some((it.channel, it.generation, it.state == RegistrationState::Active))
            }
            Object::Volume(it) if it.lease == lease => Some((it.channel, it.generation, false)),
            _ => None,
        };
        self.objects.values().filter_map(of_lease).collect()
    }

    /// The generation of a channel as it knows it.
    pub(super) fn channel(&self, id: ChannelId) -> Option<u32> {
        match self.objects.get(&ObjectId::Channel(id)) {
            Some(Object::Channel(channel)) => Some(channel.generation.get()),
            _ => None,
        }
    }
}

/// What requests say of which place they are for.
pub(super) type Called = (ChannelId, PlaceNumber, LeaseGeneration);

/// The lease that an object is about.
pub(super) fn lease_of(id: &ObjectId) -> Option<LeaseId> {
    match id {
        ObjectId::Port(lease)
        | ObjectId::Disk(lease)
        | ObjectId::Volume(PlaceId { lease, .. })
        | ObjectId::Registration { lease, .. } => Some(*lease),
        ObjectId::Channel(_)
        | ObjectId::Nic(_)
        | ObjectId::Table(_)
        | ObjectId::Fabric
        | ObjectId::Protocol
        | ObjectId::Mchannel(_) => None,
    }
}

/// The places in the pool that an object lets its endpoint use, except rings.
pub(super) fn areas_of(object: &Object) -> Vec<Area> {
    let with = |area: Area, ram: Option<Area>| ram.into_iter().chain([area]).collect();
    match object {
        Object::Nic(nic) => vec![nic.rx_area],
        Object::Port(port) => with(port.tx_area, port.ram_area),
        Object::Registration(it) => with(it.tx_area, it.ram_area),
        Object::Volume(volume) => with(volume.data_area, volume.ram_area),
        Object::Disk(disk) => with(disk.data_area, disk.ram_area),
        Object::Channel(it) => {
            let line = cxl_pool::LineCount::new(1);
            [it.outgoing, it.incoming].map(|ring| Area::new(ring.start, line)).to_vec()
        }
        Object::Fabric(fabric) => vec![fabric.sums, fabric.vms],
        Object::Table(_) | Object::Mchannel(_) | Object::Protocol(_) => Vec::new(),
    }
}
