//! What the controller asks of the frontend, on the control thread.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cxl_pool::{Area, EndpointId, FileIdentity, Memory, regions};
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::ids::{LeaseId, RegionId};
use pod_protocol::objects::{Object, ObjectId, PortObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::telemetry::Telemetry;
use pod_protocol::worker::WorkerHandle;
use vhost_frontend::Server;
use vhost_frontend::pacing::{Meter, Pacing};

use super::Order;
use super::device::{Sink, device_spec};
use crate::channel_counters::ChannelBook;
use crate::counters::LeaseBook;

/// How long a VMM may take to start the rings of a guest that has arrived from another host. It does so when it lets the guest go
/// on, which it does by itself; one that is only slow loses its link for a moment.
const RINGS_START_WITHIN: Duration = Duration::from_millis(300);
const GONE: &str = "the network frontend's worker has ended";

/// Keeps the sockets, and passes everything else to the worker.
pub struct FrontendHandler<M: Memory> {
    memory: M,
    worker: WorkerHandle<Order>,
    reporter: Reporter,
    book: LeaseBook,
    channels: ChannelBook,
    sockets: PathBuf,
    pool_file: Option<FileIdentity>,
    devices: HashMap<LeaseId, Device>,
    meter: Meter,
}

/// A device that guests are offered.
struct Device {
    /// Where its frames to be sent lie.
    area: Area,
    /// Where the memory of its guest may lie.
    ram_area: Option<Area>,
    /// Its guest is on its way from another host.
    incoming: bool,
    /// Its connection goes when this goes, and the socket if it is ours.
    server: Server,
}

impl<M: Memory> FrontendHandler<M> {
    /// A handler that opens sockets below `sockets`. The pool is this file or device.
    pub fn new(
        memory: M,
        worker: WorkerHandle<Order>,
        reporter: Reporter,
        book: LeaseBook,
        channels: ChannelBook,
        sockets: PathBuf,
        pool_file: Option<FileIdentity>,
    ) -> Self {
        let meter = Meter::new(memory.clone());
        Self { memory, worker, reporter, book, channels, sockets, pool_file, devices: HashMap::new(), meter }
    }

    /// It is this frontend of its host. To be called before it has devices.
    pub fn join_host(&mut self, run: &RunDirectory, endpoint: EndpointId) -> io::Result<()> {
        self.meter.join_host(run, endpoint)
    }

    fn pace(&self, lease: LeaseId, pacing: Option<Arc<Pacing>>) -> Result<(), String> {
        self.worker.call(|reply| Order::Pace(lease, pacing, reply)).map_err(|_| GONE.to_owned())
    }

    fn apply_port(&mut self, object: PortObject) -> Result<(), String> {
        let lease = object.lease;
        let (area, ram_area, vmm_listens) = (object.tx_area, object.ram_area, object.vmm_listens);
        let incoming = object.incoming;
        let places = |device: &Device| (device.area, device.ram_area);
        if self.devices.get(&lease).is_some_and(|device| places(device) != (area, ram_area)) {
            // The instance left this host and comes back, or has other memory: another device under the same name.
            self.remove(ObjectId::Port(lease))?;
        }
        let spec = device_spec(&object, self.pool_file);
        let socket = self.sockets.join(&object.socket);
        // The worker has the port before a VMM can connect to it.
        let apply = |reply| Order::Port(Box::new(object), reply);
        self.worker.call(apply).map_err(|_| GONE.to_owned())??;
        if let Some(device) = self.devices.get_mut(&lease) {
            if std::mem::replace(&mut device.incoming, incoming) && !incoming {
                device.server.expect_rings(RINGS_START_WITHIN);
            }
        } else {
            self.pace(lease, self.meter.pacing(lease))?;
            let sink = Sink::new(lease, self.worker.clone(), self.reporter.clone());
            let open = if vmm_listens { Server::connect } else { Server::listen };
            match open(&socket, spec, sink) {
                Ok(server) => self.devices.insert(lease, Device { area, ram_area, incoming, server }),
                Err(error) => {
                    let _ = self.worker.call(|reply| Order::Remove(ObjectId::Port(lease), reply));
                    return Err(error.to_string());
                }
            };
        }
        Ok(())
    }
}

impl<M: Memory> Handler for FrontendHandler<M> {
    fn apply(&mut self, object: Object) -> Result<(), String> {
        match object {
            Object::Channel(object) => {
                self.worker.call(|reply| Order::Channel(object, reply)).map_err(|_| GONE.to_owned())?
            }
            Object::Port(object) => self.apply_port(object),
            Object::Fabric(fabric) => self.meter.share(fabric),
            Object::Mchannel(object) => {
                let lease = object.lease;
                let known = self.meter.pacing(lease).is_some();
                let pacing = self.meter.measure(object);
                if known { Ok(()) } else { self.pace(lease, Some(pacing)) }
            }
            other => Err(format!("a net frontend has no {}", other.id())),
        }
    }

    fn remove(&mut self, id: ObjectId) -> Result<(), String> {
        match &id {
            ObjectId::Fabric => {
                self.meter.share_nothing();
                return Ok(());
            }
            ObjectId::Mchannel(lease) => {
                self.meter.forget(*lease);
                return self.pace(*lease, None);
            }
            _ => {}
        }
        if let ObjectId::Port(lease) = &id {
            // Disconnects the VMM and stops its rings.
            self.devices.remove(lease);
        }
        let channel = if let ObjectId::Channel(channel) = id { Some(channel) } else { None };
        self.worker.call(|reply| Order::Remove(id, reply)).map_err(|_| GONE.to_owned())?;
        if let Some(channel) = channel {
            self.channels.close(channel);
        }
        Ok(())
    }

    fn scrub(&mut self, region: RegionId, area: Area) -> Result<(), String> {
        if self.worker.call(|reply| Order::Uses(area, reply)).map_err(|_| GONE.to_owned())? {
            return Err(format!("{region} is in use by a port"));
        }
        if self.meter.uses(area) {
            return Err(format!("{region} is in use for sums of the fabric"));
        }
        regions::scrub(&self.memory, area);
        Ok(())
    }

    fn telemetry(&mut self) -> Telemetry {
        let (leases, channels) = (self.book.telemetry(), self.channels.telemetry());
        let mchannels = self.meter.telemetry();
        let counters = [("zero-copy-packets".to_owned(), self.book.zero_copy())].into();
        let vcpus = self.meter.vcpus();
        let elements = self.meter.elements();
        Telemetry { leases, channels, mchannels, vcpus, elements, counters, ..Telemetry::default() }
    }

    fn fenced(&mut self) {
        self.meter.stop();
        self.worker.stop();
        self.devices.clear();
    }
}
