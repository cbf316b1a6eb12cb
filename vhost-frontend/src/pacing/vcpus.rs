//! The vCPUs of a VM, as far as their agent tells.

use std::sync::Arc;

use mem_channel::{Decision, run_part};
use pod_protocol::objects::FabricObject;
use pod_protocol::vcpus::{Link, Order, Report, ToAgent};

use super::round::rounded;
use super::{as_f64, whole};

/// No VM moves more than so many bytes in a µs, whatever its agent says: more than a host's memory does.
const BYTES_PER_US_MAX: f64 = 1e7;
/// A report is about no longer time, in µs: what is longer ago says nothing.
const REPORT_US_MAX: f64 = 60e6;
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
    /// Whether it does what it is told.
    holds: bool,
    /// Reported since the last round.
    fresh: Fresh,
    known: Known,
    /// T_R/T_W as the agent was told last.
    part: f64,
    /// Rounds since it reported last. The clock would not do: when all of a host stood still, reports wait to be read.
    silent: u32,
    /// All that was reported.
    pub(super) bytes: u64,
    pub(super) slept_us: u64,
    pub(super) window_us: u64,
}

/// What is known of what they want. An agent comes with vCPUs that it holds, where a frontend takes the place of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// Nothing, nor what shares are in force: until the end of this K, nobody is held here, and who moves something under a share would
    /// be taken for one that does so freely.
    Nothing,
    /// The shares.
    Shares,
    /// What they want, too: there was a report.
    Demand,
}

#[derive(Clone, Copy, Debug, Default)]
struct Fresh {
    reports: u32,
    elapsed_us: f64,
    bytes: f64,
    run_us: f64,
}

impl Vcpus {
    /// They run freely, and have moved nothing. Where the agent does not hold them they go on doing so.
    pub(super) fn new(agent: Box<dyn Agent>, (number, process): (u64, u32), holds: bool) -> Self {
        Self {
            agent,
            number,
            process,
            holds,
            fresh: Fresh::default(),
            known: Known::Nothing,
            part: 1.0,
            silent: 0,
            bytes: 0,
            slept_us: 0,
            window_us: 0,
        }
    }

    /// Whether this connection is its agent's.
    pub(super) fn is_of(&self, number: u64) -> bool {
        self.number == number
    }

    /// Whether they are held, as far as that is needed.
    pub(super) fn are_held(&self) -> bool {
        self.holds
    }

    /// The agent's process, as it says.
    pub(super) fn process(&self) -> u32 {
        self.process
    }

    /// T_R/T_W as the agent was told last.
    pub(super) fn part(&self) -> f64 {
        self.part
    }

    /// Takes a report, for the round to come. Whatever it says does no harm to other VMs' numbers.
    pub(super) fn report(&mut self, report: &Report) -> Result<(), String> {
        self.fresh.reports = self.fresh.reports.saturating_add(1);
        if self.fresh.reports > REPORTS_MAX {
            return Err(format!("more than {REPORTS_MAX} reports within one sampling period"));
        }
        self.bytes = self.bytes.saturating_add(report.bytes);
        self.slept_us = self.slept_us.saturating_add(report.slept_us);
        self.window_us = report.window_us;
        let elapsed_us = as_f64(report.elapsed_us);
        if elapsed_us > 0.0 && elapsed_us <= REPORT_US_MAX {
            self.fresh.elapsed_us += elapsed_us;
            self.fresh.bytes += as_f64(report.bytes).min(elapsed_us * BYTES_PER_US_MAX);
            self.fresh.run_us += as_f64(report.run_us).min(elapsed_us);
        }
        Ok(())
    }

    /// What they moved in a K that is over, in bytes, and for how long they could, in µs; `demand` is what they were found to want.
    ///
    /// A report is about the time from one order to the next, not exactly about a K: so a rate is taken from it. If there is none, they
    /// are taken to have done as they were told. To count nothing then, or the K before once more, would have the next share make up for
    /// what never happened, and shares would swing. Before the first report nothing is known: no bytes in no time say nothing of what
    /// they want.
    pub(super) fn measure(&mut self, demand: f64, elapsed_us: f64) -> (u64, f64) {
        if self.known == Known::Nothing {
            // What was reported is for the K that begins now.
            self.known = Known::Shares;
            // But how many there were is the business of each K: an agent that does not know yet how long that is reports often.
            self.fresh.reports = 0;
            return (0, 0.0);
        }
        let fresh = std::mem::take(&mut self.fresh);
        self.silent = if fresh.reports > 0 { 0 } else { self.silent.saturating_add(1) };
        if fresh.elapsed_us > 0.0 {
            self.known = Known::Demand;
            let part = elapsed_us / fresh.elapsed_us;
            (whole(fresh.bytes * part), fresh.run_us * part)
        } else if self.known == Known::Demand {
            (whole(demand * self.part * elapsed_us / 1e6), self.part * elapsed_us)
        } else {
            (0, 0.0)
        }
    }

    /// Nothing is decided yet.
    pub(super) fn begin(&mut self) {
        self.part = 1.0;
    }

    /// Tells the agent for how long they may run, so that they move no more than `limit`, in bytes/s. Until it is known what they want,
    /// they go on as they are.
    pub(super) fn order(&mut self, limit: f64, decision: &Decision, fabric: &FabricObject) {
        if self.known != Known::Demand {
            return;
        }
        self.part = if self.holds { run_part(limit, decision.demand) } else { 1.0 };
        let window_ns = u64::from(fabric.window_us) * 1000;
        let run_ns = if self.part >= 1.0 { window_ns } else { whole(as_f64(window_ns) * self.part).max(1) };
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
        self.silent > SILENT_KS && f64::from(self.silent) * sample_us > SILENT_US
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
    use proptest::prelude::*;

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

    #[test]
    fn a_report_tells_a_rate_and_without_one_the_last_order_does() {
        let mut vcpus = vcpus();
        vcpus.report(&report(8000, 80_000, 2000)).unwrap();
        let (bytes, run_us) = vcpus.measure(0.0, 10_000.0);
        assert_eq!(bytes, 100_000);
        assert!((run_us - 2500.0).abs() < 1e-6);
        // Two that were late together.
        vcpus.report(&report(8000, 80_000, 2000)).unwrap();
        vcpus.report(&report(12_000, 20_000, 3000)).unwrap();
        assert_eq!(vcpus.measure(0.0, 10_000.0).0, 50_000);
        vcpus.part = 0.25;
        let (bytes, run_us) = vcpus.measure(40e6, 10_000.0);
        assert_eq!(bytes, 100_000);
        assert!((run_us - 2500.0).abs() < 1e-6);
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

    proptest! {
        #[test]
        fn whatever_an_agent_says_numbers_stay_numbers(
            reports in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()), 0..9),
            elapsed_us in 0.0..1e9f64,
            demand in 0.0..1e18f64,
        ) {
            let mut vcpus = vcpus();
            for (elapsed_us, bytes, run_us, slept_us) in reports {
                let said = Report { elapsed_us, bytes, run_us, slept_us, window_us: slept_us };
                vcpus.report(&said).unwrap();
            }
            vcpus.known = Known::Demand;
            let is_fresh = vcpus.fresh.elapsed_us > 0.0;
            let (bytes, run_us) = vcpus.measure(demand, elapsed_us);
            prop_assert!((0.0..=elapsed_us * 1.000_001).contains(&run_us), "{run_us}");
            if is_fresh {
                prop_assert!(as_f64(bytes) <= elapsed_us * BYTES_PER_US_MAX * 1.000_001);
            }
        }
    }
}
