//! What a disk's vhost-user thread tells the worker.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use pod_protocol::ids::LeaseId;
use pod_protocol::objects::DiskObject;
use pod_protocol::reports::Report;
use pod_protocol::worker::WorkerHandle;
use tracing::{debug, warn};
use vhost_frontend::{ConfigRefused, DeviceSink, GuestMemory, Ring, StopReason};

use super::attachment::Attachment;
use super::device::WRITEBACK_AT;
use super::shown::Shown;
use super::task::Message;

/// How long a VMM that stops rings waits for what is in flight, before it is answered with I/O errors: all of them together, for VMMs
/// stop one after the other.
const DRAIN_PATIENCE: Duration = Duration::from_secs(10);
/// How long we wait for it when the VMM is gone anyway.
const DISCONNECT_PATIENCE: Duration = Duration::from_millis(500);

/// The engine's side of a disk's connection.
pub(crate) struct DiskSink {
    pub(crate) object: DiskObject,
    pub(crate) worker: WorkerHandle<Message>,
    pub(crate) attachment: Arc<Attachment>,
    /// The disk may have grown.
    pub(crate) shown: Shown,
    pub(crate) connected: bool,
    /// Which queues run: of released ones nothing is in flight.
    pub(crate) running: BTreeSet<u16>,
    /// A queue was waited for in vain: those that stop after it would be, too.
    pub(crate) out_of_patience: bool,
    /// When the last queue was released, the guest had yet to hear of a loss.
    pub(crate) untold: bool,
}

impl DiskSink {
    fn lease(&self) -> LeaseId {
        self.object.lease
    }

    fn report(&self) {
        self.attachment.say(self.state());
    }

    fn state(&self) -> Report {
        Report::Attachment {
            lease: self.lease(),
            connected: self.connected,
            running: !self.running.is_empty(),
            write_through: !self.shown.writes_back(),
            untold: self.untold,
        }
    }

    fn stop_ring(&mut self, index: u16, reason: StopReason) -> u16 {
        let (done, answer) = sync_channel(1);
        let _ = self.worker.send(Message::StopRing(self.lease(), index, reason, done));
        let patience = match reason {
            StopReason::Requested if self.out_of_patience => Duration::ZERO,
            StopReason::Requested => DRAIN_PATIENCE,
            StopReason::Disconnected => DISCONNECT_PATIENCE,
        };
        match answer.recv_timeout(patience) {
            Ok(next) => return next,
            Err(RecvTimeoutError::Disconnected) => return 0,
            Err(RecvTimeoutError::Timeout) => self.out_of_patience = true,
        }
        match reason {
            StopReason::Requested => {
                warn!(lease = %self.lease(), ring = index, "requests were not answered in time: they fail, for the VMM stops the disk");
            }
            StopReason::Disconnected => {
                debug!(lease = %self.lease(), ring = index, "requests stay in flight, the VMM is gone");
            }
        }
        let _ = self.worker.send(Message::HurryRing(self.lease(), index, reason));
        // A worker that was fenced meanwhile takes the connection down with it, so what is said here is not heard.
        answer.recv().unwrap_or(0)
    }

    /// Brings what was written until now to the medium. False if that was not done in time.
    fn flush(&self) -> bool {
        let (done, answer) = sync_channel(1);
        // A worker that is gone was fenced, and the process is about to end.
        let _ = self.worker.send(Message::Flush(self.lease(), done));
        answer.recv_timeout(DRAIN_PATIENCE).is_ok()
    }

    /// No queue runs any more. The guest may go on at another host, whose frontend has no notes of what the SSD is to remember: so it is
    /// to remember nothing.
    fn settle(&mut self) {
        if !self.out_of_patience && !self.flush() {
            warn!(lease = %self.lease(), "what the guest wrote before it stopped could not be flushed: should it go on elsewhere, it is told");
        }
        let (done, answer) = sync_channel(1);
        let _ = self.worker.send(Message::LeavesUntold(self.lease(), done));
        self.untold = answer.recv().unwrap_or(false);
    }
}

impl DeviceSink for DiskSink {
    fn connected(&mut self) {
        self.connected = true;
        self.report();
    }

    fn nobody_came(&mut self) {
        // Whoever knows of a VMM in our life before waits for this.
        self.report();
    }

    fn ring_started(&mut self, ring: Ring) {
        self.running.insert(ring.index());
        (self.out_of_patience, self.untold) = (false, false);
        // A worker that is gone was fenced, and the process is about to end.
        let _ = self.worker.send(Message::RingStarted(self.lease(), Box::new(ring)));
        if self.running.len() == 1 {
            self.report();
        }
    }

    fn ring_stopped(&mut self, index: u16, reason: StopReason) -> u16 {
        let next = self.stop_ring(index, reason);
        if self.running.remove(&index) && self.running.is_empty() {
            if reason == StopReason::Requested {
                self.settle();
            }
            self.report();
        }
        next
    }

    fn memory_changed(&mut self, memory: &GuestMemory) {
        let (done, answer) = sync_channel(1);
        let _ = self.worker.send(Message::GuestMemory(self.lease(), GuestMemory::clone(memory), done));
        if answer.recv_timeout(DRAIN_PATIENCE) == Err(RecvTimeoutError::Timeout) {
            warn!(lease = %self.lease(), "requests in memory that the VMM takes back were not answered in time: they fail");
            let _ = self.worker.send(Message::HurryMemory(self.lease()));
            // A worker that was fenced meanwhile takes the connection down with it.
            let _ = answer.recv();
        }
    }

    fn config_written(&mut self, offset: usize, bytes: &[u8]) -> Result<(), ConfigRefused> {
        match (offset, bytes) {
            (WRITEBACK_AT, &[wanted @ (0 | 1)]) => {
                let cached = self.shown.writes_back();
                self.shown.set_writeback(&self.object, wanted == 1);
                // Before it is flushed, which may take as long as the SSD: should we die meanwhile, whoever comes next flushes what we
                // did not, and knows that the driver will not.
                self.attachment.say_soon(self.state());
                // What comes from here on goes through the cache; the driver flushes no more.
                if cached && wanted == 0 && !self.flush() {
                    warn!(lease = %self.lease(), "the guest switched the write cache off, and what it wrote before could not be flushed");
                }
                Ok(())
            }
            _ => Err(ConfigRefused),
        }
    }

    fn disconnected(&mut self) {
        // The driver's choice holds: a VMM that connects again does not repeat it, and one that begins anew looks what holds.
        self.connected = false;
        self.report();
    }
}
