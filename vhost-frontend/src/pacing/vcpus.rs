//! The vCPUs of a VM, as far as their agent tells.

use std::sync::Arc;

use mem_channel::{Decision, VcpuAccount};
use pod_protocol::objects::FabricObject;
use pod_protocol::vcpus::{Link, Order, Report, ToAgent};

use super::round::rounded;
use super::{as_f64, whole};

/// Nobody has reason to report more often in a K.
const REPORTS_MAX: u32 = 64;
/// An agent may be silent for so many K …
const SILENT_KS: u32 = 10;
/// … and for so long, in µs, if that is longer: a host that does much else keeps it waiting.
const SILENT_US: f64 = 500_000.0;

/// How an agent is told.
pub(super) trait Agent: Send {
    /// For how long the vCPUs may run.
    fn order(&self, order: Order);

    /// That nothing more will be said, and why.
    fn dismiss(&self, reason: &str);
}

impl Agent for Arc<Link> {
    fn order(&self, order: Order) {
        // One that does not listen is not told; one that is gone, its thread will see.
        let _ = self.send(&ToAgent::Order(order));
    }

    fn dismiss(&self, reason: &str) {
        let _ = self.send(&ToAgent::Refused { reason: reason.to_owned() });
        self.close();
    }
}

/// What is known of the vCPUs of a VM.
pub(super) struct Vcpus {
    agent: Box<dyn Agent>,
    /// Which connection that is.
    number: u64,
    process: u32,
    account: VcpuAccount,
    /// All that was reported.
    pub(super) bytes: u64,
    pub(super) slept_us: u64,
    pub(super) window_us: u64,
}

impl Vcpus {
    /// They run freely, and have moved nothing. Where the agent does not hold them they go on doing so.
    pub(super) fn new(agent: Box<dyn Agent>, (number, process): (u64, u32), holds: bool) -> Self {
        Self { agent, number, process, account: VcpuAccount::new(holds), bytes: 0, slept_us: 0, window_us: 0 }
    }

    /// Whether this connection is its agent's.
    pub(super) fn is_of(&self, number: u64) -> bool {
        self.number == number
    }

    /// Whether they are held, as far as that is needed.
    pub(super) fn are_held(&self) -> bool {
        self.account.are_held()
    }

    /// The agent's process, as it says.
    pub(super) fn process(&self) -> u32 {
        self.process
    }

    /// T_R/T_W as the agent was told last.
    pub(super) fn part(&self) -> f64 {
        self.account.part()
    }

    /// Takes a report, for the round to come.
    pub(super) fn report(&mut self, report: &Report) -> Result<(), String> {
        let run_us = as_f64(report.run_us);
        let reports = self.account.report(as_f64(report.elapsed_us), as_f64(report.bytes), run_us);
        if reports > REPORTS_MAX {
            return Err(format!("more than {REPORTS_MAX} reports within one sampling period"));
        }
        self.bytes = self.bytes.saturating_add(report.bytes);
        self.slept_us = self.slept_us.saturating_add(report.slept_us);
        self.window_us = report.window_us;
        Ok(())
    }

    /// What they moved in a K that is over, in bytes, and for how long they could, in µs; `demand` is what they were found to want.
    pub(super) fn measure(&mut self, demand: f64, elapsed_us: f64) -> (u64, f64) {
        self.account.measure(demand, elapsed_us)
    }

    /// Nothing is decided yet.
    pub(super) fn begin(&mut self) {
        self.account.begin();
    }

    /// Tells the agent for how long they may run, so that they move no more than `limit`, in bytes/s. Until it is known what they want,
    /// they go on as they are.
    pub(super) fn order(&mut self, limit: f64, decision: &Decision, fabric: &FabricObject) {
        let Some(part) = self.account.decide(limit, decision.demand) else { return };
        let window_ns = u64::from(fabric.window_us) * 1000;
        let run_ns = if part >= 1.0 { window_ns } else { whole(as_f64(window_ns) * part).max(1) };
        self.agent.order(Order {
            sample_us: fabric.sample_us.into(),
            run_ns,
            window_ns,
            share: limit.is_finite().then(|| rounded(limit)),
            demand: rounded(decision.demand),
        });
    }

