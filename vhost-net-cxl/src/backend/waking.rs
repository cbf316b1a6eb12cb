//! When a backend that sleeps looks again at what waits for a NIC.

use std::time::Duration;

use cxl_pool::Memory;
use pod_protocol::worker::{Sources, Token};
use vhost_frontend::pacing::PaceTimer;

use super::Backend;
use super::port::Port;

/// Among the worker's sources; NICs have tokens from zero on.
const TIMER: Token = Token(u64::MAX >> 1);
/// When a NIC is asked again that is full and does not tell when it has room.
const FULL_LOOK: Duration = Duration::from_micros(200);
/// When it is looked again how long packets have waited for a link, or for a NIC that tells. Both are told; this is for what else may happen.
const LATER_LOOK: Duration = Duration::from_millis(100);

/// Wakes the backend for what waits for a NIC.
#[derive(Debug, Default)]
pub(super) enum Waking {
    /// No order has come yet.
    #[default]
    Unwatched,
    By(PaceTimer),
    /// It cannot be woken, and stays awake for as long as something waits.
    Impossible,
}

impl Waking {
    /// Begins to watch, if it does not yet.
    pub(super) fn watch(&mut self, sources: &mut Sources) {
        if !matches!(self, Self::Unwatched) {
            return;
        }
        let timer = PaceTimer::new().and_then(|timer| sources.add(&timer, TIMER).map(|()| timer));
        *self = match timer {
            Ok(timer) => Self::By(timer),
            Err(error) => {
                tracing::warn!(%error, "cannot watch a timer: the backend stays awake while packets wait for a NIC");
                Self::Impossible
            }
        };
    }

    /// Something became readable.
    pub(super) fn ready(&mut self, token: Token) {
        if let Self::By(timer) = self
            && token == TIMER
        {
            timer.fired();
        }
    }

    fn arm(&mut self, wait: Duration) -> bool {
        let Self::By(timer) = self else { return false };
        timer.arm(wait);
        true
    }
}

impl Port {
    /// After how long it has to be looked at, if something waits for its NIC.
    fn waits_for(&mut self) -> Option<Duration> {
        if self.backlog.is_empty() && !self.announces() {
            return None;
        }
        let is_told = !self.has_wire() || self.nic.tells_of_room();
        Some(if is_told { LATER_LOOK } else { FULL_LOOK })
    }
}

impl<M: Memory> Backend<M> {
    /// Sees to it that the backend is woken for what waits for its NICs. False if it cannot be.
    pub(super) fn is_woken_for_what_waits(&mut self) -> bool {
        let wait = self.ports.iter_mut().filter_map(Port::waits_for).min();
        wait.is_none_or(|wait| self.waking.arm(wait))
    }
}
