//! What this crate's own tests share: small pods over simulated memory and over a real pool file, a handler that
//! writes down what it is told, and a controller that waits for events.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool};
use cxl_pool::{
    Area, ByteOffset, CreateOptions, EndpointId, HostId, Layout, LineCount, LineOffset, Memory, Pool,
    REGION_SLOTS_LEAST, ReplicaId, Role, SoftwareMemory,
};
use tempfile::TempDir;

use crate::config::HostConfig;
use crate::controller::{ControllerPort, PortEvent, PortWaker};
use crate::daemon::{Exit, StopSignal};
use crate::endpoint::{Endpoint, Handler, JoinError, Reporter, RunError};
use crate::fence::Fence;
use crate::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, RegionId, VolumeId};
use crate::liveness::write_beat;
use crate::objects::{DiskObject, NicObject, Object, ObjectId, Route};
use crate::protocol::Protocol;
use crate::reports::{DeviceReport, Join};
use crate::run_directory::RunDirectory;
use crate::telemetry::Telemetry;

/// Long enough for any machine: a test that reaches it has failed.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// Which host the controller runs on.
pub(crate) const CONTROLLER_HOST: HostId = HostId::new(4);
const HOSTS: u16 = 4;
const REPLICAS: u16 = 3;

/// The controller, where there is one.
pub(crate) const REPLICA: ReplicaId = ReplicaId::new(0);
/// Another one, on another host.
pub(crate) const OTHER_REPLICA: ReplicaId = ReplicaId::new(1);
pub(crate) const OTHER_CONTROLLER_HOST: HostId = HostId::new(3);

/// The endpoint that most tests use.
pub(crate) const BACKEND: EndpointId = EndpointId::new(HostId::new(2), Role::NetBackend);

/// A pool, a run directory, and a way to see the pool as a host does.
pub(crate) struct TestPod<M> {
    pub(crate) layout: Layout,
    pub(crate) run: TempDir,
    memory: Box<dyn Fn(HostId) -> M>,
    faults: Box<dyn Fn() -> Faults>,
}

impl<M> Drop for TestPod<M> {
    fn drop(&mut self) {
        if !thread::panicking() {
            assert_eq!((self.faults)(), Faults::default(), "a rule of non-coherent memory was broken");
        }
    }
}

impl TestPod<SimulatedMemory> {
    pub(crate) fn simulated(seed: u64) -> Self {
        let size_bytes = 16 << 20;
        let pool = SimulatedPool::new(seed, size_bytes);
        let watched = pool.clone();
        Self {
            layout: Layout::new(size_bytes, HOSTS, REPLICAS, REGION_SLOTS_LEAST).expect("large enough"),
            run: tempfile::tempdir().expect("a directory"),
            memory: Box::new(move |host| pool.host(host)),
            faults: Box::new(move || watched.faults()),
        }
    }
}

impl TestPod<SoftwareMemory> {
    pub(crate) fn real() -> Self {
        let run = tempfile::tempdir().expect("a directory");
        let options = CreateOptions {
            size_bytes: Some(16 << 20),
            host_slots: HOSTS,
            replica_slots: REPLICAS,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&run.path().join("pool"), &options).expect("created");
        Self {
            layout: pool.layout().clone(),
            run,
            memory: Box::new(move |_| pool.software()),
            faults: Box::new(Faults::default),
        }
    }
}

impl<M: Memory> TestPod<M> {
    pub(crate) fn memory(&self, host: HostId) -> M {
        (self.memory)(host)
    }

    pub(crate) fn run_directory(&self) -> RunDirectory {
        RunDirectory::new(self.run.path())
    }

    pub(crate) fn config(&self, host: HostId, wakeup: &str) -> HostConfig {
        config(self.run.path(), host, wakeup)
    }

    pub(crate) fn controller(&self, term: u64) -> TestController<M> {
        self.controller_speaking(term, Protocol::CURRENT)
    }

    pub(crate) fn controller_speaking(&self, term: u64, protocol: Protocol) -> TestController<M> {
        let memory = self.memory(CONTROLLER_HOST);
        let waker = PortWaker::new().expect("a descriptor");
        let office = (REPLICA, term, protocol);
        let port = ControllerPort::open_replica(&self.layout, memory, self.run_directory(), office, waker);
        TestController { port: port.expect("a free slot") }
    }

    /// Another replica's turn to lead.
    pub(crate) fn other_controller(&self, term: u64) -> TestController<M> {
        let memory = self.memory(OTHER_CONTROLLER_HOST);
        let waker = PortWaker::new().expect("a descriptor");
        let office = (OTHER_REPLICA, term, Protocol::CURRENT);
        let port = ControllerPort::open_replica(&self.layout, memory, self.run_directory(), office, waker);
        TestController { port: port.expect("a free slot") }
    }

