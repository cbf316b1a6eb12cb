use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ByteSize;

/// All volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeList {
    /// Sorted by name.
    pub volumes: Vec<Volume>,
}

/// A contiguous range of an SSD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// Its number.
    pub id: u32,
    /// The SSD that it lies on, as `h2/ssd0`.
    pub device: String,
    /// Where it begins on the SSD.
    pub start_bytes: u64,
    /// Its size.
    pub size_bytes: u64,
    /// The instance that has leased it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
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
}
