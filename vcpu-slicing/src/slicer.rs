//! When a thread sleeps, and for how long (MemChannel §4.3: it runs T_R of every window T_W).
//!
//! Accounts are kept in processor time: a thread earns T_R/T_W of what passes and pays for what it runs. Whatever a window
//! got too much or too little, because a timer, a wake-up or the scheduler was late, is carried into the next ones by that, so the
//! long-run share is exact. A thread that idles is not put to sleep: it runs less than it may.
//!
//! Windows begin every T_W from when a thread began, whatever was late and whatever T_R became meanwhile: so threads that began apart stay
//! apart. In each it runs first, for as long as it may, and sleeps until the next one.

/// T_R and T_W.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Duty {
    /// T_R: how much of a window it may run, in ns.
    pub run_ns: u64,
    /// T_W: the window, in ns.
    pub window_ns: u64,
}

impl Duty {
    /// All of its time.
    pub const FULL: Self = Self { run_ns: 1, window_ns: 1 };

    /// Whether it may run all of its time, so that nothing holds it.
    pub const fn is_full(self) -> bool {
        self.run_ns >= self.window_ns
    }
}

/// Where in its windows a thread begins, in 2^-32 of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Phase(u32);

impl Phase {
    /// Of the thread with this number of a process. Threads whose numbers follow each other lie far apart, however many there are, since
    /// these are multiples of the golden ratio: if all vCPUs of a machine ran and slept at the same times, they would overload the fabric
    /// for a part of each window and leave it idle for the rest (“temporal contention”, §4.3). And so would the first ones of machines that are
    /// told at the same time to begin: those lie apart by multiples of another irrational number, the square root of two.
    #[expect(clippy::cast_possible_truncation, reason = "the low bits of a product follow from the low bits")]
    pub const fn of(process: u32, number: usize) -> Self {
        let before = (number as u32).wrapping_mul(0x9E37_79B9);
        Self(before.wrapping_add(process.wrapping_mul(0x6A09_E667)))
    }

    /// How much of a window of this length lies before it, in the unit of the length.
    pub fn of_window(self, window: u64) -> u64 {
        let before = (u128::from(self.0) * u128::from(window)) >> u32::BITS;
        u64::try_from(before).unwrap_or(u64::MAX)
    }
}

/// What time it is for a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Clocks {
    /// `CLOCK_MONOTONIC`, in ns.
    pub wall_ns: u64,
    /// The thread's processor time, in ns.
    pub cpu_ns: u64,
}

/// What to do with a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Look again after so many ns.
    Look(u64),
    /// Put it to sleep for so many ns where it holds nothing; if that is not here, see [`Slicer::refused`].
    Sleep(u64),
}

/// A thread that could not be put to sleep is tried again after so many ns.
const RETRY_NS: u64 = 20_000;
/// A look that comes sooner is not worth its cost.
const SOONEST_NS: u64 = 5_000;
/// After so many tries in a row the next part of the window is waited for.
const TRIES: u32 = 100;

/// The account of one thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Slicer {
    last: Clocks,
    /// At most what two windows may run, at least minus one window.
    credit_ns: i64,
    /// What it ran too long and is not held against it, because no more than one window is carried.
    forgiven_ns: u64,
    tries: u32,
    /// Since the last look: whether it ran for less than a quarter of the time, and no more than it may.
    idle: bool,
    /// When it began, in ns of the wall clock, and how far in a window that was.
    began_ns: u64,
    phase: Phase,
}

impl Slicer {
    /// One that has yet to begin.
    pub const fn new() -> Self {
        let last = Clocks { wall_ns: 0, cpu_ns: 0 };
        Self { last, credit_ns: 0, forgiven_ns: 0, tries: 0, idle: false, began_ns: 0, phase: Phase(0) }
    }

    /// Begins now, as if it had run and slept in windows before, the last of which began this long ago.
    pub fn begin(now: Clocks, duty: Duty, phase: Phase) -> Self {
        let (run, window) = (signed(duty.run_ns), signed(duty.window_ns).max(1));
        let gone = signed(phase.of_window(duty.window_ns));
        // It runs first and spends that, and earns all the time.
        let credit_ns = run.saturating_sub(gone.min(run)).saturating_add(scaled(gone, run, window));
        Self { last: now, credit_ns, began_ns: now.wall_ns, phase, ..Self::new() }
    }

