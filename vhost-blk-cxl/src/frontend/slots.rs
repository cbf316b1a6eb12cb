//! Requests between guest and backend.

use cxl_pool::ByteOffset;
use pod_protocol::ids::LeaseGeneration;
use vhost_frontend::Chain;

use super::place::Place;
use super::unflushed::Mark;
use crate::message::{Operation, Tag};
use crate::segments::Segment;

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Nowhere: the slot is free.
    Free,
    /// To be sent, or sent again.
    Queued,
    /// To be sent again, and what it was sent to before may still be carrying it out.
    Lingering,
    /// With the backend.
    Sent,
    /// With the backend, but nobody waits for the answer; its buffer is not ours until it comes.
    Abandoned,
}

/// A request.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) state: State,
    /// What the guest gave us.
    pub(crate) chain: Chain,
    /// From which ring.
    pub(crate) ring: u16,
    pub(crate) operation: Operation,
    /// Where on the disk that is which is sent next, or was sent last.
    pub(crate) offset_bytes: u64,
    pub(crate) length_bytes: u64,
    /// What was done before of the data of a request that takes several steps.
    pub(crate) done_bytes: u64,
    /// What comes after it.
    pub(crate) left_bytes: u64,
    pub(crate) may_unmap: bool,
    pub(crate) force_unit_access: bool,
    /// As whose request it was last sent.
    pub(crate) sent_as: LeaseGeneration,
    /// Its data.
    pub(crate) place: Place,
    /// Of [`Place::Guests`]: the places.
    pub(crate) pieces: Vec<Segment>,
    /// Counts requests in the order in which the guest made them.
    pub(crate) sequence: u64,
    /// Of a flush: what it vouches for.
    pub(crate) vouches: Mark,
    /// The guest made it when it could not know yet of a loss that was told since.
    pub(crate) unaware: bool,
    /// Counts the uses of the slot, so that an answer to an earlier one is not taken for this one's.
    uses: u16,
}

impl Slot {
    /// Calls `each` for all of its data that the guest has itself.
    pub(super) fn in_guest(&self, each: impl FnMut(ByteOffset, u64)) {
        self.place.in_guest(self.length_bytes, &self.pieces, each);
    }

    /// Of its data: what was done before, what is under way and what is left.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.done_bytes + self.length_bytes + self.left_bytes
    }

    /// Whether the backend may write to the guest's own memory: then the guest must not have that back before it is known
    /// that nobody does any more.
    pub(crate) fn fills_guest_memory(&self) -> bool {
        self.operation == Operation::Read && self.place.is_in_guest()
    }
}

/// A disk's requests. Their number bounds what a guest can have in flight.
#[derive(Debug)]
pub(crate) struct Slots {
    all: Vec<Slot>,
    free: Vec<u16>,
    sequence: u64,
    sent: u32,
    abandoned: u32,
}

impl Slots {
    pub(crate) fn new(count: u16) -> Self {
        let slot = || Slot {
            state: State::Free,
            chain: Chain::default(),
            ring: 0,
            operation: Operation::Flush,
            offset_bytes: 0,
            length_bytes: 0,
            done_bytes: 0,
            left_bytes: 0,
            may_unmap: false,
            force_unit_access: false,
            sent_as: LeaseGeneration::new(0),
            place: Place::Nowhere,
            pieces: Vec::new(),
            sequence: 0,
            vouches: Mark::default(),
            unaware: false,
            uses: 0,
        };
        Self {
            all: (0..=count).map(|_| slot()).collect(),
            free: (0..count).rev().collect(),
            sequence: 0,
            sent: 0,
            abandoned: 0,
        }
    }

    /// The slot that the next request will get, whose chain may be filled before it is taken.
    pub(crate) fn candidate(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// One more, for the chain of a request that is answered at once: there is always that. It is never taken.
    pub(crate) fn spare(&self) -> u16 {
        // As many as were asked for are before it.
        u16::try_from(self.all.len() - 1).unwrap_or(u16::MAX)
    }

    /// The number of the guest's next request.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.sequence
    }

    /// Goes on counting requests from there.
    pub(crate) fn count_from(&mut self, sequence: u64) {
        self.sequence = self.sequence.max(sequence);
    }

