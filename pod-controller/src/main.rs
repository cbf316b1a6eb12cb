//! The pod controller's daemon.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use cxl_pool::Pool;
use pod_controller::config::Config;
use pod_controller::controller::{Controller, ControllerError, EtcdController, Handle};
use pod_controller::copiers;
use pod_controller::reload::Reload;
use pod_controller::replication::Replica;
use pod_controller::rest::{self, Access, Listeners};
use pod_controller::store::Store;
use pod_controller::store::etcd::EtcdAddress;
use pod_protocol::daemon::{self, Exit, StopSignal};
use pod_protocol::protocol::Protocol;
use tokio::signal::unix::{Signal, SignalKind, signal};
use uuid::Uuid;

/// How long requests under way may take when the controller is told to stop.
const STOP_GRACE: Duration = Duration::from_millis(200);

/// Decides who uses which NIC, SSD and part of the pool, and serves the API that podctl asks.
///
/// Instances go on working while it is away: stop and restart it at any time. On SIGHUP it reads its certificates, its tokens,
/// and `log` and `tls.client` of its configuration anew, and goes on in a new audit log if the old one was moved. Example:
///
///     pod-controller --config /etc/wadi/controller.toml
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
struct Arguments {
    /// The configuration file
    #[arg(long, default_value = "/etc/wadi/controller.toml")]
    config: PathBuf,
    /// Go on with this new pool where the one of the state file is gone; volumes and instances stay
    ///
    /// A pool in memory does not survive the power. The id says which pool is meant, so that no other is taken by
    /// accident; afterwards it changes nothing any more.
    #[arg(long, value_name = "POOL-ID")]
    adopt_pool: Option<Uuid>,
    /// Keep the state in an etcd instead of a file: etcd://HOST:2379,HOST:2379/PREFIX, or etcds:// over TLS
    #[arg(long, value_name = "ADDRESS")]
    store: Option<EtcdAddress>,
    /// Begin the life of a pod with several controllers, as the first of them, or of one whose state etcd keeps
    ///
    /// It goes on with the state file of a single controller, if there is one. Needs [replication] in the configuration,
    /// or --store; other replicas are started without this and join. Afterwards it changes nothing any more.
    #[arg(long)]
    bootstrap: bool,
    /// Speak this minor of the protocol, to try a version before all of a pod has it: this release's, or the one before
    #[arg(long, value_name = "MINOR", value_parser = Protocol::parse_minor)]
    protocol_minor: Option<Protocol>,
}

/// A single controller, with its state in a file or in an etcd, or one of several.
enum Core {
    Single(Controller),
    Etcd(Box<EtcdController>),
    Replica(Box<Replica>),
}

impl Core {
    const fn replica(&self) -> Option<&Replica> {
        match self {
            Self::Replica(replica) => Some(replica),
            Self::Single(_) | Self::Etcd(_) => None,
        }
    }

    fn run(self) -> Result<(), ControllerError> {
        match self {
            Self::Single(controller) => controller.run(),
            Self::Etcd(controller) => controller.run(),
            Self::Replica(replica) => replica.run(),
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    daemon::run(|stop| run(&arguments, stop))
}

fn run(arguments: &Arguments, stop: &StopSignal) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("cannot start the API's thread")?;
    // From now on it does not end us.
    let hangup = runtime.block_on(async { signal(SignalKind::hangup()) }).context("cannot handle SIGHUP")?;
    let loaded = Config::load(&arguments.config)?;
    daemon::set_log_level(loaded.controller.log.as_deref())?;
    let mut config = loaded.clone();
    config.controller.adopt_pool = arguments.adopt_pool.or(config.controller.adopt_pool);
    config.run.protocol = arguments.protocol_minor.unwrap_or_default();
    config.controller.store = arguments.store.clone().or(config.controller.store);
    let pool = if config.is_outside() {
        None
    } else {
        let pool = Arc::new(Pool::open(&config.pool.path)?);
        cxl_pool::poison::watch(&pool, &config.pool.path, None)?;
        Some(pool)
    };
    if let Some(parent) = config.controller.state.parent() {
        std::fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {} for the state file", parent.display()))?;
    }
    let access = Access::open(&config.access_policy())?;
    let (core, handle) = open(pool.as_ref(), &config, arguments.bootstrap)?;
    let listeners = runtime.block_on(Listeners::bind(&config.listen(), config.listen_tcp()))?;
    let address = listeners.tcp_address();
    let reload = Reload::new(&arguments.config, &loaded, (&access, &handle), &listeners, core.replica());
    runtime.spawn(reload_on(hangup, reload));
    runtime.spawn(copiers::run(handle.clone()));
    let router = access.guard(rest::router(handle.clone()));
    let serving = runtime.spawn(listeners.serve(router));
    let core = std::thread::Builder::new()
        .name("controller".to_owned())
        .spawn({
            let stop = stop.clone();
            move || {
                let result = core.run();
                stop.stop();
                result
            }
        })
        .context("cannot start the controller's thread")?;

    let over_tcp = address.map(|address| format!(" and {address}")).unwrap_or_default();
    tracing::info!("ready: the API listens on {}{over_tcp}", config.listen().display());
    daemon::notify_ready();
    stop.wait();

    handle.stop();
    serving.abort();
    runtime.block_on(async {
        // Aborted on purpose; dropping it removed the socket.
        let _ = serving.await;
    });
    runtime.shutdown_timeout(STOP_GRACE);
    match core.join() {
        Ok(result) => result?,
        Err(_) => anyhow::bail!("the controller's thread panicked: see the log"),
    }
    Ok(Exit::Stopped)
}

async fn reload_on(mut hangup: Signal, mut reload: Reload) {
    while hangup.recv().await.is_some() {
        reload.reload();
    }
}

fn open(pool: Option<&Arc<Pool>>, config: &Config, bootstrap: bool) -> anyhow::Result<(Core, Handle)> {
    let (replica, etcd) = (config.replication.as_ref(), config.etcd().map_err(anyhow::Error::msg)?);
    let Some(pool) = pool else {
        // Only a replica does without one.
        let section = replica.context("there is no pool, and no [replication]")?;
        let (replica, handle) = with_silent_panics(|| Replica::open(None, config, section, bootstrap))?;
        return Ok((Core::Replica(Box::new(replica)), handle));
    };
    if let Some((address, credentials)) = etcd {
        let (controller, handle) =
            with_silent_panics(|| EtcdController::open(pool, config, (address, &credentials), bootstrap))?;
        return Ok((Core::Etcd(Box::new(controller)), handle));
    }
    if let Some(section) = replica {
        let (replica, handle) = with_silent_panics(|| Replica::open(Some(pool), config, section, bootstrap))?;
        return Ok((Core::Replica(Box::new(replica)), handle));
    }
    anyhow::ensure!(
        !bootstrap,
        "--bootstrap is for one of several controllers, or one with etcd: add [replication] to the configuration, or \
         --store"
    );
    let kept = with_silent_panics(|| Store::open(&config.controller.state))?;
    let (controller, handle) = Controller::open(pool, config, kept)?;
    Ok((Core::Single(controller), handle))
}

/// A damaged state file makes the database panic, which the store turns into an error. Until then nothing runs that a
/// panic could leave half done, so it need not end the process.
fn with_silent_panics<T>(body: impl FnOnce() -> T) -> T {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = body();
    std::panic::set_hook(hook);
    outcome
}
