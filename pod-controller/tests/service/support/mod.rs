//! A pod without engines: a real controller, and endpoints that hold what they are given and do nothing with it.

pub(crate) mod authority;
pub(crate) mod description;
pub(crate) mod etcd_cluster;
pub(crate) mod etcd_server;
pub(crate) mod faulty_disk;
pub(crate) mod network;
pub(crate) mod numbers;
pub(crate) mod replicas;
pub(crate) mod store;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cxl_pool::{Area, CoherenceMode, CreateOptions, HostId, Pool, Role};
use pod_api::client::Client;
use pod_api::{CreateInstance, NicRequest};
use pod_controller::config::Config;
use pod_controller::controller::{Controller, ControllerError, EtcdController, Handle};
use pod_controller::copiers;
use pod_controller::rest::{self, Access, Listeners, TcpPolicy};
use pod_controller::store::Store;
use pod_protocol::config::HostConfig;
use pod_protocol::daemon::{Exit, StopSignal};
use pod_protocol::endpoint::{Endpoint, Handler, Reporter};
use pod_protocol::ids::{InstanceId, LeaseId, RegionId, VolumeId};
use pod_protocol::objects::{Object, ObjectId};
use pod_protocol::reports::{DeviceReport, Join};
use pod_protocol::telemetry::{
    ChannelTelemetry, DeviceTelemetry, ElementTelemetry, LeaseTelemetry, MchannelTelemetry, Telemetry,
    VcpuTelemetry,
};
use tempfile::TempDir;

use self::description::Description;
use self::store::Place;

/// Far longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) struct Pod {
    pub(crate) directory: TempDir,
    pub(crate) controller: Option<RunningController>,
    pub(crate) endpoints: BTreeMap<(u16, Role), FakeEndpoint>,
    /// Where in etcd its state is; none if it is in a file.
    place: Option<Place>,
}

impl Pod {
    /// A controller and nobody else.
    pub(crate) fn new() -> Self {
        Self::with_slots(3, Place::if_wanted())
    }

    /// The same, with its state in a file whatever other tests use.
    pub(crate) fn new_in_file() -> Self {
        Self::with_slots(3, None)
    }

    /// With slots for so many controller replicas.
    fn with_slots(replica_slots: u16, place: Option<Place>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let options = CreateOptions {
            size_bytes: Some(256 << 20),
            mode: CoherenceMode::Hardware,
            host_slots: 4,
            replica_slots,
            ..CreateOptions::default()
        };
        Pool::create(&directory.path().join("pool"), &options).expect("a pool");
        let mut pod = Self { directory, controller: None, endpoints: BTreeMap::new(), place };
        pod.start_controller();
        pod
    }

    /// The demo's pod: h1 with frontends, h2 with a NIC and an SSD, h3 with the backup NIC.
    pub(crate) fn demo() -> Self {
        Self::new().with_everybody()
    }

    /// The same, with its state in a file whatever other tests use.
    pub(crate) fn demo_in_file() -> Self {
        Self::new_in_file().with_everybody()
    }

    /// The same, with slots for so many controller replicas.
    pub(crate) fn demo_with_slots(replica_slots: u16) -> Self {
        Self::with_slots(replica_slots, None).with_everybody()
    }

