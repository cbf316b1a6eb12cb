//! What an endpoint tells the controller.

use cxl_pool::Area;
use serde::{Deserialize, Serialize};

use crate::ids::{LeaseId, MacAddress, VolumeId};
use crate::telemetry::Telemetry;
use crate::volume_table::VolumeTable;

/// From an endpoint to the controller. [`Report::Join`] is a request, which the controller may refuse; the others are
/// notifications, sent at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum Report {
    /// The first word after a grant.
    Join(Join),
    /// Counters, every 100 ms.
    Telemetry(Telemetry),
    /// A NIC's link went up or down.
    Link {
        /// The NIC's name.
        device: String,
        /// Whether it can carry traffic.
        up: bool,
        /// How that was seen.
        reason: String,
    },
    /// A device does not work any more.
    DeviceFailed {
        /// Its name.
        device: String,
        /// What happened.
        reason: String,
    },
    /// A device that had failed works again.
    DeviceBack {
        /// What it is now.
        device: DeviceReport,
    },
    /// Nothing is left of the data of a deleted volume.
    VolumeWiped {
        /// The SSD's name.
        device: String,
        /// Which volume.
        volume: VolumeId,
    },
    /// A replica of a mirrored volume missed something that others have. Its frontend acknowledges nothing until the
    /// controller does not count on that replica any more; it says this until then. Of a striped volume: a column cannot move
    /// to the place beside it.
    ReplicaFailed {
        /// The lease on the volume.
        lease: LeaseId,
        /// The replica's number.
        replica: u32,
        /// The epoch that the frontend knows.
        epoch: u64,
        /// What happened.
        reason: String,
    },
    /// A stale replica has everything again, or the place beside a column. Its frontend acknowledges nothing without it any more.
    ReplicaSynced {
        /// The lease on the volume.
        lease: LeaseId,
        /// The replica's number.
        replica: u32,
        /// The epoch in which that holds; in a later one it does not.
        epoch: u64,
    },
    /// A replica is to go. While it is in sync: the frontend knows that, and so does the table on the replica's own SSD. Once it is
    /// not: the frontend has let go of it, and nothing of it is in flight there. The same of a place beside a column.
    ReplicaLeft {
        /// The lease on the volume.
        lease: LeaseId,
        /// The replica's number.
        replica: u32,
        /// The epoch that the frontend knows.
        epoch: u64,
    },
    /// A VMM connected to the socket of a leased device, or went away.
    Attachment {
        /// Whose device it is.
        lease: LeaseId,
        /// Whether a VMM uses it now.
        connected: bool,
        /// Whether queues of it run: they were started, and not all of them have been released since. Once released,
        /// nothing of theirs is in flight.
        #[serde(default)]
        running: bool,
        /// The guest's driver chose that a write is on the medium when it is answered.
        #[serde(default)]
        write_through: bool,
        /// Something that the guest wrote is lost, or may be, and no queue runs any more by which it would hear of that. It is told where it
        /// goes on.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        untold: bool,
    },
}

/// Who an endpoint is and what it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The host's name in its configuration.
    pub host_name: String,
    /// Program and version, such as `vhost-net-cxl 0.1.0`.
    pub software: String,
    /// Of the daemon.
    pub pid: u32,
    /// The devices that this endpoint owns. Frontends own none.
    #[serde(default)]
    pub devices: Vec<DeviceReport>,
    /// Parts of the pool that predecessors of this endpoint met and that cannot be read.
    #[serde(default)]
    pub memory_failures: Vec<Area>,
    /// For how long it may act without having looked at its fence, in ms, within [`FENCE_MS`](crate::config::FENCE_MS): nothing that it held is given
    /// on before that is over. [`Endpoint`](crate::endpoint::Endpoint) says it for all daemons; those of versions before this one do not,
    /// and keep what is set for the whole pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence_ms: Option<u64>,
}

/// A device that an endpoint owns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum DeviceReport {
    /// A NIC.
    Nic {
        /// Its name in the host's configuration.
        name: String,
        /// Which driver runs it.
        driver: String,
        /// Its own address, if it has one.
        #[serde(default)]
        mac: Option<MacAddress>,
        /// Whether it can carry traffic.
        up: bool,
        /// Its speed.
        speed_mbps: u64,
        /// The largest packet without the Ethernet header.
        mtu: u16,
        /// The virtio-net offload bits it can do.
        features: u64,
        /// Whether it is kept free for failover.
        backup: bool,
        /// The link aggregation group at the switch that its port belongs to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lag: Option<String>,
    },
    /// An SSD.
    Ssd {
        /// Its name in the host's configuration.
        name: String,
        /// Which driver runs it.
        driver: String,
        /// Its size.
        size_bytes: u64,
        /// Its logical block.
        block_bytes: u32,
        /// What a discard has to be a multiple of, with its offset, to have any effect, if the device says so. Since 1.1.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        discard_granularity_bytes: Option<u32>,
        /// The volumes on it, if it can keep a table of them.
        #[serde(default)]
        table: Option<VolumeTable>,
        /// What volumes must leave free at its beginning.
        #[serde(default)]
        reserved_bytes: u64,
        /// A number that stands on it beside that table, and on no other SSD. Since 1.1.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        identity: Option<u64>,
        /// How many requests per second it can do, if its operator says so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        iops: Option<u64>,
        /// How many bytes per second it can do, if its operator says so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes_per_second: Option<u64>,
    },
}

impl DeviceReport {
    /// The device's name in the host's configuration.
    pub fn name(&self) -> &str {
        match self {
            Self::Nic { name, .. } | Self::Ssd { name, .. } => name,
        }
    }

    /// Whether it can be used: a NIC without a link cannot.
    pub fn works(&self) -> bool {
        match self {
            Self::Nic { up, .. } => *up,
            Self::Ssd { .. } => true,
        }
    }
}
