//! Who takes part in a pod: hosts, the daemons on them, controller replicas.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A host of the pod, from 1. It is fixed in the host's configuration and names its slots in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HostId(u16);

impl HostId {
    /// The host with this number.
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// The host's number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "h{}", self.0)
    }
}

/// What a daemon is on its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Serves virtio-net to the host's VMs.
    NetFrontend,
    /// Serves the host's NICs to the pod.
    NetBackend,
    /// Serves virtio-blk to the host's VMs.
    BlkFrontend,
    /// Serves the host's SSDs to the pod.
    BlkBackend,
    /// Looks after the host itself.
    Agent,
}

impl Role {
    /// Every role, in the order of its slot.
    pub const ALL: [Self; 5] =
        [Self::NetFrontend, Self::NetBackend, Self::BlkFrontend, Self::BlkBackend, Self::Agent];

    /// Which of a host's role slots is this role's.
    pub const fn slot(self) -> u16 {
        match self {
            Self::NetFrontend => 0,
            Self::NetBackend => 1,
            Self::BlkFrontend => 2,
            Self::BlkBackend => 3,
            Self::Agent => 4,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::NetFrontend => "net-frontend",
            Self::NetBackend => "net-backend",
            Self::BlkFrontend => "blk-frontend",
            Self::BlkBackend => "blk-backend",
            Self::Agent => "agent",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// One daemon's presence in the pod. Written `h2/net-backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EndpointId {
    /// The host the daemon runs on.
    pub host: HostId,
    /// What it is there.
    pub role: Role,
}

impl EndpointId {
    /// The endpoint of this role on this host.
    pub const fn new(host: HostId, role: Role) -> Self {
        Self { host, role }
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.host, self.role)
    }
}

/// A text that names no endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no endpoint: write h<number>/<role>, such as h2/net-backend")]
pub struct ParseEndpointError(String);

impl FromStr for EndpointId {
    type Err = ParseEndpointError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (host, role) = text.strip_prefix('h')?.split_once('/')?;
            // `parse` alone would let `+2` through.
            let number = host.bytes().all(|byte| byte.is_ascii_digit()).then(|| host.parse().ok())??;
            let role = Role::ALL.into_iter().find(|known| known.name() == role)?;
            (number > 0).then_some(Self { host: HostId(number), role })
        };
        parse().ok_or_else(|| ParseEndpointError(text.to_owned()))
    }
}

/// A replica of the controller, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReplicaId(u16);

impl ReplicaId {
    /// The replica with this number.
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// The replica's number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// Which life of a channel: it grows each time the channel is set up again, and is never 0 while the
/// channel lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(u32);

impl Generation {
    /// The generation with this number.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The generation's number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The generation after this one. 0 is left out: it says that there is none.
    #[must_use]
    pub const fn next(self) -> Self {
        match self.0.wrapping_add(1) {
            0 => Self(1),
            next => Self(next),
        }
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_read_back_what_they_display() {
        for role in Role::ALL {
            let endpoint = EndpointId::new(HostId::new(12), role);
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
            assert_eq!(serde_json::to_value(role).unwrap(), role.to_string());
        }
    }

    #[test]
    fn texts_that_name_no_endpoint_are_refused() {
        for text in ["", "h2", "2/agent", "h0/agent", "h+2/agent", "h2/", "h70000/agent", "h2/agent/"] {
            assert!(text.parse::<EndpointId>().is_err(), "{text}");
        }
    }

    #[test]
    fn role_slots_follow_the_order_of_all() {
        for (slot, role) in Role::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(role.slot()), slot);
        }
    }

    #[test]
    fn generations_never_become_zero() {
        assert_eq!(Generation::new(u32::MAX).next(), Generation::new(1));
    }
}
