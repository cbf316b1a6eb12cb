//! What a [`ControllerPort`](super::ControllerPort) tells its controller.

use std::io;

use cxl_channel::RequestId;
use cxl_channel::doorbell::DoorbellError;
use cxl_pool::{EndpointId, Generation};

use crate::answer::Refusal;
use crate::daemon::LockError;
use crate::liveness::{Usurper, as_process};
use crate::protocol::Incompatible;
use crate::reports::{Join, Report};
use crate::run_directory::RunDirectoryError;

/// Names a command that was sent, until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId(pub(super) u64);

/// Names a join that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinRequest {
    pub(super) endpoint: EndpointId,
    pub(super) generation: Generation,
    pub(super) id: RequestId,
}

/// Why a command did not do what it was to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandFailure {
    /// The endpoint says why.
    #[error("{0}")]
    Refused(String),
    /// The endpoint does not know such a command, and will not know it next time.
    #[error("{0}")]
    NotUnderstood(String),
    /// It may have been obeyed or not: nobody answered in time.
    #[error("no answer in time")]
    Unanswered,
    /// It may have been obeyed or not: there is no connection to the endpoint (any more).
    #[error("not connected")]
    Disconnected,
    /// It was not sent.
    #[error("not sent: {0}")]
    NotSent(String),
}

impl From<Refusal> for CommandFailure {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Refused(reason) => Self::Refused(reason),
            Refusal::NotUnderstood { not_understood } => Self::NotUnderstood(not_understood),
        }
    }
}

/// What happened at an endpoint.
///
/// After [`ControllerPort::open`](super::ControllerPort::open) there is one of [`PortEvent::Appeared`],
/// [`PortEvent::Silent`] and [`PortEvent::Gone`] for every slot of the pool, so that a controller learns what became of
/// the endpoints that it remembers.
///
/// A port of another kind, such as a simulated one, names its commands and joins in its own way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortEvent<Ticket = CommandId, Request = JoinRequest> {
    /// It lives, and waits for a [`grant`](super::ControllerPort::grant). With another incarnation than before it is
    /// a new process that holds nothing.
    Appeared {
        /// Who.
        endpoint: EndpointId,
        /// Which life of it.
        incarnation: u64,
        /// Its process, as seen on its host.
        pid: u32,
    },
    /// It lives, and gets no grant: there is no version that it and this controller speak.
    Incompatible {
        /// Who.
        endpoint: EndpointId,
        /// Which side is to be upgraded first.
        why: Incompatible,
    },
    /// It was granted and says what it has. [`Answer`](super::ControllerPort::answer) it, then send its objects and
    /// [`Synced`](crate::commands::Command::Synced).
    Joined {
        /// Who.
        endpoint: EndpointId,
        /// For the answer.
        request: Request,
        /// What it says.
        join: Join,
    },
    /// It says something.
    Report {
        /// Who.
        endpoint: EndpointId,
        /// What.
        report: Report,
    },
    /// What became of a command. Every command has one of these.
    Answered {
        /// Who.
        endpoint: EndpointId,
        /// Which command.
        command: Ticket,
        /// How it went.
        result: Result<(), CommandFailure>,
    },
    /// Its heartbeat stands still, or its hello cannot be read, so that nobody can tell whose heartbeat it is. It may live all the
    /// same. Once per silence.
    Silent {
        /// Who.
        endpoint: EndpointId,
        /// For how long.
        for_ms: u64,
    },
    /// Its heartbeat moves again; it is the same process.
    Back {
        /// Who.
        endpoint: EndpointId,
    },
    /// It left in order, or a new process took its place ([`PortEvent::Appeared`] follows), or nobody was there when
    /// the port was opened. An orderly leaver holds nothing any more. Whoever cannot be read has not left: it is
    /// [silent](PortEvent::Silent).
    Gone {
        /// Who.
        endpoint: EndpointId,
    },
}

impl<Ticket, Request> PortEvent<Ticket, Request> {
    /// Where it happened.
    pub fn endpoint(&self) -> EndpointId {
        match self {
            Self::Appeared { endpoint, .. }
            | Self::Incompatible { endpoint, .. }
            | Self::Joined { endpoint, .. }
            | Self::Report { endpoint, .. }
            | Self::Answered { endpoint, .. }
            | Self::Silent { endpoint, .. }
            | Self::Back { endpoint }
            | Self::Gone { endpoint } => *endpoint,
        }
    }
}

/// What a port cannot do.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// On this kernel another process is the controller.
    #[error("a controller runs already as {holder}: stop it first, or use another run directory")]
    AlreadyRuns {
        /// Who.
        holder: String,
    },
    /// On some other host a process is the controller.
    #[error("another host runs a controller of this pod, {}: stop it first", as_process(*pid))]
    AliveElsewhere {
        /// The other's process, as seen on its host; none if its hello cannot be read.
        pid: Option<u32>,
    },
    /// Another process is the controller now.
    #[error(
        "this controller stops: {0}. A pod has one, or several that are replicas with numbers of their own"
    )]
    Usurped(Usurper),
    /// The run directory cannot be used.
    #[error(transparent)]
    RunDirectory(#[from] RunDirectoryError),
    /// The lock file cannot be used.
    #[error(transparent)]
    Lock(LockError),
    /// The doorbell cannot be bound.
    #[error(transparent)]
    Doorbell(#[from] DoorbellError),
    /// The system refused a file descriptor.
    #[error("the system is out of resources")]
    Resources(#[source] io::Error),
    /// The pool has no slot for this endpoint.
    #[error("the pool has no slot for {0}")]
    NoSlot(EndpointId),
    /// Nobody is there to be granted anything.
    #[error("{0} is not there")]
    Absent(EndpointId),
    /// There is no version that both speak.
    #[error("{endpoint} gets no grant: {why}")]
    Incompatible {
        /// Who.
        endpoint: EndpointId,
        /// Which side is to be upgraded first.
        why: Incompatible,
    },
    /// It was fenced and must start anew before it is granted anything.
    #[error("this life of {0} was fenced: it gets no further grant")]
    Fenced(EndpointId),
}
