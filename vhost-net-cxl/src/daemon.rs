//! Starting a frontend or a backend from a host's configuration.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{CoherenceMode, EndpointId, Memory, Pool, Role};
use pod_protocol::config::{HostConfig, Wakeup};
use pod_protocol::daemon::{Exit, StopSignal};
use pod_protocol::endpoint::{Endpoint, Handler, Reporter};
use pod_protocol::fence::Fence;
use pod_protocol::memory_failures;
use pod_protocol::objects::ChannelObject;
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::{DeviceReport, Join, Report};
use pod_protocol::worker::{Worker, WorkerConfig, WorkerHandle};

use crate::backend::{Backend, BackendHandler, Order, WatchedNic};
use crate::channel_counters::ChannelBook;
use crate::channel_end::ChannelEnd;
use crate::counters::{LeaseBook, NicCounters};
use crate::frontend::{Frontend, FrontendHandler};
use crate::nic::reopen::Reopening;
use crate::nic::statistics::TroubleWatch;
use crate::nic::{self, Nic, NicConfig, NicError};

/// The backend's worker, once there is one.
type BackendWorker = Arc<OnceLock<WorkerHandle<Order>>>;

/// Runs the frontend of this host, speaking this version, until it is told to stop.
pub fn run_frontend(config: &Path, protocol: Protocol, stop: &StopSignal) -> anyhow::Result<Exit> {
    let (config, pool) = prepare(config, protocol, Role::NetFrontend)?;
    match pool.superblock().mode {
        CoherenceMode::Software => frontend(&config, &pool, &pool.software(), stop),
        CoherenceMode::Hardware => frontend(&config, &pool, &pool.hardware(), stop),
    }
}

/// Runs the backend of this host, speaking this version, until it is told to stop.
pub fn run_backend(config: &Path, protocol: Protocol, stop: &StopSignal) -> anyhow::Result<Exit> {
    let (config, pool) = prepare(config, protocol, Role::NetBackend)?;
    match pool.superblock().mode {
        CoherenceMode::Software => backend(&config, &pool, &pool.software(), stop),
        CoherenceMode::Hardware => backend(&config, &pool, &pool.hardware(), stop),
    }
}

fn prepare(path: &Path, protocol: Protocol, role: Role) -> anyhow::Result<(HostConfig, Pool)> {
    let mut config = HostConfig::load_and_follow(path)?;
    config.run.protocol = protocol;
    let pool = Pool::open(&config.pool.path)?;
    memory_failures::watch(&pool, &config, role)?;
    Ok((config, pool))
}

fn frontend<M: Memory>(
    config: &HostConfig,
    pool: &Pool,
    memory: &M,
    stop: &StopSignal,
) -> anyhow::Result<Exit> {
    let book = LeaseBook::default();
    let channels = ChannelBook::default();
    let open = Box::new(opener(config, memory, &channels));
    let task = Frontend::new(memory.clone(), book.clone(), open).context("cannot create a timer")?;
    let pool_file = pool.file_identity();
    let task = task.with_pool_file(pool_file);
    let role = Role::NetFrontend;
    let sockets = config.run_directory().sockets();
    let joined = |reporter: Reporter, fence: Fence| -> anyhow::Result<Box<dyn Handler>> {
        let worker_config = WorkerConfig::new(&config.run, config.net.frontend_cpu, fence);
        let worker = Worker::spawn("net-frontend", worker_config, doorbell(config, role)?, task)?;
        let mut handler =
            FrontendHandler::new(memory.clone(), worker, reporter, book, channels, sockets, Some(pool_file));
        let (run, endpoint) = (config.run_directory(), EndpointId::new(config.host.id, role));
        handler
            .join_host(&run, endpoint)
            .with_context(|| format!("cannot listen on {}", run.vcpu_socket(endpoint).display()))?;
        Ok(Box::new(handler))
    };
    run(config, pool, memory, role, Vec::new(), stop, joined)
}

