//! Memory whose every freedom is a choice that the search makes.
//!
//! Each line has one writer. What another host may see of it is any of the snapshots that the writer's stores left, from the
//! oldest that this host cannot be past yet to the newest: an eviction may have made any of them visible, and a prefetcher may
//! have brought any of them in. Only this narrows the choice:
//!
//! * what was seen once cannot be followed by something older;
//! * a write-back that was fenced makes what it wrote the least that the pool holds;
//! * an invalidate that was fenced makes the least that the pool held when it was issued the least that can be seen. That it
//!   took effect at once, and a prefetch followed, is the worst that it may do.
//!
//! So evictions and prefetches need no steps of their own: to leave the choice to the load covers all of them. Nor need
//! stores, write-backs and invalidates be interleaved: they only ever add to what the other side may see, so that a
//! run in which they come late is also one in which the other side does not see them yet. What has to be interleaved is loads
//! of the other side's lines, and fences.
//!
//! With coherent caches, stores become visible in their order, at any time up to the next full fence.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::panic::Location;

use cxl_pool::{ByteOffset, LINE_BYTES, LINE_WORDS, LineMark, Memory};
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::mutation::{Mutation, Operation, Site};

pub(super) const SENDING: usize = 0;
pub(super) const RECEIVING: usize = 1;
/// In a ring, only the second line is the receiver's.
const RECEIVER_LINE: usize = 1;

#[derive(Clone, Hash)]
struct Snapshot {
    words: [u64; LINE_WORDS],
    /// How many stores the writer had made before this one.
    stored: u64,
}

/// A line: what the other side may yet see of it. Places in `snapshots` are counted from its front, which moves on.
#[derive(Clone, Hash)]
struct Line {
    snapshots: Vec<Snapshot>,
    /// The least that the pool holds.
    held: usize,
    /// What the pool will hold at least after the writer's next full fence.
    written_back: usize,
    /// What the other side will be past after its next full fence.
    invalidated: usize,
}

impl Line {
    fn newest(&self) -> usize {
        self.snapshots.len() - 1
    }

    /// Nothing before this snapshot can be seen any more.
    fn pass(&mut self, snapshot: usize) {
        self.snapshots.drain(..snapshot);
        for place in [&mut self.held, &mut self.written_back, &mut self.invalidated] {
            *place = place.saturating_sub(snapshot);
        }
    }
}

/// All of the memory, and what is under way.
#[derive(Clone, Hash)]
pub(super) struct Shared {
    coherent: bool,
    lines: Vec<Line>,
    /// How many stores each side has made, and how many of them the other side can see at least. For coherent caches.
    stores: [u64; 2],
    visible: [u64; 2],
}

impl Shared {
    pub(super) fn new(lines: u64, coherent: bool) -> Self {
        let line = Line {
            snapshots: vec![Snapshot { words: [0; LINE_WORDS], stored: 0 }],
            held: 0,
            written_back: 0,
            invalidated: 0,
        };
        Self { coherent, lines: vec![line; usize::try_from(lines).unwrap()], stores: [0; 2], visible: [0; 2] }
    }

    fn writer(line: usize) -> usize {
        if line == RECEIVER_LINE { RECEIVING } else { SENDING }
    }

    fn store(&mut self, line: usize, word: usize, value: u64) {
        let writer = Self::writer(line);
        let stored = self.stores[writer] + 1;
        let line = &mut self.lines[line];
        let mut words = line.snapshots[line.newest()].words;
        if words[word] != value {
            words[word] = value;
            self.stores[writer] = stored;
            line.snapshots.push(Snapshot { words, stored });
        }
    }

    /// Drops what cannot be seen any more because later stores have been seen.
    fn pass_what_is_visible(&mut self, writer: usize) {
        let visible = self.visible[writer];
        for (number, line) in self.lines.iter_mut().enumerate() {
            if Self::writer(number) == writer {
                let least = line.snapshots.iter().rposition(|snapshot| snapshot.stored <= visible);
                line.pass(least.unwrap_or(0));
            }
        }
        // Only differences matter: counted from here, states that behave alike are alike.
        for (number, line) in self.lines.iter_mut().enumerate() {
            if Self::writer(number) == writer {
                for snapshot in &mut line.snapshots {
                    snapshot.stored = snapshot.stored.saturating_sub(visible);
                }
            }
        }
        self.stores[writer] -= visible;
        self.visible[writer] = 0;
    }

    fn see(&mut self, line: usize, snapshot: usize) {
        let seen = self.lines[line].snapshots[snapshot].stored;
        self.lines[line].pass(snapshot);
        if self.coherent {
            let writer = Self::writer(line);
            self.visible[writer] = self.visible[writer].max(seen);
            self.pass_what_is_visible(writer);
        }
    }

