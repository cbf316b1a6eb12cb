//! `vhost-net-cxl frontend|backend --config host.toml`

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use vhost_net_cxl::daemon::{run_backend, run_frontend};

/// The network engine of Wadi.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    side: Side,
}

#[derive(Subcommand)]
enum Side {
    /// Offer virtio-net devices to the VMs of this host.
    Frontend {
        /// The host's configuration.
        #[arg(long)]
        config: PathBuf,
    },
    /// Serve the NICs of this host to the pod.
    Backend {
        /// The host's configuration.
        #[arg(long)]
        config: PathBuf,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    pod_protocol::daemon::run(|stop| match &arguments.side {
        Side::Frontend { config } => run_frontend(config, stop),
        Side::Backend { config } => run_backend(config, stop),
    })
}
