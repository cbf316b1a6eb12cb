//! Which volumes lie on an SSD: what the controller has a backend keep on the device itself, and finds there again.

use serde::{Deserialize, Serialize};

use crate::ids::VolumeId;

/// The volumes of one SSD, in the order of their places.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeTable {
    /// The volumes.
    pub volumes: Vec<VolumeEntry>,
}

/// A volume as its SSD knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeEntry {
    /// Its number.
    pub id: VolumeId,
    /// Its name.
    pub name: String,
    /// Where it begins.
    pub start_bytes: u64,
    /// How long it is.
    pub size_bytes: u64,
    /// It was deleted: its place is given on when nothing of its data is left.
    #[serde(default)]
    pub deleted: bool,
    /// Of a replica of a mirrored volume: which of them may be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<MirrorEntry>,
    /// Of a column of a striped volume: how the volume is put together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe: Option<StripeEntry>,
}

/// How a striped volume is put together: so many bytes from the first column, as many from the next, and so on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeEntry {
    /// How many bytes lie in one column before the next has its turn.
    pub unit_bytes: u64,
    /// Which column this is, from zero. Where the SSD is not the one that `ssds` has there, this is a place that the column
    /// moves to or has left, and not to be used.
    pub number: u32,
    /// The SSDs that the columns lie on, in order, as `h2/ssd0`. The tables of the other columns' SSDs know of a move first.
    pub ssds: Vec<String>,
    /// The size of the whole volume.
    pub volume_bytes: u64,
}

/// What a replica knows of the mirror that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorEntry {
    /// Of the set of replicas in sync. Where the tables of several SSDs speak of one mirror, the highest is right.
    pub epoch: u64,
    /// Which replica this is.
    pub number: u32,
    /// All of them.
    pub replicas: Vec<MirrorMember>,
}

/// A replica, as all of them know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorMember {
    /// Its number.
    pub number: u32,
    /// The SSD that it lies on, as `h2/ssd0`.
    pub ssd: String,
    /// It misses writes that were acknowledged: its data must not be used.
    pub stale: bool,
}

impl MirrorEntry {
    /// Whether this replica itself misses writes.
    pub fn is_stale(&self) -> bool {
        self.replicas.iter().any(|member| member.number == self.number && member.stale)
    }
}

impl VolumeEntry {
    /// Where it ends.
    pub fn end_bytes(&self) -> u64 {
        self.start_bytes.saturating_add(self.size_bytes)
    }
}
