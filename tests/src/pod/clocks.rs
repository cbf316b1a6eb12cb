//! A clock of its own for each process of a pod, by libfaketime.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use super::Pod;

/// Lies to a process about the time of day.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

/// Where it keeps two files for each process, which it does not remove.
const SHARED: &str = "/dev/shm";

impl Pod {
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
        if !self.plan.own_clocks {
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
        if !self.plan.own_clocks {
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
