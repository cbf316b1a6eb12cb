//! `vmm plug-memory` and `vmm unplug-memory`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::print;

/// Of which machine the memory is.
#[derive(Args)]
struct Of {
    /// The instance, as the controller knows it.
    #[arg(long)]
    instance: String,
    /// Where the machine has its monitor.
    #[arg(long, default_value = "/run/wadi/vm")]
    directory: PathBuf,
}

impl Of {
    fn monitor(&self) -> PathBuf {
        self.directory.join(format!("{}-qmp.sock", self.instance))
    }
}

#[derive(Args)]
pub(crate) struct Plug {
    #[command(flatten)]
    of: Of,
    /// How many MiB, a multiple of 128.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    mib: u32,
}

#[derive(Args)]
pub(crate) struct Unplug {
    #[command(flatten)]
    of: Of,
    /// For how many seconds the guest may take to let go of it.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    wait: u64,
}

pub(crate) fn plug(asked: &Plug) -> Result<()> {
    vmm::plug_memory(&asked.of.monitor(), asked.mib)?;
    print(&format!("{} has {} MiB more\n", asked.of.instance, asked.mib))
}

pub(crate) fn unplug(asked: &Unplug) -> Result<()> {
    let mib = vmm::unplug_memory(&asked.of.monitor(), Duration::from_secs(asked.wait))?;
    print(&format!("{} has {mib} MiB less\n", asked.of.instance))
}
