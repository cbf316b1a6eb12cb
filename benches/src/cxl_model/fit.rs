//! The two parameters that nobody has published for the paper's system, from two figures of the paper.

use anyhow::{Result, ensure};
use cxl_channel::ReceivePolicy;

use super::link::Link;
use super::traffic::{Traffic, run};

/// The bypass variant's highest rate, in messages per µs (Oasis, §3.2.2).
pub(crate) const BYPASS_RATE: f64 = 3.0;
/// A lone message takes as long (Oasis, Figure 6).
pub(crate) const IDLE_NS: f64 = 600.0;
/// In messages per µs: they do not meet.
pub(crate) const IDLE_RATE: f64 = 0.1;

/// Finds them.
pub(crate) fn fit(sourced: &Link) -> Result<Link> {
    let mut link = *sourced;
    // What a poll takes beyond a load is the same in each poll, so this one comes first. What a write takes does not matter
    // to it: the ring is full.
    link.write_ns = link.load_ns();
    link.invalidate_ns = bisect(0.0, 400.0, |invalidate_ns| {
        let traffic = Traffic { messages: 10_000, ..Traffic::flat_out(ReceivePolicy::Bypass) };
        Ok(run(&Link { invalidate_ns, ..link }, traffic)?.rate < BYPASS_RATE)
    })?;
    link.write_ns = bisect(1.0, 800.0, |write_ns| {
        let traffic = Traffic::at(ReceivePolicy::Bypass, IDLE_RATE);
        Ok(run(&Link { write_ns, ..link }, traffic)?.median_ns > IDLE_NS)
    })?;
    Ok(link)
}

/// The value, to 0.1, from which on this is too much.
fn bisect(mut low: f64, mut high: f64, mut too_much: impl FnMut(f64) -> Result<bool>) -> Result<f64> {
    ensure!(
        !too_much(low)? && too_much(high)?,
        "nothing between {low} and {high} ns fits the paper's figure"
    );
    while high - low > 0.1 {
        let middle = f64::midpoint(low, high);
        if too_much(middle)? {
            high = middle;
        } else {
            low = middle;
        }
    }
    Ok(f64::midpoint(low, high))
}
