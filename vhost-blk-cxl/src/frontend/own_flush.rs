//! Flushes that no guest asked for: when its driver switches the write cache off it will flush no more, and what it wrote before
//! is to be on the medium.

use std::sync::mpsc::SyncSender;

use cxl_pool::Memory;
use vhost_frontend::Chain;

use super::disk::Disk;
use super::place::Place;
use super::slots::State;
use crate::message::{Operation, Status};

/// The ring of requests that are in none.
pub(super) const NO_RING: u16 = u16::MAX;

/// A flush of our own.
pub(super) struct OwnFlush {
    index: u16,
    /// Writes were under way that it need not cover: it is done once more.
    again: bool,
    /// Who waits for it. Where this goes unheard, it was not done.
    done: SyncSender<()>,
}

impl<M: Memory> Disk<M> {
    /// Flushes what was written until now, and says so.
    pub(crate) fn flush_writes(&mut self, done: SyncSender<()>) {
        if self.unflushed.is_settled() && !self.has_cached_writes() {
            let _ = done.try_send(());
            return;
        }
        let Some(index) = self.slots.candidate() else {
            // It is the next to get one.
            return self.waiting_flushes.push(done);
        };
        let slot = self.slots.get_mut(index);
        (slot.operation, slot.ring, slot.chain) = (Operation::Flush, NO_RING, Chain::default());
        (slot.place, slot.unaware, slot.force_unit_access, slot.may_unmap) =
            (Place::Nowhere, false, false, false);
        slot.begin(0, 0, u64::MAX);
        self.slots.take();
        self.own_flushes.push(OwnFlush { index, again: false, done });
        self.queue_own_flush(index);
    }

    /// Begins those that waited for a slot, as far as there are any now.
    pub(super) fn begin_waiting_flushes(&mut self) {
        while self.slots.candidate().is_some()
            && let Some(done) = self.waiting_flushes.pop()
        {
            self.flush_writes(done);
        }
    }

    /// Whether the guest has yet to hear of a loss, or the device to bring something to its medium, when no ring runs any more. Before it
    /// has arrived that is for the frontend to say that it comes from.
    pub(super) fn leaves_untold(&self) -> bool {
        !self.object.incoming && (self.unflushed.is_telling() || !self.unflushed.is_settled())
    }

    fn queue_own_flush(&mut self, index: u16) {
        let again = self.has_cached_writes();
        if let Some(flush) = self.own_flushes.iter_mut().find(|flush| flush.index == index) {
            flush.again = again;
        }
        self.slots.get_mut(index).vouches = self.unflushed.mark();
        self.queued.push_back(index);
        self.blocked = false;
    }

    /// Whether there are writes under way that may end in a cache.
    fn has_cached_writes(&self) -> bool {
        [State::Queued, State::Lingering, State::Sent].into_iter().any(|state| {
            let mut slots = self.slots.in_state(state).into_iter().map(|index| self.slots.get(index));
            slots.any(|slot| slot.operation.writes() && !slot.force_unit_access)
        })
    }

    /// Whether a request is one of our own. What its answer means is done with then.
    pub(super) fn ends_own_flush(&mut self, index: u16, status: Status) -> bool {
        let Some(at) = self.own_flushes.iter().position(|flush| flush.index == index) else { return false };
        if status == Status::Ok && self.own_flushes[at].again {
            self.slots.rename(index);
            self.slots.set_state(index, State::Queued);
            self.queue_own_flush(index);
            return true;
        }
        let flush = self.own_flushes.swap_remove(at);
        match status {
            Status::Ok => drop(flush.done.try_send(())),
            // The guest has yet to hear of it: by its next flush, or without a write cache by its next write.
            _ => self.unflushed.lose(self.slots.next_sequence()),
        }
        self.note();
        self.free(index);
        true
    }

    /// Nobody carries out our own flushes any more. Those who wait for them hear of it, and the guest does.
    pub(super) fn drop_own_flushes(&mut self) {
        let (slots, before) = (&self.slots, self.own_flushes.len());
        let given_up =
            |flush: &OwnFlush| matches!(slots.get(flush.index).state, State::Free | State::Abandoned);
        self.own_flushes.retain(|flush| !given_up(flush));
        if self.own_flushes.len() < before {
            self.unflushed.lose(self.slots.next_sequence());
            self.note();
        }
    }
}
