//! What is measured, with its driver.

use std::time::Duration;

use anyhow::{Context, Result};
use vhost_blk_cxl::ssd::DriverKind;

use super::cpu::Threads;
use super::load::{Load, Measured, Waiting, anonymous_ram};
use super::ours::Ours;
use super::plain::Plain;
use super::rival::{Aio, Rival};
use super::{DEVICE_BYTES, Files, Job, Medium, Server};
use crate::cores::{self, Cores};

/// Who answers.
enum Serving {
    /// With the other program, if that is its SSD: the last one to go.
    Ours {
        ours: Box<Ours>,
        _behind: Option<Rival>,
    },
    Rival(Rival),
    Plain(Box<Plain>),
}

/// A server that runs, and drivers of its disks.
pub(super) struct Target {
    // The drivers first: servers wait for them.
    loads: Vec<Load>,
    queues: u16,
    serving: Serving,
    disks: u16,
    cores: Cores,
}

impl Target {
    /// Starts a server of so many disks, of which the last one may do no more than `limit` requests per second.
    pub(super) fn start(
        server: Server,
        medium: Medium,
        files: &Files,
        disks: u16,
        limit: Option<u32>,
        cores: Cores,
    ) -> Result<Self> {
        let (file, directory) = (files.of(medium), &files.directory);
        let serving = match (server, server.mode()) {
            (_, Some(mode)) => {
                let behind = (medium == Medium::VhostUser)
                    .then(|| Rival::start(file, Aio::Native, DEVICE_BYTES, 1, None, directory, cores))
                    .transpose()?;
                let driver = match (&behind, file) {
                    (Some(rival), _) => {
                        DriverKind::VhostUser { socket: rival.socket(0).to_owned(), patience: Duration::ZERO }
                    }
                    (None, Some(path)) => {
                        DriverKind::File { path: path.to_owned(), size_bytes: None, volatile_cache: None }
                    }
                    (None, None) => DriverKind::Null { size_bytes: DEVICE_BYTES },
                };
                let mut ours = Ours::start(mode, driver, DEVICE_BYTES, disks, server.is_zero_copy(), cores)?;
                if let Some(per_second) = limit {
                    ours.limit_last(per_second)?;
                }
                Serving::Ours { ours: Box::new(ours), _behind: behind }
            }
            (Server::Plain, _) => {
                cores::pin(cores.receiver)?;
                Serving::Plain(Box::new(Plain::open(file.context("io_uring needs a file")?, DEVICE_BYTES)?))
            }
            _ => {
                let aio = if server == Server::QemuNative { Aio::Native } else { Aio::IoUring };
                Serving::Rival(Rival::start(file, aio, DEVICE_BYTES, disks, limit, directory, cores)?)
            }
        };
        Ok(Self { loads: Vec::new(), queues: 0, serving, disks, cores })
    }

    /// Connects to all disks with so many queues, unless it is.
    pub(super) fn connect(&mut self, queues: u16) -> Result<()> {
        if self.queues == queues {
            return Ok(());
        }
        self.loads.clear();
        cores::pin(self.cores.receiver)?;
        for disk in 0..usize::from(self.disks) {
            let (socket, ram) = match &self.serving {
                Serving::Ours { ours, .. } => (ours.socket(disk), ours.ram(disk)),
                Serving::Rival(rival) => (rival.socket(disk), None),
                Serving::Plain(_) => continue,
            };
            let disk_bytes = DEVICE_BYTES / u64::from(self.disks);
            let ram = ram.cloned().map_or_else(anonymous_ram, Ok)?;
            self.loads.push(Load::connect(socket, disk_bytes, queues, &ram)?);
        }
        self.queues = queues;
        Ok(())
    }

    /// Does a job on the first disk.
    pub(super) fn run(&mut self, job: Job, duration: Duration) -> Result<Measured> {
        let waiting = self.waiting();
        match (&mut self.serving, self.loads.first_mut()) {
            (Serving::Plain(plain), _) => plain.run(job, duration),
            (_, load) => load.context("it was connected")?.run(job, duration, waiting),
        }
    }

    /// Does a job on the first disk while the second one is busy with another.
    pub(super) fn run_beside(&mut self, job: Job, neighbours: Job, duration: Duration) -> Result<Measured> {
        let waiting = self.waiting();
        let [first, second] = &mut self.loads[..] else {
            anyhow::bail!("there are not two disks");
        };
        first.run_beside(job, (second, neighbours), duration, waiting)
    }

    pub(super) fn threads(&self) -> Result<Threads> {
        match &self.serving {
            Serving::Ours { ours, .. } => ours.threads(),
            Serving::Rival(rival) => rival.threads(),
            Serving::Plain(plain) => plain.threads(),
        }
    }

    const fn waiting(&self) -> Waiting {
        match self.serving {
            Serving::Ours { .. } => Waiting::Yielding,
            Serving::Rival(_) | Serving::Plain(_) => Waiting::Spinning,
        }
    }
}
