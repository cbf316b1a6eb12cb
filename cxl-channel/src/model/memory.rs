//! The memory that the channels of the search work on, and what may be left out or done wrong there.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::panic::Location;

use cxl_pool::{ByteOffset, LINE_BYTES, LINE_WORDS, LineMark, Memory};
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::mutation::{Mutation, Operation, Site};
use super::step::Step;

thread_local! {
    static WIDE: Cell<bool> = const { Cell::new(false) };
    static STEP: RefCell<Option<Step>> = const { RefCell::new(None) };
    static MUTATION: RefCell<Option<Mutation>> = const { RefCell::new(None) };
    static SITES: RefCell<BTreeSet<Site>> = const { RefCell::new(BTreeSet::new()) };
}

/// Runs a call in a step.
pub(super) fn in_step<R>(step: &mut Option<Step>, call: impl FnOnce() -> R) -> R {
    STEP.set(step.take());
    let result = call();
    *step = STEP.take();
    result
}

/// Whether from here on, on this thread, whole lines are stored and loaded by instructions that say nothing of the order
/// inside them.
pub(super) fn set_wide(wide: bool) {
    WIDE.set(wide);
}

/// From here on this is left out or done wrong, on this thread; the sites seen so far are returned.
pub(super) fn mutate(mutation: Option<Mutation>) -> BTreeSet<Site> {
    MUTATION.set(mutation);
    SITES.take()
}

fn with_step<R>(run: impl FnOnce(&mut Step) -> R) -> R {
    STEP.with_borrow_mut(|step| run(step.as_mut().expect("the channel is used outside a step")))
}

/// What is to be done wrong here.
fn mutation_at(operation: Operation, location: &'static Location<'static>) -> Option<Mutation> {
    let site = Site::new(operation, location);
    SITES.with_borrow_mut(|sites| sites.insert(site.clone()));
    MUTATION.with_borrow(Clone::clone).filter(|mutation| mutation.site == site)
}

fn place(at: ByteOffset) -> (usize, usize) {
    let at = usize::try_from(at.get()).unwrap();
    (at / LINE_BYTES, at % LINE_BYTES / 8)
}

/// The memory as one side sees it. Has nothing inside, so that the search may copy channels as it likes.
#[derive(Clone, Hash)]
pub(super) struct ModelMemory<const COHERENT: bool>;

/// Large enough for every ring that is tried.
pub(super) const LINES: u64 = 16;

impl<const COHERENT: bool> ModelMemory<COHERENT> {
    fn each_line(at: ByteOffset, bytes: u64, mut run: impl FnMut(&mut Step, usize)) {
        let first = place(at).0;
        let last = place(at.saturating_add(bytes - 1)).0;
        with_step(|step| (first..=last).for_each(|line| run(step, line)));
    }
}

impl<const MODEL_COHERENT: bool> Memory for ModelMemory<MODEL_COHERENT> {
    const COHERENT: bool = MODEL_COHERENT;

    fn size_bytes(&self) -> u64 {
        LINES * LINE_BYTES as u64
    }

    fn load(&self, at: ByteOffset) -> u64 {
        let (line, word) = place(at);
        with_step(|step| step.load(line, word))
    }

    #[track_caller]
    fn store(&self, at: ByteOffset, value: u64) {
        if mutation_at(Operation::Store, Location::caller()).is_none() {
            let (line, word) = place(at);
            with_step(|step| step.store(line, word, value));
        }
    }

    #[track_caller]
    fn load_words<const N: usize>(&self, at: ByteOffset) -> [u64; N] {
        let mutation = mutation_at(Operation::LoadWords, Location::caller());
        let mut words = [0; N];
        for turn in 0..N {
            let word = if mutation.is_some() { turn } else { N - 1 - turn };
            words[word] = self.load(at.saturating_add(word as u64 * 8));
        }
        words
    }

    #[track_caller]
    fn store_words<const N: usize>(&self, at: ByteOffset, words: [u64; N]) {
        let backwards = mutation_at(Operation::StoreWords, Location::caller()).is_some();
        let stuck_epoch = mutation_at(Operation::Epoch, Location::caller()).is_some();
        let (line, first) = place(at);
        for turn in 0..N {
            let word = if backwards { N - 1 - turn } else { turn };
            // No message of the tests has this bit but in its last word.
            let value = words[word] | u64::from(stuck_epoch && words[word] >> 62 & 1 == 1) << 63;
            with_step(|step| step.store(line, first + word, value));
        }
    }

