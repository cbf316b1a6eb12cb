//! What is measured: a device's queues, or the vCPUs of a VM, which count as one more device of it.

use std::sync::Arc;

use mem_channel::{Decision, MchannelId, Measured, part_among};
use pod_protocol::ids::{InstanceId, LeaseId};
use pod_protocol::objects::{FabricObject, MchannelObject};

use super::round::stale_after_us;
use super::vcpus::Vcpus;
use super::{Pacing, Waker};

/// So much of a VM's share its queues have in any case, whatever its vCPUs move that nobody holds: who never gets an answer of its disk is
/// dead.
const LEFT_TO_QUEUES: f64 = 0.1;

/// What of a VM has a place of its own in the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// The queues of a device.
    Device(LeaseId),
    /// All vCPUs.
    Vcpus(InstanceId),
}

/// Something that is measured.
pub(super) struct Metered {
    /// Of vCPUs: what is said of a device of the same VM.
    pub(super) object: MchannelObject,
    pub(super) moves: Moves,
    /// Its place in the transport; nothing while its path or tenant is unknown here.
    pub(super) id: Option<MchannelId>,
    /// What its path carries at most, in bytes/s.
    pub(super) most: f64,
    /// What the other parts of its VM want, in bytes/s.
    pub(super) elsewhere: Vec<f64>,
    /// Of these, what those want that the other frontend of this host told of.
    pub(super) told: Vec<f64>,
    /// Of these, what the vCPUs want that are measured here.
    pub(super) vcpus: Option<f64>,
    /// Its vCPUs that are measured here and that nobody holds. They do not divide a share with it, but come first.
    pub(super) unheld: Option<Unheld>,
    pub(super) said: Said,
}

/// vCPUs that nobody holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unheld {
    /// What they want, in bytes/s: what they would move if they could always run.
    pub(super) demand: f64,
    /// What they move, in bytes/s: where they wait for a processor, less.
    pub(super) rate: f64,
}

/// By what it moves bytes.
pub(super) enum Moves {
    /// By queues, which ask before they move any.
    Queues(Queues),
    /// By loads and stores, of which others tell.
    Vcpus(Vcpus),
}

/// The queues of a device.
pub(super) struct Queues {
    pub(super) pacing: Arc<Pacing>,
    /// What they had moved at the end of the last K.
    pub(super) bytes: u64,
    /// For how long they had been held back by then, in µs.
    pub(super) held_us: f64,
}

/// What was decided last, for telemetry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Said {
    pub(super) rate: f64,
    pub(super) demand: f64,
    pub(super) share: Option<f64>,
    pub(super) limit: Option<f64>,
}

/// What all devices of a VM may move on this host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Together {
    /// In bytes/s: what is left of its share while one of them takes as much as it may.
    pub(super) rate: f64,
    /// How many devices that are, at this frontend and at the other one.
    pub(super) devices: (usize, usize),
    /// What is left to vCPUs that are measured here, in bytes/s.
    pub(super) vcpus: f64,
}

impl Metered {
    fn new(object: MchannelObject, moves: Moves) -> Self {
        Self {
            object,
            moves,
            id: None,
            most: f64::INFINITY,
            elsewhere: Vec::new(),
            told: Vec::new(),
            vcpus: None,
            unheld: None,
            said: Said::default(),
        }
    }

    /// A device of which nothing is known yet.
    pub(super) fn device(object: MchannelObject, pacing: Arc<Pacing>) -> Self {
        Self::new(object, Moves::Queues(Queues { pacing, bytes: 0, held_us: 0.0 }))
    }

    /// The vCPUs of a VM with such a device.
    pub(super) fn vcpus(object: MchannelObject, vcpus: Vcpus) -> Self {
        Self::new(object, Moves::Vcpus(vcpus))
    }

    /// What holds it to its share, if it is a device.
    pub(super) fn pacing(&self) -> Option<&Arc<Pacing>> {
        match &self.moves {
            Moves::Queues(queues) => Some(&queues.pacing),
            Moves::Vcpus(_) => None,
        }
    }

    /// Whether anything moved or waited since the last round. Where there is an agent, it waits for an order.
    pub(super) fn moved_since(&self, now_us: f64) -> bool {
        match &self.moves {
            Moves::Queues(queues) => {
                queues.pacing.moved().0 != queues.bytes || queues.pacing.held_us(now_us) > queues.held_us
            }
            Moves::Vcpus(_) => true,
        }
    }

