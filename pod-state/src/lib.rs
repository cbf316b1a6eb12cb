//! The controller's mind: a deterministic state machine without clock, I/O or randomness. The same commands give the
//! same state, so that a log replays and a simulation can drive it.
//!
//! It is level-triggered inside as well as outside. A command changes a fact (an endpoint joined, a link went down, an
//! instance is wanted); then `settle` makes the rest follow: failover, areas, channels. What every endpoint should have
//! is read off the state ([`State::desired`]), and what it should let go of ([`State::scrubs`]).

#![forbid(unsafe_code)]

mod absence;
mod adopt;
mod adopt_volumes;
mod alike;
mod apply;
mod around;
mod at_hosts;
mod attachment;
mod backups;
mod balance;
mod balance_volumes;
mod by_digest;
mod change_volume;
mod channel;
mod column_moves;
mod command;
mod copiers;
mod create;
mod delete;
mod delete_device;
mod desired;
mod device;
mod discards;
mod drain;
mod effect;
mod endpoint;
mod fabric;
mod failed_memory;
mod follow;
mod groups;
mod guest_ram;
mod host;
mod hotplug;
mod index;
mod instance;
mod instance_type;
mod join;
mod labels;
mod lease;
mod live_migration;
mod loads;
mod migrate;
mod mirror;
mod name;
mod nic_order;
mod nic_policy;
mod nic_wish;
mod options;
mod outcome;
mod pairs;
mod parts;
mod place_nic;
mod placement;
mod priority;
mod promise;
mod protocol;
mod rails;
mod rates;
mod refusal;
mod region;
mod replaced;
mod replicas;
mod request;
mod room_in_pool;
mod settle;
mod shadow;
mod sorted;
mod ssd_loads;
mod stale;
mod standby;
mod stripe;
mod table;
mod version;
mod volume;
mod wanting;
mod within_host;
mod work;

#[cfg(any(test, feature = "model"))]
pub mod model;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, HostId};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseId, VolumeId};
use serde::{Deserialize, Serialize};

pub use attachment::UsedBefore;
pub use balance::share;
pub use balance::{Measured, Move, Relief};
pub use balance_volumes::{DiskRates, VolumeMove, VolumeRelief};
pub use channel::{Channel, Rings};
pub use command::Command;
pub use device::{Device, DeviceId, Health, Hold, Kind};
pub use effect::Effect;
pub use endpoint::{Endpoint, Presence};
pub use fabric::{Element, Fabric, FabricWish, Mchannel, Tenant, WEIGHT_MAX};
pub use groups::Groups;
pub use guest_ram::GuestRam;
pub use instance::Instance;
pub use instance_type::InstanceType;
pub use labels::{Labelled, Labels};
pub use lease::{Lease, LeaseKind};
pub use live_migration::Incoming;
pub use loads::{Loads, NicLoad};
pub use migrate::Draining;
pub use name::{NAME_BYTES_MAX, check_name};
pub use nic_wish::NicWish;
pub use options::{Filling, NIC_LEASES_MAX, Options, PlacementPolicy, REGIONS_MAX};
pub use parts::{Objects, Part, Parts};
pub use rates::Rates;
pub use refusal::{Refusal, RefusalKind};
pub use region::{Purpose, Region, RegionUse, Regions};
pub use replaced::REPLACED;
pub use request::{IdempotencyKey, KEYS_MAX};
pub use shadow::Shadow;
pub use sorted::Sorted;
pub use ssd_loads::{SsdLoad, SsdLoads};
pub use stale::Stale;
pub use table::Table;
pub use version::{Expected, Resource};
pub use volume::{Replica, Volume};

