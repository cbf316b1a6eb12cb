use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What passes through NICs, what SSDs do, and what is done about those that carry too much.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Balance {
    /// Whether leases move by themselves.
    pub mode: BalanceMode,
    /// A NIC that carries so much of its speed is overloaded, in percent.
    pub high_percent: u32,
    /// Leases leave it until it carries no more than this, and none fills another beyond this, in percent.
    pub low_percent: u32,
    /// NICs of which it is known, by name.
    pub nics: Vec<NicLoad>,
    /// What would move now if nothing were waited for. Nothing does because of this.
    pub moves: Vec<PlannedMove>,
    /// The same of SSDs and volumes. Controllers of before SSDs were balanced do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<VolumeBalance>,
    /// Why nothing is known here of what devices carry, and whom to ask. Only the controller replica that leads hears of that, and of
    /// others neither this nor what is measured of devices, volumes and instances says anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown_here: Option<String>,
}

/// What SSDs do, and what is done about those that do too much.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeBalance {
    /// Whether volumes move by themselves.
    pub mode: BalanceMode,
    /// An SSD that does so much of what it can is overloaded, in percent of its requests or bytes per second.
    pub high_percent: u32,
    /// It is relieved until it does no more than this, and no volume fills another beyond this, in percent.
    pub low_percent: u32,
    /// Volumes that are larger stay, in bytes.
    pub bytes_max: u64,
    /// SSDs of which it is known, by name.
    pub ssds: Vec<SsdLoad>,
    /// What would move now if nothing were waited for but what is being copied. Nothing does because of this.
    pub moves: Vec<PlannedVolumeMove>,
}

/// What is done about devices that carry too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BalanceMode {
    /// Nothing.
    Off,
    /// Events tell of it, with what would help.
    Advise,
    /// Leases, or volumes, move.
    Move,
}

/// What passes through a NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicLoad {
    /// Host and name, as `h2/nic0`.
    pub name: String,
    /// What passes in the direction in which it is more, in Mbit/s.
    pub carries_mbps: u64,
    /// Its speed, in Mbit/s.
    pub speed_mbps: u64,
    /// Whether it has carried too much for a while, and not little enough since.
    pub overloaded: bool,
}

/// A lease that would move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedMove {
    /// The instance.
    pub instance: String,
    /// The NIC's name within it.
    pub device: String,
    /// Which NIC it would leave.
    pub from: String,
    /// Where it would go.
    pub to: String,
    /// What it brings there, in Mbit/s.
    pub mbps: u64,
}

/// What an SSD does, reads and writes together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SsdLoad {
    /// Host and name, as `h2/ssd0`.
    pub name: String,
    /// Requests per second.
    pub iops: u64,
    /// Bytes per second.
    pub bytes_per_second: u64,
    /// How much that is of what it can do, of requests or of bytes, whichever is more. Missing where its configuration says neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_percent: Option<u64>,
    /// Whether it has done too much for a while, and not little enough since.
    pub overloaded: bool,
    /// Whether volumes are being copied to or from it, or wiped there: until that is over, none comes or goes to relieve an SSD.
    pub copying: bool,
}

/// A volume that would move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedVolumeMove {
    /// The volume.
    pub volume: String,
    /// The instance that has it.
    pub instance: String,
    /// The disk's name within it.
    pub device: String,
    /// Which SSD it would leave.
    pub from: String,
    /// Where it would go.
    pub to: String,
    /// How many requests per second it brings there.
    pub iops: u64,
    /// How many bytes per second it brings there.
    pub bytes_per_second: u64,
}
