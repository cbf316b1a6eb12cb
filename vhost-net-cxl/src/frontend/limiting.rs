//! How much a guest sends, where that is limited, and how much it receives from several NICs at the same time.

use std::time::Instant;

use cxl_pool::Memory;
use pod_protocol::objects::PortObject;

use super::budget::{Budget, Taken};
use super::port::Port;
use super::transmit::Scratch;
use crate::message::NetMessage;
use crate::rate_limit::RateLimiter;
use crate::vnet_header::{HEADER_BYTES, VnetHeader, WireCost};

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

    /// Counts a frame that it has received against that.
    #[inline]
    pub(super) fn charge_received<M: Memory>(&mut self, memory: &M, first: &NetMessage, frame_bytes: u32) {
        if let Some(limiter) = &mut self.receive_limit {
            let mut raw = [0; HEADER_BYTES];
            memory.read(first.line.bytes(), &mut raw);
            limiter.charge(VnetHeader::parse(raw).wire_cost(frame_bytes));
        }
    }

    /// Takes packets up to the rate that the guest is allowed. Once that is used up, it is asked again when the timer
    /// says so.
    pub(super) fn take_within_limit<M: Memory>(
        &mut self,
        memory: &M,
        room: usize,
        scratch: &mut Scratch,
    ) -> Taken {
        let Some(limiter) = &mut self.limiter else { return Taken::default() };
        limiter.refill(Instant::now());
        let allowed = limiter.allowed();
        let cost = WireCost { frames: limiter.allowed_frames(), bytes: limiter.allowed_bytes() };
        let taken = self.take_packets(memory, Budget::within(room.min(allowed), cost), scratch);
        if let Some(limiter) = &mut self.limiter {
            limiter.charge(taken.cost);
            let used_up = limiter.allowed() == 0;
            if used_up && !self.throttled {
                self.counters.rate_waits.add(1);
            }
            self.throttled = used_up;
            self.count_held_back(taken.packets, used_up);
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
