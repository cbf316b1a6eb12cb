use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Something that is true or not of a resource now, for programs that wait for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Condition {
    /// Which condition, as a stable word.
    #[serde(rename = "type")]
    pub kind: ConditionKind,
    /// Whether it holds.
    pub status: bool,
    /// In words, what speaks against it; empty where nothing does.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// What can be true of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ConditionKind {
    /// An instance: a VMM can be started. A host: all its daemons beat. A device or volume: it can be used.
    Ready,
    /// An instance: VMMs use all of its devices.
    Connected,
    /// An instance: each of its NICs has another one to go to. A volume: every place where it lies has everything.
    Redundant,
    /// A host or device: something new may be placed there.
    Schedulable,
    /// A volume in groups: it lies where they want it.
    Placed,
}

impl ConditionKind {
    /// The word for it in JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Connected => "connected",
            Self::Redundant => "redundant",
            Self::Schedulable => "schedulable",
            Self::Placed => "placed",
        }
    }
}
