use pod_protocol::ids::MacAddress;
use pod_protocol::objects::NicPolicy;
use serde::{Deserialize, Serialize};

/// What is asked of a NIC; the controller chooses the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicWish {
    /// Its name within the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Its address.
    pub mac: Option<MacAddress>,
    /// The largest packet without the Ethernet header.
    pub mtu: Option<u16>,
    /// Pairs of queues.
    pub queue_pairs: Option<u16>,
    /// What the instance may do with it.
    #[serde(default)]
    pub policy: NicPolicy,
    /// How much of a NIC it is to be sure of, in Mbit/s; 0 for nothing.
    #[serde(default)]
    pub reserved_mbps: u64,
    /// Served by another host than all others with this name.
    #[serde(default)]
    pub apart: Option<String>,
    /// Served by the same host as others with this name, where that can be.
    #[serde(default)]
    pub together: Option<String>,
    /// So many NICs of a link aggregation group are to be in use at the same time, at least.
    #[serde(default)]
    pub rails: Option<u8>,
}