    /// The run time that is left, in ns; below 0 what it ran too long.
    pub fn credit_ns(&self) -> i64 {
        self.credit_ns
    }

    /// What it ran too long since it began and is not held against it, in ns.
    pub fn forgiven_ns(&self) -> u64 {
        self.forgiven_ns
    }

    /// Takes note of the time, and says what to do. `duty` is less than full, and its window is not 0.
    pub fn look(&mut self, now: Clocks, duty: Duty) -> Step {
        self.settle(now, duty);
        let (run, window) = (signed(duty.run_ns), signed(duty.window_ns).max(1));
        if run <= 0 {
            return Step::Sleep(duty.window_ns);
        }
        // What it earned in this window it may use in the next one.
        let gone = self.gone(now, duty);
        let left = self.credit_ns.saturating_sub(scaled(gone, run, window));
        if left > 0 {
            self.tries = 0;
            // One that idles is looked at once in a window: when it begins to run, it may run a window too long, and pays.
            let least = if self.idle { duty.window_ns } else { SOONEST_NS };
            return Step::Look(unsigned(left).clamp(SOONEST_NS, duty.window_ns.max(SOONEST_NS)).max(least));
        }
        // Until the first window in which it may run again.
        let windows = left.saturating_neg() / run;
        Step::Sleep(
            unsigned(window.saturating_sub(gone).saturating_add(windows.saturating_mul(window))).max(1),
        )
    }

    /// How much of the window is over, in ns.
    fn gone(&self, now: Clocks, duty: Duty) -> i64 {
        let since = now.wall_ns.wrapping_sub(self.began_ns);
        signed(since.wrapping_add(self.phase.of_window(duty.window_ns)) % duty.window_ns.max(1))
    }

    /// It was to sleep for so many ns, and could not where it was. Returns after how many ns to try again, and whether that
    /// was the last time in this window.
    pub fn refused(&mut self, sleep_ns: u64, duty: Duty) -> (u64, bool) {
        if self.idle {
            // It waits for something and pays that way. But what brought one that owes into debt may come again as often as windows do, and
            // always between two looks that are a window apart: it runs for longer than T_R then, so a look each T_R meets it.
            self.tries = 0;
            let most = if self.credit_ns < 0 { duty.run_ns.min(duty.window_ns / 4) } else { duty.window_ns };
            let least = if self.credit_ns < 0 { RETRY_NS } else { SOONEST_NS };
            return (sleep_ns.min(most).max(least), false);
        }
        self.tries = self.tries.saturating_add(1);
        if self.tries >= TRIES {
            self.tries = 0;
            return ((duty.window_ns / 4).max(RETRY_NS), true);
        }
        (RETRY_NS, false)
    }

    /// It slept until now.
    pub fn slept(&mut self, now: Clocks, duty: Duty) {
        self.settle(now, duty);
    }

    /// Takes note of the time.
    fn settle(&mut self, now: Clocks, duty: Duty) {
        let elapsed = now.wall_ns.saturating_sub(self.last.wall_ns);
        let used = now.cpu_ns.saturating_sub(self.last.cpu_ns);
        self.last = now;
        let (run, window) = (signed(duty.run_ns), signed(duty.window_ns).max(1));
        let earned = scaled(signed(elapsed), run, window);
        self.idle = used < elapsed / 4 && signed(used) <= earned;
        let most = run.saturating_mul(2).min(window).max(0);
        let credit = self.credit_ns.saturating_add(earned).saturating_sub(signed(used));
        self.forgiven_ns =
            self.forgiven_ns.saturating_add(unsigned(window.saturating_neg().saturating_sub(credit)));
        self.credit_ns = credit.clamp(-window, most);
    }
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

fn unsigned(ns: i64) -> u64 {
    u64::try_from(ns).unwrap_or(0)
}

/// `value · by / over`, without overflow on the way.
fn scaled(value: i64, by: i64, over: i64) -> i64 {
    let scaled = i128::from(value) * i128::from(by) / i128::from(over.max(1));
    i64::try_from(scaled).unwrap_or(if scaled < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests;
