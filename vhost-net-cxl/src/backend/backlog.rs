//! Packets that wait for a NIC which is slower than its instances, and who comes next.
//!
//! Each instance has a queue of its own: in it, packets keep their order. Those who have had less than the minimum that they are
//! promised go first; of what is left each has bytes in proportion to its priority ([`Turns`]). A few packets are chosen ahead, as
//! many as a NIC takes at once: their order is settled.

use std::collections::VecDeque;
use std::time::Instant;

use pod_protocol::objects::{Priority, RateLimit};
use pod_protocol::turns::Turns;

use super::registration::RegistrationIndex;
use super::wire::Outgoing;
use crate::nic::BATCH_FRAMES;
use crate::rate_limit::RateLimiter;

/// Packets of one instance that may wait: more than its frontend can have under way, and what it sends again after a move.
const QUEUE_PACKETS_MAX: usize = 2048;
/// Storage for so many is set aside; more than that wait seldom.
const QUEUE_PACKETS_USUAL: usize = 1024;
/// Packets that are chosen ahead.
const CHOSEN_PACKETS: usize = BATCH_FRAMES;
/// Their bytes, but for the last one: large frames are not chosen far ahead, for what is promised would wait for them.
const CHOSEN_BYTES: u64 = 256 << 10;
/// What an instance of the usual priority may send per round: two frames of the usual length, or many small ones.
const QUANTUM_BYTES: u32 = 3 << 10;

/// What waits of one instance.
#[derive(Debug, Default)]
struct Queue {
    packets: VecDeque<Outgoing>,
    /// What is promised to it.
    minimum: Option<RateLimiter>,
    /// What that was made from.
    promise: RateLimit,
    priority: Priority,
    /// It has its turn, or waits for it.
    queued: bool,
}

/// What waits for one NIC.
#[derive(Debug)]
pub(super) struct Backlog {
    /// By registration, as far as they were admitted.
    queues: Vec<Queue>,
    /// Those whose queues hold packets, or did when they had their last turn.
    turns: Turns<RegistrationIndex>,
    chosen: VecDeque<Outgoing>,
    chosen_bytes: u64,
    packets: usize,
    /// How many queues have a promise.
    promises: usize,
}

/// One without storage, to stand in for another while that is in use.
impl Default for Backlog {
    fn default() -> Self {
        Self {
            queues: Vec::new(),
            turns: Turns::new(QUANTUM_BYTES),
            chosen: VecDeque::new(),
            chosen_bytes: 0,
            packets: 0,
            promises: 0,
        }
    }
}

impl Backlog {
    pub(super) fn new() -> Self {
        Self { chosen: VecDeque::with_capacity(CHOSEN_PACKETS), ..Self::default() }
    }

    /// Makes room for a registration, and promises it what its policy says; the rest is shared by priorities.
    pub(super) fn admit(
        &mut self,
        index: RegistrationIndex,
        (promise, priority): (&RateLimit, Priority),
        now: Instant,
    ) {
        if self.queues.len() <= index.get() {
            self.queues.resize_with(index.get() + 1, Queue::default);
            self.turns.reserve(self.queues.len());
        }
        let queue = &mut self.queues[index.get()];
        if queue.priority != priority {
            queue.priority = priority;
            self.turns.set_priority(index, priority);
        }
        if queue.packets.capacity() < QUEUE_PACKETS_USUAL {
            queue.packets.reserve_exact(QUEUE_PACKETS_USUAL);
        }
        if queue.promise != *promise {
            queue.promise = *promise;
            queue.minimum = RateLimiter::minimum(promise, now);
            self.promises = self.queues.iter().filter(|queue| queue.minimum.is_some()).count();
        }
    }

    /// Forgets a registration, and hands what waits of it to `dismissed`, in order.
    pub(super) fn dismiss(&mut self, index: RegistrationIndex, mut dismissed: impl FnMut(&Outgoing)) {
        self.retain(|packet| {
            let stays = packet.registration != index;
            if !stays {
                dismissed(packet);
            }
            stays
        });
        self.turns.leave(index);
        self.queues[index.get()] = Queue::default();
        self.promises = self.queues.iter().filter(|queue| queue.minimum.is_some()).count();
    }

