//! How much a guest sends, where that is limited, and how much it receives from several NICs at the same time.

use std::time::Instant;

use cxl_pool::Memory;
use pod_protocol::objects::PortObject;

use super::port::Port;
use super::transmit::{Budget, Scratch};
use crate::rate_limit::RateLimiter;

/// Whether a guest has several NICs at the same time, whose backends know nothing of each other: each lets as much pass as the guest may
/// receive in all, for a flow is on one of them. What all of them let pass is judged here.
fn has_several_nics(object: &PortObject) -> bool {
    object.rails.len() > 1
}

/// How much a guest may receive from all of its NICs, if that is judged here.
pub(super) fn receive_limit(object: &PortObject) -> Option<RateLimiter> {
    // What has come meanwhile is looked at together: a shorter burst would be cut.
    let limiter = || RateLimiter::of_sender(&object.policy.receive, Instant::now());
    has_several_nics(object).then(limiter).flatten()
}

/// Whether that is limited otherwise than it was.
pub(super) fn receives_alike(old: &PortObject, new: &PortObject) -> bool {
    old.policy.receive == new.policy.receive && has_several_nics(old) == has_several_nics(new)
}

impl Port {
    /// Whether the guest may receive one more packet.
    #[inline]
    pub(super) fn may_receive(&mut self, now: &mut Option<Instant>) -> bool {
        self.receive_limit.as_mut().is_none_or(|limiter| {
            // One look at the clock per look at a channel.
            limiter.refill(*now.get_or_insert_with(Instant::now));
            limiter.allowed() > 0
        })
    }

    /// Takes packets up to the rate that the guest is allowed. Once that is used up, it is asked again when the timer
    /// says so.
    pub(super) fn take_within_limit<M: Memory>(
        &mut self,
        memory: &M,
        room: usize,
        scratch: &mut Scratch,
    ) -> usize {
        let Some(limiter) = &mut self.limiter else { return 0 };
        limiter.refill(Instant::now());
        let (allowed, bytes) = (limiter.allowed(), limiter.allowed_bytes());
        let before = (self.counters.tx_packets.get(), self.counters.tx_bytes.get());
        let taken = self.take_packets(memory, Budget { packets: room.min(allowed), bytes }, scratch);
        let packets = self.counters.tx_packets.get().wrapping_sub(before.0);
        let bytes = self.counters.tx_bytes.get().wrapping_sub(before.1);
        if let Some(limiter) = &mut self.limiter {
            limiter.charge(packets, bytes);
            let used_up = limiter.allowed() == 0;
            if used_up && !self.throttled {
                self.counters.rate_waits.add(1);
            }
            self.throttled = used_up;
            self.count_held_back(taken, used_up);
        }
        taken
    }

    /// Counts the packets in the queues that have to wait for the guest's rate, each once. `taken` were taken since the last
    /// time, the longest waiting ones.
    fn count_held_back(&mut self, taken: usize, used_up: bool) {
        self.held_back = self.held_back.saturating_sub(taken);
        if used_up {
            let queues = self.rings.iter().skip(1).step_by(2).flatten().filter(|ring| ring.is_enabled());
            let waiting: usize = queues.map(vhost_frontend::Ring::waiting).sum();
            self.counters.throttled.add(waiting.saturating_sub(self.held_back) as u64);
            self.held_back = waiting;
        }
    }
}
