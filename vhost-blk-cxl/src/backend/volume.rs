//! A volume and its requests that wait.

use std::collections::VecDeque;
use std::sync::Arc;

use pod_protocol::objects::VolumeObject;

use super::throttle::Throttle;
use crate::counters::Counters;
use crate::message::Request;

/// A volume that is served.
pub(super) struct Volume {
    pub(super) object: VolumeObject,
    pub(super) device: usize,
    /// Where its write-intent log begins on the device, if it has one.
    pub(super) intent_log: Option<u64>,
    pub(super) counters: Arc<Counters>,
    /// Requests of its earlier generation that the device still works on.
    pub(super) draining: usize,
    /// Not begun: its device has no room, it is being drained, or it has had its share. Others do not wait for it.
    pub(super) held: VecDeque<Request>,
    pub(super) throttle: Throttle,
    /// It is in the list of volumes with requests that wait.
    pub(super) is_active: bool,
    /// The first one waits for its share, and was counted.
    pub(super) throttled: bool,
}

impl Volume {
    pub(super) fn new(
        object: VolumeObject,
        device: usize,
        intent_log: Option<u64>,
        counters: Arc<Counters>,
        draining: usize,
    ) -> Self {
        let throttle = Throttle::new(object.qos);
        Self {
            object,
            device,
            intent_log,
            counters,
            draining,
            held: VecDeque::new(),
            throttle,
            is_active: false,
            throttled: false,
        }
    }

    /// When its first request may begin, if it has to wait for that.
    pub(super) fn waits_until(&mut self, now_ns: u64) -> Option<u64> {
        let until = self.throttle.waits_until(now_ns)?;
        if !std::mem::replace(&mut self.throttled, true) {
            self.counters.throttled.add(1);
        }
        Some(until)
    }
}
