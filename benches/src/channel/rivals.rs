//! The crates that are compared with, through their own batch interfaces. Both look for room and for messages by themselves.
#![allow(unsafe_code)] // one of them has its caller vouch for what it wrote into the ring

use std::num::NonZeroUsize;

use super::ends::{Inlet, Outlet};
use super::run::SLOTS;

/// The ends of a ring of rtrb.
pub(super) type Rtrb<const WORDS: usize> = (rtrb::Producer<[u64; WORDS]>, rtrb::Consumer<[u64; WORDS]>);

/// The ends of a ring of gil.
pub(super) type Gil<const WORDS: usize> =
    (gil::spsc::Sender<[u64; WORDS]>, gil::spsc::Receiver<[u64; WORDS]>);

pub(super) fn rtrb<const WORDS: usize>() -> Rtrb<WORDS> {
    rtrb::RingBuffer::new(SLOTS as usize)
}

pub(super) fn gil<const WORDS: usize>() -> Gil<WORDS> {
    const CAPACITY: NonZeroUsize = NonZeroUsize::new(SLOTS as usize).expect("rings have slots");
    gil::spsc::channel(CAPACITY)
}

impl<const WORDS: usize> Outlet<WORDS> for rtrb::Producer<[u64; WORDS]> {
    fn ready(&mut self) -> bool {
        true
    }

    fn room(&mut self) -> usize {
        // It looks for room by itself.
        usize::MAX
    }

    fn offer(&mut self, messages: &[[u64; WORDS]]) -> usize {
        self.push_partial_slice(messages).0.len()
    }

    fn publish(&mut self) {}
}

impl<const WORDS: usize> Inlet<WORDS> for rtrb::Consumer<[u64; WORDS]> {
    fn ready(&mut self) -> bool {
        true
    }

    fn take(&mut self, into: &mut [[u64; WORDS]]) -> usize {
        self.pop_partial_slice(into).0.len()
    }
}

impl<const WORDS: usize> Outlet<WORDS> for gil::spsc::Sender<[u64; WORDS]> {
    fn ready(&mut self) -> bool {
        true
    }

    fn room(&mut self) -> usize {
        usize::MAX
    }

    fn offer(&mut self, messages: &[[u64; WORDS]]) -> usize {
        let slots = self.write_buffer();
        let count = slots.len().min(messages.len());
        slots[..count].write_copy_of_slice(&messages[..count]);
        // SAFETY: so many of the slots that it has just given were written.
        unsafe { self.commit(count) };
        count
    }

    fn publish(&mut self) {}
}

impl<const WORDS: usize> Inlet<WORDS> for gil::spsc::Receiver<[u64; WORDS]> {
    fn ready(&mut self) -> bool {
        true
    }

    fn take(&mut self, into: &mut [[u64; WORDS]]) -> usize {
        self.read_guard().copy_into(into)
    }
}
