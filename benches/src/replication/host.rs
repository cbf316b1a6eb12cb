//! A host with daemons of its own, which can be killed together.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

/// What it is called.
pub(super) const NAME: &str = "h4";
/// The daemons of a host that has a NIC, an SSD and VMs.
const DAEMONS: [(&str, &str); 4] = [
    ("vhost-net-cxl", "backend"),
    ("vhost-blk-cxl", "backend"),
    ("vhost-net-cxl", "frontend"),
    ("vhost-blk-cxl", "frontend"),
];

/// A host's daemons, as processes.
pub(super) struct Host(Vec<Child>);

impl Host {
    /// Starts them. `memory` has the pool; logs go to `disk`.
    pub(super) fn start(memory: &Path, disk: &Path) -> Result<Self> {
        let root = memory.display();
        let config = disk.join("host.toml");
        let text = format!(
            "[host]\nid = 4\nname = '{NAME}'\n[pool]\npath = '{root}/pool'\n[run]\ndirectory = '{root}/run'\n\
             [[nic]]\nname = 'nic0'\ndriver = 'null'\n[[ssd]]\nname = 'ssd0'\ndriver = 'null'\nsize = '64M'\n"
        );
        fs::write(&config, text)?;
        let mut host = Self(Vec::new());
        for (program, role) in DAEMONS {
            let binary = std::env::current_exe()?.with_file_name(program);
            ensure!(binary.exists(), "{} is not built: make build", binary.display());
            let log = File::options().create(true).append(true).open(disk.join("host.log"))?;
            let mut command = Command::new(binary);
            command.arg(role).arg("--config").arg(&config).stdin(Stdio::null()).stderr(log);
            host.0.push(command.spawn().with_context(|| format!("cannot start {program} {role}"))?);
        }
        Ok(host)
    }

    /// How many daemons it has.
    pub(super) const fn daemons() -> usize {
        DAEMONS.len()
    }

    /// As if it had lost its power. Returns when that was.
    pub(super) fn kill(mut self) -> Result<Instant> {
        let killed = Instant::now();
        for child in &mut self.0 {
            child.kill()?;
        }
        Ok(killed)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that has ended needs no killing.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
