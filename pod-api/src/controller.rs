use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The header that says in an answer that what daemons measure is missing in it, and which controller knows it: only whoever leads
/// hears daemons, and did not answer whoever was asked.
pub const UNMEASURED: &str = "wadi-unmeasured";

/// The controllers of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ControllerList {
    /// Each of them, by number.
    pub controllers: Vec<Controller>,
}

/// One of the controllers of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Controller {
    /// Its number. It has this slot for controllers of the pool, unless it runs outside.
    pub replica: u16,
    /// Whether it decides, as far as the one knows that answers. The others follow it.
    pub leads: bool,
    /// Whether it is the one that answers.
    pub answers: bool,
    /// Whether it runs outside of the pod: it votes, and never leads.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub outside: bool,
    /// How many changes it has yet to get; only the one that leads knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub behind_changes: Option<u64>,
    /// The version of the protocol that it speaks, or spoke when it was there last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
}
