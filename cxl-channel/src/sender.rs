//! The sending side of a channel.

use cxl_pool::{ByteOffset, Generation, LINE_BYTES, Memory};
use thiserror::Error;

use crate::RingPlacement;
use crate::header::{self, EPOCH_BIT, Sleep};

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

/// The sending side of a channel of messages of `WORDS` words: 2 (16 B) or 8 (64 B).
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
        let sender_line = placement.sender_line();
        let say = |generation: u64| {
            let at = sender_line.saturating_add(header::GENERATION);
            memory.store(at, generation);
            memory.write_back(at, 8);
            memory.full_fence();
        };
        // A receiver of the older generation may still look. So the ring is closed first, for it to tell emptied slots from
        // messages. And only the words with the epochs are zeroed: what it is just reading must not change under it. The
        // others change once a receiver accepted the new generation, and then the older one is gone.
        say(0);
        for slot in 0..u64::from(placement.slots) {
            memory.store(placement.first_slot().saturating_add((slot + 1) * Self::SLOT_BYTES - 8), 0);
        }
        memory.flush(placement.first_slot(), u64::from(placement.slots) * Self::SLOT_BYTES);
        memory.full_fence();
        say(generation.get().into());
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
            answered: 0,
        }
    }

    /// Whether to look if the receiver sleeps each time something is published, which costs a fence, and on
    /// non-coherent memory a fetch too. To be switched off where receivers never wait for a doorbell.
    pub fn set_wakeups(&mut self, wakeups: bool) {
        self.wakeups = wakeups;
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
    #[inline]
    pub fn free(&mut self) -> u32 {
        if self.ready && self.sent - self.consumed < self.slots {
            return self.known_free();
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
        let slot = self.sent & (self.slots - 1);
        let epoch = header::epoch(self.sent >> self.slots.trailing_zeros());
        let at = self.first_slot.saturating_add(slot * Self::SLOT_BYTES);
        // The line may be evicted between any two of these stores: the word with the epoch comes last.
        for (word, value) in message[..WORDS - 1].iter().enumerate() {
            self.memory.store(at.saturating_add(word as u64 * 8), *value);
        }
        let last = message[WORDS - 1] & !EPOCH_BIT | epoch;
        self.memory.store(at.saturating_add(WORDS as u64 * 8 - 8), last);
        self.sent += 1;
        if self.sent.is_multiple_of(Self::SLOTS_PER_LINE) {
            self.memory.write_back(at, Self::SLOT_BYTES);
        }
        Ok(())
    }

    /// Makes visible what was sent, and says whether the receiver must be woken for it.
    #[inline]
    pub fn publish(&mut self) -> Wake {
        if self.published == self.sent {
            return Wake::NotNeeded;
        }
        self.published = self.sent;
        if !self.sent.is_multiple_of(Self::SLOTS_PER_LINE) {
            let slot = (self.sent - 1) & (self.slots - 1);
            let at = self.first_slot.saturating_add(slot * Self::SLOT_BYTES);
            self.memory.write_back(at, Self::SLOT_BYTES);
        }
        if !self.wakeups {
            return Wake::NotNeeded;
        }
        // The fence in here comes between the message and the look at the announcement, as the receiver's comes
        // between the announcement and its look at the ring: one of the two sees what the other wrote.
        let sleep = self.fetch_receiver_line();
        if sleep.asleep && sleep.announcement != self.answered {
            self.answered = sleep.announcement;
            return Wake::Needed;
        }
        Wake::NotNeeded
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
            self.ready = true;
            let more = u64::from(consumed.wrapping_sub(header::low_bits(self.consumed)));
            // A receiver that claims to have consumed what was never sent is wrong, and is not believed.
            if more <= self.sent - self.consumed {
                self.consumed += more;
            }
        }
        let word = self.memory.load(line.saturating_add(header::SLEEP));
        header::untagged(word, self.generation).map(Sleep::decode).unwrap_or_default()
    }
}
