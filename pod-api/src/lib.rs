//! What travels over the REST API, as JSON. Sizes are in bytes, offsets in bytes from the start of the pool; fields are
//! only ever added. [`client`] asks for it.

#![forbid(unsafe_code)]

mod balance;
pub mod client;
mod condition;
mod controller;
mod event;
mod explanation;
mod host;
mod instance;
mod instance_type;
mod labels;
mod mchannel;
mod pool;
mod problem;
mod size;
mod volume;

pub use balance::{Balance, BalanceMode, NicLoad, PlannedMove, PlannedVolumeMove, SsdLoad, VolumeBalance};
pub use condition::{Condition, ConditionKind};
pub use controller::{Controller, ControllerList, UNMEASURED};
pub use event::{Event, EventKind, EventList};
pub use explanation::{Candidate, CandidatePart, DeviceExplanation, Explanation};
pub use host::{
    Device, DeviceCounters, DeviceHealth, DeviceKind, DeviceList, Endpoint, EndpointHealth, Host, HostList,
};
pub use instance::{
    AttachDevice, CreateInstance, DeviceAnswer, Disk, FailedBack, GuestRam, Instance, InstanceList,
    InstancePriority, MigrateInstance, MigrateNic, MigratingDevice, Migration, Nic, NicLimit, NicPolicy,
    NicRail, NicRequest, StaysAway,
};
pub use instance_type::{InstanceType, InstanceTypeList, InstanceTypeSpec};
pub use labels::Labels;
pub use mchannel::{
    DEFAULT_TENANT, ElementLoad, Fabric, FabricSignal, LoadLevel, Mchannel, MchannelList, MchannelSpec,
    MchannelVcpus,
};
pub use pool::{Pool, Region, RegionState};
pub use problem::{PROBLEM_JSON, Problem};
pub use size::{ByteSize, ParseByteSizeError};
pub use volume::{
    AddReplica, ChangeVolume, CreateVolume, ReplicaState, Stripes, Volume, VolumeGroups, VolumeList,
    VolumeQos, VolumeReplica,
};
