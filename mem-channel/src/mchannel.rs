//! What one VM uses of one path into the pool.

use crate::error::check;
use crate::run_time::{RunTime, run_part};
use crate::{Average, ElementId, MemChannelError, Parameters, TenantId, measured_demand, measured_rate};

/// Names an open mchannel of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MchannelId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// What an mchannel is opened with.
#[derive(Clone, Debug, PartialEq)]
pub struct MchannelOptions {
    /// Whose it is.
    pub tenant: TenantId,
    /// w_c, a positive number: its part among its tenant's mchannels.
    pub weight: f64,
    /// What it passes through, from the host's port to the device.
    pub path: Vec<ElementId>,
}

/// What an mchannel did in the window that is over.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// How long the window was, in µs: T_W, if the timer was on time.
    pub elapsed_us: f64,
    /// How much of it the vCPUs were allowed to run, in µs: T_R, if they stopped on time.
    pub run_us: f64,
    /// n·S: what loads and stores moved, in bytes.
    pub line_bytes: u64,
    /// What the VM's queues moved, in bytes.
    pub queue_bytes: u64,
    /// How much of the window the queues were not held back by their budget, in µs.
    pub queue_open_us: f64,
    /// What the same VM wants of the same path in ways that are measured as mchannels of their own, in bytes/s: its weight is
    /// theirs as well. How much of the share is theirs, [`part_among`] says.
    pub demand_elsewhere: f64,
}

/// What it may do in the next one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// r_c, in bytes/s.
    pub rate: f64,
    /// D_c, in bytes/s.
    pub demand: f64,
    /// w_c·α_c in bytes/s; infinite if nothing on its path is congested.
    pub share: f64,
    /// T_R in µs: how long the vCPUs may run in the next window; T_W if they need not be stopped at all.
    pub t_r_us: f64,
    /// What the queues may move, in bytes/s; infinite if they need not be held back. For a [`ByteBudget`](crate::ByteBudget).
    pub queue_rate: f64,
}

/// Where a path passes: an element, and its tenant's place there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hop {
    pub(crate) element: usize,
    pub(crate) member: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Mchannel {
    pub(crate) weight: f64,
    pub(crate) path: Box<[Hop]>,
    /// No demand is above what the narrowest element on the path carries, in bytes/s.
    pub(crate) most_demand: f64,
    /// Moved since the last sample.
    pub(crate) bytes: u64,
    rate: Average,
    line_demand: Average,
    queue_demand: Average,
    /// D of the same VM that others measure, in bytes/s.
    elsewhere: f64,
    run_time: RunTime,
}

impl Mchannel {
    pub(crate) fn new(weight: f64, path: Box<[Hop]>, most_demand: f64) -> Result<Self, MemChannelError> {
        check_weight(weight)?;
        Ok(Self {
            weight,
            path,
            most_demand,
            bytes: 0,
            rate: Average::default(),
            line_demand: Average::default(),
            queue_demand: Average::default(),
            elsewhere: 0.0,
            run_time: RunTime::new(),
        })
    }

    /// D_c in bytes/s.
    pub(crate) fn demand(&self) -> f64 {
        self.line_demand.get() + self.queue_demand.get()
    }

    /// Of D_c, what others of this host measure.
    pub(crate) fn elsewhere(&self) -> f64 {
        self.elsewhere
    }

    /// Lines 2–4 of Algorithm 1.
    pub(crate) fn estimate(&mut self, measured: &Measured, decay: f64) {
        self.bytes = self.bytes.saturating_add(measured.line_bytes).saturating_add(measured.queue_bytes);
        let (lines, queues) = (exact(measured.line_bytes), exact(measured.queue_bytes));
        if let Some(rate) = measured_rate(lines + queues, measured.elapsed_us) {
            self.rate.update(rate, decay);
        }
        if let Some(demand) = measured_demand(lines, measured.run_us) {
            self.line_demand.update(demand, decay);
        }
        // A queue may empty its budget in no time, and that is no proof of a demand above what the path carries.
        if let Some(demand) = measured_demand(queues, measured.queue_open_us) {
            self.queue_demand.update(demand.min(self.most_demand), decay);
        } else if measured.queue_bytes > 0 {
            self.queue_demand.update(self.most_demand, decay);
        }
        let elsewhere = measured.demand_elsewhere;
        self.elsewhere = if elsewhere.is_finite() { elsewhere.clamp(0.0, self.most_demand) } else { 0.0 };
    }

    /// Lines 8–9: from w_c·α_c to what is done about it.
    pub(crate) fn decide(&mut self, share: f64, measured: &Measured, parameters: &Parameters) -> Decision {
        let (lines, queues) = (self.line_demand.get(), self.queue_demand.get());
        // The two kinds of traffic of one VM share as two mchannels of equal weight would.
        let (line_share, queue_rate) = if share.is_finite() {
            (part_among(share, &[queues]), part_among(share, &[lines]))
        } else {
            (share, share)
        };
        let part = run_part(line_share, lines);
        let t_r_us = self.run_time.next(part, measured.elapsed_us, measured.run_us, parameters);
        Decision { rate: self.rate.get(), demand: lines + queues, share, t_r_us, queue_rate }
    }
}

/// What of a share is left for one who wants more than that, in bytes/s, where others have a part in it who want this much: they
/// divide it as mchannels of equal weight would, and each is sure of one part of as many as there are.
pub fn part_among(share: f64, others: &[f64]) -> f64 {
    if !share.is_finite() {
        return share;
    }
    // Those who want less than an equal part get that; the rest divide what is left. With each step the part grows, until
    // nobody else wants less.
    let mut part = share / (exact(others.len() as u64) + 1.0);
    for _ in others {
        let small = others.iter().filter(|demand| **demand <= part);
        let (wanted, count) = small.fold((0.0, 0), |(sum, count), demand| (sum + demand, count + 1));
        part = (share - wanted) / (exact((others.len() - count) as u64) + 1.0);
    }
    part
}

pub(crate) fn check_weight(weight: f64) -> Result<(), MemChannelError> {
    check("a weight", weight, "a positive number", weight.is_finite() && weight > 0.0)
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a window are far below 2^53")]
pub(crate) fn exact(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_divided_among_what_a_vm_does() {
        for (others, expected) in [
            (&[][..], 12.0),
            (&[0.0, 0.0], 12.0),
            (&[2.0], 10.0),
            (&[20.0], 6.0),
            (&[2.0, 20.0], 5.0),
            (&[20.0, 2.0, 1.0], 4.5),
            (&[20.0, 20.0], 4.0),
        ] {
            assert!((part_among(12.0, others) - expected).abs() < 1e-12, "{others:?}");
        }
        assert!(part_among(f64::INFINITY, &[1.0]).is_infinite());
        // All that there are together get the share and no more, if each is hungry or gets what it wants.
        let demands = [1.0, 3.0, 50.0, 60.0];
        let got = |index: usize| {
            let others: Vec<f64> = (0..4).filter(|it| *it != index).map(|it| demands[it]).collect();
            part_among(12.0, &others).min(demands[index])
        };
        assert!(((0..4).map(got).sum::<f64>() - 12.0).abs() < 1e-9);
    }
}
