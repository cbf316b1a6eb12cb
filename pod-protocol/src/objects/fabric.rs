//! What frontends are told of the fabric that their VMs share.

use cxl_pool::{Area, EndpointId};
use serde::{Deserialize, Serialize};

use crate::ids::{InstanceId, LeaseId};

/// Frontends: measure what mchannels move, and share the fabric's bandwidth with the other frontends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricObject {
    /// T_W in µs: of how long a budget of bytes is saved up at most.
    pub window_us: u32,
    /// K in µs: how often shares are computed anew.
    pub sample_us: u32,
    /// Where this endpoint publishes its sums; it alone writes there.
    pub sums: Area,
    /// Where it publishes what each of its VMs wants; it alone writes there.
    pub vms: Area,
    /// The other endpoints, and where their sums are.
    pub peers: Vec<PeerObject>,
    /// Where the other frontend of the same host says what each VM wants of it.
    #[serde(default)]
    pub sibling: Option<Area>,
    /// What the fabric consists of.
    pub elements: Vec<ElementObject>,
    /// Whose VMs share it.
    pub tenants: Vec<TenantObject>,
}

/// Another endpoint that shares the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerObject {
    /// Which one.
    pub endpoint: EndpointId,
    /// Where its sums are.
    pub sums: Area,
}

/// A port, link or device of the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ElementObject {
    /// Its number, the same in the whole pod.
    pub element: u32,
    /// What it carries at most.
    pub bytes_per_second: u64,
    /// What tells whether it carries less now.
    #[serde(default, skip_serializing_if = "Signal::is_off")]
    pub signal: Signal,
}

/// What tells hosts how congested an element of the fabric is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Signal {
    /// Nothing: it carries what the operator says.
    #[default]
    Off,
    /// How long hosts take to load lines of the pool.
    Probe,
    /// What memory devices answer, of hosts that have any.
    Device,
}

impl Signal {
    /// Whether there is none.
    pub const fn is_off(&self) -> bool {
        matches!(self, Self::Off)
    }
}

/// Whoever owns VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantObject {
    /// Its number, the same in the whole pod.
    pub tenant: u32,
    /// Its part among the tenants.
    pub weight: u32,
}

/// Frontends: what a leased device moves to and from the pool is measured, and held to its VM's share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MchannelObject {
    /// The device's lease.
    pub lease: LeaseId,
    /// Whose it is. All devices of an instance share its weight.
    pub instance: InstanceId,
    /// The instance's name, by which agents know its vCPUs; empty where the controller does not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Its part among the VMs of its tenant.
    pub weight: u32,
    /// Its tenant.
    pub tenant: u32,
    /// What it passes through, by number.
    pub path: Vec<u32>,
}
