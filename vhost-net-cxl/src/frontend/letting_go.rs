//! Queues that a VMM has let go of, and what their guest had sent by then.
//!
//! Copied packets stay under way when their queues stop: the guest was told that they are sent. Once the controller hears that a guest's queues
//! run no longer, it may give the lease to a frontend of another host, and backends refuse whatever this one still has. So it
//! does not hear of it before all is sent. That is a matter of microseconds where the NIC works; what no NIC takes within
//! [`PATIENCE`] is dropped, and counted.

use std::time::{Duration, Instant};

use cxl_pool::Memory;
use pod_protocol::ids::LeaseId;

use super::Frontend;
use super::port::Port;
use crate::counters::DropReason;

/// For so long packets wait for a link that is down, too.
const PATIENCE: Duration = Duration::from_secs(1);

/// Is told once nothing of a guest is under way any more.
pub type OnLetGo = Box<dyn FnOnce() + Send>;

/// Somebody waits for what is under way.
pub(super) struct LettingGo {
    deadline: Instant,
    then: OnLetGo,
}

impl Port {
    /// Has somebody hear of it once nothing is under way. Whoever waited before waits no longer.
    fn let_go(&mut self, then: OnLetGo) {
        self.letting_go = Some(LettingGo { deadline: Instant::now() + PATIENCE, then });
        self.finish_letting_go();
    }

    /// Says so if nothing is under way any more, or is not waited for any longer.
    pub(super) fn finish_letting_go(&mut self) {
        let ends = |it: &LettingGo| !self.under_way.has_any() || it.deadline <= Instant::now();
        if !self.letting_go.as_ref().is_some_and(ends) {
            return;
        }
        self.give_up();
        if let Some(LettingGo { then, .. }) = self.letting_go.take() {
            then();
        }
    }

    /// Drops what is under way. Whatever a backend has of it may go out still, but is announced to nobody any more.
    fn give_up(&mut self) {
        let lost = self.under_way.give_up();
        for _ in 0..lost {
            self.counters.count_drop(DropReason::QueueStopped);
        }
        if lost > 0 {
            tracing::warn!(
                lease = %self.object.lease, instance = self.object.instance_name, packets = lost,
                "no NIC took what it had sent before its queues stopped",
            );
        }
    }

    /// It is about to go, and what is under way with it.
    pub(super) fn end_letting_go(&mut self) {
        self.give_up();
        if let Some(LettingGo { then, .. }) = self.letting_go.take() {
            then();
        }
    }
}

impl<M: Memory> Frontend<M> {
    /// All queues of a guest were stopped: `then` is told once what they sent is done with.
    pub fn let_go(&mut self, lease: LeaseId, then: OnLetGo) {
        match self.port(lease) {
            Some(port) => port.let_go(then),
            None => then(),
        }
    }
}
