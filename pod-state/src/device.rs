use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::ids::{MacAddress, RegionId};
use pod_protocol::volume_table::VolumeEntry;
use serde::{Deserialize, Serialize};
use smol_str::SmolStr;

use super::Labels;

/// A device: its host, and its name there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceId {
    /// The host that owns it.
    pub host: HostId,
    /// Its name in the host's configuration. Within the row where it is short, as most are: devices are compared again and again.
    pub name: SmolStr,
}

/// A NIC or an SSD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Which driver runs it.
    pub driver: String,
    /// NIC or SSD.
    pub kind: Kind,
    /// What its endpoint said of it last.
    pub health: Health,
    /// A NIC whose link flapped: why nothing moves to it for a while.
    #[serde(default)]
    pub held: Option<String>,
    /// It is to be empty.
    #[serde(default)]
    pub drained: bool,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A NIC.
    Nic {
        /// Its own address.
        mac: Option<MacAddress>,
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
        /// Where it receives.
        rx: Option<Hold>,
    },
    /// An SSD.
    Ssd {
        /// Its size.
        size_bytes: u64,
        /// Its logical block.
        block_bytes: u32,
        /// What a discard has to be a multiple of to have any effect; unknown if not said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        discard_granularity_bytes: Option<u32>,
        /// How many requests per second it can do; unknown if not said.
        #[serde(default)]
        iops: Option<u64>,
        /// How many bytes per second it can do; unknown if not said.
        #[serde(default)]
        bytes_per_second: Option<u64>,
        /// What volumes must leave free at its beginning.
        #[serde(default)]
        reserved_bytes: u64,
        /// Whether it keeps a table of its volumes, and so can be wiped.
        #[serde(default)]
        keeps_table: bool,
        /// Volumes that were found on it and that are nobody's: until they are adopted it is left alone.
        #[serde(default)]
        strangers: Vec<VolumeEntry>,
        /// The number that stands on the one that volumes have places on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        identity: Option<u64>,
        /// Its host has another one under its name, which is left alone.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        replaced: bool,
    },
}

/// A region that was given to one life of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The region.
    pub region: RegionId,
    /// The life of the endpoint that writes it. The next one gets another region.
    pub incarnation: u64,
}

/// What an endpoint said of a device last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// It works.
    Up,
    /// A NIC without a link.
    Down(String),
    /// It failed; its endpoint tries to open it again, or is restarted.
    Failed(String),
    /// Its endpoint has it no more.
    Absent,
}

impl Device {
    /// Whether it is a NIC.
    pub const fn is_nic(&self) -> bool {
        matches!(self.kind, Kind::Nic { .. })
    }

    /// Whether it is a NIC that carries packets of this length, without the Ethernet header.
    pub const fn can_carry(&self, bytes: u16) -> bool {
        matches!(self.kind, Kind::Nic { mtu, .. } if bytes <= mtu)
    }

    /// Whether its host has another SSD under its name.
    pub const fn is_replaced(&self) -> bool {
        matches!(self.kind, Kind::Ssd { replaced: true, .. })
    }

    /// Whether it is a NIC kept free for failover.
    pub const fn is_backup(&self) -> bool {
        matches!(self.kind, Kind::Nic { backup: true, .. })
    }

    /// The role of the endpoint that owns it.
    pub const fn role(&self) -> Role {
        match self.kind {
            Kind::Nic { .. } => Role::NetBackend,
            Kind::Ssd { .. } => Role::BlkBackend,
        }
    }
}

impl DeviceId {
    /// The endpoint that owns a NIC of this name.
    pub const fn net_backend(&self) -> EndpointId {
        EndpointId::new(self.host, Role::NetBackend)
    }

    /// The endpoint that owns an SSD of this name.
    pub const fn blk_backend(&self) -> EndpointId {
        EndpointId::new(self.host, Role::BlkBackend)
    }
}
