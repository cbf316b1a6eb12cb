//! Keeping away from the sender on coherent memory.

use cxl_pool::Memory;

use super::Receiver;
use crate::header::{self, EPOCH_BIT};

/// How far a receiver of coherent memory looks ahead, in lines, to learn that all up to there is new.
const SURE_LINES: u64 = 512;
/// First it looks this many times less far, so often, with pauses in between: a microsecond or two together.
const CLOSER: u64 = 8;
const LOOKS_CLOSER: u32 = if cfg!(test) { 2 } else { 6 };
/// If the sender has got there by then, it looks so often whether it gets as far as wanted.
const LOOKS_AHEAD: u32 = if cfg!(test) { 2 } else { 24 };
const PAUSES: u32 = 10;
/// Who is close behind the sender slows it down, and so stays close: it looks ahead once in so many lines, too.
pub(super) const AWAY_LINES: u64 = 2048;

impl<M: Memory, const WORDS: usize> Receiver<M, WORDS> {
    /// On coherent memory, while many messages come: keeps away from the lines that the sender is just writing. Each time that
    /// one of the two gets hold of such a line, the other one loses it.
    ///
    /// Lines become visible in their order, so that if a line far ahead is new, the sender has left all up to it. As long as it
    /// is not, it is the one that was read a lap ago, so that to look there costs nothing, or next to nothing where that was let go
    /// of. Nothing but speed depends on it.
    #[inline]
    pub(super) fn look_ahead(&mut self) {
        let furthest = self.distance();
        if self.streak < furthest {
            if self.received < self.away_at {
                return;
            }
            self.away_at = self.received + AWAY_LINES * Self::SLOTS_PER_LINE;
        }
        // A sender that writes as fast as it can soon gets ahead, once nobody touches what it writes. Else on with what there is.
        let closer = (furthest / CLOSER).max(Self::SLOTS_PER_LINE);
        if !(self.wait_for(closer, LOOKS_CLOSER) && self.wait_for(furthest, LOOKS_AHEAD)) {
            // Nor is it tried again at once: messages that come at a rate at which nothing needs to be waited for would stay as far
            // behind as the first hiccup put them.
            self.streak = 0;
        }
    }

    /// Waits until so many messages are there, on coherent memory, but not for long. Says whether they are.
    #[inline]
    fn wait_for(&mut self, messages: u64, looks: u32) -> bool {
        let last = self.received + messages - 1;
        for look in 0..looks {
            if self.is_new(last) {
                self.sure = last + 1;
                return true;
            }
            if look + 1 < looks {
                (0..PAUSES).for_each(|_| std::hint::spin_loop());
            }
        }
        false
    }

    /// How many messages a receiver of coherent memory wants to be behind the sender.
    #[inline]
    pub(super) fn distance(&self) -> u64 {
        SURE_LINES.min(self.lines / 2).max(1) * Self::SLOTS_PER_LINE
    }

    /// Whether a message not a lap ahead is there, on coherent memory. Not if it might be a slot that was emptied.
    #[inline]
    fn is_new(&self, message: u64) -> bool {
        let slot = message & (self.slots - 1);
        let last = self.last_word(self.first_slot.saturating_add(slot * Self::SLOT_BYTES));
        last != 0 && last & EPOCH_BIT == header::epoch(message >> self.slots.trailing_zeros())
    }
}
