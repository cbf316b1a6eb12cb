use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// All labels of an instance, a volume, a host or a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Labels {
    /// Values by name: 32 at most. Names have 1 to 63 letters, digits, `-`, `_`, `.` or `/`; values as many or none, without `/`.
    pub labels: BTreeMap<String, String>,
}
