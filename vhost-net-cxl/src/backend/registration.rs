//! An instance that uses a NIC, or may have to.

use std::sync::Arc;

use pod_protocol::objects::{RegistrationObject, RegistrationState};

use super::receive_buffers::REGISTRATIONS_MAX;
use crate::counters::LeaseCounters;
use crate::offloads::Offloads;

/// Names a registration within its NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegistrationIndex(u8);

const _: () = assert!(REGISTRATIONS_MAX == u8::MAX as usize + 1);

impl RegistrationIndex {
    /// The registration of this number, if it is below the limit.
    pub fn new(index: u16) -> Option<Self> {
        u8::try_from(index).ok().map(Self)
    }

    /// Its number.
    pub fn get(self) -> usize {
        usize::from(self.0)
    }

    /// Its place in a set of bits.
    pub(super) fn word_and_bit(self) -> (usize, u64) {
        (self.get() / 64, 1 << (self.0 % 64))
    }
}

/// A registration at work.
#[derive(Debug)]
pub(super) struct Registration {
    pub(super) object: RegistrationObject,
    pub(super) counters: Arc<LeaseCounters>,
    /// What the guest's driver accepts to receive; nothing until its frontend has said so.
    pub(super) accepts: Offloads,
    /// What the guest's driver may leave undone when it sends. Where the NIC cannot do it, we do.
    pub(super) may_leave: Offloads,
    /// Receive buffers that it holds.
    pub(super) held: u32,
    /// Its address is to be announced from our NIC as soon as that works.
    pub(super) announce: bool,
    /// Numbers the frames to it.
    pub(super) sequence: u16,
}

impl Registration {
    pub(super) fn new(object: RegistrationObject, counters: Arc<LeaseCounters>) -> Self {
        let may_leave = Offloads::left_by_guest(object.features);
        let announce = object.state == RegistrationState::Active;
        Self { object, counters, accepts: Offloads::NONE, may_leave, held: 0, announce, sequence: 0 }
    }

    /// Takes over what the controller wants now. A registration that becomes active, or is handed to a new holder while
    /// active, is announced: that is how the switches learn where its address is.
    pub(super) fn update(&mut self, object: RegistrationObject) {
        let becomes_active = object.state == RegistrationState::Active
            && (self.object.state != RegistrationState::Active
                || self.object.generation != object.generation);
        self.announce = (self.announce && object.state == RegistrationState::Active) || becomes_active;
        self.may_leave = Offloads::left_by_guest(object.features);
        self.object = object;
    }

    /// Whether it may send. A draining one sends what was on its way when it began to drain.
    pub(super) fn sends(&self) -> bool {
        self.object.state != RegistrationState::Standby
    }
}