    fn with_everybody(self) -> Self {
        let mut pod = self;
        pod.join(1, Role::NetFrontend, Vec::new());
        pod.join(1, Role::BlkFrontend, Vec::new());
        pod.join(2, Role::NetBackend, vec![nic("nic0", false)]);
        pod.join(2, Role::BlkBackend, vec![ssd("ssd0")]);
        pod.join(3, Role::NetBackend, vec![nic("nic0", true)]);
        let client = pod.client();
        until("five endpoints", || {
            let hosts = client.hosts().ok()?;
            (hosts.iter().map(|host| host.endpoints.len()).sum::<usize>() == 5).then_some(())
        });
        pod
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn config(&self) -> Config {
        self.config_with("")
    }

    /// The configuration with more lines in its first section. It is on the UNIX socket only unless they say otherwise: many pods of
    /// tests are on one machine.
    pub(crate) fn config_with(&self, lines: &str) -> Config {
        let path = self.path("controller.toml");
        let root = self.directory.path().display();
        let nowhere = if lines.contains("listen-tcp") { "" } else { "listen-tcp = 'none'\n" };
        let store = self.place.as_ref().map_or_else(String::new, Place::line);
        let text = format!(
            "[controller]\nstate = '{root}/state.redb'\ndetect-ms = 5000\ntx-area = '4M'\nrx-area = '4M'\n\
             data-area = '4M'\n{nowhere}{store}{lines}\n[pool]\npath = '{root}/pool'\n[run]\ndirectory = '{root}/run'\n"
        );
        std::fs::write(&path, text).expect("a configuration");
        Config::load(&path).expect("a good configuration")
    }

    pub(crate) fn start_controller(&mut self) {
        self.controller = Some(RunningController::start(&self.config()).expect("a controller"));
    }

    pub(crate) fn stop_controller(&mut self) {
        self.controller = None;
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path("run/controller.sock")
    }

    pub(crate) fn client(&self) -> Client {
        Client::unix(&self.socket()).expect("a client")
    }

    pub(crate) fn join(&mut self, host: u16, role: Role, devices: Vec<DeviceReport>) {
        self.endpoints.insert((host, role), FakeEndpoint::start(self.directory.path(), host, role, devices));
    }

    pub(crate) fn endpoint(&self, host: u16, role: Role) -> &FakeEndpoint {
        &self.endpoints[&(host, role)]
    }

    /// An HTTP request as it stands, and the head of the answer, which may go on for ever.
    pub(crate) fn raw_head(&self, request: &str) -> String {
        self.raw_until(request, "\r\n\r\n")
    }

    /// An HTTP request as it stands, and the answer up to these words.
    pub(crate) fn raw_until(&self, request: &str, words: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).expect("the socket accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = Vec::new();
        while !answer.ends_with(words.as_bytes()) {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("more of the answer");
            answer.push(byte[0]);
        }
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// An HTTP request as it stands, and all of the answer, which has to be one of those that are described.
    pub(crate) fn raw(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).expect("the socket accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = Vec::new();
        // The peer may close without reading all of what we sent; what it said is there all the same.
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        Description::checked_in().assert_allows(request, &answer);
        answer
    }
}

pub(crate) struct RunningController {
    pub(crate) address: Option<SocketAddr>,
    pub(crate) handle: Handle,
    runtime: Option<tokio::runtime::Runtime>,
    serving: Option<tokio::task::JoinHandle<()>>,
    thread: Option<JoinHandle<Result<(), ControllerError>>>,
}

impl RunningController {
    pub(crate) fn start(config: &Config) -> Result<Self, ControllerError> {
        Self::start_on(config, config.listen_tcp())
    }

    /// The same, at another TCP address than its configuration says.
    pub(crate) fn start_on(config: &Config, tcp: Option<TcpPolicy>) -> Result<Self, ControllerError> {
        let pool = Arc::new(Pool::open(&config.pool.path).expect("the pool"));
        let (thread, handle) = if let Some((address, credentials)) = config.etcd().expect("a good store") {
            let (controller, handle) = EtcdController::open(&pool, config, (address, &credentials), true)?;
            (std::thread::spawn(move || controller.run()), handle)
        } else {
            let store = Store::open(&config.controller.state)?;
            let (controller, handle) = Controller::open(&pool, config, store)?;
            (std::thread::spawn(move || controller.run()), handle)
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listeners = async { Listeners::bind(&config.listen(), tcp).await };
        let listeners = runtime.block_on(listeners).expect("a socket");
        let address = listeners.tcp_address();
        let access = Access::open(&config.access_policy()).expect("tokens");
        runtime.spawn(copiers::run(handle.clone()));
        let serving = runtime.spawn(listeners.serve(access.guard(rest::router(handle.clone()))));
        Ok(Self { address, handle, runtime: Some(runtime), serving: Some(serving), thread: Some(thread) })
    }
}

impl RunningController {
    /// Waits until it has ended by itself, and returns why.
    pub(crate) fn ended(mut self) -> ControllerError {
        let thread = self.thread.take().expect("it runs");
        until("the controller to end", || thread.is_finished().then_some(()));
        let ended = thread.join().expect("the controller's thread did not panic");
        ended.expect_err("it ended for a reason")
    }
}

impl Drop for RunningController {
    fn drop(&mut self) {
        self.handle.stop();
        if let (Some(runtime), Some(serving)) = (&self.runtime, self.serving.take()) {
            // However busy the machine is, the next one finds the socket free.
            serving.abort();
            let _ = runtime.block_on(serving);
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_millis(100));
        }
        if let Some(thread) = self.thread.take() {
            let ended = thread.join().expect("the controller's thread did not panic");
            ended.expect("the controller did not fail");
        }
    }
}

/// What an endpoint holds, as a test sees it.
#[derive(Default)]
pub(crate) struct Held {
    pub(crate) objects: BTreeMap<ObjectId, Object>,
    pub(crate) applied: u64,
    pub(crate) removed: u64,
    pub(crate) synced: u64,
    pub(crate) scrubbed: Vec<RegionId>,
    /// The reason with which everything but channels and NICs is refused.
    pub(crate) refuse: Option<String>,
    /// What every NIC receives from one report to the next, in bytes.
    pub(crate) receives: u64,
    /// What every NIC has received so.
    received: u64,
    /// What is read of every SSD from one report to the next: requests, and bytes.
    pub(crate) reads: [u64; 2],
    /// What has been read of every SSD so.
    read: [u64; 2],
    /// Whether every number that is reported is another one.
    pub(crate) all_differ: bool,
}

pub(crate) struct FakeEndpoint {
    pub(crate) held: Arc<Mutex<Held>>,
    pub(crate) reporter: Reporter,
    stop: StopSignal,
    thread: Option<JoinHandle<Exit>>,
}

impl FakeEndpoint {
    fn start(root: &Path, host: u16, role: Role, devices: Vec<DeviceReport>) -> Self {
        let text = format!(
            "[host]\nid = {host}\nname = 'h{host}'\n[pool]\npath = '{root}/pool'\n[run]\ndirectory = '{root}/run'\n",
            root = root.display()
        );
        let config = HostConfig::parse(&text, Path::new("host.toml")).expect("a good configuration");
        let pool = Pool::open(&root.join("pool")).expect("the pool");
        let join = Join {
            host_name: format!("h{host}"),
            software: "fake 1".to_owned(),
            pid: 1,
            devices,
            memory_failures: Vec::new(),
            fence_ms: None,
        };
        assert_eq!(config.host.id, HostId::new(host));
        let held: Arc<Mutex<Held>> = Arc::default();
        let handler = FakeHandler { held: Arc::clone(&held), devices: join.devices.clone() };
        let mut reporter = None;
        let endpoint = Endpoint::join(&pool, pool.hardware(), &config, role, join, |it, _| {
            reporter = Some(it);
            Box::new(handler)
        });
        let endpoint = endpoint.expect("a free slot");
        let stop = StopSignal::manual().expect("a signal");
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || endpoint.run_until(&stop).expect("no failure")
        });
        Self { held, reporter: reporter.expect("made"), stop, thread: Some(thread) }
    }

