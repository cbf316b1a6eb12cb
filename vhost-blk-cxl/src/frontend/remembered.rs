//! What a frontend notes for its successor, where requests in flight are recorded too: by which verifier that finds whether a device
//! has forgotten what the guest was told and has not flushed.
//!
//! It is noted of each of a disk's places, under its number, before the guest is told that a write has ended in a cache, and again when
//! all of that was flushed. Where a loss has yet to be told, that is noted, or what is there stays until it was.

use cxl_pool::Memory;
use vhost_frontend::Notes;

use super::disk::Disk;

/// Of a place without a number.
const NO_NUMBER: u64 = u64::MAX;

/// Under which key a place is noted.
fn key_of(number: Option<u32>) -> u64 {
    number.map_or(NO_NUMBER, |number| u64::from(number) + 1)
}

impl<M: Memory> Disk<M> {
    /// What was noted of a place.
    pub(super) fn noted(&self, number: Option<u32>) -> Option<u64> {
        self.notes.as_ref()?.get(key_of(number))
    }

    /// Notes it. Of places that are gone nothing is kept where it needs the room.
    pub(super) fn note_of(&self, number: Option<u32>, note: u64) {
        let Some(notes) = &self.notes else { return };
        // A striped disk has the columns that it has.
        if !notes.set(key_of(number), note) && self.object.stripe_bytes.is_none() {
            let is_one = |key| self.object.replicas.iter().any(|place| key == key_of(Some(place.number)));
            notes.retain(is_one);
            notes.set(key_of(number), note);
        }
    }

    /// A ring has started, with room for notes. With the first one that is, what a predecessor noted there is taken over: there may be no
    /// other trace of what it had the device remember, for it need not have been asked for by that ring.
    pub(super) fn take_notes(&mut self, notes: Option<&Notes>) {
        self.adopts = self.notes.is_none();
        self.notes = notes.cloned();
        self.unflushed.forget_noted();
        let (note, next) = (self.noted(self.object.number), self.slots.next_sequence());
        if self.adopts && self.has_one_place() && self.unflushed.adopt(note, next) {
            self.lost_writes();
        }
        self.note();
    }

    /// Notes what there is to note, of a disk with one place.
    #[inline]
    pub(super) fn note(&mut self) {
        if self.has_one_place()
            && let Some(note) = self.unflushed.next_note()
        {
            self.note_of(self.object.number, note);
        }
    }

    /// Those in several places know of each what it remembers.
    fn has_one_place(&self) -> bool {
        self.object.replicas.is_empty()
    }
}
