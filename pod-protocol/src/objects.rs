//! What the controller wants an endpoint to have. Level-triggered: each object says the whole of what should be, so
//! applying it twice is the same as applying it once, and one equal to what is there disturbs nothing.

mod disk;
mod fabric;
mod priority;
mod protocol;
mod replica;

use std::fmt;
use std::net::IpAddr;

use cxl_channel::RingPlacement;
use cxl_pool::{Area, ByteOffset, EndpointId, Generation};
use serde::{Deserialize, Serialize};

use crate::ids::{
    ChannelId, InstanceId, LeaseGeneration, LeaseId, MacAddress, PlaceId, PlaceNumber, VolumeId,
};
use crate::volume_table::VolumeTable;

pub use self::disk::DiskObject;
pub use self::fabric::{ElementObject, FabricObject, MchannelObject, PeerObject, Signal, TenantObject};
pub use self::priority::{NoPriority, Priority};
pub use self::protocol::ProtocolObject;
pub use self::replica::ReplicaObject;

/// Anything the controller gives an endpoint to hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Object {
    /// Every endpoint: the version that the whole pod speaks.
    Protocol(ProtocolObject),
    /// A pair of rings to another endpoint.
    Channel(ChannelObject),
    /// Net backend: a NIC to start.
    Nic(NicObject),
    /// Net frontend: a virtio-net device to offer.
    Port(PortObject),
    /// Net backend: an instance that uses, or may use, a NIC.
    Registration(RegistrationObject),
    /// Block backend: what to keep on an SSD about its volumes.
    Table(TableObject),
    /// Block backend: a range of an SSD to serve.
    Volume(VolumeObject),
    /// Block frontend: a virtio-blk device to offer.
    Disk(DiskObject),
    /// Frontends: how the fabric is shared.
    Fabric(FabricObject),
    /// Frontends: a device whose VM has a share of the fabric.
    Mchannel(MchannelObject),
}

impl Object {
    /// The name under which a later [`Object`] replaces this one.
    pub fn id(&self) -> ObjectId {
        match self {
            Self::Protocol(_) => ObjectId::Protocol,
            Self::Channel(channel) => ObjectId::Channel(channel.id),
            Self::Nic(nic) => ObjectId::Nic(nic.nic.clone()),
            Self::Port(port) => ObjectId::Port(port.lease),
            Self::Registration(it) => ObjectId::Registration { lease: it.lease, nic: it.nic.clone() },
            Self::Table(table) => ObjectId::Table(table.ssd.clone()),
            Self::Volume(volume) => ObjectId::Volume(volume.id()),
            Self::Disk(disk) => ObjectId::Disk(disk.lease),
            Self::Fabric(_) => ObjectId::Fabric,
            Self::Mchannel(mchannel) => ObjectId::Mchannel(mchannel.lease),
        }
    }
}

/// The name of an [`Object`] at its endpoint. Ordered so that what others stand on comes first: channels and NICs before the leases that use them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectId {
    /// Of the [`ProtocolObject`], of which there is one.
    Protocol,
    /// Of a [`ChannelObject`].
    Channel(ChannelId),
    /// Of a [`NicObject`]: the name of the NIC.
    Nic(String),
    /// Of a [`PortObject`].
    Port(LeaseId),
    /// Of a [`RegistrationObject`]: one lease may be registered with several NICs of a backend.
    Registration {
        /// The instance's lease.
        lease: LeaseId,
        /// The NIC.
        nic: String,
    },
    /// Of a [`TableObject`]: the name of the SSD.
    Table(String),
    /// Of a [`VolumeObject`]: a lease may have two places with a backend.
    Volume(PlaceId),
    /// Of a [`DiskObject`].
    Disk(LeaseId),
    /// Of the [`FabricObject`], of which there is one.
    Fabric,
    /// Of a [`MchannelObject`].
    Mchannel(LeaseId),
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Protocol => f.write_str("the version of the pod"),
            Self::Channel(id) => write!(f, "{id}"),
            Self::Nic(nic) => write!(f, "nic {nic}"),
            Self::Port(lease) => write!(f, "port of {lease}"),
            Self::Registration { lease, nic } => write!(f, "registration of {lease} with nic {nic}"),
            Self::Table(ssd) => write!(f, "table of volumes on {ssd}"),
            Self::Volume(place) => write!(f, "volume of {place}"),
            Self::Disk(lease) => write!(f, "disk of {lease}"),
            Self::Fabric => write!(f, "the fabric"),
            Self::Mchannel(lease) => write!(f, "mchannel of {lease}"),
        }
    }
}

/// Which engine a channel belongs to; it decides the size of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// 16-byte messages.
    Net,
    /// 64-byte messages.
    Blk,
}

