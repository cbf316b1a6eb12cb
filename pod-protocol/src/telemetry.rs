//! What every endpoint counts and sends every 100 ms. Counters only ever grow while a daemon lives; gauges go up and down.

use std::collections::BTreeMap;

use cxl_pool::EndpointId;
use serde::{Deserialize, Serialize};

use crate::ids::{ChannelId, InstanceId, LeaseId, VolumeId};

/// One sample of an endpoint's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Telemetry {
    /// Counts the samples of this incarnation; the control thread fills it in.
    pub sequence: u64,
    /// Per device that the endpoint owns.
    pub devices: Vec<DeviceTelemetry>,
    /// Per lease that the endpoint serves.
    pub leases: Vec<LeaseTelemetry>,
    /// Per channel of the data path that the endpoint has an end of.
    pub channels: Vec<ChannelTelemetry>,
    /// Anything else that is counted and worth a metric, by name.
    pub counters: BTreeMap<String, u64>,
    /// What there is now of something worth a metric, by name.
    pub gauges: BTreeMap<String, u64>,
    /// By the names of SSDs of the endpoint: what each volume takes up there, in bytes, as far as that is known. Less than its
    /// size, where its place has holes.
    pub allocated_bytes: BTreeMap<String, Vec<(VolumeId, u64)>>,
    /// Per leased device whose VM has a share of the fabric.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mchannels: Vec<MchannelTelemetry>,
    /// Per VM whose vCPUs are held to its share of the fabric.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vcpus: Vec<VcpuTelemetry>,
    /// Per element of the fabric that the endpoint looks at.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub elements: Vec<ElementTelemetry>,
}

/// How loaded an element of the fabric is, as one endpoint sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ElementTelemetry {
    /// Its number.
    pub element: u32,
    /// From 0, light load, to 3, severe overload, as devices tell it in their responses; nothing while that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub level: Option<u8>,
    /// C, what it is taken to carry now, in bytes/s.
    pub capacity: u64,
}

/// What the vCPUs of a VM load and store, and how long they may run. Counted since their agent came.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VcpuTelemetry {
    /// Whose they are.
    pub instance: Option<InstanceId>,
    /// Bytes loaded and stored.
    pub bytes: u64,
    /// For how long they were put to sleep, in µs, summed over vCPUs.
    pub slept_us: u64,
    /// r, in bytes/s.
    pub rate: u64,
    /// D, in bytes/s.
    pub demand: u64,
    /// w·α of the VM, in bytes/s; nothing while nobody on its path has to be held back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<u64>,
    /// T_R in ns: how much of a window they may run.
    pub run_ns: u64,
    /// T_W in ns, as the agent makes it.
    pub window_ns: u64,
}

/// What a leased device moves to and from the pool, and may move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MchannelTelemetry {
    /// Its lease.
    pub lease: Option<LeaseId>,
    /// Bytes moved.
    #[serde(default)]
    pub bytes: u64,
    /// Requests or packets moved.
    #[serde(default)]
    pub messages: u64,
    /// For how long it had something to move and might not, in µs.
    #[serde(default)]
    pub held_us: u64,
    /// r, in bytes/s.
    #[serde(default)]
    pub rate: u64,
    /// D, in bytes/s.
    #[serde(default)]
    pub demand: u64,
    /// w·α of its VM, in bytes/s; nothing while nobody on its path has to be held back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<u64>,
    /// What it may move, in bytes/s; nothing if that is not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// Counters of one device. Zero where a counter makes no sense.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceTelemetry {
    /// Its name in the host's configuration.
    pub name: String,
    /// Whether it works: a NIC's link, an SSD that answers.
    pub up: bool,
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
    pub reopened: u64,
    /// Frames received that nobody got, by reason.
    pub drops: BTreeMap<String, u64>,
    /// What the kernel and the PCIe device count of its troubles, by name, such as `rx-crc-errors`.
    pub troubles: BTreeMap<String, u64>,
}

/// Counters of one lease at one endpoint. Zero where a counter makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseTelemetry {
    /// Which lease.
    pub lease: LeaseId,
    /// Frames from the instance.
    #[serde(default)]
    pub tx_packets: u64,
    /// Bytes from the instance.
    #[serde(default)]
    pub tx_bytes: u64,
    /// Frames to the instance.
    #[serde(default)]
    pub rx_packets: u64,
    /// Bytes to the instance.
    #[serde(default)]
    pub rx_bytes: u64,
    /// Reads completed.
    #[serde(default)]
    pub reads: u64,
    /// Bytes read.
    #[serde(default)]
    pub read_bytes: u64,
    /// Writes completed.
    #[serde(default)]
    pub writes: u64,
    /// Bytes written.
    #[serde(default)]
    pub write_bytes: u64,
    /// Flushes completed.
    #[serde(default)]
    pub flushes: u64,
    /// Requests that the guest saw fail.
    #[serde(default)]
    pub errors: u64,
    /// Requests, or packets from the instance, that had to wait for their share.
    #[serde(default)]
    pub throttled: u64,
    /// How often the instance had to wait for the rate of packets that it is allowed.
    #[serde(default)]
    pub rate_waits: u64,
    /// Frames or messages dropped, by reason.
    #[serde(default)]
    pub drops: BTreeMap<String, u64>,
}

impl LeaseTelemetry {
    /// All counters at zero.
    pub fn new(lease: LeaseId) -> Self {
        Self {
            lease,
            tx_packets: 0,
            tx_bytes: 0,
            rx_packets: 0,
            rx_bytes: 0,
            reads: 0,
            read_bytes: 0,
            writes: 0,
            write_bytes: 0,
            flushes: 0,
            errors: 0,
            throttled: 0,
            rate_waits: 0,
            drops: BTreeMap::new(),
        }
    }
}

/// Counters of one end of a channel of the data path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelTelemetry {
    /// Which channel.
    pub channel: ChannelId,
    /// Who is at its other end.
    pub peer: EndpointId,
    /// Messages sent.
    #[serde(default)]
    pub sent: u64,
    /// Messages received.
    #[serde(default)]
    pub received: u64,
    /// How often a sender found no room.
    #[serde(default)]
    pub stalls: u64,
    /// Messages received that say nothing that this endpoint knows.
    #[serde(default)]
    pub unreadable: u64,
    /// Messages received about a lease that this endpoint does not serve.
    #[serde(default)]
    pub strays: u64,
    /// Completions for which a peer that has more under way than it may left no room.
    #[serde(default)]
    pub lost: u64,
    /// Requests that the other end has not completed yet, now.
    #[serde(default)]
    pub depth: u64,
    /// How many those may be.
    #[serde(default)]
    pub depth_max: u64,
}
