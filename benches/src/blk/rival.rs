//! qemu-storage-daemon, which serves a local file to a guest of its own host.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::QUEUES_MAX;
use super::cpu::{Threads, threads_of};
use crate::cores::{self, Cores};

const PROGRAM: &str = "qemu-storage-daemon";
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn is_installed() -> bool {
    let version = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

/// How it uses its file. Which is quicker depends on the file: io_uring hands what the file cannot do at once to a thread of the kernel,
/// so each request on a tmpfs.
#[derive(Clone, Copy)]
pub(super) enum Aio {
    IoUring,
    Native,
}

impl Aio {
    const fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Native => "native",
        }
    }
}

pub(super) struct Rival {
    process: Child,
    sockets: Vec<PathBuf>,
}

impl Rival {
    /// Serves the file, or null-co without one, in a thread of its own on the sender's core, as so many disks that share
    /// it evenly. The last one may do no more than `limit` requests per second.
    pub(super) fn start(
        file: Option<&Path>,
        aio: Aio,
        device_bytes: u64,
        disks: u16,
        limit: Option<u32>,
        directory: &Path,
        cores: Cores,
    ) -> Result<Self> {
        let sockets: Vec<_> = (0..disks).map(|disk| directory.join(format!("qsd{disk}.sock"))).collect();
        cores::pin(cores.sender)?;
        let mut command = Command::new(PROGRAM);
        command.args(["--object", "iothread,id=io0"]).stdin(Stdio::null());
        let disk_bytes = device_bytes / u64::from(disks);
        if let Some(per_second) = limit {
            command.args(["--object", &format!("throttle-group,id=limit,x-iops-total={per_second}")]);
        }
        for (disk, socket) in (0u64..).zip(&sockets) {
            let _ = std::fs::remove_file(socket);
            // Each opens the file for itself: version 7.2 crashes when two exports of a thread share a node.
            let node = match file {
                Some(path) => {
                    let (shown, aio) = (path.display(), aio.name());
                    format!(
                        "driver=file,node-name=f{disk},filename={shown},cache.direct=on,aio={aio},locking=off"
                    )
                }
                None => format!("driver=null-co,node-name=f{disk},size={device_bytes},read-zeroes=off"),
            };
            let offset = disk_bytes * disk;
            command.args(["--blockdev", &node, "--blockdev"]);
            command
                .arg(format!("driver=raw,node-name=d{disk},file=f{disk},offset={offset},size={disk_bytes}"));
            let limited = limit.is_some() && disk + 1 == u64::from(disks);
            if limited {
                let filter = format!("driver=throttle,node-name=t{disk},throttle-group=limit,file=d{disk}");
                command.args(["--blockdev", &filter]);
            }
            let top = if limited { "t" } else { "d" };
            command.arg("--export");
            command.arg(format!(
                "type=vhost-user-blk,id=e{disk},node-name={top}{disk},addr.type=unix,addr.path={},writable=on,\
                 num-queues={QUEUES_MAX},iothread=io0",
                socket.display()
            ));
        }
        let process = command.spawn().with_context(|| format!("cannot start {PROGRAM}"))?;
        let mut rival = Self { process, sockets };
        let began = Instant::now();
        while !rival.sockets.iter().all(|socket| socket.exists()) {
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

    pub(super) fn socket(&self, disk: usize) -> &Path {
        &self.sockets[disk]
    }

    pub(super) fn threads(&self) -> Result<Threads> {
        Ok([threads_of(&self.process.id().to_string(), |_| true)?, Vec::new()])
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
