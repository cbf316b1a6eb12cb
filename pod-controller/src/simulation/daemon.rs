//! A daemon as the controller knows it: it joins, has what it is told to have, and looks at its fence.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cxl_pool::{Area, EndpointId};
use pod_protocol::commands::Command as Order;
use pod_protocol::ids::{ChannelId, LeaseGeneration, LeaseId, PlaceId, PlaceNumber, RegionId};
use pod_protocol::objects::{Object, ObjectId, RegistrationState};

use super::happening::Grant;

/// An order on its way, with the numbers that its areas had when it was given.
#[derive(Clone, Debug)]
pub(crate) struct Mail {
    pub(crate) connection: u64,
    pub(crate) ticket: u64,
    pub(crate) order: Order,
    pub(crate) regions: Vec<(RegionId, Area)>,
}

/// One life of a daemon after the other, at one place.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own that may go wrong by itself")]
pub(crate) struct Daemon {
    pub(crate) id: EndpointId,
    /// Zero: nobody has ever been there.
    pub(crate) incarnation: u64,
    pub(crate) alive: bool,
    /// It left in order: its slot is empty.
    pub(crate) left: bool,
    /// Stopped by a signal until it is told to go on.
    pub(crate) frozen: bool,
    /// How fast its clock runs, in thousandths of true time.
    pub(crate) clock_permille: u64,
    /// Which conversation with a controller it is in; none was begun with zero.
    pub(crate) connection: u64,
    /// The highest term of a controller that it has listened to.
    term: u64,
    /// It does not mind terms: broken on purpose.
    pub(crate) obeys_anybody: bool,
    /// What it obeyed last: of which term, and decided with which index.
    pub(crate) obeyed: (u64, u64),
    pub(crate) joined: bool,
    /// Since when it has had the controller's ear without a pause.
    pub(crate) joined_us: u64,
    pub(crate) inbox: VecDeque<Mail>,
    pub(crate) objects: BTreeMap<ObjectId, Object>,
    confirmed: BTreeSet<ObjectId>,
    /// The fence generation that came with its grant.
    pub(crate) granted_fence: u64,
    /// Whether it was granted anything in this life.
    pub(crate) granted: bool,
    /// When it looked at its fence last.
    pub(crate) looked_us: u64,
    /// What its VMMs do: connected, running.
    pub(crate) attached: BTreeMap<LeaseId, (bool, bool)>,
}

impl Daemon {
    pub(crate) fn new(id: EndpointId) -> Self {
        Self {
            id,
            incarnation: 0,
            alive: false,
            left: true,
            frozen: false,
            clock_permille: 1000,
            connection: 0,
            term: 0,
            obeys_anybody: false,
            obeyed: (0, 0),
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

    /// Whether its fence is newer than its grant. Whoever was granted nothing has nothing to lose.
    pub(crate) fn is_fenced(&self, fences: &Fences) -> bool {
        self.granted && fences.get(&self.incarnation).is_some_and(|fence| *fence > self.granted_fence)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.alive && !self.frozen
    }

    pub(crate) fn start(&mut self, incarnation: u64, clock_permille: u64) {
        let obeys_anybody = self.obeys_anybody;
        *self = Self {
            incarnation,
            clock_permille,
            obeys_anybody,
            alive: true,
            left: false,
            ..Self::new(self.id)
        };
    }

    pub(crate) fn die(&mut self) {
        self.alive = false;
        self.frozen = false;
        self.joined = false;
        self.objects.clear();
        self.inbox.clear();
        self.attached.clear();
    }

    /// A controller is about to say anew what it wants. Says whether it is listened to: an older one than the last may not know
    /// yet that it was deposed.
    pub(crate) fn begin(&mut self, grant: Grant) -> bool {
        if grant.term < self.term && !self.obeys_anybody {
            return false;
        }
        self.term = grant.term;
        self.connection = grant.connection;
        self.joined = false;
        self.confirmed.clear();
        true
    }

    /// Does as it is told. The areas are those that it is given by that.
    pub(crate) fn obey(&mut self, order: &Order) -> Result<(), String> {
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
    pub(crate) fn writes(&self, lease: LeaseId) -> Vec<(ChannelId, LeaseGeneration)> {
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
    pub(crate) fn means(&self, lease: LeaseId) -> Vec<(Called, String)> {
        let Some(Object::Disk(disk)) = self.objects.get(&ObjectId::Disk(lease)) else { return Vec::new() };
        let places = disk.replicas.iter().chain(&disk.beside);
        places.map(|it| ((it.route.channel, it.place, it.route.generation), it.ssd.clone())).collect()
    }

    /// The places of a volume as this backend knows them, with the SSDs where they are.
    pub(crate) fn serves(&self, lease: LeaseId) -> Vec<(Called, String)> {
        let of_lease = |object: &Object| match object {
            Object::Volume(it) if it.lease == lease => {
                let ssd = format!("h{}/{}", self.id.host.get(), it.ssd);
                Some(((it.channel, it.place, it.generation), ssd))
            }
            _ => None,
        };
        self.objects.values().filter_map(of_lease).collect()
    }

    /// What it accepts of a lease: over which channel, of which generation, and whether as the only active NIC.
    pub(crate) fn accepts(&self, lease: LeaseId) -> Vec<(ChannelId, LeaseGeneration, bool)> {
        let of_lease = |object: &Object| match object {
            Object::Registration(it) if it.lease == lease && it.state != RegistrationState::Standby => {
                // With others it is active at the same time.
                let alone = it.state == RegistrationState::Active && !it.has_other_rails;
                Some((it.channel, it.generation, alone))
            }
            Object::Volume(it) if it.lease == lease => Some((it.channel, it.generation, false)),
            _ => None,
        };
        self.objects.values().filter_map(of_lease).collect()
    }

    /// The generation of a channel as it knows it.
    pub(crate) fn channel(&self, id: ChannelId) -> Option<u32> {
        match self.objects.get(&ObjectId::Channel(id)) {
            Some(Object::Channel(channel)) => Some(channel.generation.get()),
            _ => None,
        }
    }
}

/// The newest fence generation of each life that was fenced.
pub(crate) type Fences = BTreeMap<u64, u64>;

/// The newest of all.
pub(crate) fn newest(fences: &Fences) -> u64 {
    fences.values().max().copied().unwrap_or(0)
}

/// What requests say of which place they are for.
pub(crate) type Called = (ChannelId, PlaceNumber, LeaseGeneration);

/// The lease that an object is about.
pub(crate) fn lease_of(id: &ObjectId) -> Option<LeaseId> {
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
pub(crate) fn areas_of(object: &Object) -> Vec<Area> {
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
