//! Devices that fail, and those that neither answer nor fail; and such that are back.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cxl_pool::Memory;
use pod_protocol::reports::Report;
use tracing::{error, info};

use super::device_reports;
use super::task::{BackendTask, Device};

/// Looks after one device.
#[derive(Debug)]
pub(crate) struct Watch {
    timeout: Option<Duration>,
    /// The command that it has had for the longest time, by its serial number, and since when that is known.
    oldest: Option<(u64, Instant)>,
    /// It kept a command for too long.
    hangs: bool,
}

/// What a look at a device showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Hangs,
    /// It has answered everything.
    Answers,
}

impl Watch {
    pub(crate) fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, oldest: None, hangs: false }
    }

    fn look(&mut self, oldest: Option<u64>, now: Instant) -> Option<Change> {
        let timeout = self.timeout?;
        let Some(serial) = oldest else {
            self.oldest = None;
            return std::mem::take(&mut self.hangs).then_some(Change::Answers);
        };
        let since = self.oldest.filter(|(known, _)| *known == serial).map_or(now, |(_, since)| since);
        self.oldest = Some((serial, since));
        let late = now.duration_since(since) >= timeout;
        (late && !std::mem::replace(&mut self.hangs, true)).then_some(Change::Hangs)
    }
}

impl Device {
    /// Its driver says that it has failed, or that it has not: what is new in that.
    fn news(&mut self) -> Option<Report> {
        match self.ssd.failure() {
            Some(reason) if !self.gave_up => {
                self.gave_up = true;
                if self.failed.swap(true, Ordering::Relaxed) {
                    // It hung before.
                    return None;
                }
                error!(ssd = self.name, reason, "the device failed");
                Some(Report::DeviceFailed { device: self.name.clone(), reason: reason.to_owned() })
            }
            // One that hung before has yet to answer everything.
            None if std::mem::take(&mut self.gave_up) && !self.watch.hangs => self.is_back(),
            _ => None,
        }
    }

    fn is_back(&self) -> Option<Report> {
        self.failed.store(false, Ordering::Relaxed);
        info!(ssd = self.name, "the device answers again");
        let device = device_reports([(self.name.as_str(), self.ssd.as_ref())]).pop()?;
        Some(Report::DeviceBack { device })
    }
}

impl<M: Memory> BackendTask<M> {
    /// Tells the controller of devices that their drivers have given up, and of such that came back.
    pub(super) fn look_for_failures(&mut self) {
        for device in &mut self.devices {
            if let Some(report) = device.news()
                && let Some(reporter) = &self.reporter
            {
                reporter.report(report);
            }
        }
    }

    /// Tells the controller of devices that keep a command for too long, and of those that have answered after all. Until then their
    /// guests get errors, but no request of theirs is begun again: what the device has may still be carried out.
    pub(super) fn watch_devices(&mut self, now: Instant) {
        for (index, device) in self.devices.iter_mut().enumerate() {
            if device.watch.timeout.is_none() {
                continue;
            }
            let change = device.watch.look(self.commands.oldest_of_device(index), now);
            let report = match change {
                Some(Change::Hangs) if !device.failed.swap(true, Ordering::Relaxed) => {
                    let reason = "it kept a request for longer than request-timeout-ms";
                    error!(ssd = device.name, reason, "the device hangs");
                    Report::DeviceFailed { device: device.name.clone(), reason: reason.to_owned() }
                }
                Some(Change::Answers) if device.ssd.failure().is_none() => {
                    let Some(report) = device.is_back() else { continue };
                    report
                }
                _ => continue,
            };
            if let Some(reporter) = &self.reporter {
                reporter.report(report);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_hangs_when_one_command_stays_and_no_sooner() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut watch = Watch::new(Some(Duration::from_millis(100)));
        assert_eq!(watch.look(Some(1), at(0)), None);
        assert_eq!(watch.look(Some(1), at(99)), None);
        assert_eq!(watch.look(Some(2), at(100)), None, "the first one was answered");
        assert_eq!(watch.look(Some(2), at(199)), None);
        assert_eq!(watch.look(Some(2), at(200)), Some(Change::Hangs));
        assert_eq!(watch.look(Some(2), at(300)), None, "that is known");
        assert_eq!(watch.look(Some(3), at(301)), None, "it may hang on");
        assert_eq!(watch.look(None, at(302)), Some(Change::Answers));
        assert_eq!(watch.look(None, at(303)), None);
        assert_eq!(Watch::new(None).look(Some(1), at(1 << 40)), None);
    }
}
