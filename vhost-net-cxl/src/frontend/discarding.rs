//! Transmit queues that the VMM has disabled, as when a guest uses fewer of its queues than before: what lies in them goes nowhere
//! (vhost-user, "Ring states"). Its driver waits for it all the same, and a connection may wait with it.

use super::budget::DESCRIPTORS_PER_TURN;
use super::port::Port;
use super::transmit::Scratch;
use crate::counters::DropReason;

impl Port {
    /// Whether any queue is disabled.
    pub(super) fn look_for_disabled(&mut self) {
        self.discards = self.rings.iter().flatten().any(|ring| !ring.is_enabled());
    }

    /// Gives back what the guest offers on disabled queues, and says whether that was anything.
    pub(super) fn discard(&mut self, scratch: &mut Scratch) -> bool {
        if !self.discards || self.object.incoming {
            return false;
        }
        let Scratch { chains, used, .. } = scratch;
        let mut any = false;
        for ring in self.rings.iter_mut().flatten().filter(|ring| !ring.is_enabled()) {
            // A ring that is broken is silent from now on.
            let offered = ring.next_chains_within(chains, DESCRIPTORS_PER_TURN).unwrap_or(0);
            used.extend(chains[..offered].iter().map(|chain| (chain.head(), 0)));
            let _ = ring.complete_together(used);
            used.clear();
            (0..offered).for_each(|_| self.counters.count_drop(DropReason::QueueDisabled));
            any |= offered > 0;
        }
        any
    }
}
