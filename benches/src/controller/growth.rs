//! How much longer it takes in a large pod. If all of n is to take n log n, one may take as much longer as the logarithm grows; a
//! host's failure may take n log n by itself.
//!
//! What counts is each object that is made: in a large pod more of what an instance is given lies on hosts that its own host has no channel to, and
//! a channel is as much to make as a lease. What a placement takes altogether is shown too.

use anyhow::Result;

use super::{HOSTS, LARGEST, Measured, as_large, measure_apart};
use crate::report::{Figure, Goal};

/// How often it is measured, each time both sizes one after the other.
const ROUNDS: usize = 3;

/// What is measured of both.
type Time = fn(&Measured) -> f64;

/// What takes how long; objects are instances, leases and channels.
const TIMES: [(&str, Time, Share); 6] = [
    ("a-placed-object", |one| 1.0 / one.placements_per_second() / one.made()[0], Share::One),
    ("a-placed-object-with-disk", |one| 1.0 / one.with_disks_per_second() / one.made()[1], Share::One),
    ("a-volume", |one| 1.0 / one.volumes_per_second(), Share::One),
    ("a-host-failure", |one| one.move_ms, Share::All),
    ("a-placement", |one| 1.0 / one.placements_per_second(), Share::Unlimited),
    ("a-placement-with-disk", |one| 1.0 / one.with_disks_per_second(), Share::Unlimited),
];

/// What n log n means for it.
#[derive(Clone, Copy)]
enum Share {
    One,
    All,
    /// More is made.
    Unlimited,
}

/// Times that it takes in the largest pod to those in small ones, which have as much memory together.
pub(super) struct Growth {
    rounds: Vec<[Measured; 2]>,
}

impl Growth {
    pub(super) fn measure() -> Result<Self> {
        let [small, ..] = HOSTS;
        let round = || Ok([measure_apart(small, as_large(small))?, measure_apart(LARGEST, 1)?]);
        Ok(Self { rounds: (0..ROUNDS).map(|_| round()).collect::<Result<_>>()? })
    }

    /// The median of what all rounds found.
    fn of(&self, time: Time) -> f64 {
        let mut all: Vec<f64> = self.rounds.iter().map(|[small, large]| time(large) / time(small)).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    }

    /// How much longer it may take.
    fn allowed(&self, share: Share) -> Option<f64> {
        let [small, large] = self.rounds.first()?.each_ref().map(|one| f64::from(one.instances));
        let logarithms = large.log2() / small.log2();
        match share {
            Share::One => Some(logarithms),
            Share::All => Some(logarithms * large / small),
            Share::Unlimited => None,
        }
    }

    pub(super) fn print(&self) {
        let [small, ..] = HOSTS;
        println!("\nin a pod of {LARGEST} hosts, to {} pods of {small} by turns:", as_large(small));
        for (what, time, share) in TIMES {
            let what = what.replace('-', " ");
            let allowed = self.allowed(share).map_or_else(String::new, |it| format!(" (n log n: {it:.2})"));
            println!("  {what:<26} takes {:.2} times as long{allowed}", self.of(time));
        }
    }

    pub(super) fn figures(&self) -> Vec<Figure> {
        let round = |value: f64| (value * 100.0).round() / 100.0;
        let figure = |(what, time, share): (&str, Time, Share)| {
            let figure = Figure::new(format!("controller/growth-of-{what}"), self.of(time), "x");
            match self.allowed(share) {
                Some(allowed) => figure.with_goal(Goal::AtMost(round(allowed))),
                None => figure,
            }
        };
        TIMES.map(figure).into()
    }
}

impl Measured {
    /// Instances, leases and channels for each instance, without a disk and with one.
    fn made(&self) -> [f64; 2] {
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53")]
        let channels = self.channels.map(|all| all as f64 / f64::from(self.instances));
        [2.0 + channels[0], 3.0 + channels[1]]
    }
}