    pub(crate) fn try_join(
        &self,
        config: &HostConfig,
        role: Role,
        calls: &Calls,
    ) -> Result<(Endpoint<M>, Reporter, Fence), JoinError> {
        let mut given = None;
        let endpoint = Endpoint::join_layout(
            &self.layout,
            self.memory(config.host.id),
            config,
            role,
            join(),
            |reporter, fence| {
                given = Some((reporter, fence));
                Ok::<_, std::convert::Infallible>(calls.handler())
            },
        )?;
        let (reporter, fence) = given.expect("the handler was made");
        Ok((endpoint, reporter, fence))
    }

    pub(crate) fn start(&self, endpoint: EndpointId, wakeup: &str) -> Running {
        self.start_speaking(endpoint, wakeup, Protocol::CURRENT)
    }

    pub(crate) fn start_speaking(&self, endpoint: EndpointId, wakeup: &str, protocol: Protocol) -> Running {
        let calls = Calls::default();
        let mut config = self.config(endpoint.host, wakeup);
        config.run.protocol = protocol;
        let (joined, reporter, fence) = self.try_join(&config, endpoint.role, &calls).expect("a free slot");
        let incarnation = joined.incarnation();
        let stop = StopSignal::manual().expect("a pair");
        let stop_of_thread = stop.clone();
        let thread = thread::spawn(move || joined.run_until(&stop_of_thread));
        Running { calls, reporter, fence, incarnation, stop, thread }
    }
}

/// What a writer that was killed, or damage, leaves of a record.
pub(crate) fn damage<M: Memory>(memory: &M, at: LineOffset) {
    memory.store(at.bytes(), 77);
    memory.flush(at.bytes(), 8);
    memory.full_fence();
}

/// Does something while somebody who sees the pool like this beats there.
pub(crate) fn while_beating<M: Memory, T>(memory: &M, at: ByteOffset, act: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let deadline = Instant::now() + PATIENCE;
            for beat in 1.. {
                if stop.load(Ordering::Relaxed) || Instant::now() > deadline {
                    return;
                }
                write_beat(memory, at, beat);
                memory.full_fence();
                thread::sleep(Duration::from_millis(1));
            }
        });
        let done = act();
        stop.store(true, Ordering::Relaxed);
        done
    })
}

pub(crate) fn config(run: &Path, host: HostId, wakeup: &str) -> HostConfig {
    let text = format!(
        "[host]\nid = {0}\nname = \"h{0}\"\n[pool]\npath = \"unused\"\n[run]\ndirectory = {1:?}\nwakeup = {wakeup:?}\n",
        host.get(),
        run.display().to_string(),
    );
    HostConfig::parse(&text, Path::new("host.toml")).expect("good")
}

pub(crate) fn join() -> Join {
    Join {
        host_name: "h2".into(),
        software: "test 1".into(),
        pid: std::process::id(),
        memory_failures: Vec::new(),
        fence_ms: None,
        devices: vec![DeviceReport::Nic {
            name: "nic0".into(),
            driver: "null".into(),
            mac: None,
            up: true,
            speed_mbps: 10_000,
            mtu: 1500,
            features: 0,
            backup: false,
            lag: None,
        }],
    }
}

pub(crate) fn nic(name: &str, lines: u64) -> Object {
    Object::Nic(NicObject { nic: name.into(), rx_area: Area::new(LineOffset::new(0), LineCount::new(lines)) })
}

pub(crate) fn disk(lease: LeaseId) -> Object {
    Object::Disk(DiskObject {
        lease,
        instance: InstanceId::new(1),
        instance_name: "vm".into(),
        device: "data".into(),
        socket: "vm-data".into(),
        vmm_listens: false,
        volume: VolumeId::new(1),
        serial: "data".into(),
        size_bytes: 1 << 20,
        block_bytes: 512,
        discard_granularity_bytes: None,
        read_only: false,
        queues: 1,
        data_area: Area::new(LineOffset::new(0), LineCount::new(1)),
        ram_area: None,
        route: Route { channel: ChannelId::new(1), generation: LeaseGeneration::new(1) },
        replicas: Vec::new(),
        stripe_bytes: None,
        beside: None,
        number: None,
        epoch: 0,
        failed: false,
        write_through: false,
        untold: false,
        incoming: false,
    })
}

/// A daemon in a thread.
pub(crate) struct Running {
    pub(crate) calls: Calls,
    pub(crate) reporter: Reporter,
    pub(crate) fence: Fence,
    pub(crate) incarnation: u64,
    stop: StopSignal,
    thread: JoinHandle<Result<Exit, RunError>>,
}

