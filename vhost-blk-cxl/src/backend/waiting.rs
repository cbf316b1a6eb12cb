//! Requests of a volume that have not begun: its device has no room, it is being drained, or it has had its share. Others do not wait
//! for them.
//!
//! What the guest asked for begins in the order in which it came, and so does what is done on its behalf: copies, and what is noted
//! in the log of intents. Whoever asks for these sees to it that they meet nothing of the guest's, so they take turns with it, and the
//! guest waits for one of them at most. When the guest has had its share they go on.

use std::collections::VecDeque;

use super::arrivals::Held;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Waiting {
    of_guest: VecDeque<Held>,
    /// Such that the volume's rates do not count.
    free: VecDeque<Held>,
    /// The first one of which of both is next.
    next_is_free: bool,
    /// The last one that began was one of those.
    was_free: bool,
}

impl Waiting {
    pub(super) fn push(&mut self, held: Held) {
        if held.request.is_free() { &mut self.free } else { &mut self.of_guest }.push_back(held);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.of_guest.is_empty() && self.free.is_empty()
    }

    /// Whether there is any that the volume's rates count.
    pub(super) fn any_of_guest(&self) -> bool {
        !self.of_guest.is_empty()
    }

    /// Decides which one is next, if the guest's has to wait or need not.
    pub(super) fn choose(&mut self, guest_waits: bool) -> Option<&Held> {
        let guest_may = !self.of_guest.is_empty() && !guest_waits;
        let guest_is_next = self.free.is_empty() || guest_may && self.was_free;
        self.next_is_free = !guest_is_next;
        if self.next_is_free || guest_may { self.first() } else { None }
    }

    /// Decides that the guest's is next, if there is any.
    pub(super) fn choose_guests(&mut self) -> Option<&Held> {
        self.next_is_free = false;
        self.first()
    }

    fn next(&mut self) -> &mut VecDeque<Held> {
        if self.next_is_free { &mut self.free } else { &mut self.of_guest }
    }

    /// The one that was chosen.
    pub(super) fn first(&self) -> Option<&Held> {
        if self.next_is_free { self.free.front() } else { self.of_guest.front() }
    }

    pub(super) fn first_mut(&mut self) -> Option<&mut Held> {
        self.next().front_mut()
    }

    /// The one that was chosen has begun, or was answered.
    pub(super) fn take(&mut self) -> Option<Held> {
        self.was_free = self.next_is_free;
        self.next().pop_front()
    }

    /// All of them, which will not begin.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Held> {
        self.of_guest.drain(..).chain(self.free.drain(..))
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::LineOffset;
    use pod_protocol::ids::{LeaseGeneration, LeaseId, PlaceNumber};

    use super::*;
    use crate::message::{Charge, Holder, Operation, Request, Tag};

    fn held(tag: u32, charge: Charge) -> Held {
        let lease = LeaseId::new(1).unwrap();
        let generation = LeaseGeneration::new(1);
        let request = Request {
            holder: Holder { lease, place: PlaceNumber::FIRST, generation },
            tag: Tag::new(tag),
            operation: Operation::Read,
            force_unit_access: false,
            may_unmap: false,
            intent_log: false,
            marked: true,
            charge,
            offset_bytes: 0,
            length_bytes: 4096,
            data: LineOffset::new(0),
            segments: 0,
        };
        Held { request, list: Vec::new() }
    }

    /// The tags in the order in which they begin, while the guest has to wait or need not.
    fn order(waiting: &mut Waiting, guest_waits: bool) -> Vec<u32> {
        let mut tags = Vec::new();
        while let Some(tag) = waiting.choose(guest_waits).map(|held| held.request.tag.get()) {
            assert_eq!(waiting.take().map(|held| held.request.tag.get()), Some(tag));
            tags.push(tag);
        }
        tags
    }

    #[test]
    fn guest_and_copies_take_turns_and_copies_go_on_when_the_guest_has_to_wait() {
        let mut waiting = Waiting::default();
        let fill = |waiting: &mut Waiting| {
            (0..4).for_each(|tag| waiting.push(held(tag, Charge::Whole)));
            (10..12).for_each(|tag| waiting.push(held(tag, Charge::Nothing)));
        };
        fill(&mut waiting);
        assert_eq!(order(&mut waiting, false), [10, 0, 11, 1, 2, 3]);
        fill(&mut waiting);
        assert_eq!(waiting.choose_guests().map(|held| held.request.tag.get()), Some(0));
        assert!(waiting.take().is_some());
        assert_eq!(order(&mut waiting, false), [10, 1, 11, 2, 3], "after that a copy");
        assert!(waiting.choose_guests().is_none());
        fill(&mut waiting);
        assert_eq!(order(&mut waiting, true), [10, 11]);
        assert!(order(&mut waiting, true).is_empty());
        assert_eq!(order(&mut waiting, false), [0, 1, 2, 3]);
        assert!(waiting.is_empty());
    }
}
