//! The buffers of a NIC's receive area, and who holds which of them.
//!
//! A buffer is either free, or with the driver, or held by the registrations whose frontends were told of a frame in
//! it; a flooded frame has several holders. The holders are remembered by name, not only counted: a frontend that gives
//! back what it does not hold, or gives it back twice, must not free a buffer that others still read.

use cxl_pool::{Area, ByteOffset, LINE_BYTES};
use pod_protocol::objects::REGISTRATIONS_MAX;

use super::registration::RegistrationIndex;
use crate::message::MAX_PACKET_BYTES;

/// Length of a buffer: a page, as AF_XDP wants it.
pub const BUFFER_BYTES: u32 = 4096;
/// Buffers that the longest packet takes.
pub const PIECES_MAX: usize = 17;
const WORDS: usize = REGISTRATIONS_MAX / 64;

// The number of a registration is a holder, and none of these.
const _: () = assert!(REGISTRATIONS_MAX <= Holder::SEVERAL.0 as usize);
const _: () = assert!((BUFFER_BYTES as usize).is_multiple_of(LINE_BYTES));
const _: () = assert!(PIECES_MAX as u64 == MAX_PACKET_BYTES.div_ceil(BUFFER_BYTES as u64));

/// One buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferIndex(u32);

/// Who holds a buffer. Mostly that is one registration at a time: two bytes tell, and sets are only for flooded frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder(u16);

impl Holder {
    const NOBODY: Self = Self(u16::MAX);
    /// Several, or one of them that is left: a set says who.
    const SEVERAL: Self = Self(u16::MAX - 1);

    #[inline]
    fn one(index: RegistrationIndex) -> Self {
        Self(index.number())
    }
}

/// All buffers of one NIC. Allocates nothing after [`ReceiveBuffers::new`].
#[derive(Debug)]
pub struct ReceiveBuffers {
    start: u64,
    free: Vec<BufferIndex>,
    holders: Vec<Holder>,
    /// By buffer: those who hold it if they are several, and otherwise nobody. What was never written takes up no memory.
    several: Vec<[u64; WORDS]>,
    held: usize,
}

impl ReceiveBuffers {
    /// The buffers that fit into `area`, aligned to their length.
    pub fn new(area: Area) -> Self {
        let step = u64::from(BUFFER_BYTES);
        let first = area.start.bytes().get();
        let start = first.next_multiple_of(step);
        let end = first + area.bytes();
        let count = end.saturating_sub(start) / step;
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        // The lowest is handed out first.
        let free: Vec<_> = (0..count).rev().map(BufferIndex).collect();
        let (holders, several) = (vec![Holder::NOBODY; free.len()], vec![[0; WORDS]; free.len()]);
        Self { start, free, holders, several, held: 0 }
    }

    /// Where the first one begins.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.holders.len()
    }

    /// Whether the area was too small for any.
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// How many are free.
    #[inline]
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// How many are held by registrations.
    #[inline]
    pub fn held_count(&self) -> usize {
        self.held
    }

    /// Takes the last buffer out for good, for something else, and says where it lies. None may be in use yet; one stays.
    pub fn set_aside(&mut self) -> Option<ByteOffset> {
        debug_assert!(self.free.len() == self.holders.len());
        if self.free.len() < 2 {
            return None;
        }
        self.holders.pop();
        self.several.pop();
        let last = self.free.remove(0);
        Some(self.offset(last))
    }

    /// Takes a free one.
    #[inline]
    pub fn take(&mut self) -> Option<BufferIndex> {
        self.free.pop()
    }

    /// Gives one back that has no holders.
    pub fn give_back(&mut self, buffer: BufferIndex) {
        debug_assert!(!self.is_held(buffer));
        debug_assert!(self.free.len() < self.holders.len());
        self.free.push(buffer);
    }

    /// Where it begins.
    #[inline]
    pub fn offset(&self, buffer: BufferIndex) -> ByteOffset {
        ByteOffset::new(self.start + u64::from(buffer.0) * u64::from(BUFFER_BYTES))
    }

    /// Which buffer a byte lies in; `None` outside of the area.
    #[inline]
    pub fn at(&self, offset: ByteOffset) -> Option<BufferIndex> {
        let index = offset.get().checked_sub(self.start)? / u64::from(BUFFER_BYTES);
        let index = u32::try_from(index).ok()?;
        (usize::try_from(index).ok()? < self.holders.len()).then_some(BufferIndex(index))
    }

    /// Notes that a registration's frontend is told of a frame in this buffer.
    #[inline]
    pub fn hold(&mut self, buffer: BufferIndex, by: RegistrationIndex) {
        let place = buffer.0 as usize;
        match self.holders[place] {
            Holder::NOBODY => {
                self.holders[place] = Holder::one(by);
                self.held += 1;
            }
            one if one == Holder::one(by) => {}
            before => {
                if before != Holder::SEVERAL {
                    self.holders[place] = Holder::SEVERAL;
                    let (word, bit) = word_and_bit(before.0);
                    self.several[place][word] |= bit;
                }
                let (word, bit) = word_and_bit(by.number());
                self.several[place][word] |= bit;
            }
        }
    }

    /// Notes that a registration is done with this buffer, and frees it after the last one. False if the
    /// registration does not hold it.
    #[inline]
    pub fn release(&mut self, buffer: BufferIndex, by: RegistrationIndex) -> bool {
        let place = buffer.0 as usize;
        if self.holders[place] == Holder::SEVERAL {
            let (word, bit) = word_and_bit(by.number());
            let all = &mut self.several[place];
            if all[word] & bit == 0 {
                return false;
            }
            all[word] &= !bit;
            if *all != [0; WORDS] {
                return true;
            }
        } else if self.holders[place] != Holder::one(by) {
            return false;
        }
        self.holders[place] = Holder::NOBODY;
        self.held -= 1;
        self.free.push(buffer);
        true
    }

    /// Releases everything that a registration holds; returns how many that were.
    pub fn release_all(&mut self, by: RegistrationIndex) -> u32 {
        let mut released = 0;
        for index in 0..self.holders.len() {
            let buffer = BufferIndex(u32::try_from(index).expect("as many as fit u32"));
            released += u32::from(self.release(buffer, by));
        }
        released
    }

    /// Takes back what was with the driver, which is closed: every buffer without holders is free from now on.
    pub fn reclaim(&mut self) {
        self.free.clear();
        for index in (0..self.holders.len()).rev() {
            if self.holders[index] == Holder::NOBODY {
                self.free.push(BufferIndex(u32::try_from(index).expect("as many as fit u32")));
            }
        }
    }

    /// Whether any registration holds it.
    pub fn is_held(&self, buffer: BufferIndex) -> bool {
        self.holders[buffer.0 as usize] != Holder::NOBODY
    }
}

