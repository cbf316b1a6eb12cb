//! A disk that another program has: qemu-storage-daemon, which serves a file to a host of the pod by vhost-user-blk.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::pod::Pod;
use crate::process::Daemon;
use crate::waiting::wait_for;

/// The disk; dropping it ends the program.
#[derive(Debug)]
pub struct ForeignDisk {
    socket: PathBuf,
    file: PathBuf,
    /// So many requests per second it does, whatever their length; as many as it can, if none is said.
    iops: Option<u32>,
    daemon: Option<Daemon>,
}

impl ForeignDisk {
    /// Starts it with a file of this many bytes, for the SSD of a host that is planned so
    /// ([`HostPlan::foreign_ssd`](crate::pod::HostPlan::foreign_ssd)).
    pub fn start(pod: &Pod, host: &str, ssd: &str, bytes: u64, iops: Option<u32>) -> Result<Self> {
        let file = pod.directory().join(format!("{host}-{ssd}.img"));
        File::create(&file)?.set_len(bytes)?;
        let mut disk = Self { socket: pod.ssd_socket(host, ssd), file, iops, daemon: None };
        disk.serve(pod, host)?;
        Ok(disk)
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Kills the program.
    pub fn kill(&mut self) -> Result<()> {
        self.daemon.take().map_or(Ok(()), |mut daemon| daemon.kill())
    }

    /// Has another one serve the same file.
    ///
    /// # Panics
    /// When it does not listen within a minute.
    pub fn serve(&mut self, pod: &Pod, host: &str) -> Result<()> {
        let _ = std::fs::remove_file(&self.socket);
        let mut command = pod.host(host)?.command("qemu-storage-daemon".as_ref());
        command.args(["--blockdev", &format!("driver=file,node-name=file,filename={}", self.file.display())]);
        command.args(["--blockdev", "driver=raw,node-name=raw,file=file"]);
        let node = if let Some(iops) = self.iops {
            command.args(["--object", &format!("throttle-group,id=slow,x-iops-total={iops}")]);
            command.args(["--blockdev", "driver=throttle,node-name=slow,throttle-group=slow,file=raw"]);
            "slow"
        } else {
            "raw"
        };
        let socket = self.socket.display();
        let export = format!("type=vhost-user-blk,id=export,node-name={node},writable=on,addr.type=unix");
        command.args(["--export", &format!("{export},addr.path={socket}")]);
        let log = pod.directory().join(format!("log/{host}-foreign-disk.log"));
        let daemon = Daemon::start("qemu-storage-daemon", command, &log)?;
        wait_for(&format!("qemu-storage-daemon on {socket}, see {}", log.display()), || self.socket.exists());
        self.daemon = Some(daemon);
        Ok(())
    }
}
