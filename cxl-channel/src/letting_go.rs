//! Whether a receiver of coherent memory lets go of the lines that it has read.
//!
//! The sender writes them again a lap later. If the receiver still has them, they have to be taken away from it first; if it has
//! let go of them, they come from memory. Which of the two takes longer differs between machines by a factor of three either way,
//! and even on one machine with which of its cores it is and whose memory. So now and then both are tried, and what is quicker is
//! done until then.

use std::time::{Duration, Instant};

/// What is timed at the least.
const WINDOW_LINES_MIN: u64 = 4096;
/// So many windows of each way are timed.
const TIMED: usize = 7;
/// Before them, a window in which the ring is still as the other way left it.
const TRIED: usize = 1 + TIMED;
/// After so many windows both are tried again: that costs a hundredth of the time or two.
const PERIOD: usize = 1024;

/// See the [module](self).
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, Hash))]
pub(crate) struct LettingGo {
    lets_go: bool,
    /// What was quicker.
    chosen: bool,
    /// Lines that are timed together: no less than a lap, so that the ring is left one way throughout once the first window is over.
    window_lines: u64,
    /// Lines of this window that are still to be read.
    left: u64,
    /// Counted within a period.
    window: usize,
    since: Option<Instant>,
    /// How long windows took without letting go, and with it.
    took: [[Duration; TIMED]; 2],
}

impl LettingGo {
    /// For a ring of so many lines.
    pub(crate) fn new(lines: u64) -> Self {
        let window_lines = lines.max(WINDOW_LINES_MIN);
        let took = [[Duration::MAX; TIMED]; 2];
        Self { lets_go: false, chosen: false, window_lines, left: window_lines, window: 0, since: None, took }
    }

    /// So many lines more were read. Whether to let go of them.
    #[inline]
    pub(crate) fn is_due(&mut self, lines: u64) -> bool {
        let lets_go = self.lets_go;
        self.left = self.left.saturating_sub(lines);
        if self.left == 0 {
            self.next_window(Instant::now());
        }
        lets_go
    }

    #[cold]
    fn next_window(&mut self, now: Instant) {
        let since = self.since.replace(now).unwrap_or(now);
        if self.window < 2 * TRIED && !self.window.is_multiple_of(TRIED) {
            self.took[usize::from(self.lets_go)][self.window % TRIED - 1] = now.duration_since(since);
        }
        self.left = self.window_lines;
        self.window = (self.window + 1) % PERIOD;
        self.lets_go = match self.window {
            0..TRIED => false,
            window if window < 2 * TRIED => true,
            window => {
                if window == 2 * TRIED {
                    self.choose();
                }
                self.chosen
            }
        };
    }

    /// Compares the medians: a window is short in which the receiver only catches up, and long in which one of both had no core.
    /// Another way than before has to be quicker by a tenth: where few messages come, windows last as long as those take.
    fn choose(&mut self) {
        let [before, other] = [self.chosen, !self.chosen].map(|way| {
            let took = &mut self.took[usize::from(way)];
            *took.select_nth_unstable(TIMED / 2).1
        });
        if other < before.saturating_sub(before / 10) {
            self.chosen = !self.chosen;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it lets go of lines in the end, if a window takes so long without and with it.
    fn chosen(it: &mut LettingGo, now: &mut Instant, micros: [u64; 2]) -> bool {
        for window in 0..PERIOD {
            // Some are short or long for other reasons.
            let divisor = if window % 4 == 1 { 10 } else { 1 };
            let factor = if window % 4 == 3 { 10 } else { 1 };
            *now += Duration::from_micros(micros[usize::from(it.lets_go)]) / divisor * factor;
            it.next_window(*now);
        }
        it.chosen
    }

    #[test]
    fn what_is_quicker_is_done_until_it_no_longer_is() {
        let (mut it, mut now) = (LettingGo::new(64), Instant::now());
        it.next_window(now);
        assert!(!chosen(&mut it, &mut now, [100, 105]));
        assert!(chosen(&mut it, &mut now, [100, 40]));
        assert!(chosen(&mut it, &mut now, [100, 105]), "a tenth is needed");
        assert!(!chosen(&mut it, &mut now, [100, 130]));
    }

    #[test]
    fn a_period_is_mostly_what_was_chosen() {
        let (mut it, mut now) = (LettingGo::new(64), Instant::now());
        it.next_window(now);
        assert!(chosen(&mut it, &mut now, [100, 40]));
        let mut windows = 0;
        for _ in 0..PERIOD {
            now += Duration::from_micros(40);
            it.next_window(now);
            windows += usize::from(it.lets_go);
        }
        assert!(windows >= PERIOD - TRIED, "{windows}");
    }

    #[test]
    fn a_window_is_a_lap_at_least() {
        let mut it = LettingGo::new(2 * WINDOW_LINES_MIN);
        for _ in 0..2 * WINDOW_LINES_MIN {
            assert_eq!(it.window, 0);
            it.is_due(1);
        }
        assert_eq!(it.window, 1);
    }
}
