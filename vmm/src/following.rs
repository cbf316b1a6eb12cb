//! `vmm follow`, which `vmm run` does for its own machine.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use pod_api::client::{CONTROLLER, Client, Credentials, Server};
use vmm::{Follower, Registry, RunningVm, VmmError};

/// How long libvirt may take until it answers for a domain that has just started, or receives its guest, or after libvirt's daemon was
/// started anew; and how often it is asked meanwhile.
const LIBVIRT: Duration = Duration::from_mins(5);
const AGAIN: Duration = Duration::from_millis(200);

#[derive(Args)]
pub(crate) struct Follow {
    /// The machine, as `vmm list` names it; its instance has the same name.
    name: String,
    /// Where the controller listens.
    #[arg(long, env = "WADI_CONTROLLER", help_heading = CONTROLLER, default_value = "unix:/run/wadi/controller.sock")]
    server: Server,
    #[command(flatten)]
    credentials: Credentials,
    /// Where machines are noted.
    #[arg(long, default_value = "/run/wadi/vm")]
    directory: PathBuf,
}

pub(crate) fn follow(asked: &Follow) -> Result<()> {
    let registry = Registry::new(&asked.directory);
    let machine = registry.find(&asked.name)?;
    let client = asked.credentials.client(&asked.server)?;
    let instance = client.instance(&machine.name)?;
    if let Some(migration) = &instance.migration {
        bail!(
            "{} is moving from {} to {}: follow it once it is there",
            machine.name,
            instance.host,
            migration.to
        );
    }
    Follower::new(client, &registry, machine, instance.host)?.follow(|what| eprintln!("{what}"));
    Ok(())
}

/// Follows the instance of a machine that was just started, for as long as this process runs.
pub(crate) fn begin(client: Client, directory: &Path, machine: RunningVm, host: String) -> Result<()> {
    let follower = Follower::new(client, &Registry::new(directory), machine, host)?;
    thread::Builder::new()
        .name("follow".to_owned())
        .spawn(move || follower.follow(|what| eprintln!("{what}")))?;
    Ok(())
}

/// Follows the instance of a libvirt domain on this host, which is just starting, until it ends.
pub(crate) fn follow_domain(
    client: Client,
    directory: &Path,
    domain: &str,
    uri: &str,
    instance: &str,
    host: String,
) -> Result<()> {
    let registry = Registry::new(directory);
    let began = Instant::now();
    let (machine, _) = loop {
        match vmm::attach_domain(domain, Some(uri), Some(instance)) {
            Err(VmmError::Silent { .. }) if began.elapsed() < LIBVIRT => thread::sleep(AGAIN),
            found => break found?,
        }
    };
    registry.add(&machine)?;
    Follower::new(client, &registry, machine, host)?.follow(|what| eprintln!("{what}"));
    Ok(())
}
