//! What of replicas is noted for a successor.

use cxl_pool::Memory;
use tracing::warn;

use super::MirroredDisk;

impl<M: Memory> MirroredDisk<M> {
    /// A ring has started. If it inherits something, a predecessor served the guest: some of what it wrote may lie in the replicas' caches.
    pub(crate) fn begins(&mut self, inherits: bool) {
        for index in 0..self.replicas.len() {
            let next = self.works.next_sequence();
            let replica = &mut self.replicas[index];
            replica.unflushed.forget_noted();
            if inherits {
                replica.unflushed.written();
            }
            if self.disk.adopts && replica.unflushed.adopt(self.disk.noted(Some(replica.number)), next) {
                self.has_lost(index);
            }
            self.note(index);
        }
    }

    /// A replica has answered before the guest was here, and does not hold any more what that was told.
    fn has_lost(&mut self, index: usize) {
        if index != self.source {
            return self.lost(index);
        }
        // Others were brought in line with it meanwhile: what they had, nobody may have any more. It stays what they are brought in line
        // with, and the guest hears of it.
        warn!(lease = %self.disk.object().lease, ssd = self.replicas[index].ssd, "the SSD lost writes that were not flushed");
        self.disk.counters.lost_writes.add(1);
        self.replicas[index].unflushed.forget_losses();
        self.guest.losses.lose(self.works.next_sequence());
    }

    /// Notes what there is to note of a replica.
    pub(super) fn note(&mut self, index: usize) {
        if self.guest.losses.is_telling() {
            // What is noted tells a successor, too.
            return;
        }
        let replica = &mut self.replicas[index];
        // What it lost while others had it the guest does not hear of.
        replica.unflushed.tells();
        if let Some(note) = replica.unflushed.next_note() {
            self.disk.note_of(Some(replica.number), note);
        }
    }
}
