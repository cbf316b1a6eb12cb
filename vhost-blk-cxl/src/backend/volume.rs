//! A volume and its requests that wait.

use std::sync::Arc;

use pod_protocol::objects::VolumeObject;

use super::in_flight::Earlier;
use super::throttle::Throttle;
use super::waiting::Waiting;
use crate::counters::Counters;
use crate::message::Request;
use crate::ssd::Outcome;

/// What a volume's write-intent log is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LogTrust {
    /// Whoever serves the volume next may rely on what it says.
    Kept,
    /// Somebody writes without marks: it is being cleared, and what would be written waits.
    BeingCleared,
    /// It says nothing.
    Cleared,
    /// It could not be cleared: a request fails, and the next one tries again.
    NotCleared,
}

/// A volume that is served.
pub(super) struct Volume {
    pub(super) object: VolumeObject,
    pub(super) device: usize,
    /// Where its write-intent log begins on the device, if it has one.
    pub(super) intent_log: Option<u64>,
    pub(super) log_trust: LogTrust,
    pub(super) counters: Arc<Counters>,
    /// Requests that the device works on.
    pub(super) in_flight: u32,
    /// What has to end before its next request begins.
    pub(super) waits_for: Option<Earlier>,
    /// What has not begun.
    pub(super) held: Waiting,
    pub(super) throttle: Throttle,
    /// It is among those that have turns at its device.
    pub(super) is_active: bool,
    /// The guest's first one waits for its share, and was counted.
    pub(super) throttled: bool,
}

impl Volume {
    pub(super) fn new(
        object: VolumeObject,
        device: usize,
        intent_log: Option<u64>,
        counters: Arc<Counters>,
        (in_flight, waits_for): (usize, Option<Earlier>),
    ) -> Self {
        let throttle = Throttle::new(object.qos);
        Self {
            object,
            device,
            intent_log,
            log_trust: LogTrust::Kept,
            counters,
            in_flight: u32::try_from(in_flight).unwrap_or(u32::MAX),
            waits_for,
            held: Waiting::default(),
            throttle,
            is_active: false,
            throttled: false,
        }
    }

    /// Where its write-intent log begins, if that must be cleared before the request begins: it is the first write that is not
    /// marked there, and whoever serves the volume next would take the log's word for what was written.
    pub(super) fn log_to_clear(&self, request: &Request) -> Option<u64> {
        let unmarked = request.operation.writes() && !request.intent_log && !request.marked;
        self.intent_log.filter(|_| unmarked && self.log_trust == LogTrust::Kept)
    }

    /// The log was cleared, or could not be.
    pub(super) fn log_cleared(&mut self, request: &Request, outcome: Outcome) {
        if request.holder.generation == self.object.generation {
            let cleared = outcome == Outcome::Done;
            self.log_trust = if cleared { LogTrust::Cleared } else { LogTrust::NotCleared };
        }
    }

    /// When the guest's first request may begin, if it has to wait for that.
    pub(super) fn waits_until(&mut self, now_ns: u64) -> Option<u64> {
        let until = self.throttle.waits_until(now_ns)?;
        if !std::mem::replace(&mut self.throttled, true) {
            self.counters.throttled.add(1);
        }
        Some(until)
    }

    /// For how many milliseconds the guest's next request will wait for its share.
    pub(super) fn throttled_ms(&self, now_ns: impl FnOnce() -> u64) -> u32 {
        if !self.throttle.needs_clock() {
            return 0;
        }
        let now_ns = now_ns();
        let until_ns = self.throttle.waits_until(now_ns).unwrap_or(now_ns);
        u32::try_from((until_ns - now_ns).div_ceil(1_000_000)).unwrap_or(u32::MAX)
    }
}