    pub(crate) fn objects(&self) -> BTreeMap<ObjectId, Object> {
        self.held.lock().expect("no panic").objects.clone()
    }
}

impl Drop for FakeEndpoint {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the endpoint's thread did not panic");
        }
    }
}

struct FakeHandler {
    held: Arc<Mutex<Held>>,
    devices: Vec<DeviceReport>,
}

impl Handler for FakeHandler {
    fn apply(&mut self, object: Object) -> Result<(), String> {
        let mut held = self.held.lock().expect("no panic");
        if let Some(reason) =
            held.refuse.clone().filter(|_| !matches!(object, Object::Channel(_) | Object::Nic(_)))
        {
            return Err(reason);
        }
        held.applied += 1;
        held.objects.insert(object.id(), object);
        Ok(())
    }

    fn remove(&mut self, id: ObjectId) -> Result<(), String> {
        let mut held = self.held.lock().expect("no panic");
        held.removed += 1;
        held.objects.remove(&id);
        Ok(())
    }

    fn synced(&mut self) {
        self.held.lock().expect("no panic").synced += 1;
    }

    fn scrub(&mut self, region: RegionId, _: Area) -> Result<(), String> {
        self.held.lock().expect("no panic").scrubbed.push(region);
        Ok(())
    }

    fn telemetry(&mut self) -> Telemetry {
        let mut held = self.held.lock().expect("no panic");
        held.received += held.receives;
        held.read = [held.read[0] + held.reads[0], held.read[1] + held.reads[1]];
        let devices = self.devices.iter().map(|device| DeviceTelemetry {
            name: device.name().to_owned(),
            up: true,
            rx_bytes: 1234 + held.received,
            operations: held.read[0],
            read_bytes: held.read[1],
            drops: [("no-receiver".to_owned(), 9)].into(),
            troubles: [("rx-crc-errors".to_owned(), 1)].into(),
            ..DeviceTelemetry::default()
        });
        let leases: Vec<LeaseId> = held
            .objects
            .keys()
            .filter_map(|id| match id {
                ObjectId::Port(lease) | ObjectId::Disk(lease) => Some(*lease),
                _ => None,
            })
            .collect();
        let mchannels = leases.iter().map(|lease| MchannelTelemetry {
            lease: Some(*lease),
            demand: 10,
            share: Some(5),
            ..MchannelTelemetry::default()
        });
        let vcpus =
            VcpuTelemetry { instance: Some(InstanceId::new(1)), share: Some(7), ..VcpuTelemetry::default() };
        let of_leases = leases.iter().map(|lease| LeaseTelemetry {
            drops: [("no-buffer".to_owned(), 2)].into(),
            ..LeaseTelemetry::new(*lease)
        });
        let channels = held.objects.values().filter_map(|object| match object {
            Object::Channel(channel) => Some(ChannelTelemetry {
                channel: channel.id,
                peer: channel.peer,
                sent: 77,
                received: 76,
                stalls: 3,
                unreadable: 0,
                strays: 2,
                lost: 0,
                depth: 5,
                depth_max: 2040,
            }),
            _ => None,
        });
        let telemetry = Telemetry {
            devices: devices.collect(),
            leases: of_leases.collect(),
            channels: channels.collect(),
            mchannels: mchannels.collect(),
            vcpus: vec![vcpus],
            elements: vec![ElementTelemetry { element: 1, level: Some(2), capacity: 900_000 }],
            gauges: [("mirror-dirty-bytes".to_owned(), 0)].into(),
            counters: [("fences".to_owned(), 0)].into(),
            ..Telemetry::default()
        };
        if !held.all_differ {
            return telemetry;
        }
        let mut told_apart = numbers::told_apart(&telemetry);
        // By the volume's number, which is no name of a field.
        let ssds = self.devices.iter().filter(|device| matches!(device, DeviceReport::Ssd { .. }));
        let taken = |ssd: &DeviceReport| {
            let bytes: u64 = numbers::number(&format!("allocated_bytes.{}", ssd.name())).into();
            (ssd.name().to_owned(), vec![(VolumeId::new(1), bytes)])
        };
        told_apart.allocated_bytes = ssds.map(taken).collect();
        told_apart
    }

    fn fenced(&mut self) {}
}

pub(crate) fn nic(name: &str, backup: bool) -> DeviceReport {
    DeviceReport::Nic {
        name: name.to_owned(),
        driver: "null".to_owned(),
        mac: None,
        up: true,
        speed_mbps: 10_000,
        mtu: 1500,
        features: 0,
        backup,
        lag: None,
    }
}

pub(crate) fn ssd(name: &str) -> DeviceReport {
    DeviceReport::Ssd {
        name: name.to_owned(),
        driver: "null".to_owned(),
        size_bytes: 1 << 30,
        table: None,
        reserved_bytes: 0,
        identity: None,
        block_bytes: 512,
        discard_granularity_bytes: Some(64 << 10),
        iops: None,
        bytes_per_second: None,
    }
}

pub(crate) fn vm(name: &str, volumes: &[&str]) -> CreateInstance {
    CreateInstance {
        name: name.to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest::default()],
        volumes: volumes.iter().map(|name| (*name).to_owned()).collect(),
        ..CreateInstance::default()
    }
}

/// Looks until there is something, and panics when there is nothing for too long.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
