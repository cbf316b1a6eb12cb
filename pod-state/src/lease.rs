use std::collections::BTreeMap;

use cxl_pool::{HostId, Role};
use pod_protocol::ids::{InstanceId, LeaseGeneration, LeaseId, MacAddress, VolumeId};
use pod_protocol::objects::NicPolicy;
use serde::{Deserialize, Deserializer, Serialize};

use super::{DeviceId, Draining, Hold, Incoming, UsedBefore};

/// The right of an instance to use a NIC or a volume until it is revoked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Lease {
    /// Its number.
    pub id: LeaseId,
    /// Whose it is.
    pub instance: InstanceId,
    /// The name of the device within the instance.
    pub device: String,
    /// The file of its vhost-user socket.
    pub socket: String,
    /// Grows whenever its holder or its device changes; messages of older ones are refused at the device.
    pub generation: LeaseGeneration,
    /// Whether a VMM is connected.
    pub connected: bool,
    /// Whether its queues run.
    #[serde(default)]
    pub running: bool,
    /// How a VMM used it in the life before of its frontend, until this life says whether one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_before: Option<UsedBefore>,
    /// The guest's driver chose that a write is on the medium when it is answered.
    #[serde(default)]
    pub write_through: bool,
    /// When its queues were released, something that the guest had written was lost, or may have been, and it had yet to hear of that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub untold: bool,
    /// The PCIe slot of its device in the VM, which no other of the instance has. Leases of before there were slots have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u8>,
    /// It ends when its VMM has let go of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// Its VMM has said that the running guest has the device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub plugged: bool,
    /// Why its VMM has not plugged its device in, or not let go of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// The TX or data area, made for one life of the frontend.
    pub area: Option<Hold>,
    /// What waits for it on the host to which its instance moves.
    #[serde(default)]
    pub incoming: Option<Incoming>,
    /// On what.
    pub kind: LeaseKind,
}

/// On what a lease is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "there are few, and they lie in a map")]
pub enum LeaseKind {
    /// On a NIC.
    Nic {
        /// The guest's address.
        mac: MacAddress,
        /// The largest packet without the Ethernet header.
        mtu: u16,
        /// Pairs of queues.
        queue_pairs: u16,
        /// The offloads that the guest was offered. They stay for good: a guest cannot be told otherwise.
        features: u64,
        /// The NIC in use.
        active: DeviceId,
        /// The NIC that takes over.
        standby: Option<DeviceId>,
        /// Where it belongs: the NIC that it had first, or was moved to on demand.
        #[serde(default)]
        home: Option<DeviceId>,
        /// The NIC that it has left in order.
        #[serde(default)]
        draining: Option<Draining>,
        /// What the instance may do with it.
        #[serde(default)]
        policy: NicPolicy,
        /// How much of the NIC it is sure of, in Mbit/s; 0 for nothing.
        #[serde(default)]
        reserved_mbps: u64,
        /// No two leases with this name are served by NICs of one host.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        apart: Option<String>,
        /// Leases with this name are served by NICs of one host where that can be.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        together: Option<String>,
    },
    /// On a volume.
    Disk {
        /// The volume.
        volume: VolumeId,
        /// What the guest reads as the disk's id.
        serial: String,
        /// Request queues.
        queues: u16,
        /// Whether writes are refused.
        read_only: bool,
        /// The life of the backend of each host that has flushed the data area, or got it fresh. A predecessor's cached
        /// writes must not land on the data of requests that its successor serves.
        #[serde(serialize_with = "super::pairs::serialize", deserialize_with = "clean_for")]
        clean_for: BTreeMap<HostId, u64>,
    },
}

/// What was kept before there were several backends does not tell whose life it was: the area is flushed once more.
fn clean_for<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<HostId, u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Kept {
        Lives(Vec<(HostId, u64)>),
        Life(#[expect(dead_code, reason = "only its form matters")] u64),
    }
    Ok(match Kept::deserialize(from)? {
        Kept::Lives(lives) => lives.into_iter().collect(),
        Kept::Life(_) => BTreeMap::new(),
    })
}

impl LeaseKind {
    /// What kind of frontend serves it.
    pub const fn frontend_role(&self) -> Role {
        match self {
            Self::Nic { .. } => Role::NetFrontend,
            Self::Disk { .. } => Role::BlkFrontend,
        }
    }
}

impl Lease {
    /// The volume it is on.
    pub const fn volume(&self) -> Option<VolumeId> {
        match self.kind {
            LeaseKind::Disk { volume, .. } => Some(volume),
            LeaseKind::Nic { .. } => None,
        }
    }

    /// The NIC it uses.
    pub const fn active_nic(&self) -> Option<&DeviceId> {
        match &self.kind {
            LeaseKind::Nic { active, .. } => Some(active),
            LeaseKind::Disk { .. } => None,
        }
    }

    /// How it is being moved from one NIC to another in order, if it is.
    pub(super) const fn draining(&self) -> Option<&Draining> {
        match &self.kind {
            LeaseKind::Nic { draining, .. } => draining.as_ref(),
            LeaseKind::Disk { .. } => None,
        }
    }

    /// The NIC that it has left in order.
    pub fn draining_nic(&self) -> Option<&DeviceId> {
        self.draining().map(|draining| &draining.nic)
    }

    /// Whether it is on another NIC than it was on at first.
    pub(super) fn is_away(&self) -> bool {
        match &self.kind {
            LeaseKind::Nic { active, home, .. } => home.as_ref().is_some_and(|home| home != active),
            LeaseKind::Disk { .. } => false,
        }
    }

    /// All NICs that know of it; one may be among them twice.
    pub fn nics(&self) -> impl Iterator<Item = &DeviceId> {
        [self.active_nic(), self.standby_nic(), self.draining_nic()].into_iter().flatten()
    }

    /// The NIC that takes over.
    pub const fn standby_nic(&self) -> Option<&DeviceId> {
        match &self.kind {
            LeaseKind::Nic { standby, .. } => standby.as_ref(),
            LeaseKind::Disk { .. } => None,
        }
    }
}