/// A pair of rings between this endpoint and a peer. The same id with a newer generation (and new places) says that one
/// of the two was restarted: begin both rings again and resubmit what is unacknowledged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelObject {
    /// Its name, the same at both ends.
    pub id: ChannelId,
    /// Which messages it carries.
    pub engine: Engine,
    /// Who is at the other end.
    pub peer: EndpointId,
    /// Of both rings.
    pub generation: Generation,
    /// The ring in which we send.
    pub outgoing: RingPlacement,
    /// The ring from which we receive.
    pub incoming: RingPlacement,
    /// Net frontend: where the NICs of the backend receive, and so where the frames lie of which it speaks. What lies anywhere
    /// else is not looked at. It may change while the rings stay. Without it frames may lie anywhere in the pool. Since 1.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receives: Option<Vec<Area>>,
}

impl ChannelObject {
    /// Whether the other one is of the same rings, in the same generation: what goes over them is not disturbed then.
    pub fn has_rings_of(&self, other: &Self) -> bool {
        let rings = |it: &Self| (it.id, it.engine, it.peer, it.generation, it.outgoing, it.incoming);
        rings(self) == rings(other)
    }
}

/// How a frontend reaches the owner of a leased device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Over which channel.
    pub channel: ChannelId,
    /// With which generation of the lease in every message.
    pub generation: LeaseGeneration,
}

/// One of several NICs over which a lease sends and receives at the same time: the members of a link aggregation group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RailObject {
    /// How its backend is reached.
    pub route: Route,
    /// Whether it carries anything now.
    pub state: RailState,
}

/// Whether a rail carries anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RailState {
    /// It does.
    Up,
    /// It is not to be used; its backend still answers what it was sent.
    Down,
    /// Nobody answers there any more: what it was sent and has not acknowledged goes over another one.
    Gone,
}

/// The most registrations of one NIC: instances that use it, or may have to.
pub const REGISTRATIONS_MAX: usize = 4096;

/// The most NICs that a lease uses at the same time.
pub const RAILS_MAX: usize = 4;

/// Net backend: start this NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicObject {
    /// Its name in the host's configuration.
    pub nic: String,
    /// Where it receives.
    pub rx_area: Area,
}

/// How much an instance's NIC may carry in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RateLimit {
    /// Bytes of frames per second at most.
    pub bytes_per_second: Option<u64>,
    /// Packets per second at most, as on a wire: a large packet that is cut later counts as what it is cut into.
    pub packets_per_second: Option<u64>,
    /// Of how many milliseconds the share may be saved up and used at once.
    pub burst_ms: u32,
    /// Bytes of frames per second that go before those of others where a NIC, or the way to it, is the bottleneck.
    pub minimum_bytes_per_second: Option<u64>,
}

impl Default for RateLimit {
    fn default() -> Self {
        Self {
            bytes_per_second: None,
            packets_per_second: None,
            burst_ms: Self::BURST_MS,
            minimum_bytes_per_second: None,
        }
    }
}

impl RateLimit {
    /// What may be saved up unless it is said.
    pub const BURST_MS: u32 = 100;
}

/// What an instance may do with its NIC. It can change while the NIC is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NicPolicy {
    /// What it may send. Beyond that it has to wait.
    pub transmit: RateLimit,
    /// What it may receive. What comes beyond that is dropped.
    pub receive: RateLimit,
    /// The only network addresses that it may use, if there are any here.
    pub addresses: Vec<IpAddr>,
    /// The VLAN that it is in, 1 to 4094: on the wire its frames bear that tag, and it sees no other ones. Without it tags are
    /// carried and not looked at.
    pub vlan: Option<u16>,
}

/// Net frontend: offer a virtio-net device on a vhost-user socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortObject {
    /// The instance's lease.
    pub lease: LeaseId,
    /// Whose it is.
    pub instance: InstanceId,
    /// Its name, for logs.
    pub instance_name: String,
    /// The device's name within the instance, such as `net0`.
    pub device: String,
    /// The name of the socket's file below the run directory's `sockets`.
    pub socket: String,
    /// The VMM listens there and the frontend connects, instead of the other way round.
    #[serde(default)]
    pub vmm_listens: bool,
    /// The MAC address of the guest's NIC.
    pub mac: MacAddress,
    /// The largest packet without the Ethernet header.
    pub mtu: u16,
    /// Pairs of receive and transmit queues.
    pub queue_pairs: u16,
    /// The virtio-net offload bits that its guest is offered: those of the NIC that it had first.
    pub features: u64,
    /// Where frames to be sent lie.
    pub tx_area: Area,
    /// The NIC in use.
    pub active: Route,
    /// Where several are in use at the same time: all of them, the active one too, in an order that stays. Otherwise none.
    #[serde(default)]
    pub rails: Vec<RailObject>,
    /// The backup NIC.
    #[serde(default)]
    pub standby: Option<Route>,
    /// What it may do.
    #[serde(default)]
    pub policy: NicPolicy,
    /// The NIC that was in use before, and works: frames still come from it for a while, and what was sent through it
    /// is waited for before anything goes through the one in use now.
    #[serde(default)]
    pub draining: Option<Route>,
    /// Another host's frontend still serves the instance, which is about to move here: negotiate with the VMM, and leave
    /// the queues alone until this is no longer so.
    #[serde(default)]
    pub incoming: bool,
    /// The part of the pool that is leased to the guest as its memory: what it sends from there is not copied.
    #[serde(default)]
    pub ram_area: Option<Area>,
}

