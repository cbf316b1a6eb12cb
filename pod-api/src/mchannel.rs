use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whose an instance is, unless it is said.
pub const DEFAULT_TENANT: &str = "default";

/// What the fabric consists of, and who shares its bandwidth. Set as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Fabric {
    /// Of how many µs bytes may be saved up and moved at once; 100 to 1000000.
    pub window_us: u32,
    /// How often shares are computed anew, in µs; from `window_us` to 10000000.
    pub sample_us: u32,
    /// Ports, links and devices by name, and what each carries at most, in bytes/s. Without any nothing is shared out.
    pub elements: BTreeMap<String, u64>,
    /// Owners of instances by name, and the weight of each, 1 to 1000. There is always one named `default`.
    pub tenants: BTreeMap<String, u32>,
    /// What tells hosts how congested an element is, by its name; those that are not named carry what is said.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub signals: BTreeMap<String, FabricSignal>,
    /// How loaded elements with a signal are, by name. Only shown: what is set here does not count.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub loads: BTreeMap<String, ElementLoad>,
    /// Changes with every change of it; see the header `If-Match`.
    #[serde(rename = "resourceVersion", skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
}

/// What tells hosts how congested an element of the fabric is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FabricSignal {
    /// Nothing.
    #[default]
    Off,
    /// How long hosts take to load lines of the pool, compared with the shortest time that was ever seen.
    Probe,
    /// What CXL memory devices answer, of hosts that have any.
    Device,
}

impl fmt::Display for FabricSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Probe => "probe",
            Self::Device => "device",
        })
    }
}

impl FromStr for FabricSignal {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Off, Self::Probe, Self::Device];
        let found = all.into_iter().find(|signal| signal.to_string() == text);
        found.ok_or_else(|| format!("{text:?} is no signal: write off, probe or device"))
    }
}

/// How loaded an element of the fabric is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ElementLoad {
    /// The highest level that a host sees; nothing while none knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<LoadLevel>,
    /// What it is taken to carry now, in bytes/s: the least that a host says.
    pub capacity: u64,
}

/// How loaded a device of a CXL fabric is, as it tells in its responses (DevLoad).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LoadLevel {
    /// It could carry much more.
    Light,
    /// It is well used.
    Optimal,
    /// More is asked of it than it can carry.
    Moderate,
    /// Much more is.
    Severe,
}

impl LoadLevel {
    /// The level of a number, from 0 to 3; what is beyond is the last one.
    pub const fn of_number(number: u8) -> Self {
        match number {
            0 => Self::Light,
            1 => Self::Optimal,
            2 => Self::Moderate,
            _ => Self::Severe,
        }
    }

    /// Its number, from 0 to 3.
    pub const fn number(self) -> u8 {
        self as u8
    }
}

impl fmt::Display for LoadLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Light => "light load",
            Self::Optimal => "optimal load",
            Self::Moderate => "moderate overload",
            Self::Severe => "severe overload",
        })
    }
}

impl Default for Fabric {
    fn default() -> Self {
        Self {
            window_us: 1000,
            sample_us: 10_000,
            elements: BTreeMap::new(),
            tenants: BTreeMap::new(),
            signals: BTreeMap::new(),
            loads: BTreeMap::new(),
            resource_version: String::new(),
        }
    }
}

/// An instance's share of the fabric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MchannelSpec {
    /// Its part among the instances of its tenant, 1 to 1000.
    #[serde(default = "one")]
    pub weight: u32,
    /// Whose it is.
    #[serde(default = "default_tenant")]
    pub tenant: String,
    /// The elements of the fabric that it passes through, each once.
    pub path: Vec<String>,
}

const fn one() -> u32 {
    1
}

fn default_tenant() -> String {
    DEFAULT_TENANT.to_owned()
}

/// What an instance moves to and from the pool, and may move. Rates are in bytes/s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Mchannel {
    /// The instance.
    pub instance: String,
    /// Changes with every change of it but what is measured; see the header `If-Match`.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// The host that it runs on.
    pub host: String,
    /// Its part among the instances of its tenant.
    pub weight: u32,
    /// Whose it is.
    pub tenant: String,
    /// The elements of the fabric that it passes through.
    pub path: Vec<String>,
    /// How fast it moves bytes.
    pub rate: u64,
    /// How fast it would, if nothing held it back.
    pub demand: u64,
    /// What it may move, by its weight; absent while nobody on its path has to be held back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<u64>,
    /// T_R/T_W in percent: how much of the time it may go on, given its demand and share.
    pub run_percent: u32,
    /// Bytes moved since its frontends started.
    pub bytes: u64,
    /// Requests and packets moved since then.
    pub messages: u64,
    /// For how long its devices had something to move and might not since then, in ms.
    pub held_ms: u64,
    /// Its vCPUs, which are among what it moves while `vmm slice --share fair` counts and holds them; absent while nobody does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<MchannelVcpus>,
    /// A VMM uses it, its memory lies in the pool, and nobody counts what its vCPUs load and store there: that has no part in any share.
    #[serde(default)]
    pub vcpus_uncounted: bool,
}

/// What the vCPUs of an instance load and store by themselves, and for how long they may run. Rates are in bytes/s.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MchannelVcpus {
    /// How fast they load and store.
    pub rate: u64,
    /// How fast they would, if they were never stopped.
    pub demand: u64,
    /// T_R: how much of a window they may run, in µs.
    pub run_us: u64,
    /// T_W: the window, in µs; 0 until it is known.
    pub window_us: u64,
    /// T_R/T_W in percent.
    pub run_percent: u32,
    /// Bytes loaded and stored since they are counted.
    pub bytes: u64,
    /// For how long they were put to sleep since then, in ms, summed over vCPUs.
    pub slept_ms: u64,
}

/// Instances that have a share of the fabric.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MchannelList {
    /// Sorted by the names of instances.
    pub mchannels: Vec<Mchannel>,
    /// Grows with every change of anything in the pod but what is measured.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// With this as `continue`, the next page; absent on the last one.
    #[serde(default, rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}
