//! An instance that uses a NIC, or may have to.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Instant;

use pod_protocol::objects::{REGISTRATIONS_MAX, RegistrationObject, RegistrationState};

use super::given_back::GivenBack;
use super::receive_buffers::BufferIndex;
use crate::counters::LeaseCounters;
use crate::nic::FlowTag;
use crate::offloads::Offloads;
use crate::rate_limit::RateLimiter;
use crate::source_guard::SourceGuard;

/// Names a registration within its NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegistrationIndex(u16);

impl RegistrationIndex {
    /// That of number 0.
    pub(super) const FIRST: Self = Self(0);

    /// The registration of this number, if it is below the limit.
    pub fn new(index: u16) -> Option<Self> {
        (usize::from(index) < REGISTRATIONS_MAX).then_some(Self(index))
    }

    /// Its number.
    #[inline]
    pub fn get(self) -> usize {
        usize::from(self.0)
    }

    /// The same, as it was given.
    #[inline]
    pub(super) const fn number(self) -> u16 {
        self.0
    }
}

/// Storage for the books on receive buffers is set aside up to this quota; a larger one grows as it is used.
const QUOTA_USUAL: u32 = 8192;

/// Numbers the frames to one lease; drawn by the backend's worker only.
#[derive(Debug)]
pub(super) struct Numbers(AtomicU16);

impl Numbers {
    pub(super) fn starting_at(first: u16) -> Self {
        Self(AtomicU16::new(first))
    }

    /// Takes the next `count` numbers, at most as many as there are, and says which is the first.
    #[inline]
    pub(super) fn take(&self, count: usize) -> u16 {
        let next = self.0.load(Ordering::Relaxed);
        let count = u16::try_from(count).unwrap_or(u16::MAX);
        self.0.store(next.wrapping_add(count), Ordering::Relaxed);
        next
    }
}

/// A registration at work.
#[derive(Debug)]
pub(super) struct Registration {
    pub(super) object: RegistrationObject,
    pub(super) counters: Arc<LeaseCounters>,
    /// What its frontend has said last that the guest's driver accepts to receive.
    pub(super) told: Option<Offloads>,
    /// What the guest's driver may leave undone when it sends. Where the NIC cannot do it, we do.
    pub(super) may_leave: Offloads,
    /// Receive buffers that it holds, in the order in which its frontend was told of them, with their packets' numbers.
    pub(super) held: VecDeque<(u16, BufferIndex)>,
    /// How much it may receive, if that is limited.
    pub(super) receive_limit: Option<RateLimiter>,
    /// What it is promised to receive, if anything.
    pub(super) receive_minimum: Option<RateLimiter>,
    /// Looks at the network addresses that it sends from, if its own ones are known.
    pub(super) guard: Option<SourceGuard>,
    /// Its address is to be announced from our NIC as soon as that works.
    pub(super) announce: bool,
    /// It was given packets back, and its frontend may not know yet: what it sends goes the same way, in order.
    pub(super) closed: bool,
    /// What was given back because it was too early, or because nothing lent is kept for a link that is down.
    pub(super) given_back: GivenBack,
    /// Numbers the frames to its lease, whichever NIC they come from.
    pub(super) numbers: Arc<Numbers>,
    /// What a NIC that tells flows apart puts on the frames to it.
    pub(super) tag: FlowTag,
}

impl Registration {
    /// Counts packets of this lease that went out, to the wire or to a neighbour, and the bytes of their frames.
    #[inline]
    pub(super) fn count_sent(&self, packets: u64, frame_bytes: u64) {
        self.counters.tx_packets.add(packets);
        self.counters.tx_bytes.add(frame_bytes);
    }

    pub(super) fn new(
        object: RegistrationObject,
        counters: Arc<LeaseCounters>,
        numbers: Arc<Numbers>,
        tag: FlowTag,
    ) -> Self {
        let may_leave = Offloads::left_by_guest(object.features);
        let announce = object.state == RegistrationState::Active;
        // No allocation once packets flow: it holds no more than its quota.
        let held = VecDeque::with_capacity(object.rx_quota_buffers.min(QUOTA_USUAL) as usize);
        let receive_limit = RateLimiter::new(&object.policy.receive, Instant::now());
        let receive_minimum = RateLimiter::minimum(&object.policy.receive, Instant::now());
        let guard = SourceGuard::new(object.mac, &object.policy.addresses);
        Self {
            object,
            counters,
            told: None,
            may_leave,
            held,
            receive_limit,
            receive_minimum,
            guard,
            announce,
            closed: false,
            given_back: GivenBack::default(),
            numbers,
            tag,
        }
    }

    /// Takes over what the controller wants now. A registration that becomes active, or is handed to a new holder while
    /// active, is announced: that is how the switches learn where its address is.
    pub(super) fn update(&mut self, object: RegistrationObject) {
        let becomes_active = object.state == RegistrationState::Active
            && (self.object.state != RegistrationState::Active
                || self.object.generation != object.generation
                || self.object.policy.vlan != object.policy.vlan);
        self.announce = (self.announce && object.state == RegistrationState::Active) || becomes_active;
        self.may_leave = Offloads::left_by_guest(object.features);
        if self.object.policy.receive != object.policy.receive {
            self.receive_limit = RateLimiter::new(&object.policy.receive, Instant::now());
            self.receive_minimum = RateLimiter::minimum(&object.policy.receive, Instant::now());
        }
        self.guard = SourceGuard::new(object.mac, &object.policy.addresses);
        self.object = object;
    }

    /// What the guest's driver accepts to receive: nothing until its frontend has said so.
    #[inline]
    pub(super) fn accepts(&self) -> Offloads {
        self.told.unwrap_or_default()
    }

    /// The number of the next frame to it.
    #[inline]
    pub(super) fn next_number(&self) -> u16 {
        self.numbers.take(1)
    }

    /// Whether payload of its packets may lie in the sender's memory.
    #[inline]
    pub(super) fn lends(&self) -> bool {
        self.object.ram_area.is_some()
    }

    /// Whether it may send. A draining one sends what was on its way when it began to drain.
    #[inline]
    pub(super) fn sends(&self) -> bool {
        self.object.state != RegistrationState::Standby
    }
}
