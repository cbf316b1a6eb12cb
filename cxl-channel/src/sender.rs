//! The sending side of a channel.

use cxl_pool::{ByteOffset, Generation, LINE_BYTES, LINE_WORDS, Memory};
use thiserror::Error;

use crate::RingPlacement;
use crate::handover::Written;
use crate::header::{self, EPOCH_BIT, Sleep, low_bits};

/// The ring has no room, or the receiver has not accepted the generation yet. Try again later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the channel has no room")]
pub struct Full;

/// Whether the receiver's doorbell must be rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a receiver that announced its sleep hears of messages only by its doorbell"]
pub enum Wake {
    /// The receiver announced that it sleeps: ring. Said once per announcement.
    Needed,
    /// The receiver is awake, or was told already.
    NotNeeded,
}

/// How far ahead of whole lines the ones to come are fetched. Near enough to find them still in the first-level cache.
const WRITE_AHEAD_BYTES: u64 = 32 * LINE_BYTES as u64;

/// After publishing so often, a sender waits until that has been written back before it gathers more.
const UNDER_WAY_LIMIT: u32 = if cfg!(test) { 2 } else { 4 };

/// The message with the epoch in its top bit.
#[inline]
fn with_epoch<const WORDS: usize>(mut message: [u64; WORDS], epoch: u64) -> [u64; WORDS] {
    message[WORDS - 1] = message[WORDS - 1] & !EPOCH_BIT | epoch;
    message
}

/// The sending side of a channel of messages of `WORDS` words: 2 (16 B) or 8 (64 B).
#[cfg_attr(test, derive(Clone, Hash))]
pub struct Sender<M: Memory, const WORDS: usize> {
    memory: M,
    placement: RingPlacement,
    generation: Generation,
    first_slot: ByteOffset,
    slots: u64,
    sent: u64,
    published: u64,
    /// What the receiver last said that it consumed.
    consumed: u64,
    ready: bool,
    wakeups: bool,
    /// Whether it waits for what was published half full: for speed only.
    waits: bool,
    /// How often something was published since a full fence; the limit if the next message goes into a line that was
    /// published before it was full. Not counted on coherent memory.
    under_way: u32,
    /// On coherent memory: what the receiver asks for.
    written: Written,
    /// The announcement of sleep that was last answered with a wake-up.
    answered: u32,
}

impl<M: Memory, const WORDS: usize> Sender<M, WORDS> {
    const SLOT_BYTES: u64 = {
        assert!(WORDS.is_power_of_two() && WORDS <= LINE_BYTES / 8, "a message must not straddle lines");
        WORDS as u64 * 8
    };
    const SLOTS_PER_LINE: u64 = LINE_BYTES as u64 / Self::SLOT_BYTES;

    /// Begins a generation: empties the ring of whatever is in it. Messages can be sent once the receiver has
    /// accepted; see [`ready`](Self::ready). A sleeping receiver does not notice by itself: ring its doorbell.
    ///
    /// # Panics
    ///
    /// If the placement is not one that [`RingPlacement::check`] accepts, or the generation is 0.
    pub fn begin(memory: M, placement: RingPlacement, generation: Generation) -> Self {
        placement.expect_valid(WORDS, &memory);
        assert!(generation.get() != 0, "generation 0 stands for none");
        let said = placement.sender_line().saturating_add(header::GENERATION);
        // Of another ring that lay here, something may be cached.
        memory.flush(placement.sender_line(), LINE_BYTES as u64);
        memory.full_fence();
        // A receiver of the older generation may still look. So the ring is closed first, for it to tell emptied slots from
        // messages. And only the words with the epochs are zeroed: what it is just reading must not change under it. The
        // others change once a receiver accepted the new generation, and then the older one is gone.
        memory.store(said, 0);
        memory.write_back(said, 8);
        memory.full_fence();
        for slot in 0..u64::from(placement.slots) {
            memory.store(placement.first_slot().saturating_add((slot + 1) * Self::SLOT_BYTES - 8), 0);
        }
        memory.flush(placement.first_slot(), u64::from(placement.slots) * Self::SLOT_BYTES);
        memory.full_fence();
        memory.store(said, generation.get().into());
        memory.write_back(said, 8);
        memory.full_fence();
        Self {
            memory,
            placement,
            generation,
            first_slot: placement.first_slot(),
            slots: placement.slots.into(),
            sent: 0,
            published: 0,
            consumed: 0,
            ready: false,
            wakeups: true,
            waits: true,
            under_way: 0,
            written: Written::Stays,
            answered: 0,
        }
    }

