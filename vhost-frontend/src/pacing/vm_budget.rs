//! The bytes that all devices of a VM on a host may move together.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use cxl_pool::{HostWords, LINE_BYTES, PoolError, Role};

use super::{as_f64, whole};

/// Times are kept in sixteenths of a nanosecond: a short message takes less than one at the rates of a fabric, and so 36 years fit.
const TICKS_PER_US: f64 = 16_000.0;
/// What is saved up later than this was written by a clock that is not ours, such as that of before a reboot.
const LONGEST_DEBT_US: f64 = 60e6;

/// The words that all workers of a host use lie in the first cache line. This one: what may be moved in bytes/s, [as a word](to_word).
const RATE: usize = 0;
/// When a whole T_W is saved up.
const FULL_AT: usize = 1;
// The third word is one of earlier versions, which may be at work beside this one.
/// In the lines after it each frontend has words that it alone writes.
const LINE_WORDS: usize = LINE_BYTES / size_of::<u64>();
const WORDS: usize = 3 * LINE_WORDS;
/// How many devices a frontend has that move with this.
const DEVICES: usize = 0;
/// What of the VM's share it leaves to vCPUs that it measures, in bytes/s, as an IEEE 754 number.
const VCPUS: usize = 1;
/// When it said so.
const SAID_AT: usize = 2;

/// A byte budget that several workers take from without waiting for each other. It has the rules of a [`ByteBudget`](mem_channel::ByteBudget), but is kept as the time at which it
/// will be full (a generic cell rate algorithm), which is one word.
///
/// Each device has a budget of its own as well, for about the whole share of its VM while it is the only one that moves anything. Of
/// several that are quiet and burst together each would have a share; together they have one. They may be devices of both frontends of the host, each of which
/// maps the words.
#[derive(Debug)]
pub(super) struct VmBudget {
    words: Words,
    /// Which lines are this frontend's, and the other one's.
    lines: (usize, usize),
}

/// Where the words are.
#[derive(Debug)]
enum Words {
    /// In this process.
    Own(Box<[AtomicU64; WORDS]>),
    /// Shared with the other frontend of this host.
    Shared(HostWords),
}

impl Default for VmBudget {
    /// For devices of this frontend. No limit yet.
    fn default() -> Self {
        let words = Words::Own(Box::new([const { AtomicU64::new(0) }; WORDS]));
        Self { words, lines: (1, 2) }
    }
}

