use std::collections::BTreeSet;

use cxl_pool::{EndpointId, HostId};
use pod_protocol::ids::{InstanceId, LeaseGeneration, LeaseId, RegionId, VolumeId};
use pod_protocol::objects::{NicPolicy, Priority, Qos};
use pod_protocol::reports::{DeviceReport, Join};
use serde::{Deserialize, Serialize};

use super::{
    DeviceId, Expected, FabricWish, Groups, IdempotencyKey, InstanceType, Labelled, Labels, Mchannel,
    Measured, NicWish, Options, Relief,
};

/// A fact or a wish, as it stands in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// The controller was started with these options.
    Configure {
        /// The options.
        options: Options,
    },
    /// The pool of the state is gone, and its operator says that this one takes its place.
    AdoptPool {
        /// The options, with the new pool.
        options: Options,
    },
    /// An endpoint asks to take part.
    Join {
        /// Who.
        endpoint: EndpointId,
        /// Which life of it.
        incarnation: u64,
        /// What it has.
        join: Join,
    },
    /// An endpoint stopped beating.
    Silent {
        /// Who.
        endpoint: EndpointId,
    },
    /// An endpoint beats again.
    Back {
        /// Who.
        endpoint: EndpointId,
    },
    /// An endpoint left by itself.
    Gone {
        /// Who.
        endpoint: EndpointId,
    },
    /// Time enough has passed for an endpoint to have seen its fence.
    FenceExpired {
        /// Who.
        endpoint: EndpointId,
        /// Which life of it.
        incarnation: u64,
    },
    /// A storage backend has been away for longer than guests are made to wait for it.
    GraceExpired {
        /// Who.
        endpoint: EndpointId,
        /// Which life of it.
        incarnation: u64,
    },
    /// The link of a NIC changed.
    Link {
        /// Which NIC.
        device: DeviceId,
        /// Whether it can carry traffic.
        up: bool,
        /// How that was seen.
        reason: String,
    },
    /// A device failed.
    DeviceFailed {
        /// Which one.
        device: DeviceId,
        /// What happened.
        reason: String,
    },
    /// A NIC that had failed was opened again.
    DeviceBack {
        /// Which one.
        device: DeviceId,
        /// What it is now.
        report: DeviceReport,
    },
    /// Somebody wants an instance's NIC elsewhere, while both work.
    MigrateNic {
        /// The instance's name.
        instance: String,
        /// The device's name within it.
        device: String,
        /// Where to; the least loaded NIC otherwise.
        to: Option<DeviceId>,
    },
    /// Somebody says anew what an instance may do with its NIC.
    ChangeNic {
        /// The instance's name.
        instance: String,
        /// The device's name within it.
        device: String,
        /// What it may do, as a whole.
        policy: NicPolicy,
    },
    /// A lease has received for long enough from the NIC that it left.
    DrainExpired {
        /// Whose.
        lease: LeaseId,
        /// With which generation it had used that NIC.
        generation: LeaseGeneration,
    },
    /// The leases that belong on a NIC go back to it.
    FailBack {
        /// Which NIC.
        device: DeviceId,
    },
    /// A link came and went too often.
    HoldLink {
        /// Whose.
        device: DeviceId,
        /// How often.
        reason: String,
    },
    /// A link is trusted again.
    ReleaseLink {
        /// Whose.
        device: DeviceId,
        /// Why.
        reason: String,
    },
    /// A VMM connected, or went away.
    Attachment {
        /// The frontend that says so.
        endpoint: EndpointId,
        /// Whose device.
        lease: LeaseId,
        /// Whether it is connected now.
        connected: bool,
        /// Whether queues of the device run.
        #[serde(default)]
        running: bool,
        /// The guest's driver chose that a write is on the medium when it is answered.
        #[serde(default)]
        write_through: bool,
        /// Something is lost of what it wrote, or may be, and it has yet to hear of that.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        untold: bool,
    },
    /// An endpoint has let go of a region.
    Scrubbed {
        /// Who.
        endpoint: EndpointId,
        /// The life of it that answered.
        incarnation: u64,
        /// What.
        region: RegionId,
    },
    /// Somebody wants a volume.
    CreateVolume {
        /// Its name.
        name: String,
        /// Its size.
        size_bytes: u64,
        /// Where; the least used SSD otherwise.
        device: Option<DeviceId>,
        /// In how many places, each on another host.
        #[serde(default = "one")]
        replicas: u8,
        /// How many requests per second it is to be sure of on each SSD.
        #[serde(default)]
        minimum_iops: Option<u64>,
        /// How many bytes per second it is to be sure of on each SSD.
        #[serde(default)]
        minimum_bytes_per_second: Option<u64>,
        /// With which others it is to lie, or not to lie.
        #[serde(default, skip_serializing_if = "Groups::is_empty")]
        groups: Groups,
    },
    /// Somebody wants a volume that lies on several SSDs, a share on each.
    CreateStriped {
        /// Its name.
        name: String,
        /// Its size.
        size_bytes: u64,
        /// On how many SSDs, each of another host.
        columns: u8,
        /// How many bytes lie on one before the next has its turn.
        stripe_bytes: u64,
        /// How many requests per second it is to be sure of, on all of them together.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        minimum_iops: Option<u64>,
        /// How many bytes per second it is to be sure of, on all of them together.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        minimum_bytes_per_second: Option<u64>,
        /// With which others it is to lie, or not to lie.
        #[serde(default, skip_serializing_if = "Groups::is_empty")]
        groups: Groups,
    },
    /// A frontend says that a replica missed something.
    ReplicaFailed {
        /// The frontend.
        endpoint: EndpointId,
        /// Whose volume.
        lease: LeaseId,
        /// Which replica.
        replica: u32,
        /// The epoch that the frontend knows.
        epoch: u64,
        /// What happened.
        reason: String,
    },
    /// Somebody wants a volume to lie in one more place.
    AddReplica {
        /// The volume's name.
        name: String,
        /// Where; the least used SSD of another host otherwise.
        device: Option<DeviceId>,
        /// On which SSD it shall not lie any more, once this is done.
        replaces: Option<DeviceId>,
    },
    /// Somebody wants a volume not to lie there any more.
    RemoveReplica {
        /// The volume's name.
        name: String,
        /// On which SSD it lies.
        device: DeviceId,
    },
    /// A frontend has seen that a replica is to go, or has let go of it.
    ReplicaLeft {
        /// The frontend.
        endpoint: EndpointId,
        /// Whose volume.
        lease: LeaseId,
        /// Which replica.
        replica: u32,
        /// The epoch that the frontend knows.
        epoch: u64,
    },
    /// A frontend says that a stale replica has everything.
    ReplicaSynced {
        /// The frontend.
        endpoint: EndpointId,
        /// Whose volume.
        lease: LeaseId,
        /// Which replica.
        replica: u32,
        /// The epoch in which that holds.
        epoch: u64,
    },
    /// Somebody wants a volume to be larger, to have another share of its SSD, to be in other groups, or to be read only.
    ChangeVolume {
        /// Its name.
        name: String,
        /// Its new size.
        size_bytes: Option<u64>,
        /// Its new share.
        qos: Option<Qos>,
        /// The groups that it is to be in, as a whole.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        groups: Option<Groups>,
        /// Whether guests only read it from now on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        read_only: Option<bool>,
    },
    /// A device that its host does not have any more will not come back.
    DeleteDevice {
        /// Which one.
        device: DeviceId,
        /// Whether volumes of which nobody else has the data go with it.
        lose_data: bool,
    },
    /// Somebody does not want a volume any more.
    DeleteVolume {
        /// Its name.
        name: String,
    },
    /// Nothing is left of the data of a deleted volume.
    VolumeWiped {
        /// Of which SSD.
        device: DeviceId,
        /// Which volume.
        volume: VolumeId,
    },
    /// Somebody wants to use the volumes that were found on an SSD.
    AdoptVolumes {
        /// Of which SSD.
        device: DeviceId,
    },
    /// Somebody wants an instance.
    CreateInstance {
        /// Its name.
        name: String,
        /// Where it runs.
        host: HostId,
        /// The NICs it gets.
        nics: Vec<NicWish>,
        /// The names of the volumes it gets.
        volumes: Vec<String>,
        /// What kind of instance it is: what is not said otherwise follows from it.
        #[serde(default)]
        instance_type: Option<String>,
        /// Its VMM listens on the sockets of its devices.
        #[serde(default)]
        vmm_listens: bool,
        /// So much of the pool is the RAM of its guest, a multiple of 2 MiB; without it, none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ram_bytes: Option<u64>,
        /// What it gets of devices next to others where they are short; what its kind says otherwise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        priority: Option<Priority>,
    },
    /// A frontend is to copy a volume that no instance uses.
    CreateCopier {
        /// Which volume.
        volume: VolumeId,
        /// The frontend's host.
        host: HostId,
    },
    /// There is nothing left for a copier to do.
    EndCopier {
        /// Which one.
        instance: InstanceId,
    },
    /// Somebody gives an instance another priority.
    SetPriority {
        /// Its name.
        name: String,
        /// What it gets of devices next to others where they are short.
        priority: Priority,
    },
    /// A client asks for something.
    Request {
        /// What it calls this request, so that it can ask again without getting it twice.
        key: Option<IdempotencyKey>,
        /// What is made for it bears these.
        #[serde(default)]
        labels: Labels,
        /// What it takes to be there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        expected: Option<Expected>,
        /// What it asks for.
        asked: Box<Command>,
    },
    /// NICs have carried too much for a while: leases leave them.
    Relieve {
        /// Which NICs.
        nics: BTreeSet<DeviceId>,
        /// What passes through NICs, and for leases.
        measured: Measured,
        /// Leases that stay where they are.
        resting: BTreeSet<LeaseId>,
        /// How far they are relieved.
        relief: Relief,
    },
    /// Somebody labels an instance, a volume, a host or a device.
    SetLabels {
        /// Which of them.
        of: Labelled,
        /// Its name.
        name: String,
        /// All that it bears from now on.
        labels: Labels,
    },
    /// Somebody describes a kind of instance, which may be known already. Instances that are there stay as they are.
    SetInstanceType {
        /// Its name.
        name: String,
        /// What instances of it get.
        instance_type: InstanceType,
    },
    /// Nobody shall ask for that kind of instance any more.
    DeleteInstanceType {
        /// Its name.
        name: String,
    },
    /// Somebody is about to move an instance to another host.
    PrepareMigration {
        /// The instance's name.
        name: String,
        /// Where to.
        to: HostId,
    },
    /// It stays where it is.
    AbortMigration {
        /// The instance's name.
        name: String,
    },
    /// It runs there now.
    ActivateMigration {
        /// The instance's name.
        name: String,
        /// Whatever the host that it leaves says.
        force: bool,
    },
    /// Somebody wants a device, or all of a host, to be empty, or to be used again.
    Drain {
        /// The host.
        host: HostId,
        /// Only this device of it.
        device: Option<String>,
        /// Whether it is to be empty.
        on: bool,
    },
    /// Somebody does not want an instance any more.
    DeleteInstance {
        /// Its name.
        name: String,
        /// Also while a VMM is connected. Logs of before one could say are of controllers that always did.
        #[serde(default = "yes")]
        force: bool,
    },
    /// Somebody wants one NIC or one volume more for an instance.
    AttachDevice {
        /// The instance's name.
        instance: String,
        /// The NIC.
        #[serde(default)]
        nic: Option<Box<NicWish>>,
        /// The volume's name.
        #[serde(default)]
        volume: Option<String>,
    },
    /// Somebody wants a device to leave its instance.
    DetachDevice {
        /// The instance's name.
        instance: String,
        /// The device's name within it.
        device: String,
        /// Although a VMM uses it.
        force: bool,
    },
    /// A VMM says whether the running guest has a device.
    DeviceAnswered {
        /// The instance's name.
        instance: String,
        /// The device's name within it.
        device: String,
        /// Whether it has it.
        plugged: bool,
        /// Why that is not what was asked for.
        refused: Option<String>,
    },
    /// Somebody knows that a host was reset or taken away: nothing of it is left in a cache or a device.
    ResetHost {
        /// Its name.
        name: String,
    },
    /// Somebody says anew what the fabric consists of and who shares it, as a whole.
    SetFabric {
        /// All of it.
        fabric: FabricWish,
    },
    /// Somebody gives an instance a share of the fabric, or another one.
    SetMchannel {
        /// The instance's name.
        instance: String,
        /// The share.
        mchannel: Mchannel,
    },
    /// An instance may use the fabric as it likes.
    ClearMchannel {
        /// The instance's name.
        instance: String,
    },
    /// A host does not belong to the pod any more.
    DeleteHost {
        /// Its name.
        name: String,
    },
}

const fn one() -> u8 {
    1
}

const fn yes() -> bool {
    true
}
