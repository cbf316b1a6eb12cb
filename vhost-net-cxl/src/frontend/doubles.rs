//! Flooded frames that reach an instance twice while it moves from one NIC to another.
//!
//! The old NIC floods until its backend has heard of the move, the new one from when its own has, and neither knows of the other. The
//! controller tells the old one last, after this frontend, so there is always one whose frames get here. Here both copies arrive, in any
//! order, and whichever came first is delivered. What has arrived is remembered always, since the first copy may come before anybody here
//! knows of a move.

use std::hash::Hasher;
use std::time::{Duration, Instant};

use cxl_pool::Memory;
use pod_protocol::ids::LeaseGeneration;

use crate::ethernet::FRAME_BYTES_MIN;
use crate::id_hash::IdHasher;
use crate::message::NetMessage;
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32};

/// So many frames to an instance are remembered: what comes within [`APART_MAX`] where 10,000 come in a second.
const SEEN_MAX: usize = 1024;
/// How far apart the two copies may arrive. Whoever says the same again, as who asks for an address does, waits longer than that.
const APART_MAX: Duration = Duration::from_millis(100);
/// What is compared of a frame, beside its length: its addresses, and what tells packets of one flow apart.
const FRONT_BYTES: usize = 128;

const _: () = assert!(FRONT_BYTES > FRAME_BYTES_MIN);

/// A frame that has arrived.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// What the NIC was granted the lease with that it came from.
    generation: LeaseGeneration,
    frame: u64,
    at: Instant,
}

/// The flooded frames that have arrived lately for an instance. Those of another one with more of them do not count: each has its own.
#[derive(Debug)]
pub(super) struct Doubles {
    /// The NIC that it moves to may flood to it, and the one that it leaves, too.
    pub(super) two: bool,
    seen: Vec<Option<Seen>>,
    next: usize,
}

impl Doubles {
    pub(super) fn new() -> Self {
        Self { two: false, seen: vec![None; SEEN_MAX], next: 0 }
    }

    /// Whether another NIC has delivered a frame already, whose port has its lease at `generation`. It is asked once for each frame that is heard.
    #[inline]
    pub(super) fn have_had<M: Memory>(
        &mut self,
        memory: &M,
        (first, frame_bytes): (&NetMessage, u32),
        generation: LeaseGeneration,
        now: &mut Option<Instant>,
    ) -> bool {
        is_flooded(memory, first) && self.have_had_flooded(memory, (first, frame_bytes), generation, now)
    }

    fn have_had_flooded<M: Memory>(
        &mut self,
        memory: &M,
        (first, frame_bytes): (&NetMessage, u32),
        generation: LeaseGeneration,
        now: &mut Option<Instant>,
    ) -> bool {
        // A move is about to begin.
        self.two |= first.generation.is_newer_than(generation);
        let frame = fingerprint(memory, first, frame_bytes);
        let at = *now.get_or_insert_with(Instant::now);
        self.is_double(Seen { generation: first.generation, frame, at })
    }

    /// Whether another NIC has delivered this frame. Each copy stands for one, so a frame that was sent twice arrives
    /// twice. It is only looked for where two NICs may deliver now.
    fn is_double(&mut self, new: Seen) -> bool {
        let other = |seen: &Seen| {
            seen.frame == new.frame
                && seen.generation != new.generation
                && new.at.saturating_duration_since(seen.at) <= APART_MAX
        };
        if self.two
            && let Some(first) = self.seen.iter_mut().find(|it| it.as_ref().is_some_and(other))
        {
            *first = None;
            return true;
        }
        self.seen[self.next] = Some(new);
        self.next = (self.next + 1) % SEEN_MAX;
        false
    }
}

/// Whether a frame goes to a group: broadcast or multicast.
#[inline]
fn is_flooded<M: Memory>(memory: &M, first: &NetMessage) -> bool {
    let mut address = [0];
    if first.bytes > HEADER_BYTES_U32 {
        memory.read(first.line.bytes().saturating_add(HEADER_BYTES as u64), &mut address);
    }
    address[0] & 1 == 1
}

/// What tells a frame from others.
fn fingerprint<M: Memory>(memory: &M, first: &NetMessage, frame_bytes: u32) -> u64 {
    let mut front = [0; FRONT_BYTES];
    let here = (first.bytes as usize).saturating_sub(HEADER_BYTES).min(FRONT_BYTES);
    let front = &mut front[..here];
    memory.read(first.line.bytes().saturating_add(HEADER_BYTES as u64), front);
    let mut hasher = IdHasher::default();
    hasher.write_u32(frame_bytes);
    hasher.write(front);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame of this content, from the NIC that has the lease at `generation`, so long after the first one.
    fn seen(start: Instant, generation: u16, frame: u64, after: Duration) -> Seen {
        Seen { generation: LeaseGeneration::new(generation), frame, at: start + after }
    }

    /// Of an instance that hears two NICs.
    fn of_two() -> Doubles {
        Doubles { two: true, ..Doubles::new() }
    }

    #[test]
    fn a_frame_from_two_nics_is_had_once_whichever_is_first() {
        let start = Instant::now();
        let at_once = Duration::ZERO;
        for (first, second) in [(1, 2), (2, 1)] {
            let mut doubles = of_two();
            assert!(!doubles.is_double(seen(start, first, 7, at_once)));
            assert!(doubles.is_double(seen(start, second, 7, APART_MAX)));
            assert!(!doubles.is_double(seen(start, second, 7, APART_MAX)), "it was sent once more");
        }
    }

    #[test]
    fn a_frame_that_was_sent_twice_is_had_twice() {
        let start = Instant::now();
        let mut doubles = of_two();
        let had = [1, 1, 2, 2].map(|from| doubles.is_double(seen(start, from, 7, Duration::ZERO)));
        assert_eq!(had, [false, false, true, true]);
    }

    #[test]
    fn another_frame_or_long_ago_is_something_else() {
        let start = Instant::now();
        let mut doubles = of_two();
        assert!(!doubles.is_double(seen(start, 1, 7, Duration::ZERO)));
        assert!(!doubles.is_double(seen(start, 2, 8, Duration::ZERO)));
        assert!(!doubles.is_double(seen(start, 2, 7, APART_MAX + Duration::from_millis(1))));
    }

    #[test]
    fn ten_thousand_frames_a_second_are_remembered_for_long_enough() {
        let start = Instant::now();
        let mut doubles = of_two();
        let at = |number: u64| Duration::from_micros(100 * number);
        for number in 0..=1000 {
            assert!(!doubles.is_double(seen(start, 1, number, at(number))));
        }
        assert!(doubles.is_double(seen(start, 2, 0, at(1000))));
    }

    #[test]
    fn nothing_is_looked_for_where_there_is_one_nic() {
        let start = Instant::now();
        let mut doubles = Doubles::new();
        assert!(!doubles.is_double(seen(start, 1, 7, Duration::ZERO)));
        assert!(!doubles.is_double(seen(start, 2, 7, Duration::ZERO)));
    }
}
