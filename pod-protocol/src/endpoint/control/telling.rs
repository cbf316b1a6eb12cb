//! What an endpoint tells its controller without being asked.

use std::time::{Duration, Instant};

use cxl_pool::Memory;

use super::{ControlThread, Session};
use crate::reports::{DeviceReport, Report};

/// How often counters are sent.
const TELEMETRY_EVERY: Duration = Duration::from_millis(100);
/// Of telemetry: messages of the controller that were not understood.
const NOT_UNDERSTOOD: &str = "messages-not-understood";
/// Of telemetry: the minor of the version that the pod speaks, as far as this endpoint was told.
const POD_MINOR: &str = "pod-protocol-minor";

impl<M: Memory> ControlThread<M> {
    /// Takes over what other threads reported. A join sent later says how devices are by then.
    pub(super) fn collect_reports(&mut self) {
        for report in self.parts.reporter.take() {
            // Of a lease that is not held any more, as a worker still had it: nobody would ever take it back.
            if !matches!(report, Report::Attachment { lease, .. } if !self.ledger.has_lease(lease)) {
                self.standing.note(&report);
            }
            match &report {
                Report::Link { device, up, .. } => self.note_link(device, *up),
                Report::DeviceFailed { device, .. } => self.note_link(device, false),
                Report::DeviceBack { device: back } => self.note_back(back),
                _ => {}
            }
            self.unsent.push(report);
        }
    }

    fn note_link(&mut self, device: &str, is_up: bool) {
        for known in &mut self.parts.join.devices {
            if let DeviceReport::Nic { name, up, .. } = known
                && name == device
            {
                *up = is_up;
            }
        }
    }

    /// A NIC may have become another one. Of an SSD this thread knows better which volumes it has.
    fn note_back(&mut self, back: &DeviceReport) {
        let nics =
            self.parts.join.devices.iter_mut().filter(|known| matches!(known, DeviceReport::Nic { .. }));
        for known in nics.filter(|known| known.name() == back.name()) {
            known.clone_from(back);
        }
    }

    /// Sends what there is to be told, and counters when they are due.
    pub(super) fn send_reports(&mut self, now: Instant) {
        let joined = self.session.as_ref().is_some_and(Session::joined) && !self.controller.silent;
        let Some(session) = self.session.as_mut().filter(|_| joined) else {
            // Told again by `retell` when there is someone to listen.
            self.unsent.clear();
            return;
        };
        while let Some(report) = self.unsent.first() {
            if let Err(error) = session.link.notify(report) {
                tracing::debug!(%error, "reports wait");
                break;
            }
            self.unsent.first_is_sent();
            self.naps.spoke(now);
        }
        if now >= self.telemetry_due {
            // Steady in the long run, but a pause is not made up for.
            self.telemetry_due = (self.telemetry_due + TELEMETRY_EVERY).max(now);
            self.telemetry_sequence += 1;
            let mut telemetry = self.parts.handler.telemetry();
            telemetry.sequence = self.telemetry_sequence;
            telemetry.counters.insert(NOT_UNDERSTOOD.to_owned(), self.not_understood);
            telemetry.gauges.insert(POD_MINOR.to_owned(), self.pod.minor.into());
            if let Err(error) = session.link.notify(&Report::Telemetry(telemetry)) {
                tracing::debug!(%error, "a sample of telemetry is lost");
            }
        }
        session.link.flush();
    }
}
