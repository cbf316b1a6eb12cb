//! A controller's thread in a pod of which only it is real: endpoints obey at once, and the disk is a real one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use cxl_pool::regions::TableVersion;
use cxl_pool::{CoherenceMode, CreateOptions, EndpointId, HardwareMemory, HostId, Pool, ReplicaId, Role};
use pod_controller::balance::BalancePolicy;
use pod_controller::controller::{Conductor, Delays, Meanwhile, RegionTable, Sample, World};
use pod_controller::link_policy::{FailBack, LinkPolicy};
use pod_controller::reconcile::Reconciler;
use pod_controller::store::{Store, StoreError};
use pod_controller::view::{PoolFacts, View};
use pod_protocol::commands::{Command as Order, Version};
use pod_protocol::controller::{PortError, PortEvent};
use pod_protocol::ids::{LeaseId, RegionId};
use pod_protocol::reports::Report;
use pod_state::{Command, DeviceId, Effect, Groups, Labelled, Lease, NicWish, Refusal, Regions, State};
use tempfile::TempDir;
use wadi_tests::runner::memory_tempdir;

use super::endpoint::Endpoints;
use super::pod::{has_backups, join, nic_report, options, ssd_report};

/// Instances on each host, each with a NIC and a disk.
const INSTANCES: u32 = 20;
/// What the pool's table has room for.
const REGIONS: u32 = 65_535;
const VOLUME_BYTES: u64 = 16 << 20;
const ROLES: [Role; 4] = [Role::NetFrontend, Role::NetBackend, Role::BlkFrontend, Role::BlkBackend];
/// How many commands the controller takes in one turn.
const WISHES: usize = 256;
/// How often a creation is measured.
const CREATIONS: usize = 15;
/// How often a failure is, and one while a snapshot is written.
const FAILURES: [usize; 2] = [100, 20];

/// What it took.
pub(super) struct Conduct {
    pub(super) leases: usize,
    /// From a report of a failed NIC until each frontend concerned was told that its leases have moved.
    pub(super) failure: Times,
    /// The same until the last backend concerned was told.
    pub(super) backends: Times,
    /// The same while a snapshot of the state is written.
    pub(super) beside_snapshot: Times,
    /// From a report of a failed SSD until each frontend with a disk there was told that it answers errors now.
    pub(super) ssd_failure: Times,
    /// How many disks were on an SSD that failed at most.
    pub(super) disks: usize,
    /// How many commands that were at most, and of how many leases.
    pub(super) told: usize,
    pub(super) ports: usize,
    /// What of a failure it took to decide, to keep that and find out what to tell meanwhile, and to send it, in ms; medians.
    pub(super) steps_ms: [f64; 3],
    /// From an instance's creation until it is answered, in ms, without the disk; the median.
    pub(super) create_ms: f64,
}

/// What something took, in ms.
pub(super) struct Times {
    pub(super) median: f64,
    pub(super) p99: f64,
    pub(super) worst: f64,
}

impl Times {
    fn of(mut all: Vec<Duration>) -> Self {
        all.sort_unstable();
        let at = |percent: usize| {
            let place = (all.len() * percent / 100).min(all.len().saturating_sub(1));
            all.get(place).map_or(0.0, |it| it.as_secs_f64() * 1e3)
        };
        Self { median: at(50), p99: at(99), worst: at(100) }
    }
}

