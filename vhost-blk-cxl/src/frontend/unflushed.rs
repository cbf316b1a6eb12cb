//! Noticing that a device lost writes which it had acknowledged and which were not flushed.
//!
//! A drive may lose them with its power, and a computer that loses its power with the drive does not mind. Here the guest
//! lives on: its next flush would vouch for data that is gone. So each answer bears the device's write verifier, and
//! where that changes while something is unflushed, flushes fail: the guest treats it as a failed drive would have it. A guest
//! without a write cache flushes nothing; what it wrote before it had none may be lost too, and it is told by a write that fails.

/// What one disk's guest relies on the device to remember.
#[derive(Debug, Default)]
pub(crate) struct Unflushed {
    /// The device's, as of its last answer.
    verifier: Option<u64>,
    /// Writes that ended in the device's cache.
    ended: u64,
    /// How many of them were flushed, or are known to be lost.
    settled: u64,
    /// Flushes of requests before this one vouch for what was lost.
    lost_before: u64,
    /// The guest has yet to be told: by a flush, or by a write that is not to end in a cache.
    untold: bool,
    /// What was answered last does.
    tells: bool,
    /// What is noted for a successor.
    noted: Option<u64>,
}

/// In place of what is noted: nothing is relied on.
const NOTHING: u64 = 0;
/// In place of it: something is lost, and the guest has not heard of it.
const LOST: u64 = u64::MAX;

/// What a flush will vouch for: taken when the guest offers it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Mark(u64);