    /// Whether to look if the receiver sleeps each time something is published, which costs a fence, and on
    /// non-coherent memory a fetch too. To be switched off where receivers never wait for a doorbell; one that
    /// [says so](crate::Receiver::without_doorbell) is not looked after in any case.
    pub fn set_wakeups(&mut self, wakeups: bool) {
        self.wakeups = wakeups;
    }

    /// Whether [`free`](Self::free) waits for what was published half full. Only the paper's sender does not, which the
    /// benchmarks compare this one with.
    pub fn set_waits(&mut self, waits: bool) {
        self.waits = waits;
    }

    /// The channel's generation.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// How many messages were sent.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Whether the receiver has accepted this generation. Cheap once it has.
    pub fn ready(&mut self) -> bool {
        if !self.ready {
            self.fetch_receiver_line();
        }
        self.ready
    }

    /// How many messages can be sent now, by what is known; looks again if that is none.
    ///
    /// Ask before you gather what is to be sent: if a line was published half full, or one after the other was, this waits
    /// until they have been written back, and what comes up meanwhile can go with the rest.
    #[inline]
    pub fn free(&mut self) -> u32 {
        self.free_for(1)
    }

    /// As [`free`](Self::free), but looks again if fewer than `wanted` are known: what is known shrinks with each message until
    /// then, however far the receiver is.
    #[inline]
    pub fn free_for(&mut self, wanted: u32) -> u32 {
        if !M::COHERENT && self.waits && self.under_way >= UNDER_WAY_LIMIT {
            // For speed only. Otherwise stores queue up behind write-backs of the same line, or behind fetches of lines that
            // the receiver flushed, and messages wait there that could have gone together.
            self.memory.full_fence();
            self.under_way = 0;
        }
        let known = self.known_free();
        if known >= wanted.max(1) {
            return known;
        }
        self.fetch_receiver_line();
        self.known_free()
    }

    /// Puts a message into the ring. Its top bit is the channel's: what the message has there is lost. The receiver
    /// sees it after [`publish`](Self::publish), or earlier.
    #[inline]
    pub fn send(&mut self, message: [u64; WORDS]) -> Result<(), Full> {
        if self.free() == 0 {
            return Err(Full);
        }
        self.put(message);
        Ok(())
    }

    /// Puts as many of the messages into the ring as there is known to be room for, at least one if there is any, and
    /// says how many. Like [`send`](Self::send) for each, but whole lines are written at once.
    #[inline]
    pub fn send_batch(&mut self, messages: &[[u64; WORDS]]) -> usize {
        if let ([message], true) = (messages, WORDS < LINE_WORDS) {
            // There is no line to gather, and somebody may wait for it.
            return usize::from(self.send(*message).is_ok());
        }
        let count = messages.len().min(self.free() as usize);
        let per_line = LINE_WORDS / WORDS;
        let to_line_end = per_line - 1 - low_bits(self.sent.wrapping_sub(1)) as usize % per_line;
        let (first, rest) = messages[..count].split_at(to_line_end.min(count));
        for message in first {
            self.put(*message);
        }
        let (lines, last) = rest.split_at(rest.len() - rest.len() % per_line);
        self.put_lines(lines);
        for message in last {
            self.put(*message);
        }
        count
    }

    #[inline]
    fn put(&mut self, message: [u64; WORDS]) {
        let at = self.next_slot();
        let message = with_epoch(message, self.epoch());
        // The line may be evicted between any two words: the one with the epoch comes last.
        self.memory.store_words(at, message);
        self.sent += 1;
        if self.sent.is_multiple_of(Self::SLOTS_PER_LINE) {
            self.memory.write_back(at, Self::SLOT_BYTES);
        }
    }

    /// Puts messages that fill whole lines.
    #[inline]
    fn put_lines(&mut self, mut messages: &[[u64; WORDS]]) {
        while !messages.is_empty() {
            // On to the end of the lap, where the epoch changes.
            let left = self.slots - (self.sent & (self.slots - 1));
            let (lap, rest) = messages.split_at(messages.len().min(low_bits(left) as usize));
            let at = self.next_slot();
            let lines = lap.as_flattened().as_chunks().0;
            self.fetch_ahead(at, lines.len());
            self.memory.store_lines(at, lines, header::mark::<WORDS>(self.epoch()));
            self.memory.write_back(at, (lines.len() * LINE_BYTES) as u64);
            if M::COHERENT && self.written == Written::GoesBack {
                self.memory.pass_on(at, (lines.len() * LINE_BYTES) as u64);
            }
            self.sent += lap.len() as u64;
            messages = rest;
        }
    }

