//! Processes that may be somebody else's, told apart from those that get their id later.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// A process. Ids are used again; together with when it started, an id names one process until the machine is booted again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// When it started, in clock ticks since the machine was booted.
    pub started: u64,
}

impl Process {
    /// The process that has this id now, unless there is none or it has ended.
    pub fn with_id(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(Self { pid, started: started(&stat)? })
    }

    /// Whether it still runs. One that has ended and was not waited for does not.
    pub fn runs(self) -> bool {
        Self::with_id(self.pid) == Some(self)
    }

    /// The process of the thread with this id.
    pub fn of_thread(thread: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
        let pid = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()?;
        Self::with_id(pid)
    }

    /// The words of its command line.
    pub(crate) fn command_line(self) -> io::Result<Vec<String>> {
        let bytes = fs::read(format!("/proc/{}/cmdline", self.pid))?;
        let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        let mut words: Vec<String> = words.collect();
        // Each word ends with a zero.
        words.pop();
        Ok(words)
    }

    /// Its working directory.
    pub(crate) fn directory(self) -> PathBuf {
        fs::read_link(format!("/proc/{}/cwd", self.pid)).unwrap_or_else(|_| PathBuf::from("/"))
    }

    /// What a variable of the environment that it was started with says.
    pub(crate) fn environment(self, variable: &str) -> Option<String> {
        let bytes = fs::read(format!("/proc/{}/environ", self.pid)).ok()?;
        bytes.split(|byte| *byte == 0).find_map(|word| {
            let word = std::str::from_utf8(word).ok()?;
            word.strip_prefix(variable)?.strip_prefix('=').map(str::to_owned)
        })
    }

    /// Kills it, and nobody who has its id by now.
    pub(crate) fn kill(self) -> io::Result<()> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(()) };
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => process,
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        // From here on the descriptor names one process, whatever becomes of the id.
        if !self.runs() {
            return Ok(());
        }
        match pidfd_send_signal(&process, Signal::KILL) {
            Err(rustix::io::Errno::SRCH) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until it has ended. Returns whether it has.
    pub(crate) fn wait_until_gone(self, deadline: Duration) -> bool {
        let began = Instant::now();
        while self.runs() {
            if began.elapsed() > deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(10));
        }
        true
    }
}

/// When the process started, by its line of `/proc/PID/stat`; none if it has ended.
fn started(stat: &str) -> Option<u64> {
    // The name before it is in parentheses and may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let ended = matches!(fields.next()?, "Z" | "X");
    let started = fields.nth(18)?.parse().ok()?;
    (!ended).then_some(started)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_line_is_read_past_a_strange_name() {
        let line = |state: &str| {
            format!("42 (a (strange) name) {state} 1 42 42 0 -1 4194304 90 0 0 0 17 5 0 0 20 0 3 0 99 1 2")
        };
        assert_eq!(started(&line("S")), Some(99));
        assert_eq!(started(&line("Z")), None);
        assert_eq!(started("42 (cut"), None);
    }

    #[test]
    fn another_process_with_its_id_is_another() {
        let own = Process::with_id(std::process::id()).unwrap();
        assert!(own.runs());
        assert_eq!(Process::of_thread(own.pid), Some(own));
        let earlier = Process { started: own.started - 1, ..own };
        assert!(!earlier.runs());
        // Nobody is killed for having its id.
        earlier.kill().unwrap();
    }

    #[test]
    fn one_that_was_killed_is_gone_although_nobody_waited_for_it() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::with_id(child.id()).unwrap();
        assert!(!process.wait_until_gone(Duration::from_millis(1)));
        process.kill().unwrap();
        assert!(process.wait_until_gone(Duration::from_secs(20)));
        process.kill().unwrap();
        child.wait().unwrap();
    }
}
