//! Why a daemon cannot take part in the pod.

use std::io;

use cxl_channel::doorbell::DoorbellError;
use cxl_pool::{EndpointId, HostId};

use crate::daemon::LockError;
use crate::liveness::as_process;
use crate::protocol::Incompatible;
use crate::run_directory::RunDirectoryError;

/// A daemon did not get its slot.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The pool was made for fewer hosts.
    #[error("host.id = {}: the pool has slots for hosts 1 to {slots}; use one of them", host.get())]
    NoSlot {
        /// Who wants in.
        host: HostId,
        /// How many hosts fit.
        slots: u16,
    },
    /// On this kernel another process has the slot.
    #[error("{endpoint} runs already as {holder}: stop it first, or give this host an id of its own")]
    AlreadyRuns {
        /// Which slot.
        endpoint: EndpointId,
        /// Who has it.
        holder: String,
    },
    /// On some other host a process has the slot.
    #[error(
        "another host of the pod uses this id: {endpoint} is alive {}; give each host an id of its own",
        as_process(*pid)
    )]
    HostIdInUse {
        /// Which slot.
        endpoint: EndpointId,
        /// The other's process, as seen on its host; none if its hello cannot be read.
        pid: Option<u32>,
    },
    /// The run directory cannot be used.
    #[error(transparent)]
    RunDirectory(#[from] RunDirectoryError),
    /// The lock file cannot be used.
    #[error(transparent)]
    Lock(LockError),
    /// The doorbell cannot be bound.
    #[error(transparent)]
    Doorbell(#[from] DoorbellError),
    /// The handler could not be made; the slot is free again.
    #[error(transparent)]
    Handler(Box<dyn std::error::Error + Send + Sync>),
    /// The system refused a thread or a file descriptor.
    #[error("the system is out of resources")]
    Resources(#[source] io::Error),
}

/// A daemon cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The controller does not want it.
    #[error("the controller refuses {endpoint}: {reason}")]
    Refused {
        /// Who was refused.
        endpoint: EndpointId,
        /// In the controller's words.
        reason: String,
    },
    /// The controller is of a release that this one does not work with.
    #[error("{endpoint} cannot work with the pod's controller: {why}")]
    Incompatible {
        /// Who cannot.
        endpoint: EndpointId,
        /// Whose version is too old.
        why: Incompatible,
    },
}
