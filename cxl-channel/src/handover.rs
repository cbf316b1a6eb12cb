//! How lines get from the sender's cache to the receiver's and back, on coherent memory.
//!
//! The hardware fetches a line from whichever cache has it. Which of two caches and the memory is quickest for that differs between
//! machines by a factor of ten either way, and even on one machine with which of its cores it is and whose memory. So now and then
//! all [ways](Way) are tried, and what is quickest is done until then. The receiver finds out, and the sender does as it is asked to.

use std::time::{Duration, Instant};

/// Where the lines of a ring are, between one side and the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum Way {
    /// In the cache of whoever had them last, until the other side takes them away.
    Kept,
    /// The receiver lets go of what it has read. The sender finds that in memory, and the receiver finds what is new in the sender's
    /// cache.
    LetGo,
    /// The sender writes back what it has written, too, so that both find everything in memory.
    ThroughMemory,
}

/// What becomes of what a sender has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum Written {
    /// It stays in the sender's cache.
    Stays,
    /// It is written back, as the receiver asks in [`Way::ThroughMemory`].
    GoesBack,
}

/// What is timed at the least.
const WINDOW_LINES_MIN: u64 = 4096;
/// So many windows of each way are timed.
const TIMED: usize = 7;
/// Before them, a window in which the ring is still as the way before left it, and the sender has yet to hear of this one.
const TRIED: usize = 1 + TIMED;
/// A way that takes this many times as long as the usual one
const HOPELESS: u32 = 2;
/// in so many windows is tried no further.
const HOPELESS_WINDOWS: usize = 2;
/// Who has found nothing as often as it read lines waits for its messages, and not for its lines: no way is quicker then. So it is until it
/// is less than once in so many lines.
const LINES_PER_EMPTY_LOOK: u64 = 2;
/// For so many windows what was found to be quickest is done. To try the others costs a fiftieth of the time or less.
const PERIOD: usize = 2048;

/// See the [module](self).
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Handover {
    /// The ways as they are tried: first the one that was quickest before.
    order: [Way; 3],
    /// Which of them it is now.
    current: usize,
    /// Whether it is being tried, and not the quickest one in use.
    trying: bool,
    /// Lines that are timed together: no less than a lap, so that the ring is left one way throughout once the first window is over.
    window_lines: u64,
    /// Lines of this window that are still to be read.
    left: u64,
    /// Which window of this way it is.
    window: usize,
    since: Option<Instant>,
    /// How often nothing was found in this window.
    empty_looks: u64,
    /// Whether it waits for messages mostly. They come soonest out of the sender's cache.
    waits: bool,
    /// How long windows took, by the order above.
    took: [[Duration; TIMED]; 3],
}

impl Handover {
    /// For a ring of so many lines.
    pub(crate) fn new(lines: u64) -> Self {
        let window_lines = lines.max(WINDOW_LINES_MIN);
        Self {
            order: [Way::Kept, Way::LetGo, Way::ThroughMemory],
            current: 0,
            trying: true,
            window_lines,
            left: window_lines,
            window: 0,
            since: None,
            empty_looks: 0,
            waits: false,
            took: [[Duration::MAX; TIMED]; 3],
        }
    }

    /// What is to be done now.
    #[inline]
    pub(crate) fn way(&self) -> Way {
        if self.waits { Way::Kept } else { self.order[self.current] }
    }

    /// So many lines more were read. What is to be done with them.
    #[inline]
    pub(crate) fn read(&mut self, lines: u64) -> Way {
        let way = self.way();
        self.left = self.left.saturating_sub(lines);
        if self.left == 0 {
            self.next_window(Instant::now());
        }
        way
    }

    /// A look found nothing.
    #[inline]
    pub(crate) fn found_nothing(&mut self) {
        self.empty_looks += 1;
        if self.empty_looks == self.window_lines {
            self.wait();
        }
    }

    #[cold]
    fn wait(&mut self) {
        self.waits = true;
        if self.trying {
            // What was found out is of no use, and is sought again before long.
            (self.trying, self.current, self.window) = (false, 0, PERIOD - TRIED);
        }
    }

