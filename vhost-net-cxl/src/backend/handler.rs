//! What the controller asks of the backend, on the control thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use cxl_pool::{Area, Memory, regions};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::RegionId;
use pod_protocol::objects::{Object, ObjectId};
use pod_protocol::telemetry::{DeviceTelemetry, Telemetry};
use pod_protocol::worker::WorkerHandle;

use super::Order;
use crate::channel_counters::ChannelBook;
use crate::counters::{LeaseBook, NicCounters};
use crate::nic::statistics::TroubleWatch;

const GONE: &str = "the network backend's worker has ended";

/// A NIC as telemetry shows it.
pub struct WatchedNic {
    /// Its name in the host's configuration.
    pub name: String,
    /// What is counted for it.
    pub counters: Arc<NicCounters>,
    /// What others count of it.
    pub troubles: TroubleWatch,
}

/// Passes everything to the worker.
pub struct BackendHandler<M: Memory> {
    memory: M,
    worker: WorkerHandle<Order>,
    book: LeaseBook,
    channels: ChannelBook,
    nics: Vec<WatchedNic>,
}

impl<M: Memory> BackendHandler<M> {
    /// A handler for a worker with these NICs.
    pub fn new(
        memory: M,
        worker: WorkerHandle<Order>,
        book: LeaseBook,
        channels: ChannelBook,
        nics: Vec<WatchedNic>,
    ) -> Self {
        Self { memory, worker, book, channels, nics }
    }
}

impl<M: Memory> Handler for BackendHandler<M> {
    fn apply(&mut self, object: Object) -> Result<(), String> {
        self.worker.call(|reply| Order::Apply(Box::new(object), reply)).map_err(|_| GONE.to_owned())?
    }

    fn remove(&mut self, id: ObjectId) -> Result<(), String> {
        let channel = if let ObjectId::Channel(channel) = id { Some(channel) } else { None };
        self.worker.call(|reply| Order::Remove(id, reply)).map_err(|_| GONE.to_owned())?;
        if let Some(channel) = channel {
            self.channels.close(channel);
        }
        Ok(())
    }

    fn scrub(&mut self, region: RegionId, area: Area) -> Result<(), String> {
        if self.worker.call(|reply| Order::Uses(area, reply)).map_err(|_| GONE.to_owned())? {
            return Err(format!("{region} is in use by a NIC"));
        }
        // A predecessor's system calls ended with it; what they left in this host's cache leaves now.
        regions::scrub(&self.memory, area);
        Ok(())
    }

    fn telemetry(&mut self) -> Telemetry {
        let now = Instant::now();
        let devices = self.nics.iter_mut().map(|nic| DeviceTelemetry {
            name: nic.name.clone(),
            up: nic.counters.up.load(Ordering::Relaxed),
            reopened: nic.counters.reopened.get(),
            drops: nic.counters.dropped(),
            troubles: nic.troubles.counts(now, &nic.counters.driver).clone(),
            rx_packets: nic.counters.rx_packets.get(),
            rx_bytes: nic.counters.rx_bytes.get(),
            tx_packets: nic.counters.tx_packets.get(),
            tx_bytes: nic.counters.tx_bytes.get(),
            errors: nic.counters.errors.get(),
            ..DeviceTelemetry::default()
        });
        Telemetry {
            devices: devices.collect(),
            leases: self.book.telemetry(),
            channels: self.channels.telemetry(),
            ..Telemetry::default()
        }
    }

    fn fenced(&mut self) {
        self.worker.stop();
    }
}