    /// Gets hold of lines that will be written soon, so that then they need not be waited for.
    #[inline]
    fn fetch_ahead(&self, at: ByteOffset, lines: usize) {
        let ring_bytes = self.slots * Self::SLOT_BYTES;
        let ahead = at.get() - self.first_slot.get() + WRITE_AHEAD_BYTES;
        let ahead = if ahead >= ring_bytes { ahead - ring_bytes } else { ahead };
        if ahead < ring_bytes {
            let bytes = ring_bytes.min(ahead + (lines * LINE_BYTES) as u64) - ahead;
            self.memory.prefetch_to_write(self.first_slot.saturating_add(ahead), bytes);
        }
    }

    #[inline]
    fn next_slot(&self) -> ByteOffset {
        self.first_slot.saturating_add((self.sent & (self.slots - 1)) * Self::SLOT_BYTES)
    }

    #[inline]
    fn epoch(&self) -> u64 {
        header::epoch(self.sent >> self.slots.trailing_zeros())
    }

    /// Makes visible what was sent, and says whether the receiver must be woken for it.
    #[inline]
    pub fn publish(&mut self) -> Wake {
        if self.published == self.sent {
            return Wake::NotNeeded;
        }
        self.published = self.sent;
        let half_full = !self.sent.is_multiple_of(Self::SLOTS_PER_LINE);
        if half_full {
            let slot = (self.sent - 1) & (self.slots - 1);
            let at = self.first_slot.saturating_add(slot * Self::SLOT_BYTES);
            self.memory.write_back(at, Self::SLOT_BYTES);
        }
        if !M::COHERENT {
            self.under_way =
                if half_full { UNDER_WAY_LIMIT } else { (self.under_way + 1).min(UNDER_WAY_LIMIT) };
        }
        if !self.wakeups {
            return Wake::NotNeeded;
        }
        // First the message must have arrived, and only then is the announcement fetched, as the receiver does it the other
        // way round: one of the two sees what the other wrote. One fence for both would not do: a line that is invalidated
        // before the message has arrived may be brought in again before that, too early to show the announcement.
        if !M::COHERENT {
            self.memory.full_fence();
        }
        let sleep = self.fetch_receiver_line();
        if sleep.asleep && sleep.announcement != self.answered {
            self.answered = sleep.announcement;
            return Wake::Needed;
        }
        Wake::NotNeeded
    }

    /// What becomes of what it has written, on coherent memory.
    #[cfg(test)]
    pub(crate) fn written(&self) -> Written {
        self.written
    }

    fn known_free(&self) -> u32 {
        // Never more than `slots`, which is a u32.
        if self.ready { u32::try_from(self.slots - (self.sent - self.consumed)).unwrap_or(0) } else { 0 }
    }

    /// Reads the receiver's line anew.
    fn fetch_receiver_line(&mut self) -> Sleep {
        let line = self.placement.receiver_line();
        self.memory.invalidate(line, LINE_BYTES as u64);
        self.memory.full_fence();
        let word = self.memory.load(line.saturating_add(header::CONSUMED));
        if let Some(consumed) = header::untagged(word, self.generation) {
            if !self.ready {
                self.ready = true;
                // Said before the acceptance and in its line. One that has never heard of this may sleep.
                let word = self.memory.load(line.saturating_add(header::BELL_UNUSED));
                self.wakeups &= header::untagged(word, self.generation) != Some(1);
            }
            let more = u64::from(consumed.wrapping_sub(low_bits(self.consumed)));
            // A receiver that claims to have consumed what was never sent is wrong, and is not believed.
            if more <= self.sent - self.consumed {
                self.consumed += more;
            }
        }
        if M::COHERENT {
            // One that has never heard of this does not ask.
            let word = self.memory.load(line.saturating_add(header::THROUGH_MEMORY));
            let asked = header::untagged(word, self.generation) == Some(1);
            self.written = if asked { Written::GoesBack } else { Written::Stays };
        }
        let word = self.memory.load(line.saturating_add(header::SLEEP));
        header::untagged(word, self.generation).map(Sleep::decode).unwrap_or_default()
    }
}