impl VmBudget {
    /// One that the other frontend of the host, which has the other role, opens at the same path.
    ///
    /// # Errors
    /// If the file cannot be opened and mapped.
    pub(super) fn shared(path: &Path, role: Role, now_us: f64) -> Result<Self, PoolError> {
        let lines = if role == Role::NetFrontend { (1, 2) } else { (2, 1) };
        let budget = Self { words: Words::Shared(HostWords::open(path, WORDS)?), lines };
        // What a predecessor said.
        budget.say(0, 0.0, now_us);
        let (full_at, latest) = (budget.word(FULL_AT), ticks(now_us + LONGEST_DEBT_US));
        // Nobody is in debt for so long: then the clock was another one.
        let _ = full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |it| (it > latest).then_some(0));
        Ok(budget)
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        match &self.words {
            Words::Own(words) => &words[index],
            Words::Shared(words) => words.word(index),
        }
    }

    /// Tells the other frontend how many devices this one has, and what it leaves to vCPUs.
    pub(super) fn say(&self, devices: usize, vcpus: f64, now_us: f64) {
        let ours = self.lines.0 * LINE_WORDS;
        self.word(ours + DEVICES).store(devices as u64, Ordering::Relaxed);
        self.word(ours + VCPUS).store(vcpus.to_bits(), Ordering::Relaxed);
        self.word(ours + SAID_AT).store(ticks(now_us), Ordering::Relaxed);
    }

    /// How many devices the other frontend has, and what it leaves to vCPUs, in bytes/s, if it said so no longer ago than `said_for_us`: while it holds some it
    /// says so every K. Nothing if it has no device that takes from this, as one of an earlier version has none.
    pub(super) fn other(&self, said_for_us: f64, now_us: f64) -> Option<(usize, f64)> {
        let theirs = self.lines.1 * LINE_WORDS;
        let word = |index| self.word(theirs + index).load(Ordering::Relaxed);
        let devices = usize::try_from(word(DEVICES)).ok().filter(|devices| *devices > 0)?;
        let is_old = ticks(now_us) > word(SAID_AT).saturating_add(ticks(said_for_us));
        let vcpus = if is_old { 0.0 } else { f64::from_bits(word(VCPUS)).max(0.0) };
        Some((devices, vcpus))
    }

    /// Begins anew with this rate, and a whole T_W saved up, unless the other frontend uses it already.
    pub(super) fn begin(&self, rate: f64, now_us: f64) {
        if self.other(0.0, now_us).is_some() {
            self.limit(rate, now_us);
            return;
        }
        self.word(RATE).store(to_word(rate), Ordering::Relaxed);
        self.word(FULL_AT).store(0, Ordering::Relaxed);
    }

    /// Changes the rate, in bytes/s; infinite for no limit. What is missing stays as many bytes.
    pub(super) fn limit(&self, rate: f64, now_us: f64) {
        let before = from_word(self.word(RATE).swap(to_word(rate), Ordering::Relaxed));
        let now = ticks(now_us);
        let scale = before / rate;
        if scale.is_finite() && scale > 0.0 && (scale - 1.0).abs() > f64::EPSILON {
            let scaled = |full_at: u64| {
                let missing = full_at.checked_sub(now)?;
                Some(now.saturating_add(whole(as_f64(missing) * scale)))
            };
            // One that is full stays so.
            let _ = self.word(FULL_AT).fetch_update(Ordering::Relaxed, Ordering::Relaxed, scaled);
        }
    }

    /// Whether nothing is limited.
    #[inline]
    pub(super) fn is_free(&self) -> bool {
        self.rate().is_infinite()
    }

    /// Takes so many bytes, if they are there.
    pub(super) fn admit(&self, bytes: u64, window_us: f64, now_us: f64) -> bool {
        self.take(bytes, window_us, now_us, Some(bytes))
    }

    /// Takes so many bytes, if nothing is owed.
    pub(super) fn lend(&self, bytes: u64, window_us: f64, now_us: f64) -> bool {
        self.take(bytes, window_us, now_us, Some(0))
    }

    /// Takes so many bytes, whether they are there or not.
    pub(super) fn force(&self, bytes: u64, window_us: f64, now_us: f64) {
        self.take(bytes, window_us, now_us, None);
    }

    /// After what time, in µs, so many bytes are there; infinite at a rate of 0.
    pub(super) fn wait_us(&self, bytes: u64, window_us: f64, now_us: f64) -> f64 {
        let rate = self.rate();
        if rate.is_infinite() {
            return 0.0;
        }
        let needed = cost(bytes, rate).min(ticks(window_us));
        let there = self.word(FULL_AT).load(Ordering::Relaxed).saturating_add(needed);
        if rate > 0.0 { us(there.saturating_sub(ticks(now_us) + ticks(window_us))) } else { f64::INFINITY }
    }

    /// In bytes/s; infinite if nothing is limited.
    pub(super) fn rate(&self) -> f64 {
        from_word(self.word(RATE).load(Ordering::Relaxed))
    }

    /// Takes `bytes`, if `asked` are there or nothing is asked for.
    fn take(&self, bytes: u64, window_us: f64, now_us: f64, asked: Option<u64>) -> bool {
        let rate = self.rate();
        if rate.is_infinite() || rate <= 0.0 {
            return rate > 0.0;
        }
        let (now, window, cost) = (ticks(now_us), ticks(window_us), self::cost(bytes, rate));
        // All that is asked for is taken, as a rule.
        let asked = asked.map(|asked| if asked == bytes { cost } else { self::cost(asked, rate) });
        let taken = self.word(FULL_AT).fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full_at| {
            let from = full_at.max(now);
            let is_there = asked.is_none_or(|asked| from - now + asked.min(window) <= window);
            is_there.then(|| from.saturating_add(cost))
        });
        taken.is_ok()
    }
}

impl Drop for VmBudget {
    /// No device moves with it here any more.
    fn drop(&mut self) {
        self.say(0, 0.0, 0.0);
    }
}

/// A rate, in bytes/s, as a word of which zero, as which words begin, means that nothing is limited.
#[inline]
fn to_word(rate: f64) -> u64 {
    rate.to_bits() ^ f64::INFINITY.to_bits()
}

#[inline]
fn from_word(word: u64) -> f64 {
    f64::from_bits(word ^ f64::INFINITY.to_bits())
}

/// How long it takes to save up so many bytes.
fn cost(bytes: u64, rate: f64) -> u64 {
    whole((as_f64(bytes) / rate * 1e6 * TICKS_PER_US).ceil())
}

fn ticks(us: f64) -> u64 {
    whole(us * TICKS_PER_US)
}

fn us(ticks: u64) -> f64 {
    as_f64(ticks) / TICKS_PER_US
}

#[cfg(test)]
mod tests {
    use mem_channel::ByteBudget;
    use proptest::prelude::*;

    use super::*;

    const T_W_US: f64 = 100.0;

    /// 100 kB.
    fn budget() -> VmBudget {
        let budget = VmBudget::default();
        budget.limit(1e9, 0.0);
        budget
    }

    #[test]
    fn at_most_one_window_is_saved_up_and_what_is_too_large_is_paid_back() {
        let budget = budget();
        assert!(budget.admit(100_000, T_W_US, 1e6) && !budget.admit(1000, T_W_US, 1e6));
        assert!((budget.wait_us(1000, T_W_US, 1e6) - 1.0).abs() < 1e-3);
        assert!(budget.admit(1000, T_W_US, 1e6 + 1.001));
        assert!(budget.admit(150_000, T_W_US, 2e6), "a whole T_W was saved up");
        assert!(!budget.admit(1, T_W_US, 2e6 + 50.0) && budget.admit(1, T_W_US, 2e6 + 51.0));
    }

