//! Versions of resources: whoever changes what somebody else has changed since he looked is told so, and changes nothing.
//!
//! A version is a digest of all that the state holds of a resource. It needs no place in the state, so that nothing that
//! changes a resource can forget to count it; and it is the same after a restart, on every replica, and for a resource that is
//! what it was again.

use cxl_pool::HostId;
use pod_protocol::ids::{InstanceId, LeaseId};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    Command, DeviceId, Fabric, Instance, InstanceType, Labelled, Lease, Refusal, RefusalKind, State, Volume,
};

/// Something that has a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// A host, by its number.
    Host(HostId),
    /// A NIC or an SSD.
    Device(DeviceId),
    /// A volume, by its name.
    Volume(String),
    /// An instance, by its name.
    Instance(String),
    /// A kind of instance, by its name.
    InstanceType(String),
    /// An instance's share of the fabric, by the instance's name.
    Mchannel(String),
    /// What the fabric consists of, and who shares it.
    Fabric,
}

/// What a resource must be for a change of it to be carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Which one.
    pub resource: Resource,
    /// It must have one of these versions; any at all if there is none here.
    pub versions: Vec<String>,
}

impl Command {
    /// What a wish of somebody's changes that is there already, if it is one thing.
    pub fn changes(&self, state: &State) -> Option<Resource> {
        Some(match self {
            Self::MigrateNic { instance: name, .. }
            | Self::ChangeNic { instance: name, .. }
            | Self::SetLabels { of: Labelled::Instance, name, .. }
            | Self::SetPriority { name, .. }
            | Self::PrepareMigration { name, .. }
            | Self::AbortMigration { name }
            | Self::ActivateMigration { name, .. }
            | Self::AttachDevice { instance: name, .. }
            | Self::DetachDevice { instance: name, .. }
            | Self::DeviceAnswered { instance: name, .. }
            | Self::DeleteInstance { name, .. } => Resource::Instance(name.clone()),
            Self::AddReplica { name, .. }
            | Self::RemoveReplica { name, .. }
            | Self::ChangeVolume { name, .. }
            | Self::SetLabels { of: Labelled::Volume, name, .. }
            | Self::DeleteVolume { name } => Resource::Volume(name.clone()),
            Self::SetLabels { of: Labelled::Device, name, .. } => Resource::Device(state.device_named(name)?),
            Self::FailBack { device }
            | Self::ReleaseLink { device, .. }
            | Self::AdoptVolumes { device }
            | Self::DeleteDevice { device, .. } => Resource::Device(device.clone()),
            Self::Drain { host, device: Some(name), .. } => {
                Resource::Device(DeviceId { host: *host, name: name.as_str().into() })
            }
            Self::Drain { host, device: None, .. } => Resource::Host(*host),
            Self::SetInstanceType { name, .. } | Self::DeleteInstanceType { name } => {
                Resource::InstanceType(name.clone())
            }
            Self::SetMchannel { instance, .. } | Self::ClearMchannel { instance } => {
                Resource::Mchannel(instance.clone())
            }
            Self::SetFabric { .. } => Resource::Fabric,
            Self::SetLabels { of: Labelled::Host, name, .. }
            | Self::ResetHost { name }
            | Self::DeleteHost { name } => Resource::Host(state.host_named(name)?),
            _ => return None,
        })
    }
}

/// The digest of something, as 16 hexadecimal digits.
fn digest(of: &impl Serialize) -> String {
    // What the store keeps can be written as JSON.
    let json = serde_json::to_vec(of).unwrap_or_default();
    let digest = Sha256::digest(&json);
    let first = digest.first_chunk().copied().unwrap_or_default();
    format!("{:016x}", u64::from_be_bytes(first))
}