    /// Whether nothing was heard of the agent for so long that it is taken for gone.
    pub(super) fn is_silent(&self, sample_us: f64) -> bool {
        let silent = self.account.silent_ks();
        silent > SILENT_KS && f64::from(silent) * sample_us > SILENT_US
    }

    /// Says nothing more to the agent.
    pub(super) fn dismiss(&self, reason: &str) {
        self.agent.dismiss(reason);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use cxl_pool::{Area, LineCount, LineOffset};

    use super::*;

    struct Nobody;

    impl Agent for Nobody {
        fn order(&self, _: Order) {}

        fn dismiss(&self, _: &str) {}
    }

    fn vcpus() -> Vcpus {
        let mut vcpus = Vcpus::new(Box::new(Nobody), (1, 1), true);
        assert_eq!(vcpus.measure(1e6, 10_000.0), (0, 0.0));
        vcpus
    }

    fn report(elapsed_us: u64, bytes: u64, run_us: u64) -> Report {
        Report { elapsed_us, bytes, run_us, ..Report::default() }
    }

    /// Passes on what it is told.
    struct Told(Sender<Order>);

    impl Agent for Told {
        fn order(&self, order: Order) {
            self.0.send(order).unwrap();
        }

        fn dismiss(&self, _: &str) {}
    }

    #[test]
    fn nothing_is_ordered_before_it_is_known_what_they_want_and_no_report_is_lost() {
        let area = Area::new(LineOffset::new(0), LineCount::new(16));
        let fabric = FabricObject {
            window_us: 1000,
            sample_us: 10_000,
            sums: area,
            vms: area,
            peers: Vec::new(),
            sibling: None,
            elements: Vec::new(),
            tenants: Vec::new(),
        };
        let decision = |demand| Decision { rate: 0.0, demand, share: 5e6, t_r_us: 0.0, queue_rate: 5e6 };
        let (told, orders) = channel();
        let mut vcpus = Vcpus::new(Box::new(Told(told)), (1, 1), true);
        // Another frontend had them held to a quarter, and the report of that comes early.
        vcpus.report(&report(10_000, 50_000, 2500)).unwrap();
        assert_eq!(vcpus.measure(0.0, 10_000.0), (0, 0.0));
        vcpus.order(5e6, &decision(0.0), &fabric);
        assert!(orders.try_recv().is_err(), "they go on as they are");
        assert_eq!(vcpus.measure(0.0, 10_000.0), (50_000, 2500.0));
        vcpus.order(5e6, &decision(20e6), &fabric);
        assert!((orders.recv().unwrap().part() - 0.25).abs() < 1e-9);
        assert_eq!(vcpus.bytes, 50_000);
    }

    #[test]
    fn an_agent_that_says_too_much_or_nothing_is_found_out() {
        let mut vcpus = vcpus();
        let heard = (0..1000).map(|_| vcpus.report(&report(1, 1, 1)));
        assert!(heard.take_while(Result::is_ok).count() < 100);
        // The first round has what was reported.
        for (sample_us, rounds) in [(100_000.0, 11), (10_000.0, 51)] {
            vcpus.measure(0.0, sample_us);
            vcpus.report(&report(1, 1, 1)).unwrap();
            let mut is_heard = || {
                vcpus.measure(0.0, sample_us);
                !vcpus.is_silent(sample_us)
            };
            assert_eq!((0..1000).take_while(|_| is_heard()).count(), rounds);
        }
    }

    #[test]
    fn an_agent_that_reports_as_it_was_told_may_stay_whatever_k_is() {
        // Every 200 ms until the first order, which comes in the second K.
        let mut vcpus = Vcpus::new(Box::new(Nobody), (1, 1), true);
        for _ in 0..2 {
            for _ in 0..50 {
                vcpus.report(&report(200_000, 1, 1)).unwrap();
            }
            vcpus.measure(0.0, 10e6);
        }
    }
}
