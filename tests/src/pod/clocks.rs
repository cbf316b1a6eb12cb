//! Clocks of their own for processes of a pod: the time of day by libfaketime, and what only goes on by time namespaces.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, bail};

use super::Pod;
use super::plan::Clocks;
use crate::namespace::Namespace;

/// Lies to a process about the time of day.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

/// Where it keeps two files for each process, which it does not remove.
const SHARED: &str = "/dev/shm";

/// How far the clocks that only go on are from the machine's, in seconds: on hosts that were started days and years ago, and on one that
/// has just been started.
const AHEAD: [Option<i64>; 5] = [Some(86_400), Some(3 * 365 * 86_400), None, Some(17 * 86_400), Some(50_000)];

/// So much more a host was suspended, for each place.
const SUSPENDED: i64 = 3600;

/// How often a process without a host was started.
static STARTS: AtomicUsize = AtomicUsize::new(0);

impl Pod {
    /// A command line of this release of a program that runs in a namespace, with the clocks of a host; the controller's are its own.
    pub(super) fn command_in(
        &self,
        namespace: &Namespace,
        host: Option<&str>,
        binary: &str,
    ) -> Result<Command> {
        let path = self.release_binary(binary);
        let far = self.plan.clocks == Clocks::OfEachHost;
        let program = if far { Path::new("unshare") } else { &path };
        let mut command =
            if self.plan.keep { namespace.untethered_command(program) } else { namespace.command(program) };
        if far {
            let host = host.and_then(|host| self.plan.hosts.iter().position(|it| it.name == host));
            let place = host.map_or_else(|| 2 * STARTS.fetch_add(1, Ordering::Relaxed), |host| host + 1);
            let ahead = match AHEAD[place % AHEAD.len()] {
                Some(ahead) => ahead,
                None => 5 - uptime()?,
            };
            command.arg("--time").arg(format!("--monotonic={ahead}"));
            let place = i64::try_from(place).unwrap_or(0);
            command.arg(format!("--boottime={}", ahead + SUSPENDED * place)).arg("--").arg(path);
        }
        command.env("RUST_LOG", env::var("WADI_LOG").unwrap_or_else(|_| "info".to_owned()));
        Ok(command)
    }

    /// Sets the clock of a process, `controller` or such as `h1-net-frontend`, so far before the machine's or behind it: `+1d`, `-40y`.
    pub fn set_clock(&self, name: &str, offset: &str) -> Result<()> {
        let (file, next) = (self.clock(name), self.clock(&format!("{name}.next")));
        fs::write(&next, offset)?;
        Ok(fs::rename(next, file)?)
    }

    fn clock(&self, name: &str) -> PathBuf {
        self.directory.join(format!("clock-{name}"))
    }

    /// Has a process that is about to start ask libfaketime for the time of day, if it is to have a clock of its own.
    pub(super) fn give_clock(&self, name: &str, command: &mut Command) -> Result<()> {
        if self.plan.clocks != Clocks::OfEachProcess {
            return Ok(());
        }
        if !Path::new(FAKETIME).exists() {
            bail!("{FAKETIME} is not here: apt-get install libfaketime");
        }
        if !self.clock(name).exists() {
            self.set_clock(name, "+0")?;
        }
        command.env("LD_PRELOAD", FAKETIME).env("FAKETIME_TIMESTAMP_FILE", self.clock(name));
        // It looks at the file each time it is asked, and leaves the clock alone that only ever goes on.
        command.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Ok(())
    }

    /// Removes what libfaketime left behind for processes that are no more.
    pub(super) fn remove_clocks(&self) {
        if self.plan.clocks != Clocks::OfEachProcess {
            return;
        }
        for file in fs::read_dir(SHARED).into_iter().flatten().flatten() {
            let name = file.file_name();
            let name = name.to_string_lossy();
            let pid = name.strip_prefix("faketime_shm_").or_else(|| name.strip_prefix("sem.faketime_sem_"));
            if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                let _ = fs::remove_file(file.path());
            }
        }
    }
}

/// For how many seconds this machine has been running.
fn uptime() -> Result<i64> {
    let text = fs::read_to_string("/proc/uptime")?;
    let seconds = text.split('.').next().and_then(|seconds| seconds.parse().ok());
    seconds.with_context(|| format!("no uptime: {text}"))
}