/// Everything the controller knows for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// How many commands have been applied.
    pub index: u64,
    /// Sizes and limits.
    pub options: Options,
    /// Names of the hosts that have ever joined.
    pub hosts: BTreeMap<HostId, String>,
    /// Daemons that have ever joined.
    #[serde(with = "table::pairs")]
    pub endpoints: Table<EndpointId, Endpoint>,
    /// NICs and SSDs that have ever been reported.
    #[serde(with = "table::pairs")]
    pub devices: Table<DeviceId, Device>,
    /// Volumes.
    pub volumes: Table<VolumeId, Volume>,
    /// Instances.
    pub instances: Table<InstanceId, Instance>,
    /// Kinds of instances to choose from, by name.
    #[serde(default)]
    pub types: BTreeMap<String, InstanceType>,
    /// Leases of all instances.
    pub leases: Table<LeaseId, Lease>,
    /// Who uses which part of the pool.
    pub regions: Regions,
    /// Channels between engines' frontends and backends.
    pub channels: Table<ChannelId, Channel>,
    /// How the bandwidth of the fabric is shared.
    #[serde(default)]
    pub fabric: Fabric,
    /// Hosts that are to be empty.
    #[serde(default)]
    drained_hosts: BTreeSet<HostId>,
    /// Words to find hosts by, of those that have any.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    host_labels: BTreeMap<HostId, Labels>,
    /// How many leases have moved to their backup.
    pub failovers: u64,
    /// Leases that a failover has left without a backup that works.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    unbacked: BTreeSet<LeaseId>,
    /// Requests that clients may send again.
    #[serde(default)]
    keys: request::Keys,
    /// What was handed out last.
    last: Last,
    /// Whether something that is needed did not fit the pool.
    short: bool,
    /// What is looked up, and what has yet to be settled.
    #[serde(skip)]
    known: index::Index,
}

/// The ids that were handed out last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Last {
    instance: u32,
    volume: u32,
    lease: u32,
    channel: u32,
    mac: u32,
}

impl State {
    /// A pod that nobody has joined.
    pub fn new(options: Options) -> Self {
        Self {
            index: 0,
            regions: Regions::new(options.data, options.regions_max),
            options,
            hosts: BTreeMap::new(),
            endpoints: Table::default(),
            devices: Table::default(),
            volumes: Table::default(),
            instances: Table::default(),
            types: BTreeMap::new(),
            leases: Table::default(),
            channels: Table::default(),
            fabric: Fabric::default(),
            drained_hosts: BTreeSet::new(),
            host_labels: BTreeMap::new(),
            failovers: 0,
            unbacked: BTreeSet::new(),
            keys: request::Keys::default(),
            last: Last::default(),
            short: false,
            known: index::Index::default(),
        }
    }

    /// The host with this name.
    pub fn host_named(&self, name: &str) -> Option<HostId> {
        self.hosts.iter().find(|(_, known)| *known == name).map(|(id, _)| *id)
    }

    /// The name of a host; its number where it has none.
    pub fn host_name(&self, host: HostId) -> String {
        self.hosts.get(&host).cloned().unwrap_or_else(|| host.to_string())
    }

    /// The name of a device, as `h2/nic0`.
    pub fn device_name(&self, id: &DeviceId) -> String {
        format!("{}/{}", self.host_name(id.host), id.name)
    }

    /// The name of an endpoint, as `h2/net-backend`.
    pub fn endpoint_name(&self, id: EndpointId) -> String {
        format!("{}/{}", self.host_name(id.host), id.role)
    }

    /// The device with this name, as `h2/nic0`.
    pub fn device_named(&self, name: &str) -> Option<DeviceId> {
        let (host, device) = name.split_once('/')?;
        let id = DeviceId { host: self.host_named(host)?, name: device.into() };
        self.devices.contains_key(&id).then_some(id)
    }

    /// The volume with this name.
    pub fn volume_named(&self, name: &str) -> Option<&Volume> {
        match self.found().filter(|_| self.volumes.is_followed()) {
            Some(found) => {
                let mut volumes = found.volumes_named(name).filter_map(|id| self.volumes.get(&id));
                volumes.find(|volume| volume.name == name)
            }
            None => self.volumes.values().find(|volume| volume.name == name && !volume.deleted),
        }
    }

    /// The instance with this name.
    pub fn instance_named(&self, name: &str) -> Option<&Instance> {
        match self.found().filter(|_| self.instances.is_followed()) {
            Some(found) => {
                let mut instances = found.instances_named(name).filter_map(|id| self.instances.get(&id));
                instances.find(|instance| instance.name == name)
            }
            None => self.instances.values().find(|instance| instance.name == name),
        }
    }

    /// The lease on a volume.
    pub fn lease_of_volume(&self, volume: VolumeId) -> Option<&Lease> {
        match self.found().filter(|_| self.leases.is_followed()) {
            Some(found) => found.lease_of_volume(volume).and_then(|id| self.leases.get(&id)),
            None => self.leases.values().find(|lease| lease.volume() == Some(volume)),
        }
    }
}
