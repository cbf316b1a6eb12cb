use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use pod_protocol::objects::Qos;

use super::{ByteSize, Condition};

/// All volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeList {
    /// Sorted by name.
    pub volumes: Vec<Volume>,
    /// Grows with every change of anything in the pod but what is measured.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// With this as `continue`, the next page; absent on the last one.
    #[serde(default, rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A contiguous range of an SSD, or the same on several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// Its number.
    pub id: u32,
    /// Changes with every change of it but what is measured; see the header `If-Match`.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// The SSD that it lies on, as `h2/ssd0`.
    pub device: String,
    /// Where it begins on the SSD.
    pub start_bytes: u64,
    /// Of a striped volume: how many bytes lie in one of its places before the next has its turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_bytes: Option<u64>,
    /// Of a mirrored or striped volume: all places where it lies, this one included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<VolumeReplica>,
    /// Its size.
    pub size_bytes: u64,
    /// What it takes up of its SSDs, all places together, as their hosts counted last; absent where an SSD does not tell. Less than
    /// its size where its place has holes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated_bytes: Option<u64>,
    /// How much of the SSD it may use.
    #[serde(default)]
    pub qos: VolumeQos,
    /// Whether guests only read it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// The instance that has leased it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Volumes with this name lie on SSDs of different hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart: Option<String>,
    /// Volumes with this name lie on one SSD or one host's where that can be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<String>,
    /// Words to find it by, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What is true of it now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// A place where a mirrored volume lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeReplica {
    /// The SSD, as `h2/ssd0`.
    pub device: String,
    /// Where it begins on the SSD.
    pub start_bytes: u64,
    /// Whether it can be relied on.
    pub state: ReplicaState,
}

/// Whether a replica can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReplicaState {
    /// It has everything that was acknowledged.
    InSync,
    /// It has everything that was acknowledged, but cannot be reached.
    Away,
    /// It misses something, and is brought in line while an instance uses the volume.
    Stale,
    /// It misses something, and cannot be reached.
    StaleAway,
    /// It is to go, and others have everything.
    Leaving,
}

impl ReplicaState {
    /// The word for it in JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Self::InSync => "in-sync",
            Self::Away => "away",
            Self::Stale => "stale",
            Self::StaleAway => "stale-away",
            Self::Leaving => "leaving",
        }
    }
}

/// How much of its SSD a volume may use, and how much it is sure to get. Without a number there is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct VolumeQos {
    /// Requests per second at most, of any kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes per second at most, read and written together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Of how many milliseconds the share may be saved up and used at once; 60000 at most.
    pub burst_ms: u32,
    /// Requests per second for which it comes before other volumes, where its SSD is the bottleneck.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minimum_iops: Option<u64>,
    /// Bytes per second, read and written together, for which it comes before other volumes, where its SSD is the bottleneck.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minimum_bytes_per_second: Option<u64>,
}

impl Default for VolumeQos {
    fn default() -> Self {
        Qos::default().into()
    }
}

impl From<Qos> for VolumeQos {
    fn from(qos: Qos) -> Self {
        let Qos { iops, bytes_per_second, burst_ms, minimum_iops, minimum_bytes_per_second } = qos;
        Self { iops, bytes_per_second, burst_ms, minimum_iops, minimum_bytes_per_second }
    }
}

impl From<VolumeQos> for Qos {
    fn from(qos: VolumeQos) -> Self {
        let VolumeQos { iops, bytes_per_second, burst_ms, minimum_iops, minimum_bytes_per_second } = qos;
        Self { iops, bytes_per_second, burst_ms, minimum_iops, minimum_bytes_per_second }
    }
}

/// Changes a volume; what is left out stays. It may be in use, but for `read_only`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeVolume {
    /// Its new size, not less than it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "16G")]
    pub size: Option<ByteSize>,
    /// Its new share of the SSD, as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<VolumeQos>,
    /// The groups that it is to be in from now on, as a whole. It does not move for that: where it lies otherwise, the condition `placed`
    /// says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<VolumeGroups>,
    /// Whether guests only read it from now on: no instance may use it when that changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

/// The groups that a volume is to be in. What is left out, it is in none of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct VolumeGroups {
    /// A name: volumes with the same one are placed on SSDs of different hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apart: Option<String>,
    /// A name: volumes with the same one are placed on one SSD where that can be, else on SSDs of one host, else anywhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub together: Option<String>,
}

/// Asks for a volume to lie on one more SSD. It may be in use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddReplica {
    /// On which SSD, as `h3/ssd0`; without it, the controller chooses one of another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// On which SSD the volume shall not lie any more, once the new one has everything: so it moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<String>,
}

/// Asks for a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// Its name: lower-case letters, digits and dashes.
    pub name: String,
    /// Its size: a number of bytes, or text such as `"8G"`.
    #[schema(value_type = String, example = "8G")]
    pub size: ByteSize,
    /// On which SSD, as `h2/ssd0`; without it, the controller chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The host that will use it, as `h1`: where an SSD of its own has room it lies there, else where the controller chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub near: Option<String>,
    /// How many hosts keep it on their SSDs: 1 to 3. The controller chooses the others.
    #[serde(default = "one")]
    #[schema(default = 1, minimum = 1, maximum = 3)]
    pub replicas: u8,
    /// How many requests per second it is sure of, on each SSD or, if it is striped, in all; it comes before other volumes for so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minimum_iops: Option<u64>,
    /// How many bytes per second it is sure of, on each SSD or, if it is striped, in all; it comes before other volumes for so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minimum_bytes_per_second: Option<u64>,
    /// Lay it out over SSDs of several hosts, a share on each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripes: Option<Stripes>,
    /// A name: volumes with the same one lie on SSDs of different hosts, wherever they move, or are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart: Option<String>,
    /// A name: volumes with the same one lie on one SSD where that can be, else on SSDs of one host, else anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<String>,
    /// Words to find it by, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

impl CreateVolume {
    /// A volume on one SSD that the controller chooses, sure of nothing.
    pub fn new(name: impl Into<String>, size: ByteSize) -> Self {
        Self {
            name: name.into(),
            size,
            device: None,
            near: None,
            replicas: one(),
            minimum_iops: None,
            minimum_bytes_per_second: None,
            stripes: None,
            apart: None,
            together: None,
            labels: BTreeMap::new(),
        }
    }
}

/// How a volume is laid out over several SSDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Stripes {
    /// Over how many, each of another host: 2 to 4.
    #[schema(minimum = 2, maximum = 4)]
    pub columns: u8,
    /// How much lies on one before the next has its turn: 64K to 16M, a power of two.
    #[serde(default = "stripe_size")]
    #[schema(value_type = String, example = "64K")]
    pub size: ByteSize,
}

const fn stripe_size() -> ByteSize {
    ByteSize::new(64 << 10)
}

const fn one() -> u8 {
    1
}
