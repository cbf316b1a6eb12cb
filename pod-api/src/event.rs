use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Some events, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// The events.
    pub events: Vec<Event>,
    /// Events before this sequence number are not kept any more.
    pub first: u64,
    /// The sequence number of the last event that there is, whether or not it is among these. Where nothing was left out for their
    /// number, go on after it; 0 of controllers that do not say it.
    #[serde(default)]
    pub last: u64,
}

/// Something that happened in the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Grows by one with each event, across restarts of the controller.
    pub sequence: u64,
    /// When it was committed, in ms since 1970.
    pub time_ms: u64,
    /// What happened.
    pub kind: EventKind,
    /// What it happened to: `h2`, `h2/nic0`, the name of an instance or volume.
    pub subject: String,
    /// In words.
    pub message: String,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// The controller started.
    ControllerStarted,
    /// An endpoint joined for the first time, or after a restart.
    EndpointJoined,
    /// An endpoint stopped beating.
    EndpointSilent,
    /// An endpoint beats again.
    EndpointBack,
    /// An endpoint is being fenced.
    EndpointFenced,
    /// An endpoint left.
    EndpointGone,
    /// A join was refused.
    JoinRefused,
    /// A NIC has a link.
    LinkUp,
    /// A NIC lost its link.
    LinkDown,
    /// A device failed.
    DeviceFailed,
    /// A NIC that had failed was opened again.
    DeviceBack,
    /// A device is not there any more.
    DeviceGone,
    /// A link came and went too often: nothing moves to that NIC for a while.
    LinkHeld,
    /// A link that was not trusted is trusted again.
    LinkReleased,
    /// A disk answers I/O errors: its SSD failed or was away for too long.
    DiskFailed,
    /// A disk that had failed is served again.
    DiskBack,
    /// A host is known to have been reset or taken away.
    HostReset,
    /// A host was deleted.
    HostDeleted,
    /// Another pool took the place of one that is gone.
    PoolAdopted,
    /// A lease moved to its backup.
    Failover,
    /// A lease moved between NICs that work, on demand, or a volume, or a column of it, has moved to another SSD.
    Migrated,
    /// A NIC has carried, or an SSD has done, too much for a while.
    Overloaded,
    /// A lease left a NIC that carried too much, or its volume an SSD that did too much.
    Balanced,
    /// A device or a host is to be empty.
    DrainBegun,
    /// A device or a host may be used again.
    DrainEnded,
    /// A lease left a NIC that is to be empty.
    Drained,
    /// Another host gets ready for an instance, or another SSD for a volume.
    MigrationPrepared,
    /// An instance or a volume that was to move stays where it is.
    MigrationAborted,
    /// An instance runs on another host now.
    InstanceMigrated,
    /// An instance may do something else with its NIC.
    NicChanged,
    /// An instance gets another share of devices that are short.
    PriorityChanged,
    /// A lease went back to the NIC where it belongs.
    FailedBack,
    /// A lease has a NIC that does not work, and no backup that does.
    Degraded,
    /// A volume was created.
    VolumeCreated,
    /// A volume grew, or has another share of its SSD.
    VolumeChanged,
    /// A volume was deleted.
    VolumeDeleted,
    /// A replica of a mirrored volume may miss something, and is not relied on any more.
    ReplicaDropped,
    /// A replica of a mirrored volume has everything again.
    ReplicaSynced,
    /// An instance was created.
    InstanceCreated,
    /// An instance was deleted.
    InstanceDeleted,
    /// An instance has one device more.
    DeviceAttached,
    /// A device is to leave its instance.
    DeviceLeaving,
    /// A VMM could not plug a device in, or its guest has not let go of it.
    DeviceRefused,
    /// A device has left its instance.
    DeviceDetached,
    /// A kind of instance was described.
    InstanceTypeSet,
    /// A kind of instance was deleted.
    InstanceTypeDeleted,
    /// What the fabric consists of or who shares it was said anew.
    FabricChanged,
    /// An instance has a share of the fabric, or another one.
    MchannelSet,
    /// An instance has no share of the fabric any more.
    MchannelCleared,
    /// A VMM connected to a device.
    Attached,
    /// A VMM went away from a device.
    Detached,
    /// An endpoint refused what the controller told it.
    CommandFailed,
    /// The pool has no room for what an instance needs.
    PoolFull,
    /// Memory of the pool cannot be read any more.
    MemoryFailed,
}

impl EventKind {
    /// The word for it in JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Self::ControllerStarted => "controller-started",
            Self::EndpointJoined => "endpoint-joined",
            Self::EndpointSilent => "endpoint-silent",
            Self::EndpointBack => "endpoint-back",
            Self::EndpointFenced => "endpoint-fenced",
            Self::EndpointGone => "endpoint-gone",
            Self::JoinRefused => "join-refused",
            Self::LinkUp => "link-up",
            Self::LinkDown => "link-down",
            Self::DeviceFailed => "device-failed",
            Self::DeviceBack => "device-back",
            Self::DeviceGone => "device-gone",
            Self::LinkHeld => "link-held",
            Self::LinkReleased => "link-released",
            Self::DiskFailed => "disk-failed",
            Self::DiskBack => "disk-back",
            Self::HostReset => "host-reset",
            Self::HostDeleted => "host-deleted",
            Self::PoolAdopted => "pool-adopted",
            Self::Failover => "failover",
            Self::Migrated => "migrated",
            Self::Overloaded => "overloaded",
            Self::Balanced => "balanced",
            Self::DrainBegun => "drain-begun",
            Self::DrainEnded => "drain-ended",
            Self::Drained => "drained",
            Self::MigrationPrepared => "migration-prepared",
            Self::MigrationAborted => "migration-aborted",
            Self::InstanceMigrated => "instance-migrated",
            Self::NicChanged => "nic-changed",
            Self::PriorityChanged => "priority-changed",
            Self::FailedBack => "failed-back",
            Self::Degraded => "degraded",
            Self::VolumeCreated => "volume-created",
            Self::VolumeChanged => "volume-changed",
            Self::VolumeDeleted => "volume-deleted",
            Self::ReplicaDropped => "replica-dropped",
            Self::ReplicaSynced => "replica-synced",
            Self::InstanceCreated => "instance-created",
            Self::InstanceDeleted => "instance-deleted",
            Self::DeviceAttached => "device-attached",
            Self::DeviceLeaving => "device-leaving",
            Self::DeviceRefused => "device-refused",
            Self::DeviceDetached => "device-detached",
            Self::InstanceTypeSet => "instance-type-set",
            Self::InstanceTypeDeleted => "instance-type-deleted",
            Self::FabricChanged => "fabric-changed",
            Self::MchannelSet => "mchannel-set",
            Self::MchannelCleared => "mchannel-cleared",
            Self::Attached => "attached",
            Self::Detached => "detached",
            Self::CommandFailed => "command-failed",
            Self::PoolFull => "pool-full",
            Self::MemoryFailed => "memory-failed",
        }
    }
}
