//! The storage engine's daemon: frontend or backend of one host.

#![forbid(unsafe_code)]

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{CoherenceMode, EndpointId, FileIdentity, Memory, Pool, Role};
use pod_protocol::config::{HostConfig, Wakeup};
use pod_protocol::daemon::{self, Exit, StopSignal};
use pod_protocol::endpoint::{Endpoint, Handler, Reporter};
use pod_protocol::fence::Fence;
use pod_protocol::memory_failures;
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::{DeviceReport, Join};
use pod_protocol::volume_table::VolumeTable;
use pod_protocol::worker::WorkerConfig;
use tracing::{error, info, warn};
use vhost_blk_cxl::backend::{Backend, OpenedSsd, device_reports};
use vhost_blk_cxl::frontend::Frontend;
use vhost_blk_cxl::ssd::{
    self, DriverKind, LABEL_BYTES, Label, LabelError, OpenError, Ssd, SsdConfig, VhostUserSsd,
};

/// How often devices are looked for that could not be opened.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Wadi's storage engine: SSDs of the pod's hosts for unmodified virtual machines.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    side: Side,
}

#[derive(Subcommand)]
enum Side {
    /// Offers leased volumes to the VMs of this host, as vhost-user sockets.
    Frontend(Options),
    /// Serves this host's SSDs to the frontends of the pod.
    Backend(Options),
    /// Shows the volumes on an SSD, from the table that it carries; nothing need be running.
    Volumes {
        /// The file or block device, or the vhost-user socket of a program that nobody is connected to.
        path: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
struct Options {
    /// The host's configuration file.
    #[arg(long, env = "WADI_HOST_CONFIG", value_name = "FILE")]
    config: PathBuf,
    /// Speak this minor of the protocol, to try a version before all of a pod has it: this release's, or the one before.
    #[arg(long, value_name = "MINOR", value_parser = Protocol::parse_minor)]
    protocol_minor: Option<Protocol>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Side::Volumes { path, json } = &cli.side {
        return show_volumes(path, *json);
    }
    daemon::run(|stop| run(&cli, stop))
}

fn run(cli: &Cli, stop: &StopSignal) -> anyhow::Result<Exit> {
    let (role, options) = match &cli.side {
        Side::Frontend(options) => (Role::BlkFrontend, options),
        Side::Backend(options) => (Role::BlkBackend, options),
        Side::Volumes { .. } => return Ok(Exit::Stopped),
    };
    let mut config = HostConfig::load_and_follow(&options.config)?;
    config.run.protocol = options.protocol_minor.unwrap_or_default();
    let pool = Pool::open(&config.pool.path)?;
    memory_failures::watch(&pool, &config, role)?;
    match pool.superblock().mode {
        CoherenceMode::Software => serve(role, &config, &pool, pool.software(), stop),
        CoherenceMode::Hardware => serve(role, &config, &pool, pool.hardware(), stop),
    }
}

/// Opened devices under their names, and the tables of volumes of those that have one.
#[derive(Default)]
struct Ssds {
    devices: Vec<OpenedSsd>,
    labels: Vec<(String, Label)>,
    /// Those that have no place for a table, and whose volumes are wiped by their own commands.
    unwritten: Vec<String>,
    /// Those that could not be opened.
    left_out: Vec<SsdConfig>,
    /// What operators say that they can do, in requests and bytes per second.
    rates: Vec<(String, Option<u64>, Option<u64>)>,
}

fn serve<M: Memory>(
    role: Role,
    config: &HostConfig,
    pool: &Pool,
    memory: M,
    stop: &StopSignal,
) -> anyhow::Result<Exit> {
    // What is wrong with the configuration shows before the pod hears of us.
    let mut ssds = if role == Role::BlkBackend { open_ssds(config, pool)? } else { Ssds::default() };
    let join = Join {
        host_name: config.host.name.clone(),
        software: concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned(),
        pid: std::process::id(),
        devices: reports(&ssds),
        memory_failures: memory_failures::recorded(pool, config, role)?,
        fence_ms: None,
    };
    let left_out = std::mem::take(&mut ssds.left_out);
    let endpoint = Endpoint::try_join(pool, memory.clone(), config, role, join, |reporter, fence| {
        start(role, config, memory, ssds, reporter, fence, pool.file_identity())
    })?;
    let found = look_for(left_out, config, pool, stop)?;
    Ok(match endpoint.run_until(stop)? {
        Exit::Stopped if found.load(Ordering::Acquire) => Exit::Again,
        exit => exit,
    })
}

/// Opens all SSDs that can be opened. One that cannot, because it is broken or not there yet, keeps nobody from using the others, unless a
/// predecessor's requests may be under way there: they would fill memory that is in use again by then.
fn open_ssds(config: &HostConfig, pool: &Pool) -> anyhow::Result<Ssds> {
    let mut opened = Ssds::default();
    let mut errors = Vec::new();
    for ssd in SsdConfig::parse_all(&config.ssd)? {
        match open_ssd(&ssd, config, pool) {
            Ok((device, label)) => {
                opened.rates.push((ssd.name.clone(), ssd.iops, ssd.bytes_per_second));
                opened.devices.push(device);
                if let (DriverKind::VhostUser { .. }, None) = (&ssd.driver, &label) {
                    opened.unwritten.push(ssd.name.clone());
                }
                opened.labels.extend(label.map(|label| (ssd.name, label)));
            }
            Err(error) if error.downcast_ref::<OpenError>().is_some_and(|error| !error.may_pass()) => {
                return Err(error);
            }
            Err(error) if error.downcast_ref::<OpenError>().is_some_and(OpenError::may_hide_requests) => {
                return Err(error.context(
                    "requests of a process of before may still be under way on an SSD, with memory of the pool: the backend cannot start \
                     before they have ended",
                ));
            }
            Err(error) => {
                errors.push(error);
                opened.left_out.push(ssd);
            }
        }
    }
    if opened.devices.is_empty() && !errors.is_empty() {
        return Err(errors.swap_remove(0));
    }
    for (ssd, error) in opened.left_out.iter().zip(errors) {
        error!(ssd = ssd.name, %error, "the device is left out, and its volumes are not served: once it can be opened the daemon \
            starts again by itself");
    }
    Ok(opened)
}

fn open_ssd(
    config: &SsdConfig,
    host: &HostConfig,
    pool: &Pool,
) -> anyhow::Result<(OpenedSsd, Option<Label>)> {
    let losses = host.run_directory().lost_writes(host.host.id, &config.name);
    // The driver first: it makes a file that is not there, and keeps others from it.
    let mut ssd = OpenedSsd::new(&config.name, ssd::open(config, pool, Some(losses))?);
    ssd.request_timeout = config.request_timeout;
    ssd.queue_depth = config.queue_depth;
    let label = match &config.driver {
        DriverKind::File { path, .. } => {
            let mut label = Label::open(path)?;
            // Before it is anybody's: one that is put in its place has none, or another one.
            label.identify()?;
            Some(label)
        }
        DriverKind::VhostUser { socket, .. } => {
            table_of_another_program(&config.name, socket, &mut *ssd.ssd)?
        }
        DriverKind::Null { .. } => None,
    };
    if let Some(error) = label.as_ref().and_then(Label::missing_copy) {
        warn!(ssd = config.name, %error, "{MISSING_COPY}");
    }
    Ok((ssd, label))
}

/// What is said where one copy of a table cannot be read.
const MISSING_COPY: &str = "one of two copies of the table of volumes cannot be read: the other one counts, which may be the older one";

/// The table on another program's disk. Nothing is written there before the controller has said what is on it: of a pod that began before
/// there were tables on such disks, that may be a volume. Where something else lies that is told in the log, and there is none.
fn table_of_another_program(ssd: &str, socket: &Path, device: &mut dyn Ssd) -> anyhow::Result<Option<Label>> {
    let Some(beginning) = device.read_beginning(LABEL_BYTES) else { return Ok(None) };
    // One that hangs may be at work for a process of before, as one that does not let anybody in.
    let (found, scratch) = beginning.map_err(|source| OpenError::Io {
        ssd: ssd.to_owned(),
        what: "read the table of volumes at",
        path: socket.display().to_string(),
        source,
    })?;
    match Label::of_commands(socket, found, scratch) {
        Ok(label) => Ok(Some(label)),
        Err(error @ (LabelError::Foreign { .. } | LabelError::TooSmall { .. })) => {
            warn!(ssd, %error, "its volumes are known to the controller only: no table of them is kept on it");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Stops the daemon, and says so, when one of the devices can be opened that could not be. The pod hears of devices from one that
/// begins.
fn look_for(
    left_out: Vec<SsdConfig>,
    host: &HostConfig,
    pool: &Pool,
    stop: &StopSignal,
) -> anyhow::Result<Arc<AtomicBool>> {
    let found = Arc::new(AtomicBool::new(false));
    if left_out.is_empty() {
        return Ok(found);
    }
    let (host, pool, stop, told) = (host.clone(), pool.clone(), stop.clone(), Arc::clone(&found));
    // Nobody waits for its end: one that hangs is no reason to stay.
    thread::Builder::new().name("left-out".to_owned()).spawn(move || {
        while !stop.wait_for(LOOK_EVERY) {
            let opens = |ssd: &&SsdConfig| open_ssd(ssd, &host, &pool).is_ok();
            if let Some(ssd) = left_out.iter().find(opens) {
                info!(ssd = ssd.name, "the device can be opened by now: the daemon starts again");
                told.store(true, Ordering::Release);
                stop.stop();
            }
        }
    })?;
    Ok(found)
}

fn reports(opened: &Ssds) -> Vec<DeviceReport> {
    let mut reports = device_reports(opened.devices.iter().map(|it| (it.name.as_str(), it.ssd.as_ref())));
    for report in &mut reports {
        if let DeviceReport::Ssd { name, iops, bytes_per_second, .. } = report
            && let Some((_, requests, bytes)) = opened.rates.iter().find(|(known, ..)| known == name)
        {
            (*iops, *bytes_per_second) = (*requests, *bytes);
        }
        if let DeviceReport::Ssd { name, table, reserved_bytes, identity, .. } = report
            && let Some((_, label)) = opened.labels.iter().find(|(labelled, _)| labelled == name)
        {
            *table = Some(label.table().clone());
            *reserved_bytes = LABEL_BYTES;
            *identity = label.identity();
        }
        if let DeviceReport::Ssd { name, table, .. } = report
            && opened.unwritten.contains(name)
        {
            // What is there, the controller says.
            *table = Some(VolumeTable::default());
        }
    }
    reports
}

/// The table on a file, a block device, or the disk of another program that serves it on a vhost-user socket.
fn inspect(path: &Path) -> anyhow::Result<Label> {
    if !path.metadata().is_ok_and(|metadata| metadata.file_type().is_socket()) {
        return Ok(Label::inspect(path)?);
    }
    let mut ssd = VhostUserSsd::look_at(path)
        .context("such a program may serve one at a time: is a backend connected to it?")?;
    let (found, scratch) = ssd.read_beginning(LABEL_BYTES).context("it tells nothing")??;
    Ok(Label::of_commands(path, found, scratch)?)
}

fn show_volumes(path: &Path, json: bool) -> ExitCode {
    let label = match inspect(path) {
        Ok(label) => label,
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    if let Some(error) = label.missing_copy() {
        eprintln!("{MISSING_COPY} ({error})");
    }
    let table = label.table();
    if json {
        match serde_json::to_string_pretty(table) {
            Ok(text) => println!("{text}"),
            Err(error) => eprintln!("{error}"),
        }
        return ExitCode::SUCCESS;
    }
    for entry in &table.volumes {
        let state = if entry.deleted { " (deleted, not yet wiped)" } else { "" };
        println!("{}: {} bytes from {}{state}", entry.name, entry.size_bytes, entry.start_bytes);
        if let Some(stripe) = &entry.stripe {
            println!(
                "  column {} of {} bytes on {}, {} bytes from each by turns",
                stripe.number,
                stripe.volume_bytes,
                stripe.ssds.join(", "),
                stripe.unit_bytes
            );
        }
        let Some(mirror) = &entry.mirror else { continue };
        match label.read_intent_log(entry.id) {
            Ok(None) => println!("  no log says where replicas may differ"),
            Ok(Some(log)) => println!(
                "  replicas may differ in {} parts of {} bytes",
                log.marked.iter().count(),
                log.unit_bytes()
            ),
            Err(error) => eprintln!("{error}"),
        }
        for member in &mirror.replicas {
            let state = if member.stale { "stale: its data must not be used" } else { "in sync" };
            let own = if member.number == mirror.number { ", this one" } else { "" };
            println!(
                "  in epoch {}: replica {} on {}{own}: {state}",
                mirror.epoch, member.number, member.ssd
            );
        }
    }
    if table.volumes.is_empty() {
        println!("no volumes");
    }
    ExitCode::SUCCESS
}

fn start<M: Memory>(
    role: Role,
    config: &HostConfig,
    memory: M,
    opened: Ssds,
    reporter: Reporter,
    fence: Fence,
    pool_file: FileIdentity,
) -> anyhow::Result<Box<dyn Handler>> {
    let run = config.run_directory();
    let doorbell = match config.run.wakeup {
        Wakeup::Socket => {
            let path = run.data_doorbell(EndpointId::new(config.host.id, role));
            Some(DoorbellListener::bind(&path).with_context(|| format!("cannot bind {}", path.display()))?)
        }
        Wakeup::Poll => None,
    };
    Ok(if role == Role::BlkFrontend {
        let worker = WorkerConfig::new(&config.run, config.blk.frontend_cpu, fence);
        let mut frontend = Frontend::start(memory, run, worker, doorbell, Some(reporter), Some(pool_file))?;
        frontend.set_replica_timeout(config.blk.replica_timeout());
        frontend.set_host(config.host.id).map_err(anyhow::Error::msg)?;
        let (run, endpoint) = (config.run_directory(), EndpointId::new(config.host.id, role));
        frontend
            .join_host(&run, endpoint)
            .with_context(|| format!("cannot listen on {}", run.vcpu_socket(endpoint).display()))?;
        Box::new(frontend)
    } else {
        let worker = WorkerConfig::new(&config.run, config.blk.backend_cpu, fence);
        let mut backend = Backend::start(memory, run, worker, doorbell, opened.devices, Some(reporter))?;
        backend.keep_tables(opened.labels);
        backend.wipe_by_commands(opened.unwritten);
        Box::new(backend)
    })
}
