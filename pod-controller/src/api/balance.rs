use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What passes through NICs, and what is done about those that carry too much.
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
}

/// What is done about NICs that carry too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BalanceMode {
    /// Nothing.
    Off,
    /// Events tell of it, with what would help.
    Advise,
    /// Leases move.
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
