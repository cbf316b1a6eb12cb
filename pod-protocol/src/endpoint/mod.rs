//! A daemon's presence in the pod: it joins, holds what the controller gives it, reports, and stops when fenced.

mod control;
mod error;
mod handler;
mod ledger;
mod presence;
mod reporter;
mod scrubbing;
mod session;
mod version;

use std::convert::Infallible;
use std::error::Error;

use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{EndpointId, Hello, Layout, Memory, Pool, Role};

use self::control::ControlThread;
pub use self::error::{JoinError, RunError};
pub use self::handler::Handler;
use self::presence::{Presence, Rounds};
pub use self::reporter::Reporter;
use crate::config::{HostConfig, Wakeup};
use crate::daemon::{Exit, LockError, LockFile, StopSignal};
use crate::fence::Fence;
use crate::liveness::{Alive, new_incarnation, predecessor};
use crate::reports::Join;

/// A daemon that has joined the pod. Dropping it leaves: first everything held is dropped with the handler, then the
/// slot is free.
pub struct Endpoint<M: Memory> {
    // In this order: what is held goes before the slot that says so.
    control: ControlThread<M>,
    presence: Presence<M>,
}

impl<M: Memory> Endpoint<M> {
    /// Takes the slot of this host and role in the pool. Refused while another daemon has it.
    ///
    /// The handler is made once the slot is ours, so it may touch devices and sockets that only one daemon may have.
    pub fn join(
        pool: &Pool,
        memory: M,
        config: &HostConfig,
        role: Role,
        join: Join,
        make_handler: impl FnOnce(Reporter, Fence) -> Box<dyn Handler>,
    ) -> Result<Self, JoinError> {
        Self::try_join(pool, memory, config, role, join, |reporter, fence| {
            Ok::<_, Infallible>(make_handler(reporter, fence))
        })
    }

    /// As [`Endpoint::join`], for a handler that may fail to be made: then nothing of the endpoint was seen in the pod.
    pub fn try_join<E: Into<Box<dyn Error + Send + Sync>>>(
        pool: &Pool,
        memory: M,
        config: &HostConfig,
        role: Role,
        join: Join,
        make_handler: impl FnOnce(Reporter, Fence) -> Result<Box<dyn Handler>, E>,
    ) -> Result<Self, JoinError> {
        let mut endpoint = Self::join_layout(pool.layout(), memory, config, role, join, make_handler)?;
        endpoint.control.watch_guests(pool.clone());
        Ok(endpoint)
    }

    /// As [`Endpoint::try_join`], over memory without a pool file.
    pub fn join_layout<E: Into<Box<dyn Error + Send + Sync>>>(
        layout: &Layout,
        memory: M,
        config: &HostConfig,
        role: Role,
        mut join: Join,
        make_handler: impl FnOnce(Reporter, Fence) -> Result<Box<dyn Handler>, E>,
    ) -> Result<Self, JoinError> {
        join.fence_ms = Some(config.run.fence_ms);
        let endpoint = EndpointId::new(config.host.id, role);
        if !layout.has(endpoint) {
            let slots = layout.endpoints().map(|endpoint| endpoint.host.get()).max().unwrap_or(0);
            return Err(JoinError::NoSlot { host: config.host.id, slots });
        }
        let run = config.run_directory();
        run.prepare()?;
        let lock = LockFile::acquire(&run.endpoint_lock(endpoint)).map_err(|error| match error {
            LockError::Held { holder, .. } => JoinError::AlreadyRuns { endpoint, holder },
            LockError::Io { .. } => JoinError::Lock(error),
        })?;
        predecessor::<Hello, M>(&memory, (layout.hello(endpoint), layout.heartbeat(endpoint)))
            .map_err(|Alive { pid }| JoinError::HostIdInUse { endpoint, pid })?;
        let doorbell = match config.run.wakeup {
            Wakeup::Socket => Some(DoorbellListener::bind(&run.control_doorbell(endpoint))?),
            Wakeup::Poll => None,
        };
        let reporter = Reporter::new().map_err(JoinError::Resources)?;
        let lines = layout.replicas().map(|replica| layout.fence(replica, endpoint));
        let incarnation = new_incarnation();
        let fence =
            Fence::new(memory.clone(), lines, config.run.fence(), (incarnation, layout.hello(endpoint)));
        let handler = make_handler(reporter.clone(), fence.clone())
            .map_err(|error| JoinError::Handler(error.into()))?;
        let rounds = Rounds::new();
        let presence = Presence::begin(
            memory.clone(),
            layout,
            endpoint,
            lock,
            fence.clone(),
            reporter.clone(),
            (incarnation, rounds.clone(), config.run.protocol, config.run.worker_timeout()),
        )
        .map_err(JoinError::Resources)?;
        tracing::info!(%endpoint, incarnation = format_args!("{incarnation:016x}"), "took its slot in the pool");
        let control = ControlThread::new(control::Parts {
            memory,
            layout: layout.clone(),
            endpoint,
            incarnation,
            run,
            doorbell,
            join,
            handler,
            reporter,
            fence,
            rounds,
            protocol: config.run.protocol,
        });
        Ok(Self { control, presence })
    }

    /// Which one it is.
    pub fn id(&self) -> EndpointId {
        self.control.endpoint()
    }

    /// Which life of this endpoint it is.
    pub fn incarnation(&self) -> u64 {
        self.presence.incarnation
    }

    /// Tells the supervisor that the daemon is ready, then serves the controller until told to stop or fenced. A
    /// missing controller is waited for; one that goes away is missed only for new things.
    pub fn run_until(mut self, stop: &StopSignal) -> Result<Exit, RunError> {
        crate::daemon::notify_ready();
        self.control.run_until(stop)
    }
}

#[cfg(test)]
mod tests;
