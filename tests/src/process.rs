//! Programs that a pod consists of: started, watched, killed, started again.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::runner;

/// The logs of all programs that run now, for whoever has to explain a failure.
static LOGS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// How much of a log is shown.
const LINES_SHOWN: usize = 25;

/// The ticks per second of `/proc/PID/stat`; Linux fixes it for user space.
const TICKS_PER_SECOND: f64 = 100.0;

/// How long a program may take to end in good order.
const STOP_DEADLINE: Duration = Duration::from_secs(5);
/// How long the kernel may take to clear away one that was killed. Of what it does for it by then, some waits for disks or for a turn.
const GONE_DEADLINE: Duration = Duration::from_mins(1);

/// A program that runs until it is told otherwise; dropping it ends it.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    log: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// Starts `command`; what it says goes to the end of the file `log`.
    pub fn start(name: &str, command: Command, log: &Path) -> Result<Self> {
        let mut daemon = Self { name: name.to_owned(), log: log.to_owned(), child: None };
        let mut logs = LOGS.lock().unwrap_or_else(PoisonError::into_inner);
        if !logs.contains(&daemon.log) {
            logs.push(daemon.log.clone());
        }
        drop(logs);
        daemon.start_again(command)?;
        Ok(daemon)
    }

    /// Starts it again after it ended.
    pub fn start_again(&mut self, mut command: Command) -> Result<()> {
        if self.running() {
            bail!("{} runs already", self.name);
        }
        let log = append(&self.log)?;
        let errors = log.try_clone()?;
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        self.child = Some(runner::spawn(command).with_context(|| format!("cannot start {}", self.name))?);
        Ok(())
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it has said so far.
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Whether it runs.
    pub fn running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Fails with what it said if it has ended.
    pub fn check(&mut self) -> Result<()> {
        if self.running() {
            return Ok(());
        }
        let status = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
        bail!(
            "{} has ended ({}); it said:\n{}",
            self.name,
            status.map_or_else(|| "not started".to_owned(), |status| status.to_string()),
            last_lines(&self.log)
        );
    }

    /// Kills it as `kill -9` does and waits until it is gone.
    pub fn kill(&mut self) -> Result<()> {
        self.signal(Signal::KILL)?;
        self.wait(GONE_DEADLINE).map(drop)
    }

    /// Has it stand still, as a machine that is paused does; it notices nothing. None of its threads does anything when this returns.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        // A thread that is in the kernel stops when it leaves that. One that has ended is no child to wait for.
        waitid(WaitId::Pid(self.process()?), WaitIdOptions::STOPPED)
            .with_context(|| format!("{} does not stand still", self.name))?;
        Ok(())
    }

    /// Lets it go on.
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Asks it to end in good order and waits until it has.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait(STOP_DEADLINE)
    }

    /// Asks it to end in good order, and does not wait.
    pub(crate) fn ask_to_stop(&mut self) {
        // One that has ended needs no asking.
        let _ = self.signal(Signal::TERM);
    }

    /// Waits until it ends.
    pub fn wait(&mut self, deadline: Duration) -> Result<ExitStatus> {
        let Some(child) = self.child.as_mut() else { bail!("{} does not run", self.name) };
        let started = Instant::now();
        loop {
            if let Some(status) = child.try_wait()? {
                self.child = None;
                return Ok(status);
            }
            if started.elapsed() > deadline {
                bail!("{} has not ended within {} s", self.name, deadline.as_secs());
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The processor time that it has used so far.
    pub fn cpu_time(&self) -> Result<Duration> {
        let Some(pid) = self.pid() else { bail!("{} does not run", self.name) };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let ticks = cpu_ticks(&stat).with_context(|| format!("cannot read the times in {stat:?}"))?;
        Ok(Duration::from_secs_f64(f64::from(ticks) / TICKS_PER_SECOND))
    }

    /// How often its threads have gone to sleep and were woken so far. One that ends takes what it did with it.
    pub fn wakeups(&self) -> Result<u64> {
        let Some(pid) = self.pid() else { bail!("{} does not run", self.name) };
        let mut sum = 0;
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            // It may have ended meanwhile.
            let Ok(status) = fs::read_to_string(thread?.path().join("status")) else { continue };
            sum += voluntary_switches(&status)
                .with_context(|| format!("cannot read how often it slept in {status:?}"))?;
        }
        Ok(sum)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        // Until the child was waited for, its id is nobody else's.
        kill_process(self.process()?, signal)
            .with_context(|| format!("cannot send a signal to {}", self.name))
    }

    fn process(&self) -> Result<Pid> {
        let pid = self.pid().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        pid.with_context(|| format!("{} does not run", self.name))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.running() && self.stop().is_err() {
            let _ = self.kill();
        }
        LOGS.lock().unwrap_or_else(PoisonError::into_inner).retain(|log| *log != self.log);
    }
}

/// User and system time of a line of `/proc/PID/stat`, in ticks.
fn cpu_ticks(stat: &str) -> Option<u32> {
    // The name before it is in parentheses and may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u32>().ok()? + fields.get(12)?.parse::<u32>().ok()?)
}

/// What a thread's `/proc/PID/task/TID/status` says of how often it gave up its core by itself.
fn voluntary_switches(status: &str) -> Option<u64> {
    let said = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    said?.trim().parse().ok()
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

pub(crate) fn last_lines(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n")
}

/// Shows the end of every log that is open now.
pub(crate) fn show_logs() {
    let logs = LOGS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for log in logs {
        eprintln!("--- {} ---\n{}", log.display(), last_lines(&log));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_past_a_strange_name() {
        let stat = "42 (a (strange) name) S 1 42 42 0 -1 4194304 90 0 0 0 17 5 0 0 20 0 3 0 99 1 2";
        assert_eq!(cpu_ticks(stat), Some(22));
    }

    #[test]
    fn only_what_a_thread_does_by_itself_is_counted() {
        let status = "Name:\tcontroller\nvoluntary_ctxt_switches:\t1358\nnonvoluntary_ctxt_switches:\t395\n";
        assert_eq!(voluntary_switches(status), Some(1358));
        assert_eq!(voluntary_switches("nonvoluntary_ctxt_switches:\t395\n"), None);
    }

    #[test]
    fn a_daemon_is_killed_and_started_again() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let command = || {
            let mut command = Command::new("sh");
            command.args(["-c", "echo here; exec sleep 100"]);
            command
        };
        let mut daemon = Daemon::start("sleeper", command(), &log).unwrap();
        while daemon.said() != "here\n" {
            thread::sleep(Duration::from_millis(1));
        }
        daemon.check().unwrap();
        daemon.kill().unwrap();
        assert!(daemon.check().is_err());
        daemon.start_again(command()).unwrap();
        daemon.stop().unwrap();
    }
}
