use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// All instance types.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InstanceTypeList {
    /// Sorted by name.
    pub types: Vec<InstanceType>,
    /// Grows with every change of anything in the pod but what is measured.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// With this as `continue`, the next page; absent on the last one.
    #[serde(default, rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A kind of instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InstanceType {
    /// Its name.
    pub name: String,
    /// Changes with every change of it but what is measured; see the header `If-Match`.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// What its instances get.
    #[serde(flatten)]
    pub spec: InstanceTypeSpec,
}

/// What instances of a type get, unless it is said otherwise. A change does not touch instances that are there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct InstanceTypeSpec {
    /// How many NICs, if none is asked for.
    pub nics: u8,
    /// How much of a NIC each is sure of, in Mbit/s; 0 for nothing.
    pub reserved_mbps: u64,
    /// Pairs of queues of each NIC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_pairs: Option<u16>,
    /// How many requests per second each volume is sure of, at least, while the instance has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_iops: Option<u64>,
    /// How much of devices they get next to other instances, where they are short: 1 to 1000, in proportion; 100 unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000)]
    pub priority: Option<u16>,
    /// Words to find it by, by name. Its instances have labels of their own.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}
