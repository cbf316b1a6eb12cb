//! The places where the volume of a disk lies.

use serde::{Deserialize, Serialize};

use super::Route;
use crate::ids::PlaceNumber;

/// A replica of a mirrored volume, as its frontend needs to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaObject {
    /// Its number within the volume.
    pub number: u32,
    /// The SSD that it lies on, as `h2/ssd0`. No two places of a volume lie on one.
    pub ssd: String,
    /// How the owner of the SSD is reached.
    pub route: Route,
    /// Which of the lease's places there: two of them lie with one backend while the volume moves between its SSDs. Since 1.1.
    #[serde(default, skip_serializing_if = "PlaceNumber::is_first")]
    pub place: PlaceNumber,
    /// It has everything that was acknowledged. Others are brought in line, and are never read.
    pub in_sync: bool,
    /// It is known that nothing can be asked of it now.
    pub away: bool,
    /// It is to go: it is not brought in line, and its frontend says when it has let go of it.
    #[serde(default)]
    pub leaving: bool,
}
