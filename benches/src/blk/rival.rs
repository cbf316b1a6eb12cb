//! qemu-storage-daemon, which serves a local file to a guest of its own host.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::load::threads_of;
use crate::cores::{self, Cores};

const PROGRAM: &str = "qemu-storage-daemon";
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn is_installed() -> bool {
    let version = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

pub(super) struct Rival {
    process: Child,
    socket: PathBuf,
}

impl Rival {
    /// Serves the file, or null-co without one, in a thread of its own on the sender's core.
    pub(super) fn start(
        file: Option<&Path>,
        disk_bytes: u64,
        directory: &Path,
        cores: Cores,
    ) -> Result<Self> {
        let socket = directory.join("qsd.sock");
        let _ = std::fs::remove_file(&socket);
        let node = match file {
            Some(path) => {
                format!("driver=file,node-name=f0,filename={},cache.direct=on,aio=io_uring", path.display())
            }
            None => format!("driver=null-co,node-name=f0,size={disk_bytes},read-zeroes=off"),
        };
        cores::pin(cores.sender)?;
        let process = Command::new(PROGRAM)
            .args(["--object", "iothread,id=io0", "--blockdev", &node])
            .args(["--blockdev", "driver=raw,node-name=d0,file=f0", "--export"])
            .arg(format!(
                "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on,num-queues=1,iothread=io0",
                socket.display()
            ))
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {PROGRAM}"))?;
        let mut rival = Self { process, socket };
        let began = Instant::now();
        while !rival.socket.exists() {
            if let Some(status) = rival.process.try_wait()? {
                bail!("{PROGRAM} ended: {status}");
            }
            if began.elapsed() > PATIENCE {
                bail!("{PROGRAM} made no socket within {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(rival)
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn threads(&self) -> Result<Vec<PathBuf>> {
        threads_of(&self.process.id().to_string())
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
