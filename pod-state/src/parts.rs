//! What an endpoint should have, by parts that can be looked up each by itself.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, Role};
use pod_protocol::ids::{ChannelId, LeaseId, PlaceId};
use pod_protocol::objects::{Object, ObjectId};

use super::{DeviceId, State};

/// What an endpoint should have, in the order in which it can be made.
pub type Objects = BTreeMap<ObjectId, Object>;

/// What an endpoint has of one thing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Of a channel.
    Channel(ChannelId),
    /// Of a device of its host.
    Device(String),
    /// Of a lease: as its frontend, or as one of its backends.
    Lease(LeaseId),
    /// Of the fabric.
    Fabric,
}

/// Some of what an endpoint has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parts {
    /// All of it.
    All,
    /// No more than this.
    These(BTreeSet<Part>),
}

impl Default for Parts {
    fn default() -> Self {
        Self::These(BTreeSet::new())
    }
}

impl Parts {
    /// This too.
    pub fn add(&mut self, part: Part) {
        if let Self::These(these) = self {
            these.insert(part);
        }
    }

    /// Those too.
    pub fn join(&mut self, others: &Self) {
        match (&mut *self, others) {
            (Self::These(these), Self::These(others)) => these.extend(others.iter().cloned()),
            (_, Self::All) => *self = Self::All,
            (Self::All, _) => {}
        }
    }
}

impl Part {
    /// The lease that it is of.
    pub const fn lease(&self) -> Option<LeaseId> {
        match self {
            Self::Lease(id) => Some(*id),
            _ => None,
        }
    }

    /// Which of these objects are of it, at an endpoint with this role.
    fn among(&self, objects: &Objects, role: Role) -> Vec<ObjectId> {
        let mut ids = match self {
            Self::Channel(id) => vec![ObjectId::Channel(*id)],
            Self::Device(name) => match role {
                Role::NetBackend => vec![ObjectId::Nic(name.clone())],
                Role::BlkBackend => vec![ObjectId::Table(name.clone())],
                _ => Vec::new(),
            },
            Self::Lease(lease) => match role {
                Role::NetFrontend => vec![ObjectId::Port(*lease), ObjectId::Mchannel(*lease)],
                Role::BlkFrontend => vec![ObjectId::Disk(*lease), ObjectId::Mchannel(*lease)],
                Role::NetBackend => {
                    let first = ObjectId::Registration { lease: *lease, nic: String::new() };
                    let all = objects.range(first..).map(|(id, _)| id);
                    let is_its = |id: &&ObjectId| matches!(id, ObjectId::Registration { lease: it, .. } if it == lease);
                    return all.take_while(is_its).cloned().collect();
                }
                Role::BlkBackend => {
                    let places = PlaceId::all(*lease);
                    let places = ObjectId::Volume(*places.start())..=ObjectId::Volume(*places.end());
                    return objects.range(places).map(|(id, _)| id.clone()).collect();
                }
                Role::Agent => Vec::new(),
            },
            Self::Fabric => vec![ObjectId::Fabric],
        };
        ids.retain(|id| objects.contains_key(id));
        ids
    }
}

impl State {
    /// Everything that an endpoint should have now.
    pub fn desired(&self, id: EndpointId) -> Objects {
        let mut objects = Objects::new();
        self.add_protocol(&mut objects);
        for part in self.parts_of(id) {
            objects.extend(self.part(id, &part).into_iter().map(|object| (object.id(), object)));
        }
        objects
    }

    /// Makes a part of what an endpoint should have what it should be now. Returns what is another one than before.
    pub fn renew(&self, id: EndpointId, part: &Part, objects: &mut Objects) -> Vec<ObjectId> {
        let now = self.part(id, part);
        let mut others = part.among(objects, id.role);
        others.retain(|old| !now.iter().any(|object| object.id() == *old));
        for gone in &others {
            objects.remove(gone);
        }
        for object in now {
            let id = object.id();
            if objects.get(&id) != Some(&object) {
                objects.insert(id.clone(), object);
                others.push(id);
            }
        }
        others
    }

    /// Of what an endpoint may have something.
    fn parts_of(&self, id: EndpointId) -> BTreeSet<Part> {
        let mut parts = BTreeSet::new();
        parts.extend(self.channels_at(id).into_iter().map(|channel| Part::Channel(channel.id)));
        let owned = self.devices_at(id.host).filter(|(_, device)| device.role() == id.role);
        let owned: Vec<&DeviceId> = owned.map(|(device, _)| device).collect();
        parts.extend(owned.iter().map(|device| Part::Device(device.name.to_string())));
        let leases = match id.role {
            Role::NetFrontend | Role::BlkFrontend => self.leases_served_by(id),
            Role::NetBackend => owned.iter().flat_map(|nic| self.leases_near_nic(nic)).collect(),
            Role::BlkBackend => self.leases_on_ssds_of(id),
            Role::Agent => Vec::new(),
        };
        parts.extend(leases.into_iter().map(|lease| Part::Lease(lease.id)));
        parts.insert(Part::Fabric);
        parts
    }

    /// What an endpoint should have of this now.
    fn part(&self, id: EndpointId, part: &Part) -> Vec<Object> {
        match part {
            Part::Channel(channel) => {
                let channel = self.channels.get(channel);
                let object = channel.and_then(|channel| self.channel_at(channel, id));
                object.map(Object::Channel).into_iter().collect()
            }
            Part::Device(name) => {
                let device = DeviceId { host: id.host, name: name.as_str().into() };
                match id.role {
                    Role::NetBackend => self.nic_object(&device).map(Object::Nic).into_iter().collect(),
                    Role::BlkBackend => self.table_object(&device).map(Object::Table).into_iter().collect(),
                    _ => Vec::new(),
                }
            }
            Part::Lease(lease) => self.leased(id, *lease),
            Part::Fabric => self.fabric_object(id).map(Object::Fabric).into_iter().collect(),
        }
    }

    /// What an endpoint should have of a lease.
    fn leased(&self, id: EndpointId, lease: LeaseId) -> Vec<Object> {
        let Some(lease) = self.leases.get(&lease) else { return Vec::new() };
        match id.role {
            Role::NetFrontend | Role::BlkFrontend if self.frontends_of(lease).any(|it| it == id) => {
                let port = self.port(lease, id).map(Object::Port);
                let disk = self.disk(lease, id).map(Object::Disk);
                // Who shares no path is not told of shares.
                let mchannel = self.board(id).and_then(|_| self.mchannel_object(lease));
                [port, disk, mchannel].into_iter().flatten().collect()
            }
            Role::NetBackend => {
                let rails = lease.active_nic().map_or_else(Vec::new, |active| self.other_rails(active));
                let nics: BTreeSet<&DeviceId> = lease.nics().chain(&rails).collect();
                let nics = nics.into_iter().filter(|nic| nic.host == id.host);
                nics.filter_map(|nic| self.registration(lease, nic)).map(Object::Registration).collect()
            }
            Role::BlkBackend => self.served_volumes(lease, id).into_iter().map(Object::Volume).collect(),
            Role::NetFrontend | Role::BlkFrontend | Role::Agent => Vec::new(),
        }
    }
}