impl Unflushed {
    /// What a flush that is offered now will vouch for.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.ended)
    }

    /// Notes an answer of the device. `next` is the number of the guest's next request. True if it shows a loss.
    pub(crate) fn answered(&mut self, verifier: u64, next: u64) -> bool {
        let changed = self.verifier.replace(verifier).is_some_and(|before| before != verifier);
        let lost = changed && self.ended > self.settled;
        if lost {
            self.lose(next);
        }
        if changed {
            self.settled = self.ended;
        }
        lost
    }

    /// Takes over what a predecessor noted. True if the device is known by now not to remember what that relied on.
    pub(crate) fn adopt(&mut self, note: Option<u64>, next: u64) -> bool {
        let Some(note) = note.filter(|&note| note != NOTHING) else { return false };
        self.written();
        let before = note - 1;
        let lost = self.verifier.is_some_and(|now| now != before);
        if lost {
            self.lose(next);
            self.settled = self.ended;
        } else {
            self.verifier = Some(before);
        }
        lost
    }

    /// What is to be noted for a successor, if that is another thing than before: by which verifier it finds that the device has
    /// forgotten what was not flushed.
    #[inline]
    pub(crate) fn next_note(&mut self) -> Option<u64> {
        let note = if self.is_telling() {
            LOST
        } else if self.is_settled() {
            NOTHING
        } else {
            // Of the two greatest numbers a loss is told that is none.
            self.verifier?.saturating_add(1).min(LOST - 1)
        };
        (self.noted.replace(note) != Some(note)).then_some(note)
    }

    /// It is noted nowhere yet.
    pub(crate) fn forget_noted(&mut self) {
        self.noted = None;
    }

    /// Whether the guest has yet to hear of a loss.
    pub(crate) fn is_telling(&self) -> bool {
        self.untold || self.tells
    }

    /// Whether there is nothing that a flush would have to bring to the medium.
    pub(crate) fn is_settled(&self) -> bool {
        self.ended == self.settled
    }

    /// Takes over what another one has yet to tell of losses.
    pub(crate) fn take_losses(&mut self, other: &mut Self) {
        self.untold |= std::mem::take(&mut other.untold);
        self.lost_before = self.lost_before.max(std::mem::take(&mut other.lost_before));
    }

    /// Writes of requests before number `next` are gone. The guest has yet to hear of it.
    pub(crate) fn lose(&mut self, next: u64) {
        (self.untold, self.lost_before) = (true, next);
    }

    /// What was lost before is nobody's loss.
    pub(crate) fn forget_losses(&mut self) {
        (self.untold, self.lost_before) = (false, 0);
    }

    /// Notes that a write ended in the device's cache.
    pub(crate) fn written(&mut self) {
        self.ended += 1;
    }

    /// Notes that request number `sequence`, a flush, was carried out, when `next` is the number of the next request.
    /// False if it must fail.
    pub(crate) fn flushed(&mut self, sequence: u64, mark: Mark, next: u64) -> bool {
        let fails = self.tell(next) || sequence < self.lost_before;
        if !fails {
            self.settled = self.settled.max(mark.0);
        }
        !fails
    }

    /// The same of a flush that no guest asked for, and by which none is told.
    pub(crate) fn flushed_unasked(&mut self, mark: Mark) {
        self.settled = self.settled.max(mark.0);
    }

    /// Notes that a write was carried out that does not end in a cache, when `next` is the number of the next request. False if it must
    /// fail: whoever writes so need never flush, and would hear of a loss by nothing else.
    pub(crate) fn written_through(&mut self, next: u64) -> bool {
        !self.tell(next)
    }

    /// Whether the guest is told of a loss by what is answered now.
    fn tell(&mut self, next: u64) -> bool {
        let tells = std::mem::take(&mut self.untold);
        if tells {
            // The guest made the requests until here before it could know, and others that are still in its rings.
            self.lost_before = next;
            self.tells = true;
        }
        tells
    }

    /// Whether the guest hears of a loss by what was answered since the last time this was asked.
    pub(crate) fn tells(&mut self) -> bool {
        std::mem::take(&mut self.tells)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_covers_what_ended_before_it() {
        let mut unflushed = Unflushed::default();
        assert!(!unflushed.answered(1, 1));
        unflushed.written();
        let mark = unflushed.mark();
        assert!(!unflushed.answered(1, 3));
        assert!(unflushed.flushed(1, mark, 3));
        assert!(!unflushed.answered(2, 4), "nothing is lost: all was flushed");
        unflushed.written();
        let mark = unflushed.mark();
        unflushed.written();
        assert!(unflushed.flushed(4, mark, 6));
        assert!(unflushed.answered(3, 7), "one write ended after the flush began");
    }

    #[test]
    fn every_flush_that_vouches_for_what_is_lost_fails_and_one_tells() {
        let mut unflushed = Unflushed::default();
        unflushed.answered(1, 1);
        unflushed.written();
        let (first, second) = (unflushed.mark(), unflushed.mark());
        assert!(unflushed.answered(2, 3));
        assert!(!unflushed.flushed(1, first, 4));
        assert!(!unflushed.flushed(2, second, 4));
        assert!(!unflushed.flushed(3, second, 4), "it was made before the guest knew");
        let later = unflushed.mark();
        assert!(unflushed.flushed(4, later, 5), "the guest knows");
        unflushed.written();
        assert!(unflushed.answered(3, 6));
        let later = unflushed.mark();
        assert!(unflushed.tells(), "of the loss before");
        assert!(!unflushed.flushed(6, later, 7), "the guest must hear of it");
        assert!(unflushed.tells());
        assert!(!unflushed.tells());
        assert!(unflushed.flushed(7, later, 8));
    }

    #[test]
    fn a_write_that_ends_in_no_cache_tells_once_and_what_nobody_asked_for_does_not() {
        let mut unflushed = Unflushed::default();
        unflushed.answered(1, 1);
        unflushed.written();
        let mark = unflushed.mark();
        assert!(unflushed.written_through(2), "nothing is lost");
        assert!(unflushed.answered(2, 3));
        unflushed.flushed_unasked(mark);
        assert!(!unflushed.tells(), "nobody has heard of it");
        assert!(!unflushed.written_through(4));
        assert!(unflushed.tells());
        assert!(unflushed.written_through(5), "the guest knows");
        assert!(!unflushed.flushed(3, mark, 6), "it was made before the guest knew");
        assert!(unflushed.flushed(6, mark, 7));
    }

    /// One that a successor has after a predecessor noted this.
    fn successor(note: Option<u64>) -> Unflushed {
        let mut unflushed = Unflushed::default();
        unflushed.written();
        assert!(!unflushed.adopt(note, 1), "nobody knows the device yet");
        unflushed
    }

    #[test]
    fn a_successor_finds_out_what_the_device_has_forgotten() {
        let mut unflushed = Unflushed::default();
        assert_eq!(unflushed.next_note(), Some(NOTHING));
        unflushed.answered(7, 1);
        unflushed.written();
        let note = unflushed.next_note();
        assert!(note.is_some() && unflushed.next_note().is_none(), "it is noted once");
        assert!(!successor(note).answered(7, 1));
        assert!(successor(note).answered(8, 1));
        assert!(!successor(None).answered(8, 1));
        let mut late = Unflushed::default();
        late.answered(8, 1);
        assert!(late.adopt(note, 1));
        assert!(!late.written_through(2));
        // All of it is flushed.
        let mark = unflushed.mark();
        assert!(unflushed.flushed(1, mark, 2));
        let note = unflushed.next_note();
        assert!(note.is_some() && !successor(note).answered(8, 1));
    }

    #[test]
    fn a_successor_tells_what_its_predecessor_has_not() {
        let mut unflushed = Unflushed::default();
        unflushed.answered(7, 1);
        unflushed.lose(2);
        let note = unflushed.next_note();
        assert!(successor(note).answered(7, 1), "whatever the device is");
        assert!(!unflushed.written_through(3));
        assert_eq!(unflushed.next_note(), None, "the answer is on its way");
        assert!(unflushed.tells());
        assert_eq!(unflushed.next_note(), Some(NOTHING));
    }

    #[test]
    fn a_first_answer_proves_nothing() {
        let mut unflushed = Unflushed::default();
        unflushed.written();
        assert!(!unflushed.answered(7, 1));
    }
}
