use std::collections::BTreeMap;
use std::net::IpAddr;

use pod_protocol::objects;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Condition;

/// All instances.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InstanceList {
    /// Sorted by name.
    pub instances: Vec<Instance>,
    /// Grows with every change of anything in the pod but what is measured.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// With this as `continue`, the next page; absent on the last one.
    #[serde(default, rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A VM and what it has leased.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Instance {
    /// Its name.
    pub name: String,
    /// Its number.
    pub id: u32,
    /// Changes with every change of it but what is measured; see the header `If-Match`.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// The host it runs on.
    pub host: String,
    /// The instance type that it was made of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    /// The volume that the controller made it for: it has no VM, and is there for its host's frontend to copy that volume, which no
    /// other instance uses. It goes when that is done, and when somebody uses the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<String>,
    /// Whether its VMM listens on the sockets of its devices, instead of connecting to them.
    #[serde(default)]
    pub vmm_listens: bool,
    /// How much of devices it gets next to other instances, where they are short: 1 to 1000, in proportion; 100 unless something else was said.
    #[serde(default = "usual_priority")]
    #[schema(minimum = 1, maximum = 1000)]
    pub priority: u16,
    /// The RAM of its guest, if that lies in the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<GuestRam>,
    /// Its NICs, in the order they were asked for.
    pub nics: Vec<Nic>,
    /// Its disks, in the order they were asked for.
    pub disks: Vec<Disk>,
    /// Whether its host's daemons have confirmed all of it, so that a VMM can connect.
    pub ready: bool,
    /// What it still waits for when it is not ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_for: Vec<String>,
    /// Its move to another host, while that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Migration>,
    /// Words to find it by, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What is true of it now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// A controller that does not say.
const fn usually_linked() -> bool {
    true
}

const fn usual_priority() -> u16 {
    objects::Priority::DEFAULT.get()
}

/// The priority that an instance is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InstancePriority {
    /// How much of devices it gets next to other instances, where they are short: in proportion to this.
    #[schema(minimum = 1, maximum = 1000)]
    pub priority: u16,
}

/// The part of the pool that is the RAM of an instance's guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestRam {
    /// The pool's path on the controller's host.
    pub pool: String,
    /// The pod's name for good, which stands in the pool as well.
    pub pool_uuid: String,
    /// Where in the pool it begins; absent while there is no room for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_bytes: Option<u64>,
    /// How long it is.
    pub size_bytes: u64,
}

/// An instance's move to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// The host to which it moves.
    pub to: String,
    /// Whether that host's daemons have confirmed all of it, so that a VMM can be started there.
    pub ready: bool,
    /// What it still waits for when it is not ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_for: Vec<String>,
    /// The RAM that its guest gets there, if it has it in the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<GuestRam>,
    /// Where the instance's devices will be, NICs first.
    pub devices: Vec<MigratingDevice>,
}

/// A device of an instance on the host to which that moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigratingDevice {
    /// Its name within the instance.
    pub device: String,
    /// The vhost-user socket there, as an absolute path.
    pub socket: String,
    /// Whether a VMM is connected to that socket.
    pub connected: bool,
}

/// Asks for an instance to be moved to another host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateInstance {
    /// The name of that host.
    pub to: String,
}

