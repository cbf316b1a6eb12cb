//! The account of a thread that the kernel holds to a quota. The kernel sees what a thread ran at its ticks, and hands run time out in
//! slices; what a thread got too much or too little by that goes into the next quota, so that the long-run share is exact.
//!
//! At most the time between two corrections is carried, either way, and not one T_W: a kernel that gives 61 % where 95 % are asked for is behind
//! by a third of that time at each correction, and makes it good only where a thread may run all of the next one. So in any time a thread runs at
//! most its share of it and two such spans more.

use std::time::Duration;

/// What a thread did so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    /// Since it is held.
    pub(super) elapsed: Duration,
    /// Processor time.
    pub(super) ran: Duration,
    /// For how long the kernel kept it from running.
    pub(super) held: Duration,
}

/// What is owed to a thread, or by it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Carry {
    /// When it was corrected last, and what is known since.
    from: Times,
    last: Times,
    /// What it should have run since then, in seconds of processor time.
    earned: f64,
    /// In seconds of processor time; below 0 what it ran too long.
    credit: f64,
    /// What it ran too long and is not held against it, because it would be more than is carried; in seconds of processor time.
    forgiven: f64,
    /// What its share is corrected by until the next correction.
    correction: f64,
}

impl Carry {
    pub(super) fn begin(now: Times) -> Self {
        Self { from: now, last: now, ..Self::default() }
    }

    /// Takes note of what it did until now, where it was to run for `share` of the time.
    pub(super) fn pass(&mut self, now: Times, share: f64) {
        self.earned += share * now.elapsed.saturating_sub(self.last.elapsed).as_secs_f64();
        self.last = now;
    }

    /// For how long nothing was corrected.
    pub(super) fn waits(&self) -> Duration {
        self.last.elapsed.saturating_sub(self.from.elapsed)
    }

    /// Corrects its share, until the next correction, which comes as long after this one as this one after the last.
    pub(super) fn correct(&mut self) {
        let passed = |of: fn(&Times) -> Duration| of(&self.last).saturating_sub(of(&self.from)).as_secs_f64();
        let (elapsed, ran, held) = (passed(|it| it.elapsed), passed(|it| it.ran), passed(|it| it.held));
        if elapsed <= 0.0 {
            return;
        }
        let missed = self.earned - ran;
        // A thread that did not want to run is owed nothing for that.
        self.credit = if missed > held { self.credit.min(0.0) + held } else { self.credit + missed };
        self.forgiven += (-elapsed - self.credit).max(0.0);
        self.credit = self.credit.clamp(-elapsed, elapsed);
        self.correction = self.credit / elapsed;
        (self.from, self.earned) = (self.last, 0.0);
    }

    /// What it ran too long since it is held and is not held against it.
    pub(super) fn forgiven(&self) -> Duration {
        Duration::try_from_secs_f64(self.forgiven).unwrap_or_default()
    }

    /// Its account begins anew, as one that neither owes nor is owed.
    pub(super) fn settle(&mut self, now: Times) {
        *self = Self { forgiven: self.forgiven, ..Self::begin(now) };
    }

