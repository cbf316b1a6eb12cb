//! The two ends of what is compared, behind one interface each.

use cxl_channel::{Receiver, Sender};
use cxl_pool::Memory;

/// Where messages go in.
pub(crate) trait Outlet<const WORDS: usize> {
    /// Whether the other end is there.
    fn ready(&mut self) -> bool;
    /// To be asked before messages are gathered: how many it would take.
    fn room(&mut self) -> usize;
    /// Takes as many as there is room for, and says how many.
    fn offer(&mut self, messages: &[[u64; WORDS]]) -> usize;
    /// Makes them visible.
    fn publish(&mut self);
}

/// Where messages come out.
pub(crate) trait Inlet<const WORDS: usize> {
    /// Whether the other end is there.
    fn ready(&mut self) -> bool;
    /// Gives as many as there are and fit, and says how many.
    fn take(&mut self, into: &mut [[u64; WORDS]]) -> usize;
}

impl<M: Memory, const WORDS: usize> Outlet<WORDS> for Sender<M, WORDS> {
    fn ready(&mut self) -> bool {
        Self::ready(self)
    }

    fn room(&mut self) -> usize {
        self.free() as usize
    }

    fn offer(&mut self, messages: &[[u64; WORDS]]) -> usize {
        self.send_batch(messages)
    }

    fn publish(&mut self) {
        // The receivers of the benchmark never sleep.
        let _ = Self::publish(self);
    }
}

impl<M: Memory, const WORDS: usize> Inlet<WORDS> for Receiver<M, WORDS> {
    fn ready(&mut self) -> bool {
        Self::ready(self)
    }

    fn take(&mut self, into: &mut [[u64; WORDS]]) -> usize {
        self.receive_batch(into)
    }
}