impl State {
    /// The version of a resource, if there is one. Another one may be there under the same name later: it has another version.
    pub fn version(&self, resource: &Resource) -> Option<String> {
        Some(match resource {
            Resource::Host(host) => self.host_version(*host)?,
            Resource::Device(id) => self.device_version(id)?,
            Resource::Volume(name) => {
                let volume = self.volume_named(name)?;
                Self::volume_version(volume, self.lease_of_volume(volume.id).map(|lease| lease.id))
            }
            Resource::Instance(name) => self.instance_version(self.instance_named(name)?),
            Resource::InstanceType(name) => Self::type_version(name, self.types.get(name)?),
            Resource::Mchannel(instance) => self.mchannel_version(self.instance_named(instance)?.id)?,
            Resource::Fabric => self.fabric_version(),
        })
    }

    /// The version of a host: its daemons, its labels, and whether it is to be empty. Not that of its devices.
    pub fn host_version(&self, host: HostId) -> Option<String> {
        let name = self.hosts.get(&host)?;
        let endpoints: Vec<_> = self.endpoints_at(host).collect();
        let host = ("host", host, name, self.is_drained_host(host), endpoints);
        // Without labels it is the version that controllers of 1.0 know.
        let labels = self.host_labels.get(&host.1);
        Some(labels.map_or_else(|| digest(&host), |labels| digest(&(&host, labels))))
    }

    /// The version of a device: what it is, whether it works, and whether it is to be empty. Not that of what uses it.
    pub fn device_version(&self, id: &DeviceId) -> Option<String> {
        let device = self.devices.get(id)?;
        Some(digest(&("device", id, device, self.is_drained(id))))
    }

    /// The version of a volume, and of the lease on it.
    pub fn volume_version(volume: &Volume, lease: Option<LeaseId>) -> String {
        digest(&("volume", volume, lease))
    }

    /// The version of an instance and its leases.
    pub fn instance_version(&self, instance: &Instance) -> String {
        let ids = instance.nics.iter().chain(&instance.disks);
        let leases: Vec<&Lease> = ids.filter_map(|id| self.leases.get(id)).collect();
        digest(&("instance", instance, leases))
    }

    /// The version of a kind of instance.
    pub fn type_version(name: &str, instance_type: &InstanceType) -> String {
        digest(&("instance type", name, instance_type))
    }

    /// The version of an instance's share of the fabric. Not that of what it moves.
    pub fn mchannel_version(&self, instance: InstanceId) -> Option<String> {
        Some(digest(&("mchannel", instance, self.fabric.mchannels.get(&instance)?)))
    }

    /// The version of what the fabric consists of, and of who shares it. Not that of the shares.
    pub fn fabric_version(&self) -> String {
        let Fabric { window_us, sample_us, elements, tenants, .. } = &self.fabric;
        digest(&("fabric", window_us, sample_us, elements, tenants))
    }

    /// Whether a resource is what somebody takes it to be.
    pub(super) fn check_version(&self, expected: &Expected) -> Result<(), Refusal> {
        let (what, name) = match &expected.resource {
            Resource::Host(host) => ("host", self.host_name(*host)),
            Resource::Device(id) => ("device", self.device_name(id)),
            Resource::Volume(name) => ("volume", name.clone()),
            Resource::Instance(name) => ("instance", name.clone()),
            Resource::InstanceType(name) => ("instance type", name.clone()),
            Resource::Mchannel(instance) => ("mchannel of", instance.clone()),
            Resource::Fabric => ("fabric of", "the pod".to_owned()),
        };
        let version = self.version(&expected.resource).ok_or_else(|| Refusal::not_found(what, &name))?;
        if expected.versions.is_empty() || expected.versions.contains(&version) {
            return Ok(());
        }
        let seen = expected.versions.join(" or ");
        let detail = format!(
            "the {what} {name} has changed since you looked: its resourceVersion is {version}, not {seen}. Look at it again, and \
             ask again with that version if you still want the change"
        );
        Err(Refusal::new(RefusalKind::Changed, detail))
    }
}
