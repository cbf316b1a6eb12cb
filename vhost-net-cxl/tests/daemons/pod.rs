//! Daemons over a pool file, with the test as their controller.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cxl_channel::RingPlacement;
use cxl_pool::{
    Area, CoherenceMode, CreateOptions, EndpointId, Generation, HardwareMemory, HostId, LineCount,
    LineOffset, Pool, Role,
};
use pod_protocol::commands::{Command as ControlCommand, Version};
use pod_protocol::controller::{ControllerPort, PortEvent};
use pod_protocol::daemon::{Exit, StopSignal};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, MacAddress};
use pod_protocol::objects::{
    ChannelObject, Engine, NicObject, NicPolicy, Object, PortObject, Priority, RegistrationObject,
    RegistrationState, Route,
};
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::{DeviceReport, Join, Report};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::telemetry::LeaseTelemetry;
use vhost_net_cxl::daemon::{run_backend, run_frontend};
use vhost_net_cxl::offloads::Offloads;

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const MAC: MacAddress = MacAddress::new([2, 0, 0, 0, 0, 1]);
pub(crate) const LINES_PER_MIB: u64 = (1 << 20) / 64;

pub(crate) fn area(first_mib: u64, mib: u64) -> Area {
    Area::new(LineOffset::new(first_mib * LINES_PER_MIB), LineCount::new(mib * LINES_PER_MIB))
}

pub(crate) const fn endpoint(host: u16, role: Role) -> EndpointId {
    EndpointId::new(HostId::new(host), role)
}

/// A pool in this directory, and a controller for it.
pub(crate) fn controller(directory: &Path) -> Controller {
    let options = CreateOptions {
        size_bytes: Some(64 << 20),
        mode: CoherenceMode::Hardware,
        ..CreateOptions::default()
    };
    let pool = Pool::create(&directory.join("pool"), &options).expect("a pool");
    let port = ControllerPort::open(&pool, pool.hardware(), run_directory(directory), 1).expect("a port");
    Controller {
        port,
        joined: BTreeMap::new(),
        links: Vec::new(),
        devices: Vec::new(),
        running: Vec::new(),
        leases: BTreeMap::new(),
    }
}

pub(crate) fn run_directory(directory: &Path) -> RunDirectory {
    RunDirectory::new(directory.join("run"))
}

/// The test's controller.
pub(crate) struct Controller {
    port: ControllerPort<HardwareMemory>,
    pub(crate) joined: BTreeMap<EndpointId, Join>,
    pub(crate) links: Vec<(EndpointId, bool)>,
    /// NICs that failed, and that are back.
    pub(crate) devices: Vec<(EndpointId, bool)>,
    /// Each time that the frontend said whether the guest's queues run, what it said.
    pub(crate) running: Vec<bool>,
    /// What endpoints said last that they count for the lease.
    pub(crate) leases: BTreeMap<EndpointId, LeaseTelemetry>,
}

impl Controller {
    /// Serves the port until `done` holds.
    pub(crate) fn serve_until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < DEADLINE, "{what} did not happen");
            self.serve();
        }
    }

    fn serve(&mut self) -> Option<PortEvent> {
        let Some(event) = self.port.poll(Instant::now()) else {
            self.port.wait(Duration::from_millis(5));
            return None;
        };
        match event.clone() {
            PortEvent::Appeared { endpoint, .. } => self.port.grant(endpoint).expect("granted"),
            PortEvent::Joined { endpoint, request, join } => {
                self.port.answer(request, Ok(()));
                self.joined.insert(endpoint, join);
            }
            PortEvent::Report { endpoint, report: Report::Link { up, .. } } => {
                self.links.push((endpoint, up));
            }
            PortEvent::Report { endpoint, report: Report::DeviceFailed { .. } } => {
                self.devices.push((endpoint, false));
            }
            PortEvent::Report { endpoint, report: Report::DeviceBack { device } } => {
                assert!(matches!(device, DeviceReport::Nic { up: true, .. }), "{device:?}");
                self.devices.push((endpoint, true));
            }
            PortEvent::Report { report: Report::Attachment { running, .. }, .. } => {
                self.running.push(running);
            }
            PortEvent::Report { endpoint, report: Report::Telemetry(telemetry) } => {
                let lease = telemetry.leases.into_iter().next();
                self.leases.extend(lease.map(|lease| (endpoint, lease)));
            }
            _ => {}
        }
        Some(event)
    }

    pub(crate) fn apply(&mut self, to: EndpointId, object: Object) {
        let name = object.id().to_string();
        let sent = self.port.send(to, &ControlCommand::Apply { version: Version::default(), object });
        let start = Instant::now();
        loop {
            if let Some(PortEvent::Answered { command, result, .. }) = self.serve()
                && command == sent
            {
                result.unwrap_or_else(|error| panic!("{to}, {name}: {error}"));
                return;
            }
            assert!(start.elapsed() < DEADLINE, "{to} did not answer about {name}");
        }
    }
}