    /// Takes the candidate, to be sent.
    pub(crate) fn take(&mut self) {
        let Some(index) = self.free.pop() else { return };
        let sequence = self.sequence;
        self.sequence += 1;
        self.set_state(index, State::Queued);
        let slot = self.get_mut(index);
        slot.uses = slot.uses.wrapping_add(1);
        slot.sequence = sequence;
    }

    /// Gives a request another name, under which it goes on.
    pub(crate) fn rename(&mut self, index: u16) {
        let slot = self.get_mut(index);
        slot.uses = slot.uses.wrapping_add(1);
    }

    /// Moves a request on. A slot that becomes free must have given its buffer back.
    pub(crate) fn set_state(&mut self, index: u16, state: State) {
        let old = std::mem::replace(&mut self.get_mut(index).state, state);
        for (state, change) in [(old, u32::MAX), (state, 1)] {
            let count = match state {
                State::Sent => &mut self.sent,
                State::Abandoned => &mut self.abandoned,
                State::Free | State::Queued | State::Lingering => continue,
            };
            *count = count.wrapping_add(change);
        }
        if state == State::Free {
            debug_assert!(old != State::Free && self.get(index).place == Place::Nowhere);
            self.free.push(index);
        }
    }

    /// How many nobody waits for.
    pub(crate) fn abandoned(&self) -> u32 {
        self.abandoned
    }

    /// How many the backend has.
    pub(crate) fn with_backend(&self) -> u32 {
        self.sent + self.abandoned
    }

    pub(crate) fn get(&self, index: u16) -> &Slot {
        &self.all[usize::from(index)]
    }

    pub(crate) fn get_mut(&mut self, index: u16) -> &mut Slot {
        &mut self.all[usize::from(index)]
    }

    /// The name under which the backend answers.
    pub(crate) fn tag(&self, index: u16) -> Tag {
        Tag::new(u32::from(self.get(index).uses) << 16 | u32::from(index))
    }

    /// The request that an answer is for, if it is with the backend. One that was sent again, under a newer generation
    /// of the lease, waits for the newer answer.
    pub(crate) fn find(&self, tag: Tag, generation: LeaseGeneration) -> Option<u16> {
        let index = u16::try_from(tag.get() & 0xffff).ok()?;
        let slot = self.all.get(usize::from(index))?;
        let with_backend = matches!(slot.state, State::Sent | State::Abandoned);
        (with_backend && self.tag(index) == tag && slot.sent_as == generation).then_some(index)
    }

    /// Whether something holds of any that is not free.
    pub(crate) fn any(&self, holds: impl Fn(&Slot) -> bool) -> bool {
        self.all.iter().any(|slot| slot.state != State::Free && holds(slot))
    }

    /// All slots in this state, in the order of their requests.
    pub(crate) fn in_state(&self, state: State) -> Vec<u16> {
        let mut found: Vec<(u64, u16)> = (0u16..)
            .zip(&self.all)
            .filter(|(_, slot)| slot.state == state)
            .map(|(index, slot)| (slot.sequence, index))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, index)| index).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_one_that_is_answered_at_once() {
        let mut slots = Slots::new(2);
        let mut taken = Vec::new();
        while let Some(index) = slots.candidate() {
            taken.push(index);
            slots.take();
        }
        assert_eq!(taken.len(), 2);
        assert!(!taken.contains(&slots.spare()));
        assert_eq!(slots.get(slots.spare()).state, State::Free);
    }

    #[test]
    fn an_answer_finds_its_request_and_no_other() {
        let mut slots = Slots::new(2);
        let index = slots.candidate().unwrap();
        slots.take();
        let (tag, generation) = (slots.tag(index), LeaseGeneration::new(0));
        assert_eq!(slots.find(tag, generation), None, "it was not sent yet");
        slots.set_state(index, State::Sent);
        assert_eq!(slots.find(tag, generation), Some(index));
        assert_eq!(slots.find(tag, LeaseGeneration::new(1)), None, "the answer is for another generation");
        assert_eq!(slots.with_backend(), 1);
        slots.set_state(index, State::Abandoned);
        assert_eq!((slots.with_backend(), slots.abandoned()), (1, 1));
        slots.set_state(index, State::Free);
        assert_eq!(slots.candidate(), Some(index));
        slots.take();
        slots.set_state(index, State::Sent);
        assert_eq!(slots.find(tag, generation), None, "the answer is for an earlier use");
        assert_eq!(slots.find(Tag::new(999), generation), None);
    }
}