    #[cold]
    fn next_window(&mut self, now: Instant) {
        self.left = self.window_lines;
        let took = now.duration_since(self.since.replace(now).unwrap_or(now));
        self.waits &= std::mem::take(&mut self.empty_looks) >= self.window_lines / LINES_PER_EMPTY_LOOK;
        let timed = self.window.checked_sub(1);
        self.window += 1;
        if !self.trying {
            if self.window >= PERIOD && !self.waits {
                (self.trying, self.window) = (true, 0);
                self.took = [[Duration::MAX; TIMED]; 3];
            }
            return;
        }
        if let Some(timed) = timed {
            self.took[self.current][timed] = took;
        }
        if self.window == TRIED || self.is_hopeless() {
            self.window = 0;
            self.current += 1;
            if self.current == self.order.len() {
                self.choose();
            }
        }
    }

    /// Whether the way that is being tried need not be tried any longer.
    fn is_hopeless(&self) -> bool {
        if self.current == 0 || self.window != 1 + HOPELESS_WINDOWS {
            return false;
        }
        let least = self.median(0).saturating_mul(HOPELESS);
        self.took[self.current][..HOPELESS_WINDOWS].iter().all(|took| *took > least)
    }

    /// The median: a window is short in which the receiver only catches up, and long in which one of both had no core.
    fn median(&self, way: usize) -> Duration {
        let mut took = self.took[way];
        *took.select_nth_unstable(TIMED / 2).1
    }

    /// Another way than before has to be quicker by a tenth: where few messages come, windows last as long as those take.
    fn choose(&mut self) {
        let before = self.median(0);
        let (mut quickest, mut least) = (0, before.saturating_sub(before / 10));
        for way in 1..self.order.len() {
            let median = self.median(way);
            if median < least {
                (quickest, least) = (way, median);
            }
        }
        self.order.swap(0, quickest);
        (self.current, self.trying) = (0, false);
    }
}

