//! How a pod holds a vCPU to what control decided: its agent reports once in a K, and the shim puts it to sleep for a part of each window. Here both
//! are on time, and the vCPU can be put to sleep wherever it is.

use mem_channel::VcpuAccount;
use vcpu_slicing::{Clocks, Duty, Phase, Slicer, Step};

use super::fabric::{number, rounded_down};

/// One vCPU that always wants to run.
pub(super) struct Sliced {
    pub(super) account: VcpuAccount,
    duty: Duty,
    phase: Phase,
    /// Its account under the order in force, while it is held.
    slicer: Option<Slicer>,
    is_asleep: bool,
    /// Whether its timer runs.
    is_armed: bool,
    now: Clocks,
    reported: Clocks,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Its timer fires after so many ns; whether it sleeps until then.
    Timer { after_ns: u64, sleeps: bool },
    /// It runs freely.
    Free,
}

impl Sliced {
    /// One that runs freely since the beginning of time. `phase`: where in its windows it begins.
    pub(super) fn new(phase: Phase) -> Self {
        Self {
            account: VcpuAccount::new(true),
            duty: Duty::FULL,
            phase,
            slicer: None,
            is_asleep: false,
            is_armed: false,
            now: Clocks::default(),
            reported: Clocks::default(),
        }
    }

    /// It may run for this part of each window. Returns whether it is to be looked at now: else its timer runs, or it runs freely.
    pub(super) fn obey(&mut self, part: f64, window_ns: u64) -> bool {
        self.duty = if part >= 1.0 {
            Duty::FULL
        } else {
            Duty { run_ns: rounded_down(number(window_ns) * part).max(1), window_ns }
        };
        !self.duty.is_full() && !self.is_armed
    }

    /// Tells what it did since the last time.
    pub(super) fn report(&mut self, now_ns: u64, bytes: u64) {
        self.pass(now_ns);
        let us = |since: u64, until: u64| number(until - since) / 1000.0;
        let elapsed_us = us(self.reported.wall_ns, self.now.wall_ns);
        let run_us = us(self.reported.cpu_ns, self.now.cpu_ns);
        self.account.report(elapsed_us, number(bytes), run_us);
        self.reported = self.now;
    }

    /// Its timer fired.
    pub(super) fn look(&mut self, now_ns: u64) -> Next {
        self.pass(now_ns);
        let was_asleep = std::mem::take(&mut self.is_asleep);
        self.is_armed = !self.duty.is_full();
        if self.duty.is_full() {
            self.slicer = None;
            return Next::Free;
        }
        let slicer = self.slicer.get_or_insert_with(|| Slicer::begin(self.now, self.duty, self.phase));
        if was_asleep {
            slicer.slept(self.now, self.duty);
        }
        match slicer.look(self.now, self.duty) {
            Step::Look(after_ns) => Next::Timer { after_ns, sleeps: false },
            Step::Sleep(ns) => {
                self.is_asleep = true;
                // A window at most at a time: then the order is read again.
                Next::Timer { after_ns: ns.min(self.duty.window_ns), sleeps: true }
            }
        }
    }

    fn pass(&mut self, now_ns: u64) {
        if !self.is_asleep {
            self.now.cpu_ns += now_ns - self.now.wall_ns;
        }
        self.now.wall_ns = now_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW_NS: u64 = 1_000_000;

    /// Runs it until then; returns how much of that it ran, in ns.
    fn run(sliced: &mut Sliced, at_ns: &mut u64, until_ns: u64) -> u64 {
        let before = sliced.now.cpu_ns;
        while *at_ns < until_ns {
            match sliced.look(*at_ns) {
                Next::Timer { after_ns, .. } => *at_ns += after_ns,
                Next::Free => *at_ns = until_ns,
            }
        }
        sliced.pass(*at_ns);
        sliced.now.cpu_ns - before
    }

    #[test]
    fn it_runs_for_its_part_and_freely_again() {
        let (mut sliced, mut at_ns) = (Sliced::new(Phase::of(1, 3)), 0);
        assert!(sliced.obey(0.25, WINDOW_NS));
        let ran = run(&mut sliced, &mut at_ns, 100 * WINDOW_NS);
        assert!(ran.abs_diff(25 * WINDOW_NS) <= WINDOW_NS, "{ran}");
        // Another order is read when its timer fires.
        assert!(!sliced.obey(0.5, WINDOW_NS));
        let ran = run(&mut sliced, &mut at_ns, 200 * WINDOW_NS);
        assert!(ran.abs_diff(50 * WINDOW_NS) <= 2 * WINDOW_NS, "{ran}");
        assert!(!sliced.obey(1.0, WINDOW_NS));
        assert_eq!(sliced.look(at_ns), Next::Free);
        assert!(sliced.obey(0.5, WINDOW_NS), "and is held again");
    }

    #[test]
    fn it_reports_what_passed_and_what_it_ran() {
        let (mut sliced, mut at_ns) = (Sliced::new(Phase::default()), 0);
        sliced.account.measure(0.0, 10_000.0);
        sliced.obey(0.25, WINDOW_NS);
        run(&mut sliced, &mut at_ns, 10 * WINDOW_NS);
        sliced.report(at_ns, 50_000);
        let (bytes, run_us) = sliced.account.measure(0.0, number(at_ns) / 1000.0);
        assert_eq!(bytes, 50_000);
        assert!((run_us - 2500.0).abs() < 1.0, "{run_us}");
    }
}
