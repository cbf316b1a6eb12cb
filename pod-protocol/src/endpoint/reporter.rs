//! How the threads of a daemon tell the controller something.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::ids::{LeaseId, VolumeId};
use crate::reports::{DeviceReport, Report};
use crate::volume_table::VolumeTable;

/// Sends reports to the controller through the control thread, which it wakes. Clones are the same reporter.
///
/// While there is no controller, the latest state of each device and each lease is kept and told to the next one.
#[derive(Clone, Debug)]
pub struct Reporter(Arc<Outbox>);

#[derive(Debug)]
struct Outbox {
    queue: Mutex<VecDeque<Report>>,
    /// An eventfd, readable while there may be something in the queue.
    waker: OwnedFd,
}

impl Reporter {
    /// One that nobody listens to but who [takes](Reporter::take) what was said.
    pub fn new() -> io::Result<Self> {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Outbox { queue: Mutex::default(), waker })))
    }

    /// Queues a report. Never blocks on the controller.
    pub fn report(&self, report: Report) {
        self.lock().push_back(report);
        self.wake();
    }

    /// Wakes the control thread.
    pub(super) fn wake(&self) {
        // It fails only when the counter is full, and then the thread has been woken already.
        let _ = rustix::io::write(&self.0.waker, &1_u64.to_ne_bytes());
    }

    /// Everything queued. What comes later wakes the control thread again.
    pub fn take(&self) -> VecDeque<Report> {
        let _ = rustix::io::read(&self.0.waker, &mut [0; 8]);
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Report>> {
        // Nothing panics while it holds the lock.
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Reporter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.waker.as_fd()
    }
}

/// What the last reports said about the state of things: told again to a controller that was not there to hear.
#[derive(Debug, Default)]
pub(super) struct Standing(BTreeMap<Subject, Report>);

/// In the order in which it is told: a device that is back had its link before it told of changes.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Device(String),
    Link(String),
    Attachment(LeaseId),
    Wiped(String, VolumeId),
}

impl Standing {
    /// Keeps a report if it describes a state.
    pub(super) fn note(&mut self, report: &Report) {
        let subject = match report {
            Report::Link { device, up, .. } => {
                // Told again, a device that was back is what it has become since.
                if let Some(Report::DeviceBack { device: DeviceReport::Nic { up: was_up, .. } }) =
                    self.0.get_mut(&Subject::Device(device.clone()))
                {
                    *was_up = *up;
                }
                Subject::Link(device.clone())
            }
            Report::DeviceFailed { device, .. } => Subject::Device(device.clone()),
            Report::DeviceBack { device } => {
                // It says how the link is.
                self.0.remove(&Subject::Link(device.name().to_owned()));
                Subject::Device(device.name().to_owned())
            }
            Report::Attachment { lease, .. } => Subject::Attachment(*lease),
            Report::VolumeWiped { device, volume } => Subject::Wiped(device.clone(), *volume),
            // Whoever says it of a replica says it again while it holds.
            Report::ReplicaFailed { .. }
            | Report::ReplicaSynced { .. }
            | Report::ReplicaLeft { .. }
            | Report::Join(_)
            | Report::Telemetry(_) => return,
        };
        self.0.insert(subject, report.clone());
    }

    /// A lease is not held here any more.
    pub(super) fn forget_lease(&mut self, lease: LeaseId) {
        self.0.remove(&Subject::Attachment(lease));
    }

    /// An SSD has this table now: of volumes that are not in it any more nothing need be said.
    pub(super) fn keep_wiped(&mut self, ssd: &str, table: &VolumeTable) {
        self.0.retain(|subject, _| match subject {
            Subject::Wiped(device, volume) if device == ssd => {
                table.volumes.iter().any(|entry| entry.deleted && entry.id == *volume)
            }
            _ => true,
        });
    }

    /// Everything that still holds.
    pub(super) fn reports(&self) -> impl Iterator<Item = &Report> {
        self.0.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_state_stands() {
        let link = |up| Report::Link { device: "nic0".into(), up, reason: "carrier".into() };
        let failed = Report::DeviceFailed { device: "nic0".into(), reason: "gone".into() };
        let lease = LeaseId::MAX;
        let mut standing = Standing::default();
        for report in [
            link(true),
            link(false),
            failed.clone(),
            Report::Attachment {
                lease,
                connected: true,
                running: false,
                write_through: false,
                untold: false,
            },
        ] {
            standing.note(&report);
        }
        assert_eq!(standing.reports().count(), 3);
        standing.forget_lease(lease);
        assert!(standing.reports().eq([&failed, &link(false)]));
        let device = DeviceReport::Ssd {
            name: "nic0".into(),
            driver: "null".into(),
            size_bytes: 0,
            block_bytes: 512,
            discard_granularity_bytes: None,
            table: None,
            reserved_bytes: 0,
            identity: None,
            iops: None,
            bytes_per_second: None,
        };
        let back = Report::DeviceBack { device };
        standing.note(&back);
        assert!(standing.reports().eq([&back]));
        standing.note(&link(true));
        assert!(standing.reports().eq([&back, &link(true)]));
    }

    #[test]
    fn a_nic_that_was_back_is_told_of_with_the_link_that_it_has_by_now() {
        let [nic] = &crate::testing::join().devices[..] else { panic!("one NIC") };
        let link = |up| Report::Link { device: "nic0".into(), up, reason: "carrier".into() };
        let mut standing = Standing::default();
        standing.note(&Report::DeviceBack { device: nic.clone() });
        standing.note(&link(false));
        let mut without = nic.clone();
        if let DeviceReport::Nic { up, .. } = &mut without {
            *up = false;
        }
        assert!(standing.reports().eq([&Report::DeviceBack { device: without }, &link(false)]));
    }
}
