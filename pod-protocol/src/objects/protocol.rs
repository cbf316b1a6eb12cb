//! What the whole pod speaks.

use serde::{Deserialize, Serialize};

/// Every endpoint: the version in which to say, or write, what others than the controller read. All of them read it. Since
/// 1.1; without it, 1.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtocolObject {
    /// The lowest minor of all members of the pod.
    pub minor: u16,
}