    #[test]
    fn what_is_lent_may_be_more_than_is_there_but_nothing_while_something_is_owed() {
        let budget = budget();
        assert!(budget.lend(300_000, T_W_US, 1e6) && !budget.lend(1, T_W_US, 1e6 + 199.0));
        assert!(!budget.admit(1, T_W_US, 1e6 + 199.0));
        assert!(budget.lend(50_000, T_W_US, 1e6 + 201.0) && !budget.lend(1, T_W_US, 1e6 + 201.0));
    }

    #[test]
    fn what_is_forced_is_paid_back_as_well() {
        let budget = budget();
        for _ in 0..3 {
            budget.force(100_000, T_W_US, 0.0);
        }
        assert!((budget.wait_us(0, T_W_US, 0.0) - 200.0).abs() < 1e-3);
        // At a tenth of the rate the same bytes take ten times as long.
        budget.limit(1e8, 0.0);
        assert!((budget.wait_us(0, T_W_US, 0.0) - 2900.0).abs() < 1e-3);
        budget.limit(f64::INFINITY, 0.0);
        assert!(budget.is_free() && budget.admit(u64::MAX, T_W_US, 0.0));
        budget.limit(0.0, 0.0);
        assert!(!budget.admit(0, T_W_US, 1e9) && budget.wait_us(1, T_W_US, 1e9).is_infinite());
    }

    /// The budgets that the two frontends of a host have of a VM.
    fn both(directory: &Path, now_us: f64) -> (VmBudget, VmBudget) {
        let open = |role| VmBudget::shared(&directory.join("vm1"), role, now_us).expect("a budget");
        (open(Role::NetFrontend), open(Role::BlkFrontend))
    }

    #[test]
    fn both_frontends_take_from_one_budget_and_hear_what_the_other_one_has() {
        let directory = tempfile::tempdir().expect("a directory");
        let (net, blk) = both(directory.path(), 0.0);
        assert!(net.is_free() && blk.is_free() && net.other(1e6, 0.0).is_none());
        net.say(1, 0.0, 0.0);
        blk.say(3, 2e8, 0.0);
        assert_eq!((net.other(1e6, 1e6), blk.other(1e6, 1e6)), (Some((3, 2e8)), Some((1, 0.0))));
        assert_eq!(net.other(1e6, 1e6 + 1.0), Some((3, 0.0)), "its vCPUs would be told of in each K");
        net.limit(1e9, 0.0);
        blk.limit(1e9, 0.0);
        assert!(
            net.admit(60_000, T_W_US, 1e6)
                && !blk.admit(50_000, T_W_US, 1e6)
                && blk.admit(40_000, T_W_US, 1e6)
        );
        // Each says so when the share changes: what is missing stays as many bytes, and not as if it had changed twice.
        net.limit(5e8, 1e6);
        blk.limit(5e8, 1e6);
        assert!((net.wait_us(50_000, T_W_US, 1e6) - 200.0).abs() < 1.0);
        // One that is replaced lets go of nothing that was taken.
        drop(blk);
        assert!(net.other(1e6, 1e6).is_none());
        let blk = VmBudget::shared(&directory.path().join("vm1"), Role::BlkFrontend, 1e6).expect("a budget");
        blk.begin(5e8, 1e6);
        assert!(!blk.admit(1, T_W_US, 1e6));
    }

    #[test]
    fn what_was_left_by_those_who_were_killed_holds_nobody_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let (net, blk) = both(directory.path(), 1e9);
        blk.say(2, 1e8, 1e9);
        net.limit(1e3, 1e9);
        net.force(1_000_000, T_W_US, 1e9);
        // Nobody ran its destructor, and the clock of the next boot begins anew.
        std::mem::forget((net, blk));
        let (net, blk) = both(directory.path(), 5.0);
        assert!(net.other(1e6, 5.0).is_none() && blk.other(1e6, 5.0).is_none());
        net.limit(1e9, 5.0);
        assert!(net.admit(50_000, T_W_US, 5.0));
    }

    proptest! {
        /// It admits what a budget of one device does, but for what is lost where times are rounded.
        #[test]
        fn it_keeps_the_rules_of_a_budget_of_one_device(
            asked in prop::collection::vec((0_u32..200, 1_u64..200_000), 1..100),
        ) {
            let (vm, mut one) = (budget(), ByteBudget::new(T_W_US, 0.0));
            one.set_rate(1e9, 0.0);
            let mut now_us = 0.0;
            for (pause_us, bytes) in asked {
                now_us += f64::from(pause_us);
                let (theirs, ours) = (one.wait_us(bytes, now_us), vm.wait_us(bytes, T_W_US, now_us));
                prop_assert!((ours - theirs).abs() <= 0.2, "{ours} us, not {theirs}");
                if one.admit(bytes, now_us) {
                    vm.force(bytes, T_W_US, now_us);
                }
            }
        }
    }
}
