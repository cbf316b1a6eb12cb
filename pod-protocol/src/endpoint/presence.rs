//! An endpoint's place in the pool: its lock, its hello and its heartbeat.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cxl_pool::{EndpointId, Hello, Layout, LineOffset, Memory, Record};

use super::reporter::Reporter;
use crate::daemon::{Exit, LockFile};
use crate::fence::Fence;
use crate::liveness::{self, Usurper, read_own_beat, write_beat};
use crate::protocol::Protocol;
use crate::worker::TurnWatch;

/// How often an endpoint beats and looks at its fence: at least every 10 ms, late wake-ups included.
const BEAT_EVERY: Duration = Duration::from_millis(8);

/// A control thread that has not come round for this long is stuck, and a daemon that cannot obey must not seem alive.
const STUCK_AFTER: Duration = Duration::from_secs(30);

/// When the control thread last came round, or was done with something on the way.
#[derive(Clone, Debug)]
pub(super) struct Rounds(Arc<(Instant, AtomicI64)>);

impl Rounds {
    pub(super) fn new() -> Self {
        Self(Arc::new((Instant::now(), AtomicI64::new(0))))
    }

    pub(super) fn note(&self) {
        self.0.1.store(self.now_ms(), Ordering::Relaxed);
    }

    pub(super) fn stuck(&self) -> bool {
        let since_ms = self.now_ms().saturating_sub(self.0.1.load(Ordering::Relaxed));
        // It may have been noted since the clock was read.
        u64::try_from(since_ms).is_ok_and(|since_ms| Duration::from_millis(since_ms) > STUCK_AFTER)
    }

    /// As if nothing had been noted for longer than is forgiven.
    #[cfg(test)]
    pub(super) fn let_time_pass(&self) {
        let long_ms = i64::try_from(STUCK_AFTER.as_millis()).expect("some seconds") + 1000;
        self.0.1.store(self.now_ms() - long_ms, Ordering::Relaxed);
    }

    fn now_ms(&self) -> i64 {
        i64::try_from(self.0.0.elapsed().as_millis()).unwrap_or(i64::MAX)
    }
}

/// While it lives the endpoint is in the pod. Dropping it takes the hello away, which tells the controller that nothing
/// is held here any more: drop whatever holds something first.
#[derive(Debug)]
pub(super) struct Presence<M: Memory> {
    pub(super) incarnation: u64,
    memory: M,
    hello: LineOffset,
    leaving: Arc<AtomicBool>,
    pulse: Option<JoinHandle<()>>,
    _lock: LockFile,
}

impl<M: Memory> Presence<M> {
    /// Writes the hello and begins to beat.
    pub(super) fn begin(
        memory: M,
        layout: &Layout,
        endpoint: EndpointId,
        lock: LockFile,
        fence: Fence,
        reporter: Reporter,
        (incarnation, rounds, protocol, worker_timeout): (u64, Rounds, Protocol, Option<Duration>),
    ) -> std::io::Result<Self> {
        let hello = layout.hello(endpoint);
        let heartbeat = layout.heartbeat(endpoint);
        let leaving = Arc::new(AtomicBool::new(false));
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Hello {
            incarnation,
            pid: std::process::id(),
            protocol: protocol.into(),
            started_unix_ms: u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
        }
        .publish(&memory, hello);
        fence.announced();
        let mut presence = Self {
            incarnation,
            memory: memory.clone(),
            hello,
            leaving: Arc::clone(&leaving),
            pulse: None,
            _lock: lock,
        };
        let pulse = move || {
            let mut beat = read_own_beat(&memory, heartbeat);
            let mut turns = TurnWatch::new(fence.workers().clone(), worker_timeout, Instant::now());
            let mut over = false;
            while !leaving.load(Ordering::Acquire) {
                if fence.look().is_err() || fence.has_to_hear() {
                    reporter.wake();
                }
                if !over && let Some(worker) = turns.look(Instant::now()) {
                    over = true;
                    end_stuck(endpoint, &worker);
                }
                // A slot that is somebody else's is not kept alive. Where its hello is just not there any more, nobody else is to take
                // it before what is held was let go.
                let anothers = matches!(fence.usurper(), Some(Usurper::Process(_)));
                if !anothers && !over && !rounds.stuck() {
                    beat = beat.wrapping_add(1);
                    write_beat(&memory, heartbeat, beat);
                }
                thread::park_timeout(BEAT_EVERY);
            }
        };
        presence.pulse = Some(thread::Builder::new().name("pulse".into()).spawn(pulse)?);
        Ok(presence)
    }
}

/// Ends the process, since nobody can join a thread that does not come round. Whoever waits for it in vain, and the controller, see a
/// daemon that died; and a supervisor starts it again.
fn end_stuck(endpoint: EndpointId, worker: &str) {
    tracing::error!(
        %endpoint, worker,
        "this daemon ends, to be started again: its worker has not come round for as long as worker-timeout-ms says. It waits in a \
         driver, or goes in circles"
    );
    // There are other tests in a test's process: what is over there only beats no more.
    if cfg!(not(test)) {
        std::process::exit(Exit::Again.status().into());
    }
}

impl<M: Memory> Drop for Presence<M> {
    fn drop(&mut self) {
        self.leaving.store(true, Ordering::Release);
        if let Some(pulse) = self.pulse.take() {
            pulse.thread().unpark();
            // Its panic was reported by its thread already.
            let _ = pulse.join();
        }
        liveness::leave::<Hello, M>(&self.memory, self.hello, self.incarnation);
    }
}