fn backend<M: Memory>(
    config: &HostConfig,
    pool: &Pool,
    memory: &M,
    stop: &StopSignal,
) -> anyhow::Result<Exit> {
    anyhow::ensure!(!config.nic.is_empty(), "this host has no NIC: add a [[nic]] to its configuration");
    let mut nics = Vec::new();
    let mut configs = BTreeMap::new();
    for table in &config.nic {
        let mut nic_config = NicConfig::parse(table)?;
        if let Some(other) =
            configs.values().find(|it: &&NicConfig| it.lag.is_some() && it.lag == nic_config.lag)
        {
            anyhow::bail!(
                "the NICs {} and {} of this host are in the same lag: let the kernel bond their interfaces, and give one \
                 [[nic]] that bond; a lag here joins ports of several hosts",
                other.name,
                nic_config.name
            );
        }
        let existed = nic::exists(&nic_config);
        nics.push(nic::open(&nic_config, pool, memory)?);
        // What somebody else made is his to make again, with all that belongs to it: a bridge, an address.
        nic_config.create &= !existed;
        configs.insert(nic_config.name.clone(), nic_config);
    }
    let devices = nics.iter().map(|nic| nic.identity().report(nic.link().is_up())).collect();
    let role = Role::NetBackend;
    let joined = |reporter: Reporter, fence: Fence| -> anyhow::Result<Box<dyn Handler>> {
        let book = LeaseBook::default();
        // The watches begin before the worker exists.
        let handle = BackendWorker::default();
        let mut watched = Vec::new();
        let mut counted = Vec::new();
        for mut nic in nics {
            watch(nic.as_mut(), &reporter, &handle)?;
            let counters = Arc::new(NicCounters::default());
            let name = nic.identity().name.clone();
            let troubles = configs.get(&name).map_or_else(TroubleWatch::nothing, TroubleWatch::new);
            watched.push(WatchedNic { name, counters: Arc::clone(&counters), troubles });
            counted.push((nic, counters));
        }
        let channels = ChannelBook::default();
        let open = Box::new(opener(config, memory, &channels));
        let tell = Backend::<M>::tell_by(reporter.clone());
        let mut task = Backend::new(memory.clone(), counted, book.clone(), open, tell);
        let looks = fence.clone();
        task.set_guard(Box::new(move || looks.may_act()));
        task.set_reopening(reopening(configs, pool, memory, reporter, &handle)?);
        let worker_config = WorkerConfig::new(&config.run, config.net.backend_cpu, fence);
        let worker = Worker::spawn("net-backend", worker_config, doorbell(config, role)?, task)?;
        let _ = handle.set(worker.clone());
        Ok(Box::new(BackendHandler::new(memory.clone(), worker, book, channels, watched)))
    };
    run(config, pool, memory, role, devices, stop, joined)
}

/// Opens NICs again that failed, and hands them to the worker.
fn reopening<M: Memory>(
    configs: BTreeMap<String, NicConfig>,
    pool: &Pool,
    memory: &M,
    reporter: Reporter,
    worker: &BackendWorker,
) -> anyhow::Result<Reopening> {
    let pauses = configs.iter().map(|(name, it)| (name.clone(), Duration::from_millis(it.reopen_ms)));
    let pauses = pauses.collect();
    let (pool, memory) = (pool.clone(), memory.clone());
    let (watching, worker) = (Arc::clone(worker), Arc::clone(worker));
    let open = move |name: &str| {
        let config = configs.get(name).ok_or_else(|| NicError::Config {
            nic: name.to_owned(),
            problem: "it is not in the configuration".to_owned(),
        })?;
        let mut nic = nic::open(config, &pool, &memory)?;
        watch(nic.as_mut(), &reporter, &watching)?;
        Ok(nic)
    };
    let take = move |nic| {
        if let Some(worker) = worker.get() {
            // A worker that has ended has no use for it.
            let _ = worker.send(Order::Reopened(nic));
        }
    };
    Reopening::start(pauses, Box::new(open), Box::new(take)).context("cannot start a thread")
}

/// Tells the controller of each change of a NIC's link at once, and wakes the worker for it.
fn watch(nic: &mut dyn Nic, reporter: &Reporter, worker: &BackendWorker) -> Result<(), NicError> {
    let device = nic.identity().name.clone();
    let (reporter, worker) = (reporter.clone(), Arc::clone(worker));
    nic.watch_link(Box::new(move |up, reason| {
        reporter.report(Report::Link { device: device.clone(), up, reason: reason.to_owned() });
        tracing::info!(nic = device, up, reason, "link changed");
        if let Some(worker) = worker.get() {
            // A worker that has ended needs no news.
            let _ = worker.send(Order::LinkChanged);
        }
    }))
}

fn opener<M: Memory>(
    config: &HostConfig,
    memory: &M,
    book: &ChannelBook,
) -> impl Fn(&ChannelObject) -> Result<ChannelEnd<M>, String> + Send + 'static {
    let (memory, run, book) = (memory.clone(), config.run_directory(), book.clone());
    move |object| ChannelEnd::open(object, &memory, &run, &book)
}

fn doorbell(config: &HostConfig, role: Role) -> anyhow::Result<Option<DoorbellListener>> {
    if config.run.wakeup == Wakeup::Poll {
        return Ok(None);
    }
    let path = config.run_directory().data_doorbell(EndpointId::new(config.host.id, role));
    let listener = DoorbellListener::bind(&path)
        .with_context(|| format!("cannot create the doorbell {}", path.display()))?;
    Ok(Some(listener))
}

/// Joins the pod with the handler that `make` returns, and serves until told to stop.
fn run<M: Memory>(
    config: &HostConfig,
    pool: &Pool,
    memory: &M,
    role: Role,
    devices: Vec<DeviceReport>,
    stop: &StopSignal,
    make: impl FnOnce(Reporter, Fence) -> anyhow::Result<Box<dyn Handler>>,
) -> anyhow::Result<Exit> {
    let join = Join {
        host_name: config.host.name.clone(),
        software: concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned(),
        pid: std::process::id(),
        devices,
        memory_failures: memory_failures::recorded(pool, config, role)?,
        fence_ms: None,
    };
    let endpoint = Endpoint::try_join(pool, memory.clone(), config, role, join, make)?;
    Ok(endpoint.run_until(stop)?)
}
