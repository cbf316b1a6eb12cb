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
            run_time: RunTime::new(),
        })
    }

    /// D_c in bytes/s.
    pub(crate) fn demand(&self) -> f64 {
        self.line_demand.get() + self.queue_demand.get()
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
    }

    /// Lines 8–9: from w_c·α_c to what is done about it.
    pub(crate) fn decide(&mut self, share: f64, measured: &Measured, parameters: &Parameters) -> Decision {
        let (lines, queues) = (self.line_demand.get(), self.queue_demand.get());
        // The two kinds of traffic of one VM share as two mchannels of equal weight would.
        let (line_share, queue_rate) = if share.is_finite() {
            let half = share / 2.0;
            (share - queues.min(half), share - lines.min(half))
        } else {
            (share, share)
        };
        let part = run_part(line_share, lines);
        let t_r_us = self.run_time.next(part, measured.elapsed_us, measured.run_us, parameters);
        Decision { rate: self.rate.get(), demand: lines + queues, share, t_r_us, queue_rate }
    }
}

pub(crate) fn check_weight(weight: f64) -> Result<(), MemChannelError> {
    check("a weight", weight, "a positive number", weight.is_finite() && weight > 0.0)
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a window are far below 2^53")]
pub(crate) fn exact(bytes: u64) -> f64 {
    bytes as f64
}
