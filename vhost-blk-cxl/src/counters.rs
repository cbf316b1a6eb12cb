//! What is counted per lease, and per device.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use pod_protocol::ids::LeaseId;
use pod_protocol::telemetry::{DeviceTelemetry, LeaseTelemetry};

use crate::message::{Operation, Status};

/// A counter with one writer, the worker; the control thread reads it.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds. Not atomic as a whole: there is one writer, and a locked instruction per request would be a waste.
    pub(crate) fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    /// Says how much there is now.
    pub(crate) fn set(&self, amount: u64) {
        self.0.store(amount, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Requests of one lease at one endpoint, or of all of them on one device.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    reads: Counter,
    read_bytes: Counter,
    writes: Counter,
    write_bytes: Counter,
    flushes: Counter,
    others: Counter,
    errors: Counter,
    /// Chains or messages that break the rules.
    pub(crate) malformed: Counter,
    /// Requests that ask for more than they may.
    pub(crate) refused: Counter,
    /// Messages of an older generation, or about nothing that is in flight.
    pub(crate) stale: Counter,
    /// Requests sent a second time to a backend that came back.
    pub(crate) resubmitted: Counter,
    /// Requests whose data is not copied.
    pub(crate) zero_copy: Counter,
    /// How often a device lost what was not flushed.
    pub(crate) lost_writes: Counter,
    /// Requests that had to wait for their volume's share.
    pub(crate) throttled: Counter,
    /// Of a mirrored disk: what has yet to be brought in line.
    pub(crate) dirty_bytes: Counter,
    /// Rings that a guest broke.
    pub(crate) broken_rings: Counter,
}

impl Counters {
    /// Counts a request that ended.
    pub(crate) fn ended(&self, operation: Operation, status: Status, bytes: u64) {
        if status != Status::Ok {
            self.errors.add(1);
            return;
        }
        match operation {
            Operation::Read => {
                self.reads.add(1);
                self.read_bytes.add(bytes);
            }
            Operation::Write => {
                self.writes.add(1);
                self.write_bytes.add(bytes);
            }
            Operation::Flush => self.flushes.add(1),
            Operation::Discard | Operation::WriteZeroes => self.others.add(1),
        }
    }

    /// Counts a request that was answered with an error without being tried.
    pub(crate) fn refused(&self) {
        self.refused.add(1);
        self.errors.add(1);
    }

    pub(crate) fn lease(&self, lease: LeaseId) -> LeaseTelemetry {
        let mut drops = BTreeMap::new();
        for (reason, counter) in [
            ("malformed", &self.malformed),
            ("refused", &self.refused),
            ("stale", &self.stale),
            ("broken-rings", &self.broken_rings),
            ("lost-writes", &self.lost_writes),
        ] {
            if counter.get() > 0 {
                drops.insert(reason.to_owned(), counter.get());
            }
        }
        LeaseTelemetry {
            reads: self.reads.get(),
            read_bytes: self.read_bytes.get(),
            writes: self.writes.get(),
            write_bytes: self.write_bytes.get(),
            flushes: self.flushes.get(),
            errors: self.errors.get(),
            throttled: self.throttled.get(),
            drops,
            ..LeaseTelemetry::new(lease)
        }
    }

    pub(crate) fn device(&self, name: &str, up: bool) -> DeviceTelemetry {
        DeviceTelemetry {
            name: name.to_owned(),
            up,
            operations: self.reads.get() + self.writes.get() + self.flushes.get() + self.others.get(),
            read_bytes: self.read_bytes.get(),
            write_bytes: self.write_bytes.get(),
            errors: self.errors.get(),
            ..DeviceTelemetry::default()
        }
    }
}
