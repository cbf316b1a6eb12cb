use serde::{Deserialize, Serialize};

/// A daemon's presence in the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Which life of the daemon.
    pub incarnation: u64,
    /// Whether it is there.
    pub presence: Presence,
    /// Program and version.
    pub software: String,
    /// Its process on its host.
    pub pid: u32,
    /// Storage backends: it was away for so long that guests are not made to wait for it any more.
    #[serde(default)]
    pub given_up: bool,
    /// For how long it may act without having looked at its fence, in ms, if it has said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence_ms: Option<u64>,
}

/// Whether an endpoint is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Presence {
    /// It beats.
    Joined,
    /// It stopped beating. It may be slow or dead; nothing has been taken from it.
    Silent,
    /// Its fence is up, but it may not have looked yet.
    Fencing,
    /// It has seen its fence, or has had to by now.
    Fenced,
    /// It left by itself.
    Gone,
}

impl Presence {
    /// Whether this life of the daemon is certain to do nothing any more.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Fenced | Self::Gone)
    }
}
