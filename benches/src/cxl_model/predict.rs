//! What the model says, and what the paper measured.

use anyhow::Result;
use cxl_channel::ReceivePolicy;

use super::fit::IDLE_RATE;
use super::link::Link;
use super::traffic::{Found, Traffic, run};

/// By what part a prediction may be off.
pub(crate) const TOLERANCE: f64 = 0.25;

/// A figure of the paper that nothing was fitted to.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    pub(crate) name: &'static str,
    pub(crate) slug: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) measured: f64,
    policy: ReceivePolicy,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    HighestRate,
    /// Median latency at this rate.
    MedianAt(f64),
}

/// What a channel has to carry, in messages per µs (Oasis, §3.2.2).
const TARGET: f64 = 14.0;

/// Oasis, §3.2.2 and Figure 6.
pub(crate) const KNOWN: [Known; 5] = [
    Known {
        name: "naive prefetch, highest rate",
        slug: "naive-prefetch/max",
        unit: "M/s",
        measured: 8.6,
        policy: ReceivePolicy::NaivePrefetch,
        what: What::HighestRate,
    },
    Known {
        name: "+ invalidate consumed, highest rate",
        slug: "invalidate-consumed/max",
        unit: "M/s",
        measured: 87.0,
        policy: ReceivePolicy::InvalidateConsumed,
        what: What::HighestRate,
    },
    Known {
        name: "+ invalidate prefetched, highest rate",
        slug: "invalidate-prefetched/max",
        unit: "M/s",
        measured: 87.0,
        policy: ReceivePolicy::InvalidatePrefetched,
        what: What::HighestRate,
    },
    Known {
        name: "+ invalidate consumed, median at 14 M/s",
        slug: "invalidate-consumed/p50-at-14M",
        unit: "ns",
        measured: 1200.0,
        policy: ReceivePolicy::InvalidateConsumed,
        what: What::MedianAt(TARGET),
    },
    Known {
        name: "+ invalidate prefetched, median at 14 M/s",
        slug: "invalidate-prefetched/p50-at-14M",
        unit: "ns",
        measured: 600.0,
        policy: ReceivePolicy::InvalidatePrefetched,
        what: What::MedianAt(TARGET),
    },
];

/// What the model says of a figure.
#[derive(Clone, Copy)]
pub(crate) struct Prediction {
    pub(crate) known: &'static Known,
    pub(crate) value: f64,
}

/// Predicts every figure.
pub(crate) fn predict(link: &Link) -> Result<Vec<Prediction>> {
    KNOWN
        .iter()
        .map(|known| {
            let value = match known.what {
                What::HighestRate => run(link, Traffic::flat_out(known.policy))?.rate,
                What::MedianAt(rate) => run(link, Traffic::at(known.policy, rate))?.median_ns,
            };
            Ok(Prediction { known, value })
        })
        .collect()
}

/// Latency over rate, as in the paper's figure.
pub(crate) struct Curve {
    pub(crate) policy: ReceivePolicy,
    /// As fast as it goes, message by message.
    pub(crate) highest: Found,
    /// As fast as it goes, 32 at a time, without reading the clock.
    pub(crate) batched: Found,
    pub(crate) points: Vec<(f64, Found)>,
}

/// In messages per µs.
pub(crate) const RATES: [f64; 14] =
    [IDLE_RATE, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0, 28.0, 40.0, 56.0, 70.0, 80.0];

pub(crate) const POLICIES: [ReceivePolicy; 5] = [
    ReceivePolicy::Bypass,
    ReceivePolicy::NaivePrefetch,
    ReceivePolicy::InvalidateConsumed,
    ReceivePolicy::InvalidatePrefetched,
    ReceivePolicy::Adaptive,
];

/// Below this part of the rate that was asked for, a run did not keep up.
const KEPT_UP: f64 = 0.98;

/// Runs every policy at every rate that it can follow.
pub(crate) fn curves(link: &Link) -> Result<Vec<Curve>> {
    POLICIES
        .into_iter()
        .map(|policy| {
            let highest = run(link, Traffic::flat_out(policy))?;
            let batched = run(link, Traffic { batch: 32, ..Traffic::flat_out(policy) })?;
            let mut points = Vec::new();
            for rate in RATES {
                if rate > highest.rate * 1.1 {
                    break;
                }
                let found = run(link, Traffic::at(policy, rate))?;
                if found.rate >= rate * KEPT_UP {
                    points.push((rate, found));
                }
            }
            Ok(Curve { policy, highest, batched, points })
        })
        .collect()
}
