use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why an instance's devices are where they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// The instance.
    pub instance: String,
    /// Its NICs and then its disks.
    pub devices: Vec<DeviceExplanation>,
}

/// Why a device of an instance is where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceExplanation {
    /// Its name within the instance.
    pub device: String,
    /// By which rule one is chosen.
    pub rule: String,
    /// What happens if what it uses fails now.
    pub on_failure: String,
    /// Everything it could be on, what it uses first.
    pub candidates: Vec<Candidate>,
}

/// A NIC or an SSD that a device of an instance is on, or could be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Candidate {
    /// Host and name, as `h2/nic0`.
    pub name: String,
    /// What it is to that device now.
    pub part: CandidatePart,
    /// What speaks for it and against it.
    pub notes: Vec<String>,
}

/// What a NIC or SSD is to a device of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CandidatePart {
    /// In use.
    Active,
    /// Takes over.
    Standby,
    /// Could be used.
    Possible,
    /// Cannot be used now.
    Excluded,
}