pub(crate) struct Daemon {
    stop: StopSignal,
    thread: Option<JoinHandle<anyhow::Result<Exit>>>,
}

impl Daemon {
    pub(crate) fn start(run: impl FnOnce(&StopSignal) -> anyhow::Result<Exit> + Send + 'static) -> Self {
        let stop = StopSignal::manual().expect("a signal");
        let theirs = stop.clone();
        Self { stop, thread: Some(std::thread::spawn(move || run(&theirs))) }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop.stop();
        let outcome = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(outcome, Some(Ok(Ok(Exit::Stopped)))), "{outcome:?}");
        }
    }
}

/// A frontend on h1 and a NIC on h2 that lies in memory, and a controller that has told its backend of a lease in this state.
pub(crate) fn null_nic(directory: &Path, mode: &str, state: RegistrationState) -> (Controller, [Daemon; 2]) {
    let mut controller = controller(directory);
    let nic = format!("[[nic]]\nname = \"nic0\"\ndriver = \"null\"\nmode = \"{mode}\"\n");
    let config = write_config(directory, 2, &nic);
    let backend = Daemon::start(move |stop| run_backend(&config, Protocol::CURRENT, stop));
    let config = write_config(directory, 1, "");
    let frontend = Daemon::start(move |stop| run_frontend(&config, Protocol::CURRENT, stop));
    controller.serve_until("two daemons joining", |it| it.joined.len() == 2);
    for (to, object) in channel_pair(2) {
        controller.apply(to, Object::Channel(object));
    }
    let to = endpoint(2, Role::NetBackend);
    controller.apply(to, Object::Nic(NicObject { nic: "nic0".into(), rx_area: area(8, 8) }));
    controller.apply(to, registration(2, 1, state));
    (controller, [frontend, backend])
}

pub(crate) fn write_config(directory: &Path, host: u16, nic: &str) -> PathBuf {
    let path = directory.join(format!("h{host}.toml"));
    let text = format!(
        "[host]\nid = {host}\nname = \"h{host}\"\n[pool]\npath = \"{0}/pool\"\n[run]\ndirectory = \"{0}/run\"\n\
         wakeup = \"socket\"\n{nic}",
        directory.display()
    );
    fs::write(&path, text).expect("written");
    path
}

/// Both sides of a channel between the frontend on h1 and the backend on `host`.
pub(crate) fn channel_pair(host: u16) -> [(EndpointId, ChannelObject); 2] {
    let start = |quarter| {
        area(32 + u64::from(host), 1).start.checked_add(LineCount::new(quarter * LINES_PER_MIB / 4))
    };
    let there = RingPlacement { start: start(0).expect("in the pool"), slots: 8192 };
    let back = RingPlacement { start: start(2).expect("in the pool"), slots: 8192 };
    let (frontend, backend) = (endpoint(1, Role::NetFrontend), endpoint(host, Role::NetBackend));
    let side = |peer, outgoing, incoming| ChannelObject {
        id: ChannelId::new(u32::from(host)),
        engine: Engine::Net,
        peer,
        generation: Generation::new(1),
        outgoing,
        incoming,
        receives: None,
    };
    [(frontend, side(backend, there, back)), (backend, side(frontend, back, there))]
}

pub(crate) fn registration(host: u16, generation: u16, state: RegistrationState) -> Object {
    Object::Registration(RegistrationObject {
        lease: LeaseId::new(1).expect("small"),
        nic: "nic0".into(),
        instance: InstanceId::new(1),
        generation: LeaseGeneration::new(generation),
        mac: MAC,
        mtu: 1500,
        features: Offloads::ALL.features(),
        channel: ChannelId::new(u32::from(host)),
        tx_area: area(40, 8),
        state,
        rx_quota_buffers: 512,
        policy: NicPolicy::default(),
        ram_area: None,
        has_other_rails: false,
        priority: Priority::DEFAULT,
    })
}

pub(crate) fn port(active: (u16, u16), standby: (u16, u16)) -> PortObject {
    let route = |(host, generation): (u16, u16)| Route {
        channel: ChannelId::new(u32::from(host)),
        generation: LeaseGeneration::new(generation),
    };
    PortObject {
        lease: LeaseId::new(1).expect("small"),
        instance: InstanceId::new(1),
        instance_name: "vm".into(),
        device: "net0".into(),
        socket: "vm-net0.sock".into(),
        vmm_listens: false,
        mac: MAC,
        mtu: 1500,
        queue_pairs: 1,
        features: Offloads::ALL.features(),
        tx_area: area(40, 8),
        active: route(active),
        rails: Vec::new(),
        standby: Some(route(standby)),
        draining: None,
        incoming: false,
        policy: NicPolicy::default(),
        ram_area: None,
    }
}
