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
            self.standing.note(&report);
            let (name, is_up) = match &report {
                Report::Link { device, up, .. } => (device, *up),
                Report::DeviceFailed { device, .. } => (device, false),
                _ => {
                    self.unsent.push_back(report);
                    continue;
                }
            };
            for device in &mut self.parts.join.devices {
                if let DeviceReport::Nic { name: nic, up, .. } = device
                    && nic == name
                {
                    *up = is_up;
                }
            }
            self.unsent.push_back(report);
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
        while let Some(report) = self.unsent.front() {
            if let Err(error) = session.link.notify(report) {
                tracing::debug!(%error, "reports wait");
                break;
            }
            self.unsent.pop_front();
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
