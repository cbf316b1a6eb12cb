//! vCPUs that an agent holds: it reports what they did once in each K, and is told what part of their time they may run.

use crate::run_part;

/// No VM moves more than so many bytes in a µs, whatever its agent says: more than a host's memory does.
const BYTES_PER_US_MAX: f64 = 1e7;
/// A report is about no longer time, in µs: what is longer ago says nothing.
const REPORT_US_MAX: f64 = 60e6;

/// What is known of the vCPUs of a VM, as far as their agent tells.
#[derive(Clone, Debug)]
pub struct VcpuAccount {
    /// Whether the agent does what it is told.
    holds: bool,
    /// Reported since the last K.
    fresh: Fresh,
    known: Known,
    /// T_R/T_W as the agent was told last.
    part: f64,
    /// K since it reported last. The clock would not do: when all of a host stood still, reports wait to be read.
    silent: u32,
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

impl VcpuAccount {
    /// They run freely, and have moved nothing. Where the agent does not hold them they go on doing so.
    pub fn new(holds: bool) -> Self {
        Self { holds, fresh: Fresh::default(), known: Known::Nothing, part: 1.0, silent: 0 }
    }

    /// Whether they are held, as far as that is needed.
    pub fn are_held(&self) -> bool {
        self.holds
    }

    /// T_R/T_W as the agent was told last, from 0 to 1.
    pub fn part(&self) -> f64 {
        self.part
    }

    /// How many K in a row had no report.
    pub fn silent_ks(&self) -> u32 {
        self.silent
    }

    /// Takes a report, for the K that ends next: what they moved in `elapsed_us`, and for how much of that they could. Returns how many there
    /// were since the last K. Whatever it says does no harm to other VMs' numbers.
    pub fn report(&mut self, elapsed_us: f64, bytes: f64, run_us: f64) -> u32 {
        let fresh = &mut self.fresh;
        fresh.reports = fresh.reports.saturating_add(1);
        if elapsed_us > 0.0 && elapsed_us <= REPORT_US_MAX {
            fresh.elapsed_us += elapsed_us;
            fresh.bytes += bytes.clamp(0.0, elapsed_us * BYTES_PER_US_MAX);
            fresh.run_us += run_us.clamp(0.0, elapsed_us);
        }
        fresh.reports
    }

    /// What they moved in a K that is over, in bytes, and for how long they could, in µs; `demand` is what they were found to want.
    ///
    /// A report is about the time from one order to the next, not exactly about a K: so a rate is taken from it. If there is none, they
    /// are taken to have done as they were told. To count nothing then, or the K before once more, would have the next share make up for
    /// what never happened, and shares would swing. Before the first report nothing is known: no bytes in no time say nothing of what
    /// they want.
    pub fn measure(&mut self, demand: f64, elapsed_us: f64) -> (u64, f64) {
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
    pub fn begin(&mut self) {
        self.part = 1.0;
    }

    /// What part of their time they may run, so that they move no more than `limit` of the `demand` that they have, both in bytes/s. Nothing
    /// until it is known what they want: then they go on as they are.
    pub fn decide(&mut self, limit: f64, demand: f64) -> Option<f64> {
        if self.known != Known::Demand {
            return None;
        }
        self.part = if self.holds { run_part(limit, demand) } else { 1.0 };
        Some(self.part)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number of bytes")]
fn whole(bytes: f64) -> u64 {
    bytes.max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mchannel::exact;

    fn account() -> VcpuAccount {
        let mut account = VcpuAccount::new(true);
        assert_eq!(account.measure(1e6, 10_000.0), (0, 0.0));
        account
    }

    #[test]
    fn a_report_tells_a_rate_and_without_one_the_last_order_does() {
        let mut account = account();
        account.report(8000.0, 80_000.0, 2000.0);
        let (bytes, run_us) = account.measure(0.0, 10_000.0);
        assert_eq!(bytes, 100_000);
        assert!((run_us - 2500.0).abs() < 1e-6);
        // Two that were late together.
        assert_eq!(account.report(8000.0, 80_000.0, 2000.0), 1);
        assert_eq!(account.report(12_000.0, 20_000.0, 3000.0), 2);
        assert_eq!(account.measure(0.0, 10_000.0).0, 50_000);
        assert_eq!(account.decide(10e6, 40e6), Some(0.25));
        let (bytes, run_us) = account.measure(40e6, 10_000.0);
        assert_eq!((bytes, account.silent_ks()), (100_000, 1));
        assert!((run_us - 2500.0).abs() < 1e-6);
    }

    #[test]
    fn one_that_is_there_and_has_nothing_to_tell_is_not_silent() {
        let mut account = account();
        account.report(10_000.0, 50_000.0, 2500.0);
        assert_eq!(account.measure(0.0, 10_000.0).0, 50_000);
        assert_eq!(account.decide(5e6, 20e6), Some(0.25));
        for _ in 0..100 {
            account.report(0.0, 0.0, 0.0);
            // It is taken to have done as it was told.
            assert_eq!((account.measure(20e6, 10_000.0), account.silent_ks()), ((50_000, 2500.0), 0));
        }
    }

    #[test]
    fn nothing_is_decided_before_it_is_known_what_they_want_and_no_report_is_lost() {
        let mut account = VcpuAccount::new(true);
        // Another frontend had them held to a quarter, and the report of that comes early.
        account.report(10_000.0, 50_000.0, 2500.0);
        assert_eq!(account.measure(0.0, 10_000.0), (0, 0.0));
        assert_eq!(account.decide(5e6, 0.0), None, "they go on as they are");
        assert_eq!(account.measure(0.0, 10_000.0), (50_000, 2500.0));
        assert_eq!(account.decide(5e6, 20e6), Some(0.25));
    }

    #[test]
    fn an_agent_that_holds_nobody_is_told_so() {
        let mut account = VcpuAccount::new(false);
        account.measure(0.0, 10_000.0);
        account.report(10_000.0, 50_000.0, 10_000.0);
        account.measure(0.0, 10_000.0);
        assert_eq!(account.decide(1e6, 5e6), Some(1.0));
    }

    proptest! {
        #[test]
        fn whatever_an_agent_says_numbers_stay_numbers(
            reports in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..9),
            knows_demand: bool,
            elapsed_us in 0.0..1e9f64,
            demand in 0.0..1e18f64,
        ) {
            let mut account = account();
            if knows_demand {
                account.report(1.0, 1.0, 1.0);
                account.measure(demand, elapsed_us);
            }
            for (elapsed_us, bytes, run_us) in reports {
                account.report(exact(elapsed_us), exact(bytes), exact(run_us));
            }
            let is_fresh = account.fresh.elapsed_us > 0.0;
            let (bytes, run_us) = account.measure(demand, elapsed_us);
            prop_assert!((0.0..=elapsed_us * 1.000_001).contains(&run_us), "{run_us}");
            if is_fresh {
                prop_assert!(exact(bytes) <= elapsed_us * BYTES_PER_US_MAX * 1.000_001);
            }
        }
    }
}
