use cxl_pool::HostId;
use pod_protocol::ids::{InstanceId, LeaseId};
use pod_protocol::objects::Priority;
use serde::{Deserialize, Serialize};

/// A VM and what it has leased.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// Its number.
    pub id: InstanceId,
    /// Its name.
    pub name: String,
    /// Where it runs.
    pub host: HostId,
    /// Where it is moving to.
    #[serde(default)]
    pub incoming: Option<HostId>,
    /// What kind of instance it was made as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    /// Its VMM listens on the sockets of its devices, and the frontends connect.
    #[serde(default)]
    pub vmm_listens: bool,
    /// It has no VM: it is there so that the frontend of its host copies its volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copier: bool,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "super::Labels::is_empty")]
    pub labels: super::Labels,
    /// What it gets of devices next to others where they are short.
    #[serde(default, skip_serializing_if = "Priority::is_default")]
    pub priority: Priority,
    /// The RAM of its guest, if that lies in the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<super::GuestRam>,
    /// In the order they were asked for.
    pub nics: Vec<LeaseId>,
    /// In the order they were asked for.
    pub disks: Vec<LeaseId>,
}
