//! The storage engine's daemon: frontend or backend of one host.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::{CoherenceMode, EndpointId, Memory, Pool, Role};
use pod_protocol::config::{HostConfig, Wakeup};
use pod_protocol::daemon::{self, Exit, StopSignal};
use pod_protocol::endpoint::{Endpoint, Handler, Reporter};
use pod_protocol::fence::Fence;
use pod_protocol::reports::{DeviceReport, Join};
use pod_protocol::worker::WorkerConfig;
use vhost_blk_cxl::backend::{Backend, device_reports};
use vhost_blk_cxl::frontend::Frontend;
use vhost_blk_cxl::ssd::{self, Ssd, SsdConfig};

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
}

#[derive(Args)]
struct Options {
    /// The host's configuration file.
    #[arg(long, env = "WADI_HOST_CONFIG", value_name = "FILE")]
    config: PathBuf,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    daemon::run(|stop| run(&cli, stop))
}

fn run(cli: &Cli, stop: &StopSignal) -> anyhow::Result<Exit> {
    let (role, options) = match &cli.side {
        Side::Frontend(options) => (Role::BlkFrontend, options),
        Side::Backend(options) => (Role::BlkBackend, options),
    };
    let config = HostConfig::load(&options.config)?;
    let pool = Pool::open(&config.pool.path)?;
    match pool.superblock().mode {
        CoherenceMode::Software => serve(role, &config, &pool, pool.software(), stop),
        CoherenceMode::Hardware => serve(role, &config, &pool, pool.hardware(), stop),
    }
}

/// An opened device under its name.
type NamedSsd = (String, Box<dyn Ssd>);

fn serve<M: Memory>(
    role: Role,
    config: &HostConfig,
    pool: &Pool,
    memory: M,
    stop: &StopSignal,
) -> anyhow::Result<Exit> {
    // What is wrong with the configuration shows before the pod hears of us.
    let ssds = if role == Role::BlkBackend { open_ssds(config, pool)? } else { Vec::new() };
    let join = Join {
        host_name: config.host.name.clone(),
        software: concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned(),
        pid: std::process::id(),
        devices: reports(&ssds),
    };
    let endpoint = Endpoint::try_join(pool, memory.clone(), config, role, join, |reporter, fence| {
        start(role, config, memory, ssds, reporter, fence, pool.file_identity())
    })?;
    Ok(endpoint.run_until(stop)?)
}

fn open_ssds(config: &HostConfig, pool: &Pool) -> anyhow::Result<Vec<NamedSsd>> {
    let configured = SsdConfig::parse_all(&config.ssd)?;
    configured.into_iter().map(|ssd| Ok((ssd.name.clone(), ssd::open(&ssd, pool)?))).collect()
}

fn reports(ssds: &[NamedSsd]) -> Vec<DeviceReport> {
    device_reports(ssds.iter().map(|(name, ssd)| (name.as_str(), ssd.as_ref())))
}

fn start<M: Memory>(
    role: Role,
    config: &HostConfig,
    memory: M,
    ssds: Vec<NamedSsd>,
    reporter: Reporter,
    fence: Fence,
    pool_file: (u64, u64),
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
        Box::new(Frontend::start(memory, run, worker, doorbell, Some(reporter), Some(pool_file))?)
    } else {
        let worker = WorkerConfig::new(&config.run, config.blk.backend_cpu, fence);
        Box::new(Backend::start(memory, run, worker, doorbell, ssds, Some(reporter))?)
    })
}
