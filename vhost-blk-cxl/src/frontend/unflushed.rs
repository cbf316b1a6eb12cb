//! Noticing that a device lost writes which it had acknowledged and which were not flushed.
//!
//! A drive may lose them with its power, and a computer that loses its power with the drive does not mind. Here the guest
//! lives on: its next flush would vouch for data that is gone. So each answer bears the device's write verifier, and
//! where that changes while something is unflushed, flushes fail: the guest treats it as a failed drive would have it.

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
    /// No flush has told the guest yet.
    untold: bool,
    /// The last one that was carried out does.
    tells: bool,
}

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
        let fails = sequence < self.lost_before || self.untold;
        if fails {
            if std::mem::take(&mut self.untold) {
                // The guest made the requests until here before it could know, and others that are still in its rings.
                self.lost_before = next;
                self.tells = true;
            }
        } else {
            self.settled = self.settled.max(mark.0);
        }
        !fails
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
    fn a_first_answer_proves_nothing() {
        let mut unflushed = Unflushed::default();
        unflushed.written();
        assert!(!unflushed.answered(7, 1));
    }
}