/// Measures a pod of so many hosts.
pub(super) fn measure(hosts: u16, directory: &Path) -> Result<Conduct> {
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let mut pod = Pod::new(hosts, directory)?;
    pod.fill()?;
    let mut creations = Vec::new();
    for number in 0..CREATIONS {
        creations.push(pod.create(number)?);
    }
    let (mut times, mut steps) = ([Vec::new(), Vec::new()], [const { Vec::new() }; 3]);
    let (mut backends, mut told, mut ports) = (Vec::new(), 0, 0);
    for ((failures, times), beside_snapshot) in FAILURES.iter().zip(&mut times).zip([false, true]) {
        for _ in 0..*failures {
            if beside_snapshot {
                pod.begin_snapshot()?;
            }
            let failure = pod.fail_nic()?;
            times.push(failure.told_after);
            (told, ports) = (told.max(failure.told), ports.max(failure.ports));
            if !beside_snapshot {
                backends.push(failure.backends_after);
                for (all, step) in steps.iter_mut().zip(failure.steps) {
                    all.push(step);
                }
            }
        }
    }
    let [failure, beside_snapshot] = times.map(Times::of);
    let (mut ssd_failures, mut disks) = (Vec::new(), 0);
    for _ in 0..FAILURES[0] {
        let (told_after, told) = pod.fail_ssd()?;
        ssd_failures.push(told_after);
        disks = disks.max(told);
    }
    Ok(Conduct {
        leases: pod.conductor.state().leases.len(),
        failure,
        backends: Times::of(backends),
        beside_snapshot,
        ssd_failure: Times::of(ssd_failures),
        disks,
        told,
        ports,
        steps_ms: steps.map(|all| Times::of(all).median),
        create_ms: Times::of(creations).median,
    })
}

struct Pod {
    conductor: Conductor<Obedient>,
    hosts: u16,
    /// How often something was changed to no effect.
    changes: u32,
}

/// What became of a NIC's failure.
struct Failure {
    /// With the disk.
    told_after: Duration,
    backends_after: Duration,
    told: usize,
    /// How many leases have moved.
    ports: usize,
    steps: [Duration; 3],
}

impl Pod {
    fn new(hosts: u16, directory: &Path) -> Result<Self> {
        let state = State::new(options());
        let shm = memory_tempdir()?;
        // What is leased lies nowhere: only the table is real.
        let pool = Pool::create(
            &shm.path().join("pool"),
            &CreateOptions {
                size_bytes: Some(256 << 20),
                mode: CoherenceMode::Hardware,
                host_slots: hosts,
                replica_slots: 1,
                region_slots: Some(REGIONS),
                reserve: false,
                force: false,
            },
        )?;
        let facts = PoolFacts::new(Path::new("pool"), pool.superblock());
        let file = directory.join(format!("controller-{hosts}.redb"));
        let (mut store, _) = Store::open(&file)?;
        store.keep_snapshot(&state)?;
        let mut endpoints = Endpoints::default();
        for host in 1..=hosts {
            for role in ROLES {
                let id = EndpointId::new(HostId::new(host), role);
                endpoints.add(&pool.hardware(), pool.layout(), id, shm.path())?;
            }
        }
        let world = Obedient {
            endpoints,
            kept: Duration::ZERO,
            kept_at: Instant::now(),
            answers: Vec::new(),
            view: Arc::new(View::new(&state, facts, PathBuf::from("sockets"))),
            store,
            snapshot_due: false,
            file,
            memory: pool.hardware(),
            table: RegionTable::new(pool.layout(), ReplicaId::new(0)),
            _shm: shm,
        };
        let delays = Delays {
            fence: Duration::from_millis(250),
            blk_grace: Duration::from_secs(30),
            drain: Duration::from_millis(300),
        };
        let links = LinkPolicy {
            flaps: 0,
            flap_window: Duration::from_mins(1),
            hold: Duration::from_mins(1),
            fail_back: FailBack::Stay,
            stable: Duration::from_mins(1),
        };
        let conductor = Conductor::new(world, state, 1, (delays, links, BalancePolicy::default()));
        Ok(Self { conductor, hosts, changes: 0 })
    }