    /// Whether nothing waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// How many packets wait.
    pub(super) fn len(&self) -> usize {
        self.packets
    }

    /// Whether another packet of a registration may wait.
    #[inline]
    pub(super) fn has_room(&self, index: RegistrationIndex) -> bool {
        self.queues[index.get()].packets.len() < QUEUE_PACKETS_MAX
    }

    /// Adds a packet behind all others of its registration.
    #[inline]
    pub(super) fn push(&mut self, packet: Outgoing) {
        let queue = &mut self.queues[packet.registration.get()];
        queue.packets.push_back(packet);
        self.packets += 1;
        if !queue.queued {
            queue.queued = true;
            self.turns.enter(packet.registration, queue.priority);
        }
    }

    /// Chooses whose packets the NIC gets next. The time is asked for only if somebody is promised anything.
    pub(super) fn choose(&mut self, now: impl FnOnce() -> Instant) {
        if self.packets == self.chosen.len() || self.is_chosen_full() {
            return;
        }
        if self.promises > 0 {
            let now = now();
            self.turns.iter().for_each(|index| {
                if let Some(minimum) = &mut self.queues[index.get()].minimum {
                    minimum.refill(now);
                }
            });
            self.choose_promised();
        }
        self.choose_by_turns();
    }

    fn is_chosen_full(&self) -> bool {
        self.chosen.len() >= CHOSEN_PACKETS || self.chosen_bytes >= CHOSEN_BYTES
    }

    /// Packets of who is furthest below what is promised, until nobody is below it. So if more is promised than there is, all
    /// get the same part of theirs.
    fn choose_promised(&mut self) {
        while !self.is_chosen_full() {
            let below = self.turns.iter().filter_map(|index| {
                let queue = &self.queues[index.get()];
                let saved_ns = queue.minimum.as_ref()?.saved_ns().filter(|_| !queue.packets.is_empty())?;
                Some((saved_ns, index.get()))
            });
            let Some((_, index)) = below.max_by_key(|(saved_ns, _)| *saved_ns) else { return };
            let queue = &mut self.queues[index];
            let Some(packet) = queue.packets.pop_front() else { return };
            if let Some(minimum) = &mut queue.minimum {
                minimum.charge(packet.wire_cost());
            }
            self.take(packet);
        }
    }

    fn choose_by_turns(&mut self) {
        while !self.is_chosen_full()
            && let Some(index) = self.turns.current()
        {
            let queue = &mut self.queues[index.get()];
            let Some(packet) = queue.packets.pop_front() else {
                // What it did not use is not saved up.
                queue.queued = false;
                self.turns.leave_first();
                continue;
            };
            self.turns.pay(packet.wire_cost().bytes);
            self.take(packet);
        }
    }

    fn take(&mut self, packet: Outgoing) {
        self.chosen_bytes += packet.wire_cost().bytes;
        self.chosen.push_back(packet);
    }

    /// The packets that were chosen, in order.
    pub(super) fn chosen(&self) -> impl Iterator<Item = &Outgoing> {
        self.chosen.iter()
    }

    /// The first one of them.
    pub(super) fn front(&self) -> Option<&Outgoing> {
        self.chosen.front()
    }

    pub(super) fn front_mut(&mut self) -> Option<&mut Outgoing> {
        self.chosen.front_mut()
    }

    /// Takes the first one of them away.
    pub(super) fn pop_front(&mut self) -> Option<Outgoing> {
        let packet = self.chosen.pop_front()?;
        self.chosen_bytes -= packet.wire_cost().bytes;
        self.packets -= 1;
        Some(packet)
    }

    /// Keeps only packets of which `keep` says so, each registration's in order.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&Outgoing) -> bool) {
        self.chosen.retain(&mut keep);
        self.chosen_bytes = self.chosen.iter().map(|packet| packet.wire_cost().bytes).sum();
        self.packets = self.chosen.len();
        for turn in self.turns.iter() {
            let queue = &mut self.queues[turn.get()];
            queue.packets.retain(&mut keep);
            self.packets += queue.packets.len();
        }
    }
}

#[cfg(test)]
#[path = "backlog_tests.rs"]
mod tests;
