//! `vhost-net-cxl frontend|backend --config host.toml`

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use pod_protocol::protocol::Protocol;
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
    Frontend(Options),
    /// Serve the NICs of this host to the pod.
    Backend(Options),
}

#[derive(Args)]
struct Options {
    /// The host's configuration.
    #[arg(long)]
    config: PathBuf,
    /// Speak this minor of the protocol, to try a version before all of a pod has it: this release's, or the one before.
    #[arg(long, value_name = "MINOR", value_parser = Protocol::parse_minor)]
    protocol_minor: Option<Protocol>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    pod_protocol::daemon::run(|stop| match &arguments.side {
        Side::Frontend(options) => {
            run_frontend(&options.config, options.protocol_minor.unwrap_or_default(), stop)
        }
        Side::Backend(options) => {
            run_backend(&options.config, options.protocol_minor.unwrap_or_default(), stop)
        }
    })
}
