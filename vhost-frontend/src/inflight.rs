//! The region in which a device records the requests that it took and has not completed, so that a successor of a
//! dead process resumes them: vhost-user's in-flight region for split queues.
//!
//! The VMM keeps the memory; any backend that knows the layout can go on with it. One queue after the other, each
//! padded to a cache line:
//!
//! ```text
//!  byte  0        8         10        12                14         16
//!        +--------+---------+---------+-----------------+----------+---------------------------
//!        |features| version | entries | last_batch_head | used_idx | entry 0 | entry 1 | ...
//!        +--------+---------+---------+-----------------+----------+---------------------------
//!  entry 0            1            6        8         16
//!        +------------+------------+--------+---------+
//!        | in flight  | -          | next   | counter |
//!        +------------+------------+--------+---------+
//! ```
//!
//! Completing some together is a transaction: each head into `last_batch_head`, with the one before it as its `next`; the used ring's
//! entries and index; the heads' in-flight marks off; the used index into `used_idx`. Whoever finds `used_idx` behind the used ring knows
//! that as many heads as that is were completed, from the one in `last_batch_head` on, and takes their marks off.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use thiserror::Error;
use vm_memory::{MmapRegion, VolatileMemory};

const VERSION: u16 = 1;
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const ALIGN: usize = 64;

const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_INDEX_AT: usize = 14;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;
const _: () = assert!(USED_INDEX_AT + 2 == HEADER_BYTES && COUNTER_AT + 8 == ENTRY_BYTES);

/// An in-flight region that cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum InflightError {
    /// It is shorter than its queues.
    #[error("the in-flight region has {has} bytes, {queues} queues of {size} need {needs}")]
    TooSmall {
        /// Its length.
        has: usize,
        /// Number of queues.
        queues: u16,
        /// Entries of each.
        size: u16,
        /// As long as it would have to be.
        needs: usize,
    },
    /// Another layout.
    #[error("the in-flight region has version {version} for {entries} entries, this is version 1 for {size}")]
    Layout {
        /// Its version.
        version: u16,
        /// Its entries.
        entries: u16,
        /// The queue's entries.
        size: u16,
    },
}

/// What a queue must do again.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Resubmission {
    /// Heads in the order in which they were taken.
    pub heads: Vec<u16>,
    /// The available index to go on with.
    pub next_available: u16,
}

/// Bytes of a region for `queues` queues of `size` entries.
pub fn region_bytes(queues: u16, size: u16) -> usize {
    usize::from(queues) * queue_bytes(size)
}

fn queue_bytes(size: u16) -> usize {
    (HEADER_BYTES + ENTRY_BYTES * usize::from(size)).next_multiple_of(ALIGN)
}

/// One queue's part of the region.
#[derive(Debug)]
pub struct InflightQueue {
    region: Arc<MmapRegion<()>>,
    start: usize,
    size: u16,
    counter: u64,
}

impl InflightQueue {
    /// Opens the part of queue `index` of a region made for `queues` queues of `region_size` entries; the queue itself
    /// has `size` of them in use. A region of zeros is new and is set up.
    pub fn open(
        region: Arc<MmapRegion<()>>,
        queues: u16,
        region_size: u16,
        index: u16,
        size: u16,
    ) -> Result<Self, InflightError> {
        let needs = region_bytes(queues, region_size);
        if index >= queues || size > region_size || region.size() < needs {
            let has = region.size();
            return Err(InflightError::TooSmall { has, queues, size: size.max(region_size), needs });
        }
        let queue = Self { region, start: usize::from(index) * queue_bytes(region_size), size, counter: 0 };
        let version = queue.half(VERSION_AT).load(Ordering::Acquire);
        let entries = queue.half(ENTRIES_AT).load(Ordering::Acquire);
        if version == 0 {
            queue.half(ENTRIES_AT).store(region_size, Ordering::Release);
            queue.half(VERSION_AT).store(VERSION, Ordering::Release);
        } else if version != VERSION || entries < size || entries > region_size {
            return Err(InflightError::Layout { version, entries, size });
        }
        Ok(queue)
    }