    /// Everybody joins, and there are instances on each host.
    fn fill(&mut self) -> Result<()> {
        for number in 1..=self.hosts {
            for role in ROLES {
                let endpoint = EndpointId::new(HostId::new(number), role);
                let events = &mut self.conductor.world_mut().endpoints.events;
                events.push_back(PortEvent::Appeared { endpoint, incarnation: 1, pid: 1 });
                let join = join(number, role);
                events.push_back(PortEvent::Joined { endpoint, request: endpoint, join });
            }
        }
        self.quiet(Vec::new())?;
        let numbers: Vec<u32> = (0..u32::from(self.hosts) * INSTANCES).collect();
        for some in numbers.chunks(WISHES) {
            self.quiet(some.iter().map(|number| create_volume(*number)).collect())?;
            let hosts = u32::from(self.hosts);
            self.quiet(some.iter().map(|number| create_instance(*number, hosts)).collect())?;
        }
        ensure!(self.conductor.state().leases.len() == 2 * numbers.len(), "not all instances were made");
        Ok(())
    }

    /// Turns until there is nothing left to hear. All answers must be good.
    fn quiet(&mut self, commands: Vec<Command>) -> Result<()> {
        let mut wishes: Vec<(Command, ())> = commands.into_iter().map(|command| (command, ())).collect();
        let asked = wishes.len();
        loop {
            self.conductor.turn(std::mem::take(&mut wishes), Instant::now())?;
            if self.conductor.world_mut().endpoints.events.is_empty()
                && !self.conductor.state().lacks_backups()
            {
                break;
            }
        }
        let world = self.conductor.world_mut();
        let (answers, failed) =
            (std::mem::take(&mut world.answers), std::mem::take(&mut world.endpoints.failed));
        ensure!(failed.is_empty(), "{}", failed.join("; "));
        ensure!(answers.len() == asked, "{} of {asked} commands were answered", answers.len());
        answers.into_iter().collect::<Result<(), String>>().map_err(|reason| anyhow!(reason))
    }

    /// How long it takes until somebody who asks for an instance has an answer.
    fn create(&mut self, number: usize) -> Result<Duration> {
        let hosts = u32::from(self.hosts);
        let number = hosts * INSTANCES + u32::try_from(number)?;
        self.quiet(vec![create_volume(number)])?;
        self.conductor.world_mut().kept = Duration::ZERO;
        let start = Instant::now();
        self.conductor.turn(vec![(create_instance(number, hosts), ())], start)?;
        let took = start.elapsed();
        let world = self.conductor.world_mut();
        let (kept, answers) = (world.kept, std::mem::take(&mut world.answers));
        ensure!(answers == [Ok(())], "the instance was not made in one turn: {answers:?}");
        self.quiet(Vec::new())?;
        Ok(took.saturating_sub(kept))
    }

    /// All of the state begins to be written.
    fn begin_snapshot(&mut self) -> Result<()> {
        let world = self.conductor.world_mut();
        while world.store.is_writing() {
            std::thread::yield_now();
        }
        world.snapshot_due = true;
        // It begins with whatever is shown next, after the one before was heard of.
        self.changes += 1;
        let device = format!("vol{}", self.changes);
        self.quiet(vec![Command::SetLabels {
            of: Labelled::Volume,
            name: device,
            labels: [("round".to_owned(), self.changes.to_string())].into(),
        }])
    }