    /// What to ask of the kernel so that it runs for `share` of the time; 1 is no limit at all.
    pub(super) fn asked(&self, share: f64) -> f64 {
        (share + self.correction).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOOK: f64 = 0.1;

    /// Runs a thread that wants `wants` of its time under a kernel that gives `obtained` of what it is asked for, for so many looks.
    /// Returns the part of its time that it ran.
    fn run(share: f64, wants: f64, looks: u32, mut obtained: impl FnMut(f64) -> f64) -> f64 {
        let mut now = Times::default();
        let mut carry = Carry::begin(now);
        let mut asked = share;
        for _ in 0..looks {
            let may = if asked >= 1.0 { 1.0 } else { obtained(asked).clamp(0.0, 1.0) };
            let ran = may.min(wants);
            now.elapsed += Duration::from_secs_f64(LOOK);
            now.ran += Duration::from_secs_f64(LOOK * ran);
            now.held += Duration::from_secs_f64(LOOK * (wants - ran));
            carry.pass(now, share);
            carry.correct();
            asked = carry.asked(share);
        }
        now.ran.as_secs_f64() / now.elapsed.as_secs_f64()
    }

    proptest! {
        #[test]
        fn the_long_run_share_is_exact_whatever_the_kernel_makes_of_it(
            share in 0.05..0.95f64,
            slope in 0.4..1.3f64,
            // One that gives more than the share whatever it is asked for cannot be corrected.
            least in -0.5..0.9f64,
            tick in 0.001..0.06f64,
        ) {
            prop_assume!((least * share / tick).round() * tick < share);
            // Too much, too little, or in steps.
            let got = run(share, 1.0, 200, |asked| ((asked * slope + least * share) / tick).round() * tick);
            prop_assert!((got - share).abs() < 0.01, "{got}");
        }

        #[test]
        fn who_wants_less_than_the_share_is_owed_nothing(share in 0.2..0.9f64, part in 0.0..0.9f64) {
            let wants = share * part;
            let mut most = 0.0f64;
            let got = run(share, wants, 100, |asked| {
                most = most.max(asked);
                asked
            });
            prop_assert!((got - wants).abs() < 1e-6);
            prop_assert!(most <= share + 1e-6, "{most}");
        }
    }

    proptest! {
        #[test]
        fn in_any_time_it_runs_two_spans_between_corrections_more_than_its_share_at_most(
            share in 0.02..0.98f64,
            // What it wants and what the kernel gives it, whatever it is asked for; and times in which it does as it is told.
            steps in prop::collection::vec((0.0..1.0f64, 0.0..1.2f64, any::<bool>()), 1..150),
        ) {
            let (mut now, mut asked) = (Times::default(), share);
            let mut carry = Carry::begin(now);
            // At each correction, what it ran beyond its share and what of that was forgiven.
            let mut ahead = vec![0.0];
            for (wants, gives, is_exact) in steps {
                let may = if is_exact { asked } else { gives };
                let ran = wants.min(may);
                now.elapsed += Duration::from_secs_f64(LOOK);
                now.ran += Duration::from_secs_f64(LOOK * ran);
                now.held += Duration::from_secs_f64(LOOK * (wants - ran));
                carry.pass(now, share);
                carry.correct();
                asked = carry.asked(share);
                let beyond = now.ran.as_secs_f64() - share * now.elapsed.as_secs_f64();
                ahead.push(beyond - carry.forgiven().as_secs_f64());
            }
            for (from, before) in ahead.iter().enumerate() {
                let most = ahead[from..].iter().fold(0.0, |most: f64, after| most.max(after - before));
                prop_assert!(most <= 2.0 * LOOK + 1e-6, "{most} s");
            }
        }
    }

    #[test]
    fn what_is_owed_beyond_what_is_carried_is_told() {
        let ms = Duration::from_millis;
        let mut carry = Carry::begin(Times::default());
        for look in 1..=4 {
            // It runs all the time, whatever it is asked for.
            carry.pass(Times { elapsed: ms(100 * look), ran: ms(100 * look), held: ms(0) }, 0.25);
            carry.correct();
        }
        // Of 300 ms that it ran too long, 100 are carried.
        assert!((carry.forgiven().as_secs_f64() - 0.2).abs() < 1e-6, "{:?}", carry.forgiven());
    }

    #[test]
    fn what_was_measured_of_a_kernel_that_looks_every_4_ms_is_made_good() {
        // Windows of 1 ms: see docs/memchannel.md.
        for (share, obtained) in [(0.05, 0.058), (0.5, 0.484), (0.8, 0.556), (0.95, 0.613)] {
            let got = run(share, 1.0, 100, |asked| asked * obtained / share);
            assert!((got - share).abs() < 0.01, "{got} of {share}");
        }
    }

    #[test]
    fn a_share_that_changes_is_added_up() {
        let ms = Duration::from_millis;
        let at = |elapsed, ran| Times { elapsed: ms(elapsed), ran: ms(ran), held: ms(elapsed - ran) };
        let mut carry = Carry::begin(Times::default());
        carry.pass(at(10, 10), 0.2);
        carry.pass(at(40, 20), 0.6);
        assert_eq!(carry.waits(), ms(40));
        assert!((carry.asked(0.5) - 0.5).abs() < 1e-12, "nothing is corrected yet");
        // 2 + 18 ms were earned, and 20 ran.
        carry.correct();
        assert!((carry.asked(0.5) - 0.5).abs() < 1e-12 && carry.waits().is_zero());
        carry.correct();
        carry.pass(at(80, 40), 0.75);
        carry.correct();
        assert!((carry.asked(0.5) - 0.75).abs() < 1e-12, "10 of 40 ms are owed");
        assert!((carry.asked(0.9) - 1.0).abs() < 1e-12);
    }
}