/// A registration's place in a set.
fn word_and_bit(number: u16) -> (usize, u64) {
    (usize::from(number / 64), 1 << (number % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cxl_pool::{LineCount, LineOffset};
    use proptest::prelude::*;

    fn buffers(count: u64) -> ReceiveBuffers {
        let lines = LineCount::new(count * u64::from(BUFFER_BYTES) / LINE_BYTES as u64);
        ReceiveBuffers::new(Area::new(LineOffset::new(640), lines))
    }

    fn registration(index: u16) -> RegistrationIndex {
        RegistrationIndex::new(index).expect("below the limit")
    }

    #[test]
    fn a_buffer_with_two_holders_is_free_after_both() {
        let mut buffers = buffers(4);
        let buffer = buffers.take().expect("free");
        buffers.hold(buffer, registration(0));
        buffers.hold(buffer, registration(4095));
        buffers.hold(buffer, registration(4095));
        assert!(buffers.release(buffer, registration(0)));
        assert_eq!(buffers.free_count(), 3);
        assert!(!buffers.release(buffer, registration(0)), "given back twice");
        assert!(!buffers.release(buffer, registration(1)), "never held");
        assert!(buffers.release(buffer, registration(4095)));
        assert_eq!(buffers.free_count(), 4);
    }

    #[test]
    fn what_a_closed_driver_had_is_free_again() {
        let mut buffers = buffers(4);
        let taken: Vec<_> = std::iter::from_fn(|| buffers.take()).collect();
        buffers.hold(taken[2], registration(7));
        buffers.reclaim();
        assert_eq!(buffers.free_count(), 3);
        assert!(buffers.release(taken[2], registration(7)));
        assert_eq!(buffers.free_count(), 4);
    }

    #[test]
    fn an_offset_outside_of_the_area_is_no_buffer() {
        let buffers = buffers(4);
        let first = buffers.offset(BufferIndex(0)).get();
        assert_eq!(first % u64::from(BUFFER_BYTES), 0);
        assert_eq!(buffers.at(ByteOffset::new(first - 1)), None);
        assert_eq!(buffers.at(ByteOffset::new(first + 4 * 4096)), None);
        assert_eq!(buffers.at(ByteOffset::new(first + 4 * 4096 - 1)), Some(BufferIndex(3)));
    }

    #[test]
    fn an_area_that_is_not_aligned_loses_its_margin() {
        let lines = LineCount::new(128);
        let odd = ReceiveBuffers::new(Area::new(LineOffset::new(1), lines));
        assert_eq!(odd.len(), 1);
        let none = ReceiveBuffers::new(Area::new(LineOffset::new(1), LineCount::new(3)));
        assert!(none.is_empty());
    }

    proptest! {
        #[test]
        fn no_buffer_is_lost_or_doubled(steps in prop::collection::vec((0..3u8, any::<prop::sample::Index>(), prop_oneof![0..3_u16, 0..4096_u16]), 0..400)) {
            let mut buffers = buffers(16);
            let mut held: Vec<(BufferIndex, RegistrationIndex)> = Vec::new();
            for (step, pick, who) in steps {
                let who = registration(who);
                match step {
                    0 => if let Some(buffer) = buffers.take() {
                        buffers.hold(buffer, who);
                        held.push((buffer, who));
                    },
                    1 if !held.is_empty() => {
                        let (buffer, _) = held[pick.index(held.len())];
                        if !held.contains(&(buffer, who)) {
                            buffers.hold(buffer, who);
                            held.push((buffer, who));
                        }
                    }
                    _ if !held.is_empty() => {
                        let (buffer, holder) = held.swap_remove(pick.index(held.len()));
                        prop_assert!(buffers.release(buffer, holder));
                    }
                    _ => {}
                }
                let distinct: std::collections::BTreeSet<u32> = held.iter().map(|(buffer, _)| buffer.0).collect();
                prop_assert_eq!(distinct.len() + buffers.free_count(), 16);
            }
        }
    }
}