impl Running {
    pub(crate) fn stop(self) -> Result<Exit, RunError> {
        self.stop.stop();
        self.ended()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    pub(crate) fn ended(self) -> Result<Exit, RunError> {
        self.thread.join().expect("no panic")
    }
}

/// What a handler was told.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a few of them in a test")]
pub(crate) enum Call {
    Apply(Object),
    Remove(ObjectId),
    Synced,
    Scrub(RegionId),
    Fenced,
    Dropped,
}

#[derive(Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<Vec<Call>>>);

impl Calls {
    /// Everything since the last time.
    pub(crate) fn take(&self) -> Vec<Call> {
        std::mem::take(&mut *self.0.lock().expect("no panic"))
    }

    /// What writes them down.
    pub(crate) fn handler(&self) -> Box<dyn Handler> {
        Box::new(Recorder(self.clone()))
    }

    /// Until this is dropped, the handler is not done with what it is told.
    pub(crate) fn hold_up(&self) -> MutexGuard<'_, Vec<Call>> {
        self.0.lock().expect("no panic")
    }

    fn note(&self, call: Call) {
        self.0.lock().expect("no panic").push(call);
    }
}

struct Recorder(Calls);

impl Handler for Recorder {
    fn apply(&mut self, object: Object) -> Result<(), String> {
        let refused = matches!(&object, Object::Nic(nic) if nic.nic == "broken");
        self.0.note(Call::Apply(object));
        if refused { Err("this NIC is broken".into()) } else { Ok(()) }
    }

    fn remove(&mut self, id: ObjectId) -> Result<(), String> {
        self.0.note(Call::Remove(id));
        Ok(())
    }

    fn synced(&mut self) {
        self.0.note(Call::Synced);
    }

    fn scrub(&mut self, region: RegionId, _area: Area) -> Result<(), String> {
        self.0.note(Call::Scrub(region));
        Ok(())
    }

    fn telemetry(&mut self) -> Telemetry {
        Telemetry { counters: [("samples".to_owned(), 1)].into(), ..Telemetry::default() }
    }

    fn fenced(&mut self) {
        self.0.note(Call::Fenced);
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.0.note(Call::Dropped);
    }
}

/// A controller that does what it is told and waits for what it expects.
pub(crate) struct TestController<M: Memory> {
    pub(crate) port: ControllerPort<M>,
}

impl<M: Memory> TestController<M> {
    /// Waits for the first event that is of interest; the others are dropped.
    pub(crate) fn expect<T>(&mut self, what: &str, mut of_interest: impl FnMut(PortEvent) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = Instant::now();
            assert!(now < deadline, "{what} did not come");
            while let Some(event) = self.port.poll(now) {
                if let Some(found) = of_interest(event) {
                    return found;
                }
            }
            self.port.wait(Duration::from_millis(20));
        }
    }

    pub(crate) fn appeared(&mut self, expected: EndpointId) -> u64 {
        self.expect("its appearance", |event| match event {
            PortEvent::Appeared { endpoint, incarnation, .. } if endpoint == expected => Some(incarnation),
            _ => None,
        })
    }

    pub(crate) fn gone(&mut self, expected: EndpointId) {
        self.expect("its leave", |event| match event {
            PortEvent::Gone { endpoint } => (endpoint == expected).then_some(()),
            _ => None,
        });
    }

    /// Waits for an endpoint, grants it and lets it join.
    pub(crate) fn admit(&mut self, endpoint: EndpointId) -> (u64, Join) {
        let incarnation = self.appeared(endpoint);
        self.port.grant(endpoint).expect("it lives");
        let (request, join) = self.expect("its join", |event| match event {
            PortEvent::Joined { endpoint: from, request, join } if from == endpoint => Some((request, join)),
            _ => None,
        });
        self.port.answer(request, Ok(()));
        (incarnation, join)
    }

    /// Sends a command and waits for its result.
    pub(crate) fn command(
        &mut self,
        to: EndpointId,
        command: &crate::commands::Command,
    ) -> Result<(), crate::controller::CommandFailure> {
        let sent = self.port.send(to, command);
        self.expect("its answer", |event| match event {
            PortEvent::Answered { endpoint, command, result } if command == sent => {
                assert_eq!(endpoint, to);
                Some(result)
            }
            _ => None,
        })
    }

    pub(crate) fn report(
        &mut self,
        wanted: impl Fn(&crate::reports::Report) -> bool,
    ) -> crate::reports::Report {
        self.expect("a report", |event| match event {
            PortEvent::Report { report, .. } if wanted(&report) => Some(report),
            _ => None,
        })
    }
}