    /// Finds what was in flight, given the index of the used ring in guest memory.
    pub(crate) fn recover(&mut self, used_index: u16) -> Resubmission {
        let last = used_index.wrapping_sub(self.half(USED_INDEX_AT).load(Ordering::Acquire));
        if last > self.size {
            // No batch is longer than the ring: it has been used, or begun anew, without this record, whose marks are of another time.
            (0..self.size).for_each(|head| self.mark(head).store(0, Ordering::Release));
        }
        // The last completions reached the used ring, but the predecessor died before it took their marks off.
        let mut head = self.half(LAST_BATCH_HEAD_AT).load(Ordering::Acquire);
        for _ in 0..last.min(self.size) {
            if head >= self.size {
                break;
            }
            self.mark(head).store(0, Ordering::Release);
            head = self.half_of_entry(head, NEXT_AT).load(Ordering::Acquire);
        }
        self.half(USED_INDEX_AT).store(used_index, Ordering::Release);
        let mut heads: Vec<(u64, u16)> = (0..self.size)
            .filter(|&head| self.mark(head).load(Ordering::Acquire) == 1)
            .map(|head| (self.entry_counter(head).load(Ordering::Acquire), head))
            .collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        let heads: Vec<u16> = heads.into_iter().map(|(_, head)| head).collect();
        // Whatever was taken is either used or in flight; what the VMM believes may be older. There are at most `size`.
        #[allow(clippy::cast_possible_truncation)]
        let next_available = used_index.wrapping_add(heads.len() as u16);
        Resubmission { heads, next_available }
    }

    /// Whether a predecessor may have left anything in flight. Of what it completed last it may not have taken the mark off.
    pub(crate) fn has_marks(&self) -> bool {
        (0..self.size).any(|head| self.mark(head).load(Ordering::Acquire) == 1)
    }

