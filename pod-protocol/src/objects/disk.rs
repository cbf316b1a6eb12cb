//! What a frontend of block devices offers.

use cxl_pool::Area;
use serde::{Deserialize, Serialize};

use super::{ReplicaObject, Route};
use crate::ids::{InstanceId, LeaseId, VolumeId};

/// Block frontend: offer a virtio-blk device on a vhost-user socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each says something of its own, as it stands in the message"
)]
pub struct DiskObject {
    /// The instance's lease.
    pub lease: LeaseId,
    /// Whose it is.
    pub instance: InstanceId,
    /// Its name, for logs.
    pub instance_name: String,
    /// The device's name within the instance: its volume's name.
    pub device: String,
    /// The name of the socket's file below the run directory's `sockets`.
    pub socket: String,
    /// The VMM listens there and the frontend connects, instead of the other way round.
    #[serde(default)]
    pub vmm_listens: bool,
    /// What it shows.
    pub volume: VolumeId,
    /// What the guest reads as the disk's id; at most 20 bytes reach it.
    pub serial: String,
    /// The disk's size.
    pub size_bytes: u64,
    /// The disk's logical block.
    pub block_bytes: u32,
    /// What a discard has to be a multiple of, with its offset, to have any effect, where that is known. It may change in use. Since 1.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discard_granularity_bytes: Option<u32>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Request queues.
    pub queues: u16,
    /// Where the data of requests lies.
    pub data_area: Area,
    /// The part of the pool that is leased to the instance as its memory, if it has its memory there.
    #[serde(default)]
    pub ram_area: Option<Area>,
    /// How the owner of the SSD is reached.
    pub route: Route,
    /// Of a mirrored volume: its replicas, in the order in which reads prefer them; `route` is then the first one's. Of any other volume: none.
    #[serde(default)]
    pub replicas: Vec<ReplicaObject>,
    /// Of a striped volume: so many bytes lie in one of the `replicas`, then as many in the next, by their numbers; each
    /// holds a share of the volume, and none a copy of another. In multiples of 4096.
    #[serde(default)]
    pub stripe_bytes: Option<u64>,
    /// Of a striped volume: a place beside the one of the `replicas` that has the same number. While that column moves there, it
    /// gets all that is written and what was there before, and its frontend says when it has everything; then both change
    /// places. One that is leaving gets nothing more, and its frontend says when it has let go of it. Since 1.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<ReplicaObject>,
    /// Of a volume in one place: the number of that among the places that it has had. Since 1.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
    /// Of a mirrored volume: grows whenever the set of its replicas in sync changes.
    #[serde(default)]
    pub epoch: u64,
    /// The SSD is gone for good: answer I/O errors instead of keeping requests for a backend that may come back.
    #[serde(default)]
    pub failed: bool,
    /// What the guest's driver chose before, here or on another host: that a write is on the medium when it is answered.
    /// Of meaning when the device is made and when it ceases to be incoming; a driver may choose anew at any time.
    #[serde(default)]
    pub write_through: bool,
    /// Another host's frontend still serves the instance, which is about to move here: negotiate with the VMM, and leave
    /// the queues alone until this is no longer so.
    #[serde(default)]
    pub incoming: bool,
    /// Something that the guest wrote where it was before is lost, or may be, and it has yet to hear of that. Of meaning when the disk
    /// ceases to be incoming.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub untold: bool,
}