/// A virtio-net device of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Nic {
    /// Its name within the instance, such as `net0`.
    pub device: String,
    /// The vhost-user socket on the instance's host, as an absolute path.
    pub socket: String,
    /// The MAC address to give to the VMM.
    pub mac: String,
    /// The MTU to give to the VMM.
    pub mtu: u16,
    /// Pairs of queues to give to the VMM.
    pub queue_pairs: u16,
    /// The NIC in use, as `h2/nic0`.
    pub nic: String,
    /// Whether that NIC works, or another one carries its packets: what the guest is to see as its link.
    #[serde(default = "usually_linked")]
    pub link: bool,
    /// Where it uses several NICs at the same time, which are a link aggregation group: all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rails: Vec<NicRail>,
    /// The NIC that takes over when that one fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<String>,
    /// The NIC where it belongs: the one that it had first, or was moved to on demand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<String>,
    /// What the instance may do with it.
    #[serde(default)]
    pub policy: NicPolicy,
    /// How much of the NIC it is sure of, in Mbit/s; 0 for nothing.
    #[serde(default)]
    pub reserved_mbps: u64,
    /// Whether what it reserves is sure to be carried when the host of its NIC fails.
    #[serde(default)]
    pub failover_proven: bool,
    /// NICs with this name are served by different hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart: Option<String>,
    /// NICs with this name are served by one host where that can be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<String>,
    /// The NIC that it has left and still receives from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<String>,
    /// Its lease.
    pub lease: u32,
    /// Which holder of the lease this is; it grows with every failover.
    pub generation: u16,
    /// Whether a VMM is connected to the socket.
    pub connected: bool,
    /// The PCIe slot that it has in the VM, from 0; on every host the same.
    pub slot: u8,
    /// Whether it leaves the instance once the guest has let go of it.
    #[serde(default)]
    pub leaving: bool,
    /// Whether the VMM has said that its guest has it.
    #[serde(default)]
    pub plugged: bool,
    /// Why the VMM has not plugged it in, or the guest not let go of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// One of several NICs that a device uses at the same time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicRail {
    /// The NIC, as `h2/nic0`.
    pub nic: String,
    /// Whether it carries traffic now.
    pub in_use: bool,
}

/// A virtio-blk device of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Disk {
    /// Its name within the instance: the volume's.
    pub device: String,
    /// The vhost-user socket on the instance's host, as an absolute path.
    pub socket: String,
    /// The volume.
    pub volume: String,
    /// What the guest reads as the disk's id.
    pub serial: String,
    /// Its size.
    pub size_bytes: u64,
    /// Its logical block.
    pub block_bytes: u32,
    /// Request queues to give to the VMM.
    pub queues: u16,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The SSD behind it, as `h2/ssd0`.
    pub ssd: String,
    /// Its lease.
    pub lease: u32,
    /// Which holder of the lease this is.
    pub generation: u16,
    /// Whether a VMM is connected to the socket.
    pub connected: bool,
    /// The PCIe slot that it has in the VM, from 0; on every host the same.
    pub slot: u8,
    /// Whether it leaves the instance once the guest has let go of it.
    #[serde(default)]
    pub leaving: bool,
    /// Whether the VMM has said that its guest has it.
    #[serde(default)]
    pub plugged: bool,
    /// Why the VMM has not plugged it in, or the guest not let go of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Asks for an instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateInstance {
    /// Its name: lower-case letters, digits and dashes.
    pub name: String,
    /// The host it runs on.
    pub host: String,
    /// The NICs it gets.
    #[serde(default)]
    pub nics: Vec<NicRequest>,
    /// The volumes it gets.
    #[serde(default)]
    pub volumes: Vec<String>,
    /// An instance type, from which follows what is not said here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    /// Its VMM listens on the sockets of its devices (QEMU's `server=on`), instead of connecting to them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vmm_listens: bool,
    /// So much of the pool is the RAM of its guest, where the engines find it without a copy: a multiple of 2 MiB. Without it
    /// the guest's RAM is its VMM's affair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_bytes: Option<u64>,
    /// How much of devices it gets next to other instances, where they are short: 1 to 1000, in proportion. Without it what its type
    /// says, or else 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000)]
    pub priority: Option<u16>,
    /// Words to find it by, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Asks for a virtio-net device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NicRequest {
    /// Its name within the instance; the first free one of net0, net1, … unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Its MAC address; without it, the controller makes one up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Its MTU; without it, the NIC's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Pairs of queues; without it, one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_pairs: Option<u16>,
    /// What the instance may do with it; without it, anything.
    #[serde(default)]
    pub policy: NicPolicy,
    /// How much of a NIC it is to be sure of, in Mbit/s. It is refused unless a NIC has that left, and a backup NIC of another
    /// host could carry it too; 0 for nothing.
    #[serde(default)]
    pub reserved_mbps: u64,
    /// A name: NICs with the same one are served by different hosts, or refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart: Option<String>,
    /// A name: NICs with the same one are served by one host where that can be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<String>,
    /// So many NICs of a link aggregation group are to be in use at the same time, at least: 1 to 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rails: Option<u8>,
}