    /// The NIC fails that most leases are on. How long it takes until the frontend of each has been told where it is now. Then it is there again.
    fn fail_nic(&mut self) -> Result<Failure> {
        let state = self.conductor.state();
        let before = state.failovers;
        let nics = state.leases.values().filter_map(|lease| lease.active_nic());
        let nic = busiest(nics).context("nothing is on any NIC")?;
        let on_it = state.leases.values().filter(|lease| lease.active_nic() == Some(&nic));
        let on_it: Vec<LeaseId> = on_it.map(|lease| lease.id).collect();
        let (endpoint, device) = (EndpointId::new(nic.host, Role::NetBackend), nic.name.to_string());
        let report = Report::DeviceFailed { device, reason: "pulled".to_owned() };
        let world = self.conductor.world_mut();
        (world.endpoints.told, world.endpoints.backends_told_at, world.kept) = (0, None, Duration::ZERO);
        world.endpoints.frontends_told_at.clear();
        world.endpoints.events.push_back(PortEvent::Report { endpoint, report });
        let start = Instant::now();
        self.conductor.turn(Vec::new(), start)?;
        let told_at = self.told_at(&on_it)?;
        let world = self.conductor.world_mut();
        let (told, kept, kept_at) = (world.endpoints.told, world.kept, world.kept_at);
        let backends_at =
            world.endpoints.backends_told_at.context("no backend was told of a NIC that failed")?;
        let leases = &self.conductor.state().leases;
        let moved = |id: &LeaseId| leases.get(id).is_some_and(|lease| lease.active_nic() != Some(&nic));
        ensure!(on_it.iter().all(moved), "a lease stayed on a NIC that failed");
        self.quiet(Vec::new())?;
        ensure!(self.conductor.state().failovers > before, "nothing was on a NIC that failed");
        let number = nic.name.trim_start_matches("nic").parse().context("a NIC is called otherwise")?;
        let device = nic_report(number, has_backups(nic.host.get()));
        let back = PortEvent::Report { endpoint, report: Report::DeviceBack { device } };
        self.conductor.world_mut().endpoints.events.push_back(back);
        self.quiet(Vec::new())?;
        let decided = kept_at.duration_since(start).saturating_sub(kept);
        let steps = [decided, kept, told_at.duration_since(kept_at)];
        let [told_after, backends_after] = [told_at, backends_at].map(|at| at.duration_since(start));
        Ok(Failure { told_after, backends_after, told, ports: on_it.len(), steps })
    }

    /// The SSD fails that most disks are on, none of which is anywhere else. How long it takes until the frontend of each has been told that
    /// its requests fail now, and how many there are. Then it is there again.
    fn fail_ssd(&mut self) -> Result<(Duration, usize)> {
        let state = self.conductor.state();
        let ssd_of = |lease: &Lease| {
            let volume = state.volumes.get(&lease.volume()?)?;
            volume.devices().next()
        };
        let ssd = busiest(state.leases.values().filter_map(ssd_of)).context("nothing is on any SSD")?;
        let on_it = state.leases.values().filter(|lease| ssd_of(lease) == Some(&ssd));
        let on_it: Vec<LeaseId> = on_it.map(|lease| lease.id).collect();
        let (endpoint, device) = (EndpointId::new(ssd.host, Role::BlkBackend), ssd.name.to_string());
        let report = Report::DeviceFailed { device, reason: "worn out".to_owned() };
        let world = self.conductor.world_mut();
        world.endpoints.frontends_told_at.clear();
        world.endpoints.events.push_back(PortEvent::Report { endpoint, report });
        let start = Instant::now();
        self.conductor.turn(Vec::new(), start)?;
        let told_after = self.told_at(&on_it)?.duration_since(start);
        self.quiet(Vec::new())?;
        let number = ssd.name.trim_start_matches("ssd").parse().context("an SSD is called otherwise")?;
        let back = PortEvent::Report { endpoint, report: Report::DeviceBack { device: ssd_report(number) } };
        self.conductor.world_mut().endpoints.events.push_back(back);
        self.quiet(Vec::new())?;
        Ok((told_after, on_it.len()))
    }

    /// Since when the frontends of all of these leases can hear what has become of them.
    fn told_at(&mut self, leases: &[LeaseId]) -> Result<Instant> {
        let told_at = std::mem::take(&mut self.conductor.world_mut().endpoints.frontends_told_at);
        let each: Option<Vec<Instant>> = leases.iter().map(|id| told_at.get(id).copied()).collect();
        let each = each.context("a frontend had to wait until others had answered")?;
        each.into_iter().max().context("nothing was on a device that failed")
    }
}

/// The device that comes up most often.
fn busiest<'a>(devices: impl Iterator<Item = &'a DeviceId>) -> Option<DeviceId> {
    let mut counts: BTreeMap<&DeviceId, usize> = BTreeMap::new();
    devices.for_each(|device| *counts.entry(device).or_default() += 1);
    counts.into_iter().max_by_key(|(_, leases)| *leases).map(|(device, _)| device.clone())
}