    /// Records that `head` was taken from the available ring.
    pub(crate) fn take(&mut self, head: u16) {
        self.entry_counter(head).store(self.counter, Ordering::Release);
        self.mark(head).store(1, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
    }

    /// Undoes [`InflightQueue::take`].
    pub(crate) fn put_back(&mut self, head: u16) {
        self.mark(head).store(0, Ordering::Release);
    }

    /// To be called before these heads go into the used ring, in this order.
    pub(crate) fn completing(&self, heads: impl Iterator<Item = u16>) {
        for head in heads {
            let before = self.half(LAST_BATCH_HEAD_AT).load(Ordering::Relaxed);
            self.half_of_entry(head, NEXT_AT).store(before, Ordering::Release);
            self.half(LAST_BATCH_HEAD_AT).store(head, Ordering::Release);
        }
    }

    /// To be called after the used ring's index became `used_index` by them.
    pub(crate) fn completed(&self, heads: impl Iterator<Item = u16>, used_index: u16) {
        for head in heads {
            self.mark(head).store(0, Ordering::Release);
        }
        self.half(USED_INDEX_AT).store(used_index, Ordering::Release);
    }

    fn half(&self, at: usize) -> &AtomicU16 {
        self.region
            .get_atomic_ref(self.start + at)
            .expect("open() compared the region's size with the queue's")
    }

    fn half_of_entry(&self, head: u16, at: usize) -> &AtomicU16 {
        self.half(self.entry(head) + at)
    }

    fn mark(&self, head: u16) -> &AtomicU8 {
        self.region
            .get_atomic_ref(self.start + self.entry(head))
            .expect("open() compared the region's size with the queue's")
    }

    fn entry_counter(&self, head: u16) -> &AtomicU64 {
        self.region
            .get_atomic_ref(self.start + self.entry(head) + COUNTER_AT)
            .expect("open() compared the region's size with the queue's")
    }

    fn entry(&self, head: u16) -> usize {
        debug_assert!(head < self.size);
        HEADER_BYTES + ENTRY_BYTES * usize::from(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(queues: u16, size: u16) -> Arc<MmapRegion<()>> {
        Arc::new(MmapRegion::new(region_bytes(queues, size)).unwrap())
    }

    #[test]
    fn the_layout_is_the_specifications() {
        assert_eq!(region_bytes(1, 128), 16 + 128 * 16 + 48);
        assert_eq!(region_bytes(2, 3), 128);
    }

    #[test]
    fn heads_come_back_in_the_order_in_which_they_were_taken() {
        let region = region(2, 8);
        let mut queue = InflightQueue::open(Arc::clone(&region), 2, 8, 1, 8).unwrap();
        assert_eq!(queue.recover(100), Resubmission { heads: vec![], next_available: 100 });
        for head in [5, 0, 7, 2] {
            queue.take(head);
        }
        queue.completing([0].into_iter());
        queue.completed([0].into_iter(), 101);
        drop(queue);
        let mut successor = InflightQueue::open(Arc::clone(&region), 2, 8, 1, 8).unwrap();
        assert_eq!(successor.recover(101), Resubmission { heads: vec![5, 7, 2], next_available: 104 });
        // The other queue is untouched.
        let mut other = InflightQueue::open(region, 2, 8, 0, 8).unwrap();
        assert_eq!(other.recover(9), Resubmission { heads: vec![], next_available: 9 });
    }

    #[test]
    fn a_death_between_used_ring_and_mark_does_not_repeat_the_request() {
        let region = region(1, 8);
        let mut queue = InflightQueue::open(Arc::clone(&region), 1, 8, 0, 8).unwrap();
        queue.recover(0);
        queue.take(3);
        queue.take(4);
        queue.completing([3].into_iter());
        // The used index became 1, and then the process died.
        let mut successor = InflightQueue::open(Arc::clone(&region), 1, 8, 0, 8).unwrap();
        assert_eq!(successor.recover(1), Resubmission { heads: vec![4], next_available: 2 });
        // Had it died before the used index moved, both would come again.
        successor.take(3);
        successor.completing([3].into_iter());
        let mut successor = InflightQueue::open(region, 1, 8, 0, 8).unwrap();
        assert_eq!(successor.recover(1), Resubmission { heads: vec![4, 3], next_available: 3 });
    }

    #[test]
    fn nor_does_one_repeat_any_of_those_that_were_completed_together() {
        let region = region(1, 8);
        let open = || InflightQueue::open(Arc::clone(&region), 1, 8, 0, 8).unwrap();
        let mut queue = open();
        queue.recover(u16::MAX);
        for head in 1..=6 {
            queue.take(head);
        }
        queue.completing([1].into_iter());
        queue.completed([1].into_iter(), 0);
        queue.completing([4, 2, 6].into_iter());
        // Before the used index moved all of them come again, and after it none.
        assert_eq!(open().recover(0), Resubmission { heads: vec![2, 3, 4, 5, 6], next_available: 5 });
        assert_eq!(open().recover(3), Resubmission { heads: vec![3, 5], next_available: 5 });
    }

    #[test]
    fn marks_of_a_ring_that_has_begun_anew_are_none() {
        let region = region(1, 8);
        let mut queue = InflightQueue::open(Arc::clone(&region), 1, 8, 0, 8).unwrap();
        queue.recover(50);
        for head in [7, 1] {
            queue.take(head);
        }
        let mut successor = InflightQueue::open(region, 1, 8, 0, 8).unwrap();
        assert_eq!(successor.recover(0), Resubmission { heads: vec![], next_available: 0 });
    }

    #[test]
    fn a_new_region_on_a_used_ring_does_not_clear_descriptor_0() {
        let region = region(1, 8);
        let mut queue = InflightQueue::open(Arc::clone(&region), 1, 8, 0, 8).unwrap();
        assert_eq!(queue.recover(77).next_available, 77);
        queue.take(0);
        let mut successor = InflightQueue::open(region, 1, 8, 0, 8).unwrap();
        assert_eq!(successor.recover(77), Resubmission { heads: vec![0], next_available: 78 });
    }

    #[test]
    fn regions_that_do_not_fit_are_refused() {
        let small = Arc::new(MmapRegion::new(64).unwrap());
        assert!(matches!(InflightQueue::open(small, 1, 8, 0, 8), Err(InflightError::TooSmall { .. })));
        assert!(matches!(InflightQueue::open(region(1, 8), 1, 8, 1, 8), Err(InflightError::TooSmall { .. })));
        let other = region(1, 8);
        other.get_atomic_ref::<AtomicU16>(VERSION_AT).unwrap().store(2, Ordering::Relaxed);
        assert!(matches!(
            InflightQueue::open(other, 1, 8, 0, 8),
            Err(InflightError::Layout { version: 2, .. })
        ));
    }
}