/// For the search through all orders. What is counted only decides when the way changes, and would make each look another state.
#[cfg(test)]
impl std::hash::Hash for Handover {
    fn hash<H: std::hash::Hasher>(&self, hasher: &mut H) {
        self.way().hash(hasher);
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::{CreateOptions, Generation, Memory, Pool};

    use super::*;
    use crate::{Receiver, RingPlacement, Sender, header};

    /// Which way is used in the end, if a window takes so long in each of them, and how often another one was used on the way there.
    fn used(it: &mut Handover, now: &mut Instant, micros: [u64; 3]) -> (Way, [usize; 3]) {
        let mut windows = [0; 3];
        // One that is used already has to be tried first.
        while !it.trying {
            it.next_window(*now);
        }
        for window in 0..PERIOD {
            let way = it.way() as usize;
            windows[way] += 1;
            // Some are short or long for other reasons.
            let divisor = if window % 4 == 1 { 10 } else { 1 };
            let factor = if window % 4 == 3 { 10 } else { 1 };
            *now += Duration::from_micros(micros[way]) / divisor * factor;
            it.next_window(*now);
        }
        assert!(!it.trying);
        (it.way(), windows)
    }

    #[test]
    fn what_is_quickest_is_done_until_it_no_longer_is() {
        let (mut it, mut now) = (Handover::new(64), Instant::now());
        assert_eq!(used(&mut it, &mut now, [100, 105, 110]).0, Way::Kept);
        assert_eq!(used(&mut it, &mut now, [100, 40, 60]).0, Way::LetGo);
        assert_eq!(used(&mut it, &mut now, [100, 105, 100]).0, Way::LetGo, "a tenth is needed");
        assert_eq!(used(&mut it, &mut now, [500, 300, 60]).0, Way::ThroughMemory);
        assert_eq!(used(&mut it, &mut now, [100, 130, 200]).0, Way::Kept);
    }

    #[test]
    fn a_period_is_mostly_what_is_quickest() {
        let (mut it, mut now) = (Handover::new(64), Instant::now());
        assert_eq!(used(&mut it, &mut now, [100, 40, 60]).0, Way::LetGo);
        let (_, windows) = used(&mut it, &mut now, [100, 40, 60]);
        assert!(windows[Way::LetGo as usize] >= PERIOD - 2 * TRIED, "{windows:?}");
        assert!(
            windows[Way::ThroughMemory as usize] > HOPELESS_WINDOWS,
            "it may be quicker now: {windows:?}"
        );
    }

    #[test]
    fn what_is_hopeless_is_not_tried_for_long() {
        let (mut it, mut now) = (Handover::new(64), Instant::now());
        // All windows are alike here.
        for _ in 0..TRIED {
            now += Duration::from_micros(10);
            it.next_window(now);
        }
        assert_eq!(it.way(), Way::LetGo);
        for _ in 0..=HOPELESS_WINDOWS {
            assert_eq!(it.way(), Way::LetGo);
            now += Duration::from_micros(25);
            it.next_window(now);
        }
        assert_eq!(it.way(), Way::ThroughMemory);
    }

    #[test]
    fn a_receiver_that_waits_for_messages_finds_them_in_the_cache_of_the_sender() {
        let (mut it, mut now) = (Handover::new(64), Instant::now());
        assert_eq!(used(&mut it, &mut now, [100, 40, 60]).0, Way::LetGo);
        (0..it.window_lines).for_each(|_| it.found_nothing());
        assert_eq!(it.way(), Way::Kept, "none need come for that");
        for _ in 0..2 * PERIOD {
            now += Duration::from_micros(100);
            (0..it.window_lines / LINES_PER_EMPTY_LOOK).for_each(|_| it.found_nothing());
            it.next_window(now);
            assert_eq!((it.way(), it.trying), (Way::Kept, false));
        }
        // It lets go again as soon as it has no time to wait, and tries what is best then.
        it.next_window(now);
        assert_eq!((it.waits, it.way(), it.trying), (false, Way::LetGo, true));
        assert_eq!(used(&mut it, &mut now, [100, 60, 40]).0, Way::ThroughMemory);
    }

    #[test]
    fn what_was_timed_before_messages_were_waited_for_does_not_count() {
        let (mut it, mut now) = (Handover::new(64), Instant::now());
        for _ in 0..2 * TRIED {
            (0..it.window_lines).for_each(|_| it.found_nothing());
            now += Duration::from_micros(if it.way() == Way::Kept { 100 } else { 10 });
            it.next_window(now);
            assert_eq!(it.way(), Way::Kept);
        }
    }

    #[test]
    fn the_sender_hears_which_way_it_is() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = CreateOptions { size_bytes: Some(16 << 20), ..CreateOptions::default() };
        let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
        let (memory, generation) = (pool.hardware(), Generation::new(1));
        let placement = RingPlacement { start: pool.layout().data().start, slots: 256 };
        placement.clear(&memory);
        let mut sender = Sender::<_, 8>::begin(memory.clone(), placement, generation);
        let mut receiver = Receiver::<_, 8>::open(memory.clone(), placement, generation);
        assert!(receiver.ready() && sender.ready());
        let asked = placement.receiver_line().saturating_add(header::THROUGH_MEMORY);
        let (mut number, mut heard) = (0_u64, Vec::new());
        // Until all ways were tried, and a window more.
        for _ in 0..(3 * TRIED as u64 + 1) * WINDOW_LINES_MIN / 32 {
            let batch: [[u64; 8]; 32] = std::array::from_fn(|index| [number + index as u64; 8]);
            let mut came = [[0; 8]; 32];
            assert_eq!((sender.send_batch(&batch), receiver.receive_batch(&mut came)), (32, 32));
            assert_eq!(came, batch, "whichever way it is");
            number += 32;
            let asks = header::untagged(memory.load(asked), generation) == Some(1);
            let obeys = sender.written() == Written::GoesBack;
            if heard.last() != Some(&(asks, obeys)) {
                heard.push((asks, obeys));
            }
        }
        // It hears of it a lap later at most.
        assert_eq!(heard[..3], [(false, false), (true, false), (true, true)]);
    }

    #[test]
    fn a_window_is_a_lap_at_least() {
        let mut it = Handover::new(2 * WINDOW_LINES_MIN);
        for _ in 0..2 * WINDOW_LINES_MIN {
            assert_eq!(it.window, 0);
            it.read(1);
        }
        assert_eq!(it.window, 1);
    }
}