/// What an instance may do with a NIC that it is registered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegistrationState {
    /// Nothing yet: the NIC is its backup.
    Standby,
    /// It sends and receives.
    Active,
    /// It receives what is sent to it alone, and finishes sending what it had begun with the generation it had; what comes next goes elsewhere.
    Draining,
}

/// Net backend: an instance that uses a NIC, or may have to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistrationObject {
    /// The instance's lease.
    pub lease: LeaseId,
    /// The NIC.
    pub nic: String,
    /// Whose lease it is.
    pub instance: InstanceId,
    /// Messages with another generation are refused.
    pub generation: LeaseGeneration,
    /// The instance sends from this address only.
    pub mac: MacAddress,
    /// The largest packet without the Ethernet header.
    pub mtu: u16,
    /// The virtio-net offload bits agreed on.
    pub features: u64,
    /// Over which its frontend is reached.
    pub channel: ChannelId,
    /// Where the frames that it sends must lie.
    pub tx_area: Area,
    /// What it may do now.
    pub state: RegistrationState,
    /// The most receive buffers it may hold at a time.
    pub rx_quota_buffers: u32,
    /// What it may do.
    #[serde(default)]
    pub policy: NicPolicy,
    /// The part of the pool that is leased to the guest as its memory: what it sends may lie there as well.
    #[serde(default)]
    pub ram_area: Option<Area>,
    /// Other NICs are in use at the same time: what this one cannot send now is given back at once, for another one.
    #[serde(default)]
    pub has_other_rails: bool,
    /// How much it may send next to others where the NIC is the bottleneck, beyond what is promised.
    #[serde(default, skip_serializing_if = "Priority::is_default")]
    pub priority: Priority,
}

/// Block backend: what to keep on an SSD about its volumes. Deleted ones are wiped, which is reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableObject {
    /// The SSD's name in the host's configuration.
    pub ssd: String,
    /// What to keep.
    pub table: VolumeTable,
}

/// How much of its SSD a volume may use, and how much it is sure to get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Qos {
    /// Requests per second at most, of any kind.
    pub iops: Option<u64>,
    /// Bytes per second at most, read and written together.
    pub bytes_per_second: Option<u64>,
    /// Of how many milliseconds the share may be saved up and used at once.
    pub burst_ms: u32,
    /// Requests per second for which it comes before others, where its SSD is the bottleneck.
    pub minimum_iops: Option<u64>,
    /// Bytes per second, read and written together, for which it comes before others.
    pub minimum_bytes_per_second: Option<u64>,
}

impl Qos {
    /// What may be saved up unless it is said.
    pub const BURST_MS: u32 = 100;
}

impl Default for Qos {
    fn default() -> Self {
        Self {
            iops: None,
            bytes_per_second: None,
            burst_ms: Self::BURST_MS,
            minimum_iops: None,
            minimum_bytes_per_second: None,
        }
    }
}

/// Block backend: serve a range of an SSD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeObject {
    /// The instance's lease.
    pub lease: LeaseId,
    /// Which of the lease's places with this backend: requests say for which they are. Since 1.1.
    #[serde(default, skip_serializing_if = "PlaceNumber::is_first")]
    pub place: PlaceNumber,
    /// The volume.
    pub volume: VolumeId,
    /// The SSD's name in the host's configuration.
    pub ssd: String,
    /// Where on the SSD the volume begins.
    pub start_bytes: u64,
    /// How long it is.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Messages with another generation are refused.
    pub generation: LeaseGeneration,
    /// Over which its frontend is reached.
    pub channel: ChannelId,
    /// Where the data of its requests must lie.
    pub data_area: Area,
    /// Or there: the part of the pool that is the instance's memory.
    #[serde(default)]
    pub ram_area: Option<Area>,
    /// Whose lease it is.
    pub instance: InstanceId,
    /// How much of the SSD it may use.
    #[serde(default)]
    pub qos: Qos,
    /// How much of the SSD it gets next to others where that is the bottleneck, beyond what it is sure of.
    #[serde(default, skip_serializing_if = "Priority::is_default")]
    pub priority: Priority,
}

impl VolumeObject {
    /// What requests call it.
    pub const fn id(&self) -> PlaceId {
        PlaceId { lease: self.lease, place: self.place }
    }

    /// Whether the data of a request may lie there.
    pub fn may_hold(&self, start: ByteOffset, bytes: u64) -> bool {
        self.data_area.contains(start, bytes)
            || self.ram_area.is_some_and(|ram_area| ram_area.contains(start, bytes))
    }
}
