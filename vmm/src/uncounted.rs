//! What vCPUs did that no frontend has counted yet.

use pod_protocol::vcpus::Report;

/// A frontend counts what it is told when its K ends, and then gives an order. One that dies before that has counted nothing; so what it
/// was told since its last order is kept, and the next one is told of that too. An order that crosses a report on its way is taken
/// for the answer to it.
#[derive(Debug, Default)]
pub(crate) struct Uncounted {
    told: Report,
    untold: Report,
}

impl Uncounted {
    /// They did this since the last time.
    pub(crate) fn add(&mut self, report: &Report) {
        self.untold = sum(&self.untold, report);
    }

    /// What to tell the frontend.
    pub(crate) fn untold(&self) -> Report {
        self.untold
    }

    /// It was told.
    pub(crate) fn were_told(&mut self) {
        self.told = sum(&self.told, &std::mem::take(&mut self.untold));
    }

    /// It has given an order.
    pub(crate) fn were_counted(&mut self) {
        self.told = Report::default();
    }

    /// It gives none any more.
    pub(crate) fn frontend_is_gone(&mut self) {
        self.untold = sum(&std::mem::take(&mut self.told), &self.untold);
    }
}

/// Two reports as one, of which `newer` is the newer one.
fn sum(older: &Report, newer: &Report) -> Report {
    Report {
        elapsed_us: older.elapsed_us.saturating_add(newer.elapsed_us),
        bytes: older.bytes.saturating_add(newer.bytes),
        run_us: older.run_us.saturating_add(newer.run_us),
        slept_us: older.slept_us.saturating_add(newer.slept_us),
        window_us: newer.window_us,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(bytes: u64) -> Report {
        Report { elapsed_us: 10, bytes, run_us: 4, slept_us: 6, window_us: bytes }
    }

    #[test]
    fn what_a_frontend_did_not_count_the_next_one_is_told_once() {
        let mut uncounted = Uncounted::default();
        uncounted.add(&report(1));
        uncounted.were_told();
        uncounted.were_counted();
        uncounted.add(&report(2));
        uncounted.were_told();
        uncounted.add(&report(4));
        assert_eq!(uncounted.untold(), report(4), "a frontend is told of nothing twice");
        uncounted.frontend_is_gone();
        uncounted.add(&report(8));
        let all = Report { elapsed_us: 30, bytes: 14, run_us: 12, slept_us: 18, window_us: 8 };
        assert_eq!(uncounted.untold(), all, "all since the last order");
        uncounted.were_told();
        uncounted.were_counted();
        uncounted.frontend_is_gone();
        assert_eq!(uncounted.untold().bytes, 0);
    }
}