impl Drop for Obedient {
    fn drop(&mut self) {
        // A benchmark leaves figures behind, and no pods.
        let _ = fs::remove_file(&self.file);
    }
}

fn volume_name(number: u32) -> String {
    format!("vol{number}")
}

fn create_volume(number: u32) -> Command {
    Command::CreateVolume {
        name: volume_name(number),
        size_bytes: VOLUME_BYTES,
        device: None,
        replicas: 1,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    }
}

fn create_instance(number: u32, hosts: u32) -> Command {
    let host = u16::try_from(number % hosts + 1).map_or(HostId::new(1), HostId::new);
    Command::CreateInstance {
        name: format!("vm{number}"),
        host,
        nics: vec![NicWish { reserved_mbps: 500, ..NicWish::default() }],
        volumes: vec![volume_name(number)],
        instance_type: None,
        vmm_listens: false,
        ram_bytes: None,
        priority: None,
    }
}

/// Endpoints that obey at once, and a disk.
struct Obedient {
    endpoints: Endpoints,
    kept: Duration,
    /// When the last commit stood.
    kept_at: Instant,
    answers: Vec<Result<(), String>>,
    view: Arc<View>,
    store: Store,
    /// Whether a snapshot is to be written, however long the log is.
    snapshot_due: bool,
    file: PathBuf,
    memory: HardwareMemory,
    table: RegionTable,
    _shm: TempDir,
}

impl World for Obedient {
    type Ticket = u64;
    type Request = EndpointId;
    type Reply = ();
    type Error = StoreError;

    fn poll(&mut self, _now: Instant) -> Option<PortEvent<u64, EndpointId>> {
        self.endpoints.poll()
    }

    fn grant(&mut self, _endpoint: EndpointId) -> Result<(), PortError> {
        Ok(())
    }

    fn send(&mut self, to: EndpointId, order: &Order) -> u64 {
        self.endpoints.send(to, order)
    }

    fn let_hear(&mut self, to: EndpointId) {
        self.endpoints.let_hear(to);
    }

    fn answer(&mut self, request: EndpointId, answer: Result<(), String>) {
        if let Err(reason) = answer {
            self.answers.push(Err(format!("{request} may not join: {reason}")));
        }
    }

    fn fence(&mut self, _endpoint: EndpointId, _incarnation: u64) -> Result<Instant, PortError> {
        Ok(Instant::now())
    }

    fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        _effects: &[Effect],
        state: &State,
        meanwhile: Option<Meanwhile<'_, u64>>,
    ) -> Result<(), StoreError> {
        let start = Instant::now();
        let endpoints = &mut self.endpoints;
        let mut meanwhile = meanwhile.map(|queue| || queue(&mut |to, order| endpoints.send(to, order)));
        let meanwhile = meanwhile.as_mut().map(|it| it as &mut dyn FnMut());
        self.store.commit(commands, &[], 1, state, meanwhile)?;
        self.kept_at = Instant::now();
        self.kept += self.kept_at.duration_since(start);
        Ok(())
    }

    fn publish_regions(&mut self, version: Version, regions: &Regions, changed: Option<BTreeSet<RegionId>>) {
        let version = TableVersion { term: version.term, index: version.index };
        self.table.publish(&self.memory, version, regions, changed);
    }

    fn show(&mut self, state: Arc<State>, reconciler: &Reconciler<u64>) {
        self.view = Arc::new(self.view.updated(Arc::clone(&state), reconciler.waiting()));
        self.store.tidy(&state);
        if std::mem::take(&mut self.snapshot_due) {
            self.store.begin_snapshot(&state);
        }
    }

    fn reply(&mut self, (): (), answer: Result<(), Refusal>) {
        self.answers.push(answer.map_err(|refusal| refusal.to_string()));
    }

    fn sample(&mut self, _endpoint: EndpointId, _sample: Option<Sample>) {}
}
