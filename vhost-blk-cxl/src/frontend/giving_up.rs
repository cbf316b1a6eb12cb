//! Requests that are waited for no longer.

use cxl_pool::Memory;
use vhost_frontend::{Chain, ChainWriter, Next, StopReason};

use super::disk::{Disk, Served};
use super::serve::S_IOERR;
use super::slots::{Slot, State};
use super::turn_budget::TurnBudget;
use crate::message::Status;

impl<M: Memory> Disk<M> {
    /// A ring that is being stopped does not wait for the backend any longer.
    pub(crate) fn hurry_ring(&mut self, index: u16, reason: StopReason) {
        self.give_up_where(reason == StopReason::Requested, |slot| slot.ring == index);
        if reason == StopReason::Requested
            && let Some(Some(Served { stopping: Some(stopping), .. })) =
                self.rings.get_mut(usize::from(index))
        {
            stopping.refuses_owed = true;
            self.refuses_owed = true;
        }
        self.release_stopped();
    }

    /// Whether a request is to be answered as soon as no backend has it any more.
    pub(super) fn is_given_up(&self, slot: &Slot) -> bool {
        let served = self.rings.get(usize::from(slot.ring)).and_then(Option::as_ref);
        self.object.failed || served.is_some_and(Served::refuses_owed) || self.is_taken_back(slot)
    }

    /// Whether a VMM stops a ring, or takes memory back, and does not wait any longer.
    pub(super) fn hurries(&self) -> bool {
        self.rings.iter().flatten().any(Served::refuses_owed) || self.hurries_taking_back()
    }

    /// Answers with errors what a predecessor owes on rings that wait no longer: as much as is done for a disk in a turn. True if there
    /// was any.
    pub(crate) fn refuse_owed(&mut self) -> bool {
        if !std::mem::take(&mut self.refuses_owed) {
            return false;
        }
        let mut budget = TurnBudget::whole();
        let mut chain = Chain::default();
        for served in self.rings.iter_mut().flatten().filter(|served| served.refuses_owed()) {
            while served.owed() > 0 {
                if !budget.is_left() {
                    self.refuses_owed = true;
                    break;
                }
                match served.ring.next_chain(&mut chain) {
                    Ok(Next::Chain) => budget.walked(chain.walked()),
                    Ok(Next::Malformed(_)) => budget.malformed(chain.walked()),
                    // Nothing is owed any more on a ring that is broken.
                    Ok(Next::Empty) | Err(_) => break,
                }
                budget.answered();
                let Some(status) = served.ring.last_writable(&chain) else {
                    served.ring.break_off(&chain);
                    break;
                };
                let written =
                    ChainWriter::new(served.ring.memory(), std::slice::from_ref(&status)).write(&[S_IOERR]);
                if served.ring.complete(chain.head(), u32::from(written.is_ok())).is_err() {
                    break;
                }
            }
        }
        self.release_stopped();
        true
    }

    /// Stops waiting for some requests: with an I/O error to the guest, or with nothing at all, so that the
    /// in-flight region keeps them.
    ///
    /// Reads straight into guest memory that a backend may have are not answered: told of an error, the guest would use that
    /// memory for something else, and a device that was only slow would write over it.
    pub(super) fn give_up_where(&mut self, answer: bool, concerns: impl Fn(&Slot) -> bool) {
        for state in [State::Queued, State::Lingering, State::Sent] {
            let under_way = state != State::Queued;
            for index in self.slots.in_state(state) {
                let slot = self.slots.get(index);
                let ring = slot.ring;
                let filling = under_way && slot.fills_guest_memory();
                if !concerns(slot) || answer && filling {
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
