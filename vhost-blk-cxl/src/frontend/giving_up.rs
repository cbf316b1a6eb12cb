//! Requests that are waited for no longer.

use cxl_pool::Memory;

use super::disk::Disk;
use super::slots::State;
use crate::message::Status;

impl<M: Memory> Disk<M> {
    /// Stops waiting for the requests of some rings: with an I/O error to the guest, or with nothing at all, so that the
    /// in-flight region keeps them.
    ///
    /// Reads straight into guest memory that a backend may have are not answered: told of an error, the guest would use that
    /// memory for something else, and a device that was only slow would write over it.
    pub(super) fn give_up_where(&mut self, answer: bool, concerns: impl Fn(u16) -> bool) {
        for state in [State::Queued, State::Lingering, State::Sent] {
            let under_way = state != State::Queued;
            for index in self.slots.in_state(state) {
                let slot = self.slots.get(index);
                let ring = slot.ring;
                let filling = under_way && slot.fills_guest_memory();
                if !concerns(ring) || answer && filling {
                    continue;
                }
                if answer {
                    self.counters.ended(self.slots.get(index).operation, Status::IoError, 0);
                    self.give_back(index, Status::IoError);
                } else if let Some(Some(served)) = self.rings.get_mut(usize::from(ring)) {
                    served.in_flight -= 1;
                }
                if state != State::Sent {
                    self.queued.retain(|&queued| queued != index);
                }
                if under_way {
                    self.slots.set_state(index, State::Abandoned);
                } else {
                    self.free(index);
                }
            }
        }
        self.drop_own_flushes();
        self.signal();
    }
}