    fn fence_changes_something(&self, host: usize) -> bool {
        if self.coherent {
            return self.stores[host] > 0;
        }
        self.lines.iter().enumerate().any(|(number, line)| {
            if Self::writer(number) == host { line.written_back > line.held } else { line.invalidated > 0 }
        })
    }

    /// Everything that this side stored, wrote back or invalidated takes effect.
    pub(super) fn full_fence(&mut self, host: usize) {
        if self.coherent {
            self.visible[host] = self.stores[host];
            return self.pass_what_is_visible(host);
        }
        for (number, line) in self.lines.iter_mut().enumerate() {
            if Self::writer(number) == host {
                line.held = line.held.max(line.written_back);
            } else {
                line.pass(line.invalidated);
            }
        }
    }

    /// The host's process died: what it had issued and not fenced may take effect at any time, or not.
    pub(super) fn crash(&mut self, host: usize) {
        for (number, line) in self.lines.iter_mut().enumerate() {
            if Self::writer(number) == host {
                line.written_back = line.held;
            } else {
                line.invalidated = 0;
            }
        }
        if self.coherent {
            self.full_fence(host);
        }
    }
}

/// One step of one side: what was done before is repeated without effect, then comes one load or fence that the other side
/// could notice, then all up to the next one.
pub(super) struct Step {
    pub(super) shared: Shared,
    pub(super) host: usize,
    /// What the call that is under way has loaded.
    pub(super) loaded: Vec<u64>,
    /// How many operations of the call are done.
    pub(super) done: usize,
    /// Which snapshot the load sees, counted from the oldest that it may see.
    pub(super) choice: Option<usize>,
    /// Of how many it could have chosen.
    pub(super) alternatives: usize,
    /// The call met a second such load or fence: what it does from there on is not real.
    pub(super) suspended: bool,
    pub(super) broken_rule: Option<&'static str>,
    operation: usize,
    load: usize,
}

impl Step {
    pub(super) fn new(shared: Shared, host: usize, choice: Option<usize>) -> Self {
        Self {
            shared,
            host,
            loaded: Vec::new(),
            done: 0,
            choice,
            alternatives: 1,
            suspended: false,
            broken_rule: None,
            operation: 0,
            load: 0,
        }
    }

    /// Before a call is made, or made again.
    pub(super) fn rewind(&mut self) {
        (self.operation, self.load, self.suspended) = (0, 0, false);
    }

    /// After a call was made to its end.
    pub(super) fn finish_call(&mut self) {
        (self.done, self.loaded) = (0, Vec::new());
    }

    fn may_run(&mut self, noticeable: bool) -> Option<usize> {
        if self.suspended {
            return None;
        }
        self.operation += 1;
        if self.operation <= self.done {
            return None;
        }
        let choice = if noticeable {
            let Some(choice) = self.choice.take() else {
                self.suspended = true;
                return None;
            };
            choice
        } else {
            0
        };
        self.done = self.operation;
        Some(choice)
    }

    fn load(&mut self, line: usize, word: usize) -> u64 {
        if !self.suspended && self.load < self.loaded.len() {
            self.operation += 1;
            self.load += 1;
            return self.loaded[self.load - 1];
        }
        let own = Shared::writer(line) == self.host;
        let Some(choice) = self.may_run(!own) else { return 0 };
        if !own {
            self.alternatives = self.shared.lines[line].snapshots.len();
            self.shared.see(line, choice);
        }
        let line = &self.shared.lines[line];
        let value = line.snapshots[if own { line.newest() } else { 0 }].words[word];
        self.loaded.push(value);
        self.load += 1;
        value
    }

    fn store(&mut self, line: usize, word: usize, value: u64) {
        if self.may_run(false).is_some() {
            if Shared::writer(line) != self.host {
                self.broken_rule = Some("a line was written that belongs to the other side");
                return;
            }
            self.shared.store(line, word, value);
        }
    }

    fn write_back(&mut self, line: usize) {
        if self.may_run(false).is_some() && Shared::writer(line) == self.host {
            let line = &mut self.shared.lines[line];
            line.written_back = line.newest();
        }
    }

    fn invalidate(&mut self, line: usize) {
        if self.may_run(false).is_some() {
            if Shared::writer(line) == self.host {
                self.broken_rule = Some("a side invalidated a line of its own");
                return;
            }
            let line = &mut self.shared.lines[line];
            line.invalidated = line.invalidated.max(line.held);
        }
    }

    fn full_fence(&mut self) {
        // What is pending depends on this side only, so that a fence that changes nothing is so in every order.
        let (host, done) = (self.host, self.operation < self.done);
        let noticeable = !done && self.shared.fence_changes_something(host);
        if self.may_run(noticeable).is_some() {
            self.shared.full_fence(host);
        }
    }
}

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
            Self::each_line(at, bytes, Step::write_back);
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
