//! The two lines before a ring's slots: one that the sender writes, one that the receiver writes.
//!
//! Everything in them is read as single words, which are never torn, and each word carries the generation
//! that it belongs to.

use std::mem::{offset_of, size_of};

use cxl_pool::{Generation, LINE_BYTES, LINE_WORDS, LineMark};
use zerocopy::little_endian::{U32, U64};

/// The top bit of a message's last word.
pub(crate) const EPOCH_BIT: u64 = 1 << 63;

/// What the sender says about the ring.
#[repr(C)]
pub(crate) struct SenderLine {
    /// The generation that the ring was prepared for; 0 while it is not usable.
    generation: U64,
    reserved: [u8; 56],
}

/// What the receiver says about the ring.
#[repr(C)]
pub(crate) struct ReceiverLine {
    /// How many messages were consumed, modulo 2^32.
    consumed: U32,
    /// The generation that the receiver accepted.
    accepted: U32,
    /// Bit 0: asleep. Bits 1 to 31: how many times it went to sleep.
    sleep: U32,
    /// The generation that `sleep` belongs to.
    sleep_generation: U32,
    /// 1 if it never waits for the doorbell, and so never sleeps in this sense.
    bell_unused: U32,
    /// The generation that `bell_unused` belongs to.
    bell_generation: U32,
    /// 1 if the sender is to write back what it has written, on coherent memory: for speed only.
    through_memory: U32,
    /// The generation that `through_memory` belongs to.
    through_generation: U32,
    reserved: [u8; 32],
}

const _: () = assert!(size_of::<SenderLine>() == LINE_BYTES);
const _: () = assert!(size_of::<ReceiverLine>() == LINE_BYTES);
const _: () = assert!(offset_of!(ReceiverLine, accepted) == offset_of!(ReceiverLine, consumed) + 4);
const _: () = assert!(offset_of!(ReceiverLine, sleep_generation) == offset_of!(ReceiverLine, sleep) + 4);
const _: () = assert!(offset_of!(ReceiverLine, bell_generation) == offset_of!(ReceiverLine, bell_unused) + 4);
const _: () =
    assert!(offset_of!(ReceiverLine, through_generation) == offset_of!(ReceiverLine, through_memory) + 4);

/// Where in the sender's line the generation lies.
pub(crate) const GENERATION: u64 = offset_of!(SenderLine, generation) as u64;
/// Where in the receiver's line the word of `consumed` and `accepted` lies.
pub(crate) const CONSUMED: u64 = offset_of!(ReceiverLine, consumed) as u64;
/// Where in the receiver's line the word of `sleep` and `sleep_generation` lies.
pub(crate) const SLEEP: u64 = offset_of!(ReceiverLine, sleep) as u64;
/// Where in the receiver's line the word of `bell_unused` and `bell_generation` lies.
pub(crate) const BELL_UNUSED: u64 = offset_of!(ReceiverLine, bell_unused) as u64;
/// Where in the receiver's line the word of `through_memory` and `through_generation` lies.
pub(crate) const THROUGH_MEMORY: u64 = offset_of!(ReceiverLine, through_memory) as u64;

/// A word of the receiver's line: a value and the generation it belongs to.
pub(crate) const fn tagged(generation: Generation, value: u32) -> u64 {
    (generation.get() as u64) << 32 | value as u64
}

/// The value of such a word, if it belongs to this generation.
pub(crate) const fn untagged(word: u64, generation: Generation) -> Option<u32> {
    if word >> 32 == generation.get() as u64 { Some(low_bits(word)) } else { None }
}

/// The lower half of a word; a count modulo 2^32.
#[allow(clippy::cast_possible_truncation, reason = "what is above is not wanted")]
pub(crate) const fn low_bits(word: u64) -> u32 {
    word as u32
}

/// How a receiver's sleep is written down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct Sleep {
    pub(crate) asleep: bool,
    /// How many times it was announced, modulo 2^31.
    pub(crate) announcement: u32,
}

impl Sleep {
    pub(crate) const fn encode(self) -> u32 {
        self.announcement << 1 | self.asleep as u32
    }

    pub(crate) const fn decode(value: u32) -> Self {
        Self { asleep: value & 1 == 1, announcement: value >> 1 }
    }
}

/// The epoch bit of the messages in a lap. The first lap's is set, since a fresh ring is all zeros.
pub(crate) const fn epoch(lap: u64) -> u64 {
    if lap.is_multiple_of(2) { EPOCH_BIT } else { 0 }
}

/// What tells that a line's messages are of a lap with this epoch.
#[inline]
pub(crate) fn mark<const WORDS: usize>(epoch: u64) -> &'static LineMark {
    // Not made anew: wide loads of what narrower stores have just written are slow.
    if epoch == 0 { const { &mark_that_is::<WORDS>(false) } } else { const { &mark_that_is::<WORDS>(true) } }
}

const fn mark_that_is<const WORDS: usize>(set: bool) -> LineMark {
    let mut bits = [0; LINE_WORDS];
    let mut word = WORDS - 1;
    while word < LINE_WORDS {
        bits[word] = EPOCH_BIT;
        word += WORDS;
    }
    LineMark { bits, set }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_another_generation_have_no_value() {
        let word = tagged(Generation::new(7), 41);
        assert_eq!(untagged(word, Generation::new(7)), Some(41));
        assert_eq!(untagged(word, Generation::new(8)), None);
    }

    #[test]
    fn sleep_reads_back() {
        let sleep = Sleep { asleep: true, announcement: 12345 };
        assert_eq!(Sleep::decode(sleep.encode()), sleep);
    }
}
