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
//! Of the two lines before the slots, both hosts have something older in their caches in the beginning, of another ring that lay there. Who writes to such a line
//! before it was flushed and fenced has the rest of that seen again.
//!
//! With coherent caches, stores become visible in their order, at any time up to the next full fence.

use cxl_pool::LINE_WORDS;

pub(super) const SENDING: usize = 0;
pub(super) const RECEIVING: usize = 1;
/// In a ring, only the second line is the receiver's.
const RECEIVER_LINE: usize = 1;
const HEADER_LINES: usize = 2;

/// What a line's writer has in its cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Cached {
    /// What it wrote, or nothing.
    Own,
    /// Something older than what the pool holds.
    Older,
    /// The same, until the next full fence.
    Leaving,
}

#[derive(Clone, Hash)]
pub(super) struct Snapshot {
    pub(super) words: [u64; LINE_WORDS],
    /// How many stores the writer had made before this one.
    stored: u64,
}

/// A line: what the other side may yet see of it. Places in `snapshots` are counted from its front, which moves on.
#[derive(Clone, Hash)]
pub(super) struct Line {
    pub(super) snapshots: Vec<Snapshot>,
    /// The least that the pool holds.
    pub(super) held: usize,
    /// What the pool will hold at least after the writer's next full fence.
    pub(super) written_back: usize,
    /// What the other side will be past after its next full fence.
    pub(super) invalidated: usize,
}

impl Line {
    pub(super) fn newest(&self) -> usize {
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
    pub(super) lines: Vec<Line>,
    /// How many stores each side has made, and how many of them the other side can see at least. For coherent caches.
    stores: [u64; 2],
    visible: [u64; 2],
    /// Of the lines before the slots.
    cached: [Cached; HEADER_LINES],
}

impl Shared {
    pub(super) fn new(lines: u64, coherent: bool) -> Self {
        let line = Line {
            snapshots: vec![Snapshot { words: [0; LINE_WORDS], stored: 0 }],
            held: 0,
            written_back: 0,
            invalidated: 0,
        };
        let cached = if coherent { Cached::Own } else { Cached::Older };
        Self {
            coherent,
            lines: vec![line; usize::try_from(lines).unwrap()],
            stores: [0; 2],
            visible: [0; 2],
            cached: [cached; HEADER_LINES],
        }
    }

    pub(super) fn writer(line: usize) -> usize {
        if line == RECEIVER_LINE { RECEIVING } else { SENDING }
    }

    /// Whether something older lies in the cache of who writes to this line.
    pub(super) fn is_stale(&self, line: usize) -> bool {
        self.cached.get(line).is_some_and(|cached| *cached != Cached::Own)
    }

    /// Its writer flushes a line.
    pub(super) fn flush(&mut self, line: usize) {
        if self.is_stale(line) {
            self.cached[line] = Cached::Leaving;
        }
    }

    pub(super) fn store(&mut self, line: usize, word: usize, value: u64) {
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

    pub(super) fn see(&mut self, line: usize, snapshot: usize) {
        let seen = self.lines[line].snapshots[snapshot].stored;
        self.lines[line].pass(snapshot);
        if self.coherent {
            let writer = Self::writer(line);
            self.visible[writer] = self.visible[writer].max(seen);
            self.pass_what_is_visible(writer);
        }
    }

    pub(super) fn fence_changes_something(&self, host: usize) -> bool {
        if self.coherent {
            return self.stores[host] > 0;
        }
        let leaving = |line: usize| self.cached.get(line) == Some(&Cached::Leaving);
        self.lines.iter().enumerate().any(|(number, line)| {
            if Self::writer(number) == host {
                line.written_back > line.held || leaving(number)
            } else {
                line.invalidated > 0
            }
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
                if let Some(cached) = self.cached.get_mut(number).filter(|cached| **cached == Cached::Leaving)
                {
                    *cached = Cached::Own;
                }
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
