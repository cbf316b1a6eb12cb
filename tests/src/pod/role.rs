use std::fmt;

use super::HostPlan;

/// What a daemon does on its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Network, for the host's VMs.
    NetFrontend,
    /// Network, for the host's NICs.
    NetBackend,
    /// Storage, for the host's VMs.
    BlkFrontend,
    /// Storage, for the host's SSDs.
    BlkBackend,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::NetFrontend, Self::NetBackend, Self::BlkFrontend, Self::BlkBackend];

    /// Those that a host needs.
    pub(super) fn of(host: &HostPlan) -> Vec<Self> {
        let needed = |role: &Self| match role {
            Self::NetFrontend | Self::BlkFrontend => host.runs_vms,
            Self::NetBackend => !host.nics.is_empty(),
            Self::BlkBackend => !host.ssds.is_empty(),
        };
        Self::ALL.into_iter().filter(needed).collect()
    }

    /// The program.
    pub fn binary(self) -> &'static str {
        match self {
            Self::NetFrontend | Self::NetBackend => "vhost-net-cxl",
            Self::BlkFrontend | Self::BlkBackend => "vhost-blk-cxl",
        }
    }

    /// The program's subcommand.
    pub fn side(self) -> &'static str {
        match self {
            Self::NetFrontend | Self::BlkFrontend => "frontend",
            Self::NetBackend | Self::BlkBackend => "backend",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NetFrontend => "net-frontend",
            Self::NetBackend => "net-backend",
            Self::BlkFrontend => "blk-frontend",
            Self::BlkBackend => "blk-backend",
        })
    }
}