/// Asks for one device more for an instance: a NIC or a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachDevice {
    /// The NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic: Option<NicRequest>,
    /// The volume's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
}

/// What a VMM says of a device that it was to plug in or to unplug.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceAnswer {
    /// Whether the guest has it.
    pub plugged: bool,
    /// Why that is not what was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Asks for a NIC of an instance to be moved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateNic {
    /// Where to, as `h3/nic1`; without it, to the least loaded other NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// What became of the leases that belong on a NIC once it was told to have them back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailedBack {
    /// Those that stay where they are.
    pub stay: Vec<StaysAway>,
}

/// A virtio-net device of an instance that does not go back to the NIC where it belongs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StaysAway {
    /// The instance.
    pub instance: String,
    /// The device's name within it, such as `net0`.
    pub device: String,
    /// The NIC that it stays on, as `h2/nic0`.
    pub nic: String,
    /// Why, for people to read.
    pub reason: String,
}

/// What an instance may do with its NIC. Without a number there is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NicPolicy {
    /// What it may send; beyond that it waits.
    pub transmit: NicLimit,
    /// What it may receive; what comes beyond that is dropped.
    pub receive: NicLimit,
    /// The only IPv4 and IPv6 addresses that it may use; any, if there is none here.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// The VLAN that it is in, 1 to 4094: its frames bear that tag on the wire, and it sees no other ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
}

/// How much may pass in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NicLimit {
    /// Bytes of frames per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Packets per second, as on a wire: a large packet that is cut later counts as what it is cut into.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packets_per_second: Option<u64>,
    /// Of how many milliseconds the share may be saved up and used at once; 60000 at most.
    pub burst_ms: u32,
    /// Bytes of frames per second that go before those of other instances where the NIC, or the way to it, is the
    /// bottleneck. What all instances of a NIC are promised is no more than its speed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minimum_bytes_per_second: Option<u64>,
}

impl Default for NicLimit {
    fn default() -> Self {
        objects::RateLimit::default().into()
    }
}

impl From<objects::RateLimit> for NicLimit {
    fn from(limit: objects::RateLimit) -> Self {
        let objects::RateLimit { bytes_per_second, packets_per_second, burst_ms, minimum_bytes_per_second } =
            limit;
        Self { bytes_per_second, packets_per_second, burst_ms, minimum_bytes_per_second }
    }
}

impl From<NicLimit> for objects::RateLimit {
    fn from(limit: NicLimit) -> Self {
        let NicLimit { bytes_per_second, packets_per_second, burst_ms, minimum_bytes_per_second } = limit;
        Self { bytes_per_second, packets_per_second, burst_ms, minimum_bytes_per_second }
    }
}

impl From<objects::NicPolicy> for NicPolicy {
    fn from(policy: objects::NicPolicy) -> Self {
        let objects::NicPolicy { transmit, receive, addresses, vlan } = policy;
        Self { transmit: transmit.into(), receive: receive.into(), addresses, vlan }
    }
}

impl From<NicPolicy> for objects::NicPolicy {
    fn from(policy: NicPolicy) -> Self {
        let NicPolicy { transmit, receive, addresses, vlan } = policy;
        Self { transmit: transmit.into(), receive: receive.into(), addresses, vlan }
    }
}