    /// What its VM wants besides, in bytes/s.
    pub(super) fn demand_elsewhere(&self) -> f64 {
        self.elsewhere.iter().sum::<f64>() + self.unheld.map_or(0.0, |it| it.demand)
    }

    /// What it did in a K that is over.
    pub(super) fn measure(&mut self, elapsed_us: f64, now_us: f64) -> Measured {
        let demand_elsewhere = self.demand_elsewhere();
        let idle = Measured { elapsed_us, demand_elsewhere, ..Measured::default() };
        match &mut self.moves {
            Moves::Queues(queues) => {
                let ((bytes, _), held_us) = (queues.pacing.moved(), queues.pacing.held_us(now_us));
                let held = (held_us - queues.held_us).clamp(0.0, elapsed_us);
                let queue_bytes = bytes.wrapping_sub(queues.bytes);
                (queues.bytes, queues.held_us) = (bytes, held_us);
                Measured { run_us: elapsed_us, queue_bytes, queue_open_us: elapsed_us - held, ..idle }
            }
            Moves::Vcpus(vcpus) => {
                let (line_bytes, run_us) = vcpus.measure(self.said.demand, elapsed_us);
                // There are no queues to hold back.
                Measured { run_us, line_bytes, queue_open_us: elapsed_us, ..idle }
            }
        }
    }

    /// Its path is known: what holds until its share is.
    pub(super) fn begin(&mut self, fabric: &FabricObject) {
        match &mut self.moves {
            Moves::Queues(queues) => {
                // No more than the path carries.
                queues.pacing.limit(self.most);
                queues.pacing.vm.begin(self.most, Waker::now_us());
                queues.pacing.set_window(f64::from(fabric.window_us));
            }
            Moves::Vcpus(vcpus) => vcpus.begin(),
        }
        self.said = Said::default();
    }

    /// What vCPUs that nobody holds have of a share, and what they leave of it, in bytes/s.
    fn after_unheld(&self, share: f64) -> (f64, f64) {
        let first = self.unheld.map_or(0.0, |it| it.rate.min((1.0 - LEFT_TO_QUEUES) * share));
        (first, share - first)
    }

    /// Holds it to what was decided. Returns what all devices of its VM may move on this host, if it is one.
    pub(super) fn decide(
        &mut self,
        decision: &Decision,
        plan: &FabricObject,
        now_us: f64,
    ) -> Option<Together> {
        let mut together = None;
        let (first, rate) = self.after_unheld(decision.queue_rate);
        let limit = match &mut self.moves {
            Moves::Queues(queues) => {
                let part = part_among(rate, &self.elsewhere);
                let limit = part.min(self.most);
                queues.pacing.limit(limit);
                let other = queues.pacing.vm.other(stale_after_us(plan), now_us);
                let vcpus = self.vcpus.map_or(0.0, |demand| demand.min(part));
                let beyond = match other {
                    Some((_, vcpus)) => vcpus,
                    // Its devices do not move with the budget that ours have.
                    None => self.told.iter().map(|demand| demand.min(part)).sum(),
                };
                let ours = self.elsewhere.len() + 1 - self.told.len() - usize::from(self.vcpus.is_some());
                together = Some(Together {
                    rate: (rate - vcpus - beyond).max(0.0).min(self.most),
                    devices: (ours, other.map_or(0, |(devices, _)| devices)),
                    vcpus: vcpus + first,
                });
                limit
            }
            Moves::Vcpus(vcpus) => {
                let limit = part_among(decision.share, &self.elsewhere);
                vcpus.order(limit, decision, plan);
                limit
            }
        };
        let finite = |rate: f64| rate.is_finite().then_some(rate);
        self.said = Said { share: finite(decision.share), limit: finite(limit), ..self.said };
        together
    }

    /// Its VM may move so much on this host with all its devices.
    pub(super) fn limit_together(&self, together: &Together, now_us: f64) {
        if let Moves::Queues(queues) = &self.moves {
            let (ours, others) = together.devices;
            queues.pacing.vm.say(ours, together.vcpus, now_us);
            queues.pacing.limit_together(together.rate, ours + others, now_us);
        }
    }

    /// Nothing limits it, and it has no place in the transport.
    pub(super) fn free(&mut self) {
        self.id = None;
        self.most = f64::INFINITY;
        self.said = Said::default();
        match &mut self.moves {
            Moves::Queues(queues) => {
                queues.pacing.limit(f64::INFINITY);
                // Others of the same VM that are held say so again at the end of this K.
                queues.pacing.vm.say(0, 0.0, Waker::now_us());
            }
            Moves::Vcpus(vcpus) => vcpus.begin(),
        }
    }
}
