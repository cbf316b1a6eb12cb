//! A thread of a daemon that does not come back from where it is, as from a driver whose device never answers. The other ones go on.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::process::Daemon;
use crate::runner;

/// Traces one thread, and holds it until it is killed.
const HOLD: &str = r#"
import ctypes, os, sys
thread, ALL = int(sys.argv[1]), 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
    if libc.ptrace(request, thread, None, None) < 0:
        sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(thread, ALL)
print("held", flush=True)
os.waitpid(thread, ALL)
"#;

/// While it lives the thread stands still; dropping it lets it go on.
#[derive(Debug)]
pub struct StuckThread(Child);

impl StuckThread {
    /// Holds the daemon's thread of this name.
    pub fn hold(daemon: &Daemon, name: &str) -> Result<Self> {
        let pid = daemon.pid().with_context(|| format!("{} does not run", daemon.name()))?;
        let thread = thread_named(&Path::new("/proc").join(pid.to_string()).join("task"), name)?
            .with_context(|| format!("{} has no thread {name}", daemon.name()))?;
        let mut command = Command::new("python3");
        command.args(["-c", HOLD, &thread]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut tracer = runner::spawn(command).context("cannot start python3")?;
        let mut line = String::new();
        if let Some(says) = tracer.stdout.take() {
            BufReader::new(says).read_line(&mut line)?;
        }
        let held = Self(tracer);
        if line.trim() != "held" {
            bail!("the thread {name} of {} cannot be held", daemon.name());
        }
        Ok(held)
    }
}

impl Drop for StuckThread {
    fn drop(&mut self) {
        // It has ended if its thread has.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn thread_named(tasks: &Path, name: &str) -> Result<Option<String>> {
    for task in fs::read_dir(tasks)? {
        let task = task?;
        if fs::read_to_string(task.path().join("comm"))?.trim() == name {
            return Ok(Some(task.file_name().to_string_lossy().into_owned()));
        }
    }
    Ok(None)
}