    #[track_caller]
    fn store_lines(&self, at: ByteOffset, lines: &[[u64; LINE_WORDS]], mark: &LineMark) {
        let marks_first = mutation_at(Operation::StoreLines, Location::caller()).is_some();
        let stuck_epoch = mutation_at(Operation::Epoch, Location::caller()).is_some();
        let mark = LineMark { set: mark.set || stuck_epoch, ..*mark };
        let store = |line, word, value| with_step(|step| step.store(line, word, value));
        for (line, words) in (place(at).0..).zip(lines) {
            let marked: [u64; LINE_WORDS] = std::array::from_fn(|word| mark.apply(word, words[word]));
            if WIDE.get() && !marks_first {
                for (word, value) in marked.iter().enumerate() {
                    store(line, word, value ^ mark.bits[word]);
                }
            }
            // Of the orders in which one instruction may do it, this is the worst.
            let backwards = WIDE.get() || marks_first;
            for turn in 0..LINE_WORDS {
                let word = if backwards { LINE_WORDS - 1 - turn } else { turn };
                store(line, word, marked[word]);
            }
        }
    }

    #[track_caller]
    fn load_lines(&self, at: ByteOffset, into: &mut [[u64; LINE_WORDS]], mark: &LineMark) -> usize {
        let marks_last = mutation_at(Operation::LoadLines, Location::caller()).is_some();
        for (number, line) in into.iter_mut().enumerate() {
            let at = at.saturating_add((number * LINE_BYTES) as u64);
            let mut order: Vec<usize> = (0..LINE_WORDS).rev().collect();
            if WIDE.get() || marks_last {
                order.sort_by_key(|word| (mark.bits[*word] == 0) != marks_last);
            }
            let mut words = [0; LINE_WORDS];
            for word in order {
                words[word] = self.load(at.saturating_add(word as u64 * 8));
            }
            if !(0..LINE_WORDS).all(|word| mark.holds(word, words[word])) {
                return number;
            }
            *line = std::array::from_fn(|word| words[word] & !mark.bits[word]);
        }
        into.len()
    }

    #[track_caller]
    fn write_back(&self, at: ByteOffset, bytes: u64) {
        if !MODEL_COHERENT && mutation_at(Operation::WriteBack, Location::caller()).is_none() {
            Self::each_line(at, bytes, Step::write_back);
        }
    }

    #[track_caller]
    fn invalidate(&self, at: ByteOffset, bytes: u64) {
        if !MODEL_COHERENT && mutation_at(Operation::Invalidate, Location::caller()).is_none() {
            Self::each_line(at, bytes, Step::invalidate);
        }
    }

    #[track_caller]
    fn flush(&self, at: ByteOffset, bytes: u64) {
        if !MODEL_COHERENT && mutation_at(Operation::Flush, Location::caller()).is_none() {
            Self::each_line(at, bytes, Step::flush);
        }
    }

    fn prefetch(&self, _: ByteOffset) {
        // Whether it happens is part of what a later load may see.
    }

    fn store_fence(&self) {
        unreachable!("channels fence fully or not at all");
    }

    #[track_caller]
    fn full_fence(&self) {
        if mutation_at(Operation::FullFence, Location::caller()).is_none() {
            with_step(Step::full_fence);
        }
    }

    fn read(&self, _: ByteOffset, _: &mut [u8]) {
        unreachable!("channels work in words");
    }

    fn write(&self, _: ByteOffset, _: &[u8]) {
        unreachable!("channels work in words");
    }

    fn zero(&self, _: ByteOffset, _: u64) {
        unreachable!("channels work in words");
    }

    fn copy_to<B: BitmapSlice>(&self, _: ByteOffset, _: &VolatileSlice<'_, B>) {
        unreachable!("channels work in words");
    }

    fn copy_from<B: BitmapSlice>(&self, _: ByteOffset, _: &VolatileSlice<'_, B>) {
        unreachable!("channels work in words");
    }

    fn write_streaming(&self, _: ByteOffset, _: &[u8]) {
        unreachable!("channels work in words");
    }
}
