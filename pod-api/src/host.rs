use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Condition;

/// All hosts that have ever joined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostList {
    /// Sorted by id.
    pub hosts: Vec<Host>,
    /// Grows with every change of anything in the pod but what is measured.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// With this as `continue`, the next page; absent on the last one.
    #[serde(default, rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A host of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its number in the pool.
    pub id: u16,
    /// Changes with every change of it but what is measured; see the header `If-Match`.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// Its daemons.
    pub endpoints: Vec<Endpoint>,
    /// The devices it owns, as `h2/nic0`.
    pub devices: Vec<String>,
    /// The instances that run on it.
    pub instances: Vec<String>,
    /// It is to be empty: nothing new is placed on its devices, and what is there leaves.
    #[serde(default)]
    pub drained: bool,
    /// Words to find it by, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What is true of it now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// A daemon's presence in the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Endpoint {
    /// `net-frontend`, `net-backend`, `blk-frontend` or `blk-backend`.
    pub role: String,
    /// Program and version.
    pub software: String,
    /// Process id on its host.
    pub pid: u32,
    /// Whether it is heard of.
    pub health: EndpointHealth,
    /// Its telemetry's age; absent when there is none since the controller started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub telemetry_age_ms: Option<u64>,
    /// The version of the protocol that it speaks, or spoke when it died; absent once it has left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
}

/// Whether an endpoint is heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EndpointHealth {
    /// It beats.
    Joined,
    /// It stopped beating; nothing was taken from it.
    Silent,
    /// It stopped beating and is being fenced, so that its work can move.
    Fencing,
    /// It was fenced, and what could be moved was moved.
    Fenced,
    /// It left by itself.
    Gone,
}

/// All devices of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceList {
    /// Sorted by host and name.
    pub devices: Vec<Device>,
    /// Grows with every change of anything in the pod but what is measured.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// With this as `continue`, the next page; absent on the last one.
    #[serde(default, rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A NIC or an SSD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// Host and name, as `h2/nic0`.
    pub name: String,
    /// The host that owns it.
    pub host: String,
    /// Changes with every change of it but what is measured; see the header `If-Match`.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// NIC or SSD, and what only that has.
    #[serde(flatten)]
    pub kind: DeviceKind,
    /// Which driver runs it.
    pub driver: String,
    /// Whether it can be used.
    pub health: DeviceHealth,
    /// Why it cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How many leases use it now.
    pub leases: u32,
    /// It is to be empty: nothing new is placed on it, and what is there leaves.
    #[serde(default)]
    pub drained: bool,
    /// Words to find it by, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Its counters; absent when its endpoint has sent none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<DeviceCounters>,
    /// What is true of it now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum DeviceKind {
    /// A NIC.
    Nic {
        /// Its own address, if it has one.
        #[serde(default)]
        mac: Option<String>,
        /// Its speed.
        speed_mbps: u64,
        /// The largest packet without the Ethernet header.
        mtu: u16,
        /// Whether it is kept free for failover.
        backup: bool,
        /// The link aggregation group at the switch that it belongs to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lag: Option<String>,
        /// How many leases would move to it.
        standby_leases: u32,
        /// How much of it may be reserved, in Mbit/s.
        #[serde(default)]
        capacity_mbps: u64,
        /// How much of it is reserved, in Mbit/s.
        #[serde(default)]
        reserved_mbps: u64,
        /// How much more the failure of any one host would bring at worst, in Mbit/s.
        #[serde(default)]
        spare_mbps: u64,
    },
    /// An SSD.
    Ssd {
        /// Its size.
        size_bytes: u64,
        /// Of it, what volumes occupy.
        used_bytes: u64,
        /// How many requests per second may be reserved; absent if nobody said what it can do.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        iops: Option<u64>,
        /// How many requests per second are reserved.
        #[serde(default)]
        reserved_iops: u64,
        /// How many bytes per second may be reserved; absent if nobody said what it can do.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes_per_second: Option<u64>,
        /// How many bytes per second are reserved.
        #[serde(default)]
        reserved_bytes_per_second: u64,
        /// Its logical block.
        block_bytes: u32,
        /// What a discard has to be a multiple of, with its offset, to have any effect; absent if it is not known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        discard_granularity_bytes: Option<u32>,
        /// The names of volumes that were found on it and that are nobody's; it is not used until they are adopted.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        strangers: Vec<String>,
    },
}

/// Whether a device can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceHealth {
    /// It works.
    Up,
    /// It works, but its link came and went too often: nothing moves to it for a while.
    Held,
    /// A NIC without a link.
    Down,
    /// It failed.
    Failed,
    /// Its endpoint is not there, or does not have it any more.
    Away,
}

/// Counters of a device since its endpoint started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceCounters {
    /// Frames received.
    pub rx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Frames sent.
    pub tx_packets: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Requests completed.
    pub operations: u64,
    /// Bytes read from the medium.
    pub read_bytes: u64,
    /// Bytes written to the medium.
    pub write_bytes: u64,
    /// What the device refused or failed.
    pub errors: u64,
    /// How often it was opened again after its driver had failed.
    #[serde(default)]
    pub reopened: u64,
    /// Frames that a NIC received and nobody got, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drops: BTreeMap<String, u64>,
    /// What the kernel and the PCIe device count of a NIC's troubles, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub troubles: BTreeMap<String, u64>,
}
