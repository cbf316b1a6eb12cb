use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Instant;

use cxl_pool::EndpointId;
use pod_protocol::controller::PortWaker;
use pod_protocol::telemetry::Telemetry;
use tokio::sync::{oneshot, watch};

use crate::balance::LoadPicture;
use crate::journal::Journal;
use crate::state::{Command, Refusal};
use crate::view::View;

/// A wish from outside, and where to answer.
pub(super) enum Request {
    Apply { command: Command, reply: oneshot::Sender<Result<(), Refusal>> },
    Stop,
}

/// An endpoint's last telemetry.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When it came.
    pub at: Instant,
    /// What it says.
    pub telemetry: Telemetry,
}

/// What the controller's thread shows to others.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) journal: Journal,
    pub(super) view: watch::Sender<Arc<View>>,
    /// Its end was seen. What is asked before it began waits for it.
    pub(super) stopped: AtomicBool,
    telemetry: Mutex<BTreeMap<EndpointId, Sample>>,
    load: Mutex<LoadPicture>,
}

impl Shared {
    pub(super) fn new(journal: Journal, view: View, load: LoadPicture) -> Self {
        Self {
            journal,
            view: watch::Sender::new(Arc::new(view)),
            stopped: AtomicBool::new(false),
            telemetry: Mutex::default(),
            load: Mutex::new(load),
        }
    }

    pub(super) fn telemetry(&self) -> MutexGuard<'_, BTreeMap<EndpointId, Sample>> {
        // Each sample is put in whole, whoever panicked.
        self.telemetry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn load(&self) -> MutexGuard<'_, LoadPicture> {
        // A picture is put in whole, whoever panicked.
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a command was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The state machine refused it.
    #[error("{0}")]
    Refused(Refusal),
    /// There is no controller any more.
    #[error("the controller is stopping")]
    Stopping,
}

/// How others talk to the controller's thread.
#[derive(Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
    waker: PortWaker,
    shared: Arc<Shared>,
}

impl Handle {
    pub(super) fn new(requests: mpsc::Sender<Request>, waker: PortWaker, shared: Arc<Shared>) -> Self {
        Self { requests, waker, shared }
    }

    /// Has a command carried out; returns once it is committed and shown in the [view](Handle::view).
    pub async fn submit(&self, command: Command) -> Result<(), SubmitError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(Request::Apply { command, reply }).map_err(|_| SubmitError::Stopping)?;
        self.waker.wake();
        match answer.await {
            Ok(result) => result.map_err(SubmitError::Refused),
            Err(_) => Err(SubmitError::Stopping),
        }
    }

    /// Ends the controller's thread.
    pub fn stop(&self) {
        // A thread that ended already needs no telling.
        let _ = self.requests.send(Request::Stop);
        self.waker.wake();
    }

    /// Whether the controller's thread serves, or is about to.
    pub fn is_running(&self) -> bool {
        !self.shared.stopped.load(Ordering::Acquire)
    }

    /// What is known now.
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.shared.view.borrow())
    }

    /// Tells when something else is known.
    pub fn views(&self) -> watch::Receiver<Arc<View>> {
        self.shared.view.subscribe()
    }

    /// Recent events.
    pub fn journal(&self) -> &Journal {
        &self.shared.journal
    }

    /// What passes through NICs, and what is done about it.
    pub fn load(&self) -> LoadPicture {
        self.shared.load().clone()
    }

    /// The last telemetry of every endpoint.
    pub fn telemetry(&self) -> BTreeMap<EndpointId, Sample> {
        self.shared.telemetry().clone()
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}
